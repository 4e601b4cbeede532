"""Timelines of engines: what was recorded, what the picture shows, what the trace says."""

import json
import pickle
import re
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from legato.engine.observer import StepRecord
from legato.errors import InvalidValueError, LegatoError
from legato.timeline import RequestState, Timeline, draw_timeline, write_chrome_trace
from legato.timeline.drawing import _BATCH_COLOUR, _CACHE_COLOUR, _COLOURS, _pooled

pytestmark = pytest.mark.filterwarnings("error")

WAITING, PREFILL, DECODE, OFFLOADED, RESET = RequestState
LABELS = {state.label for state in RequestState}

Intervals = list[tuple[RequestState, float, float]]


def step(started: float, ended: float, **fields: Any) -> StepRecord:
    """A record of which only `fields` matter; every list of ids may be one string, an id a word."""
    empty: dict[str, Any] = dict.fromkeys(("decoded", "offloaded", "reset", "finished"), "")
    empty |= {"arrived": {}, "prefilled": "", "num_batch_tokens": 1, "cache_used_share": 0.5}
    empty |= {"num_running": 1, "num_waiting": 0, "num_offloaded": 0}
    values = {**empty, **fields}
    ids = {name: tuple(value.split()) for name, value in values.items() if isinstance(value, str)}
    values |= ids
    return StepRecord(started, ended, **{**values, "prefilled": dict.fromkeys(ids["prefilled"], 7)})


def timeline_of(records: Iterable[StepRecord]) -> Timeline:
    timeline = Timeline()
    for record in records:
        timeline.add(record)
    return timeline


def recorded(timeline: Timeline) -> list[tuple[str, Intervals]]:
    return [(lane.request_id, [tuple(i) for i in lane.intervals(timeline.ended)]) for lane in timeline.lanes()]


# --- The twin: every request's state in every step, put together afterwards


@dataclass
class Life:
    request_id: str
    arrived: float
    pieces: Intervals = field(default_factory=list)

    @property
    def state(self) -> RequestState:
        return self.pieces[-1][0] if self.pieces else WAITING

    @property
    def end(self) -> float:
        return self.pieces[-1][2] if self.pieces else self.arrived

    def live(self, record: StepRecord) -> None:
        begin = max(record.started, self.arrived)
        self.pieces.append((self.state, self.end, begin))
        self.pieces.append((self._state_in(record), begin, max(record.ended, begin)))

    def _state_in(self, record: StepRecord) -> RequestState:
        fates = {DECODE: record.decoded, PREFILL: record.prefilled, RESET: record.reset, OFFLOADED: record.offloaded}
        return next((state for state, ids in fates.items() if self.request_id in ids), self.state)

    def intervals(self) -> Intervals:
        lasting = [piece for piece in self.pieces if piece[1] < piece[2]] or self.pieces[-1:]
        runs = [list(run) for _, run in groupby(lasting, key=lambda piece: piece[0])]
        return [(run[0][0], run[0][1], run[-1][2]) for run in runs]


def twin(records: Sequence[StepRecord]) -> list[tuple[str, Intervals]]:
    lives: list[Life] = []
    live: list[Life] = []
    for record in records:
        joined = [Life(request_id, arrived) for request_id, arrived in record.arrived.items()]
        lives += joined
        live += joined
        for life in live:
            life.live(record)
        live = [life for life in live if life.request_id not in record.finished]
    return [(life.request_id, life.intervals()) for life in sorted(lives, key=lambda life: life.arrived)]


FATES = ["", "", "prefilled", "decoded", "offloaded", "reset", "offloaded reset", "reset prefilled", "reset decoded"]
durations = st.integers(0, 8).map(lambda n: n / 4) | st.floats(0, 3, allow_subnormal=False)


