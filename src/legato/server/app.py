"""The HTTP application: routes, and what happens between a request and its answer."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, StreamingResponse

from legato.errors import LegatoError
from legato.manager import ContinuousBatchingManager
from legato.request import GenerationOutput, RequestSpec
from legato.server.answers import (
    FINISH_REASONS,
    ChoiceText,
    Envelope,
    Usage,
    chat_choice,
    chat_delta,
    chat_logprobs,
    sample_of,
    text_choice,
    text_logprobs,
    with_prompt,
)
from legato.server.errors import ApiError
from legato.server.limits import Gate, OpenCalls, refuse
from legato.server.metrics import Metrics
from legato.server.page import add_page
from legato.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    Message,
    TokenizeRequest,
)
from legato.text import decode, encode, encode_chat

IGNORED_HEADER = "X-Legato-Ignored-Fields"
DEFAULT_CHAT_TOKENS = 1024
_LOOK_SECONDS = 0.1
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
        max_body_bytes, max_prompts, max_samples: of one call.
        is_draining: new calls are refused; running ones finish.
        open_calls: how many there are.
    """

    manager: ContinuousBatchingManager
    tokenizer: Any
    model: str
    api_keys: Sequence[str] = ()
    strict: bool = False
    max_body_bytes: int = 4 << 20
    max_prompts: int = 256
    max_samples: int = 128
    is_draining: bool = False
    open_calls: OpenCalls = field(default_factory=OpenCalls)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.metrics = Metrics(lambda: self.manager.stats)

    def is_ready(self) -> bool:
        return self.manager.is_running() and not self.is_draining

    def check(self, asked: GenerationRequest, response_headers: dict[str, str]) -> None:
        """Raises `ApiError` for what cannot be served at all."""
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", kind="server_error", code="shutting_down")
        if asked.model not in (None, self.model):
            raise ApiError(404, f"model={asked.model!r} is not served here, {self.model!r} is", "model",
                           code="model_not_found")  # fmt: skip
        ignored = asked.ignored_fields()
        if ignored and self.strict:
            raise ApiError(400, f"{ignored[0]} is not a field that is known here", ignored[0], code="unknown_field")
        if ignored:
            named = [name for name in ignored if name.isascii() and name.isidentifier() and len(name) <= 64]
            response_headers[IGNORED_HEADER] = ", ".join(named[:16])
        if (asked.n or 1) > self.max_samples:
            raise ApiError(400, f"n={asked.n} is not allowed: it must be at most {self.max_samples}", "n")

    def specs(self, asked: GenerationRequest, prompts: Sequence[list[int]], default_tokens: int) -> list[RequestSpec]:
        """A request for each prompt, checked; whatever is wrong with the first is wrong with all."""
        new_tokens = asked.new_tokens()
        if new_tokens is not None and new_tokens < 1:
            raise ApiError(400, f"max_tokens={new_tokens} is not allowed: it must be at least 1", "max_tokens")
        room = max(1, self.manager.max_tokens - max(map(len, prompts), default=0))
        return [
            RequestSpec(
                prompt,
                new_tokens or min(default_tokens, room),
                streaming=asked.stream,
                record_timestamps=True,
                cache_salt=asked.cache_salt,
                sampling=asked.sampling(),
            )
            for prompt in prompts
        ]

    async def run(self, specs: Sequence[RequestSpec]) -> Outputs:
        """All outputs of the requests; the first that fails ends the call. Closing it early cancels them.

        Raises:
            ApiError: as the client is to be told.
        """
        try:
            async with aclosing(self.manager.as_completed_async(specs)) as outputs:
                async for index, output in outputs:
                    if output.is_finished():
                        self.metrics.finished(output)
                    if output.error is not None:
                        raise _failed(output)
                    yield index, output
        except LegatoError as error:
            raise ApiError.of(error) from error


def _failed(output: GenerationOutput) -> ApiError:
    if output.finish_reason == "error":
        return ApiError.invalid(output.error or "")
    return ApiError(503, "the request was cancelled", kind="server_error", code="cancelled")


