"""The fused decoder's logits are those of transformers' own forward pass, for every family."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from legato.decoder.spec import ExpertsSpec
from tests.decoder.serving import fused_logits, own_logits, read
from tests.parity.families import FUSED, VOCAB_SIZE, tiny_model

# What the plain models of the families do not show.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with a tied head": ("llama", {"tie_word_embeddings": True}),
    "llama with gelu": ("llama", {"hidden_act": "gelu"}),
    "llama with wide heads": ("llama", {"head_dim": 12}),
    "llama with scaled rope": (
        "llama",
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                             "high_freq_factor": 4.0, "original_max_position_embeddings": 32}},
    ),
    "llama with yarn": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                             "original_max_position_embeddings": 64}},
    ),
    "gemma2 without soft-caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3 with a soft-cap on logits": ("gemma3_text", {"final_logit_softcapping": 2.0}),
    "phi3 that rotates half a head": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "qwen3_moe with dense layers": ("qwen3_moe", {"mlp_only_layers": [1], "norm_topk_prob": False}),
    "granite with other scales": ("granite", {"embedding_multiplier": 3.0, "logits_scaling": 4.0}),
    "smollm3 with a window": ("smollm3", {"use_sliding_window": True, "sliding_window": 8}),
}  # fmt: skip


def prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(sum(lengths))
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


def randomize_norms(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))


@pytest.mark.parametrize("name", [*FUSED, *VARIANTS])
def test_logits_are_those_of_the_model(name: str) -> None:
    family, changes = VARIANTS.get(name, (name, {}))
    model = tiny_model(family, **changes)
    randomize_norms(model)
    fused = read(model)
    asked = prompts(1, 3, 4, 5, 37, 71, 2, 20)
    expected = [own_logits(model, ids) for ids in asked]
    scale = max(float(logits.abs().max()) for logits in expected)
    for ours, theirs in zip(fused_logits(fused, asked), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=3e-6 * scale, rtol=1e-5)
    for ours, theirs in zip(fused_logits(fused, asked, seed=1, only_sampled=True), expected, strict=True):
        torch.testing.assert_close(ours, theirs[-1:], atol=3e-6 * scale, rtol=1e-5)


@pytest.mark.parametrize("name", [*FUSED, *VARIANTS])
def test_passes_that_are_alike_are_replayed_with_their_own_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, changes = VARIANTS.get(name, (name, {}))
    model = tiny_model(family, **changes)
    randomize_norms(model)
    fused = read(model)
    asked = prompts(9, 30, 30, 41)
    replays = []

    def record(run: Callable[[], None]) -> Callable[[], None]:
        replay = type(fused.kernels).record(fused.kernels, run)
        return lambda: (replays.append(1), replay())[1]

    monkeypatch.setattr(fused.kernels, "record", record)
    for ids, logits in zip(asked, fused_logits(fused, asked, in_step=True), strict=True):
        expected = own_logits(model, ids)
        torch.testing.assert_close(logits, expected, atol=2e-5 * float(expected.abs().max()), rtol=1e-5)
    experts = any(isinstance(layer.mlp, ExpertsSpec) for layer in fused.spec.layers)
    assert len(replays) == 0 if experts else len(replays) > 20


def test_a_cache_in_bfloat16_costs_a_little_precision() -> None:
    model = tiny_model("llama")
    (asked,) = prompts(60)
    expected = own_logits(model, asked)
    (ours,) = fused_logits(read(model), [asked], dtype=torch.bfloat16)
    difference = float((ours - expected).abs().max() / expected.abs().max())
    assert 1e-5 < difference < 2e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_computed_with_in_float32(dtype: torch.dtype) -> None:
    """Closer to what the weights say than the model itself."""
    model = tiny_model("llama").to(dtype)
    (asked,) = prompts(40)
    rounded = own_logits(model, asked)
    (ours,) = fused_logits(read(model), [asked])
    exact = own_logits(model.float(), asked)
    assert float((ours - exact).abs().max()) < 0.02 * float((rounded - exact).abs().max())
