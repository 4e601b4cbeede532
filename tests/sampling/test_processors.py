"""Every logits processor, of requests in one batch, against transformers' own on each request alone."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, WatermarkingConfig

from legato import ContinuousBatchingConfig, InvalidValueError, RequestStatus, SamplingParams, enable
from legato.cache.allocator import BlockTable
from legato.engine.batch import BatchBuilder
from legato.engine.sampling import filtered_scores, process_logits
from legato.engine.scheduler import ScheduledChunk
from legato.engine.token_edits import TokenEdits
from legato.generation import GenerationDefaults, RequestFactory
from legato.request import Request, RequestSpec
from legato.sampling_params import PROCESSOR_SETTINGS
from tests.parity.families import VOCAB_SIZE, tiny_model
from tests.parity.reference import reference

EOS = 7
PROMPT = [5, 17, 80, 3, 44, 9, 61, 17, 80]
ANSWER = [33, 5, 17, 61, 33, 12]

# What `GenerationConfig` can ask for: several values of each setting.
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.0, "top_k": 5},
    {"top_k": 1},
    {"top_p": 0.4},
    {"min_p": 0.2},
    {"typical_p": 0.5},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.9},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.4, "temperature": 0.8},
    {"bad_words_ids": [[33], [61, 12], [12, 44], [33, 12, 60]]},
    {"bad_words_ids": [[EOS], [33, EOS]]},
    {"suppress_tokens": [1, 2, 33]},
    {"min_new_tokens": 7},
    {"min_new_tokens": 6},
    {"repetition_penalty": 1.2, "bad_words_ids": [[5]], "suppress_tokens": [9], "min_new_tokens": 20, "top_p": 0.8},
    {"min_length": 16},
    {"top_h": 0.4},
    {"epsilon_cutoff": 0.02},
    {"eta_cutoff": 0.1},
    {"encoder_repetition_penalty": 1.6},
    {"no_repeat_ngram_size": 2},
    {"encoder_no_repeat_ngram_size": 2},
    {"renormalize_logits": True, "temperature": 0.5},
    {"forced_bos_token_id": 4},
    {"forced_eos_token_id": EOS},
    {"remove_invalid_values": True},
    {"exponential_decay_length_penalty": (2, 1.5)},
    {"begin_suppress_tokens": [33, 44]},
    {"sequence_bias": [[[12, 44], 3.0], [[60], -2.0]]},
    {"sequence_bias": [[[17], 3.0]], "repetition_penalty": 1.5, "no_repeat_ngram_size": 3, "top_k": 9, "min_p": 0.1},
    {"watermarking_config": WatermarkingConfig(bias=2.0, seeding_scheme="lefthash")},
]


def test_there_is_a_case_for_every_setting() -> None:
    asked = {name for settings in SETTINGS for name in settings}
    params = {"repetition_penalty", "bad_words_ids", "suppress_tokens", "min_new_tokens"}
    assert asked >= set(PROCESSOR_SETTINGS) | params | {"temperature", "top_k", "top_p", "min_p", "typical_p"}


def make_request(number: int, sampling: dict[str, Any], answer: list[int], do_sample: bool = True) -> Request:
    defaults = GenerationDefaults(do_sample, SamplingParams(), (EOS,), 10, None, ())
    factory = RequestFactory(VOCAB_SIZE, 256, 256, 0)
    request = factory.make(
        defaults, str(number), RequestSpec(PROMPT, 10, sampling={**sampling, "do_sample": do_sample})
    )
    # What a running request has: its tokens come one by one.
    for token in answer:
        if request.edits is not None:
            request.edits.after(request.tokens)
        request.tokens.append(token)
    request.num_computed_tokens = len(request.tokens) - 1
    return request


def processed(requests: list[Request], logits: Tensor) -> Tensor:
    """Scores of all of them in one batch, as they are drawn from."""
    builder, tables = BatchBuilder(64, 1), {r.request_id: (BlockTable([i + 2]),) for i, r in enumerate(requests)}
    batch = builder.build([ScheduledChunk(request, 1) for request in requests], tables)
    logits = logits.clone()
    assert process_logits(logits, batch.sampling) == {}
    return filtered_scores(logits, batch.sampling.filters)


def by_transformers(model: Any, settings: dict[str, Any], tokens: list[int], logits: Tensor, do_sample: bool) -> Tensor:
    """Of one row alone."""
    # top_k of 0 for what a request of ours has when nothing is said.
    config = GenerationConfig(
        **{"top_k": 0, **settings}, do_sample=do_sample, eos_token_id=EOS, max_length=len(PROMPT) + 10
    )
    model._prepare_special_tokens(config, device="cpu")
    processors = model._get_logits_processor(
        config,
        input_ids_seq_length=len(PROMPT),
        encoder_input_ids=torch.tensor([PROMPT]),
        prefix_allowed_tokens_fn=None,
        logits_processor=LogitsProcessorList(),
        device="cpu",
        model_kwargs={},
    )
    return processors(torch.tensor([tokens]), logits[None].clone())[0]


@pytest.mark.parametrize("do_sample", [True, False])
@pytest.mark.parametrize("answer", [[], ANSWER, [*ANSWER, 5, 17, 33]], ids=len)
def test_every_setting_does_what_transformers_does_alone(answer: list[int], do_sample: bool) -> None:
    model = tiny_model("llama")
    requests = [make_request(i, settings, answer, do_sample) for i, settings in enumerate(SETTINGS)]
    generator = torch.Generator().manual_seed(len(answer))
    logits = torch.randn((len(requests), VOCAB_SIZE), generator=generator) * 2
    ours = processed(requests, logits).softmax(-1)
    for row, settings in enumerate(SETTINGS):
        theirs = by_transformers(model, settings, [*PROMPT, *answer], logits[row], do_sample).softmax(-1)
        torch.testing.assert_close(ours[row], theirs, atol=1e-6, rtol=1e-5, msg=lambda m, s=settings: f"{s}: {m}")


def test_penalties_of_openai_count_the_answer_alone() -> None:
    request = make_request(
        0, {"presence_penalty": 0.5, "frequency_penalty": 0.25, "logit_bias": {5: 4.0, 90: -100}}, ANSWER
    )
    logits = torch.randn((1, VOCAB_SIZE), generator=torch.Generator().manual_seed(0))
    expected = logits[0].clone()
    for token in set(ANSWER):
        expected[token] -= 0.5 + 0.25 * ANSWER.count(token)
    expected[5] += 4
    expected[90] -= 100
    torch.testing.assert_close(processed([request], logits)[0].softmax(-1), expected.softmax(-1))
    # The same through transformers' processors, beside one of them.
    request = make_request(
        0,
        {
            "presence_penalty": 0.5,
            "frequency_penalty": 0.25,
            "logit_bias": {5: 4.0, 90: -100},
            "remove_invalid_values": True,
        },
        ANSWER,
    )
    assert request.edits is None and request.processors is not None
    torch.testing.assert_close(processed([request], logits)[0].softmax(-1), expected.softmax(-1))


def test_presence_and_frequency_may_cancel_each_other() -> None:
    request = make_request(0, {"presence_penalty": 1.0, "frequency_penalty": -1.0}, [33, 33, 33])
    logits = torch.zeros((1, VOCAB_SIZE))
    assert float(processed([request], logits)[0, 33] - processed([request], logits)[0, 0]) == pytest.approx(2.0)


def generate(model: Any, requests: list[dict[str, Any]], config: ContinuousBatchingConfig) -> list[Any]:
    """All at once."""
    manager = enable(model).init_continuous_batching(GenerationConfig(eos_token_id=EOS), config)
    with manager.session():
        ids = [manager.add_request(PROMPT, max_new_tokens=10, **sampling) for sampling in requests]
        return [manager.get_result(request_id, timeout=60) for request_id in ids]


@pytest.mark.parametrize("fused", [True, False])
def test_greedy_answers_are_those_of_generate(fused: bool) -> None:
    """Every setting that matters to greedy decoding, in one batch in a small cache, with what does not matter."""
    model = tiny_model("llama")
    config = ContinuousBatchingConfig(page_size=4, num_blocks=40, fused_decoder=fused, safety_margin=0.0)
    outputs = generate(model, [{"do_sample": False, **settings} for settings in SETTINGS], config)
    plain = reference(model, PROMPT, 10, eos_token_id=EOS).tokens
    differ = 0
    for settings, output in zip(SETTINGS, outputs, strict=True):
        expected = reference(model, PROMPT, 10, eos_token_id=EOS, **settings).tokens
        assert output.generated_tokens == expected, settings
        differ += expected != plain
    assert differ >= 8, "too few settings change anything: the test lost its point"


class Recorder:
    """A user's processor that forbids all but one token, and notes what it was called with."""

    def __init__(self, token: int) -> None:
        self.token, self.calls = token, []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls.append((input_ids.tolist(), tuple(scores.shape)))
        only = torch.full_like(scores, -torch.inf)
        only[:, self.token] = 0
        return only


