"""Models that cannot be served are refused when the manager is made, with the reason, and stay as they were."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from legato import ContinuousBatchingConfig, UnsupportedModelError, enable
from tests.parity.families import tiny_model

CONFIG = ContinuousBatchingConfig(page_size=4, num_blocks=64)

_SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bloom": ({"n_layer": 2, "n_head": 4, "hidden_size": 32, "vocab_size": 97}, "0 of its 2 layers"),
    "mamba": ({"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 97, "state_size": 4}, ""),
    "deepseek_v3": (
        {**_SMALL, "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
         "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
         "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1},
        "different width",
    ),
    "llama4_text": (
        {**_SMALL, "head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 8},
        "chunked attention",
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", REFUSED)
def test_refused_with_the_reason(family: str) -> None:
    settings, reason = REFUSED[family]
    model = enable(AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings)).eval())
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModelError, match=rf"cannot be served: .*{reason}"):
        model.init_continuous_batching(continuous_batching_config=CONFIG)
    assert model.config._attn_implementation == before
    assert model(torch.tensor([[3, 4, 5]])).logits.shape == (1, 3, 97)


def test_an_encoder_decoder_is_refused() -> None:
    config = AutoConfig.for_model("t5", vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    model = enable(AutoModelForSeq2SeqLM.from_config(config))
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        model.init_continuous_batching(continuous_batching_config=CONFIG)


def test_an_attention_implementation_without_a_paged_twin_is_refused() -> None:
    model = enable(tiny_model("llama"))
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(NotImplementedError, match="flex_attention"):
        model.init_continuous_batching(continuous_batching_config=CONFIG)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_scaling_that_depends_on_batch_mates_is_served_up_to_the_original_length(rope_type: str) -> None:
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    if rope_type == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    model = enable(tiny_model("llama", max_position_embeddings=128, rope_parameters=rope))
    outputs = model.generate_batch([[5] * 30, [5] * 32], None, CONFIG, max_new_tokens=10)
    short, long = outputs.values()
    assert (len(short.generated_tokens), short.finish_reason) == (2, "length")
    assert "at most 32" in long.error
