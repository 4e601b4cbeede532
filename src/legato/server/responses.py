"""`/v1/responses`: the same answers in the form of OpenAI's newer interface. Nothing is kept between calls."""

import json
import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.responses import JSONResponse

from legato.request import GenerationOutput
from legato.server.answers import ChoiceText, Usage
from legato.server.completions import DEFAULT_CHAT_TOKENS
from legato.server.conversation import as_chat, prepare
from legato.server.errors import ApiError
from legato.server.protocol import ResponsesRequest
from legato.server.service import Outputs, Service
from legato.server.streaming import EventStream, event, unless_gone
from legato.server.tools import ToolCallReader, ToolStyle

Event = dict[str, Any]


def add_responses(app: FastAPI, service: Service) -> None:
    """The route."""

    @app.post("/v1/responses")
    async def responses(request: Request, asked: ResponsesRequest) -> Response:
        """Answer a conversation that is given whole."""
        return await unless_gone(request, _respond(service, asked))


async def _respond(service: Service, asked: ResponsesRequest) -> Response:
    headers, deadline = service.check(asked), service.deadline(asked)
    _refuse_state(asked)
    _refuse_unspeakable(asked)
    for name, given in asked.model_dump(include={"input", "instructions", "tools"}).items():
        service.refuse_long(name, given)
    chat = await service.preparing.run(
        lambda: prepare(service.tokenizer, as_chat(asked)), deadline=deadline, renamed=asked.renamed()
    )
    specs = service.specs(asked, [chat.prompt], DEFAULT_CHAT_TOKENS, chat.sampling)
    told = ResponseItems(asked, service.model, chat.style)
    return await _answer(service, asked, service.run(asked, specs, deadline), told, headers)


def _refuse_state(asked: ResponsesRequest) -> None:
    if asked.previous_response_id is not None:
        told = "previous_response_id is not known: nothing is kept here, give the whole conversation as input"
        raise ApiError(400, told, "previous_response_id")
    if asked.background:
        raise ApiError(400, "background=True is not allowed: nothing is kept here", "background")
    if (asked.n or 1) != 1:
        raise ApiError(400, f"n={asked.n} is not allowed: a response has one answer", "n")


def _refuse_unspeakable(asked: ResponsesRequest) -> None:
    """What is told again with the answer must be JSON, in UTF-8: Python's parser takes more than that."""
    for name, value in asked.model_dump(include={"instructions", "metadata", "text", "tools", "tool_choice"}).items():
        try:
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except ValueError as error:
            raise ApiError(400, f"{name} holds what is no JSON in UTF-8: {error}", name) from error


async def _answer(
    service: Service, asked: ResponsesRequest, outputs: Outputs, told: "ResponseItems", headers: dict[str, str]
) -> Response:
    choice = ChoiceText(service.tokenizer, 0)
    if not asked.stream:
        async with aclosing(outputs):
            async for _, output in outputs:
                for _ in told.push(choice, output):
                    pass
        return JSONResponse(told.response(), headers=headers)
    # The first output tells whether there will be an answer at all, while the status can still say so.
    first = await anext(outputs, None)
    return EventStream(_events(told, choice, first, outputs), headers)


async def _events(
    told: "ResponseItems", choice: ChoiceText, first: tuple[int, GenerationOutput] | None, outputs: Outputs
) -> AsyncGenerator[bytes, None]:
    current = first
    async with aclosing(outputs):
        try:
            for one in told.begin():
                yield event(one)
            while current is not None:
                for one in told.push(choice, current[1]):
                    yield event(one)
                current = await anext(outputs, None)
        except Exception as error:  # noqa: BLE001 - the status is sent already: it must be told here, whatever it is
            wrong = error if isinstance(error, ApiError) else ApiError.of(error)
            yield event(told.event("error", code=wrong.code, message=str(wrong), param=wrong.param))


