"""Many samples of one prompt: computed once, shared, and each as if it had been asked for alone."""

from typing import Any

import pytest

from legato import (
    LLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    InvalidValueError,
    RequestStatus,
    SamplingParams,
    enable,
)
from tests.parity.families import tiny_model
from tests.parity.reference import reference

PROMPT = [5, 17, 80, 3, 44, 9, 61, 17, 80, 33, 21]


def manager_of(family: str = "llama", **config: Any) -> Any:
    settings = {"page_size": 4, "num_blocks": 64, "safety_margin": 0.0, "max_batch_tokens": 64, **config}
    generation = GenerationConfig(eos_token_id=-1, pad_token_id=0)
    return enable(tiny_model(family)).init_continuous_batching(generation, ContinuousBatchingConfig(**settings))


def results(manager: Any, ids: list[str]) -> list[Any]:
    return [manager.get_result(request_id, timeout=60) for request_id in ids]


def run(manager: Any, requests: list[dict[str, Any]], prompt: list[int] = PROMPT) -> list[list[Any]]:
    """The outputs of each request's samples."""
    with manager.session():
        parents = [manager.add_request(prompt, **request) for request in requests]
        families = [[p, *(f"{p}:{i}" for i in range(1, r.get("n", 1)))] for p, r in zip(parents, requests, strict=True)]
        return [results(manager, ids) for ids in families]


