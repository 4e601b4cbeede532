"""What the fused decoder does not stand in for, and the reason it gives."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from legato import ContinuousBatchingConfig, UnsupportedModelError, WorkloadHints
from legato.decoder import fusing
from legato.decoder.reader import read_spec
from legato.decoder.spec import NotFusable
from legato.engine.assemble import assemble
from tests.decoder.serving import fused_logits, own_logits, read
from tests.parity.families import FAMILIES, FUSED, tiny_model


class LoraLinear(nn.Module):
    """A projection wrapped as adapters wrap them."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x)


class NoisyLinear(nn.Linear):
    """A Linear by inheritance only."""


def wrap_q_proj(model: Any) -> None:
    attention = model.model.layers[3].self_attn
    attention.q_proj = LoraLinear(attention.q_proj)


def derive_down_proj(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.__class__ = NoisyLinear


def replace_forward(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda x: x


def replace_norm(model: Any) -> None:
    model.model.norm = nn.RMSNorm(32)


def parametrize(model: Any) -> None:
    nn.utils.parametrizations.weight_norm(model.model.layers[2].self_attn.o_proj)


def drop_causality(model: Any) -> None:
    model.model.layers[0].self_attn.is_causal = False


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "wrapped": (wrap_q_proj, "layer 3's q_proj is a LoraLinear, not a plain Linear"),
    "derived": (derive_down_proj, "layer 1's down_proj is a NoisyLinear, not a plain Linear"),
    "replaced forward": (replace_forward, "layer 0's mlp has a forward of its own in place of its class's"),
    "another norm": (replace_norm, "norm is a RMSNorm, not a LlamaRMSNorm"),
    "parametrized": (parametrize, "layer 2's o_proj is a ParametrizedLinear, not a plain Linear"),
    "hook": (
        lambda model: model.model.layers[2].mlp.gate_proj.register_forward_hook(lambda *_: None),
        "layer 2's gate_proj has a forward hook",
    ),
    "hook before": (lambda model: model.register_forward_pre_hook(lambda *_: None), "the model has a forward hook"),
    "not causal": (drop_causality, "layer 0's attention is not the causal attention of layer 0"),
    "double": (lambda model: model.lm_head.double(), "lm_head's weight is of torch.float64"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_model_is_not_fusable(name: str) -> None:
    model = tiny_model("llama")
    groups = read(model).groups
    change, reason = CHANGES[name]
    change(model)
    with pytest.raises(NotFusable) as caught:
        fusing.read_spec(model, groups)
    assert str(caught.value) == reason


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in FUSED])
def test_other_families_are_not_fusable(family: str) -> None:
    with pytest.raises(NotFusable, match=r"the fused decoder does not know \w+"):
        read(tiny_model(family))


def test_a_users_class_of_a_familys_name_is_not_fusable() -> None:
    model = tiny_model("llama")
    groups = read(model).groups
    model.__class__ = type("LlamaForCausalLM", (type(model),), {"__module__": "mine"})
    with pytest.raises(NotFusable, match="does not know LlamaForCausalLM"):
        fusing.read_spec(model, groups)


def test_a_class_whose_forward_was_replaced_is_not_fusable(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    groups = read(model).groups
    monkeypatch.setattr(type(model.model.norm), "forward", lambda self, x: x)
    with pytest.raises(NotFusable, match=r"the forward of LlamaRMSNorm, the class of .*, has been replaced"):
        fusing.read_spec(model, groups)


def test_hooks_that_transformers_leaves_behind_do_no_harm() -> None:
    model = tiny_model("llama")
    model(input_ids=torch.tensor([[1, 2, 3]]), output_hidden_states=True, output_attentions=True)
    assert any(module._forward_hooks for module in model.modules())
    read(model)


# What the engine makes of it


def describe(model: Any, **settings: Any) -> str:
    config = ContinuousBatchingConfig(page_size=4, num_blocks=32, max_batch_tokens=64, **settings)
    return assemble(model, config, WorkloadHints(), samples=False)[1].description


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(0.2 * torch.randn(*shape))


def resize_head(model: Any, rows: int) -> None:
    model.lm_head.weight = parameter(rows, 32)


def resize_mlps(model: Any, width: int) -> None:
    for layer in model.model.layers:
        layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight = parameter(width, 32), parameter(width, 32)
        layer.mlp.down_proj.weight = parameter(32, width)


@pytest.mark.parametrize("rows", [70, 50_000])
@pytest.mark.parametrize("resize", [resize_head, resize_mlps])
def test_sizes_are_those_of_the_weights(resize: Callable[[Any, int], None], rows: int) -> None:
    """Modules multiply with the weight they have, whatever `out_features` says."""
    model = tiny_model("llama")
    resize(model, rows)
    (ours,) = fused_logits(read(model), [[1, 2, 3]])
    torch.testing.assert_close(ours, own_logits(model, [1, 2, 3]), atol=1e-4, rtol=1e-4)


MISFITS: dict[str, tuple[Callable[[Any], nn.Module], tuple[int, ...]]] = {
    "layer 1's gate and up": (lambda model: model.model.layers[1].mlp.up_proj, (47, 32)),
    "layer 0's o_proj": (lambda model: model.model.layers[0].self_attn.o_proj, (33, 32)),
    "lm_head": (lambda model: model.lm_head, (90, 30)),
    "a norm's weight": (lambda model: model.model.norm, (31,)),
}


@pytest.mark.parametrize("name", MISFITS)
def test_sizes_that_do_not_fit_each_other_are_not_fusable(name: str) -> None:
    model, (module_of, shape) = tiny_model("llama"), MISFITS[name]
    groups = read(model).groups
    module_of(model).weight = parameter(*shape)
    with pytest.raises(NotFusable, match=name):
        read_spec(model, groups)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_torchs_default_type_does_not_matter(default: torch.dtype, family: str) -> None:
    """It is the whole process's, and transformers sets it while it loads a model."""
    model = tiny_model(family)
    expected = own_logits(model, [5, 9, 3, 77])
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        for in_step in (False, True):
            (ours,) = fused_logits(read(model), [[5, 9, 3, 77]], in_step=in_step)
            torch.testing.assert_close(ours, expected, atol=2e-5, rtol=1e-4)
    finally:
        torch.set_default_dtype(before)


def test_the_callers_autocast_does_not_matter() -> None:
    config = ContinuousBatchingConfig(page_size=4, num_blocks=16, max_batch_tokens=8)
    with torch.autocast("cpu"):
        _, facts = assemble(tiny_model("llama"), config, WorkloadHints(), samples=False)
    assert "fused decoder" in facts.description


def test_the_description_says_which_path_runs_and_why() -> None:
    model = tiny_model("llama")
    assert ": fused decoder in float32 (kernels: " in describe(model)
    assert "reference path (fused_decoder=False), paged|eager" in describe(model, fused_decoder=False)
    wrap_q_proj(model)
    assert "reference path (layer 3's q_proj is a LoraLinear, not a plain Linear)" in describe(model)
    with pytest.raises(UnsupportedModelError, match=r"fused_decoder=True is not possible .* LoraLinear"):
        describe(model, fused_decoder=True)


def test_a_decoder_that_disagrees_with_the_model_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("granite")
    assert "fused decoder" in describe(model)
    other = fusing.read_spec
    monkeypatch.setattr(fusing, "read_spec", lambda *args: replace(other(*args), residual_scale=0.71))
    assert "reference path (its logits differ from the model's own by " in describe(model)


def test_the_types_that_the_cache_can_have() -> None:
    def cache_dtype(model: Any, **settings: Any) -> torch.dtype:
        config = ContinuousBatchingConfig(page_size=4, num_blocks=32, max_batch_tokens=64, **settings)
        return assemble(model, config, WorkloadHints(), samples=False)[1].cache_dtype

    model = tiny_model("llama")
    assert cache_dtype(model) == torch.float32
    assert cache_dtype(model, kv_cache_dtype="bfloat16") == torch.bfloat16
    assert cache_dtype(model, fused_decoder=False, kv_cache_dtype="float32") == torch.float32
    with pytest.raises(UnsupportedModelError, match=r"kv_cache_dtype='bfloat16' .* reference path \(fused_decoder=F"):
        cache_dtype(model, fused_decoder=False, kv_cache_dtype="bfloat16")
    model.to(torch.bfloat16)
    assert cache_dtype(model) == torch.float32
    assert cache_dtype(model, fused_decoder=False) == torch.bfloat16
