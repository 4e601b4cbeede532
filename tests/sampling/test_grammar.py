"""Structured output: whatever the temperature, what is complete follows its grammar."""

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from legato import (
    LLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    GenerationOutput,
    InvalidValueError,
    RequestStatus,
    SamplingParams,
    enable,
)
from legato.grammar import GrammarCompiler
from tests.parity.families import tiny_model

PROMPT = "Describe a cat as data:\n"
HOT = {"temperature": 1.5, "top_k": 0}

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "kind": {"enum": ["cat", "dog"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 30},
        "friends": {"type": "array", "items": {"$ref": "#/$defs/friend"}, "maxItems": 2},
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
    "$defs": {"friend": {"type": "object", "properties": {"id": {"type": "string", "pattern": "^[a-f0-9]{4}$"}},
                         "required": ["id"], "additionalProperties": False}},
}  # fmt: skip


@pytest.fixture(scope="module", params=[True, False], ids=["fused", "reference"])
def llm(request: pytest.FixtureRequest, smollm2: Any, smollm2_tokenizer: Any) -> Any:
    config = ContinuousBatchingConfig(page_size=16, num_blocks=400, fused_decoder=request.param, seed=0)
    with LLM(smollm2, smollm2_tokenizer, config) as llm:
        yield llm


def generate(llm: LLM, params: list[SamplingParams]) -> list[GenerationOutput]:
    return llm.generate([PROMPT] * len(params), params, use_tqdm=False)