@st.composite
def histories(draw: st.DrawFn) -> list[StepRecord]:
    """What an engine may tell: steps that take no time, arrivals within a step, ids that come again."""
    records, live, clock = [], set[str](), draw(st.sampled_from([0.0, 1234.5]))
    for _ in range(draw(st.integers(1, 12))):
        started = clock + draw(durations)
        ended = started + draw(durations)
        joining = draw(st.sets(st.sampled_from("abcdef"), max_size=3)) - live
        arrived = {request_id: draw(st.floats(clock, ended)) for request_id in sorted(joining)}
        live |= joining
        fates = {request_id: draw(st.sampled_from(FATES)).split() for request_id in sorted(live)}
        happened = {
            name: " ".join(i for i in fates if name in fates[i])
            for name in ("prefilled", "decoded", "offloaded", "reset")
        }
        finished = {request_id for request_id in sorted(live) if draw(st.integers(0, 4)) == 0}
        live -= finished
        counts = {"num_running": len(live), "num_batch_tokens": draw(st.integers(0, 9))}
        records.append(step(started, ended, arrived=arrived, finished=" ".join(finished), **happened, **counts))
        clock = ended
    return records


# --- What is recorded


@given(records=histories())
@settings(max_examples=300, deadline=None)
def test_intervals_are_those_of_every_step_put_together(records: list[StepRecord]) -> None:
    assert recorded(timeline_of(records)) == twin(records)


@given(records=histories())
@settings(max_examples=100, deadline=None)
def test_intervals_leave_no_gap_between_arrival_and_end(records: list[StepRecord]) -> None:
    timeline = timeline_of(records)
    for lane in timeline.lanes():
        intervals = lane.intervals(timeline.ended)
        assert intervals[0].start == lane.arrived
        assert intervals[-1].end == (timeline.ended if lane.ended is None else lane.ended)
        assert lane.ended in {None, *(r.ended for r in records if lane.request_id in r.finished)}
        assert all(a.end == b.start and a.state is not b.state for a, b in pairwise(intervals))
        assert all(i.start < i.end for i in intervals) or len(intervals) == 1


@given(records=histories())
@settings(max_examples=50, deadline=None)
def test_a_timeline_can_be_read_at_any_step(records: list[StepRecord]) -> None:
    timeline = Timeline()
    for seen, record in enumerate(records, 1):
        timeline.add(record)
        assert recorded(timeline) == twin(records[:seen])


def test_a_request_passes_through_every_state() -> None:
    records = [
        step(1, 2, arrived={"a": 0.5}),
        step(3, 4, prefilled="a"),
        step(4, 5, prefilled="a"),
        step(5, 6, decoded="a"),
        step(6, 7),  # left out
        step(7, 8, decoded="a"),
        step(8, 9, offloaded="a"),
        step(9, 10),
        step(10, 11, decoded="a"),
        step(11, 12, reset="a"),
        step(12, 13),
        step(13, 14, prefilled="a"),
        step(14, 15, decoded="a", finished="a"),
        step(15, 16),
    ]
    expected = [
        (WAITING, 0.5, 3),
        (PREFILL, 3, 5),
        (DECODE, 5, 8),
        (OFFLOADED, 8, 10),
        (DECODE, 10, 11),
        (RESET, 11, 13),
        (PREFILL, 13, 14),
        (DECODE, 14, 15),
    ]
    assert recorded(timeline_of(records)) == [("a", expected)]


def test_a_request_that_never_ran_ends_waiting() -> None:
    records = [
        step(1, 2, arrived={"a": 0, "b": 1}),
        step(2, 3),
        step(3, 4, finished="a", num_batch_tokens=0),
        step(4, 5),
    ]
    assert recorded(timeline_of(records)) == [("a", [(WAITING, 0, 4)]), ("b", [(WAITING, 1, 5)])]


def test_an_id_may_come_again() -> None:
    records = [
        step(0, 1, arrived={"a": 0}, prefilled="a", finished="a"),
        step(2, 3, arrived={"a": 1.5}, prefilled="a"),
    ]
    assert recorded(timeline_of(records)) == [("a", [(PREFILL, 0, 1)]), ("a", [(WAITING, 1.5, 2), (PREFILL, 2, 3)])]


