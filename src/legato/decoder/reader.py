"""Reads a decoder's spec off a loaded model, and refuses whatever it was not written for.

What a layer does follows from which modules it has, once its class is known to be one of the families' own. So every
module is checked to be of exactly the class expected, running its class's own forward, with no hooks.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from legato.cache.pool import AttentionGroup
from legato.decoder.spec import (
    DecoderSpec,
    ExpertsSpec,
    LayerSpec,
    MatrixSpec,
    MlpSpec,
    NormSpec,
    NotFusable,
    Place,
    Source,
)
from legato.kernels.interface import Activation, AttentionSpec, HeadLayout

Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class Family:
    """What the modules of a family do not show.

    Attributes:
        prefix: of its classes' names.
        body: name of the class below the one with the head.
        norm_offset: what its norms add to their weight.
        caps_scores, caps_logits: whether it has soft-caps in attention, and on logits.
        divides_logits: whether its config's `logits_scaling` divides the logits.
    """

    prefix: str
    body: str
    norm_offset: float = 0.0
    caps_scores: bool = False
    caps_logits: bool = False
    divides_logits: bool = False


FAMILIES: dict[str, Family] = {
    **{
        f"{prefix}ForCausalLM": Family(prefix, f"{prefix}Model")
        for prefix in ("Llama", "Mistral", "Qwen2", "Qwen3", "Phi3", "Olmo2", "SmolLM3", "Qwen3Moe", "Mixtral")
    },
    "GraniteForCausalLM": Family("Granite", "GraniteModel", divides_logits=True),
    "Gemma2ForCausalLM": Family("Gemma2", "Gemma2Model", norm_offset=1.0, caps_scores=True, caps_logits=True),
    "Gemma3ForCausalLM": Family("Gemma3", "Gemma3TextModel", norm_offset=1.0, caps_logits=True),
}

ACTIVATIONS: dict[str, Activation] = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "GELUTanh": "gelu_tanh",
    "GELUActivation": "gelu",
}

_WEIGHT_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def read_spec(model: Any, groups: Sequence[AttentionGroup]) -> DecoderSpec:
    """The spec of a loaded model.

    Args:
        model: a causal language model of transformers, not wrapped.
        groups: its attention groups, which say what each layer sees.

    Raises:
        NotFusable: the fused decoder would not compute what the model does, or that is not known for sure.
    """
    family = FAMILIES.get(type(model).__name__)
    if family is None or not type(model).__module__.startswith("transformers.models."):
        raise NotFusable(f"the fused decoder does not know {type(model).__name__}")
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        raise NotFusable("a forward hook is registered for all modules")
    return _Reader(model, family).decoder(groups)


class _Reader:
    """Walks down a model; `places` collects what it came by."""

    def __init__(self, model: Any, family: Family) -> None:
        self._model = model
        self._family = family
        self._modelling = type(model).__module__
        self._places: list[Place] = []
        self._as_written: set[type] = set()  # classes whose forward is theirs

    def decoder(self, groups: Sequence[AttentionGroup]) -> DecoderSpec:
        model, config = self._model, self._model.config
        self._check_runs_as_written(model, "the model")
        body = self._own(model, "model", self._family.body)
        embedding = self._embedding(body)
        group_of_layer = {layer: group for group in groups for layer in group.layers}
        layers = self._layers(body, group_of_layer)
        head = self._matrix(model, ["lm_head"])
        norm = self._norm(body, "norm")
        specs = [spec for spec, _ in layers]
        spec = DecoderSpec(
            embedding=Source(embedding, "weight"),
            embedding_scale=self._embedding_scale(body, embedding),
            hidden_size=embedding.weight.shape[1],
            layout=_only([layout for _, layout in layers], "heads"),
            mlp_width=_only([s.mlp.width for s in specs if isinstance(s.mlp, MlpSpec)] or [0], "width of the MLP"),
            layers=tuple(specs),
            residual_scale=_only(
                [float(getattr(m, "residual_multiplier", 1.0)) for m in model.model.layers], "residual scale"
            ),
            norm=norm,
            eps=_only([n.eps for spec in specs for n in _stream_norms(spec)] + [norm.eps], "norms' epsilon"),
            head=head,
            vocab_size=len(head.weights[0].get()),
            logits_scale=1.0 / config.logits_scaling if self._family.divides_logits else 1.0,
            logits_softcap=config.final_logit_softcapping if self._family.caps_logits else None,
            places=tuple(self._places),
        )
        _check_shapes(spec)
        return spec

    # The parts

    def _embedding(self, body: nn.Module) -> nn.Embedding:
        module = self._child(body, "embed_tokens")
        scaled = f"{self._family.prefix}TextScaledWordEmbedding"
        if type(module) is not nn.Embedding and not self._is_own(module, scaled):
            raise NotFusable(f"embed_tokens is a {_kind(module)}, not a plain Embedding")
        assert isinstance(module, nn.Embedding)
        if module.max_norm is not None:
            raise NotFusable("embed_tokens has a max_norm")
        self._check_parameter(module, "weight", "embed_tokens")
        return module

    def _embedding_scale(self, body: nn.Module, embedding: nn.Embedding) -> float:
        scale = getattr(embedding, "embed_scale", None)  # rounded to the weight's type, as the model does
        by_module = 1.0 if scale is None else float(torch.as_tensor(scale).to(embedding.weight.dtype))
        return by_module * float(getattr(body, "embedding_multiplier", 1.0))

    def _layers(self, body: nn.Module, group_of_layer: dict[int, AttentionGroup]) -> list[tuple[LayerSpec, HeadLayout]]:
        layers = self._child(body, "layers")
        if type(layers) is not nn.ModuleList:
            raise NotFusable(f"layers is a {_kind(layers)}, not a ModuleList")
        self._own(body, "rotary_emb", "RotaryEmbedding")
        return [self._layer(layers, index, group_of_layer[index]) for index in range(len(group_of_layer))]

    def _layer(self, layers: nn.ModuleList, index: int, group: AttentionGroup) -> tuple[LayerSpec, HeadLayout]:
        owner = f"layer {index}'s "
        layer = self._own(layers, str(index), "DecoderLayer", f"layer {index}")
        attention = self._own(layer, "self_attn", "Attention", owner)
        mlp = self._own(layer, "mlp", ("MLP", "SparseMoeBlock"), owner)
        if getattr(attention, "layer_idx", None) != index or not getattr(attention, "is_causal", False):
            raise NotFusable(f"{owner}attention is not the causal attention of layer {index}")
        qkv = self._qkv(attention, owner)
        layout = _layout(attention, qkv, group, owner)
        # Families that norm what a layer's halves give name what goes in by another name than those that do not.
        norms_outputs = "post_feedforward_layernorm" in layer._modules
        mlp_norm = "pre_feedforward_layernorm" if norms_outputs else "post_attention_layernorm"
        spec = LayerSpec(
            input_norm=self._optional_norm(layer, "input_layernorm", owner),
            qkv=qkv,
            query_norm=self._optional_norm(attention, "q_norm", owner),
            key_norm=self._optional_norm(attention, "k_norm", owner),
            rotary=self._rotary(attention),
            attention=AttentionSpec(
                scaling=float(_setting(attention, "scaling")),
                window=group.window,
                softcap=_setting(attention, "attn_logit_softcapping") if self._family.caps_scores else None,
            ),
            out=self._matrix(attention, ["o_proj"], owner),
            attention_norm=self._norm(layer, "post_attention_layernorm", owner) if norms_outputs else None,
            mlp_norm=self._optional_norm(layer, mlp_norm, owner),
            mlp=self._experts(mlp, owner) if "experts" in mlp._modules else self._mlp(mlp, owner),
            output_norm=self._norm(layer, "post_feedforward_layernorm", owner) if norms_outputs else None,
        )
        return spec, layout

    def _qkv(self, attention: nn.Module, owner: str) -> MatrixSpec:
        fused = "qkv_proj" in attention._modules
        return self._matrix(attention, ["qkv_proj"] if fused else ["q_proj", "k_proj", "v_proj"], owner)

    def _rotary(self, attention: nn.Module) -> str | None:
        """A model's layers rotate alike, or some not at all, or each as the others of its type."""
        if not getattr(attention, "use_rope", True):
            return None
        by_type = isinstance(self._model.model.rotary_emb.rope_type, dict)
        return str(attention.layer_type) if by_type else "all"

    def _mlp(self, mlp: nn.Module, owner: str) -> MlpSpec:
        fused = "gate_up_proj" in mlp._modules
        gate_up = self._matrix(mlp, ["gate_up_proj"] if fused else ["gate_proj", "up_proj"], owner)
        down = self._matrix(mlp, ["down_proj"], owner)
        return MlpSpec(gate_up, down, self._activation(mlp, owner), down.weights[0].get().shape[1])

    def _experts(self, block: nn.Module, owner: str) -> ExpertsSpec:
        router = self._own(block, "gate", "TopKRouter", owner)
        experts = self._own(block, "experts", "Experts", owner)
        for module, name in ((router, "weight"), (experts, "gate_up_proj"), (experts, "down_proj")):
            self._check_parameter(module, name, f"{owner}experts")
        gate_up, down = Source(experts, "gate_up_proj"), Source(experts, "down_proj")
        count, hidden_size, width = down.get().shape
        if gate_up.get().shape != (count, 2 * width, hidden_size):
            raise NotFusable(f"{owner}experts' weights are not laid out as [experts, out, in]")
        activation = self._activation(experts, owner)
        return ExpertsSpec(
            router=Source(router, "weight"),
            experts=tuple(
                MlpSpec(MatrixSpec((gate_up,), (), i), MatrixSpec((down,), (), i), activation, width)
                for i in range(count)
            ),
            top_k=int(_setting(router, "top_k")),
            normalized=bool(getattr(router, "norm_topk_prob", True)),
        )

    def _activation(self, mlp: nn.Module, owner: str) -> Activation:
        name = "act_fn" if "act_fn" in mlp._modules else "activation_fn"
        module = mlp._modules.get(name)
        activation = ACTIVATIONS.get(type(module).__name__)
        if module is None or activation is None:
            raise NotFusable(
                f"{owner}activation is a {_kind(getattr(mlp, name, None))}: none that there is a kernel for"
            )
        self._check_runs_as_written(self._child(mlp, name), f"{owner}activation")
        return activation

    def _optional_norm(self, parent: nn.Module, name: str, owner: str) -> NormSpec | None:
        return self._norm(parent, name, owner) if name in parent._modules else None

    def _norm(self, parent: nn.Module, name: str, owner: str = "") -> NormSpec:
        module = self._own(parent, name, "RMSNorm", owner)
        self._check_parameter(module, "weight", owner + name)
        eps = _setting(module, "variance_epsilon" if hasattr(module, "variance_epsilon") else "eps")
        return NormSpec(Source(module, "weight"), self._family.norm_offset, float(eps))

    def _matrix(self, parent: nn.Module, names: Sequence[str], owner: str = "") -> MatrixSpec:
        modules = [self._linear(parent, name, owner) for name in names]
        biased = [module for module in modules if module.bias is not None]
        if biased and len(biased) < len(modules):
            raise NotFusable(f"{owner}{', '.join(names)} have a bias in part only")
        weights = tuple(Source(module, "weight") for module in modules)
        return MatrixSpec(weights, tuple(Source(module, "bias") for module in biased))

    def _linear(self, parent: nn.Module, name: str, owner: str) -> nn.Linear:
        module = self._child(parent, name)
        if type(module) is not nn.Linear:
            raise NotFusable(f"{owner}{name} is a {_kind(module)}, not a plain Linear")
        self._check_runs_as_written(module, owner + name)
        self._check_parameter(module, "weight", owner + name)
        if module.bias is not None:
            self._check_parameter(module, "bias", owner + name)
        return module

    # What makes sure

    def _own(self, parent: nn.Module, name: str, kinds: str | tuple[str, ...], owner: str = "") -> nn.Module:
        """The child, of a class of the family's own modelling code."""
        kinds = (kinds,) if isinstance(kinds, str) else kinds
        prefix = "" if kinds[0].startswith(self._family.prefix) else self._family.prefix
        module = self._child(parent, name)
        label = owner if name.isdigit() else owner + name
        if not any(self._is_own(module, prefix + kind) for kind in kinds):
            raise NotFusable(f"{label} is a {_kind(module)}, not a {' or '.join(prefix + kind for kind in kinds)}")
        self._check_runs_as_written(module, label)
        return module

    def _child(self, parent: nn.Module, name: str) -> nn.Module:
        module = parent._modules.get(name)
        if module is None:
            raise NotFusable(f"{_kind(parent)} has no module {name}")
        self._places.append(Place(parent, name, module))
        return module

    def _is_own(self, module: nn.Module, kind: str) -> bool:
        return type(module).__name__ == kind and type(module).__module__ == self._modelling

    def _check_runs_as_written(self, module: nn.Module, label: str) -> None:
        kind = type(module)
        if "forward" in vars(module):
            raise NotFusable(f"{label} has a forward of its own in place of its class's")
        if kind not in self._as_written:
            if inspect.unwrap(kind.forward).__module__ != kind.__module__:
                raise NotFusable(f"the forward of {kind.__name__}, the class of {label}, has been replaced")
            self._as_written.add(kind)
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if any(getattr(hook, "__module__", None) != _CAPTURING for hook in hooks):
            raise NotFusable(f"{label} has a forward hook")

    def _check_parameter(self, module: nn.Module, name: str, label: str) -> None:
        parameter = module._parameters.get(name)
        if type(parameter) is not nn.Parameter:
            raise NotFusable(f"{label}'s {name} is a {_kind(parameter)}, not a plain Parameter")
        if parameter.dtype not in _WEIGHT_TYPES:
            raise NotFusable(f"{label}'s {name} is of {parameter.dtype}")


