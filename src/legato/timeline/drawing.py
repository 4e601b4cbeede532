"""A timeline as a picture."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from legato.errors import InvalidValueError, MissingExtraError
from legato.timeline.recording import RequestLane, RequestState, StepSeries, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.ticker import MaxNLocator

Curve = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Times and values; a value holds until the next time."""

_FORMATS = (".svg", ".png", ".pdf")

# At least 30 apart (CIE76) from each other in normal sight, protanopia, deuteranopia and tritanopia.
_COLOURS = {
    RequestState.WAITING: "#d9d9d9",
    RequestState.PREFILL: "#e69f00",
    RequestState.DECODE: "#56b4e9",
    RequestState.OFFLOADED: "#7b3294",
    RequestState.RESET: "#1a1a1a",
}
_BATCH_COLOUR, _CACHE_COLOUR, _INK = "#5f6b7a", "#009e73", "#333333"

_DPI = 150
_WIDTH = 11.0  # inches, as all lengths here
_ROW_HEIGHT, _MIN_ROWS_HEIGHT, _MAX_ROWS_HEIGHT = 0.22, 0.5, 7.0
_SERIES_HEIGHT = 1.2
_MARGINS_HEIGHT = 1.0  # title and legend, axis label
_MAX_NAMED_ROWS = 40  # more ids than this would overlap
_MAX_NAME = 28  # characters
_COLUMNS = 1600  # the picture's width in pixels, more or less: more points would not show
_MAX_VECTOR_INTERVALS = 25_000  # about 100 bytes of SVG each


def draw_timeline(timeline: Timeline, path: Path, max_requests: int = 400) -> None:
    """Draw a row for each request, earliest on top, coloured by state, and below it how full batches and cache were.

    Args:
        timeline: what to draw. Unfinished requests end with the last step.
        path: where to; its suffix is the format: .svg, .png or .pdf.
        max_requests: rows at most. Of more requests an even sample by arrival is drawn, and the title says so.

    Raises:
        InvalidValueError: another suffix, or `max_requests` is not positive.
        MissingExtraError: matplotlib is not installed.
    """
    check_can_draw(path)
    if max_requests < 1:
        raise InvalidValueError(f"max_requests={max_requests} is not allowed: it must be at least 1")
    from matplotlib.figure import Figure

    lanes = timeline.lanes()
    ranks = _even_sample(len(lanes), max_requests)
    height = min(max(_ROW_HEIGHT * len(ranks), _MIN_ROWS_HEIGHT), _MAX_ROWS_HEIGHT)
    figure = Figure(figsize=(_WIDTH, height + 2 * _SERIES_HEIGHT + _MARGINS_HEIGHT), dpi=_DPI, layout="constrained")
    rows, tokens, cache = figure.subplots(3, 1, sharex=True, height_ratios=[height, _SERIES_HEIGHT, _SERIES_HEIGHT])
    _draw_rows(rows, timeline, [lanes[rank] for rank in ranks])
    _name_rows(rows, lanes, ranks)
    rows.set_title(_title(timeline, len(ranks), len(lanes)), loc="left", fontsize=10, color=_INK)
    _draw_batch_tokens(tokens, timeline)
    _draw_cache(cache, timeline)
    span = timeline.ended - timeline.started
    cache.set_xlim(0, span if span > 0 else 1.0)
    cache.set_xlabel("seconds from the first event", fontsize=9)
    figure.savefig(path, dpi=_DPI)


def check_can_draw(path: Path) -> None:
    """Raise at once what `draw_timeline` would raise after a long run."""
    if path.suffix.lower() not in _FORMATS:
        raise InvalidValueError(f"path={str(path)!r} is not allowed: a picture is one of {', '.join(_FORMATS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError("drawing a timeline needs matplotlib (the extra legato[plot]): pip install matplotlib")


def _even_sample(total: int, at_most: int) -> list[int]:
    """Indices below `total`, evenly spaced, the first and the last among them."""
    if total <= at_most:
        return list(range(total))
    return [int(i) for i in np.linspace(0, total - 1, at_most).round()]


def _title(timeline: Timeline, drawn: int, total: int) -> str:
    requests = f"{total:,}" if drawn == total else f"{drawn:,} of {total:,}"
    return f"{requests} request{'s' * (total != 1)}, {len(timeline.steps):,} step{'s' * (len(timeline.steps) != 1)}"


def _draw_rows(axes: "Axes", timeline: Timeline, lanes: Sequence[RequestLane]) -> None:
    from matplotlib.collections import PathCollection
    from matplotlib.patches import Patch

    height = 0.8 if len(lanes) <= 2 * _MAX_NAMED_ROWS else 1.0  # gaps between thin rows would only pale them
    boxes = _boxes_by_state(timeline, lanes, height)
    rasterized = sum(map(len, boxes.values())) > _MAX_VECTOR_INTERVALS
    for state, state_boxes in boxes.items():
        # Boxes in one path, not a polygon each: a fraction of the SVG, and no pale seams between rows.
        collection = PathCollection(_paths(state_boxes), facecolors=_COLOURS[state], linewidths=0)
        collection.set_rasterized(rasterized)
        axes.add_collection(collection, autolim=False)
    axes.set_ylim(max(len(lanes), 1), 0)
    _soften(axes)
    keys = [Patch(color=_COLOURS[state], label=state.label) for state in boxes]
    if keys:
        place: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0}
        axes.legend(handles=keys, ncols=len(keys), frameon=False, fontsize=9, **place)


