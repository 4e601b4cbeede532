"""SPEC 5 on real models: a cache far too small costs time, never a token; a shared prefix is computed once."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from legato import ContinuousBatchingConfig, GenerationConfig, enable
from legato.engine.engine import EngineStats
from legato.errors import InvalidValueError
from legato.request import GenerationOutput
from legato.text import encode, encode_chat

PAGE = 16
NEW_TOKENS = 16
PLENTY = 2.0  # GiB of swap space

Case = tuple[Any, list[list[int]], list[list[int]]]  # model, prompts, tokens of the run with memory to spare


def serve(
    model: Any, prompts: list[list[int]], new_tokens: int = NEW_TOKENS, **settings: Any
) -> tuple[list[GenerationOutput], EngineStats]:
    """Outputs in the order of the prompts, and the engine's statistics at the end."""
    config = ContinuousBatchingConfig(page_size=PAGE, max_batch_tokens=1024, **settings)
    generation = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1)
    manager = model.init_continuous_batching(generation, config)
    try:
        with manager.session():
            ids = manager.add_requests(prompts)
            outputs = {output.request_id: output for output in manager}
        return [outputs[i] for i in ids], manager.stats
    finally:
        manager.destroy()


def pages(prompts: list[list[int]], new_tokens: int) -> int:
    """Pages that all prompts with their answers fill at once."""
    return sum(-(-(len(ids) + new_tokens) // PAGE) for ids in prompts)


def unpressured(model: Any, prompts: list[list[int]]) -> Case:
    outputs, stats = serve(enable(model), prompts, num_blocks=2 * pages(prompts, NEW_TOKENS), allow_block_sharing=False)
    assert (stats.num_resets, stats.num_offloads, stats.num_cached_tokens) == (0, 0, 0)
    return model, prompts, [output.generated_tokens for output in outputs]


@pytest.fixture(scope="module")
def smollm2_case(smollm2: Any, smollm2_tokenizer: Any, questions: list[str]) -> Case:
    prompts = [encode_chat(smollm2_tokenizer, [{"role": "user", "content": q}]) for q in questions]
    return unpressured(smollm2, prompts)


@pytest.fixture(scope="module")
def gemma3_case(gemma3: Any, gemma3_tokenizer: Any, questions: list[str]) -> Case:
    return unpressured(gemma3, [encode(gemma3_tokenizer, q) for q in questions])


@pytest.fixture(params=["smollm2", "gemma3"])
def case(request: pytest.FixtureRequest) -> Case:
    return request.getfixturevalue(f"{request.param}_case")


SOME = [
    (0.1, 0.0, True, "fifo"),
    (0.1, PLENTY, False, "prefill_first"),
    (0.2, PLENTY, True, "fifo"),
    (0.5, 0.0, False, "prefill_first"),
]
ALL = list(product((1.0, 0.5, 0.2, 0.1), (0.0, PLENTY), (True, False), ("fifo", "prefill_first")))


def check_pressure(case: Case, share: float, swap: float, sharing: bool, scheduler: str) -> EngineStats:
    model, prompts, expected = case
    outputs, stats = serve(
        model,
        prompts,
        num_blocks=max(1, int(share * pages(prompts, NEW_TOKENS))),
        cpu_offload_space=swap,
        allow_block_sharing=sharing,
        scheduler_type=scheduler,
    )
    assert [output.generated_tokens for output in outputs] == expected
    assert stats.num_finished == len(prompts)
    assert stats.cache_used_share == 0
    if swap:
        assert (stats.num_resets, stats.num_recomputed_tokens) == (0, 0)
    else:
        assert stats.num_offloads == 0
    assert sharing or stats.num_cached_tokens == 0
    computed_or_found = stats.num_prompt_tokens + stats.num_cached_tokens
    assert stats.num_resets or computed_or_found == sum(len(ids) for ids in prompts)
    return stats


@pytest.mark.parametrize(("share", "swap", "sharing", "scheduler"), SOME)
def test_a_cache_too_small_costs_no_token(case: Case, share: float, swap: float, sharing: bool, scheduler: str) -> None:
    check_pressure(case, share, swap, sharing, scheduler)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("share", "swap", "sharing", "scheduler"), ALL)
def test_a_cache_too_small_costs_no_token_in_any_setting(
    case: Case, share: float, swap: float, sharing: bool, scheduler: str
) -> None:
    check_pressure(case, share, swap, sharing, scheduler)


def test_pressure_is_real_and_offloading_recomputes_nothing(smollm2_case: Case) -> None:
    """Without a margin and with little room, requests stall; on the host they keep what they have."""
    reset = check_pressure(smollm2_case, 0.1, 0.0, False, "prefill_first")
    offloaded = check_pressure(smollm2_case, 0.1, PLENTY, False, "prefill_first")
    assert reset.num_resets > 0
    assert reset.num_recomputed_tokens > 0
    assert offloaded.num_offloads > 0


def test_a_request_longer_than_the_cache_fails_alone_and_at_once(smollm2: Any) -> None:
    model = enable(smollm2)
    manager = model.init_continuous_batching(
        GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1),
        ContinuousBatchingConfig(page_size=PAGE, num_blocks=4),
    )
    with manager.session():
        with pytest.raises(InvalidValueError, match=r"100 tokens: with 4 new ones, 103 .* holds 64"):
            manager.add_request([5] * 100)
        ids = manager.add_requests([[5] * 100, [6] * 20])
        outputs = {output.request_id: output for output in manager}
    assert "which holds 64" in (outputs[ids[0]].error or "")
    assert len(outputs[ids[1]].generated_tokens) == 4
    manager.destroy()


@pytest.fixture(scope="module")
def shared_prompts() -> list[list[int]]:
    """32 prompts that begin with the same tokens, about 1,600 of them."""
    file = Path(__file__).parent.parent.parent / "bench" / "prefix.json"
    return [request["prompt_ids"] for request in json.loads(file.read_text())["requests"]]


def test_a_shared_prefix_is_computed_once(smollm2: Any, shared_prompts: list[list[int]]) -> None:
    outputs, stats = serve(enable(smollm2), shared_prompts, new_tokens=2)
    total = sum(len(ids) for ids in shared_prompts)
    assert stats.num_prompt_tokens + stats.num_cached_tokens == total
    assert stats.num_prompt_tokens <= total / 8
    assert sum(output.num_cached_tokens for output in outputs) == stats.num_cached_tokens
    assert sum(output.num_cached_tokens == 0 for output in outputs) == 1


def test_a_hybrid_model_shares_the_same_blocks(gemma3: Any, gemma3_tokenizer: Any, questions: list[str]) -> None:
    """A prefix three times as long as the window; the answers are those of a run that shares nothing."""
    prefix = encode(gemma3_tokenizer, "\n\n".join(questions))[:1610]
    prompts = [prefix + encode(gemma3_tokenizer, question)[1:] for question in questions[:8]]
    outputs, stats = serve(enable(gemma3), prompts, new_tokens=4)
    alone, _ = serve(gemma3, prompts, new_tokens=4, allow_block_sharing=False)
    assert [o.generated_tokens for o in outputs] == [o.generated_tokens for o in alone]
    assert sorted(o.num_cached_tokens for o in outputs)[0] == 0
    assert sorted(o.num_cached_tokens for o in outputs)[1] >= len(prefix) // PAGE * PAGE
    assert stats.num_prompt_tokens == sum(map(len, prompts)) - stats.num_cached_tokens
