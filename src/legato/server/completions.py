"""`/v1/chat/completions` and `/v1/completions`: whole answers, and answers as they come."""

import uuid
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from starlette.concurrency import run_in_threadpool

from legato.request import GenerationOutput, RequestSpec
from legato.server.answers import ChatForm, Choices, ChoiceText, Envelope, Form, TextForm, Usage
from legato.server.beside import Deadline
from legato.server.conversation import prepare
from legato.server.errors import ApiError
from legato.server.protocol import ChatRequest, CompletionRequest, GenerationRequest
from legato.server.service import Service
from legato.server.streaming import unless_gone
from legato.server.telling import tell
from legato.text import encode

Told = TypeVar("Told")

MOST_AT_ONCE = 32  # log-probabilities that are told in the loop


def add_completions(app: FastAPI, service: Service) -> None:
    """Both routes."""

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, asked: ChatRequest) -> Response:
        """Answer a conversation."""
        return await unless_gone(request, _chat(service, asked))

    @app.post("/v1/completions")
    async def completions(request: Request, asked: CompletionRequest) -> Response:
        """Go on with texts."""
        return await unless_gone(request, _complete(service, asked))


async def _chat(service: Service, asked: ChatRequest) -> Response:
    headers, deadline = service.check(asked), service.deadline(asked.timeout)
    chat = await service.preparing.run(
        prepare, service.tokenizer, asked, service.limits, deadline=deadline, renamed=asked.renamed()
    )
    specs = service.specs(asked, [chat.prompt], chat.sampling)
    return await _answer(service, asked, specs, ChatForm(service.tokenizer, chat.style), headers, deadline)


async def _complete(service: Service, asked: CompletionRequest) -> Response:
    headers, deadline = service.check(asked), service.deadline(asked.timeout)
    prompts, most = asked.prompts(), service.limits.prompts
    if not 0 < len(prompts) <= most:
        raise ApiError(400, f"prompt has {len(prompts)} entries: it must have 1 to {most}", "prompt")
    if asked.best_of is not None and asked.best_of != (asked.n or 1):
        raise ApiError(400, f"best_of={asked.best_of} is not allowed: it must be n, or left out", "best_of")
    for prompt in prompts:
        if isinstance(prompt, str):
            service.limits.refuse_long("prompt", prompt)
    # One by one: of a client that has left, no more are begun.
    encoded = [
        await service.preparing.run(encode, service.tokenizer, prompt, deadline=deadline)
        if isinstance(prompt, str)
        else prompt
        for prompt in prompts
    ]
    specs = service.specs(asked, encoded)
    return await _answer(service, asked, specs, TextForm(service.tokenizer, asked.echo), headers, deadline)


class Completion:
    """The answer to a call, of one form or the other. See `Telling`.

    Args:
        num_samples: choices of each prompt.
        with_usage: whether a stream tells the call's tokens at its end.
    """

    closing = b"data: [DONE]\n\n"

    def __init__(self, service: Service, form: Form, num_samples: int, with_usage: bool) -> None:
        self._envelope = Envelope(f"{form.prefix}-{uuid.uuid4().hex}", service.model, form.kind)
        self._form = form
        self._choices = Choices(service.tokenizer, num_samples)
        self._with_usage = with_usage
        self._usage = Usage()
        self._told: dict[int, dict[str, Any]] = {}  # by the choice's index

    async def add(self, index: int, output: GenerationOutput) -> None:
        choice = self._choices.of(index, output)
        self._told[choice.index] = await _told(self._form.choice, choice, output)
        self._usage.add(output)

    def whole(self) -> dict[str, Any]:
        return self._envelope.whole([self._told[index] for index in sorted(self._told)], self._usage)

    def begin(self) -> Iterable[dict[str, Any]]:
        return ()

    async def push(self, index: int, output: GenerationOutput) -> Iterable[dict[str, Any]]:
        delta = await _told(self._form.delta, self._choices.of(index, output), output)
        if output.is_finished():
            self._usage.add(output)
        return () if delta is None else (self._envelope.chunk([delta]),)

    def end(self) -> Iterable[dict[str, Any]]:
        return (self._envelope.chunk([], self._usage),) if self._with_usage else ()

    def failed(self, error: ApiError) -> Iterable[dict[str, Any]]:
        return (error.as_dict(),)


async def _answer(
    service: Service, asked: GenerationRequest, specs: list[RequestSpec], form: Form, headers: dict[str, str],
    deadline: Deadline,
) -> Response:  # fmt: skip
    with_usage = asked.stream_options is not None and asked.stream_options.include_usage
    completion = Completion(service, form, service.manager.num_samples(specs[0]), with_usage)
    return await tell(service, asked, specs, completion, headers, deadline)


async def _told(
    form: Callable[[ChoiceText, GenerationOutput], Told], choice: ChoiceText, output: GenerationOutput
) -> Told:
    """Beside the loop where it is much: log-probabilities of thousands of tokens would hold that up."""
    is_much = choice.num_untold(output) > MOST_AT_ONCE
    return await run_in_threadpool(form, choice, output) if is_much else form(choice, output)
