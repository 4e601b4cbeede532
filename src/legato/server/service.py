"""What is served and how: from a call's fields to requests, and their outputs as they come."""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from legato.errors import LegatoError
from legato.manager import ContinuousBatchingManager
from legato.request import GenerationOutput, RequestSpec
from legato.server.beside import Beside, Deadline
from legato.server.errors import ApiError, shutting_down
from legato.server.limits import Limits, OpenCalls
from legato.server.metrics import Metrics
from legato.server.protocol import CONSTRAINTS_ELSEWHERE, Call, CompletionRequest, GenerationRequest

IGNORED_HEADER = "X-Legato-Ignored-Fields"
MOST_NAMED = 16
MOST_PREPARING = 4
Outputs = AsyncGenerator[tuple[int, GenerationOutput], None]


@dataclass
class Service:
    """What is served, and how.

    Attributes:
        manager: started.
        tokenizer: the model's.
        model: its name, as clients see it.
        api_keys: any of them lets a client in; none: everybody.
        strict: refuse fields that mean nothing here, in place of naming them in a header.
        limits: of one call.
        is_draining: new calls are refused; running ones finish.
        open_calls: how many there are.
        created: when, in seconds since 1970.
        metrics: of what was served.
        preparing: where calls become requests.
        tokenizing: where texts are tokenized for their own sake; none of that holds calls up.
    """

    manager: ContinuousBatchingManager
    tokenizer: Any
    model: str
    api_keys: Sequence[str] = ()
    strict: bool = False
    limits: Limits = field(default_factory=Limits)
    is_draining: bool = False
    open_calls: OpenCalls = field(default_factory=OpenCalls)
    created: int = field(default_factory=lambda: int(time.time()))
    metrics: Metrics = field(init=False)
    preparing: Beside = field(init=False)
    tokenizing: Beside = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = Metrics(lambda: self.manager.stats)
        self.preparing = Beside(MOST_PREPARING, "legato-prepare")
        self.tokenizing = Beside(1, "legato-tokenize")

    def is_ready(self) -> bool:
        return self.manager.is_running() and not self.is_draining

    def check(self, asked: Call) -> dict[str, str]:
        """Refuse what cannot be served at all.

        Returns:
            Headers for the answer: the fields that mean nothing here.

        Raises:
            ApiError: what is wrong.
        """
        if self.is_draining:
            raise shutting_down()
        if asked.model not in (None, self.model):
            raise ApiError(404, f"model={asked.model!r} is not served here, {self.model!r} is", "model",
                           code="model_not_found")  # fmt: skip
        ignored = asked.ignored_fields()
        constraint = next((name for name in ignored if name in CONSTRAINTS_ELSEWHERE), None)
        if constraint is not None:  # unheeded, it would give an answer that looks as if it had been heeded
            told = f"{constraint} is not known here: use {CONSTRAINTS_ELSEWHERE[constraint]}"
            raise ApiError(400, told, constraint, code="unknown_field")
        if ignored and self.strict:
            raise ApiError(400, f"{ignored[0]} is not a field that is known here", ignored[0], code="unknown_field")
        named = [
            name for name in ignored if name.isascii() and name.replace(".", "").isidentifier() and len(name) <= 64
        ]
        return {IGNORED_HEADER: ", ".join(named[:MOST_NAMED])} if named else {}

    def deadline(self, timeout: float | None = None) -> Deadline:
        """Of a call that has just come; `timeout` is what it asks for, in seconds."""
        return Deadline.after(min((s for s in (timeout, self.limits.seconds) if s is not None), default=None))

    def specs(
        self,
        asked: GenerationRequest,
        prompts: Sequence[list[int]],
        sampling: Mapping[str, Any] | None = None,
    ) -> list[RequestSpec]:
        """A request for each prompt; whatever is wrong with the first is wrong with all.

        Args:
            sampling: what is set of `SamplingParams`; None: what the call says.

        Raises:
            ApiError: they are too many, or may have too few tokens.
        """
        self._refuse_too_many(asked, len(prompts))
        new_tokens = _new_tokens(asked, room=max(1, self.manager.max_tokens - max(map(len, prompts), default=0)))
        return [
            RequestSpec(
                prompt,
                new_tokens,
                streaming=asked.stream,
                record_timestamps=True,
                cache_salt=asked.cache_salt,
                sampling=asked.sampling() if sampling is None else sampling,
                priority=asked.priority,
                score_from=1 if asked.only_scores() else None,
            )
            for prompt in prompts
        ]

    def _refuse_too_many(self, asked: GenerationRequest, num_prompts: int) -> None:
        num_choices = num_prompts * (asked.n or 1)
        most = min(self.limits.choices, self.manager.config.max_queue_size or self.limits.choices)
        if num_choices > most:
            told = f"the call asks for {num_choices} choices in all: at most {most} can be made at a time"
            raise ApiError(400, told, "prompt" if asked.n in (None, 1) else "n")

    async def run(self, asked: GenerationRequest, specs: Sequence[RequestSpec], deadline: Deadline) -> Outputs:
        """All outputs of the requests; the first that fails ends the call. Closing it early cancels them.

        Raises:
            ApiError: as the client is to be told.
        """
        unfinished = len(specs) * self.manager.num_samples(specs[0])
        try:
            async with aclosing(self.manager.as_completed_async(specs)) as outputs:
                while (current := await _next(outputs, deadline.at)) is not None:
                    output = current[1]
                    if output.is_finished():
                        unfinished -= 1
                        self.metrics.finished(output)
                    if output.error is not None:
                        raise self._failed(output, asked)
                    yield current
        except LegatoError as error:
            raise ApiError.of(error) from error
        except TimeoutError as error:
            self.metrics.cancelled(unfinished)
            raise deadline.error() from error
        except (asyncio.CancelledError, GeneratorExit):
            self.metrics.cancelled(unfinished)
            raise

    def _failed(self, output: GenerationOutput, asked: GenerationRequest) -> ApiError:
        if output.finish_reason == "error":
            return ApiError.invalid(output.error or "", asked.renamed())
        if self.is_draining:
            return shutting_down()
        return ApiError(503, "the request was cancelled", kind="server_error", code="cancelled")


def _new_tokens(asked: GenerationRequest, room: int) -> int | None:
    """New tokens at most, `room` of them where the call does not say; None: there are to be none.

    Raises:
        ApiError: they are too few.
    """
    if asked.only_scores():
        return None
    least = asked.min_tokens or 0
    given = asked.new_tokens()
    most = min(max(asked.default_tokens, least), room) if given is None else given
    if most < 1:
        name = asked.renamed().get("max_new_tokens", "max_tokens")
        told = f"{name}={most} is not allowed: it must be at least 1"
        scores = "; 0 is for completions with echo, logprobs and one choice"
        raise ApiError(400, told + (scores if isinstance(asked, CompletionRequest) else ""), name)
    if least > most:
        raise ApiError(400, f"min_tokens={least} is not allowed: only {most} new tokens are", "min_tokens")
    return most


async def _next(outputs: Outputs, deadline: float | None) -> tuple[int, GenerationOutput] | None:
    """None after the last. Who waits may be another task each time, so each wait has a timeout of its own."""
    if deadline is None:
        return await anext(outputs, None)
    if asyncio.get_running_loop().time() >= deadline:  # though there need be no wait
        raise TimeoutError
    async with asyncio.timeout_at(deadline):
        return await anext(outputs, None)
