"""From a step's plan to the arrays of one forward pass. Host arrays only: the runner puts them on its device."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from legato.cache.allocator import PADDING_BLOCK
from legato.cache.block_manager import BlockTables
from legato.engine.scheduler import ScheduledChunk
from legato.engine.token_edits import EditsBatch
from legato.filters import NAMES, Filters
from legato.grammar import Grammar, GrammarCompiler
from legato.request import Request, TokenLogprobs
from legato.sampling_params import SamplingParams

IntArray = NDArray[np.int64]

_NO_TOP_K = np.iinfo(np.int64).max  # more than any vocabulary has


@dataclass(frozen=True, slots=True)
class ProcessedRow:
    """A row whose logits go through processors of its own.

    Attributes:
        row: which.
        process: takes the request's tokens and the row's logits, float32 [1, vocabulary], and returns them processed.
        tokens: the request's.
    """

    row: int
    process: Callable[[Sequence[int], Any], Any]
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """Rows whose tokens are restricted.

    Attributes:
        rows: int64.
        masks: waits for them, since they are made while the model runs: uint8 [rows, bytes], see `start_masks`.
    """

    rows: IntArray
    masks: Callable[[], NDArray[np.uint8]]


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How each sampled row is sampled; row i belongs to the i-th entry of `Batch.logits_indices`.

    Attributes:
        filters: how it is drawn from.
        seed: uint64 [rows].
        position: int64 [rows]; how many tokens the request has generated: with the seed it makes the random number.
        num_logprobs: int64 [rows]; how many of the likeliest tokens' log-probabilities are wanted besides the drawn
            one's; -1: not even that.
        raw_logprobs: bool [rows]; whether they are those of the logits as the model gave them.
        edits: changes to single tokens' logits, or None.
        processed: rows with processors of their own.
        allowed: rows whose tokens a grammar restricts, or None.
    """

    filters: Filters
    seed: NDArray[np.uint64]
    position: IntArray
    num_logprobs: IntArray
    raw_logprobs: NDArray[np.bool_]
    edits: EditsBatch | None = None
    processed: tuple[ProcessedRow, ...] = ()
    allowed: AllowedTokens | None = None

    @property
    def all_greedy(self) -> bool:
        return not self.filters.temperature.any()

    @property
    def may_forbid(self) -> bool:
        """Whether rows may be left without any token."""
        return self.edits is not None or bool(self.processed) or self.allowed is not None

    @property
    def wants_logprobs(self) -> bool:
        return bool((self.num_logprobs >= 0).any())


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Rows whose logits tell how likely a given token is.

    Attributes:
        token_ids: int64 [rows].
        num_likeliest: int64 [rows]; how many of the likeliest tokens are wanted besides.
    """

    token_ids: IntArray
    num_likeliest: IntArray


NOTHING_SCORED = ScoredRows(np.empty(0, np.int64), np.empty(0, np.int64))


def plain_sampling(rows: int) -> SamplingBatch:
    """From all tokens, with seed 0."""
    zeros = np.zeros(rows, np.int64)
    return SamplingBatch(Filters.none(rows), zeros.astype(np.uint64), zeros, zeros - 1, np.zeros(rows, np.bool_))


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
        logits_indices: int64 [rows]; the tokens whose logits are wanted: first those that are sampled, then those that
            are only looked at.
        sampling: how the first ones are sampled.
        scored: what is looked at in the others.
    """

    input_ids: IntArray
    position_ids: IntArray
    cu_seqlens_q: IntArray
    seqused_k: IntArray
    block_tables: tuple[IntArray, ...]
    slot_mappings: tuple[IntArray, ...]
    logits_indices: IntArray
    sampling: SamplingBatch
    scored: ScoredRows


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a forward pass brought.

    Attributes:
        token_ids: a token for each sampled row.
        logprobs: for each of them, None where none was asked for.
        scores: for each of `Batch.scored`.
        errors: why sampled rows have no token worth anything, by row.
    """

    token_ids: list[int]
    logprobs: Sequence[TokenLogprobs | None]
    scores: Sequence[TokenLogprobs] = ()
    errors: Mapping[int, str] = field(default_factory=dict)


class _Sampled(NamedTuple):
    """A row to be sampled: of which request, the row of the builder's arrays, after which token of the pass, as which
    of the new tokens, and the seed and grammar, which are those of one of the request's samples.
    """

    request: Request
    row: int
    token: int
    position: int
    seed: int
    grammar: Grammar | None


class _Scored(NamedTuple):
    """A row to be looked at: after which token of the pass, for which token, and how many others."""

    token: int
    token_id: int
    num_likeliest: int


def _scored(request: Request, start: int, end: int, first_token: int) -> list[_Scored]:
    """Of a chunk from `start` to `end` - 1, whose first is the pass's token `first_token`."""
    first = max(start + 1, request.next_scored)
    return [
        _Scored(first_token + position - 1 - start, request.tokens[position], request.params.prompt_logprobs or 0)
        for position in range(first, first + request.num_scored(start, end))
    ]


def _allowed(grammars: Sequence[tuple[int, Grammar | None]]) -> AllowedTokens | None:
    """Masks are made by each grammar's compiler, of which there is one for all but requests with odd ends."""
    by_compiler: defaultdict[GrammarCompiler, list[tuple[int, Grammar]]] = defaultdict(list)
    for row, grammar in grammars:
        if grammar is not None:
            by_compiler[grammar.compiler].append((row, grammar))
    if not by_compiler:
        return None
    rows = [row for restricted in by_compiler.values() for row, _ in restricted]
    started = [c.start_masks([grammar for _, grammar in restricted]) for c, restricted in by_compiler.items()]
    return AllowedTokens(np.array(rows, np.int64), lambda: np.concatenate([masks() for masks in started]))