@pytest.mark.slow
def test_every_kind_of_grammar_in_one_batch(llm: LLM) -> None:
    kinds: list[dict[str, Any]] = [
        {"json_schema": PERSON},
        {"json_schema": json.dumps(PERSON), "logprobs": 1},
        {"regex": r"[0-9]{3}-[a-f]{4}"},
        {"choice": ["yes", "no", "perhaps (or not)"]},
        {"grammar": 'start: NUM ("+" NUM)~1..3\nNUM: /[0-9]{1,3}/\n'},
        {"grammar": 'root ::= "<" [a-z]+ ">"\n'},
        {},
    ]
    outputs = generate(llm, [SamplingParams(**HOT, max_tokens=150, **kind) for kind in kinds for _ in range(4)])
    checks = [
        lambda text: jsonschema.validate(json.loads(text), PERSON),
        lambda text: jsonschema.validate(json.loads(text), PERSON),
        lambda text: re.fullmatch(r"[0-9]{3}-[a-f]{4}", text),
        lambda text: text in ("yes", "no", "perhaps (or not)"),
        lambda text: re.fullmatch(r"[0-9]{1,3}(\+[0-9]{1,3}){1,3}", text),
        lambda text: re.fullmatch("<[a-z]+>", text),
    ]
    for i, output in enumerate(outputs[:-4]):
        assert output.status is RequestStatus.FINISHED, output.error
        if output.finish_reason == "stop":
            found = checks[i // 4](output.text)  # of JSON: raises, or None
            assert i // 4 < 2 or found, (kinds[i // 4], output.text)
        else:
            assert output.finish_reason == "length" and len(output.generated_tokens) == 150
    finished = [output.finish_reason == "stop" for output in outputs[:-4]]
    assert sum(finished) >= len(finished) - 4
    assert all(len(output.logprobs) == len(output.generated_tokens) for output in outputs[4:8])


@pytest.mark.slow
def test_what_is_forced_is_not_sampled_and_changes_nothing(llm: LLM) -> None:
    params = SamplingParams(**HOT, json_schema=PERSON, max_tokens=150, seed=7)
    before = llm.manager.stats
    (jumping,) = generate(llm, [params])
    after = llm.manager.stats
    assert after.num_generated_tokens - before.num_generated_tokens == len(jumping.generated_tokens)
    assert after.num_steps - before.num_steps < len(jumping.generated_tokens), "nothing was forced"
    many = generate(llm, [SamplingParams(**HOT, json_schema=PERSON, max_tokens=150, seed=7, n=4)])
    assert many[0].generated_tokens == jumping.generated_tokens
    for output in many:
        if output.finish_reason == "stop":
            jsonschema.validate(json.loads(output.text), PERSON)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"json_schema": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    ({"json_schema": {"type": "nonsense"}}, "nonsense"),
    ({"json_schema": "{"}, "json_schema"),
    ({"json_schema": {"not": {}}}, "not"),
    ({"regex": "(["}, "regex"),
    ({"regex": r"(a)\1"}, "regex"),
    ({"grammar": "start: undefined"}, "grammar"),
    ({"grammar": "root ::= [0-9"}, "grammar"),
    ({"json_schema": {"$ref": "#"}}, "no text satisfies it"),
    ({"regex": r"[^\s\S]"}, "no text satisfies it"),
    ({"grammar": "start: a\na: a"}, "no text satisfies it"),
    ({"regex": "a{1000000}"}, "too many"),
    ({"json_schema": {"type": "string", "pattern": "^x{200000}$"}}, "too many"),
    ({"json_schema": {"const": "<|im_end|>"}}, "special token"),
    ({"json_schema": '{"enum": ["a", "<|im_start|>"]}'}, "special token"),
    ({"regex": r"say <\|im_end\|> now"}, "special token"),
    ({"choice": ["a", "x<|im_start|>y"]}, "special token"),
    ({"grammar": 'start: "<|im_end|>"'}, "special token"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("wrong", "reason"), BAD, ids=str)
def test_bad_grammars_fail_at_submission_with_the_reason(llm: LLM, wrong: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidValueError, match=reason):
        llm.manager.add_request([1, 2, 3], **wrong)


@pytest.mark.slow
def test_equal_grammars_are_compiled_once_and_others_do_not_wait(
    smollm2_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GrammarCompiler(smollm2_tokenizer, len(smollm2_tokenizer), [smollm2_tokenizer.eos_token_id])
    compile_it, goes_on, compiled = compiler._compiled, threading.Event(), list[str]()

    def slowly(name: str, text: str) -> Any:
        compiled.append(name)
        assert name != "json_schema" or goes_on.wait(30)
        return compile_it(name, text)

    monkeypatch.setattr(compiler, "_compiled", slowly)
    wrong = SamplingParams(regex=r"[^\s\S]")
    with ThreadPoolExecutor(4) as threads:
        same = [threads.submit(compiler.grammar, SamplingParams(json_schema={"type": "string"})) for _ in range(4)]
        compiler.grammar(SamplingParams(choice=["a", "b"]))
        goes_on.set()
        grammars = [one.result(30) for one in same]
        told = [threads.submit(compiler.grammar, wrong).exception(30) for _ in range(3)]
    assert sorted(compiled[:2]) == ["choice", "json_schema"] and compiled.count("json_schema") == 1
    grammars[0].accept(smollm2_tokenizer.encode('"')[0])
    assert grammars[1].accept(smollm2_tokenizer.encode('"')[0]) is None  # each stands where it is by itself
    assert all(isinstance(error, InvalidValueError) for error in told)


@pytest.mark.slow
def test_large_grammars_are_not_all_kept(smollm2_tokenizer: Any) -> None:
    compiler = GrammarCompiler(smollm2_tokenizer, len(smollm2_tokenizer), [smollm2_tokenizer.eos_token_id])
    for number in range(6):
        compiler.grammar(SamplingParams(choice=[f"{number} {'x' * 200} {i}" for i in range(5000)]))
    assert 1 <= len(compiler._kept) < 6
    for number in range(3):
        compiler.grammar(SamplingParams(choice=[f"{number}"]))
    assert len(compiler._kept) > 3


def test_one_grammar_at_a_time_and_never_without_a_tokenizer() -> None:
    with pytest.raises(InvalidValueError, match="json_schema and regex are not allowed together"):
        SamplingParams(json_schema={}, regex="a")

    manager = enable(tiny_model("llama")).init_continuous_batching(
        continuous_batching_config=ContinuousBatchingConfig(page_size=4)
    )
    with pytest.raises(InvalidValueError, match="structured output needs the model's tokenizer"):
        manager.add_request([1, 2], regex="a")


@pytest.mark.parametrize("eos_token_id", [-1, 10**9])
def test_a_grammar_needs_no_end_of_sequence(smollm2: Any, smollm2_tokenizer: Any, eos_token_id: int) -> None:
    manager = enable(smollm2).init_continuous_batching(
        GenerationConfig(eos_token_id=eos_token_id), ContinuousBatchingConfig(page_size=16), tokenizer=smollm2_tokenizer
    )
    with manager.session():
        output = manager.get_result(manager.add_request([1, 2, 3], max_new_tokens=20, regex="[0-9]{5}"))
        ids = [manager.add_request([1, 2, 3], max_new_tokens=20, choice=["4", "42", "423"], seed=i) for i in range(8)]
        chosen = [smollm2_tokenizer.decode(manager.get_result(one).generated_tokens) for one in ids]
    assert output.finish_reason == "stop"
    assert re.fullmatch("[0-9]{5}", smollm2_tokenizer.decode(output.generated_tokens))
    assert set(chosen) <= {"4", "42", "423"}


def test_a_grammar_ends_where_its_request_does(smollm2: Any, smollm2_tokenizer: Any) -> None:
    """With an end of its own, after another request's grammar; and what is forced minds what else is forbidden."""
    manager = enable(smollm2).init_continuous_batching(
        continuous_batching_config=ContinuousBatchingConfig(page_size=16), tokenizer=smollm2_tokenizer
    )
    seven = smollm2_tokenizer.convert_tokens_to_ids("7")
    asked = {"max_new_tokens": 12, "temperature": 0, "regex": "[0-9]+"}
    with manager.session():
        ids = [manager.add_request([1, 2, 3], **asked)]
        ids.append(manager.add_request([1, 2, 3], **asked, eos_token_id=seven, logit_bias={seven: 100}))
        forbidden = {"regex": "777", "suppress_tokens": [seven]}
        ids += [manager.add_request([1, 2, 3], **{**asked, **forbidden, "logprobs": n}) for n in (None, 0)]
        plain, own, first, second = (manager.get_result(one, timeout=60) for one in ids)
    assert re.fullmatch("[0-9]+", smollm2_tokenizer.decode(plain.generated_tokens, skip_special_tokens=True))
    assert own.generated_tokens == [seven] and own.finish_reason == "stop"
    assert first.generated_tokens == second.generated_tokens and seven not in first.generated_tokens
    assert first.error == second.error


# Random schemas

names = st.sampled_from(["a", "b", "long name", "ä", "x_1"])
whole = st.integers(-5, 5)
patterns = st.sampled_from(["^[a-c]{2,4}$", "^(yes|no)$", "^[0-9]+-[0-9]$"])
values = st.lists(st.sampled_from(["x", 1, None, "two words", True]), min_size=1, unique_by=str)
leaves = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size}, whole, st.integers(0, 99)),
    st.builds(lambda low: {"type": "number", "minimum": low, "maximum": low + 1}, whole),
    st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 8)),
    st.builds(lambda pattern: {"type": "string", "pattern": pattern}, patterns),
    st.builds(lambda some: {"enum": some}, values),
    st.just({"const": "only"}),
    st.just({"$ref": "#/$defs/leaf"}),
)
LEAF = {
    "type": "object",
    "properties": {"v": {"type": "integer", "maximum": 9, "minimum": 0}},
    "required": ["v"],
    "additionalProperties": False,
}


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    objects = st.builds(
        lambda properties, count: {
            "type": "object",
            "properties": properties,
            "required": list(properties)[:count],
            "additionalProperties": False,
        },
        st.dictionaries(names, inner, max_size=3),
        st.integers(0, 3),
    )
    arrays = st.builds(
        lambda items, low, more: {"type": "array", "items": items, "minItems": low, "maxItems": low + more},
        inner,
        st.integers(0, 2),
        st.integers(0, 2),
    )
    unions = st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3))
    return st.one_of(objects, arrays, unions)