def fail(input_ids: Tensor, scores: Tensor) -> Tensor:
    raise KeyError("of the user's own")


def wrong_shape(input_ids: Tensor, scores: Tensor) -> Tensor:
    return scores[:, :3]


def test_a_users_processor_sees_its_request_alone() -> None:
    first, second = Recorder(11), Recorder(22)
    config = ContinuousBatchingConfig(page_size=4, num_blocks=40)
    outputs = generate(
        tiny_model("llama"),
        [{"logits_processors": [first]}, {}, {"logits_processors": [second], "temperature": 1.0}],
        config,
    )
    assert outputs[0].generated_tokens == [11] * 10 and outputs[2].generated_tokens == [22] * 10
    assert outputs[1].generated_tokens == reference(tiny_model("llama"), PROMPT, 10, eos_token_id=EOS).tokens
    assert first.calls == [([PROMPT + [11] * i], (1, VOCAB_SIZE)) for i in range(10)]


@pytest.mark.parametrize("processor", [fail, wrong_shape])
def test_a_users_processor_that_fails_harms_nobody_else(processor: Callable[[Tensor, Tensor], Tensor]) -> None:
    config = ContinuousBatchingConfig(page_size=4, num_blocks=40)
    good, bad = generate(tiny_model("llama"), [{}, {"logits_processors": [processor]}], config)
    assert (
        bad.status is RequestStatus.FAILED and bad.finish_reason == "error" and "logits processor failed" in bad.error
    )
    assert good.generated_tokens == reference(tiny_model("llama"), PROMPT, 10, eos_token_id=EOS).tokens


