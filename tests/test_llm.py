"""Text in, text out: on SmolLM2 against `model.generate`, and on a tiny random model with SmolLM2's vocabulary."""

import itertools
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from legato import (
    LLM,
    ContinuousBatchingConfig,
    EngineError,
    GenerationOutput,
    InvalidValueError,
    ManagerStateError,
    RequestStatus,
    SamplingParams,
)
from legato.decoder.decoder import Decoder
from legato.text import decode, encode, encode_chat
from tests.parity.reference import Reference, count_near_ties, reference
from tests.tiny import tiny_llama

NEW_TOKENS = 16
PROMPTS = [
    "The capital of France is",
    "Water boils at",
    "def add(a, b):\n    return",
    "Rosen sind rot,",
    "1, 2, 3, 4,",
]
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS)
EMPTY_ERROR = "input_ids is empty"


@pytest.fixture(scope="module")
def llm(smollm2: Any, smollm2_tokenizer: Any) -> Iterator[LLM]:
    with LLM(smollm2, smollm2_tokenizer) as llm:
        yield llm


@pytest.fixture(scope="module")
def references(smollm2: Any, smollm2_tokenizer: Any) -> list[Reference]:
    return [reference(smollm2, encode(smollm2_tokenizer, prompt), NEW_TOKENS) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def tiny(smollm2_tokenizer: Any) -> Iterator[LLM]:
    model = tiny_llama(vocab_size=len(smollm2_tokenizer))
    config = ContinuousBatchingConfig(page_size=16, num_blocks=400, max_batch_tokens=256)
    with LLM(model, smollm2_tokenizer, config) as llm:
        yield llm


def texts(outputs: list[GenerationOutput]) -> list[str | None]:
    assert all(output.status is RequestStatus.FINISHED for output in outputs)
    return [output.text for output in outputs]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def is_idle(llm: LLM) -> bool:
    stats = llm.manager.stats
    return stats.num_running == stats.num_waiting == 0 and stats.cache_used_share == 0


# SmolLM2


def test_generate_gives_the_tokens_and_the_text_of_the_model(llm: LLM, references: list[Reference]) -> None:
    outputs = llm.generate(PROMPTS, GREEDY)
    assert count_near_ties(outputs, references) == 0
    assert texts(outputs) == [llm.tokenizer.decode(r.tokens, skip_special_tokens=True) for r in references]
    assert [output.prompt_ids for output in outputs] == [encode(llm.tokenizer, prompt) for prompt in PROMPTS]


def test_chat_goes_through_the_template_and_ends_at_the_end_of_sequence(llm: LLM, smollm2: Any) -> None:
    conversations = [
        [{"role": "user", "content": "What is 2 + 2?"}],
        [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "Name a colour."}],
    ]
    expected = [reference(smollm2, encode_chat(llm.tokenizer, c), 32) for c in conversations]
    outputs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=32))
    assert count_near_ties(outputs, expected) == 0
    assert texts(outputs) == [decode(llm.tokenizer, r.tokens) for r in expected]
    assert outputs[0].finish_reason == "stop"
    assert outputs[0].generated_tokens[-1] == llm.tokenizer.eos_token_id
    assert "<|im_end|>" not in str(outputs[0].text)
    (one,) = llm.chat(conversations[0], SamplingParams(temperature=0, max_tokens=32))
    assert one.text == outputs[0].text


def test_a_stream_gives_the_same_text_in_pieces(llm: LLM, references: list[Reference]) -> None:
    pieces = list(llm.stream(PROMPTS[0], GREEDY))
    assert len(pieces) > NEW_TOKENS // 2
    assert all(pieces)
    assert "".join(pieces) == decode(llm.tokenizer, references[0].tokens)
    conversation = [{"role": "user", "content": "What is 2 + 2?"}]
    (whole,) = llm.chat(conversation, GREEDY)
    assert "".join(llm.stream(conversation, GREEDY)) == whole.text


def test_ignore_eos_goes_on_past_the_end(llm: LLM, smollm2: Any) -> None:
    prompt = encode_chat(llm.tokenizer, [{"role": "user", "content": "What is 2 + 2?"}])
    through = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    (output,) = llm.generate(prompt, through)
    assert llm.tokenizer.eos_token_id in output.generated_tokens[:-1]
    assert count_near_ties([output], [reference(smollm2, prompt, 24, eos_token_id=-1)]) == 0
    assert output.finish_reason == "length"