def _after_processors(params: SamplingParams) -> SamplingParams:
    return SamplingParams(temperature=1.0 if params.temperature > 0 else 0.0)


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
        self._filters = Filters.none(0)
        self._num_logprobs = np.zeros(0, np.int64)
        self._raw_logprobs = np.zeros(0, np.bool_)

    def forget(self, request_id: str) -> None:
        """The request left the cache: its row may serve another."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._free_rows.append(row)

    def build(self, chunks: Sequence[ScheduledChunk], tables: dict[str, BlockTables]) -> Batch:
        """The batch of `chunks`, whose blocks `tables` lists."""
        rows, input_ids, starts, counts = [], [], [], []
        sampled: list[_Sampled] = []
        scored: list[_Scored] = []
        num_tokens = 0
        for chunk in chunks:
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
            input_ids += chunk.drafts
            if request.score_from is not None:
                scored += _scored(request, start, end, num_tokens)
            num_tokens += count
            if request.samples(end):
                position = request.num_generated_tokens
                sampled += [
                    _Sampled(request, row, num_tokens - 1, position, one.seed, one.grammar)
                    for one in (request, *request.children)
                ]
                sampled += [
                    _Sampled(request, row, num_tokens - 1 + i, position + i, request.seed, None)
                    for i in range(1, len(chunk.drafts) + 1)
                ]
            num_tokens += len(chunk.drafts)
            rows.append(row)
            starts.append(start)
            counts.append(count + len(chunk.drafts))
        return self._assemble(np.array(rows), np.array(input_ids), np.array(starts), np.array(counts), sampled, scored)

    def _assemble(
        self, rows: IntArray, input_ids: IntArray, starts: IntArray, counts: IntArray, sampled: Sequence[_Sampled],
        scored: Sequence[_Scored],
    ) -> Batch:  # fmt: skip
        cu_seqlens_q = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(counts, out=cu_seqlens_q[1:])
        seqused_k = starts + counts
        position_ids = np.arange(len(input_ids)) + np.repeat(starts - cu_seqlens_q[:-1], counts)
        pages, offsets = np.divmod(position_ids, self._page_size)
        num_columns = int(seqused_k.max() - 1) // self._page_size + 1
        token_rows = np.repeat(rows, counts)
        return Batch(
            input_ids=input_ids,
            position_ids=position_ids,
            cu_seqlens_q=cu_seqlens_q,
            seqused_k=seqused_k,
            block_tables=tuple(table[rows, :num_columns] for table in self._block_tables),
            slot_mappings=tuple(table[token_rows, pages] * self._page_size + offsets for table in self._block_tables),
            logits_indices=np.array([*(one.token for one in sampled), *(one.token for one in scored)], np.int64),
            sampling=self._sampling(sampled),
            scored=ScoredRows(
                np.array([one.token_id for one in scored], np.int64),
                np.array([one.num_likeliest for one in scored], np.int64),
            ),
        )

    def _sampling(self, sampled: Sequence[_Sampled]) -> SamplingBatch:
        rows = np.array([one.row for one in sampled], np.int64)
        edited = [(i, one.request.edits) for i, one in enumerate(sampled) if one.request.edits is not None]
        changes = [edits.after(sampled[i].request.tokens) for i, edits in edited]
        return SamplingBatch(
            filters=self._filters[rows],
            seed=np.array([one.seed for one in sampled], np.uint64),
            position=np.array([one.position for one in sampled], np.int64),
            num_logprobs=self._num_logprobs[rows],
            raw_logprobs=self._raw_logprobs[rows],
            edits=EditsBatch.of([i for i, _ in edited], changes) if edited else None,
            processed=tuple(
                ProcessedRow(i, one.request.processors, one.request.tokens)
                for i, one in enumerate(sampled)
                if one.request.processors is not None
            ),
            allowed=_allowed([(i, one.grammar) for i, one in enumerate(sampled)]),
        )

    def _add_row(self, request: Request) -> int:
        if not self._free_rows:
            self._add_capacity()
        row = self._free_rows.pop()
        self._rows[request.request_id] = row
        # What has processors of its own has all filters among them.
        params = request.params if request.processors is None else _after_processors(request.params)
        for name in NAMES:
            getattr(self._filters, name)[row] = min(getattr(params, name), _NO_TOP_K)
        self._num_logprobs[row] = -1 if request.num_logprobs is None else request.num_logprobs
        self._raw_logprobs[row] = request.params.logprobs_mode == "raw"
        for copied in self._copied:
            copied[row] = (0, 0)
        return row

    def _add_capacity(self) -> None:
        old = len(self._num_logprobs)
        more = max(16, old)
        self._free_rows += range(old + more - 1, old - 1, -1)
        self._block_tables = [np.pad(t, ((0, more), (0, 0))) for t in self._block_tables]
        for copied in self._copied:
            copied += [(0, 0)] * more
        self._filters = Filters(*(np.pad(getattr(self._filters, name), (0, more)) for name in NAMES))
        self._num_logprobs = np.pad(self._num_logprobs, (0, more))
        self._raw_logprobs = np.pad(self._raw_logprobs, (0, more))

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
