"""Tiny random models of many families, made from configs: nothing is fetched."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

WINDOW = 8
VOCAB_SIZE = 97

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_HEAD = {"head_dim": 8}
_HYBRID = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {**_HEAD, "sliding_window": WINDOW},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2, **_HYBRID},
    "qwen3": _HEAD,
    "qwen3_moe": {**_HEAD, **_EXPERTS, "norm_topk_prob": True},
    "mixtral": _EXPERTS,
    "gemma2": {**_HEAD, **_HYBRID, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0},
    "gemma3_text": {**_HEAD, **_HYBRID, "query_pre_attn_scalar": 8},
    "phi3": {"sliding_window": WINDOW, "original_max_position_embeddings": 256},
    "granite": {"attention_multiplier": 0.3, "residual_multiplier": 0.7, "logits_scaling": 0.5},
    "olmo2": {},
    "smollm3": {"no_rope_layers": [1, 1, 0, 1]},
    "cohere": {"logit_scale": 1.0},
    "gpt_neox": {"num_key_value_heads": None},
    "gpt2": {"n_inner": 48, "num_key_value_heads": None},
    "gpt_oss": {**_HEAD, **_EXPERTS, **_HYBRID},
}


FUSED = tuple(family for family in FAMILIES if family not in ("cohere", "gpt_neox", "gpt2", "gpt_oss"))


def tiny_model(family: str, attn_implementation: str = "eager", **changes: Any) -> Any:
    """A float32 model with weights large enough that its likeliest token is seldom in doubt."""
    settings = {name: value for name, value in {**_COMMON, **FAMILIES[family], **changes}.items() if value is not None}
    torch.manual_seed(sum(family.encode()))
    config = AutoConfig.for_model(family, **settings)
    config.eos_token_id = None
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
            elif "sink" in name or "bias" in name:
                parameter.normal_(std=0.5)
    return model.eval()
