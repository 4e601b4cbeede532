"""What each request of a run went through: recorded from an engine, drawn as a picture, written as a trace."""

from legato.timeline.chrome import write_chrome_trace
from legato.timeline.drawing import check_can_draw, draw_timeline
from legato.timeline.recording import Interval, RequestLane, RequestState, StepSeries, Timeline

__all__ = [
    "Interval",
    "RequestLane",
    "RequestState",
    "StepSeries",
    "Timeline",
    "check_can_draw",
    "draw_timeline",
    "write_chrome_trace",
]
