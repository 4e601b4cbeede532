"""SPEC 7 on real models: the tokens of `model.generate`, whatever the batch-mates, pages, chunks and scheduler."""

from itertools import product
from typing import Any

import pytest

from legato import ContinuousBatchingConfig, GenerationConfig, enable
from legato.text import encode, encode_chat
from tests.parity.reference import Reference, count_near_ties, reference

pytestmark = pytest.mark.usefixtures("all_processors")

NUM_PROMPTS = 32
NEW_TOKENS = 10
LONG_NEW_TOKENS = 8
# Any two settings meet here; tiny models, in seconds, and `-m exhaustive`, in minutes, take all combinations.
PAIRS = [
    ("fifo", 4, 256, "eager"), ("prefill_first", 4, 1024, "sdpa"),
    ("fifo", 16, 1024, "eager"), ("prefill_first", 16, 256, "sdpa"),
    ("fifo", 256, 256, "sdpa"), ("prefill_first", 256, 1024, "eager"),
]  # fmt: skip

Case = tuple[Any, list[list[int]], list[Reference]]


@pytest.fixture(scope="module")
def smollm2_case(smollm2: Any, smollm2_tokenizer: Any, questions: list[str]) -> Case:
    prompts = [encode_chat(smollm2_tokenizer, [{"role": "user", "content": q}]) for q in questions[:NUM_PROMPTS]]
    return enable(smollm2), prompts, [reference(smollm2, ids, NEW_TOKENS) for ids in prompts]


@pytest.fixture(scope="module")
def gemma3_case(gemma3: Any, gemma3_tokenizer: Any, questions: list[str]) -> Case:
    prompts = [encode(gemma3_tokenizer, q) for q in questions[:NUM_PROMPTS]]
    return enable(gemma3), prompts, [reference(gemma3, ids, NEW_TOKENS) for ids in prompts]


@pytest.fixture(scope="module")
def long_case(gemma3: Any, gemma3_tokenizer: Any, questions: list[str]) -> Case:
    """Prompts three times as long as Gemma-3's window, of different lengths, beside short ones."""
    whole = encode(gemma3_tokenizer, "\n\n".join(questions))
    prompts = [whole[:1500], whole[:1763], whole[:40], whole[:513]]
    return enable(gemma3), prompts, [reference(gemma3, ids, LONG_NEW_TOKENS) for ids in prompts]


@pytest.fixture(params=["smollm2", "gemma3"])
def case(request: pytest.FixtureRequest) -> Case:
    return request.getfixturevalue(f"{request.param}_case")


def run(case: Case, backend: str, new_tokens: int, **settings: Any) -> int:
    """Serve the case's prompts and check them; returns the near ties."""
    model, prompts, references = case
    before = model.config._attn_implementation
    model.set_attn_implementation(backend)
    try:
        outputs = model.generate_batch(
            prompts,
            GenerationConfig(max_new_tokens=new_tokens, do_sample=False),
            ContinuousBatchingConfig(**settings),
        )
        assert model.config._attn_implementation == backend
    finally:
        model.set_attn_implementation(before)
    return count_near_ties(list(outputs.values()), references)


@pytest.mark.parametrize(
    ("scheduler", "page_size", "max_batch_tokens", "backend"),
    [
        combination if combination in PAIRS else pytest.param(*combination, marks=pytest.mark.exhaustive)
        for combination in product(["fifo", "prefill_first"], [4, 16, 256], [256, 1024], ["eager", "sdpa"])
    ],
)
def test_tokens_are_those_of_generate(
    case: Case, scheduler: str, page_size: int, max_batch_tokens: int, backend: str
) -> None:
    ties = run(
        case,
        backend,
        NEW_TOKENS,
        scheduler_type=scheduler,
        page_size=page_size,
        max_batch_tokens=max_batch_tokens,
    )
    assert ties < 0.01 * NUM_PROMPTS


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize(("page_size", "max_batch_tokens"), [(4, 1024), (16, 256), (256, 1024), (256, 4096)])
def test_prompts_longer_than_the_sliding_window(
    long_case: Case, page_size: int, max_batch_tokens: int, backend: str
) -> None:
    assert run(long_case, backend, LONG_NEW_TOKENS, page_size=page_size, max_batch_tokens=max_batch_tokens) == 0


@pytest.mark.parametrize("scheduler", ["fifo", "prefill_first"])
def test_a_cache_far_too_small_costs_no_token(case: Case, scheduler: str) -> None:
    """Room for about three of the 32 requests: the others wait, and running ones are reset when they grow."""
    longest = max(len(ids) for ids in case[1]) + NEW_TOKENS
    blocks = 3 * -(-longest // 16)
    assert run(case, "sdpa", NEW_TOKENS, scheduler_type=scheduler, page_size=16, num_blocks=blocks) == 0
