"""The forward pass, for every family: rows of tokens without padding, a kernel call for each thing that happens."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from legato.cache.kv import KVCache, LayerCache
from legato.decoder.spec import DecoderSpec, ExpertsSpec, LayerSpec
from legato.decoder.weights import ExpertsWeights, LayerWeights, MlpWeights, Piece, Weights
from legato.engine.batch import Batch
from legato.kernels.interface import Kernels, PassTables, Rotary


class Buffer:
    """Memory for an activation, kept from pass to pass and grown when a pass is larger."""

    def __init__(self) -> None:
        self._flat = torch.empty(0)

    def take(self, rows: int, width: int) -> Tensor:
        """Uninitialised float32 [rows, width]; what was taken before is gone."""
        size = rows * width
        if size > self._flat.numel():
            self._flat = torch.empty(0)  # frees the old one first
            with torch.inference_mode(False):
                self._flat = torch.empty(size)
        return self._flat[:size].view(rows, width)


@dataclass(frozen=True, slots=True)
class Activations:
    """What is computed of each token, [tokens, width of each]; what lies under one another shares memory.

    Attributes:
        residual: the residual stream.
        normed: its norm, for the next matrix.
        projected: what attention or MLP add to it.
        qkv, gate_up: products of `normed`.
        attended, gated: what is made of those.
    """

    residual: Tensor
    normed: Tensor
    projected: Tensor
    qkv: Tensor
    gate_up: Tensor
    attended: Tensor
    gated: Tensor


@dataclass(frozen=True, slots=True)
class Layer:
    """All that one layer of the loop needs, looked up beforehand.

    Attributes:
        spec, weights: of the layer.
        next_norm: the norm of what comes after it: the next layer's input, or the last norm.
        rotary: the layer's rotation, or None.
        group: index of its attention group.
        cache: its K and V.
    """

    spec: LayerSpec
    weights: LayerWeights
    next_norm: Piece
    rotary: Rotary | None
    group: int
    cache: LayerCache


class Decoder:
    """Computes logits; in float32, whatever the type of the weights.

    Args:
        spec: the model.
        weights: its weights, kept up to date by their owner.
        rotaries: tables for each rotation the layers name; as many positions as any token may have.
        kernels: what it computes with.
        cache: K and V.
    """

    def __init__(
        self, spec: DecoderSpec, weights: Weights, rotaries: Mapping[str, Rotary], kernels: Kernels, cache: KVCache
    ) -> None:
        self._spec, self._weights, self._kernels, self._cache = spec, weights, kernels, cache
        next_norms = [*(layer.input_norm for layer in weights.layers[1:]), weights.norm]
        self._layers = [
            Layer(
                layer, weights.layers[i], next_norms[i], None if layer.rotary is None else rotaries[layer.rotary],
                cache.group_of_layer[i], cache.layers[i],
            )
            for i, layer in enumerate(spec.layers)
        ]  # fmt: skip
        self._residual, self._normed, self._projected = Buffer(), Buffer(), Buffer()
        self._wide, self._narrow, self._logits = Buffer(), Buffer(), Buffer()
        self._grouped = Buffer()  # tokens once for each expert that sees them

    def forward(self, batch: Batch) -> Tensor:
        """Write K and V of all tokens; logits of those in `batch.logits_indices`.

        Returns:
            float32 [rows, vocabulary]; the next pass overwrites it.
        """
        sampled = torch.from_numpy(batch.logits_indices)
        tables = pass_tables(batch, self._cache)
        x = self._activations(len(batch.input_ids))
        self._embed(torch.from_numpy(batch.input_ids), x)
        for layer in self._layers[:-1]:
            self._store(layer, tables[layer.group], x)
            self._attend(layer, tables[layer.group], x)
            self._finish(layer, x)
        # Of the last layer's tokens, only those that are sampled matter to what follows their K and V.
        last = self._layers[-1]
        self._store(last, tables[last.group], x)
        if len(sampled):
            self._attend(last, tables[last.group], x)
            x = self._only(sampled, x)
            self._finish(last, x)
        return self._head(x.normed[: len(sampled)])

    def _embed(self, input_ids: Tensor, x: Activations) -> None:
        spec, first = self._spec, self._weights.layers[0]
        x.residual.copy_(functional.embedding(input_ids, spec.embedding.get()))
        if spec.embedding_scale != 1:
            x.residual.mul_(spec.embedding_scale)
        if first.input_norm.value is not None:
            self._kernels.rms_norm(x.residual, first.input_norm.value, spec.eps, x.normed)

    def _store(self, layer: Layer, tables: PassTables, x: Activations) -> None:
        kernels, weights, layout = self._kernels, layer.weights, self._spec.layout
        kernels.linear(x.residual if weights.input_norm.value is None else x.normed, weights.qkv.value, x.qkv)
        kernels.rotate_and_store(x.qkv, layout, weights.head_norm.value, layer.rotary, tables, layer.cache)

    def _attend(self, layer: Layer, tables: PassTables, x: Activations) -> None:
        self._kernels.attention(x.qkv, self._spec.layout, layer.spec.attention, tables, layer.cache, x.attended)

    def _finish(self, layer: Layer, x: Activations) -> None:
        kernels, weights, scale, eps = self._kernels, layer.weights, self._spec.residual_scale, self._spec.eps
        mlp_norm, mlp = weights.mlp_norm.value, weights.mlp
        kernels.linear(x.attended, weights.out.value, x.projected)
        kernels.add_norm(x.residual, x.projected, scale, weights.attention_norm.value, mlp_norm, eps, x.normed)
        hidden = x.residual if mlp_norm is None else x.normed
        if isinstance(mlp, MlpWeights):
            kernels.linear(hidden, mlp.gate_up.value, x.gate_up)
            kernels.gated(x.gate_up, layer.spec.mlp.activation, x.gated)  # type: ignore[union-attr]
            kernels.linear(x.gated, mlp.down.value, x.projected)
        else:
            self._mix(hidden, layer.spec.mlp, mlp, x.projected)  # type: ignore[arg-type]
        output_norm, next_norm = weights.output_norm.value, layer.next_norm.value
        kernels.add_norm(x.residual, x.projected, scale, output_norm, next_norm, eps, x.normed)

    def _mix(self, x: Tensor, spec: ExpertsSpec, weights: ExpertsWeights, out: Tensor) -> None:
        """The experts' outputs, each on the tokens that chose it, added up by the router's weights."""
        kernels, num_experts, width = self._kernels, len(spec.experts), spec.experts[0].width
        scores = torch.empty((len(x), num_experts))
        kernels.linear(x, weights.router.value, scores)
        shares, chosen = scores.softmax(dim=-1).topk(spec.top_k, dim=-1)
        if spec.normalized:
            shares /= shares.sum(dim=-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        tokens = order // spec.top_k
        ends = chosen.flatten().bincount(minlength=num_experts).cumsum(0).tolist()
        used = [(start, end, e) for e, (start, end) in enumerate(zip([0, *ends], ends, strict=False)) if start < end]
        grouped = torch.index_select(x, 0, tokens, out=self._grouped.take(len(tokens), x.shape[1]))
        gate_up = self._wide.take(len(tokens), 2 * width)
        gated = self._narrow.take(len(tokens), width)
        for start, end, expert in used:
            kernels.linear(grouped[start:end], weights.experts[expert].gate_up.value, gate_up[start:end])
        kernels.gated(gate_up, spec.experts[0].activation, gated)
        for start, end, expert in used:
            kernels.linear(gated[start:end], weights.experts[expert].down.value, grouped[start:end])
        grouped *= shares.flatten()[order, None]
        out.zero_().index_add_(0, tokens, grouped)

    def _head(self, hidden: Tensor) -> Tensor:
        spec = self._spec
        logits = self._logits.take(len(hidden), spec.vocab_size)
        if len(hidden):
            self._kernels.linear(hidden, self._weights.head.value, logits)
        if spec.logits_scale != 1:
            logits *= spec.logits_scale
        if spec.logits_softcap is not None:
            logits.div_(spec.logits_softcap).tanh_().mul_(spec.logits_softcap)
        return logits

    def _activations(self, rows: int) -> Activations:
        hidden_size, layout, width = self._spec.hidden_size, self._spec.layout, self._spec.mlp_width
        # Attention is done with its two before the MLP needs its own: they may lie in the same place.
        wide = self._wide.take(rows, max(layout.width, 2 * width)).view(-1)
        narrow = self._narrow.take(rows, max(layout.num_heads * layout.head_dim, width)).view(-1)

        def view(flat: Tensor, width: int) -> Tensor:
            return flat[: rows * width].view(rows, width)

        return Activations(
            residual=self._residual.take(rows, hidden_size),
            normed=self._normed.take(rows, hidden_size),
            projected=self._projected.take(rows, hidden_size),
            qkv=view(wide, layout.width),
            gate_up=view(wide, 2 * width),
            attended=view(narrow, layout.num_heads * layout.head_dim),
            gated=view(narrow, width),
        )

    def _only(self, rows: Tensor, x: Activations) -> Activations:
        """Some rows, ascending, of what a layer goes on with after attention; the rest of it is not filled yet."""
        count = len(rows)
        if count == len(x.residual):
            return x  # all there are, so in their order
        return Activations(
            residual=x.residual.index_select(0, rows),
            normed=x.normed[:count],
            projected=x.projected[:count],
            qkv=x.qkv[:count],
            gate_up=x.gate_up[:count],
            attended=x.attended.index_select(0, rows),
            gated=x.gated[:count],
        )


def pass_tables(batch: Batch, cache: KVCache) -> list[PassTables]:
    """For each attention group, where the batch's tokens are."""
    position_ids = torch.from_numpy(batch.position_ids)
    cu_seqlens_q, seqused_k = torch.from_numpy(batch.cu_seqlens_q), torch.from_numpy(batch.seqused_k)
    return [
        PassTables(
            position_ids=position_ids,
            cu_seqlens_q=cu_seqlens_q,
            seqused_k=seqused_k,
            block_table=torch.from_numpy(np.ascontiguousarray(batch.block_tables[index])),
            write_rows=cache.rows(index, torch.from_numpy(batch.slot_mappings[index])),
            page_size=cache.page_size,
            block_rows=2 * len(group.layers) * cache.page_size,
        )
        for index, group in enumerate(cache.groups)
    ]
