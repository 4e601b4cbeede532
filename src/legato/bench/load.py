"""Load for a server: what is asked, and when."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from legato.bench.workload import read_workload
from legato.errors import InvalidValueError
from legato.prompt_file import SAMPLING_FIELDS, read_lines
from legato.simulate.traces import TraceRequest

FIRST_TOKEN_ID, LAST_TOKEN_ID = 100, 9999  # no special ones, and in every common vocabulary

Body = Mapping[str, Any]


@dataclass(frozen=True)
class Load:
    """Requests, and when they are sent.

    Attributes:
        bodies: as OpenAI's clients would send them, without the model's name: those with `messages` are chats.
        due: when each is to be sent, whatever became of those before, in seconds from the start; None: by `clients`.
        clients: so many send the next one as soon as their last one has ended.
    """

    bodies: Sequence[Body]
    due: Sequence[float] | None
    clients: int = 0

    def __post_init__(self) -> None:
        if not self.bodies:
            raise InvalidValueError("there is no request to send")


def poisson(rate: float, count: int, seed: int) -> list[float]:
    """When `count` independent requests come of which there are `rate` a second, the first at 0."""
    rng = random.Random(seed)
    return [0.0, *accumulate(rng.expovariate(rate) for _ in range(count - 1))][:count]


def bodies_of_workload(path: Path, common: Body) -> list[Body]:
    """Of a file as `bench offline` takes it: completions of token ids, with `common` fields.

    Raises:
        InvalidValueError: the file is no workload.
    """
    return [
        {**common, "prompt": request["prompt_ids"], "max_tokens": request["max_new_tokens"]}
        for request in read_workload(path)["requests"]
    ]


def bodies_of_prompts(path: Path, chat: bool, common: Body) -> list[Body]:
    """Of a file as `legato generate` takes it.

    Args:
        chat: plain text is a user's message and not a bare prompt.
        common: fields for lines that do not bring their own.

    Raises:
        InvalidValueError: a line makes no sense. Names the line.
    """
    bodies: list[Body] = []
    for line in read_lines(path, chat, {}):
        if line.error is not None:
            raise InvalidValueError(f"{path}: prompt {line.index + 1}: {line.error}")
        given = {name: line.fields[name] for name in (*SAMPLING_FIELDS, "cache_salt") if name in line.fields}
        if "max_new_tokens" in line.fields:
            given["max_tokens"] = line.fields["max_new_tokens"]
        if "messages" in line.fields:
            given["messages"] = line.fields["messages"]
        else:
            given["prompt"] = line.fields.get("prompt", line.fields.get("prompt_ids"))
        bodies.append({**common, **given})
    return bodies


class TraceBodies(Sequence[Body]):
    """Completions of random token ids, as long as a trace says; made when they are looked at, for they are large.

    Args:
        requests: where a trace knows which blocks of prompts are alike, so are those here.
        seed: other seeds, other token ids.
        common: fields of all of them.
    """

    def __init__(self, requests: Sequence[TraceRequest], seed: int, common: Body) -> None:
        self._requests = requests
        self._seed = seed
        self._common = common

    def __len__(self) -> int:
        return len(self._requests)

    def __getitem__(self, index: Any) -> Any:
        request = self._requests[index]
        if request.block_ids is None:
            prompt = self._random(request.prompt_length, 0, index)
        else:
            blocks = [self._random(request.block_size, 1, block) for block in request.block_ids]
            prompt = [token for block in blocks for token in block][: request.prompt_length]
        return {**self._common, "prompt": prompt, "max_tokens": request.output_length}

    def _random(self, count: int, *what: int) -> list[int]:
        rng = np.random.default_rng([self._seed, *what])
        ids: list[int] = rng.integers(FIRST_TOKEN_ID, LAST_TOKEN_ID, count, endpoint=True).tolist()
        return ids


class Repeated(Sequence[Body]):
    """The first `count` of bodies, from the beginning again where there are fewer."""

    def __init__(self, bodies: Sequence[Body], count: int) -> None:
        self._bodies = bodies
        self._count = count if bodies else 0

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._count:
            raise IndexError(index)
        return self._bodies[index % len(self._bodies)]


def encoded(body: Body, model: str) -> tuple[str, bytes]:
    """Where a body goes, and as what: streamed, with the figures of its usage at the end."""
    path = "chat/completions" if "messages" in body else "completions"
    whole = {"model": model, **body, "stream": True, "stream_options": {"include_usage": True}}
    return path, json.dumps(whole, ensure_ascii=False).encode("utf-8", "surrogatepass")