schemas = st.recursive(leaves, nested, max_leaves=6).map(lambda schema: {**schema, "$defs": {"leaf": LEAF}})


def two_hundred() -> list[dict[str, Any]]:
    collected: list[dict[str, Any]] = []

    @settings(max_examples=200, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
    @given(schemas)
    def collect(schema: dict[str, Any]) -> None:
        collected.append(schema)

    collect()
    return collected


@pytest.mark.slow
def test_two_hundred_random_schemas(llm: LLM) -> None:
    some = two_hundred()
    assert len({json.dumps(schema) for schema in some}) > 150
    asked = [SamplingParams(**HOT, json_schema=schema, max_tokens=60, seed=i) for i, schema in enumerate(some)]
    outputs = generate(llm, asked)
    completed = 0
    for schema, output in zip(some, outputs, strict=True):
        assert output.status is RequestStatus.FINISHED, (schema, output.error)
        assert output.finish_reason in ("stop", "length")
        if output.finish_reason == "stop":
            jsonschema.validate(json.loads(output.text), schema)
            completed += 1
    assert completed >= 150


@pytest.mark.parametrize("filters", [{"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.3}, {"typical_p": 0.5}], ids=str)
def test_filters_choose_from_what_may_come_beside_processors_too(llm: LLM, filters: dict[str, Any]) -> None:
    asked = {"choice": ["yes", "no"], "max_tokens": 8, "top_k": 0, **filters}
    ways: list[dict[str, Any]] = [
        {},
        {"logits_processors": [lambda input_ids, scores: scores]},
        {"processors": {"no_repeat_ngram_size": 5}},
        {"processors": {"remove_invalid_values": True}},
    ]
    outputs = generate(llm, [SamplingParams(**asked, **way, seed=seed) for seed in range(4) for way in ways])
    answers = [(output.text, output.finish_reason) for output in outputs]
    assert all(text in ("yes", "no") and reason == "stop" for text, reason in answers)
    for first in range(0, len(answers), len(ways)):
        assert len(set(answers[first : first + len(ways)])) == 1
