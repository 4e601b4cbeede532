"""What became of every request, step by step."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from legato.engine.observer import StepRecord


class RequestState(IntEnum):
    """Where a request stands, in the order of the legend."""

    WAITING = 0  # from its arrival until it is first processed
    PREFILL = 1
    DECODE = 2
    OFFLOADED = 3  # its blocks are on the host
    RESET = 4  # its blocks were dropped; its recomputation is prefill again

    @property
    def label(self) -> str:
        return self.name.lower()


class Interval(NamedTuple):
    """A request was in `state` from `start` to `end`, in seconds on the engine's clock."""

    state: RequestState
    start: float
    end: float


class RequestLane:
    """One request's way through the states. Only changes take memory, 9 bytes each.

    Args:
        request_id: its id; a later request may have the same.
        arrived: when it was made, in seconds on the engine's clock.
    """

    __slots__ = ("_starts", "_states", "ended", "request_id")

    def __init__(self, request_id: str, arrived: float) -> None:
        self.request_id = request_id
        self.ended: float | None = None  # None: not finished
        self._states = bytearray([RequestState.WAITING])
        self._starts = array("d", [arrived])

    @property
    def arrived(self) -> float:
        return self._starts[0]

    def enter(self, state: RequestState, time: float) -> None:
        """Be in `state` from `time` on."""
        if self._states[-1] == state:
            return
        # A request may be made after the step that takes it in began.
        time = max(time, self._starts[-1])
        if time == self._starts[-1]:  # the state before took no time
            self._states.pop()
            self._starts.pop()
        if not self._states or self._states[-1] != state:
            self._states.append(state)
            self._starts.append(time)

    def finish(self, time: float) -> None:
        self.ended = max(time, self._starts[-1])

    def intervals(self, until: float) -> list[Interval]:
        """Its states in order, without a gap, neighbours never the same.

        Args:
            until: where an unfinished request's last interval ends.

        Returns:
            At least one interval. None is empty, but for that of a request that came and went at one instant.
        """
        end = max(until, self._starts[-1]) if self.ended is None else self.ended
        bounds = zip(self._states, self._starts, [*self._starts[1:], end], strict=True)
        intervals = [Interval(RequestState(state), start, stop) for state, start, stop in bounds]
        return intervals[:-1] if len(intervals) > 1 and intervals[-1].start == end else intervals


@dataclass(frozen=True, slots=True)
class StepSeries:
    """What was recorded of each step, 44 bytes a step; `StepRecord` says what the fields mean."""

    started: "array[float]" = field(default_factory=lambda: array("d"))
    ended: "array[float]" = field(default_factory=lambda: array("d"))
    num_batch_tokens: "array[int]" = field(default_factory=lambda: array("q"))
    cache_used_share: "array[float]" = field(default_factory=lambda: array("d"))
    num_running: "array[int]" = field(default_factory=lambda: array("i"))
    num_waiting: "array[int]" = field(default_factory=lambda: array("i"))
    num_offloaded: "array[int]" = field(default_factory=lambda: array("i"))

    def __len__(self) -> int:
        return len(self.started)

    def add(self, record: StepRecord) -> None:
        self.started.append(record.started)
        self.ended.append(record.ended)
        self.num_batch_tokens.append(record.num_batch_tokens)
        self.cache_used_share.append(record.cache_used_share)
        self.num_running.append(record.num_running)
        self.num_waiting.append(record.num_waiting)
        self.num_offloaded.append(record.num_offloaded)


class Timeline:
    """Follows an engine: give `Timeline.add` as its observer.

    Memory grows with state changes and steps, not with steps times requests. Not for several threads: read it, draw
    it and write it between steps, or when the engine has stopped.
    """

    def __init__(self) -> None:
        self.steps = StepSeries()
        self._lanes: list[RequestLane] = []
        self._unfinished: dict[str, RequestLane] = {}

    @property
    def started(self) -> float:
        """Time of the first event in seconds on the engine's clock; 0 when there was none."""
        return min([*self.steps.started[:1], *(lane.arrived for lane in self._lanes)], default=0.0)

    @property
    def ended(self) -> float:
        """End of the last step in seconds on the engine's clock; 0 when there was none."""
        return self.steps.ended[-1] if len(self.steps) else 0.0

    def lanes(self) -> list[RequestLane]:
        """All requests by arrival, earliest first."""
        return sorted(self._lanes, key=lambda lane: lane.arrived)

    def add(self, record: StepRecord) -> None:
        """Take in the next step. A request whose arrival was not seen counts as arrived when it is first heard of."""
        for request_id, arrived in record.arrived.items():
            self._lane(request_id, arrived)
        # In the order in which they happen in a step: what is dropped and processed at once has only been processed.
        self._enter(record.offloaded, RequestState.OFFLOADED, record.started)
        self._enter(record.reset, RequestState.RESET, record.started)
        self._enter(record.prefilled, RequestState.PREFILL, record.started)
        self._enter(record.decoded, RequestState.DECODE, record.started)
        for request_id in record.finished:
            self._lane(request_id, record.started).finish(record.ended)
            del self._unfinished[request_id]
        self.steps.add(record)

    def _enter(self, request_ids: Iterable[str], state: RequestState, time: float) -> None:
        for request_id in request_ids:
            self._lane(request_id, time).enter(state, time)

    def _lane(self, request_id: str, arrived: float) -> RequestLane:
        lane = self._unfinished.get(request_id)
        if lane is None:
            lane = self._unfinished[request_id] = RequestLane(request_id, arrived)
            self._lanes.append(lane)
        return lane
