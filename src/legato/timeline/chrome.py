"""A timeline as a trace that Perfetto opens."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from legato.timeline.recording import StepSeries, Timeline

_ENGINE, _REQUESTS = 1, 2  # process ids
_STEPS_LANE = 1  # thread id
_FIRST_REQUEST_LANE = 10  # thread ids are kept apart from those of processes: the same number would mean a main thread

Event = dict[str, Any]


def write_chrome_trace(timeline: Timeline, path: Path) -> None:
    """Write the Chrome trace event format (JSON), which ui.perfetto.dev and chrome://tracing open.

    Process "engine" has its steps and counters, process "requests" a lane for each request by arrival. Times are
    microseconds from the first event, exact to the nanosecond. Memory does not grow with the file.

    Raises:
        OSError: `path` cannot be written.
    """
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        separator = "\n"
        for event in _trace_events(timeline):
            file.write(separator + json.dumps(event))
            separator = ",\n"
        file.write("\n]}\n")


def _trace_events(timeline: Timeline) -> Iterator[Event]:
    origin = timeline.started
    yield from _named("process", _ENGINE, 0, "engine", 0)
    yield from _named("process", _REQUESTS, 0, "requests", 1)
    yield from _named("thread", _ENGINE, _STEPS_LANE, "steps", 0)
    yield from _step_events(timeline.steps, origin)
    yield from _counter_events(timeline.steps, origin)
    for rank, lane in enumerate(timeline.lanes()):
        thread = _FIRST_REQUEST_LANE + rank
        yield from _named("thread", _REQUESTS, thread, lane.request_id, rank)
        for state, start, end in lane.intervals(timeline.ended):
            yield _complete(state.label, _REQUESTS, thread, start - origin, end - origin)


def _step_events(steps: StepSeries, origin: float) -> Iterator[Event]:
    for index in range(len(steps)):
        started, ended = steps.started[index] - origin, steps.ended[index] - origin
        tokens = {"batch tokens": steps.num_batch_tokens[index]}
        yield {**_complete("step", _ENGINE, _STEPS_LANE, started, ended), "args": tokens}


def _counter_events(steps: StepSeries, origin: float) -> Iterator[Event]:
    """Counters where they change: a counter holds its value."""
    latest: dict[str, Mapping[str, float]] = {}
    for name, time, values in _counts(steps):
        if latest.get(name) != values:
            latest[name] = values
            timestamp = _microseconds(time - origin)
            yield {"name": name, "ph": "C", "pid": _ENGINE, "tid": 0, "ts": timestamp, "args": values}


def _counts(steps: StepSeries) -> Iterator[tuple[str, float, Mapping[str, float]]]:
    for index, ended in enumerate(steps.ended):
        requests = {
            "running": steps.num_running[index],
            "waiting": steps.num_waiting[index],
            "offloaded": steps.num_offloaded[index],
        }
        yield "batch tokens", steps.started[index], {"tokens": steps.num_batch_tokens[index]}
        yield "cache used", ended, {"%": 100 * steps.cache_used_share[index]}
        yield "requests", ended, requests
        if not any(requests.values()):  # an idle engine has no batch
            yield "batch tokens", ended, {"tokens": 0}


def _named(kind: str, process: int, thread: int, name: str, sort_index: int) -> Iterator[Event]:
    common = {"ph": "M", "pid": process, "tid": thread}
    yield {"name": f"{kind}_name", **common, "args": {"name": name}}
    yield {"name": f"{kind}_sort_index", **common, "args": {"sort_index": sort_index}}


def _complete(name: str, process: int, thread: int, start: float, end: float) -> Event:
    # Rounded before the subtraction: neighbours must not overlap by a bit.
    duration = (round(end * 1e9) - round(start * 1e9)) / 1000
    return {"name": name, "ph": "X", "pid": process, "tid": thread, "ts": _microseconds(start), "dur": duration}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e9) / 1000
