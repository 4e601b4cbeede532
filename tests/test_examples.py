"""Every example runs as a user would run it, and prints what it is there to show."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from legato.prompt_file import read_lines
from tests.parity.reference import reference

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, folder: Path) -> list[str]:
    """The lines that an example prints."""
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, EXAMPLES / f"{name}.py"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def answers(smollm2: Any, smollm2_tokenizer: Any) -> Any:
    """What `model.generate` alone says after a prompt, as printed lines."""

    def answer(prompt: str, max_new_tokens: int) -> list[str]:
        tokens = reference(smollm2, smollm2_tokenizer.encode(prompt), max_new_tokens).tokens
        return smollm2_tokenizer.decode(tokens, skip_special_tokens=True).splitlines()

    return answer


def test_all_examples_are_tested_and_listed() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert names - {"demo"} <= tested
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}.py`" in readme for name in names)


def test_quickstart(tmp_path: Path) -> None:
    lines = run("quickstart", tmp_path)
    answers = [line for line in lines if line.startswith("[req_")]
    assert [answer[:7] for answer in answers] == ["[req_0]", "[req_1]", "[req_2]"]
    assert all(len(answer) > 20 for answer in answers)


def test_context_manager(tmp_path: Path, answers: Any) -> None:
    text = "\n".join(run("context_manager", tmp_path))
    assert sorted(re.findall(r"^\[(\w+)\] ", text, re.MULTILINE)) == ["long", "short_0", "short_1"]
    assert "\n".join(answers("Name a cat breed.", 32)) in text


def test_streaming(tmp_path: Path, answers: Any) -> None:
    lines = run("streaming", tmp_path)
    story = answers("Once upon a time", 24)
    assert lines[: len(story)] == story
    assert len(lines) >= len(story) + 2


def test_lifecycle(tmp_path: Path) -> None:
    lines = run("lifecycle", tmp_path)
    assert "cancelled" in lines
    assert lines.index("running: False") > lines.index("cancelled")
    assert lines[-1] == "abandoned RuntimeError: the manager was stopped before the request finished"


def test_configuration(tmp_path: Path, answers: Any) -> None:
    lines = run("configuration", tmp_path)
    assert lines[0].startswith("ContinuousBatchingConfig(page_size=256, num_blocks=4096, max_batch_tokens=512, ")
    assert lines[1:] == answers("Water boils at", 8)


def test_logprobs(tmp_path: Path, smollm2: Any, smollm2_tokenizer: Any) -> None:
    pairs = [line.split(" | logprob: ") for line in run("logprobs", tmp_path)]
    assert len(pairs) == 8
    assert [token for token, _ in pairs] == [
        smollm2_tokenizer.decode([i])
        for i in reference(smollm2, smollm2_tokenizer.encode("Roses are red, violets are"), 8).tokens
    ]
    assert all(-10 < float(logprob) < 0 for _, logprob in pairs)


def test_sampling(tmp_path: Path) -> None:
    assert len("".join(run("sampling", tmp_path))) > 40


def test_sliding_window(tmp_path: Path) -> None:
    lines = run("sliding_window", tmp_path)
    assert "3 full, 15 sliding (4096) attention layers" in lines[0]
    assert len(lines) > 1


def test_llm(tmp_path: Path, answers: Any) -> None:
    lines = run("llm", tmp_path)
    assert lines[0] == f"length {chr(10).join(answers('The capital of France is', 16))!r}"
    assert lines[1].split()[0] in ("length", "stop")
    assert any("4" in line for line in lines[2:])
    assert lines[-1]


def test_the_demos_prompts_are_many_and_valid() -> None:
    lines = read_lines(EXAMPLES / "prompts.jsonl", chat=False, common={"max_new_tokens": 64})
    assert [line.error for line in lines if line.error] == []
    asked = {json.dumps([line.fields.get(name) for name in ("prompt", "messages")]) for line in lines}
    assert len(asked) == len(lines) >= 24
    lengths = [len(text) for text in asked]
    assert max(lengths) > 5 * min(lengths)
    assert sum("messages" in line.fields for line in lines) > len(lines) / 2
