"""Tools and `/v1/responses`, with the real `openai` client against a running `legato serve` with SmolLM2."""

import json
import random
from dataclasses import replace
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel

from legato.errors import InvalidValueError
from legato.server.conversation import as_chat, prepare, tokenize
from legato.server.limits import Limits
from legato.server.protocol import ChatRequest, CompletionRequest, ResponsesRequest, TokenizeRequest
from legato.server.tools import BARE, TAGGED, Event, Tool, ToolCallReader, ToolStyle, tool_grammar, tool_prompt
from tests.server.legato_server import KEY, Server

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TREE = {
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/node"}},
    "required": ["root"],
    "additionalProperties": False,
    "$defs": {"node": {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
                       "required": ["n"], "additionalProperties": False}},
}  # fmt: skip
SCHEMAS = {"get_weather": WEATHER, "plant-tree": TREE}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": f"To {name}.", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
ASKED: Any = {
    "model": "smollm2",
    "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
    "tools": TOOLS,
    "temperature": 1.0,
    "max_tokens": 200,
}


def check(call: Any) -> None:
    assert call.type == "function" and call.id
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.parametrize("seed", range(4))
def test_required_calls_fit_their_schema(client: openai.OpenAI, seed: int) -> None:
    choice = client.chat.completions.create(**ASKED, tool_choice="required", seed=seed).choices[0]
    assert choice.message.tool_calls and choice.message.content is None and choice.finish_reason == "tool_calls"
    for call in choice.message.tool_calls:
        check(call)


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_named_tool_is_called_once(client: openai.OpenAI, name: str) -> None:
    choice = client.chat.completions.create(
        **ASKED, tool_choice={"type": "function", "function": {"name": name}}, parallel_tool_calls=False
    ).choices[0]
    assert choice.message.tool_calls is not None
    assert [call.function.name for call in choice.message.tool_calls] == [name]
    check(choice.message.tool_calls[0])


@pytest.mark.parametrize("size", range(1, 8))
def test_a_required_call_that_is_cut_off_is_no_text(client: openai.OpenAI, size: int) -> None:
    choice = client.chat.completions.create(**{**ASKED, "max_tokens": size}, tool_choice="required").choices[0]
    assert (choice.finish_reason, choice.message.content or "") == ("length", "")


def test_a_stream_tells_the_same_calls(client: openai.OpenAI) -> None:
    asked = {**ASKED, "tool_choice": "required", "seed": 3, "n": 2}
    whole = client.chat.completions.create(**asked)
    told: list[list[dict[str, str]]] = [[], []]
    reasons = ["", ""]
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            reasons[choice.index] = choice.finish_reason or ""
            for delta in choice.delta.tool_calls or []:
                if delta.id:
                    assert delta.index == len(told[choice.index])
                    told[choice.index].append({"name": delta.function.name, "arguments": ""})
                told[choice.index][delta.index]["arguments"] += delta.function.arguments or ""
    assert reasons == ["tool_calls"] * 2
    for ours, choice in zip(told, whole.choices, strict=True):
        expected = [call.function for call in choice.message.tool_calls or []]
        assert ours == [{"name": one.name, "arguments": one.arguments} for one in expected]


def test_without_a_call_the_answer_is_text(client: openai.OpenAI) -> None:
    """Whether it calls is the model's to say; what it may not do is write half a call as text."""
    for seed in range(6):
        choice = client.chat.completions.create(**{**ASKED, "seed": seed, "max_tokens": 60}).choices[0]
        assert "<tool_call>" not in (choice.message.content or "")
        for call in choice.message.tool_calls or []:
            if choice.finish_reason != "length":
                check(call)
    none = client.chat.completions.create(**{**ASKED, "max_tokens": 8}, tool_choice="none").choices[0]
    assert none.message.tool_calls is None and none.message.content