def create_app(service: Service) -> FastAPI:
    """The application around a running manager."""
    app = FastAPI(title="Legato", version=version("legato"), docs_url=None, redoc_url=None)
    app.add_middleware(
        Gate, open_calls=service.open_calls, api_keys=service.api_keys, max_body_bytes=service.max_body_bytes
    )
    _add_errors(app)
    _add_generation(app, service)
    _add_facts(app, service)
    add_page(app, service.manager, service.is_ready)
    return app


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> JSONResponse:
        return refuse(error)

    @app.exception_handler(LegatoError)
    async def legato_error(request: Request, error: LegatoError) -> JSONResponse:
        return refuse(ApiError.of(error))

    @app.exception_handler(RequestValidationError)
    async def wrong_shape(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = [part for part in first["loc"] if isinstance(part, str) and part != "body"]
        return refuse(ApiError(400, f"{'.'.join(where) or 'the body'}: {first['msg']}", where[0] if where else None))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        return refuse(ApiError(error.status_code, str(error.detail), code="http_error"))


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, asked: ChatRequest) -> Response:
        """Answer a conversation."""
        headers: dict[str, str] = {}
        service.check(asked, headers)
        prompt = await run_in_threadpool(_encode_messages, service.tokenizer, asked.messages)
        specs = service.specs(asked, [prompt], DEFAULT_CHAT_TOKENS)
        return await _unless_gone(request, _answer(service, asked, specs, _Chat(service), headers))

    @app.post("/v1/completions")
    async def completions(request: Request, asked: CompletionRequest) -> Response:
        """Go on with texts."""
        headers: dict[str, str] = {}
        service.check(asked, headers)
        prompts = asked.prompts()
        if not 0 < len(prompts) <= service.max_prompts:
            raise ApiError(400, f"prompt has {len(prompts)} entries: it must have 1 to {service.max_prompts}", "prompt")
        if asked.best_of is not None and asked.best_of != (asked.n or 1):
            raise ApiError(400, f"best_of={asked.best_of} is not allowed: it must be n, or left out", "best_of")
        encoded = await run_in_threadpool(_encode_prompts, service.tokenizer, prompts)
        specs = service.specs(asked, encoded, 16)
        return await _unless_gone(request, _answer(service, asked, specs, _Text(service, asked.echo), headers))

    @app.post("/v1/embeddings")
    async def embeddings() -> Response:
        """Refused: these models make none."""
        raise ApiError(400, "this server generates text: it has no embeddings", code="not_supported")


