"""What an engine tells of each step to whoever watches it: a timeline, a trace, a simulation's report."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of an engine.

    Attributes:
        started, ended: seconds on the engine's clock (`time.perf_counter()` unless simulated).
        arrived: when each request that joined the queue since the last step was made, by id, on the same clock.
        prefilled: prompt tokens processed, by id; after a soft reset, generated tokens that are processed again too.
        decoded: ids of requests that processed their newest token, alone or with guesses behind it.
        offloaded: ids of requests whose blocks went to the host before this step's pass.
        reset: ids of requests whose blocks were dropped before it: they start over (soft reset).
        finished: ids of requests that ended in this step, well or not.
        num_batch_tokens: tokens of the forward pass; 0 when there was none.
        cache_used_share: share of the cache that requests own after the step, from 0 to 1.
        num_running, num_waiting, num_offloaded: requests after the step; waiting ones include soft-reset and not
            offloaded ones.
    """

    started: float
    ended: float
    arrived: dict[str, float]
    prefilled: dict[str, int]
    decoded: tuple[str, ...]
    offloaded: tuple[str, ...]
    reset: tuple[str, ...]
    finished: tuple[str, ...]
    num_batch_tokens: int
    cache_used_share: float
    num_running: int
    num_waiting: int
    num_offloaded: int


StepObserver = Callable[[StepRecord], None]
