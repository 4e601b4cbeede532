"""Requests for an engine that is stepped by hand."""

import time

from legato.request import Request
from legato.sampling_params import SamplingParams


def greedy_request(request_id: str, prompt_ids: list[int], max_new_tokens: int) -> Request:
    """One that takes the likeliest tokens, goes on for all of `max_new_tokens`, and is not checked."""
    return Request(
        request_id=request_id,
        prompt_ids=prompt_ids,
        params=SamplingParams(temperature=0),
        max_new_tokens=max_new_tokens,
        stop_token_ids=frozenset(),
        seed=0,
        streaming=False,
        created_time=time.perf_counter(),
        tokens=prompt_ids.copy(),
    )