def test_requests_from_before_the_timeline_count_from_when_they_are_heard_of() -> None:
    records = [step(5, 6, decoded="a"), step(6, 7, finished="b")]
    assert recorded(timeline_of(records)) == [("a", [(DECODE, 5, 7)]), ("b", [(WAITING, 6, 7)])]


def test_series_hold_every_step() -> None:
    counts = {"num_running": 3, "num_waiting": 2**20, "num_offloaded": 5}
    records = [step(i, i + 0.5, num_batch_tokens=i, cache_used_share=i / 7, **counts) for i in range(5)]
    steps = timeline_of(records).steps
    assert len(steps) == 5
    for name in ("started", "ended", "num_batch_tokens", "cache_used_share", *counts):
        assert list(getattr(steps, name)) == [getattr(record, name) for record in records]


def test_memory_does_not_grow_with_steps_times_requests() -> None:
    def size(num_requests: int) -> int:
        ids = " ".join(f"request-{i}" for i in range(num_requests))
        first = step(0, 1, arrived=dict.fromkeys(ids.split(), 0.0), prefilled=ids)
        decode = step(1, 2, decoded=ids)
        later = (replace(decode, started=float(i), ended=i + 1.0) for i in range(1, 2000))
        return len(pickle.dumps(timeline_of([first, *later])))

    assert size(64) - size(1) < 63 * 200
    assert size(1) < 2000 * 64


# --- The picture


def texts(svg: Path) -> list[str]:
    """All that is written in a picture: matplotlib draws letters, and says in comments what they spell."""
    parser = ElementTree.XMLParser(target=ElementTree.TreeBuilder(insert_comments=True))
    tree = ElementTree.parse(svg, parser)
    return [(e.text or "").strip() for e in tree.iter(ElementTree.Comment)]  # type: ignore[arg-type]


