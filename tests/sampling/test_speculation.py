"""Guessing ahead (prompt lookup): the tokens of one at a time, greedy or drawn, whatever was guessed."""

import json
import random
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato import LLM, ContinuousBatchingConfig, GenerationConfig, RequestStatus, SamplingParams, enable
from legato.config import MAX_TOKENS_WITH_DRAFTS
from legato.drafting import PromptLookup
from tests.parity.families import tiny_model
from tests.parity.reference import count_near_ties, reference
from tests.tiny import tiny_llama

PROMPT = [5, 17, 80, 3, 44, 9, 61, 17, 80, 3, 21, 5, 17]
COPYING = Path(__file__).parents[2] / "bench" / "copying.json"


def manager_of(model: Any, **config: Any) -> Any:
    settings = {"page_size": 4, "num_blocks": 256, "safety_margin": 0.0, "max_batch_tokens": 64, **config}
    return enable(model).init_continuous_batching(
        GenerationConfig(eos_token_id=-1, pad_token_id=0), ContinuousBatchingConfig(**settings)
    )


def run(manager: Any, requests: Sequence[dict[str, Any]], in_one_step: bool = False) -> list[Any]:
    with manager.session():
        with manager.pause() if in_one_step else nullcontext():
            ids = [
                manager.add_request(**{"input_ids": PROMPT, "max_new_tokens": 30, **request}) for request in requests
            ]
        return [manager.get_result(request_id, timeout=120) for request_id in ids]


