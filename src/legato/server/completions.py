"""`/v1/chat/completions` and `/v1/completions`: whole answers, and answers as they come."""

import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TypeVar

from fastapi import FastAPI, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse

from legato.request import GenerationOutput, RequestSpec
from legato.server.answers import ChatForm, Choices, ChoiceText, Envelope, Form, TextForm, Usage
from legato.server.beside import Deadline
from legato.server.conversation import prepare
from legato.server.errors import ApiError
from legato.server.protocol import ChatRequest, CompletionRequest, GenerationRequest
from legato.server.service import Outputs, Service
from legato.server.streaming import EventStream, event, unless_gone
from legato.text import encode

Told = TypeVar("Told")

DEFAULT_CHAT_TOKENS = 1024
DEFAULT_TEXT_TOKENS = 16
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
    headers, deadline = service.check(asked), service.deadline(asked)
    for name, given in asked.model_dump(include={"messages", "tools"}).items():
        service.refuse_long(name, given)
    chat = await service.preparing.run(prepare, service.tokenizer, asked, deadline=deadline, renamed=asked.renamed())
    specs = service.specs(asked, [chat.prompt], DEFAULT_CHAT_TOKENS, chat.sampling)
    return await _answer(service, asked, specs, ChatForm(service.tokenizer, chat.style), headers, deadline)


async def _complete(service: Service, asked: CompletionRequest) -> Response:
    headers, deadline = service.check(asked), service.deadline(asked)
    prompts, most = asked.prompts(), service.limits.prompts
    if not 0 < len(prompts) <= most:
        raise ApiError(400, f"prompt has {len(prompts)} entries: it must have 1 to {most}", "prompt")
    if asked.best_of is not None and asked.best_of != (asked.n or 1):
        raise ApiError(400, f"best_of={asked.best_of} is not allowed: it must be n, or left out", "best_of")
    for prompt in prompts:
        service.refuse_long("prompt", prompt)
    # One by one: of a client that has left, no more are begun.
    encoded = [
        await service.preparing.run(encode, service.tokenizer, prompt, deadline=deadline)
        if isinstance(prompt, str)
        else prompt
        for prompt in prompts
    ]
    specs = service.specs(asked, encoded, DEFAULT_TEXT_TOKENS)
    return await _answer(service, asked, specs, TextForm(service.tokenizer, asked.echo), headers, deadline)


async def _answer(
    service: Service, asked: GenerationRequest, specs: list[RequestSpec], form: Form, headers: dict[str, str],
    deadline: Deadline,
) -> Response:  # fmt: skip
    envelope = Envelope(f"{form.prefix}-{uuid.uuid4().hex}", service.model, form.kind)
    outputs = service.run(asked, specs, deadline)
    choices = Choices(service.tokenizer, service.manager.num_samples(specs[0]))
    if not asked.stream:
        return await _whole(envelope, outputs, choices, form, headers)
    # The first output tells whether there will be an answer at all, while the status can still say so.
    first = await anext(outputs, None)
    usage = asked.stream_options is not None and asked.stream_options.include_usage
    return EventStream(_events(envelope, first, outputs, choices, form, usage), headers)


async def _whole(
    envelope: Envelope, outputs: Outputs, choices: Choices, form: Form, headers: dict[str, str]
) -> Response:
    usage, told = Usage(), {}
    async with aclosing(outputs):
        async for index, output in outputs:
            choice = choices.of(index, output)
            told[choice.index] = await _told(form.choice, choice, output)
            usage.add(output)
    return JSONResponse(envelope.whole([told[index] for index in sorted(told)], usage), headers=headers)


async def _events(
    envelope: Envelope, first: tuple[int, GenerationOutput] | None, outputs: Outputs, choices: Choices, form: Form,
    with_usage: bool,
) -> AsyncGenerator[bytes, None]:  # fmt: skip
    usage, current = Usage(), first
    async with aclosing(outputs):
        try:
            while current is not None:
                index, output = current
                delta = await _told(form.delta, choices.of(index, output), output)
                if delta is not None:
                    yield event(envelope.chunk([delta]))
                if output.is_finished():
                    usage.add(output)
                current = await anext(outputs, None)
        except Exception as error:  # noqa: BLE001 - the status is sent already: it must be told here, whatever it is
            told = error if isinstance(error, ApiError) else ApiError.of(error)
            yield event(told.as_dict())
        else:
            if with_usage:
                yield event(envelope.chunk([], usage))
    yield b"data: [DONE]\n\n"


async def _told(
    form: Callable[[ChoiceText, GenerationOutput], Told], choice: ChoiceText, output: GenerationOutput
) -> Told:
    """Beside the loop where it is much: log-probabilities of thousands of tokens would hold that up."""
    is_much = choice.num_untold(output) > MOST_AT_ONCE
    return await run_in_threadpool(form, choice, output) if is_much else form(choice, output)