def test_without_sampling_params_the_models_own_settings_rule(
    llm: LLM, references: list[Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm.model.generation_config, "max_new_tokens", 5)
    outputs = llm.generate(PROMPTS)
    assert [output.generated_tokens for output in outputs] == [r.tokens[:5] for r in references]


def test_seeds_give_the_same_samples_whatever_runs_beside(llm: LLM) -> None:
    prompts = PROMPTS[:3]
    params = [SamplingParams(temperature=0.9, top_p=0.95, seed=seed, max_tokens=6) for seed in range(3)]
    together = [o.generated_tokens for o in llm.generate(prompts, params)]
    reverse = [o.generated_tokens for o in llm.generate([*prompts[::-1], "Something else"], [*params[::-1], GREEDY])]
    (alone,) = llm.generate(prompts[1], params[1])
    assert reverse[-2::-1] == together
    assert alone.generated_tokens == together[1]
    assert together != [o.generated_tokens[:6] for o in llm.generate(prompts, GREEDY)]


# Prompts and parameters


def test_results_come_in_the_order_of_the_prompts(tiny: LLM) -> None:
    lengths = [40, 1, 17, 3, 60, 2, 2, 25]
    prompts = [f"prompt {i} " * (i + 1) for i in range(len(lengths))]
    outputs = tiny.generate(prompts, [SamplingParams(temperature=0, max_tokens=n) for n in lengths])
    assert [tiny.tokenizer.decode(output.prompt_ids) for output in outputs] == prompts
    assert [len(output.generated_tokens) for output in outputs] == lengths
    assert all(output.finish_reason == "length" for output in outputs)


def test_token_ids_and_text_may_be_mixed(tiny: LLM) -> None:
    text = "Once upon a time"
    ids = encode(tiny.tokenizer, text)
    mixed = tiny.generate([text, ids, tuple(ids)], GREEDY)
    assert len({output.text for output in mixed}) == 1
    assert {tuple(output.prompt_ids) for output in mixed} == {tuple(ids)}
    for single in (text, ids, tuple(ids)):
        (output,) = tiny.generate(single, GREEDY)
        assert output.text == mixed[0].text


def test_no_prompts_no_results(tiny: LLM) -> None:
    assert tiny.generate([]) == []
    assert tiny.generate([], []) == []
    assert tiny.chat([]) == []


@pytest.mark.parametrize("count", [0, 1, 3])
def test_as_many_params_as_prompts(tiny: LLM, count: int) -> None:
    with pytest.raises(InvalidValueError, match=f"sampling_params has {count} entries for 2 prompts"):
        tiny.generate(["a", "b"], [GREEDY] * count)
    with pytest.raises(InvalidValueError, match=f"sampling_params has {count} entries for 2 prompts"):
        tiny.chat([[{"role": "user", "content": "a"}]] * 2, [GREEDY] * count)
    assert is_idle(tiny)


def test_a_prompt_that_can_never_be_served_fails_alone(tiny: LLM) -> None:
    prompts = ["good", "", [5] * 5000, "also good", [10**6], ["a"]]
    outputs = tiny.generate(prompts, GREEDY)
    failed = [1, 2, 4, 5]
    assert [i for i, output in enumerate(outputs) if output.status is RequestStatus.FAILED] == failed
    for i, reason in zip(failed, [EMPTY_ERROR, "takes at most 4096", "token id 1000000", "token ids"], strict=True):
        assert reason in str(outputs[i].error)
        assert (outputs[i].text, outputs[i].finish_reason) == ("", "error")
    assert texts([outputs[0], outputs[3]]) == texts(tiny.generate(["good", "also good"], GREEDY))


def test_malformed_conversations_are_refused_at_once(tiny: LLM) -> None:
    good = [{"role": "user", "content": "a"}]
    with pytest.raises(InvalidValueError, match="messages"):
        tiny.chat([good, [{"role": "user"}]], GREEDY)
    with pytest.raises(InvalidValueError, match="messages"):
        tiny.stream([{"content": "a"}], GREEDY)
    assert is_idle(tiny)


@pytest.mark.parametrize("greedy", [{"temperature": 0}, {"temperature": 0.0, "top_k": 3}, {"top_k": 1}], ids=str)
def test_temperature_0_and_top_k_1_are_greedy(tiny: LLM, greedy: dict[str, Any]) -> None:
    expected = [reference(tiny.model, encode(tiny.tokenizer, p), NEW_TOKENS, eos_token_id=-1) for p in PROMPTS]
    outputs = tiny.generate(PROMPTS, SamplingParams(max_tokens=NEW_TOKENS, seed=3, **greedy))
    assert count_near_ties(outputs, expected) == 0


def test_top_k_of_nothing_samples_from_all_tokens(tiny: LLM) -> None:
    """At such a temperature all of the 49,152 tokens are about as likely."""
    params = [SamplingParams(temperature=1e6, top_k=k, seed=5, max_tokens=12) for k in (0, -1, None, 50)]
    zero, minus_one, nothing, fifty = (o.generated_tokens for o in tiny.generate([PROMPTS[0]] * 4, params))
    assert fifty != zero
    assert zero == minus_one
    assert zero == nothing


def test_max_tokens_bounds_the_answer(tiny: LLM) -> None:
    outputs = tiny.generate(["a"] * 3, [SamplingParams(temperature=0, max_tokens=n) for n in (1, 7, None)])
    assert [len(output.generated_tokens) for output in outputs] == [1, 7, 256]  # 256: the default
    assert outputs[2].generated_tokens[:7] == outputs[1].generated_tokens


def test_stop_tokens_end_the_answer_and_belong_to_it(tiny: LLM) -> None:
    (whole,) = tiny.generate("a", GREEDY)
    tokens = whole.generated_tokens
    for stops in ([tokens[6]], [tokens[9], tokens[4]], (tokens[0],)):
        end = min(tokens.index(stop) for stop in stops) + 1
        for ignore_eos in (False, True):
            params = SamplingParams(temperature=0, max_tokens=16, stop_token_ids=stops, ignore_eos=ignore_eos)
            (output,) = tiny.generate("a", params)
            assert output.generated_tokens == tokens[:end]
            assert output.text == decode(tiny.tokenizer, tokens[:end])
            assert output.finish_reason == "stop"


def test_seeds_alone_decide(tiny: LLM) -> None:
    """Any selection of the same prompts in any order, beside greedy and other sampled ones: the same tokens."""
    rng = random.Random(0)
    prompts = [f"{word} and" for word in ["one", "two", "three", "four", "five", "six"]]
    params = [
        SamplingParams(temperature=rng.choice([0, 0.5, 1.5]), top_k=rng.choice([0, 20]), seed=i, max_tokens=10)
        for i in range(6)
    ]
    expected = [output.generated_tokens for output in tiny.generate(prompts, params)]
    for _ in range(4):
        picked = rng.sample(range(6), rng.randint(1, 6))
        outputs = tiny.generate([prompts[i] for i in picked], [params[i] for i in picked])
        assert [output.generated_tokens for output in outputs] == [expected[i] for i in picked]
    hot = [SamplingParams(temperature=1.5, seed=seed, max_tokens=12) for seed in (1, 2, None, None)]
    assert len({tuple(output.generated_tokens) for output in tiny.generate(["a"] * 4, hot)}) == 4


# Streams


def test_streams_of_random_text_are_whole(tiny: LLM) -> None:
    """A random model's text is full of broken characters."""
    params = [SamplingParams(temperature=2.0, seed=seed, max_tokens=30) for seed in range(3)]
    for (whole,), pieces in [(tiny.generate("x", p), list(tiny.stream("x", p))) for p in params]:
        assert "".join(pieces) == whole.text
        assert all(pieces)
        assert not any(piece.endswith("�") for piece in pieces[:-1])


def test_a_stream_that_ends_inside_a_character_gives_what_there_is(tiny: LLM) -> None:
    outputs = tiny.generate([[i] for i in range(1000, 1200)], SamplingParams(temperature=0, max_tokens=12))
    prefixes = [(output.prompt_ids, output.generated_tokens[:n]) for output in outputs for n in range(1, 13)]
    broken = [(prompt, ids) for prompt, ids in prefixes if decode(tiny.tokenizer, ids).endswith("�")]
    assert broken
    for prompt, ids in broken[:4]:
        pieces = tiny.stream(prompt, SamplingParams(temperature=0, max_tokens=len(ids)))
        assert "".join(pieces) == decode(tiny.tokenizer, ids)


def test_streams_run_side_by_side(tiny: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=30)
    expected = texts(tiny.generate(PROMPTS, params))
    streams = [tiny.stream(prompt, params) for prompt in PROMPTS]
    rounds = itertools.zip_longest(*streams, fillvalue="")
    assert ["".join(pieces) for pieces in zip(*rounds, strict=True)] == expected


def test_closing_a_stream_cancels_it(tiny: LLM) -> None:
    before = tiny.manager.stats.num_generated_tokens
    stream = tiny.stream("a", SamplingParams(temperature=0, max_tokens=3000))
    assert next(stream)
    assert not is_idle(tiny)
    stream.close()
    wait_until(lambda: is_idle(tiny))
    generated = tiny.manager.stats.num_generated_tokens
    assert generated - before < 2000
    assert texts(tiny.generate("a", GREEDY)) == texts(tiny.generate("a", GREEDY))
    assert tiny.manager.stats.num_generated_tokens == generated + 2 * NEW_TOKENS


def test_leaving_the_loop_or_forgetting_the_stream_cancels_it(tiny: LLM) -> None:
    for _ in tiny.stream("a", SamplingParams(temperature=0, max_tokens=3000)):
        break
    wait_until(lambda: is_idle(tiny))


def test_a_stream_never_begun_asks_for_nothing(tiny: LLM) -> None:
    before = tiny.manager.stats.num_finished
    tiny.stream("a", SamplingParams(max_tokens=3000)).close()
    assert is_idle(tiny)
    assert tiny.manager.stats.num_finished == before


@pytest.mark.parametrize(("prompt", "reason"), [("", EMPTY_ERROR), ([], EMPTY_ERROR), ([5] * 5000, "at most 4096")])
def test_a_stream_that_can_never_be_raises(tiny: LLM, prompt: Any, reason: str) -> None:
    with pytest.raises(InvalidValueError, match=reason):
        next(tiny.stream(prompt, GREEDY))


# Life


def test_close_frees_everything_and_the_next_call_starts_anew(smollm2_tokenizer: Any) -> None:
    llm = LLM(tiny_llama(vocab_size=len(smollm2_tokenizer)), smollm2_tokenizer)
    expected = texts(llm.generate(PROMPTS, GREEDY))
    manager = llm.manager
    llm.close()
    llm.close()
    assert not manager.is_running()
    with pytest.raises(ManagerStateError, match="destroyed"):
        manager.start()
    assert texts(llm.generate(PROMPTS, GREEDY)) == expected
    assert llm.manager is not manager
    with llm:
        assert "".join(llm.stream(PROMPTS[0], GREEDY)) == expected[0]
    assert "".join(llm.stream(PROMPTS[0], GREEDY)) == expected[0]
    llm.close()


def test_an_engine_failure_is_raised_with_its_cause(smollm2_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(tiny_llama(vocab_size=len(smollm2_tokenizer)), smollm2_tokenizer)
    llm.generate("a", GREEDY)
    stream = llm.stream("a", SamplingParams(max_tokens=3000))
    next(stream)

    def fail(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(Decoder, "forward", fail)
    with pytest.raises(EngineError) as caught:
        list(stream)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(EngineError, match="planted"):
        llm.generate(PROMPTS, GREEDY)
    monkeypatch.undo()
    llm.close()
    assert len(texts(llm.generate("a", GREEDY))) == 1
    llm.close()


def test_a_loaded_model_needs_its_tokenizer() -> None:
    with pytest.raises(InvalidValueError, match="tokenizer=None"):
        LLM(tiny_llama())


def test_a_loaded_model_cannot_be_loaded_otherwise(smollm2_tokenizer: Any) -> None:
    with pytest.raises(InvalidValueError, match="dtype"):
        LLM(tiny_llama(), smollm2_tokenizer, dtype="bfloat16")


def test_a_loaded_model_takes_a_tokenizer_by_name(smollm2: Any) -> None:
    llm = LLM(smollm2, "smollm2")
    assert llm.model is smollm2
    assert encode(llm.tokenizer, "Hello") == encode(LLM(smollm2, llm.tokenizer).tokenizer, "Hello")