@given(records=histories())
@settings(max_examples=10, deadline=None)
def test_the_legend_has_exactly_the_states_that_occur(
    records: list[StepRecord], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("picture") / "timeline.svg"
    draw_timeline(timeline_of(records), path)
    occurring = [
        state.label for state in RequestState if any(state in {i[0] for i in life[1]} for life in twin(records))
    ]
    assert [text for text in texts(path) if text in LABELS] == occurring


def coloured_rows(png: Path) -> list[list[tuple[RequestState, int]]]:
    """The rows of a picture from the top: runs of a state's colour as (state, pixels), whatever else left out."""
    pixels = np.asarray(Image.open(png).convert("RGB"))
    states = {tuple(bytes.fromhex(colour[1:])): state for state, colour in _COLOURS.items()}
    rows = []
    for line in pixels:
        runs = [(states.get(tuple(colour)), len(list(run))) for colour, run in groupby(line.tolist(), key=tuple)]
        rows.append([(state, length) for state, length in runs if state is not None and length > 60])  # not the legend
    return [row for row, _ in groupby(rows) if row]


def test_rows_are_drawn_by_arrival_in_the_colours_and_to_scale(tmp_path: Path) -> None:
    records = [
        step(0, 10, arrived={"late": 10.0, "early": 0.0}),
        step(10, 20, prefilled="early"),
        step(20, 30, decoded="early", prefilled="late"),
        step(30, 60, reset="late", offloaded="early"),
        step(60, 80, finished="late"),
    ]
    draw_timeline(timeline_of(records), tmp_path / "timeline.png")
    early, late = coloured_rows(tmp_path / "timeline.png")
    assert [state for state, _ in early] == [WAITING, PREFILL, DECODE, OFFLOADED]
    assert [state for state, _ in late] == [WAITING, PREFILL, RESET]
    unit = sum(length for _, length in early) / 8
    assert [round(length / unit, 1) for _, length in early] == [1, 1, 1, 5]
    assert [round(length / unit, 1) for _, length in late] == [1, 1, 5]


@pytest.mark.parametrize(
    ("suffix", "start"), [("svg", b"<?xml"), ("png", b"\x89PNG"), ("pdf", b"%PDF"), ("SVG", b"<?xml")]
)
def test_the_suffix_is_the_format(suffix: str, start: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"timeline.{suffix}"
    draw_timeline(timeline_of([step(0, 1, arrived={"a": 0}, prefilled="a")]), path)
    assert path.read_bytes().startswith(start)


def arrivals(num_requests: int) -> Timeline:
    return timeline_of([step(0, 1, arrived={f"req-{i}": i / num_requests for i in range(num_requests)})])


def test_of_many_requests_an_even_sample_is_drawn(tmp_path: Path) -> None:
    draw_timeline(arrivals(1001), tmp_path / "sample.svg", max_requests=5)
    found = texts(tmp_path / "sample.svg")
    assert [text for text in found if text.startswith("req-")] == [f"req-{i}" for i in (0, 250, 500, 750, 1000)]
    assert "5 of 1,001 requests, 1 step" in found
    draw_timeline(arrivals(5), tmp_path / "all.svg", max_requests=5)
    assert "5 requests, 1 step" in texts(tmp_path / "all.svg")


def test_rows_of_a_sample_are_those_of_its_requests(tmp_path: Path) -> None:
    record = step(0, 1, arrived=dict.fromkeys("abcde", 0.0), prefilled="b d", decoded="c", offloaded="e")
    draw_timeline(timeline_of([record]), tmp_path / "timeline.png", max_requests=3)
    rows = coloured_rows(tmp_path / "timeline.png")
    assert [[state for state, _ in row] for row in rows] == [[WAITING], [DECODE], [OFFLOADED]]


def heights(png: Path, colour: str, opacity: float) -> list[float]:
    """How high a colour reaches in the middle of each fifth of the time, in pixels; a request waits all the time."""
    pixels = np.asarray(Image.open(png).convert("RGB")).astype(int)
    waiting = np.all(pixels == list(bytes.fromhex(_COLOURS[WAITING][1:])), axis=2)
    row = waiting[np.argmax(waiting.sum(axis=1))]
    left, right = np.flatnonzero(row)[[0, -1]]
    wanted = 255 + opacity * (np.array(list(bytes.fromhex(colour[1:]))) - 255)
    found = np.abs(pixels[:, left : right + 1] - wanted).max(axis=2) < 3
    bottom = np.flatnonzero(found.any(axis=1))[-1]
    middles = [found[:, round((right - left) * (fifth + 0.5) / 5)] for fifth in range(5)]
    return [float(bottom + 1 - np.argmax(middle)) if middle.any() else 0.0 for middle in middles]


def test_curves_hold_what_was_recorded_when_it_was(tmp_path: Path) -> None:
    idle = {"num_running": 0}
    records = [
        step(100, 101, arrived={"a": 100.0}, num_batch_tokens=20, cache_used_share=0.25),
        step(101, 102, num_batch_tokens=80, cache_used_share=1.0, num_offloaded=1),
        step(102, 103, num_batch_tokens=40, cache_used_share=0.5, **idle),
        step(104, 105, num_batch_tokens=60, cache_used_share=0.75),
    ]
    path = tmp_path / "timeline.png"
    draw_timeline(timeline_of(records), path)
    tokens = heights(path, _BATCH_COLOUR, 0.3)
    assert [t / tokens[1] for t in tokens] == pytest.approx([0.25, 1, 0.5, 0, 0.75], abs=0.03)
    # What a step leaves the cache with holds from its end.
    cache = heights(path, _CACHE_COLOUR, 0.3)
    assert [c / cache[2] for c in cache] == pytest.approx([0, 0.25, 1, 0.5, 0.5], abs=0.03)
    offloaded = heights(path, _COLOURS[OFFLOADED], 1)
    assert [o / offloaded[2] for o in offloaded] == pytest.approx([0, 0, 1, 0, 0], abs=0.03)


def test_many_rows_are_numbered_and_not_named(tmp_path: Path) -> None:
    draw_timeline(arrivals(1000), tmp_path / "timeline.svg")
    found = texts(tmp_path / "timeline.svg")
    assert "400 of 1,000 requests, 1 step" in found
    assert {"200", "800", "1,000"} <= set(found)
    assert not any("req-" in text for text in found)


def test_offloaded_requests_have_an_axis_only_if_there_are_any(tmp_path: Path) -> None:
    for count, name in ((0, "none.svg"), (2, "some.svg")):
        draw_timeline(timeline_of([step(0, 1, arrived={"a": 0}, num_offloaded=count)]), tmp_path / name)
    assert "offloaded requests" not in texts(tmp_path / "none.svg")
    assert "offloaded requests" in texts(tmp_path / "some.svg")


@pytest.mark.parametrize("name", ["$x_{$", "<&>]]>", "a--b-", "\x00\x1b\ud800", "\\frac{", "x" * 500, "two\nlines", ""])
def test_any_id_can_be_drawn_and_traced(name: str, tmp_path: Path) -> None:
    timeline = timeline_of([replace(step(0, 1), arrived={name: 0.0})])
    draw_timeline(timeline, tmp_path / "timeline.svg")
    assert max(map(len, texts(tmp_path / "timeline.svg"))) < 40
    assert name in trace_of(timeline).names.values()


def test_a_timeline_without_steps_or_time_can_be_drawn(tmp_path: Path) -> None:
    draw_timeline(Timeline(), tmp_path / "empty.svg")
    assert "0 requests, 0 steps" in texts(tmp_path / "empty.svg")
    draw_timeline(timeline_of([step(3, 3, arrived={"a": 3}, prefilled="a")]), tmp_path / "instant.svg")
    assert "prefill" in texts(tmp_path / "instant.svg")


def restless(num_requests: int, num_steps: int) -> Timeline:
    """Every request changes its state in every step, and every series its value."""
    random = np.random.default_rng(0)
    ids = " ".join(f"req-{i}" for i in range(num_requests))
    arrived = {request_id: i / 1e3 for i, request_id in enumerate(ids.split())}
    records = [step(0, 0.9, arrived=arrived, prefilled=ids, num_offloaded=1)]
    for i in range(1, num_steps):
        fates = {"decoded" if i % 2 else "offloaded": ids, "num_batch_tokens": int(random.integers(512))}
        counts = {"cache_used_share": random.random(), "num_offloaded": int(random.integers(99))}
        records.append(step(i + random.random() / 9, i + 0.9, **fates, **counts))
    return timeline_of(records)


def test_a_large_svg_stays_small(tmp_path: Path) -> None:
    path = tmp_path / "timeline.svg"
    draw_timeline(restless(400, 50), path)
    assert path.stat().st_size < 3_000_000
    assert "<image" not in path.read_text()  # sharp at any size
    draw_timeline(restless(400, 500), path)
    assert path.stat().st_size < 3_000_000
    draw_timeline(restless(1, 20_000), path)
    assert path.stat().st_size < 3_000_000


@given(steps=st.lists(st.tuples(durations, st.integers(0, 99)), min_size=1, max_size=60), columns=st.integers(1, 12))
@example(steps=[(0, 1), (0, 3), (0, 2)], columns=1)
@settings(max_examples=200, deadline=None)
def test_thinned_curves_keep_their_peaks(steps: list[tuple[float, int]], columns: int) -> None:
    times, values = np.cumsum([gap for gap, _ in steps]), np.array([float(value) for _, value in steps])
    new_times, new_values = _pooled((times, values), columns)
    assert len(new_times) == len(new_values) <= min(2 * columns, max(len(times), 2))
    assert np.all(np.diff(new_times) >= 0)
    assert (new_times[0], new_times[-1], new_values[-1]) == (times[0], times[-1], values[-1])
    assert set(new_times) <= set(times)
    assert new_values.max() == values.max()
    if len(times) <= 2 * columns:
        assert np.array_equal(new_times, times) and np.array_equal(new_values, values)
        return
    # Nothing is hidden for longer than a column: each value has a point at least as high within a column's width.
    width = (times[-1] - times[0]) / columns
    near = np.abs(new_times[None, :] - times[:, None]) <= width * 1.000001
    assert np.all(np.where(near, new_values[None, :], -1).max(axis=1) >= values)


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match=r"timeline\.txt.*\.svg, \.png, \.pdf"):
        draw_timeline(Timeline(), tmp_path / "timeline.txt")
    with pytest.raises(InvalidValueError, match="max_requests=0"):
        draw_timeline(Timeline(), tmp_path / "timeline.svg", max_requests=0)
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=re.escape("pip install matplotlib")) as caught:
        draw_timeline(Timeline(), tmp_path / "timeline.svg")
    assert isinstance(caught.value, LegatoError)


