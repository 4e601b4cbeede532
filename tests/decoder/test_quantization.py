"""int8: what it costs on real text, and that it is refused where it cannot be."""

import math
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from legato import LLM, ContinuousBatchingConfig, enable
from legato.attention.probe import find_attention_groups
from legato.decoder.fusing import FusedModel
from legato.engine.runner import attention_configs
from legato.errors import UnsupportedModelError
from legato.kernels import load_kernels
from legato.kernels.packing import Quantization
from legato.text import encode
from tests.decoder.serving import fused_logits
from tests.parity.families import tiny_model

MOST_WORSE = 1.02  # of the perplexity in float32
LEAST_AGREEMENT = 0.93  # of the likeliest next tokens


def logits_of(model: Any, prompts: list[list[int]], quantization: Quantization | None) -> list[torch.Tensor]:
    groups = find_attention_groups(model, attention_configs(model))
    fused = FusedModel.read(model, groups, load_kernels(), quantization)
    return fused_logits(fused, prompts, num_chunks=1200)


def perplexity(logits: list[torch.Tensor], prompts: list[list[int]]) -> float:
    losses = [
        torch.nn.functional.cross_entropy(rows[:-1], torch.tensor(ids[1:]), reduction="none")
        for rows, ids in zip(logits, prompts, strict=True)
    ]
    return float(torch.cat(losses).mean().exp())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["smollm2", "gemma3"],
)
def test_perplexity_stays_within_two_per_cent(request: pytest.FixtureRequest, name: str, questions: list[str]) -> None:
    model, tokenizer = request.getfixturevalue(name), request.getfixturevalue(f"{name}_tokenizer")
    prompts = [encode(tokenizer, question)[:64] for question in questions[:24]]
    exact, rounded = (logits_of(model, prompts, quantization) for quantization in (None, "int8"))
    agreement = (torch.cat(exact).argmax(-1) == torch.cat(rounded).argmax(-1)).double().mean()
    before, after = perplexity(exact, prompts), perplexity(rounded, prompts)
    print(
        f"{name}: perplexity {before:.3f} in float32, {after:.3f} in int8; the likeliest token agrees {agreement:.3f}"
    )
    assert 1 / MOST_WORSE <= after / before <= MOST_WORSE
    assert agreement >= LEAST_AGREEMENT


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_a_cache_in_bfloat16_costs_little_more(request: pytest.FixtureRequest, name: str, questions: list[str]) -> None:
    model, tokenizer = request.getfixturevalue(name), request.getfixturevalue(f"{name}_tokenizer")
    prompts = [encode(tokenizer, question)[:64] for question in questions[:24]]
    found = []
    for settings in ({}, {"quantization": "int8", "kv_cache_dtype": "bfloat16"}):
        with LLM(model, tokenizer, ContinuousBatchingConfig(page_size=16, num_blocks=400, **settings)) as llm:
            outputs = llm.score([ids[:1] for ids in prompts], [ids[1:] for ids in prompts], use_tqdm=False)
        logprobs = [one.logprob for output in outputs for one in output.prompt_logprobs or [] if one is not None]
        found.append(math.exp(-sum(logprobs) / len(logprobs)))
    print(f"{name}: perplexity {found[0]:.3f} in float32, {found[1]:.3f} in int8 with K and V in bfloat16")
    assert 1 / MOST_WORSE <= found[1] / found[0] <= MOST_WORSE


def test_a_quantized_engine_generates_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = enable(tiny_model("llama", "sdpa"))
    with caplog.at_level("INFO", logger="legato"):
        outputs = model.generate_batch(
            [[5, 6, 7], [8] * 20],
            GenerationConfig(max_new_tokens=6, do_sample=False),
            ContinuousBatchingConfig(quantization="int8"),
        )
    assert [len(output.generated_tokens) for output in outputs.values()] == [6, 6]
    assert "fused decoder in int8" in caplog.text


def test_it_is_refused_where_there_is_no_fused_decoder() -> None:
    with pytest.raises(UnsupportedModelError, match="quantization='int8'"):
        enable(tiny_model("gpt2", "sdpa")).init_continuous_batching(
            continuous_batching_config=ContinuousBatchingConfig(quantization="int8")
        )
    with pytest.raises(UnsupportedModelError, match="quantization='int8'"):
        enable(tiny_model("llama", "sdpa")).init_continuous_batching(
            continuous_batching_config=ContinuousBatchingConfig(quantization="int8", fused_decoder=False)
        )


def test_weights_that_are_no_numbers_are_refused_as_such() -> None:
    model = enable(tiny_model("llama", "sdpa"))
    with torch.no_grad():
        model.lm_head.weight[0, 0] = torch.nan
    with pytest.raises(UnsupportedModelError, match="its logits are not numbers"):
        model.init_continuous_batching(continuous_batching_config=ContinuousBatchingConfig(quantization="int8"))
