"""What a decoder-only model is made of, as data: families differ in nothing else."""

from dataclasses import dataclass

from torch import Tensor, nn

from legato.kernels.interface import Activation, AttentionSpec, HeadLayout


class NotFusable(Exception):
    """The fused decoder cannot stand in for the model. The message says why, in the model's own words."""


@dataclass(frozen=True, slots=True)
class Source:
    """A parameter's place in the model; what lies there may be replaced."""

    module: nn.Module
    name: str

    def get(self) -> Tensor:
        """The parameter that is there now.

        Raises:
            NotFusable: there is none.
        """
        parameter = self.module._parameters.get(self.name)
        if parameter is None:
            raise NotFusable(f"{type(self.module).__name__} has lost its parameter {self.name}")
        return parameter


@dataclass(frozen=True, slots=True)
class Place:
    """A module's place in its parent, and what the spec was read off there."""

    parent: nn.Module
    name: str
    module: nn.Module


@dataclass(frozen=True, slots=True)
class MatrixSpec:
    """A linear layer.

    Attributes:
        weights: [out, in] each, laid under one another.
        biases: one for each weight, or none.
        expert: index into the first dimension of the weights, which then are [experts, out, in]; None: they are not.
    """

    weights: tuple[Source, ...]
    biases: tuple[Source, ...] = ()
    expert: int | None = None


@dataclass(frozen=True, slots=True)
class NormSpec:
    """An RMS norm.

    Attributes:
        weight: [width].
        offset: added to the weight.
        eps: under the root.
    """

    weight: Source
    offset: float
    eps: float


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """down(activation(gate) × up), gate and up being one matrix, gate first."""

    gate_up: MatrixSpec
    down: MatrixSpec
    activation: Activation
    width: int


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture of experts.

    Attributes:
        router: [experts, hidden size].
        experts: one for each row of the router.
        top_k: experts that see a token, those of the highest probability.
        normalized: whether their probabilities are made to add up to 1.
    """

    router: Source
    experts: tuple[MlpSpec, ...]
    top_k: int
    normalized: bool


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: hidden += scale × attention(hidden), then hidden += scale × mlp(hidden), with norms where given.

    Attributes:
        input_norm, mlp_norm: of what attention and MLP take.
        attention_norm, output_norm: of what they give, before it is scaled and added.
        qkv: Q, K and V.
        query_norm, key_norm: before the rotation; both or neither.
        rotary: the rotation's name, a key of `rotary.rotary_tables`' result; None: no rotation.
        attention: how it attends.
        out: attention's output.
        mlp: dense, or a mixture.
    """

    input_norm: NormSpec | None
    qkv: MatrixSpec
    query_norm: NormSpec | None
    key_norm: NormSpec | None
    rotary: str | None
    attention: AttentionSpec
    out: MatrixSpec
    attention_norm: NormSpec | None
    mlp_norm: NormSpec | None
    mlp: MlpSpec | ExpertsSpec
    output_norm: NormSpec | None


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A model.

    Attributes:
        embedding: [vocabulary, hidden size].
        embedding_scale: factor on it.
        hidden_size: of the residual stream.
        layout: of Q, K and V in every layer.
        mlp_width: of every MLP that is no expert; 0: all are experts.
        layers: in order.
        residual_scale: factor on what each half of a layer adds.
        norm: the last one.
        eps: of all norms of the residual stream and of what is added to it.
        head: of the logits.
        vocab_size: how many there are.
        logits_scale: factor on them.
        logits_softcap: then they become softcap × tanh(logits / softcap), unless None.
        places: every module that this was read off.
    """

    embedding: Source
    embedding_scale: float
    hidden_size: int
    layout: HeadLayout
    mlp_width: int
    layers: tuple[LayerSpec, ...]
    residual_scale: float
    norm: NormSpec
    eps: float
    head: MatrixSpec
    vocab_size: int
    logits_scale: float
    logits_softcap: float | None
    places: tuple[Place, ...]