# transformers' own hooks, which note a layer's output when a caller asks for it, and stay.
_CAPTURING = "transformers.utils.output_capturing"


def _setting(module: nn.Module, name: str) -> Any:
    """An attribute that is a plain value; torch says of all that they are tensors or modules."""
    return getattr(module, name)


def _layout(attention: nn.Module, qkv: MatrixSpec, group: AttentionGroup, owner: str) -> HeadLayout:
    """Checked against what the layer was seen to store."""
    head_dim, width = int(_setting(attention, "head_dim")), sum(len(source.get()) for source in qkv.weights)
    layout = HeadLayout(width // head_dim - 2 * group.num_kv_heads, group.num_kv_heads, head_dim)
    if head_dim != group.head_dim or layout.width != width or layout.num_heads % group.num_kv_heads:
        raise NotFusable(f"{owner}Q, K and V do not divide into heads")
    return layout


def _check_shapes(spec: DecoderSpec) -> None:
    """A module multiplies with the weight it has, whatever the sizes that it was made with."""
    hidden, attended = spec.hidden_size, spec.layout.num_heads * spec.layout.head_dim
    _check_matrix(spec.head, spec.vocab_size, hidden, "lm_head")
    for i, layer in enumerate(spec.layers):
        _check_matrix(layer.qkv, spec.layout.width, hidden, f"layer {i}'s Q, K and V")
        _check_matrix(layer.out, hidden, attended, f"layer {i}'s o_proj")
        if isinstance(layer.mlp, MlpSpec):
            _check_matrix(layer.mlp.gate_up, 2 * layer.mlp.width, hidden, f"layer {i}'s gate and up")
            _check_matrix(layer.mlp.down, hidden, layer.mlp.width, f"layer {i}'s down_proj")
            if len({len(weight.get()) for weight in layer.mlp.gate_up.weights}) > 1:
                raise NotFusable(f"layer {i}'s gate and up differ in width")
    for norm in (spec.norm, *(norm for layer in spec.layers for norm in _stream_norms(layer))):
        if norm.weight.get().shape != (hidden,):
            raise NotFusable(f"a norm's weight is {tuple(norm.weight.get().shape)}, not ({hidden},)")


def _check_matrix(matrix: MatrixSpec, rows: int, columns: int, label: str) -> None:
    shapes = [tuple(weight.get().shape) for weight in matrix.weights]
    if sum(shape[0] for shape in shapes) != rows or any(shape[1:] != (columns,) for shape in shapes):
        raise NotFusable(f"the weights of {label} are {shapes}, not [{rows}, {columns}] together")
    if matrix.biases and [len(bias.get()) for bias in matrix.biases] != [shape[0] for shape in shapes]:
        raise NotFusable(f"the biases of {label} are not as long as its weights")


def _stream_norms(spec: LayerSpec) -> list[NormSpec]:
    """Those of the residual stream and of what is added to it."""
    norms = (spec.input_norm, spec.attention_norm, spec.mlp_norm, spec.output_norm)
    return [norm for norm in norms if norm is not None]


Value = TypeVar("Value")


def _only(values: Sequence[Value], what: str) -> Value:
    """The one value that all are."""
    if any(value != values[0] for value in values):
        raise NotFusable(f"not all layers have the same {what}")
    return values[0]


def _kind(module: Any) -> str:
    return type(module).__name__
