"""Recorded request traces."""

import csv
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain, islice
from pathlib import Path
from typing import Any

from legato.errors import InvalidValueError

MOONCAKE_BLOCK = 512  # prompt tokens that one of the trace's hash_ids stands for
MAX_BLOCK_ID = 1 << 40
MAX_LENGTH = 100_000_000  # tokens


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        arrival: seconds; after `read_trace`, since the first request.
        prompt_length, output_length: tokens, at least 1 each.
        block_ids: one for each block of prompt tokens, the last perhaps not full; equal ids: equal tokens up to the
            block's end. None: nothing is known of the contents.
        block_size: tokens of such a block.
    """

    arrival: float
    prompt_length: int
    output_length: int
    block_ids: list[int] | None = None
    block_size: int = 0


def read_mooncake(path: Path) -> Iterator[TraceRequest]:
    """Mooncake's JSON lines: timestamp in ms, input_length, output_length, hash_ids (one per 512 prompt tokens)."""
    with path.open() as file:
        for line in filter(str.strip, file):
            row = json.loads(line)
            ids = [int(i) for i in row["hash_ids"]]
            if len(ids) != -(-int(row["input_length"]) // MOONCAKE_BLOCK):
                raise ValueError(f"{len(ids)} hash_ids do not cover input_length={row['input_length']}")
            if ids and not 0 <= min(ids) <= max(ids) < MAX_BLOCK_ID:
                raise ValueError(f"hash_ids must lie from 0 to {MAX_BLOCK_ID - 1}")
            yield _checked(row["timestamp"] / 1e3, row["input_length"], row["output_length"], ids, MOONCAKE_BLOCK)


def read_azure(path: Path) -> Iterator[TraceRequest]:
    """Azure's CSV: TIMESTAMP, ContextTokens, GeneratedTokens."""
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        if "TIMESTAMP" not in (rows.fieldnames or ()):
            raise ValueError("the first line must name the columns TIMESTAMP, ContextTokens and GeneratedTokens")
        for row in rows:
            # Seven digits of a second; Python reads six.
            time = datetime.fromisoformat(row["TIMESTAMP"][:26])
            yield _checked((time - datetime(1970, 1, 1)).total_seconds(), row["ContextTokens"], row["GeneratedTokens"])


def _checked(
    arrival: float, prompt_length: Any, output_length: Any, ids: list[int] | None = None, block_size: int = 0
) -> TraceRequest:
    request = TraceRequest(arrival, int(prompt_length), max(1, int(output_length)), ids, block_size)
    if not math.isfinite(arrival):
        raise ValueError(f"the time {arrival} is none")
    if not 1 <= request.prompt_length <= MAX_LENGTH or not 0 <= int(output_length) <= MAX_LENGTH:
        raise ValueError(f"prompts have 1 to {MAX_LENGTH} tokens, answers 0 to {MAX_LENGTH}")
    return request


TRACE_FORMATS: dict[str, Callable[[Path], Iterator[TraceRequest]]] = {"mooncake": read_mooncake, "azure": read_azure}


def read_trace(path: Path, trace_format: str, repeat: int = 1, limit: int | None = None) -> list[TraceRequest]:
    """All requests of a trace in order of arrival, the first at 0 seconds.

    Args:
        trace_format: a name in `TRACE_FORMATS`.
        repeat: play it that often, one after the other, each with contents of its own.
        limit: requests at most.

    Raises:
        InvalidValueError: the file is not of that format. Names the request.
    """
    requests: list[TraceRequest] = []
    try:
        for request in TRACE_FORMATS[trace_format](path):
            requests.append(request)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, csv.Error) as error:
        reason = f"request {len(requests) + 1} is not in {trace_format} format: {type(error).__name__}: {error}"
        raise InvalidValueError(f"{path}: {reason}") from error
    requests.sort(key=lambda request: request.arrival)
    start = requests[0].arrival if requests else 0.0
    requests = [replace(request, arrival=request.arrival - start) for request in requests]
    turns = chain.from_iterable(_shifted(requests, turn) for turn in range(repeat))
    return list(islice(turns, limit))


def _shifted(requests: list[TraceRequest], turn: int) -> list[TraceRequest]:
    if turn == 0 or not requests:
        return requests
    later = turn * (requests[-1].arrival + 1)
    other = turn * (1 + max((max(r.block_ids, default=0) for r in requests if r.block_ids), default=0))
    return [
        replace(
            request,
            arrival=request.arrival + later,
            block_ids=None if request.block_ids is None else [i + other for i in request.block_ids],
        )
        for request in requests
    ]