def test_what_a_tool_returned_is_read(client: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    lengths = []
    for result in ("18 C", "18 degrees and a little rain in the evening, wind from the west"):
        messages: Any = [
            *ASKED["messages"],
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": result},
        ]
        told = client.chat.completions.create(**{**ASKED, "messages": messages, "max_tokens": 4}, tool_choice="none")
        assert told.usage is not None
        lengths.append(told.usage.prompt_tokens)
    assert lengths[1] - lengths[0] > 8


def test_calls_that_were_made_are_told_whatever_may_be_called_now(smollm2_tokenizer: Any) -> None:
    """By the template that knows no tools in words, and by one that does as it will have them."""
    call = {"type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    history: Any = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "18 C"},
    ]
    knowing = type(smollm2_tokenizer).from_pretrained(smollm2_tokenizer.name_or_path)
    knowing.chat_template = TEMPLATE % "<tool_call>"
    for choice in ("none", "auto", "required"):
        for tools in (None, TOOLS) if choice != "required" else (TOOLS,):
            asked = ChatRequest(messages=history, tools=tools, tool_choice=choice)
            plain = smollm2_tokenizer.decode(prepare(smollm2_tokenizer, asked, Limits()).prompt)
            assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>' in plain
            assert "<tool_response>\n18 C\n</tool_response>" in plain
            assert ("plant-tree" in plain) == (tools is not None and choice != "none")
            assert "(Oslo)" in knowing.decode(prepare(knowing, asked, Limits()).prompt)
    assert "(Oslo)" in knowing.decode(tokenize(knowing, TokenizeRequest(messages=asked.messages), Limits()))


def test_a_call_belongs_to_the_message_before_it() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    items: Any = [*said, call, {**call, "call_id": "2"}]
    messages = as_chat(ResponsesRequest(input=items)).messages
    assert [message.role for message in messages] == ["user", "assistant"]
    assert messages[1].content == "b" and len(messages[1].model_dump()["tool_calls"]) == 2


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest, ResponsesRequest])
def test_null_is_as_good_as_nothing(kind: Any) -> None:
    needed = {"messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi", "input": "Hi"}
    own = {name: value for name, value in needed.items() if name in kind.model_fields}
    nulls = dict.fromkeys(kind.model_fields.keys() - own.keys())
    assert kind(**own, **nulls).model_dump() == kind(**own).model_dump()
    inner: Any = {
        "response_format": {"type": "json_object", "json_schema": None, "schema": None},
        "text": {"format": None, "verbosity": None},
        "stream_options": {"include_usage": None},
    }
    asked = kind(**own, **{name: value for name, value in inner.items() if name in kind.model_fields})
    assert not asked.ignored_fields()


@pytest.mark.parametrize("depth", [100, 200, 240, 480])
def test_deep_schemas_are_understood_or_refused(server: Server, depth: int) -> None:
    deep = '{"type": "object", "properties": {"a": ' * depth + '{"type": "string"}' + "}}" * depth
    schema = {"deep": None}  # stands for it: Python's encoder does not go as deep as its parser
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    tool = {"name": "f", "parameters": schema}
    for path, field, asked in (
        ("/v1/chat/completions", "tools", {**chat, "tools": [{"type": "function", "function": tool}]}),
        ("/v1/chat/completions", "messages", {"messages": [{"role": "user", "content": "Hi", "name": schema}]}),
        ("/v1/chat/completions", "json_schema", {**chat, "json_schema": schema}),
        ("/v1/responses", "tools", {"input": "Hi", "max_output_tokens": 1, "tools": [{"type": "function", **tool}]}),
        ("/v1/responses", "json_schema", {"input": "Hi", "max_output_tokens": 1, "json_schema": schema}),
        ("/v1/responses", "input", {"input": [{"role": "user", "content": [schema]}], "max_output_tokens": 1}),
        ("/v1/completions", "json_schema", {"prompt": "Hi", "max_tokens": 1, "json_schema": schema}),
        ("/tokenize", "messages", {"messages": [{"role": "user", "content": "Hi", "name": schema}]}),
    ):
        content = json.dumps(asked).replace('{"deep": null}', deep)
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        told = httpx.post(server.url + path, content=content, headers=headers, timeout=60)
        assert told.status_code in (200, 400), (path, field, told.text[:500])
        assert told.is_success or told.json()["error"]["param"] in (field, None), (path, field, told.text[:500])


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {
            "type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}}}]}, "tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"extra_body": {"regex": "a+"}}, "regex"),
        ({"extra_body": {"chat_template_kwargs": {"tokenize": False}}}, "chat_template_kwargs"),
        ({"extra_body": {"priority": 1 << 40}}, "priority"),
        ({"extra_body": {"timeout": 0}}, "timeout"),
        ({"tools": None, "response_format": {"type": "json_schema"}}, "response_format"),
        ({"tools": None, "response_format": {"type": "json_schema", "json_schema": {
            "name": "a", "schema": {"type": "nothing"}}}}, "response_format"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(client: openai.OpenAI, wrong: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{**ASKED, **wrong})
    assert caught.value.param == param, caught.value.message


class Place(BaseModel):
    """Parsed."""

    kind: Literal["city", "village"]
    is_large: bool


def test_parsed_answers(client: openai.OpenAI) -> None:
    for tools in ([], TOOLS):
        told = client.chat.completions.parse(
            model="smollm2", messages=ASKED["messages"], response_format=Place, max_tokens=200, temperature=1.0, seed=1,
            parallel_tool_calls=False,
            tools=[{**tool, "function": {**tool["function"], "strict": True}} for tool in tools] or openai.omit,
        )  # fmt: skip
        message = told.choices[0].message
        assert isinstance(message.parsed, Place) or message.tool_calls
    response = client.responses.parse(model="smollm2", input="Where is it?", text_format=Place, max_output_tokens=60)
    assert isinstance(response.output_parsed, Place)


def test_a_response_is_the_chats_answer(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say something."}]
    chat = client.chat.completions.create(model="smollm2", messages=messages, max_tokens=12, temperature=0)
    asked: Any = {"model": "smollm2", "max_output_tokens": 12, "temperature": 0, "instructions": "Be brief."}
    content = chat.choices[0].message.content
    for given in ("Say something.", [{"role": "user", "content": [{"type": "input_text", "text": "Say something."}]}]):
        told = client.responses.create(**asked, input=given)
        assert told.output_text == content and told.usage is not None and chat.usage is not None
        assert told.usage.total_tokens == chat.usage.total_tokens
        assert told.status == "incomplete" and told.incomplete_details is not None
    with client.responses.stream(**asked, input="Say something.") as stream:
        events = list(stream)
    assert events[-1].response.output_text == content
    assert [event.sequence_number for event in events] == sorted({event.sequence_number for event in events})
    kinds = [event.type for event in events]
    assert kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added",
                         "response.content_part.added"]  # fmt: skip
    assert kinds[-4:] == ["response.output_text.done", "response.content_part.done", "response.output_item.done",
                          "response.incomplete"]  # fmt: skip
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == content


def test_a_response_calls_tools(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
    asked: Any = {"model": "smollm2", "tools": tools, "tool_choice": "required", "temperature": 1.0}
    asked |= {"max_output_tokens": 200, "extra_body": {"seed": 5}}
    told = client.responses.create(**asked, input="Plant one.")
    calls = [item for item in told.output if item.type == "function_call"]
    assert calls and len(calls) == len(told.output) and told.status == "completed"
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    done = [event for event in client.responses.create(**asked, input="Plant one.", stream=True)
            if event.type == "response.function_call_arguments.done"]  # fmt: skip
    assert [event.arguments for event in done] == [call.arguments for call in calls]
    more: Any = [
        {"role": "user", "content": "Plant one."},
        *[call.model_dump(include={"type", "call_id", "name", "arguments"}) for call in calls],
        *[{"type": "function_call_output", "call_id": call.call_id, "output": "done"} for call in calls],
    ]
    after = client.responses.create(**{**asked, "tool_choice": "none", "max_output_tokens": 5}, input=more)
    assert after.output_text and after.usage is not None and told.usage is not None


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"input": [{"role": 5}]}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x " * 9000}, "input"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "nothing"}}}}, "text"),
        ({"input": [{"type": "function_call", "arguments": "{}"}]}, "input"),
        ({"text": {"format": {"type": "json_object", "schema_": {}}}}, "text"),
        ({"model": "gpt-9"}, "model"),
    ],
)
def test_what_a_response_cannot_be_is_refused(client: openai.OpenAI, wrong: Any, param: str) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.responses.create(**{"model": "smollm2", "input": "Hi", **wrong})
    assert caught.value.status_code in (400, 404) and caught.value.param == param


