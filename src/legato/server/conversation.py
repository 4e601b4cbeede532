"""From a conversation to a prompt, and to what its answer must look like."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from legato.errors import InvalidValueError
from legato.server.errors import ApiError
from legato.server.limits import Limits
from legato.server.protocol import (
    ChatRequest,
    Function,
    GenerationRequest,
    Message,
    NamedFunction,
    NamedTool,
    ResponsesRequest,
    TokenizeRequest,
)
from legato.server.tools import Tool, ToolStyle, tool_grammar, tool_prompt
from legato.text import encode, encode_chat


@dataclass(frozen=True)
class Conversation:
    """A conversation that is ready to be answered.

    Attributes:
        prompt: token ids up to where the answer begins.
        sampling: what is set of `SamplingParams`.
        style: in which calls of tools are written in the answer; None: there are none.
    """

    prompt: list[int]
    sampling: dict[str, Any]
    style: ToolStyle | None


def prepare(tokenizer: Any, asked: ChatRequest, limits: Limits) -> Conversation:
    """Encode a chat; its answer can call the tools that it may call, and none else.

    Raises:
        ApiError: it holds what cannot be served.
        InvalidValueError: it holds more text than `limits` allow, or as of `encode_chat`.
    """
    try:
        messages = [_plain(message) for message in asked.messages]
        limits.refuse_long("messages", messages)
        limits.refuse_long("tools", [dict(tool.function) for tool in asked.tools or ()])
        return _prepare(tokenizer, asked, messages)
    except RecursionError as error:
        raise InvalidValueError("the messages or tools are nested too deeply") from error


def _prepare(tokenizer: Any, asked: ChatRequest, messages: Sequence[dict[str, Any]]) -> Conversation:
    tools = [] if asked.tool_choice == "none" else [_tool(one.function) for one in asked.tools or ()]
    if not tools and asked.tool_choice not in ("none", "auto"):
        raise ApiError(400, "tool_choice needs tools to choose from", "tool_choice")
    told = tool_prompt(tokenizer, messages, tools)
    prompt = encode_chat(tokenizer, told.messages, told.template_tools, asked.chat_template_kwargs)
    sampling = asked.sampling()
    if not tools:
        return Conversation(prompt, sampling, None)
    style, content = told.style, sampling.pop("json_schema", None)
    given = sorted(sampling.keys() & {"regex", "choice", "grammar"})
    if given:
        raise ApiError(400, f"{given[0]} is not allowed beside tools: their calls follow a grammar too", given[0])
    if content is not None:
        if style.starts_answer:
            raise InvalidValueError("json_schema is not allowed beside tools: this model's calls are JSON too")
        style = replace(style, starts_answer=True)
    is_required = asked.tool_choice != "auto"
    is_parallel = asked.parallel_tool_calls and not isinstance(asked.tool_choice, NamedTool)
    grammar = tool_grammar(_callable(asked, tools), style, is_required, is_parallel, content)
    style = replace(style, starts_answer=style.starts_answer or is_required)
    return Conversation(prompt, {**sampling, "grammar": grammar}, style)


def tokenize(tokenizer: Any, asked: TokenizeRequest, limits: Limits) -> list[int]:
    """Token ids of a text, or of a conversation up to where its answer begins.

    Raises:
        ApiError, InvalidValueError: as of `prepare`.
    """
    if asked.messages is not None and asked.prompt is None:
        return prepare(tokenizer, ChatRequest(messages=asked.messages), limits).prompt
    if asked.prompt is None or asked.messages is not None:
        raise ApiError(400, "prompt or messages must be given, and not both", "prompt")
    limits.refuse_long("prompt", asked.prompt)
    return encode(tokenizer, asked.prompt)


def as_chat(asked: ResponsesRequest) -> ChatRequest:
    """A call of `/v1/responses` as a chat, of what makes its prompt and its sampling.

    Raises:
        InvalidValueError: an item of a kind that is not known, or of another shape.
    """
    wanted, choice = asked.text.format, asked.tool_choice
    schema = None if wanted.definition is None else {"schema": wanted.definition}
    named = {"type": "function", "function": {"name": choice.name}} if isinstance(choice, NamedFunction) else choice
    tools = [{name: value for name, value in tool if name != "type"} for tool in asked.tools]
    fields = {
        **{name: getattr(asked, name) for name in GenerationRequest.model_fields},
        "messages": _input_messages(asked.instructions, asked.input),
        "response_format": {"type": wanted.type, "json_schema": schema},
        "tools": [{"type": "function", "function": tool} for tool in tools],
        "tool_choice": named,
        "parallel_tool_calls": asked.parallel_tool_calls,
        "chat_template_kwargs": asked.chat_template_kwargs,
    }
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where, *inner = map(str, first["loc"])
        raise InvalidValueError(f"{where} is not allowed: {'.'.join(inner)}: {first['msg']}") from error


def _input_messages(instructions: str | None, given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items of `/v1/responses` as messages of a chat.

    Raises:
        InvalidValueError: an item of a kind that is not known.
    """
    messages: list[dict[str, Any]] = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    for item in given:
        kind = item.get("type", "message")
        if kind == "message" and "role" in item:
            messages.append({"role": item["role"], "content": _input_text(item.get("content", ""))})
        elif kind == "function_call":
            call = {"id": item.get("call_id"), "type": "function",
                    "function": {"name": item.get("name"), "arguments": item.get("arguments", "{}")}}  # fmt: skip
            if messages and messages[-1]["role"] == "assistant":
                messages[-1].setdefault("tool_calls", []).append(call)
            else:
                messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        elif kind == "function_call_output":
            output = _input_text(item.get("output", ""))
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        elif kind != "reasoning":
            raise InvalidValueError(f"input has an item of type {kind!r}: messages and function calls are understood")
    return messages


def _input_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        if not isinstance(part, dict) or part.get("type") not in ("input_text", "output_text", "text"):
            raise InvalidValueError("input has a part that is no text: only text is understood")
        texts.append(str(part.get("text", "")))
    return "".join(texts)


def _plain(message: Message) -> dict[str, Any]:
    """As chat templates know it: parts of text put together.

    Raises:
        ApiError: a part is no text.
    """
    given = {name: value for name, value in message if value is not None}
    if message.role == "developer":  # what OpenAI calls it now, and no template knows
        given["role"] = "system"
    if isinstance(message.content, list):
        other = [part.get("type") for part in message.content if part.get("type") != "text"]
        if other:
            raise ApiError(400, f"messages has a part of type {other[0]!r}: only text is understood", "messages")
        given["content"] = "".join(str(part.get("text", "")) for part in message.content)
    return {"content": "", **given}


def _tool(function: Function) -> Tool:
    parameters = function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}
    if parameters.get("type", "object") != "object":
        raise InvalidValueError(f"tools has {function.name!r} whose parameters are no object: their type must be it")
    return Tool(function.name, function.description, {"type": "object", **parameters})


def _callable(asked: ChatRequest, tools: Sequence[Tool]) -> Sequence[Tool]:
    """Those that the answer may call."""
    if not isinstance(asked.tool_choice, NamedTool):
        return tools
    name = asked.tool_choice.function.name
    chosen = [tool for tool in tools if tool.name == name]
    if not chosen:
        raise ApiError(400, f"tool_choice names {name!r}, which is not among the tools", "tool_choice")
    return chosen[:1]
