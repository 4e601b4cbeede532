"""Where a forward pass spends its time: wrappers that measure and change nothing."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from legato.bench.floor import PassShape
from legato.engine.batch import Batch, StepResult
from legato.engine.engine import BatchRunner
from legato.kernels.interface import Kernels

_PARTS = {"attention": "attention", "rotate_and_store": "attention"}
OTHER = "norms, gates"  # and whatever else kernels do


@dataclass
class PassTimes:
    """Filled by the wrappers below.

    Attributes:
        vocab_size: width of the head's product, by which it is told from other ones.
        parts: seconds of each part so far; of those only that some kernel has worked for.
        passes: seconds of all forward passes so far, sampling included.
        shapes: of each of them.
        head_ended: when the head's last product ended, in this pass; None: not yet.
    """

    vocab_size: int
    parts: dict[str, float] = field(default_factory=dict)
    passes: float = 0.0
    shapes: list[PassShape] = field(default_factory=list)
    head_ended: float | None = None

    def clear(self) -> None:
        """Forget what was before."""
        self.passes, self.head_ended = 0.0, None
        self.parts.clear()
        self.shapes.clear()

    def kernels(self, kernels: Kernels) -> Kernels:
        """The same, timed."""
        return cast(Kernels, TimedKernels(kernels, self))

    def runner(self, runner: BatchRunner) -> BatchRunner:
        """The same, timed."""
        return TimedRunner(runner, self)

    def begin_pass(self) -> None:
        self.head_ended = None

    def add(self, part: str, seconds: float) -> None:
        self.parts[part] = self.parts.get(part, 0.0) + seconds


class TimedKernels:
    """A `legato.kernels.interface.Kernels` that delegates to another one and times every method.

    Built as it is asked for methods, so that a kernel which is new to the interface is measured too, as `OTHER`.

    Args:
        kernels: does the work.
        times: takes the seconds.
    """

    def __init__(self, kernels: Any, times: PassTimes) -> None:
        self._kernels = kernels
        self._times = times
        self.name = kernels.name

    def pack(self, *arguments: Any, **settings: Any) -> Any:
        """Not timed: it is done before the first pass."""
        return self._kernels.pack(*arguments, **settings)

    def linear(self, x: Any, packed: Any, out: Any) -> None:
        start = time.perf_counter()
        self._kernels.linear(x, packed, out)
        end = time.perf_counter()
        is_head = out.shape[-1] == self._times.vocab_size
        self._times.add("head" if is_head else "projections", end - start)
        if is_head:
            self._times.head_ended = end

    def gated_linear(self, *arguments: Any) -> None:
        start = time.perf_counter()
        self._kernels.gated_linear(*arguments)
        self._times.add("projections", time.perf_counter() - start)

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Every pass call by call: what is replayed as one cannot be told apart."""
        run()
        return run

    def __getattr__(self, name: str) -> Any:
        """Asked for once a method: the timed one then lies in the instance."""
        method = getattr(self._kernels, name)
        if not callable(method):
            return method
        timed = self._timed(method, _PARTS.get(name, OTHER))
        setattr(self, name, timed)
        return timed

    def _timed(self, method: Callable[..., Any], part: str) -> Callable[..., Any]:
        def run(*arguments: Any, **settings: Any) -> Any:
            start = time.perf_counter()
            result = method(*arguments, **settings)
            self._times.add(part, time.perf_counter() - start)
            return result

        return run


class TimedRunner:
    """A runner that delegates to another one, and notes the shape and the time of every pass.

    Args:
        runner: does the work.
        times: takes the figures. What follows the head's product in a pass is sampling.
    """

    def __init__(self, runner: BatchRunner, times: PassTimes) -> None:
        self._runner = runner
        self._times = times

    def weights_version(self) -> int:
        return self._runner.weights_version()

    def weights_sample(self) -> int:
        return self._runner.weights_sample()

    def reread_weights(self) -> None:
        self._runner.reread_weights()

    def run(self, batch: Batch) -> StepResult:
        times = self._times
        times.begin_pass()
        start = time.perf_counter()
        result = self._runner.run(batch)
        end = time.perf_counter()
        times.passes += end - start
        times.shapes.append(shape_of(batch))
        if times.head_ended is not None:
            times.add("sampling", end - times.head_ended)
        return result


def shape_of(batch: Batch) -> PassShape:
    """What the floor of a batch depends on."""
    queries = (batch.cu_seqlens_q[1:] - batch.cu_seqlens_q[:-1]).tolist()
    return PassShape(tuple(zip(queries, batch.seqused_k.tolist(), strict=True)), len(batch.logits_indices))