def test_matplotlib_is_imported_only_to_draw_and_pyplot_never() -> None:
    script = """
import sys, tempfile
from pathlib import Path
from legato.timeline import Timeline, draw_timeline
assert "matplotlib" not in sys.modules
import matplotlib
before = matplotlib.rcParams.copy()
with tempfile.TemporaryDirectory() as folder:
    draw_timeline(Timeline(), Path(folder) / "timeline.svg")
assert "matplotlib.pyplot" not in sys.modules
assert dict.__eq__(matplotlib.rcParams, before)  # as stored: a look at the backend would choose one
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)


# --- The trace


@dataclass
class Trace:
    """A trace as a viewer reads it, strictly: numbers are exact."""

    events: list[dict[str, Any]]
    names: dict[tuple[int, int], str]  # of lanes, by process and thread
    sort_indices: dict[tuple[int, int], int]

    def lane(self, key: tuple[int, int]) -> list[dict[str, Any]]:
        return [e for e in self.events if e["ph"] == "X" and (e["pid"], e["tid"]) == key]

    def counter(self, name: str) -> list[tuple[float, dict[str, Any]]]:
        return [(float(e["ts"]), e["args"]) for e in self.events if e["ph"] == "C" and e["name"] == name]

    def process(self, name: str) -> int:
        named = [e for e in self.events if e["name"] == "process_name" and e["args"]["name"] == name]
        assert len(named) == 1
        return named[0]["pid"]


def trace_of(timeline: Timeline) -> Trace:
    with tempfile.TemporaryDirectory() as folder:
        write_chrome_trace(timeline, Path(folder) / "trace.json")
        text = (Path(folder) / "trace.json").read_text(encoding="utf-8")
    whole = json.loads(text, parse_float=Decimal, parse_constant=pytest.fail)
    assert whole.keys() == {"displayTimeUnit", "traceEvents"}
    assert whole["displayTimeUnit"] == "ms"
    events = whole["traceEvents"]
    named = [e for e in events if e["name"] == "thread_name"]
    ordered = [e for e in events if e["name"] == "thread_sort_index"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in named}
    sort_indices = {(e["pid"], e["tid"]): e["args"]["sort_index"] for e in ordered}
    assert len(named) == len(names) and len(ordered) == len(sort_indices)  # each lane once
    return Trace(events, names, sort_indices)


@given(records=histories())
@settings(max_examples=100, deadline=None)
def test_a_trace_is_valid(records: list[StepRecord]) -> None:
    trace = trace_of(timeline_of(records))
    lanes = set()
    for event in trace.events:
        assert event["ph"] in "MXC" and type(event["name"]) is str
        assert type(event["pid"]) is type(event["tid"]) is int
        if event["ph"] in "XC":
            assert type(event["ts"]) in (int, Decimal) and event["ts"] >= 0
        if event["ph"] == "X":
            assert type(event["dur"]) in (int, Decimal) and event["dur"] >= 0
            lanes.add((event["pid"], event["tid"]))
        if event["ph"] == "C":
            assert event["args"] and all(type(value) in (int, Decimal) for value in event["args"].values())
    assert lanes == trace.names.keys() == trace.sort_indices.keys()
    assert len({thread for _, thread in lanes}) == len(lanes)  # some viewers tell threads apart by this alone
    for lane in lanes:
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(trace.lane(lane)))


@given(records=histories())
@settings(max_examples=100, deadline=None)
def test_a_trace_has_a_lane_for_each_request_by_arrival(records: list[StepRecord]) -> None:
    trace, lives = trace_of(timeline_of(records)), twin(records)
    origin = min([records[0].started, *(pieces[0][1] for _, pieces in lives)])
    requests = trace.process("requests")
    lanes = sorted((lane for lane in trace.names if lane[0] == requests), key=lambda lane: trace.sort_indices[lane])
    assert [trace.names[lane] for lane in lanes] == [request_id for request_id, _ in lives]
    for lane, (_, pieces) in zip(lanes, lives, strict=True):
        events = trace.lane(lane)
        assert [event["name"] for event in events] == [state.label for state, _, _ in pieces]
        for event, (_, start, end) in zip(events, pieces, strict=True):
            assert float(event["ts"]) == pytest.approx((start - origin) * 1e6, abs=1e-3)
            assert float(event["dur"]) == pytest.approx((end - start) * 1e6, abs=2e-3)
        assert all(a["ts"] + a["dur"] == b["ts"] for a, b in pairwise(events))


def test_a_trace_has_the_steps_and_their_counters() -> None:
    busy = {"num_running": 2, "num_waiting": 3, "num_offloaded": 4}
    idle = dict.fromkeys(busy, 0)
    records = [
        step(10, 11, num_batch_tokens=5, cache_used_share=0.25, **busy),
        step(11.5, 12, num_batch_tokens=6, cache_used_share=0.25, **busy),
        step(12, 13, num_batch_tokens=6, cache_used_share=0, **idle),
        step(20, 21, num_batch_tokens=7, cache_used_share=1, **busy),
    ]
    trace = trace_of(timeline_of(records))
    (engine,) = (lane for lane in trace.names if lane[0] == trace.process("engine"))
    steps = [(e["ts"], e["dur"], e["args"]["batch tokens"]) for e in trace.lane(engine)]
    second = 1_000_000
    assert steps == [(0, second, 5), (1.5 * second, second / 2, 6), (2 * second, second, 6), (10 * second, second, 7)]
    # A value that stays is not said again, and no batch is left when the engine has nothing to do.
    tokens = [(0, 5), (1.5 * second, 6), (3 * second, 0), (10 * second, 7)]
    assert trace.counter("batch tokens") == [(time, {"tokens": value}) for time, value in tokens]
    shares = [(second, 25), (3 * second, 0), (11 * second, 100)]
    assert trace.counter("cache used") == [(time, {"%": value}) for time, value in shares]
    some, none = {"running": 2, "waiting": 3, "offloaded": 4}, {"running": 0, "waiting": 0, "offloaded": 0}
    assert trace.counter("requests") == [(second, some), (3 * second, none), (11 * second, some)]


def test_an_empty_trace_is_valid() -> None:
    assert {event["ph"] for event in trace_of(Timeline()).events} == {"M"}


def test_a_trace_is_written_without_holding_it_in_memory(tmp_path: Path) -> None:
    timeline = restless(10, 2000)
    tracemalloc.start()
    try:
        write_chrome_trace(timeline, tmp_path / "trace.json")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000 < (tmp_path / "trace.json").stat().st_size