def test_a_call_that_takes_too_long_ends(server: Server, client: openai.OpenAI) -> None:
    asked: Any = {"model": "smollm2", "prompt": "Once", "max_tokens": 2000}
    late = {"timeout": 0.3, "ignore_eos": True}
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(**asked, extra_body=late)
    assert caught.value.status_code == 408 and caught.value.code == "timeout"
    with pytest.raises(openai.APIError) as told:
        for _ in client.completions.create(**asked, extra_body=late, stream=True):
            pass
    assert told.value.code == "timeout"
    assert server.settles("legato_running 0.0")


# Without a server

SOME_TOOLS = [Tool(name, None, schema) for name, schema in SCHEMAS.items()]


def events(style: ToolStyle, text: str, rng: random.Random) -> list[Event]:
    """What a reader says of a text that comes in pieces, with pieces of a kind put together."""
    reader, told = ToolCallReader(style), []
    while text:
        size = rng.randint(1, 7)
        told += list(reader.push(text[:size]))
        text = text[size:]
    told += list(reader.push("", is_last=True))
    merged: list[Event] = []
    for kind, piece in told:
        if merged and merged[-1][0] == kind != "name":
            merged[-1] = (kind, merged[-1][1] + piece)
        else:
            merged.append((kind, piece))
    return merged