def test_what_a_config_says_is_every_requests_default() -> None:
    model = tiny_model("llama")
    settings = {"repetition_penalty": 1.8, "no_repeat_ngram_size": 2, "suppress_tokens": [40], "min_new_tokens": 3}
    config = GenerationConfig(do_sample=False, eos_token_id=EOS, max_new_tokens=10, **settings)
    (output,) = enable(model).generate_batch([PROMPT], config, ContinuousBatchingConfig(page_size=4)).values()
    assert output.generated_tokens == reference(model, PROMPT, 10, eos_token_id=EOS, **settings).tokens


def test_what_cannot_work_is_dropped_or_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    model, config = enable(tiny_model("llama")), GenerationConfig(guidance_scale=2.0)
    model.init_continuous_batching(config)
    assert "dropped" in caplog.text and "guidance_scale" in caplog.text
    with pytest.raises(InvalidValueError, match="guidance_scale"):
        model.init_continuous_batching(config, ContinuousBatchingConfig(drop_unsupported_processors=False))


NONSENSE: dict[str, tuple[Any, ...]] = {
    "temperature": (-0.1, float("nan"), float("inf"), "1", True),
    "top_k": (-2, 1.5, "3"),
    "top_p": (0, -0.1, 1.1),
    "min_p": (-0.1, 1.1),
    "typical_p": (0, 1.1),
    "repetition_penalty": (0, -1, float("inf"), 1e-39, 1e300),
    "presence_penalty": (-2.1, 2.1),
    "frequency_penalty": (-2.1, 2.1),
    "logit_bias": ([1], {1: 101}, {-1: 1.0}, {"a": 1}, {1: float("nan")}, {"9" * 5000: 1}, {VOCAB_SIZE: 1.0}),
    "bad_words_ids": ([[]], [3], "abc", [[VOCAB_SIZE]], [[-1]]),
    "suppress_tokens": ("abc", [1.5], [VOCAB_SIZE], [-1]),
    "min_new_tokens": (-1, 1.5),
    "max_tokens": (0, -1, 2.5),
    "stop_token_ids": ("abc", [1.5]),
    "stop": ("", [""], [1], 5),
    "seed": (-1, 2**64, 1.5),
    "ignore_eos": (1, "yes"),
    "include_prompt": (1,),
    "include_stop_str_in_output": (1,),
    "logprobs": (-1, 21, 1.5),
    "prompt_logprobs": (-1, 21),
    "logprobs_mode": ("both", 1),
    "n": (0, -1, 2000, 1.5),
    "best_of": (0, 2000, 1.5, 4),  # of LLM alone
    "json_schema": (5, [1], ""),
    "regex": ("", 5),
    "grammar": ("", 5),
    "choice": ("", [], [1], 5),
    "logits_processors": (5, [5]),
    "processors": (5, {"no_such": 1}),
    "no_repeat_ngram_size": (-1, "a"),
    "exponential_decay_length_penalty": (5,),
    "sequence_bias": ([], [[5]]),
    "top_h": (2.0,),
    "watermarking_config": (5,),
    "no_such_parameter": (1,),
}