def _add_facts(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The model that is served."""
        return {"object": "list", "data": [_model_card(service)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """The same by its name."""
        if name != service.model:
            raise ApiError(404, f"model={name!r} is not served here", "model", code="model_not_found")
        return _model_card(service)

    @app.post("/tokenize")
    async def tokenize(asked: TokenizeRequest) -> dict[str, Any]:
        """Token ids of a text or a conversation."""
        if (asked.prompt is None) == (asked.messages is None):
            raise ApiError(400, "prompt or messages must be given, and not both", "prompt")
        if asked.messages is not None:
            tokens = await run_in_threadpool(_encode_messages, service.tokenizer, asked.messages)
        else:
            tokens = await run_in_threadpool(encode, service.tokenizer, asked.prompt or "")
        return {"tokens": tokens, "count": len(tokens), "max_model_len": service.manager.max_tokens}

    @app.post("/detokenize")
    async def detokenize(asked: DetokenizeRequest) -> dict[str, Any]:
        """The text of token ids."""
        size = len(service.tokenizer)
        bad = [token_id for token_id in asked.tokens if not 0 <= token_id < size]
        if bad:
            raise ApiError(400, f"tokens has {bad[0]}: the tokenizer knows 0 to {size - 1}", "tokens")
        return {"prompt": await run_in_threadpool(decode, service.tokenizer, asked.tokens)}

    @app.get("/health")
    async def health() -> Response:
        """200 as long as the engine is alive."""
        return Response(status_code=200 if service.manager.is_running() else 503)

    @app.get("/ready")
    async def ready() -> Response:
        """200 as long as new requests are taken."""
        return Response(status_code=200 if service.is_ready() else 503)

    @app.get("/version")
    async def show_version() -> dict[str, str]:
        """Of Legato."""
        return {"version": version("legato")}

    @app.get("/metrics")
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _model_card(service: Service) -> dict[str, Any]:
    return {
        "id": service.model, "object": "model", "created": service.created, "owned_by": "legato",
        "max_model_len": service.manager.max_tokens,
    }  # fmt: skip


# From a request to its answer


class _Chat:
    """How a chat's outputs are told."""

    kind, prefix = "chat.completion", "chatcmpl"

    def __init__(self, service: Service) -> None:
        self._tokenizer = service.tokenizer
        self._begun: set[int] = set()

    def delta(self, choice: ChoiceText, output: GenerationOutput) -> dict[str, Any] | None:
        text, logprobs = choice.push(output)
        if not (text or logprobs or output.is_finished()):
            return None
        is_first = choice.index not in self._begun
        self._begun.add(choice.index)
        reason = FINISH_REASONS.get(output.finish_reason or "")
        return chat_delta(choice.index, text, chat_logprobs(self._tokenizer, logprobs), reason, is_first)

    def choice(self, choice: ChoiceText, output: GenerationOutput) -> dict[str, Any]:
        text, logprobs = choice.push(output)
        reason = FINISH_REASONS.get(output.finish_reason or "")
        return chat_choice(choice.index, text, chat_logprobs(self._tokenizer, logprobs), reason)


class _Text:
    """How a completion's outputs are told."""

    kind, prefix = "text_completion", "cmpl"

    def __init__(self, service: Service, echo: bool) -> None:
        self._tokenizer, self._echo = service.tokenizer, echo
        self._offsets: dict[int, int] = {}

    def delta(self, choice: ChoiceText, output: GenerationOutput) -> dict[str, Any] | None:
        is_first = choice.index not in self._offsets
        told = self.choice(choice, output)
        return told if told["text"] or told["logprobs"] or is_first or output.is_finished() else None

    def choice(self, choice: ChoiceText, output: GenerationOutput) -> dict[str, Any]:
        text, new = choice.push(output)
        tokens: list[Any] = list(new)
        offset = self._offsets.get(choice.index, 0)
        if self._echo and choice.index not in self._offsets:
            prompt, prompt_tokens = with_prompt(self._tokenizer, output)
            text, tokens = prompt + text, prompt_tokens + tokens
        self._offsets[choice.index] = offset + len(text)
        reason = FINISH_REASONS.get(output.finish_reason or "")
        return text_choice(choice.index, text, text_logprobs(self._tokenizer, tokens, offset), reason)


async def _unless_gone(request: Request, answer: Coroutine[Any, Any, Response]) -> Response:
    """Given up when the client goes away: nobody else tells a call whose response has not begun."""
    working = asyncio.ensure_future(answer)
    try:
        while not working.done():
            await asyncio.wait([working], timeout=_LOOK_SECONDS)
            if not working.done() and await request.is_disconnected():
                return Response(status_code=499)
        return working.result()
    finally:
        working.cancel()


async def _answer(
    service: Service, asked: GenerationRequest, specs: list[RequestSpec], form: _Chat | _Text, headers: dict[str, str]
) -> Response:
    envelope = Envelope(f"{form.prefix}-{uuid.uuid4().hex}", service.model, form.kind)
    outputs = service.run(specs)
    num_samples = service.manager.num_samples(specs[0])
    choices = [ChoiceText(service.tokenizer, index) for index in range(len(specs) * num_samples)]
    if not asked.stream:
        return await _whole(envelope, outputs, num_samples, choices, form, headers)
    # The first output tells whether there will be an answer at all, while the status can still say so.
    first = await anext(outputs, None)
    usage = asked.stream_options is not None and asked.stream_options.include_usage
    events = _events(envelope, first, outputs, num_samples, choices, form, usage)
    return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store", **headers})


async def _whole(
    envelope: Envelope, outputs: Outputs, num_samples: int, choices: list[ChoiceText], form: _Chat | _Text,
    headers: dict[str, str],
) -> Response:  # fmt: skip
    usage, told = Usage(), {}
    async with aclosing(outputs):
        async for index, output in outputs:
            choice = choices[index * num_samples + sample_of(output)]
            told[choice.index] = form.choice(choice, output)
            usage.add(output)
    return JSONResponse(envelope.whole([told[index] for index in sorted(told)], usage), headers=headers)


async def _events(
    envelope: Envelope, first: tuple[int, GenerationOutput] | None, outputs: Outputs, num_samples: int,
    choices: list[ChoiceText], form: _Chat | _Text, with_usage: bool,
) -> AsyncGenerator[bytes, None]:  # fmt: skip
    usage, current = Usage(), first
    async with aclosing(outputs):
        try:
            while current is not None:
                index, output = current
                delta = form.delta(choices[index * num_samples + sample_of(output)], output)
                if delta is not None:
                    yield _event(envelope.chunk([delta]))
                if output.is_finished():
                    usage.add(output)
                current = await anext(outputs, None)
        except Exception as error:  # noqa: BLE001 - the status is sent already: it must be told here, whatever it is
            told = error if isinstance(error, ApiError) else ApiError.of(error)
            yield _event(told.as_dict())
        else:
            if with_usage:
                yield _event(envelope.chunk([], usage))
    yield b"data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _encode_messages(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    return encode_chat(tokenizer, [_plain(message) for message in messages])


def _plain(message: Message) -> dict[str, Any]:
    """As chat templates know it: parts of text put together."""
    given = message.model_dump(exclude_none=True)
    if isinstance(message.content, list):
        other = [part.get("type") for part in message.content if part.get("type") != "text"]
        if other:
            raise ApiError(400, f"messages has a part of type {other[0]!r}: only text is understood", "messages")
        given["content"] = "".join(str(part.get("text", "")) for part in message.content)
    return {"content": "", **given}


def _encode_prompts(tokenizer: Any, prompts: Sequence[Any]) -> list[list[int]]:
    return [encode(tokenizer, prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts]
