"""Tool calls: how a model is told of its tools, held to their schemas, and understood."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from legato.errors import InvalidValueError
from legato.grammar import JSON_SETTINGS
from legato.text import Message, render_chat

Event = tuple[Literal["content", "name", "arguments"], str]

_INSTRUCTIONS = """\
You may use these tools, one description a line:
{tools}
To use one, answer with its name and its arguments in this form:
<tool_call>
{{"name": "NAME", "arguments": {{}}}}
</tool_call>
What it returns comes back between <tool_response> and </tool_response>."""


@dataclass(frozen=True)
class ToolStyle:
    """How a model writes a call.

    Attributes:
        trigger: what tells a call from other text.
        head: what stands between that and the tool's name.
        middle: between the name and the arguments.
        end: after them.
        repeats: whether several calls may follow one another.
        starts_answer: whether an answer that has calls begins with one; else there may be text before.
    """

    trigger: str
    head: str
    middle: str
    end: str
    repeats: bool
    starts_answer: bool


# As Qwen, Hermes and SmolLM2 do it, and as Llama 3 does.
TAGGED = ToolStyle(
    "<tool_call>", '\n{"name": "', '", "arguments": ', "}\n</tool_call>", repeats=True, starts_answer=False
)
BARE = ToolStyle('{"name": "', "", '", "parameters": ', "}", repeats=False, starts_answer=True)


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: of letters, digits, _ and -.
        description: for the model.
        parameters: the JSON schema of its arguments, an object.
    """

    name: str
    description: str | None
    parameters: Mapping[str, Any]

    def described(self) -> dict[str, Any]:
        """As chat templates know it."""
        function = {"name": self.name, "description": self.description or "", "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolPrompt:
    """A conversation whose model knows its tools.

    Attributes:
        messages: for the chat template.
        template_tools: for it too; None where the messages say it all.
        style: in which the model will write calls.
    """

    messages: list[Message]
    template_tools: list[dict[str, Any]] | None
    style: ToolStyle


def tool_prompt(tokenizer: Any, messages: Sequence[Message], tools: Sequence[Tool]) -> ToolPrompt:
    """Tell the model of its tools, and of calls that were made: by its chat template where that knows of any, else in
    the system message and in the others' text.

    Raises:
        InvalidValueError: as of `encode_chat`.
    """
    if not tools and not any(message["role"] == "tool" or message.get("tool_calls") for message in messages):
        return ToolPrompt(list(messages), None, TAGGED)
    described = [tool.described() for tool in tools]
    messages = [_with_arguments_read(message) for message in messages]
    probe = [{"role": "user", "content": "?"}]
    told = render_chat(tokenizer, probe, described or [Tool("any", None, {"type": "object"}).described()])
    if told != render_chat(tokenizer, probe):
        is_bare = "<tool_call>" not in told and '"parameters"' in told
        return ToolPrompt(messages, described or None, BARE if is_bare else TAGGED)
    if not tools:
        return ToolPrompt([_in_plain_words(message) for message in messages], None, TAGGED)
    text = _INSTRUCTIONS.format(tools="\n".join(json.dumps(one["function"]) for one in described))
    plain = [_in_plain_words(message) for message in messages]
    if plain and plain[0]["role"] == "system":
        plain[0] = {**plain[0], "content": f"{plain[0]['content']}\n\n{text}"}
    else:
        plain.insert(0, {"role": "system", "content": text})
    return ToolPrompt(plain, None, TAGGED)


def _with_arguments_read(message: Message) -> Message:
    """Clients send a call's arguments as a text; templates want what it says."""
    if not message.get("tool_calls"):
        return message
    try:
        return {**message, "tool_calls": [_call_read(call) for call in message["tool_calls"]]}
    except (TypeError, KeyError, ValueError, RecursionError) as error:
        raise InvalidValueError(f"messages has a tool call that is none: {error}") from error


def _call_read(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if not isinstance(function["name"], str):
        raise TypeError(f"name={function['name']!r} is no text")
    arguments = function.get("arguments") or "{}"
    function["arguments"] = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {**call, "function": function}


def _in_plain_words(message: Message) -> Message:
    """For a template that knows no tools: calls and what they returned, as text."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    calls = [
        TAGGED.trigger + TAGGED.head + one["name"] + TAGGED.middle + json.dumps(one["arguments"]) + TAGGED.end
        for one in functions
    ]
    return {"role": message["role"], "content": "\n".join(filter(None, [message.get("content"), *calls]))}


def tool_grammar(
    tools: Sequence[Tool],
    style: ToolStyle,
    is_required: bool = False,
    is_parallel: bool = True,
    content: Mapping[str, Any] | None = None,
) -> str:
    """A grammar, in llguidance's Lark, whose answers call no other tools and with no other arguments than allowed.

    Args:
        tools: those that may be called.
        style: in which the model writes calls.
        is_required: whether it must call one.
        is_parallel: whether it may make several calls.
        content: the JSON schema of answers without a call, for a style that JSON does not begin like; None: they are
            any text, which may also precede calls.
    """
    calls = " | ".join(f"call_{number}" for number in range(len(tools)))
    again = f'("\\n" {json.dumps(style.trigger)} call)*' if style.repeats and is_parallel else ""
    trigger = json.dumps(style.trigger)
    if is_required:
        start = f"start: {trigger} call {again}"
    elif content is not None:
        start = f"start: content | {trigger} call {again}\ncontent: %json {_schema(content)}"
    elif not style.starts_answer:
        start = f"start: TEXT | head call {again}\nhead[lazy]: TEXT {trigger}\nTEXT: /(.|\\n)*/"
    else:  # what begins as a call is one
        start = f"start: TEXT | {trigger} call\nTEXT: /[^{{](.|\\n)*/"
    end = json.dumps(style.end)
    rules = [
        f"call_{number}: {json.dumps(style.head + tool.name + style.middle)} arguments_{number} {end}\n"
        f"arguments_{number}: %json {_schema(tool.parameters)}"
        for number, tool in enumerate(tools)
    ]
    return "\n".join(["%llguidance {}", start, f"call: {calls}", *rules])


def _schema(schema: Mapping[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": JSON_SETTINGS})


class ToolCallReader:
    """Tells calls from text while an answer comes.

    Args:
        style: in which the model writes calls.
    """

    def __init__(self, style: ToolStyle) -> None:
        self._style = style
        self._state: Callable[[bool], Event | None] = self._read_content
        self._rest = ""
        self._num_calls = 0
        self._may_call = True
        self._depth = 0
        self._in_string = self._is_escaped = False

    def push(self, text: str, is_last: bool = False) -> Iterator[Event]:
        """What the new text says; what may yet become something else is held back until it is told, or the last.

        Yields:
            Text beside calls, the name of each call, and its arguments piece by piece.
        """
        self._rest += text
        while (event := self._state(is_last)) is not None:
            if event[1]:
                yield event

    def _read_content(self, is_last: bool) -> Event | None:
        """Up to the next call."""
        trigger = self._style.trigger
        rest = self._rest.lstrip() if self._num_calls else self._rest
        if self._style.starts_answer and not self._num_calls and not trigger.startswith(rest[: len(trigger)]):
            self._may_call = False  # what does not begin as a call is none
        before, found, after = rest.partition(trigger)
        if found and self._may_call:
            self._rest, self._state = after, self._read_name
            self._num_calls += 1
            return "content", before.rstrip()
        if self._may_call and not is_last:
            held = next((n for n in range(len(trigger), 0, -1) if rest.endswith(trigger[:n])), 0)
            content = rest[: len(rest) - held].rstrip()  # the end of the line before a call belongs to it
        else:
            # Where only a call may come, one that was cut off as it began is no text.
            only_calls = self._num_calls > 0 or (self._style.starts_answer and self._may_call)
            content = "" if only_calls and trigger.startswith(rest) else rest
        self._rest = rest[len(content) :]
        return ("content", content) if content else None

    def _read_name(self, is_last: bool) -> Event | None:
        head = self._style.head
        name, found, after = self._rest[len(head) :].partition(self._style.middle)
        if not found:
            return None
        self._rest, self._state = after, self._read_arguments
        return "name", name

    def _read_arguments(self, is_last: bool) -> Event | None:
        """As far as the brackets go that it begins with."""
        for at, character in enumerate(self._rest):
            if self._in_string:
                self._in_string = self._is_escaped or character != '"'
                self._is_escaped = character == "\\" and not self._is_escaped
            elif character == '"':
                self._in_string = True
            else:
                self._depth += (character in "{[") - (character in "}]")
                if self._depth == 0:
                    arguments, self._rest = self._rest[: at + 1], self._rest[at + 1 :]
                    self._state = self._read_end
                    return "arguments", arguments
        arguments, self._rest = self._rest, ""
        return ("arguments", arguments) if arguments else None

    def _read_end(self, is_last: bool) -> Event | None:
        end = self._style.end
        if not self._rest.startswith(end):
            return None
        self._rest, self._state = self._rest[len(end) :], self._read_content
        return "content", ""
