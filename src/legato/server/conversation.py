"""From a conversation to a prompt, and to what its answer must look like."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from legato.errors import InvalidValueError
from legato.server.errors import ApiError
from legato.server.protocol import ChatRequest, Message, NamedTool
from legato.server.tools import Tool, ToolStyle, tool_grammar, tool_prompt
from legato.text import encode_chat


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


def prepare(tokenizer: Any, asked: ChatRequest) -> Conversation:
    """Encode a chat; its answer can call the tools that it may call, and none else.

    Raises:
        ApiError: it holds what cannot be served.
        InvalidValueError: as of `encode_chat`.
    """
    messages = plain_messages(asked.messages)
    sampling = asked.sampling()
    if not asked.tools or asked.tool_choice == "none":
        if not asked.tools and asked.tool_choice not in ("none", "auto"):
            raise ApiError(400, "tool_choice needs tools to choose from", "tool_choice")
        return Conversation(encode_chat(tokenizer, messages, None, asked.chat_template_kwargs), sampling, None)
    tools = [_tool(number, asked) for number in range(len(asked.tools))]
    told = tool_prompt(tokenizer, messages, tools)
    prompt = encode_chat(tokenizer, told.messages, told.template_tools, asked.chat_template_kwargs)
    content = sampling.pop("json_schema", None)
    given = sorted(sampling.keys() & {"regex", "choice", "grammar"})
    if given:
        raise ApiError(400, f"{given[0]} is not allowed beside tools: their calls follow a grammar too", given[0])
    if content is not None and not told.style.repeats:
        raise ApiError(400, "response_format is not allowed beside tools: this model's calls are JSON too", "tools")
    is_required = asked.tool_choice != "auto"
    grammar = tool_grammar(_callable(asked, tools), told.style, is_required, asked.parallel_tool_calls, content)
    return Conversation(prompt, {**sampling, "grammar": grammar}, told.style)


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """As chat templates know them: parts of text put together.

    Raises:
        ApiError: a part is no text.
    """
    return [_plain(message) for message in messages]


def _plain(message: Message) -> dict[str, Any]:
    given = message.model_dump(exclude_none=True)
    if message.role == "developer":  # what OpenAI calls it now, and no template knows
        given["role"] = "system"
    if isinstance(message.content, list):
        other = [part.get("type") for part in message.content if part.get("type") != "text"]
        if other:
            raise ApiError(400, f"messages has a part of type {other[0]!r}: only text is understood", "messages")
        given["content"] = "".join(str(part.get("text", "")) for part in message.content)
    return {"content": "", **given}


def _tool(number: int, asked: ChatRequest) -> Tool:
    assert asked.tools is not None
    function = asked.tools[number].function
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