class Guesses:
    """In place of `PromptLookup`: knows the answers, and is right about as often as it is told to be."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]], share_right: float) -> None:
        self._answers, self._share_right = answers, share_right
        self._random = random.Random(7)

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        prompt = next(p for p in self._answers if tuple(tokens[: len(p)]) == p)
        rest = self._answers[prompt][len(tokens) - len(prompt) :]
        drafts = rest[: self._random.randint(0, max(0, most))]
        return [d if self._random.random() < self._share_right else self._random.randrange(97) for d in drafts]

    def learn(self, num_drafted: int, num_accepted: int, num_tokens: int) -> None:
        assert 0 <= num_accepted <= num_drafted


SAMPLINGS = (
    {"do_sample": False},
    {"temperature": 1.2, "seed": 3},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 4},
    {"temperature": 1.0, "logprobs": 3, "seed": 5},
    {"temperature": 1.0, "typical_p": 0.8, "logprobs": 2, "logprobs_mode": "raw", "prompt_logprobs": 1, "seed": 6},
)


@pytest.mark.parametrize("share_right", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"page_size": 16, "num_blocks": 40, "allow_block_sharing": False},
        {"num_blocks": 13},  # one request, hardly two: the others are reset, between drafts
        {"num_blocks": 13, "cpu_offload_space": 0.05},
        {"max_requests_per_batch": 3, "scheduler_type": "prefill_first"},
    ],
)
def test_tokens_are_those_without_guesses(
    family: str, fused: bool, settings: dict[str, Any], share_right: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(family)
    requests = [{**one, "input_ids": PROMPT[i:]} for i, one in enumerate(SAMPLINGS)]
    plain = run(manager_of(model, fused_decoder=fused), requests)
    answers = {tuple(one.prompt_ids): one.generated_tokens for one in plain}
    monkeypatch.setattr("legato.generation.PromptLookup", lambda most: Guesses(answers, share_right))
    manager = manager_of(model, fused_decoder=fused, speculative="ngram", **settings)
    # Twice: what a wrong guess left in the cache must not be found as somebody's prefix.
    for outputs in (run(manager, requests), run(manager, requests)):
        for ours, theirs in zip(outputs, plain, strict=True):
            assert ours.generated_tokens == theirs.generated_tokens
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-3)
            assert [one and one.logprob for one in ours.prompt_logprobs or []] == pytest.approx(
                [one and one.logprob for one in theirs.prompt_logprobs or []], abs=1e-3
            )
            assert [[i for i, _ in top] for top in ours.top_logprobs] == [
                [i for i, _ in top] for top in theirs.top_logprobs
            ]
    stats = manager.stats
    assert stats.num_draft_tokens > 0 and stats.cache_used_share == 0
    assert (stats.num_accepted_tokens == stats.num_draft_tokens) == (share_right == 1.0)
    assert stats.num_resets + stats.num_offloads > 0 or settings.get("num_blocks") != 13


def test_an_answer_may_be_found_as_a_prefix_after_wrong_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    (plain,) = run(manager_of(model), [{"do_sample": False, "max_new_tokens": 40}])
    answers = {tuple(PROMPT): plain.generated_tokens}
    monkeypatch.setattr("legato.generation.PromptLookup", lambda most: Guesses(answers, 0.5))
    manager = manager_of(model, speculative="ngram")
    run(manager, [{"do_sample": False, "max_new_tokens": 40}])
    for length in range(len(PROMPT) + 1, len(PROMPT) + 40, 5):
        longer = [*PROMPT, *plain.generated_tokens][:length]
        answers[tuple(longer)] = reference(model, longer, 6).tokens
        monkeypatch.setattr(
            "legato.generation.PromptLookup",
            lambda most, longer=longer: Guesses({tuple(longer): answers[tuple(longer)]}, 0.5),
        )
        (output,) = run(manager, [{"input_ids": longer, "do_sample": False, "max_new_tokens": 6}])
        assert output.generated_tokens == answers[tuple(longer)]
        assert output.num_cached_tokens == (length - 1) // 4 * 4


def test_a_stream_has_an_output_for_each_token_and_ends_where_it_should() -> None:
    model = tiny_llama()
    (whole,) = run(manager_of(model), [{"do_sample": False, "max_new_tokens": 60}])
    tokens = whole.generated_tokens
    manager = manager_of(model, speculative="ngram")
    for limit in (1, 2, 3, 17, 60):
        with manager.session():
            request_id = manager.add_request(PROMPT, max_new_tokens=limit, streaming=True, record_timestamps=True)
            outputs = list(manager.request_id_iter(request_id))
        assert [one.generated_tokens for one in outputs] == [tokens[:n] for n in range(1, limit + 1)]
        assert outputs[-1].finish_reason == "length" and len(outputs[-1].timestamps) == limit
    for stop in set(tokens):
        (output,) = run(manager, [{"do_sample": False, "max_new_tokens": 60, "stop_token_ids": [stop]}])
        assert output.generated_tokens == tokens[: tokens.index(stop) + 1] and output.finish_reason == "stop"
    assert manager.stats.num_accepted_tokens > 50


def test_the_smallest_cache_and_the_longest_sequence_will_do() -> None:
    """Drafts never ask for more than the request was promised."""
    for max_length, page_size in ((64, 4), (61, 16), (33, 32)):
        model = tiny_model("llama", max_position_embeddings=max_length)
        blocks = -(-(max_length - 1) // page_size)
        new = max_length - len(PROMPT)
        (plain,) = run(manager_of(model, page_size=page_size), [{"max_new_tokens": new, "do_sample": False}])
        manager = manager_of(model, page_size=page_size, num_blocks=blocks, speculative="ngram")
        outputs = run(manager, [{"max_new_tokens": new, "do_sample": False}] * 3)
        assert [one.generated_tokens for one in outputs] == [plain.generated_tokens] * 3
        assert manager.stats.num_accepted_tokens > 0


def test_samples_of_a_prompt_guess_each_for_itself() -> None:
    model, sampling = tiny_llama(), {"temperature": 0.2, "seed": 9, "n": 5, "max_new_tokens": 40}
    found = []
    for speculative in (None, "ngram"):
        manager = manager_of(model, speculative=speculative)
        with manager.session():
            parent = manager.add_request(PROMPT, **sampling)
            ids = [parent, *(f"{parent}:{i}" for i in range(1, 5))]
            found.append([manager.get_result(one, timeout=60).generated_tokens for one in ids])
    assert found[0] == found[1] and manager.stats.num_accepted_tokens > 0


@pytest.mark.parametrize(
    "sampling",
    [
        {"repetition_penalty": 1.3},
        {"frequency_penalty": 0.5},
        {"bad_words_ids": [[17, 80]]},
        {"min_new_tokens": 5, "stop_token_ids": [3]},
        {"no_repeat_ngram_size": 3},
        {"logits_processors": [lambda ids, scores: scores]},
    ],
)
def test_requests_whose_logits_hang_on_their_tokens_do_without(sampling: dict[str, Any]) -> None:
    model = tiny_llama()
    requests = [{"do_sample": False, **sampling}, {"do_sample": False}]
    plain = run(manager_of(model), requests)
    alone = manager_of(model, speculative="ngram")
    assert [one.generated_tokens for one in run(alone, requests[:1])] == [plain[0].generated_tokens]
    assert alone.stats.num_draft_tokens == 0
    beside = manager_of(model, speculative="ngram")
    assert [one.generated_tokens for one in run(beside, requests)] == [one.generated_tokens for one in plain]


def test_a_full_batch_guesses_nothing() -> None:
    """Beyond a few rows each costs what it computes, and a wrong guess as much as a right one."""
    manager = manager_of(tiny_llama(), speculative="ngram", max_batch_tokens=512)  # all prompts in one pass
    requests = [{"input_ids": [i, *PROMPT], "max_new_tokens": 20} for i in range(MAX_TOKENS_WITH_DRAFTS)]
    run(manager, [{"do_sample": False, **request} for request in requests], in_one_step=True)
    assert manager.stats.num_draft_tokens == 0
    run(manager, [{"do_sample": False, **request} for request in requests[1:]], in_one_step=True)
    assert manager.stats.num_draft_tokens > 0


@pytest.mark.parametrize("fused", [True, False])
def test_smollm2_copies_faster_and_the_same(smollm2: Any, fused: bool) -> None:
    requests = json.loads(COPYING.read_text())["requests"]
    prompts = [requests[i]["prompt_ids"] for i in (0, 4)]
    manager = manager_of(smollm2, page_size=16, fused_decoder=fused, speculative="ngram")
    outputs = [run(manager, [{"input_ids": prompt, "max_new_tokens": 48, "do_sample": False}])[0] for prompt in prompts]
    references = [reference(smollm2, one.prompt_ids, 48, eos_token_id=-1) for one in outputs]
    assert count_near_ties(outputs, references) == 0
    assert all(one.status is RequestStatus.FINISHED for one in outputs)
    assert manager.stats.num_steps < 0.6 * 2 * 48  # a step for each token and the prompts, without


@pytest.mark.parametrize("limit", [2, 4, 8, 16])
def test_who_waits_is_let_in_as_soon_as_without_guesses(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right guesses for one request could fill every pass, and the others would wait till it ends."""
    model, seen = tiny_llama(), []
    (plain,) = run(manager_of(model), [{"max_new_tokens": 200, "do_sample": False}])
    monkeypatch.setattr(
        "legato.generation.PromptLookup", lambda most: Guesses({tuple(PROMPT): plain.generated_tokens}, 1.0)
    )
    manager = manager_of(model, speculative="ngram", max_requests_per_batch=limit)
    with manager.session():
        first = manager.add_request(PROMPT, max_new_tokens=200, do_sample=False, streaming=True)
        for number, output in enumerate(manager.request_id_iter(first)):
            if number == 5:
                other = manager.add_request([1, 2, 3], max_new_tokens=1, do_sample=False)
                seen.append(manager.get_result(other, timeout=60))
            last = output
    assert last.generated_tokens == plain.generated_tokens
    assert seen[0].lifespan[1] < last.lifespan[1]


