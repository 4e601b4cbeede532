"""The model's parameters in the form the kernels take, and kept like them when they change.

The model knows nothing of these copies. Parameters are watched by identity, place in memory and version counter: an
optimizer's step, `load_state_dict` and a replaced parameter leave a trace there, writes through `weight.data` do not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from legato.decoder.spec import DecoderSpec, ExpertsSpec, LayerSpec, MatrixSpec, MlpSpec, NormSpec, NotFusable, Source
from legato.kernels.interface import HeadNorm, Kernels
from legato.kernels.packing import Quantization


class Piece:
    """One thing made of parameters; `value` is what the kernels take.

    Args:
        sources: the parameters.
        make: from their tensors to the value.
    """

    __slots__ = ("_make", "sources", "value")

    def __init__(self, sources: Sequence[Source], make: Callable[..., Any]) -> None:
        self.sources = tuple(sources)
        self._make = make
        self.value = self._made()

    def renew(self) -> None:
        """Make it again, of what the parameters are now."""
        self.value = self._made()

    def _made(self) -> Any:
        # Neither part of a graph, nor an inference tensor, which another thread could not use.
        with torch.inference_mode(False), torch.no_grad():  # in this order: the first allows gradients
            return self._make(*(source.get() for source in self.sources))


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """See `MlpSpec`."""

    spec: MlpSpec
    gate_up: Piece
    down: Piece


@dataclass(frozen=True, slots=True)
class ExpertsWeights:
    """See `ExpertsSpec`."""

    spec: ExpertsSpec
    router: Piece
    experts: tuple[MlpWeights, ...]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """See `LayerSpec`; the value of a norm that a layer does not have is None."""

    input_norm: Piece
    qkv: Piece
    head_norm: Piece
    out: Piece
    attention_norm: Piece
    mlp_norm: Piece
    mlp: MlpWeights | ExpertsWeights
    output_norm: Piece


@dataclass(frozen=True, slots=True)
class _Watched:
    """A parameter as it was when its pieces were made; held, so that no other gets its identity meanwhile."""

    source: Source
    pieces: tuple[Piece, ...]
    parameter: Tensor
    shape: torch.Size

    def again(self) -> "_Watched":
        """The parameter that is there now.

        Raises:
            NotFusable: it is of another shape or kind, or elsewhere.
        """
        parameter = self.source.get()
        if parameter.device.type != "cpu" or not parameter.is_floating_point():
            raise NotFusable(f"a parameter is now {parameter.dtype} on {parameter.device}")
        if parameter.shape != self.shape:
            raise NotFusable(f"a parameter changed its shape from {tuple(self.shape)} to {tuple(parameter.shape)}")
        return replace(self, parameter=parameter)


_VERSION = attrgetter("_version")


class Weights:
    """All weights of a decoder.

    Args:
        spec: where they are in the model.
        kernels: whose form they take.
        quantization: of all matrices but the experts' routers, which decide too much for what they cost.

    Attributes:
        num_changes: how often something was made anew.
    """

    def __init__(self, spec: DecoderSpec, kernels: Kernels, quantization: Quantization | None) -> None:
        self.embedding = spec.embedding
        self._pieces: list[Piece] = []
        self._kernels = kernels
        self._quantization: Quantization | None = quantization
        self.num_changes = 0
        self.layers = tuple(self._layer(layer) for layer in spec.layers)
        self.norm = self._norm(spec.norm)
        self.head = self._matrix(spec.head)
        pieces_of: dict[Source, list[Piece]] = {spec.embedding: []}
        for piece in self._pieces:
            for source in piece.sources:
                pieces_of.setdefault(source, []).append(piece)
        self._watched = [_Watched(s, tuple(p), s.get(), s.get().shape) for s, p in pieces_of.items()]
        # What refresh() goes through in every step: plain tuples, looked up without a function call.
        self._lookups = [(source.module._parameters, source.name) for source in pieces_of]
        self._seen = self._state()

    def version(self) -> int:
        """A number that changes when `refresh` would find something to do."""
        return hash(tuple(map(tuple, self._state())))

    def refresh(self) -> bool:
        """Make anew what hangs on parameters that have changed. Returns whether any had.

        Raises:
            NotFusable: one has changed its shape.
        """
        state = self._state()
        if state == self._seen:
            return False
        stale: dict[int, Piece] = {}
        for i, (before, now) in enumerate(zip(zip(*self._seen, strict=True), zip(*state, strict=True), strict=True)):
            if before != now:
                watched = self._watched[i] = self._watched[i].again()
                stale.update((id(piece), piece) for piece in watched.pieces)
        for piece in stale.values():
            piece.renew()
        self._seen = state
        self.num_changes += 1
        return True

    def repack(self) -> None:
        """Make everything anew, for changes that leave no trace."""
        self.refresh()
        for piece in self._pieces:
            piece.renew()
        self.num_changes += 1

    def _state(self) -> tuple[list[int], list[int], list[int]]:
        """Of each parameter its identity, its place in memory and its version; a step has no time for more."""
        parameters: list[Any] = [table.get(name) for table, name in self._lookups]
        if any(parameter is None for parameter in parameters):
            raise NotFusable("it has lost a parameter")
        try:
            versions = list(map(_VERSION, parameters))
        except RuntimeError:  # inference tensors count none
            versions = [0 if p.is_inference() else p._version for p in parameters]
        return list(map(id, parameters)), list(map(Tensor.data_ptr, parameters)), versions

    # Making the pieces

    def _layer(self, spec: LayerSpec) -> LayerWeights:
        return LayerWeights(
            input_norm=self._norm(spec.input_norm),
            qkv=self._matrix(spec.qkv),
            head_norm=self._head_norm(spec.query_norm, spec.key_norm),
            out=self._matrix(spec.out),
            attention_norm=self._norm(spec.attention_norm),
            mlp_norm=self._norm(spec.mlp_norm),
            mlp=self._experts(spec.mlp) if isinstance(spec.mlp, ExpertsSpec) else self._mlp(spec.mlp),
            output_norm=self._norm(spec.output_norm),
        )

    def _mlp(self, spec: MlpSpec) -> MlpWeights:
        return MlpWeights(spec, self._matrix(spec.gate_up, gated=True), self._matrix(spec.down))

    def _experts(self, spec: ExpertsSpec) -> ExpertsWeights:
        router = self._piece([spec.router], partial(self._kernels.pack, bias=None))
        return ExpertsWeights(spec, router, tuple(self._mlp(expert) for expert in spec.experts))

    def _matrix(self, spec: MatrixSpec, gated: bool = False) -> Piece:
        # Not `self`, which holds the pieces: a ring of references would keep all weights until a collector comes by.
        kernels, quantization, packed = self._kernels, self._quantization, None

        def pack(*parts: Tensor) -> Any:
            nonlocal packed
            weights, biases = parts[: len(spec.weights)], parts[len(spec.weights) :]
            if spec.expert is not None:
                weights = tuple(weight[spec.expert] for weight in weights)
            bias = _stacked(biases) if biases else None
            packed = kernels.pack(_stacked(weights), bias, quantization, gated, into=packed)
            return packed

        return self._piece((*spec.weights, *spec.biases), pack)

    def _norm(self, spec: NormSpec | None) -> Piece:
        if spec is None:
            return self._piece((), lambda: None)
        return self._piece([spec.weight], partial(_norm_weight, offset=spec.offset))

    def _head_norm(self, query: NormSpec | None, key: NormSpec | None) -> Piece:
        if query is None or key is None:
            return self._piece((), lambda: None)

        def make(query_weight: Tensor, key_weight: Tensor) -> HeadNorm:
            return HeadNorm(_norm_weight(query_weight, query.offset), _norm_weight(key_weight, key.offset), query.eps)

        return self._piece([query.weight, key.weight], make)

    def _piece(self, sources: Sequence[Source], make: Callable[..., Any]) -> Piece:
        piece = Piece(sources, make)
        self._pieces.append(piece)
        return piece


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _norm_weight(weight: Tensor, offset: float) -> Tensor:
    return weight.detach().float() + offset