def test_there_is_nonsense_for_every_parameter() -> None:
    assert set(NONSENSE) >= {f.name for f in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in NONSENSE.items() for value in values if value is not None]
)
def test_nonsense_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidValueError, match=name):
        make_request(0, {name: value}, [])


def test_edits_survive_being_asked_late() -> None:
    """A request that starts over, or that joins late, gives all its tokens at once."""
    step_by_step, at_once = (
        make_request(i, {"repetition_penalty": 1.4, "frequency_penalty": 0.7}, []) for i in range(2)
    )
    rng = np.random.default_rng(0)
    for token in rng.integers(0, VOCAB_SIZE, 200).tolist():
        step_by_step.edits.after(step_by_step.tokens)
        step_by_step.tokens.append(token)
        at_once.tokens.append(token)
    for ours, theirs in zip(
        step_by_step.edits.after(step_by_step.tokens), at_once.edits.after(at_once.tokens), strict=True
    ):
        assert np.array_equal(ours, theirs)


def test_stop_tokens_that_the_model_does_not_have_harm_nobody() -> None:
    config = ContinuousBatchingConfig(page_size=4, num_blocks=40)
    asked = [
        {"stop_token_ids": [10**6, -1], "min_new_tokens": 5},
        {},
        {"min_new_tokens": 3, "eos_token_id": [10**6, EOS]},
    ]
    for output in generate(tiny_model("llama"), asked, config):
        assert output.status is RequestStatus.FINISHED and len(output.generated_tokens) >= 3


def test_stop_tokens_wait_for_min_new_tokens_beside_other_processors_too() -> None:
    config = ContinuousBatchingConfig(page_size=4, num_blocks=40)
    first = reference(tiny_model("llama"), PROMPT, 1, eos_token_id=EOS).tokens[0]
    asked = [{"stop_token_ids": [first], "min_new_tokens": 4, **more} for more in ({}, {"remove_invalid_values": True})]
    for output in generate(tiny_model("llama"), asked, config):
        assert len(output.generated_tokens) >= 4 and first not in output.generated_tokens[:4]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"temperature": 1.0}])