def test_a_single_prompt_of_generate_batch_guesses_too() -> None:
    """Its manager is made for one request at a time, yet a pass has a row for each guess."""
    model = tiny_llama()
    generation = GenerationConfig(max_new_tokens=100, do_sample=False, eos_token_id=-1, pad_token_id=0)
    steps = []
    for speculative in (None, "ngram"):
        config = ContinuousBatchingConfig(page_size=16, speculative=speculative, max_requests_per_batch=1)
        with model.continuous_batching_context_manager(generation, config) as manager:
            output = manager.get_result(manager.add_request(PROMPT))
            steps.append((output.generated_tokens, manager.stats.num_steps))
    assert steps[0][0] == steps[1][0] and steps[1][1] < 0.7 * steps[0][1]


def test_stop_texts_and_cancellation_between_guesses(smollm2: Any, smollm2_tokenizer: Any) -> None:
    text = json.loads(COPYING.read_text())["requests"][4]["prompt_ids"]  # is quoted from
    with LLM(smollm2, smollm2_tokenizer) as llm:
        (whole,) = llm.generate(text, SamplingParams(temperature=0, max_tokens=60), use_tqdm=False)
        stop = whole.text[len(whole.text) // 2 :][:5]
        asked = SamplingParams(temperature=0, max_tokens=60, stop=stop)
        (cut,) = llm.generate(text, asked, use_tqdm=False)
    config = ContinuousBatchingConfig(speculative="ngram")
    with LLM(smollm2, smollm2_tokenizer, config) as llm:
        (ours,) = llm.generate(text, asked, use_tqdm=False)
        assert (ours.text, ours.generated_tokens, ours.finish_reason) == (cut.text, cut.generated_tokens, "stop")
        assert "".join(llm.stream(text, asked)) == cut.text
        for _ in range(3):
            pieces = llm.stream(text, SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True))
            next(pieces)
            pieces.close()
        (again,) = llm.generate(text, asked, use_tqdm=False)
        assert again.text == cut.text and llm.manager.stats.num_accepted_tokens > 0
        assert llm.manager.stats.cache_used_share == 0


