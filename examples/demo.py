"""What `make demo` shows: answers from `legato generate`, then its speed beside one-at-a-time `model.generate`."""

import json
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from legato import LLM, AutoModelForCausalLM, AutoTokenizer, SamplingParams

MODEL = "smollm2"
PROMPTS = Path(__file__).with_name("prompts.jsonl")
NEW_TOKENS = 64
NUM_ONE_AT_A_TIME = 8


def generate_with_the_command_line() -> list[dict[str, Any]]:
    """Results of `legato generate`, run as one would in a shell."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "answers.jsonl"
        command = [Path(sys.executable).with_name("legato"), "generate", "--model", MODEL, "--prompts", PROMPTS]
        command += ["--output", output, "--max-new-tokens", NEW_TOKENS]
        print("$", " ".join([".venv/bin/legato", *map(str, command[1:])]), flush=True)
        subprocess.run(list(map(str, command)), check=True)
        return [json.loads(line) for line in output.read_text(encoding="utf-8").split("\n") if line]


def show(lines: list[dict[str, Any]], results: list[dict[str, Any]]) -> None:
    for line, result in zip(lines, results, strict=True):
        prompt = line["prompt"] if "prompt" in line else line["messages"][-1]["content"]
        cut = "..." if result["finish_reason"] == "length" else ""
        print(f"\n[{result['index'] + 1}] {textwrap.shorten(prompt, 100)}")
        answer = textwrap.shorten(result["text"], 280) + cut
        print(textwrap.fill(answer, 100, initial_indent="    ", subsequent_indent="    "))


def encode(tokenizer: Any, line: dict[str, Any]) -> list[int]:
    if "prompt" in line:
        return tokenizer(line["prompt"])["input_ids"]
    return tokenizer.apply_chat_template(line["messages"], add_generation_prompt=True)["input_ids"]


def measure_legato(llm: LLM, prompts: list[list[int]], budgets: list[int]) -> tuple[int, float]:
    """(new tokens, seconds) of all prompts at once, greedy."""
    params = [SamplingParams(temperature=0, max_tokens=budget) for budget in budgets]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    return sum(len(output.generated_tokens) for output in outputs), time.perf_counter() - start


def measure_one_at_a_time(model: Any, prompts: list[list[int]], budgets: list[int]) -> tuple[int, float]:
    """The same through transformers' `model.generate`, a prompt after the other."""
    tokens, start = 0, time.perf_counter()
    for prompt, budget in zip(prompts, budgets, strict=True):
        ids = torch.tensor([prompt])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=budget, do_sample=False)
        tokens += output.shape[1] - len(prompt)
    return tokens, time.perf_counter() - start


def main() -> None:
    lines = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").split("\n") if line]
    show(lines, generate_with_the_command_line())

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    prompts = [encode(tokenizer, line) for line in lines]
    budgets = [line.get("max_new_tokens", NEW_TOKENS) for line in lines]
    first = slice(NUM_ONE_AT_A_TIME)

    print("\nThroughput, float32, greedy; loading is not counted.", flush=True)
    with LLM(model, tokenizer) as llm:
        measure_legato(llm, prompts[:1], [1])  # makes the cache
        tokens, seconds = measure_legato(llm, prompts, budgets)
    rate = tokens / seconds
    print(
        f"  Legato, all {len(prompts)} prompts: {tokens} new tokens in {seconds:.1f} s, {rate:.1f} tokens/s", flush=True
    )

    print("  model.generate, one at a time, takes a little longer ...", flush=True)
    measure_one_at_a_time(model, prompts[:1], [1])
    tokens, seconds = measure_one_at_a_time(model, prompts[first], budgets[first])
    alone = tokens / seconds
    print(f"  model.generate, one at a time, first {NUM_ONE_AT_A_TIME}: ", end="")
    print(f"{tokens} new tokens in {seconds:.1f} s, {alone:.1f} tokens/s")
    print(f"  Legato is {rate / alone:.1f} times as fast.")


if __name__ == "__main__":
    main()