def _boxes_by_state(timeline: Timeline, lanes: Sequence[RequestLane], height: float) -> dict[RequestState, NDArray]:
    """For each state that occurs, in the order of the legend: [boxes, 4] of left, right, top and bottom."""
    boxes: dict[RequestState, list[tuple[float, float, float, float]]] = {state: [] for state in RequestState}
    origin, until = timeline.started, timeline.ended
    for row, lane in enumerate(lanes):
        top, bottom = row + (1 - height) / 2, row + (1 + height) / 2
        for state, start, end in lane.intervals(until):
            boxes[state].append((start - origin, end - origin, top, bottom))
    return {state: np.array(found) for state, found in boxes.items() if found}


def _paths(boxes: NDArray) -> list[Any]:
    """Matplotlib paths of 1000 boxes each: Agg cannot fill a path of millions."""
    from matplotlib.path import Path as DrawnPath

    corners = boxes[:, [0, 2, 1, 2, 1, 3, 0, 3, 0, 2]].reshape(-1, 2)
    codes = [DrawnPath.MOVETO, DrawnPath.LINETO, DrawnPath.LINETO, DrawnPath.LINETO, DrawnPath.CLOSEPOLY]
    parts = [corners[first : first + 5000] for first in range(0, len(corners), 5000)]
    return [DrawnPath(part, np.tile(codes, len(part) // 5)) for part in parts]


def _name_rows(axes: "Axes", lanes: Sequence[RequestLane], ranks: Sequence[int]) -> None:
    """Ids where there is room for them; else ranks by arrival, from 1, at round numbers."""
    if len(ranks) <= _MAX_NAMED_ROWS:
        names = [_short_name(lanes[rank].request_id) for rank in ranks]
        axes.set_yticks([row + 0.5 for row in range(len(ranks))], names, fontsize=7, parse_math=False)
        return
    ticks = _whole_numbers(8).tick_values(0, len(lanes))
    numbers = [int(tick) for tick in ticks if 1 <= tick <= len(lanes)]
    rows = np.searchsorted(ranks, [number - 1 for number in numbers])
    axes.set_yticks(rows + 0.5, [f"{number:,}" for number in numbers], fontsize=8)
    axes.set_ylabel("requests by arrival", fontsize=9)


def _whole_numbers(at_most: int) -> "MaxNLocator":
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(at_most, steps=[1, 2, 5, 10], integer=True)


def _short_name(request_id: str) -> str:
    """An id that fits beside its row, without characters that XML forbids."""
    name = "".join(character if character.isprintable() else "?" for character in request_id)
    return name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME // 2]}…{name[-_MAX_NAME // 2 + 1 :]}"


def _draw_batch_tokens(axes: "Axes", timeline: Timeline) -> None:
    _draw_curve(axes, timeline, _batch_tokens_curve(timeline.steps), _BATCH_COLOUR)
    axes.set_ylabel("batch tokens\na step", fontsize=9)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(_whole_numbers(4))
    _soften(axes)


def _draw_cache(axes: "Axes", timeline: Timeline) -> None:
    steps = timeline.steps
    ended = np.array(steps.ended)
    _draw_curve(axes, timeline, (ended, 100 * np.array(steps.cache_used_share)), _CACHE_COLOUR)
    axes.set_ylabel("cache used, %", fontsize=9)
    axes.set_ylim(0, 104)  # a full cache is a line, not an edge
    axes.set_yticks([0, 25, 50, 75, 100])
    _soften(axes)
    if any(steps.num_offloaded):
        colour = _COLOURS[RequestState.OFFLOADED]
        right = axes.twinx()
        _draw_curve(right, timeline, (ended, np.array(steps.num_offloaded, float)), colour, filled=False)
        right.set_ylabel("offloaded requests", fontsize=9, color=colour)
        right.set_ylim(bottom=0)
        right.yaxis.set_major_locator(_whole_numbers(4))
        _soften(right)
        right.tick_params(axis="y", colors=colour)


def _batch_tokens_curve(steps: StepSeries) -> Curve:
    """Tokens of the latest step; 0 after a step that left the engine nothing to do."""
    idle = _left_idle(steps)
    started, ended = np.array(steps.started), np.array(steps.ended)
    tokens = np.array(steps.num_batch_tokens, float)
    return np.insert(started, idle + 1, ended[idle]), np.insert(tokens, idle + 1, 0.0)


def _left_idle(steps: StepSeries) -> NDArray[np.intp]:
    """Indices of steps that left the engine nothing to do."""
    left = np.array(steps.num_running) + np.array(steps.num_waiting) + np.array(steps.num_offloaded)
    return np.flatnonzero(left == 0)


def _draw_curve(axes: "Axes", timeline: Timeline, curve: Curve, colour: str, filled: bool = True) -> None:
    times, values = _pooled(curve, _COLUMNS)
    # To the end of the last step: its value would have no width otherwise.
    edges = np.append(times, timeline.ended) - timeline.started
    look: dict[str, Any] = {"fill": True, "facecolor": (colour, 0.3)} if filled else {"baseline": None}
    axes.stairs(values, edges, edgecolor=colour, linewidth=1.0, joinstyle="bevel", **look)


def _pooled(curve: Curve, columns: int) -> Curve:
    """The curve with at most two points a column of the picture: its highest value, and the one it leaves with."""
    times, values = curve
    if len(times) <= 2 * columns:
        return curve
    width = (times[-1] - times[0]) / columns
    column = np.minimum((times - times[0]) / width, columns - 1).astype(int) if width > 0 else np.zeros(len(times), int)
    first = np.flatnonzero(np.diff(column, prepend=-1))
    last = np.append(first[1:], len(times)) - 1
    highest = np.maximum.reduceat(values, first)
    return np.stack([times[first], times[last]], axis=1).ravel(), np.stack([highest, values[last]], axis=1).ravel()


def _soften(axes: "Axes") -> None:
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#bbbbbb")
    axes.tick_params(labelsize=8, length=2, color="#bbbbbb", labelcolor=_INK)
