"""From a step's plan to the arrays of one forward pass. Host arrays only: the runner puts them on its device."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from legato.cache.allocator import PADDING_BLOCK
from legato.cache.block_manager import BlockTables
from legato.engine.scheduler import ScheduledChunk
from legato.request import Request

IntArray = NDArray[np.int64]

_NO_TOP_K = np.iinfo(np.int64).max  # more than any vocabulary has


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How each sampled row is sampled; row i belongs to the i-th entry of `Batch.logits_indices`.

    Attributes:
        temperature: float32 [rows]; 0 is greedy.
        top_k: int64 [rows]; 0 is all tokens.
        top_p: float32 [rows]; 1 is all tokens.
        seed: uint64 [rows].
        position: int64 [rows]; how many tokens the request has generated: with the seed it makes the random number.
    """

    temperature: NDArray[np.float32]
    top_k: IntArray
    top_p: NDArray[np.float32]
    seed: NDArray[np.uint64]
    position: IntArray

    @property
    def all_greedy(self) -> bool:
        return not self.temperature.any()


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass over the chunks of several requests, laid end to end without padding.

    Attributes:
        input_ids: int64 [tokens].
        position_ids: int64 [tokens]; each token's place in its own sequence.
        cu_seqlens_q: int64 [requests + 1]; request i has the tokens from cu_seqlens_q[i] to cu_seqlens_q[i + 1].
        seqused_k: int64 [requests]; tokens of the request in the cache once this pass is done.
        block_tables: for each attention group int64 [requests, pages]; blocks no longer owned are `PADDING_BLOCK`.
        slot_mappings: for each attention group int64 [tokens]; where K and V go: block × page_size + offset.
        logits_indices: int64 [rows]; the tokens whose logits are sampled.
        sampling: how.
    """

    input_ids: IntArray
    position_ids: IntArray
    cu_seqlens_q: IntArray
    seqused_k: IntArray
    block_tables: tuple[IntArray, ...]
    slot_mappings: tuple[IntArray, ...]
    logits_indices: IntArray
    sampling: SamplingBatch


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a forward pass brought: a token for each sampled row, and its log-probability if asked for."""

    token_ids: list[int]
    logprobs: list[float] | None


class BatchBuilder:
    """Builds batches, keeping between steps what rarely changes: each running request has a row of arrays.

    Args:
        page_size: tokens a page holds.
        num_groups: attention groups, hence block tables a request.
    """

    def __init__(self, page_size: int, num_groups: int) -> None:
        self._page_size = page_size
        self._rows: dict[str, int] = {}
        self._free_rows: list[int] = []
        self._block_tables = [np.zeros((0, 8), np.int64) for _ in range(num_groups)]
        # Block tables only grow at the end and are released from the front: two marks say what is copied already.
        self._copied: list[list[tuple[int, int]]] = [[] for _ in range(num_groups)]
        self._temperature = np.zeros(0, np.float32)
        self._top_k = np.zeros(0, np.int64)
        self._top_p = np.zeros(0, np.float32)
        self._seed = np.zeros(0, np.uint64)

    def forget(self, request_id: str) -> None:
        """The request left the cache: its row may serve another."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._free_rows.append(row)

    def build(self, chunks: Sequence[ScheduledChunk], tables: dict[str, BlockTables]) -> Batch:
        """The batch of `chunks`, whose blocks `tables` lists."""
        rows, input_ids, starts, counts, sampled, positions = [], [], [], [], [], []
        for i, chunk in enumerate(chunks):
            request, count = chunk.request, chunk.num_tokens
            start = request.num_computed_tokens
            end = start + count
            row = self._rows.get(request.request_id)
            if row is None:
                row = self._add_row(request)
            self._copy_block_tables(row, tables[request.request_id])
            if count == 1:
                input_ids.append(request.tokens[start])
            else:
                input_ids += request.tokens[start:end]
            if end == len(request.tokens):
                sampled.append(i)
                positions.append(end - len(request.prompt_ids))
            rows.append(row)
            starts.append(start)
            counts.append(count)
        return self._assemble(
            np.array(rows), np.array(input_ids), np.array(starts), np.array(counts), np.array(sampled, np.int64),
            np.array(positions, np.int64),
        )  # fmt: skip

    def _assemble(
        self, rows: IntArray, input_ids: IntArray, starts: IntArray, counts: IntArray, sampled: IntArray,
        positions: IntArray,
    ) -> Batch:  # fmt: skip
        cu_seqlens_q = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(counts, out=cu_seqlens_q[1:])
        seqused_k = starts + counts
        position_ids = np.arange(len(input_ids)) + np.repeat(starts - cu_seqlens_q[:-1], counts)
        pages, offsets = np.divmod(position_ids, self._page_size)
        num_columns = int(seqused_k.max() - 1) // self._page_size + 1
        token_rows = np.repeat(rows, counts)
        sampled_rows = rows[sampled]
        return Batch(
            input_ids=input_ids,
            position_ids=position_ids,
            cu_seqlens_q=cu_seqlens_q,
            seqused_k=seqused_k,
            block_tables=tuple(table[rows, :num_columns] for table in self._block_tables),
            slot_mappings=tuple(table[token_rows, pages] * self._page_size + offsets for table in self._block_tables),
            logits_indices=cu_seqlens_q[1:][sampled] - 1,
            sampling=SamplingBatch(
                temperature=self._temperature[sampled_rows],
                top_k=self._top_k[sampled_rows],
                top_p=self._top_p[sampled_rows],
                seed=self._seed[sampled_rows],
                position=positions,
            ),
        )

    def _add_row(self, request: Request) -> int:
        if not self._free_rows:
            self._add_capacity()
        row = self._free_rows.pop()
        self._rows[request.request_id] = row
        params = request.params
        self._temperature[row] = params.temperature
        self._top_k[row] = min(params.top_k or 0, _NO_TOP_K)
        self._top_p[row] = params.top_p
        self._seed[row] = request.seed
        for copied in self._copied:
            copied[row] = (0, 0)
        return row

    def _add_capacity(self) -> None:
        old = len(self._temperature)
        more = max(16, old)
        self._free_rows += range(old + more - 1, old - 1, -1)
        self._block_tables = [np.pad(t, ((0, more), (0, 0))) for t in self._block_tables]
        for copied in self._copied:
            copied += [(0, 0)] * more
        self._temperature = np.pad(self._temperature, (0, more))
        self._top_k = np.pad(self._top_k, (0, more))
        self._top_p = np.pad(self._top_p, (0, more))
        self._seed = np.pad(self._seed, (0, more))

    def _copy_block_tables(self, row: int, tables: BlockTables) -> None:
        for group, table in enumerate(tables):
            first_live, length = self._copied[group][row]
            if length == len(table.blocks) and first_live == table.first_live:
                continue
            target = self._block_tables[group]
            if len(table.blocks) > target.shape[1]:
                more = max(len(table.blocks) - target.shape[1], target.shape[1])
                target = self._block_tables[group] = np.pad(target, ((0, 0), (0, more)))
            target[row, first_live : table.first_live] = PADDING_BLOCK
            target[row, length : len(table.blocks)] = table.blocks[length:]
            self._copied[group][row] = (table.first_live, len(table.blocks))
