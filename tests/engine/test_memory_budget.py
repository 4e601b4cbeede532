"""Sizing that holds: a full cache and the largest batch stay within the memory budget, measured in a fresh process."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import legato
from legato.config import ContinuousBatchingConfig
from legato.engine import assemble, sizing
from legato.request import GenerationOutput

MIB = 1 << 20
PAGE_SIZE = 16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "samples", "budget"),
    [("smollm2", False, 300 * MIB), ("smollm2", True, 300 * MIB), ("gemma3", False, 400 * MIB)],
)
def test_a_full_cache_and_the_largest_batch_stay_within_the_budget(model: str, samples: bool, budget: int) -> None:
    check(run_in_a_process(model, "cpu", samples, budget))


@pytest.mark.slow
@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("model", "samples"), [("smollm2", False), ("smollm2", True), ("gemma3", False)])
def test_so_they_do_on_cuda(model: str, samples: bool) -> None:
    check(run_in_a_process(model, "cuda", samples, 1024 * MIB))


def check(seen: dict[str, Any]) -> None:
    assert seen["growth"] <= 1.05 * seen["budget"], seen
    assert seen["growth"] >= 0.25 * seen["budget"], seen  # not all that may be used is here: prompts could be longer
    assert seen["cache_used_share"] >= 0.95, seen
    assert seen["num_batch_tokens"] == seen["max_batch_tokens"], seen
    assert seen["num_batch_requests"] == seen["max_requests_per_batch"], seen
    assert seen["longest"] > 2 * seen["max_batch_tokens"], seen  # a prompt in several chunks


def run_in_a_process(model: str, device: str, samples: bool, budget: int) -> dict[str, Any]:
    """What `main` prints, run in a Python of its own: RSS never shrinks back to where it began."""
    if device == "cpu" and not Path("/proc/self/clear_refs").exists():
        pytest.skip("no /proc/self/clear_refs to reset the peak of the resident memory with")
    arguments = json.dumps([model, device, samples, budget])
    done = subprocess.run([sys.executable, __file__, arguments], stdout=subprocess.PIPE, check=True, timeout=550)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


# In the process


class HostMemory:
    """Growth of this process's resident memory since this was made."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
        self._before = self._read("VmRSS")

    def peak_growth(self) -> int:
        return self._read("VmHWM") - self._before

    @staticmethod
    def _read(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


class CudaMemory:
    """Growth of what torch holds of the device since this was made, what it keeps for later included."""

    def __init__(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_reserved()

    def peak_growth(self) -> int:
        return torch.cuda.max_memory_reserved() - self._before


def main(name: str, device: str, samples: bool, budget: int) -> dict[str, Any]:
    model = legato.AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).to(device).eval()
    generation_config = GenerationConfig(do_sample=samples, temperature=0.8, top_k=50, top_p=0.9, eos_token_id=-1)
    started = grant(budget, HostMemory if device == "cpu" else CudaMemory)
    manager = model.init_continuous_batching(
        generation_config,
        ContinuousBatchingConfig(page_size=PAGE_SIZE, safety_margin=0.0, return_logprobs=samples),
    )
    size = manager._facts.size
    seen = {"num_batch_tokens": 0, "num_batch_requests": 0, "cache_used_share": 0.0}
    finished = threading.Semaphore(0)

    def watch(output: GenerationOutput) -> None:  # runs in the engine's thread, right after the step
        for field in seen:
            seen[field] = max(seen[field], getattr(manager.stats, field))
        if output.is_finished():
            finished.release()

    prompts = Prompts(model.config.get_text_config().vocab_size)
    manager.start()
    for lengths, new_tokens in (largest_batch(size), full_cache(size), longest_prompt(manager)):
        with manager.pause():  # so that they all come to one step
            for i, length in enumerate(lengths):
                manager.register_result_handler(f"{len(lengths)}-{new_tokens}-{i}", watch)
                manager.add_request(
                    prompts.make(length), f"{len(lengths)}-{new_tokens}-{i}", max_new_tokens=new_tokens, streaming=True
                )
        for _ in lengths:
            finished.acquire()
    manager.stop()
    return {
        **seen,
        "budget": budget,
        "growth": started[-1].peak_growth(),
        "pool_bytes": size.pool_bytes,
        "step_bytes": size.step_bytes,
        "max_batch_tokens": size.max_batch_tokens,
        "max_requests_per_batch": size.max_requests_per_batch,
        "longest": lengths[0],
    }


def grant(budget: int, memory: type[HostMemory] | type[CudaMemory]) -> list[HostMemory | CudaMemory]:
    """Let the manager that is made next have this much; the list gets what measures the memory taken from then on.

    Packed weights are there before, and are not part of it.
    """
    started: list[HostMemory | CudaMemory] = []

    def granting(*_: Any) -> int:
        started.append(memory())
        return budget

    assemble.usable_bytes = granting
    return started


class Prompts:
    """Random prompts, no two of them with a page in common."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._generator = torch.Generator().manual_seed(0)

    def make(self, length: int) -> list[int]:
        return torch.randint(self._vocab_size, (length,), generator=self._generator).tolist()


Load = tuple[list[int], int]  # lengths of prompts; new tokens of each


def largest_batch(size: sizing.CacheSize) -> Load:
    """Every row there may be, in one step of as many tokens as there may be."""
    tokens, rows = size.max_batch_tokens, size.max_requests_per_batch
    return [tokens // rows + (i < tokens % rows) for i in range(rows)], 2


def full_cache(size: sizing.CacheSize) -> Load:
    """As many rows as there may be, alive until all of them have been read: together they need every block."""
    pages, more = divmod(size.num_blocks, size.max_requests_per_batch)
    new_tokens = size.num_blocks * PAGE_SIZE // size.max_batch_tokens + 5
    rows = range(size.max_requests_per_batch)
    return [(pages + (i < more)) * PAGE_SIZE - new_tokens for i in rows], new_tokens


def longest_prompt(manager: Any) -> Load:
    """One prompt in many chunks: the longest that the cache holds, or that takes a bearable time."""
    return [min(manager._facts.max_request_tokens, manager._facts.shape.max_length, 4096) - 2], 2


if __name__ == "__main__":
    print(json.dumps(main(*json.loads(sys.argv[1]))))
