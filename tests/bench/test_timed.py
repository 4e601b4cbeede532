"""The wrappers that time a pass: they change nothing, and know what is what."""

from typing import Any, cast

import numpy as np
import pytest
import torch

from legato.bench.floor import PassShape
from legato.bench.model_work import stored
from legato.bench.timed import OTHER, PassTimes, TimedKernels, TimedRunner
from legato.engine.batch import Batch, StepResult
from legato.engine.engine import BatchRunner

VOCAB_SIZE = 7


class StubKernels:
    """Some kernels, in torch alone."""

    name = "stub"

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return weight.t()

    def linear(self, x: torch.Tensor, packed: torch.Tensor, out: torch.Tensor) -> None:
        torch.mm(x, packed, out=out)

    def attention(self, *, scale: float) -> float:
        return 2 * scale

    def rotate_and_store(self) -> None:
        pass

    def gated(self, x: torch.Tensor, out: torch.Tensor) -> None:
        torch.clamp(x, min=0, out=out)

    def fails(self) -> None:
        raise ValueError("as it should")


class StubRunner:
    """One layer, and a head where there is anything to sample."""

    def __init__(self, kernels: Any) -> None:
        self.kernels = kernels

    def weights_version(self) -> int:
        return 1

    def weights_sample(self) -> int:
        return 2

    def reread_weights(self) -> None:
        self.reread = True

    def run(self, batch: Batch) -> StepResult:
        hidden, logits = torch.empty(len(batch.input_ids), 3), torch.empty(len(batch.logits_indices), VOCAB_SIZE)
        self.kernels.linear(torch.ones(len(hidden), 4), self.kernels.pack(torch.ones(3, 4), None), hidden)
        if len(logits):
            self.kernels.linear(hidden[batch.logits_indices], torch.ones(3, VOCAB_SIZE), logits)
        return StepResult(logits.argmax(-1).tolist(), [None] * len(logits))


def batch(cu_seqlens_q: list[int], seqused_k: list[int], sampled: list[int]) -> Batch:
    """Of which only what the wrappers and the stubs look at is there."""
    nothing = cast(Any, None)
    return Batch(
        input_ids=np.zeros(cu_seqlens_q[-1], np.int64),
        position_ids=nothing,
        cu_seqlens_q=np.array(cu_seqlens_q),
        seqused_k=np.array(seqused_k),
        block_tables=nothing,
        slot_mappings=nothing,
        logits_indices=np.array(sampled, np.int64),
        sampling=nothing,
        scored=nothing,
    )


@pytest.fixture
def times() -> PassTimes:
    return PassTimes(VOCAB_SIZE)


def test_what_was_before_the_start_is_forgotten(times: PassTimes) -> None:
    runner = times.runner(StubRunner(times.kernels(cast(Any, StubKernels()))))
    runner.run(batch([0, 1], [9], [0]))
    assert times.parts and times.shapes and times.passes
    times.clear()
    assert times == PassTimes(VOCAB_SIZE)


def test_kernels_do_their_work_and_each_is_booked(times: PassTimes) -> None:
    kernels = TimedKernels(StubKernels(), times)
    assert kernels.name == "stub"
    out = torch.empty(2, 3)
    kernels.linear(torch.ones(2, 4), kernels.pack(torch.full((3, 4), 2.0), None), out)
    assert out.tolist() == [[8.0] * 3] * 2
    assert list(times.parts) == ["projections"]
    kernels.linear(torch.ones(2, 3), torch.ones(3, VOCAB_SIZE), torch.empty(2, VOCAB_SIZE))
    assert list(times.parts) == ["projections", "head"]
    assert kernels.attention(scale=3.0) == 6.0
    before = times.parts["attention"]
    kernels.rotate_and_store()
    assert times.parts["attention"] > before
    kernels.gated(-torch.ones(2, 3), out)
    assert out.sum() == 0
    assert list(times.parts) == ["projections", "head", "attention", OTHER]


def test_errors_and_missing_methods_pass_through(times: PassTimes) -> None:
    kernels = TimedKernels(StubKernels(), times)
    with pytest.raises(ValueError, match="as it should"):
        kernels.fails()
    with pytest.raises(AttributeError, match="no_such"):
        kernels.no_such()


def test_a_runner_notes_shapes_and_what_follows_the_head(times: PassTimes) -> None:
    inner = StubRunner(TimedKernels(StubKernels(), times))
    runner: BatchRunner = TimedRunner(inner, times)
    assert (runner.weights_version(), runner.weights_sample()) == (1, 2)
    runner.reread_weights()
    assert inner.reread
    assert runner.run(batch([0, 5], [5], [])).token_ids == []
    assert "sampling" not in times.parts  # nothing was sampled
    first = times.passes
    assert len(runner.run(batch([0, 1, 4], [9, 3], [0, 3])).token_ids) == 2
    assert times.shapes == [PassShape(((5, 5),), 0), PassShape(((1, 9), (3, 3)), 2)]
    assert times.parts["sampling"] > 0
    assert times.passes > first
    assert sum(times.parts.values()) < times.passes
    sampling = times.parts["sampling"]
    runner.run(batch([0, 5], [5], []))
    assert times.parts["sampling"] == sampling  # not counted from an earlier pass's head


def test_bytes_are_those_of_the_smallest_exact_form() -> None:
    exact = torch.tensor([[1.0, -0.5], [3.0, 2.0**-100]])
    inexact = exact + torch.tensor([[2.0**-20, 0], [0, 0]])
    assert stored(exact, quantized=False).num_bytes == 4 * 2
    assert stored(inexact, quantized=False).num_bytes == 4 * 4
    assert stored(inexact.half(), quantized=False).num_bytes == 4 * 2
    assert stored(inexact, quantized=True).num_bytes == 4
    assert stored(inexact, quantized=True).elements == 4
