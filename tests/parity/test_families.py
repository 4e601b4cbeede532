"""SPEC 7 on a tiny random model of every family that Legato names."""

import random
from dataclasses import dataclass
from typing import Any

import pytest

from legato import ContinuousBatchingConfig, GenerationConfig, enable
from tests.parity.families import FAMILIES, FUSED, VOCAB_SIZE, tiny_model
from tests.parity.reference import Reference, count_near_ties, reference

PAGE = 4
BATCH_TOKENS = 16
NEW_TOKENS = 14
# One token; a page less one, exactly, and one more; a window's worth; several chunks.
LENGTHS = [1, PAGE - 1, PAGE, PAGE + 1, 8, 9, 2 * BATCH_TOKENS + 5, 71, 2, 30]

BACKENDS = {family: ["eager", "sdpa"] for family in FAMILIES} | {"gpt_oss": ["eager"], "gemma2": ["eager"]}
# Family, attention implementation, path. The fused decoder does not use the former: one will do.
CASES = [(family, backend, "reference") for family, backends in BACKENDS.items() for backend in backends]
CASES += [(family, BACKENDS[family][-1], "fused") for family in FUSED]


def make_prompts(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


def stop_at_different_steps(references: list[Reference]) -> list[int]:
    """Tokens that end some sequences early, at steps that differ."""
    return [references[0].tokens[2], references[6].tokens[6], references[7].tokens[10]]


@dataclass(frozen=True)
class Case:
    """A model, prompts, and what `generate` makes of them when these tokens end a sequence."""

    model: Any
    prompts: list[list[int]]
    references: list[Reference]
    stops: list[int]
    fused: bool


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest) -> Case:
    family, backend, path = request.param
    model = enable(tiny_model(family, backend))
    prompts = make_prompts(seed=1)
    references = [reference(model, ids, NEW_TOKENS) for ids in prompts]
    stops = stop_at_different_steps(references)
    return Case(model, prompts, [r.cut_after(stops) for r in references], stops, path == "fused")


@pytest.mark.parametrize("scheduler", ["fifo", "prefill_first"])
@pytest.mark.parametrize("num_blocks", [64, 24], ids=["roomy", "tight"])
def test_tokens_are_those_of_generate(case: Case, scheduler: str, num_blocks: int) -> None:
    outputs = case.model.generate_batch(
        case.prompts,
        GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=case.stops),
        ContinuousBatchingConfig(
            page_size=PAGE, max_batch_tokens=BATCH_TOKENS, num_blocks=num_blocks, scheduler_type=scheduler,
            fused_decoder=case.fused,
        ),
    )  # fmt: skip
    lengths = {len(output.generated_tokens) for output in outputs.values()}
    assert len(lengths) > 1, "every sequence ended at the same step: the test lost its point"
    assert count_near_ties(list(outputs.values()), case.references) == 0


def test_the_model_is_left_as_it_was(case: Case) -> None:
    model, prompts = case.model, case.prompts
    implementation, training = model.config._attn_implementation, model.training
    config = ContinuousBatchingConfig(page_size=PAGE, fused_decoder=case.fused)
    model.generate_batch(prompts[:2], GenerationConfig(max_new_tokens=2), config)
    assert (model.config._attn_implementation, model.training) == (implementation, training)
    assert reference(model, prompts[3], NEW_TOKENS).cut_after(case.stops) == case.references[3]
