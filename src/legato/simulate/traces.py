"""Recorded request traces."""

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from legato.errors import InvalidValueError

MOONCAKE_BLOCK = 512  # prompt tokens that one of the trace's hash_ids stands for


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        arrival: seconds after the trace's first request.
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
        for line in file:
            row = json.loads(line)
            ids = [int(i) for i in row["hash_ids"]]
            if len(ids) != -(-int(row["input_length"]) // MOONCAKE_BLOCK):
                raise ValueError(f"{len(ids)} hash_ids do not cover input_length={row['input_length']}")
            yield _checked(row["timestamp"] / 1e3, row["input_length"], row["output_length"], ids, MOONCAKE_BLOCK)


def read_azure(path: Path) -> Iterator[TraceRequest]:
    """Azure's CSV: TIMESTAMP, ContextTokens, GeneratedTokens."""
    with path.open(newline="") as file:
        start = None
        for row in csv.DictReader(file):
            # Seven digits of a second; Python reads six.
            time = datetime.fromisoformat(row["TIMESTAMP"][:26])
            start = start or time
            yield _checked((time - start).total_seconds(), row["ContextTokens"], row["GeneratedTokens"])


def _checked(
    arrival: float, prompt_length: Any, output_length: Any, ids: list[int] | None = None, block_size: int = 0
) -> TraceRequest:
    request = TraceRequest(arrival, int(prompt_length), int(output_length), ids, block_size)
    if request.prompt_length < 1 or request.output_length < 0 or arrival < 0:
        raise ValueError("lengths and times must not be negative, and a prompt has a token")
    return request


TRACE_FORMATS: dict[str, Callable[[Path], Iterator[TraceRequest]]] = {"mooncake": read_mooncake, "azure": read_azure}


def read_trace(path: Path, trace_format: str, repeat: int = 1, limit: int | None = None) -> list[TraceRequest]:
    """All requests of a trace in order of arrival.

    Args:
        trace_format: a name in `TRACE_FORMATS`.
        repeat: play it that often, one after the other, each with contents of its own.
        limit: requests at most.

    Raises:
        InvalidValueError: the file is not of that format. Names the request.
    """
    requests: list[TraceRequest] = []
    rows = TRACE_FORMATS[trace_format](path)
    while True:
        try:
            requests.append(next(rows))
        except StopIteration:
            break
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"request {len(requests) + 1} is not in {trace_format} format: {type(error).__name__}: {error}"
            raise InvalidValueError(f"{path}: {reason}") from error
    requests.sort(key=lambda request: request.arrival)
    requests = [r for turn in range(repeat) for r in _shifted(requests, turn)]
    return requests[:limit]


def _shifted(requests: list[TraceRequest], turn: int) -> list[TraceRequest]:
    if turn == 0 or not requests:
        return requests
    later = turn * (requests[-1].arrival + 1)
    other = turn * (1 + max((max(r.block_ids, default=0) for r in requests if r.block_ids), default=0))
    return [
        TraceRequest(
            r.arrival + later,
            r.prompt_length,
            r.output_length,
            None if r.block_ids is None else [i + other for i in r.block_ids],
            r.block_size,
        )
        for r in requests
    ]
