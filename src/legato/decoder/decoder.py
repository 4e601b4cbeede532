"""The forward pass, for every family: rows of tokens without padding, a kernel call for each thing that happens."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from legato.cache.kv import KVCache, LayerCache
from legato.decoder.spec import DecoderSpec, LayerSpec
from legato.decoder.weights import ExpertsWeights, LayerWeights, MlpWeights, Piece, Weights
from legato.engine.batch import Batch
from legato.kernels.interface import Kernels, PassTables, Rotary, new_rows


class Buffer:
    """Memory for an activation, kept from pass to pass and grown when a pass is larger."""

    def __init__(self) -> None:
        self._flat = new_rows(0, 0).view(-1)

    def take(self, rows: int, width: int) -> Tensor:
        """Uninitialised float32 [rows, width]; what was taken before is gone."""
        size = rows * width
        if size > self._flat.numel():
            self._flat = self._flat[:0].clone()  # frees the old one first
            with torch.inference_mode(False):
                self._flat = new_rows(1, size).view(-1)
        return self._flat[:size].view(rows, width)


@dataclass(frozen=True, slots=True)
class Activations:
    """What is computed of each token, [tokens, width of each]; what lies under one another shares memory.

    Attributes:
        residual: the residual stream.
        normed: its norm, for the next matrix.
        projected: what attention or MLP add to it.
        qkv: product of `normed`.
        attended, gated: what attention makes of that, and the first half of the MLP of `normed`.
    """

    residual: Tensor
    normed: Tensor
    projected: Tensor
    qkv: Tensor
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


_MOST_RECORDED = 16  # passes of different shapes: a request with guesses has one for each length of a guess


@dataclass(frozen=True, slots=True)
class Recorded:
    """A pass that may come again with other numbers.

    Attributes:
        replay: does it again; None: it has been seen once, and is recorded should it come again.
        tables: what `replay` reads.
    """

    replay: Callable[[], None] | None
    tables: list[PassTables]


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
        # Which experts there are to call is known only when the router has spoken.
        self._recordable = not any(isinstance(layer.mlp, ExpertsWeights) for layer in weights.layers)
        # By a key; two passes with the same one call the same kernels on the same memory, but for their tables.
        self._recorded: OrderedDict[tuple[object, ...], Recorded] = OrderedDict()

    def forward(self, batch: Batch) -> Tensor:
        """Write K and V of all tokens; logits of those in `batch.logits_indices`.

        Returns:
            float32 [rows, vocabulary]; the next pass overwrites it.
        """
        spec, num_tokens, num_sampled = self._spec, len(batch.input_ids), len(batch.logits_indices)
        x = self._activations(num_tokens)
        logits = self._logits.take(num_sampled, spec.vocab_size)
        tables = pass_tables(batch, self._cache)
        x.residual.copy_(functional.embedding(torch.from_numpy(batch.input_ids), spec.embedding.get()))
        if spec.embedding_scale != 1:
            x.residual.mul_(spec.embedding_scale)
        if self._recordable and np.array_equal(batch.logits_indices, np.arange(num_tokens)):
            self._decode(tables, x, logits)
        else:
            self._compute(tables, x, torch.from_numpy(batch.logits_indices), logits)
        if spec.logits_scale != 1:
            logits *= spec.logits_scale
        if spec.logits_softcap is not None:
            logits.div_(spec.logits_softcap).tanh_().mul_(spec.logits_softcap)
        return logits

    def _decode(self, tables: list[PassTables], x: Activations, logits: Tensor) -> None:
        """`_compute` where every token is sampled, its kernels recorded when a pass is like one not long before."""
        key = (
            self._weights.num_changes,
            *((t.position_ids.shape, t.seqused_k.shape, columns_with_room(t.block_table)) for t in tables),
            *(t.data_ptr() for t in (x.residual, x.normed, x.projected, x.qkv, x.attended, logits)),
        )
        recorded = self._recorded.get(key)
        if recorded is None:
            self._compute(tables, x, None, logits)
            self._keep(key, Recorded(None, []))
        elif recorded.replay is None:
            kept = [with_room(t) for t in tables]
            replay = self._kernels.record(lambda: self._compute(kept, x, None, logits))
            self._keep(key, Recorded(replay, kept))
        else:
            for own, new in zip(recorded.tables, tables, strict=True):
                overwrite(own, new)
            recorded.replay()
            self._recorded.move_to_end(key)

    def _keep(self, key: tuple[object, ...], recorded: Recorded) -> None:
        self._recorded[key] = recorded
        if len(self._recorded) > _MOST_RECORDED:
            self._recorded.popitem(last=False)

    def _compute(self, tables: list[PassTables], x: Activations, sampled: Tensor | None, logits: Tensor) -> None:
        """From embeddings to the head's product; `sampled` are the rows it is wanted of, None for all."""
        first = self._weights.layers[0].input_norm.value
        if first is not None:
            self._kernels.rms_norm(x.residual, first, self._spec.eps, x.normed)
        for layer in self._layers[:-1]:
            self._store(layer, tables[layer.group], x)
            self._attend(layer, tables[layer.group], x)
            self._finish(layer, x)
        # Of the last layer's tokens, only those that are sampled matter to what follows their K and V.
        last = self._layers[-1]
        self._store(last, tables[last.group], x)
        if len(logits):
            self._attend(last, tables[last.group], x)
            x = x if sampled is None else self._only(sampled, x)
            self._finish(last, x)
            self._kernels.linear(x.normed, self._weights.head.value, logits)

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
            kernels.gated_linear(hidden, mlp.gate_up.value, mlp.spec.activation, x.gated)
            kernels.linear(x.gated, mlp.down.value, x.projected)
        else:
            self._mix(hidden, mlp, x.projected)
        output_norm, next_norm = weights.output_norm.value, layer.next_norm.value
        kernels.add_norm(x.residual, x.projected, scale, output_norm, next_norm, eps, x.normed)

    def _mix(self, x: Tensor, weights: ExpertsWeights, out: Tensor) -> None:
        """The experts' outputs, each on the tokens that chose it, added up by the router's weights."""
        kernels, spec, num_experts = self._kernels, weights.spec, len(weights.experts)
        scores = new_rows(len(x), num_experts)
        kernels.linear(x, weights.router.value, scores)
        shares, chosen = scores.softmax(dim=-1).topk(spec.top_k, dim=-1)
        if spec.normalized:
            shares /= shares.sum(dim=-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        tokens = order // spec.top_k
        ends = chosen.flatten().bincount(minlength=num_experts).cumsum(0).tolist()
        grouped = torch.index_select(x, 0, tokens, out=self._grouped.take(len(tokens), x.shape[1]))
        gated = self._narrow.take(len(tokens), spec.experts[0].width)
        for start, end, expert in zip([0, *ends], ends, weights.experts, strict=False):
            if start < end:
                own, inner = grouped[start:end], gated[start:end]
                kernels.gated_linear(own, expert.gate_up.value, expert.spec.activation, inner)
                kernels.linear(inner, expert.down.value, own)
        grouped *= shares.flatten()[order, None]
        out.zero_().index_add_(0, tokens, grouped)

    def _activations(self, rows: int) -> Activations:
        hidden_size, layout, width = self._spec.hidden_size, self._spec.layout, self._spec.mlp_width
        # Attention is done with its output before the MLP needs its own: they may lie in the same place.
        narrow = self._narrow.take(rows, max(layout.num_heads * layout.head_dim, width)).view(-1)

        def view(flat: Tensor, width: int) -> Tensor:
            return flat[: rows * width].view(rows, width)

        return Activations(
            residual=self._residual.take(rows, hidden_size),
            normed=self._normed.take(rows, hidden_size),
            projected=self._projected.take(rows, hidden_size),
            qkv=self._wide.take(rows, layout.width),
            attended=view(narrow, layout.num_heads * layout.head_dim),
            gated=view(narrow, width),
        )

    def _only(self, rows: Tensor, x: Activations) -> Activations:
        """Some rows, in any order and perhaps repeatedly, of what a layer goes on with after attention."""
        chosen = self._activations(max(len(rows), len(x.residual)))
        count = len(rows)
        return Activations(
            residual=x.residual.index_select(0, rows),
            normed=chosen.normed[:count],
            projected=chosen.projected[:count],
            qkv=chosen.qkv[:count],
            attended=x.attended.index_select(0, rows),
            gated=chosen.gated[:count],
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


def columns_with_room(block_table: Tensor) -> int:
    """Columns of a table that need not grow with every page: the next power of two."""
    return 1 << (block_table.shape[1] - 1).bit_length()


def with_room(tables: PassTables) -> PassTables:
    """Tables of their own memory, to be overwritten by others of the same number of tokens and requests."""
    block_table = torch.zeros((len(tables.block_table), columns_with_room(tables.block_table)), dtype=torch.int64)
    own = replace(
        tables,
        position_ids=tables.position_ids.clone(),
        cu_seqlens_q=tables.cu_seqlens_q.clone(),
        seqused_k=tables.seqused_k.clone(),
        block_table=block_table,
        write_rows=tables.write_rows.clone(),
    )
    overwrite(own, tables)
    return own


def overwrite(own: PassTables, tables: PassTables) -> None:
    """Make tables from `with_room` say what others do."""
    own.position_ids.copy_(tables.position_ids)
    own.cu_seqlens_q.copy_(tables.cu_seqlens_q)
    own.seqused_k.copy_(tables.seqused_k)
    own.block_table[:, : tables.block_table.shape[1]] = tables.block_table
    own.write_rows.copy_(tables.write_rows)