@pytest.mark.parametrize(
    "forbids_all",
    [
        {"suppress_tokens": list(range(VOCAB_SIZE))},
        {"bad_words_ids": [[token_id] for token_id in range(VOCAB_SIZE)]},
        {"logits_processors": [lambda ids, scores: torch.full_like(scores, -torch.inf)]},
    ],
)
def test_a_request_that_may_not_say_anything_says_so(
    forbids_all: dict[str, Any], sampling: dict[str, Any], fused: bool
) -> None:
    model = tiny_model("llama")
    config = ContinuousBatchingConfig(page_size=4, num_blocks=100, fused_decoder=fused)
    manager = enable(model).init_continuous_batching(GenerationConfig(eos_token_id=-1), config)
    with manager.session():
        bad = manager.add_request(PROMPT, max_new_tokens=5, **sampling, **forbids_all)
        good = manager.add_request(PROMPT, max_new_tokens=5, do_sample=False)
        outputs = [manager.get_result(one, timeout=60) for one in (bad, good)]
    assert outputs[0].status is RequestStatus.FAILED and outputs[0].generated_tokens == []
    assert outputs[0].error == "every token is forbidden" and outputs[0].finish_reason == "error"
    assert outputs[1].generated_tokens == reference(model, PROMPT, 5).tokens


@pytest.mark.parametrize(
    ("name", "value", "neutral"), [("no_repeat_ngram_size", 2, 0), ("renormalize_logits", True, False)]
)
def test_a_request_can_switch_off_what_its_config_says(name: str, value: Any, neutral: Any) -> None:
    defaults = GenerationDefaults.of(tiny_model("llama"), GenerationConfig(**{name: value}))
    factory = RequestFactory(VOCAB_SIZE, 100, 100, None)

    def asked(**sampling: Any) -> dict[str, Any]:
        return factory.make(defaults, "x", RequestSpec(PROMPT, 5, sampling=sampling)).params.active_processors

    assert asked() == {name: value}
    assert asked(**{name: neutral}) == asked(processors={name: neutral}) == {}
    whole = SamplingParams(temperature=0.5, processors={name: neutral}).as_dict()  # as `LLM` hands it on
    assert asked(**whole) == {} and asked(**SamplingParams().as_dict()) == {name: value}


def test_any_number_of_tokens_may_have_a_bias() -> None:
    for count in (1, 63, 64, 65, VOCAB_SIZE):
        biases = {token_id: float(token_id) for token_id in range(count)}
        edits = TokenEdits.needed(SamplingParams(logit_bias=biases), 3, frozenset())
        assert edits is not None
        changes = edits.after([1, 2, 3])
        assert dict(zip(changes.token_ids.tolist(), changes.bias.tolist(), strict=True)) == biases


@pytest.mark.parametrize("name", ["repetition_penalty", "encoder_repetition_penalty", "temperature", "top_p"])
def test_whole_numbers_are_numbers(name: str) -> None:
    """As JSON has them, also where transformers asks for a float."""
    value = 1 if name == "top_p" else 2
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    beside = {"no_repeat_ngram_size": 3}
    whole, real = (make_request(0, {name: given, **beside}, [33, 34]) for given in (value, float(value)))
    assert torch.equal(processed([whole], logits), processed([real], logits))


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-38, 1e-39, 1e-45])
def test_however_cold_the_likeliest_is_left(temperature: float) -> None:
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(4)) * 40
    for beside in ({}, {"no_repeat_ngram_size": 3}):
        request = make_request(0, {"temperature": temperature, **beside}, [33, 34])
        scores = processed([request], logits)
        assert scores.argmax() == logits.argmax() and not scores.isnan().any()