@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize("page_size", [4, 5, 11, 64])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_samples_are_those_of_requests_of_their_own(family: str, page_size: int, sharing: bool) -> None:
    settings = {"page_size": page_size, "num_blocks": -(-400 // page_size), "allow_block_sharing": sharing}
    sampling = {"max_new_tokens": 12, "temperature": 1.3, "logprobs": 2}
    (together,) = run(manager_of(family, **settings), [{**sampling, "n": 6, "seed": 100}])
    alone = run(manager_of(family, **settings), [{**sampling, "seed": 100 + i} for i in range(6)])
    assert [one.generated_tokens for one in together] == [one.generated_tokens for (one,) in alone]
    assert len({tuple(one.generated_tokens) for one in together}) > 3, "all samples are the same"
    for ours, (theirs,) in zip(together, alone, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        assert ours.status is RequestStatus.FINISHED and len(ours.top_logprobs) == 12


def test_the_prompt_is_computed_once() -> None:
    for sharing in (True, False):
        manager = manager_of(allow_block_sharing=sharing)
        run(manager, [{"n": 16, "temperature": 1.0, "max_new_tokens": 5}])
        assert manager.stats.num_prompt_tokens == len(PROMPT)
        assert manager.stats.num_finished == 16


@pytest.mark.parametrize("num_blocks", [8, 10, 14])
@pytest.mark.parametrize("space", [0.0, 0.1])
def test_a_cache_too_small_for_all_samples_costs_time_and_no_token(num_blocks: int, space: float) -> None:
    sampling = {"max_new_tokens": 15, "temperature": 1.3, "seed": 5}
    (roomy,) = run(manager_of(), [{**sampling, "n": 8}])
    manager = manager_of(num_blocks=num_blocks, cpu_offload_space=space)
    (tight,) = run(manager, [{**sampling, "n": 8}])
    assert [one.generated_tokens for one in tight] == [one.generated_tokens for one in roomy]
    assert manager.stats.num_resets + manager.stats.num_offloads > 0 or num_blocks > 10
    assert manager.stats.cache_used_share == 0


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_more_samples_than_requests_a_pass(limit: int) -> None:
    sampling = {"max_new_tokens": 6, "temperature": 1.3, "seed": 5}
    (roomy,) = run(manager_of(), [{**sampling, "n": 9}])
    (few,) = run(manager_of(max_requests_per_batch=limit), [{**sampling, "n": 9}])
    assert [one.generated_tokens for one in few] == [one.generated_tokens for one in roomy]


def test_families_beside_each_other_and_prompts_of_one_token() -> None:
    requests = [{"n": n, "temperature": 1.2, "seed": 10 * n, "max_new_tokens": 7} for n in (1, 4, 2, 8)]
    for prompt in (PROMPT, [5], PROMPT * 10):
        together = run(manager_of(), requests, prompt)
        for request, outputs in zip(requests, together, strict=True):
            (alone,) = run(manager_of(), [request], prompt)
            assert [one.generated_tokens for one in outputs] == [one.generated_tokens for one in alone]


def test_greedy_samples_are_the_greedy_answer() -> None:
    (outputs,) = run(manager_of(), [{"n": 3, "do_sample": False, "max_new_tokens": 8}])
    expected = reference(tiny_model("llama"), PROMPT, 8).tokens
    assert [one.generated_tokens for one in outputs] == [expected] * 3


def test_generate_batch_returns_all_sequences_in_order() -> None:
    model, config = enable(tiny_model("llama")), ContinuousBatchingConfig(page_size=4)
    generation = GenerationConfig(num_return_sequences=11, do_sample=True, max_new_tokens=4, eos_token_id=-1)
    outputs = model.generate_batch([PROMPT, PROMPT[:3]], generation, config)
    assert [len(output.prompt_ids) for output in outputs.values()] == [len(PROMPT)] * 11 + [3] * 11
    parents = [request_id for request_id in outputs if ":" not in request_id]
    assert list(outputs) == [f"{p}{suffix}" for p in parents for suffix in ("", *(f":{i}" for i in range(1, 11)))]


def test_the_best_of_many_are_those_with_the_likeliest_tokens(smollm2: Any, smollm2_tokenizer: Any) -> None:
    sampling = {"temperature": 1.2, "max_tokens": 12, "seed": 4}
    with LLM(smollm2, smollm2_tokenizer) as llm:
        every = llm.generate(["The sea is"], SamplingParams(**sampling, n=6, logprobs=0), use_tqdm=False)
        best = llm.generate(["The sea is"] * 2, SamplingParams(**sampling, n=2, best_of=6), use_tqdm=False)
        first = llm.generate("The sea is", SamplingParams(**sampling, best_of=6, logprobs=2), use_tqdm=False)
        with pytest.raises(InvalidValueError, match="best_of=6"):
            llm.manager.add_request([1, 2], best_of=6)
        with pytest.raises(InvalidValueError, match="best_of=6"):
            llm.stream("a", SamplingParams(best_of=6))
    every.sort(key=lambda one: -sum(one.logprobs) / len(one.logprobs))
    assert [one.text for one in best] == [one.text for one in every[:2]] * 2
    assert all(one.logprobs == [] for one in best)
    with LLM(smollm2, smollm2_tokenizer, ContinuousBatchingConfig(return_logprobs=True)) as llm:
        asked = SamplingParams(**sampling, best_of=6, prompt_logprobs=0)
        (kept,) = llm.generate("The sea is", asked, use_tqdm=False)
    assert every[0].request_id.endswith(":" + every[0].request_id[-1]), "the first sample must not be the best here"
    assert kept.text == every[0].text and kept.logprobs and kept.prompt_logprobs is not None
    assert [one.text for one in first] == [every[0].text] and first[0].logprobs == every[0].logprobs
    with pytest.raises(InvalidValueError, match="best_of"):
        SamplingParams(n=3, best_of=2)


@pytest.mark.parametrize("which", ["parent", "child"])
def test_one_sample_may_be_cancelled_before_the_others_begin(which: str) -> None:
    manager = manager_of()
    parent = manager.add_request(PROMPT, n=3, temperature=1.0, seed=3, max_new_tokens=6)  # not started yet
    cancelled = parent if which == "parent" else f"{parent}:1"
    manager.cancel_request(cancelled)
    (expected,) = run(manager_of(), [{"n": 3, "temperature": 1.0, "seed": 3, "max_new_tokens": 6}])
    with manager.session():
        outputs = results(manager, [parent, f"{parent}:1", f"{parent}:2"])
    for output, other in zip(outputs, expected, strict=True):
        if output.request_id == cancelled:
            assert output.finish_reason == "cancelled"
        else:
            assert output.generated_tokens == other.generated_tokens
    assert manager.stats.cache_used_share == 0


def test_a_hard_stop_ends_every_sample() -> None:
    manager = manager_of()
    manager.start()
    parent = manager.add_request(PROMPT * 5, n=5, temperature=1.0, max_new_tokens=150)
    manager.stop(hard_stop=True)
    outputs = results(manager, [parent, *(f"{parent}:{i}" for i in range(1, 5))])
    assert all(output.is_finished() for output in outputs)
    assert manager.stats.cache_used_share == 0


def test_a_penalty_counts_each_samples_own_tokens() -> None:
    sampling = {"max_new_tokens": 12, "temperature": 1.3, "frequency_penalty": 2.0, "repetition_penalty": 1.5}
    (together,) = run(manager_of(), [{**sampling, "n": 4, "seed": 100}])
    alone = run(manager_of(), [{**sampling, "seed": 100 + i} for i in range(4)])
    assert [one.generated_tokens for one in together] == [one.generated_tokens for (one,) in alone]
