"""Whose turn it is: the order in which a step considers the running requests. Waiting ones always come after them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from legato.request import Request, RequestStatus


@dataclass(frozen=True)
class SchedulingPolicy:
    """A scheduler's two decisions.

    Attributes:
        order: running requests, oldest first, into the order in which they get tokens and blocks.
        safety_margin: share of the cache kept for running requests unless the user says otherwise, in [0, 1].
    """

    order: Callable[[Iterable[Request]], list[Request]]
    safety_margin: float


def decodes_first(running: Iterable[Request]) -> list[Request]:
    """Finish what generates before prompts that are still being read; else oldest first."""
    return sorted(running, key=_is_prefilling)


def prefills_first(running: Iterable[Request]) -> list[Request]:
    """Finish chunked prompts before going on generating; else oldest first."""
    return sorted(running, key=_is_decoding)


def _is_prefilling(request: Request) -> bool:
    return request.status is not RequestStatus.DECODING


def _is_decoding(request: Request) -> bool:
    return request.status is RequestStatus.DECODING


SCHEDULING_POLICIES: dict[str, SchedulingPolicy] = {
    "fifo": SchedulingPolicy(decodes_first, safety_margin=0.15),
    "prefill_first": SchedulingPolicy(prefills_first, safety_margin=0.0),
}


def register_scheduling_policy(name: str, policy: SchedulingPolicy) -> None:
    """Make `scheduler_type=name` known.

    Raises:
        ValueError: the name is taken.
    """
    if name in SCHEDULING_POLICIES:
        raise ValueError(f"scheduler_type {name!r} is registered already")
    SCHEDULING_POLICIES[name] = policy