@pytest.mark.parametrize(
    ("style", "text", "expected"),
    [
        (TAGGED, "no call < <tool_cal\n", [("content", "no call < <tool_cal\n")]),
        (TAGGED, "", []),
        (
            TAGGED,
            'So:\n<tool_call>\n{"name": "f", "arguments": {"a":"\\"}{[","b":[{}]}}\n</tool_call>'
            '\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
            [("content", "So:"), ("name", "f"), ("arguments", '{"a":"\\"}{[","b":[{}]}'), ("name", "g"),
             ("arguments", "{}")],
        ),
        (TAGGED, '<tool_call>\n{"name": "f", "arguments": {"a":1', [("name", "f"), ("arguments", '{"a":1')]),
        (TAGGED, '<tool_call>\n{"na', []),
        (TAGGED, "<tool_", [("content", "<tool_")]),
        (replace(TAGGED, starts_answer=True), "<tool_", []),
        (BARE, '{"na', []),
        (BARE, "x {", [("content", "x {")]),
        (
            TAGGED,
            '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_',
            [("name", "f"), ("arguments", "{}")],
        ),
        (BARE, '{"name": "f", "parameters": {"a":1}}', [("name", "f"), ("arguments", '{"a":1}')]),
        (
            replace(TAGGED, starts_answer=True),
            '{"a": "see <tool_call> tags"}',
            [("content", '{"a": "see <tool_call> tags"}')],
        ),
        (BARE, 'x {"name": "f", "parameters": {}}', [("content", 'x {"name": "f", "parameters": {}}')]),
    ],
)  # fmt: skip
def test_calls_are_read_however_they_are_cut(style: ToolStyle, text: str, expected: list[Event]) -> None:
    for seed in range(100):
        assert events(style, text, random.Random(seed)) == expected


TEMPLATE = (
    "{%% if tools %%}Tools: {{ tools | tojson }} %s{%% endif %%}"
    "{%% for m in messages %%}[{{ m.role }}] {{ m.content }}"
    "{%% for c in m.tool_calls or [] %%}({{ c.function.arguments.city }}){%% endfor %%}{%% endfor %%}[assistant]"
)


@pytest.mark.parametrize(
    ("told", "style"),
    [("Answer within <tool_call> tags.", TAGGED), ('Answer as {"name": ..., "parameters": ...}.', BARE)],
)
def test_a_template_that_knows_tools_is_left_to_it(smollm2_tokenizer: Any, told: str, style: ToolStyle) -> None:
    tokenizer = type(smollm2_tokenizer).from_pretrained(smollm2_tokenizer.name_or_path)
    tokenizer.chat_template = TEMPLATE % told
    call = {"function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    prompt = tool_prompt(tokenizer, messages, SOME_TOOLS)
    assert prompt.style is style and prompt.template_tools is not None
    text = tokenizer.apply_chat_template(prompt.messages, tools=prompt.template_tools, tokenize=False)
    assert "(Oslo)" in text and "plant-tree" in text


def test_a_call_that_is_none_is_refused(smollm2_tokenizer: Any) -> None:
    deep = {"function": {"name": "f", "arguments": "[" * 100_000}}
    nameless = [{"function": {"name": name, "arguments": "{}"}} for name in (7, None)]
    cut = {"function": {"name": "f", "arguments": "{"}}
    for calls in ([{}], [cut], [{"function": {}}], [7], 5, True, [deep], nameless):
        for tools in ((), SOME_TOOLS):
            with pytest.raises(InvalidValueError, match="messages has a tool call"):
                tool_prompt(smollm2_tokenizer, [{"role": "assistant", "content": "", "tool_calls": calls}], tools)


@pytest.mark.parametrize("style", [TAGGED, BARE])
def test_grammars_let_calls_through_and_nothing_like_them(smollm2_tokenizer: Any, style: ToolStyle) -> None:
    import llguidance

    good = style.trigger + style.head + "get_weather" + style.middle + '{"city":"Oslo","unit":"C"}' + style.end
    bad = good.replace('"C"', '"K"')
    unknown = good.replace("get_weather", "get_money")
    tokens = llguidance.LLTokenizer(smollm2_tokenizer.backend_tokenizer.to_str(), n_vocab=49152)

    def accepts(text: str, **settings: Any) -> bool:
        grammar = llguidance.LLMatcher.grammar_from_lark(tool_grammar(SOME_TOOLS, style, **settings))
        matcher = llguidance.LLMatcher(tokens, grammar)
        assert not matcher.is_error(), matcher.get_error()
        return matcher.try_consume_tokens(ids := smollm2_tokenizer.encode(text)) == len(ids) and matcher.is_accepting()

    kinds = [{}, {"is_required": True}, {"is_parallel": False}, {"content": {"type": "object"}}]
    for settings in kinds if style.repeats else kinds[:3]:
        assert accepts(good, **settings)
        assert not accepts(bad, **settings) and not accepts(unknown, **settings)
        assert accepts("Some text.", **settings) == (settings in ({}, {"is_parallel": False}))
        assert accepts('{"a":1}', **settings) == (
            "content" in settings or (style is TAGGED and "is_required" not in settings)
        )
        assert accepts(f"{good}\n{good}", **settings) == (style is TAGGED and settings.get("is_parallel", True))
    assert accepts(f"Text first. {good}") and accepts(f"Text first. {bad}") == (style is BARE)  # there it is all text