class ResponseItems:
    """A response while it comes: a message, calls of functions, or both.

    Args:
        asked: the call.
        model: its name, as the client sees it.
        style: in which calls are written; None: there are none.
    """

    def __init__(self, asked: ResponsesRequest, model: str, style: ToolStyle | None) -> None:
        self._asked, self._model = asked, model
        self._reader = None if style is None else ToolCallReader(style)
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._items: list[dict[str, Any]] = []  # the last one is open until it is completed
        self._status = "in_progress"
        self._usage: Usage | None = None
        self._num_events = 0

    def event(self, kind: str, **content: Any) -> Event:
        """The next event of the stream."""
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **content}

    def begin(self) -> Iterator[Event]:
        """What is told before the answer."""
        yield self.event("response.created", response=self.response())
        yield self.event("response.in_progress", response=self.response())

    def push(self, choice: ChoiceText, output: GenerationOutput) -> Iterator[Event]:
        """What a partial or the final output adds."""
        text, _ = choice.push(output)
        is_last = output.is_finished()
        pieces = iter([("content", text)]) if self._reader is None else self._reader.push(text, is_last)
        for kind, piece in pieces:
            if kind == "content":
                yield from self._add_text(piece)
            elif kind == "name":
                yield from self._open(_new_call(piece))
            else:
                self._items[-1]["arguments"] += piece
                yield self._of_item("response.function_call_arguments.delta", delta=piece)
        if is_last:
            yield from self._end(output)

    def response(self) -> dict[str, Any]:
        """All of it, as far as it has come."""
        asked = self._asked
        is_cut = self._status == "incomplete"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": self._status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": self._model,
            "instructions": asked.instructions,
            "max_output_tokens": asked.new_tokens(),
            "metadata": asked.metadata or {},
            "output": [dict(item) for item in self._items],
            "parallel_tool_calls": asked.parallel_tool_calls,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "text": asked.text.model_dump(by_alias=True, exclude_none=True),
            "tool_choice": asked.model_dump(include={"tool_choice"})["tool_choice"],
            "tools": [tool.model_dump() for tool in asked.tools],
            "usage": None if self._usage is None else _usage(self._usage),
        }

    def _add_text(self, text: str) -> Iterator[Event]:
        if not text:
            return
        if not self._items or self._items[-1]["type"] != "message":
            yield from self._open(_new_message())
            yield self._of_item("response.content_part.added", content_index=0, part=_part(""))
        self._items[-1]["content"] = [_part(self._text() + text)]
        yield self._of_item("response.output_text.delta", content_index=0, delta=text, logprobs=[])

    def _text(self) -> str:
        content = self._items[-1]["content"]
        return str(content[0]["text"]) if content else ""

    def _open(self, item: dict[str, Any]) -> Iterator[Event]:
        yield from self._close("completed")
        self._items.append(item)
        yield self.event("response.output_item.added", output_index=len(self._items) - 1, item=dict(item))

    def _close(self, status: str) -> Iterator[Event]:
        """The last item is told to its end."""
        if not self._items or self._items[-1]["status"] != "in_progress":
            return
        item = self._items[-1]
        if item["type"] == "function_call":
            yield self._of_item("response.function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        elif item["content"]:
            yield self._of_item("response.output_text.done", content_index=0, text=self._text(), logprobs=[])
            yield self._of_item("response.content_part.done", content_index=0, part=item["content"][0])
        item["status"] = status
        yield self.event("response.output_item.done", output_index=len(self._items) - 1, item=dict(item))

    def _end(self, output: GenerationOutput) -> Iterator[Event]:
        status = "incomplete" if output.finish_reason == "length" else "completed"
        if not self._items:
            yield from self._open(_new_message())
        yield from self._close(status)
        self._status, self._usage = status, Usage()
        self._usage.add(output)
        yield self.event(f"response.{status}", response=self.response())

    def _of_item(self, kind: str, **content: Any) -> Event:
        return self.event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **content)


def _new_message() -> dict[str, Any]:
    message_id = f"msg_{uuid.uuid4().hex}"
    return {"id": message_id, "type": "message", "role": "assistant", "status": "in_progress", "content": []}


def _new_call(name: str) -> dict[str, Any]:
    item_id, call_id = f"fc_{uuid.uuid4().hex}", f"call_{uuid.uuid4().hex[:24]}"
    return {"id": item_id, "type": "function_call", "call_id": call_id, "name": name, "arguments": "",
            "status": "in_progress"}  # fmt: skip


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
