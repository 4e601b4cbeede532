"""`/v1/responses`: the same answers in the form of OpenAI's newer interface. Nothing is kept between calls."""

import json
import time
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from fastapi import FastAPI, Request, Response

from legato.request import GenerationOutput
from legato.server.answers import ChoiceText, Usage
from legato.server.conversation import as_chat, prepare
from legato.server.errors import ApiError
from legato.server.protocol import ResponsesRequest
from legato.server.service import Service
from legato.server.streaming import unless_gone
from legato.server.telling import Event, tell
from legato.server.tools import ToolCallReader, ToolStyle


def add_responses(app: FastAPI, service: Service) -> None:
    """The route."""

    @app.post("/v1/responses")
    async def responses(request: Request, asked: ResponsesRequest) -> Response:
        """Answer a conversation that is given whole."""
        return await unless_gone(request, _respond(service, asked))


async def _respond(service: Service, asked: ResponsesRequest) -> Response:
    headers, deadline = service.check(asked), service.deadline(asked.timeout)
    _refuse_state(asked)
    _refuse_unspeakable(asked)
    chat = await service.preparing.run(
        lambda: prepare(service.tokenizer, as_chat(asked), service.limits), deadline=deadline, renamed=asked.renamed()
    )
    specs = service.specs(asked, [chat.prompt], chat.sampling)
    items = ResponseItems(asked, service.model, service.tokenizer, chat.style)
    return await tell(service, asked, specs, items, headers, deadline)


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
    for name in ("instructions", "metadata", "text", "tools", "tool_choice"):
        try:
            json.dumps(asked.model_dump(include={name}), ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"{name} holds what is no JSON in UTF-8: {error}", name) from error


class ResponseItems:
    """A response while it comes: a message, calls of functions, or both. See `Telling`.

    Args:
        asked: the call.
        model: its name, as the client sees it.
        style: in which calls are written; None: there are none.
    """

    closing = b""  # the last event says that it is the last

    def __init__(self, asked: ResponsesRequest, model: str, tokenizer: Any, style: ToolStyle | None) -> None:
        self._asked, self._model = asked, model
        self._choice = ChoiceText(tokenizer, 0)
        self._reader = None if style is None else ToolCallReader(style)
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._items: list[dict[str, Any]] = []  # the last one is open until it is completed
        self._status = "in_progress"
        self._error: dict[str, str] | None = None
        self._usage: Usage | None = None
        self._num_events = 0

    async def add(self, index: int, output: GenerationOutput) -> None:
        await self.push(index, output)

    def whole(self) -> dict[str, Any]:
        return self._response()

    def begin(self) -> Iterable[Event]:
        yield self._event("response.created", response=self._response())
        yield self._event("response.in_progress", response=self._response())

    async def push(self, index: int, output: GenerationOutput) -> Iterable[Event]:
        text, _ = self._choice.push(output)
        return [*self._add(text, output.is_finished()), *(self._end(output) if output.is_finished() else ())]

    def end(self) -> Iterable[Event]:
        return ()

    def failed(self, error: ApiError) -> Iterable[Event]:
        for item in self._items[-1:]:
            item["status"] = "completed" if item["status"] == "completed" else "incomplete"
        self._status, self._error = "failed", {"code": error.code or "server_error", "message": str(error)}
        yield self._event("error", code=error.code, message=str(error), param=error.param)
        yield self._event("response.failed", response=self._response())

    def _event(self, kind: str, **content: Any) -> Event:
        """The next event of the stream."""
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **content}

    def _add(self, text: str, is_last: bool) -> Iterator[Event]:
        pieces = iter([("content", text)]) if self._reader is None else self._reader.push(text, is_last)
        for kind, piece in pieces:
            if kind == "content":
                yield from self._add_text(piece)
            elif kind == "name":
                yield from self._open(_new_call(piece))
            else:
                self._items[-1]["arguments"] += piece
                yield self._of_item("response.function_call_arguments.delta", delta=piece)

    def _response(self) -> dict[str, Any]:
        """All of it, as far as it has come."""
        asked = self._asked
        is_cut = self._status == "incomplete"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": self._status,
            "error": self._error,
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
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=dict(item))

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
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=dict(item))

    def _end(self, output: GenerationOutput) -> Iterator[Event]:
        status = "incomplete" if output.finish_reason == "length" else "completed"
        if not self._items:
            yield from self._open(_new_message())
        yield from self._close(status)
        self._status, self._usage = status, Usage()
        self._usage.add(output)
        yield self._event(f"response.{status}", response=self._response())

    def _of_item(self, kind: str, **content: Any) -> Event:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **content)


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