# The guesses themselves


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 8), st.integers(1, 8))
def test_a_guess_is_what_followed_the_latest_of_the_longest_match(tokens: list[int], most: int, step: int) -> None:
    lookup = PromptLookup(16)
    for known in range(step, len(tokens), step):  # asked about on the way, as in generation
        lookup.propose(tokens[:known], 1)
    assert lookup.propose(tokens, most) == brute_force(tokens, min(most, 8))


def brute_force(tokens: list[int], most: int) -> list[int]:
    for size in (4, 3, 2):
        for end in range(len(tokens) - 1, size - 1, -1):
            if len(tokens) >= size and tokens[end - size : end] == tokens[-size:]:
                repeated = tokens[end:] * most
                return repeated[:most]
    return []


def test_guesses_grow_while_they_are_right() -> None:
    lookup, tokens, lengths = PromptLookup(8), [1, 2, 3, 4, 5, 6] * 4, []
    for _ in range(4):
        drafts = lookup.propose(tokens, 100)
        lengths.append(len(drafts))
        tokens += drafts
        lookup.learn(len(drafts), len(drafts), len(tokens))
    assert lengths == [4, 8, 8, 8]
    lookup.learn(8, 3, len(tokens))
    assert len(lookup.propose(tokens, 100)) == 3
    assert len(lookup.propose(tokens, 2)) == 2 and lookup.propose(tokens, 0) == []


def test_guesses_that_are_never_right_become_rare() -> None:
    lookup, tokens, num_drafted = PromptLookup(12), [1, 2, 3] * 10, 0
    for _ in range(2000):
        drafts = lookup.propose(tokens, 12)
        tokens += [1 + len(tokens) % 3]  # always the same few n-grams, and never what is guessed
        if drafts:
            num_drafted += len(drafts)
            lookup.learn(len(drafts), 0, len(tokens))
    assert 10 < num_drafted < 0.03 * 2000
