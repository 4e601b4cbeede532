"""`BatchBuilder` against plain loops, over requests that come, grow, slide, go and leave their rows to others."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from legato.cache.allocator import PADDING_BLOCK, BlockTable
from legato.engine.batch import Batch, BatchBuilder
from legato.engine.scheduler import ScheduledChunk
from legato.request import Request
from legato.sampling_params import MAX_SEED, SamplingParams
from tests.engine.toy import make_request

PARAMS = (
    SamplingParams(),
    SamplingParams(temperature=0.0, top_k=None),
    SamplingParams(temperature=0.3, top_k=-1, top_p=0.25),
    SamplingParams(temperature=2.5, top_k=40, top_p=1.0),
)


class BatchBuilderMachine(RuleBasedStateMachine):
    """Keeps block tables itself, so that any sequence of growth and release may come."""

    @initialize(page_size=st.integers(1, 6), num_groups=st.integers(1, 3))
    def make(self, page_size: int, num_groups: int) -> None:
        self.page_size = page_size
        self.num_groups = num_groups
        self.builder = BatchBuilder(page_size, num_groups)
        self.requests: dict[str, Request] = {}
        self.tables: dict[str, tuple[BlockTable, ...]] = {}
        self.num_blocks = PADDING_BLOCK
        self.num_requests = 0

    def pick(self, index: int) -> Request:
        return list(self.requests.values())[index % len(self.requests)]

    @rule(
        count=st.integers(1, 10),
        prompt_length=st.integers(1, 40),
        num_generated=st.integers(0, 5),
        params=st.sampled_from(PARAMS),
        seed=st.sampled_from((0, 1, MAX_SEED)),
        reuses_id=st.booleans(),
    )
    def add(
        self,
        count: int,
        prompt_length: int,
        num_generated: int,
        params: SamplingParams,
        seed: int,
        reuses_id: bool,
    ) -> None:
        """Requests begin, some with tokens that they generated before a soft reset."""
        for _ in range(count):
            self.num_requests += not reuses_id
            request_id = str(self.num_requests)
            if request_id in self.requests:
                return
            request = make_request(request_id, prompt_length, params=params, seed=seed)
            request.tokens += range(num_generated)
            self.requests[request_id] = request
            self.tables[request_id] = tuple(BlockTable() for _ in range(self.num_groups))

    @precondition(lambda self: self.requests)
    @rule(index=st.integers(0, 99))
    def end(self, index: int) -> None:
        request = self.pick(index)
        self.builder.forget(request.request_id)
        del self.requests[request.request_id], self.tables[request.request_id]

    @rule()
    def forget_of_a_stranger_does_nothing(self) -> None:
        self.builder.forget("stranger")

    @precondition(lambda self: self.requests)
    @rule(
        first=st.integers(0, 99),
        counts=st.lists(st.integers(1, 25), min_size=1, max_size=12),
        spare=st.integers(0, 2),
        windows=st.lists(st.none() | st.integers(1, 12), min_size=3, max_size=3),
    )
    def step(self, first: int, counts: list[int], spare: int, windows: list[int | None]) -> None:
        """Some requests get chunks; blocks come for these and `spare` more, others leave the window."""
        chunks = []
        for i, count in enumerate(counts[: len(self.requests)]):
            request = self.pick(first + i)
            if request.num_computed_tokens == len(request.tokens):
                request.tokens.append(i)
            start = request.num_computed_tokens
            count = min(count, len(request.tokens) - start)
            chunks.append(ScheduledChunk(request, count))
            for table, window in zip(self.tables[request.request_id], windows, strict=False):
                if window is not None:
                    self._release(table, start - window + 1)
                self._extend(table, start + count + spare * self.page_size)
        check_batch(self.builder.build(chunks, self.tables), chunks, self.tables, self.page_size)
        for chunk in chunks:
            chunk.request.num_computed_tokens += chunk.num_tokens

    def _release(self, table: BlockTable, first_seen: int) -> None:
        while (table.first_live + 1) * self.page_size <= first_seen and table.first_live < len(table.blocks):
            table.blocks[table.first_live] = PADDING_BLOCK
            table.first_live += 1

    def _extend(self, table: BlockTable, num_tokens: int) -> None:
        while len(table.blocks) * self.page_size < num_tokens:
            self.num_blocks += 1
            table.blocks.append(self.num_blocks)


def check_batch(
    batch: Batch, chunks: list[ScheduledChunk], tables: dict[str, tuple[BlockTable, ...]], page_size: int
) -> None:
    input_ids, position_ids, cu_seqlens_q, seqused_k, sampled = [], [], [0], [], []
    for chunk in chunks:
        request = chunk.request
        for position in range(request.num_computed_tokens, request.num_computed_tokens + chunk.num_tokens):
            input_ids.append(request.tokens[position])
            position_ids.append(position)
        cu_seqlens_q.append(len(input_ids))
        seqused_k.append(position_ids[-1] + 1)
        if seqused_k[-1] == len(request.tokens):
            sampled.append((len(input_ids) - 1, request))
    assert batch.input_ids.tolist() == input_ids
    assert batch.position_ids.tolist() == position_ids
    assert batch.cu_seqlens_q.tolist() == cu_seqlens_q
    assert batch.seqused_k.tolist() == seqused_k
    assert batch.logits_indices.tolist() == [row for row, _ in sampled]
    check_tables(batch, chunks, tables, page_size)
    check_sampling(batch, [request for _, request in sampled])
    arrays = (batch.input_ids, batch.position_ids, batch.cu_seqlens_q, batch.seqused_k, batch.logits_indices)
    assert {array.dtype for array in (*arrays, *batch.block_tables, *batch.slot_mappings)} == {np.dtype(np.int64)}


def check_tables(
    batch: Batch, chunks: list[ScheduledChunk], tables: dict[str, tuple[BlockTable, ...]], page_size: int
) -> None:
    num_columns = max(-(-length // page_size) for length in batch.seqused_k.tolist())
    num_groups = len(tables[chunks[0].request.request_id])
    assert len(batch.block_tables) == len(batch.slot_mappings) == num_groups
    for group in range(num_groups):
        assert batch.block_tables[group].shape == (len(chunks), num_columns)
        slots = []
        for row, chunk in enumerate(chunks):
            request = chunk.request
            blocks = tables[request.request_id][group].blocks
            # Columns past a request's own blocks are never read: `seqused_k` ends before them.
            assert batch.block_tables[group][row, : len(blocks)].tolist() == blocks[:num_columns]
            for position in range(request.num_computed_tokens, request.num_computed_tokens + chunk.num_tokens):
                slots.append(blocks[position // page_size] * page_size + position % page_size)
        assert batch.slot_mappings[group].tolist() == slots


def check_sampling(batch: Batch, requests: list[Request]) -> None:
    how = batch.sampling
    params = [request.params for request in requests]
    assert how.filters.temperature.tolist() == [np.float32(p.temperature) for p in params]
    assert how.filters.top_k.tolist() == [max(p.top_k or 0, 0) for p in params]
    assert how.filters.top_p.tolist() == [np.float32(p.top_p) for p in params]
    assert how.seed.tolist() == [request.seed for request in requests]
    assert how.position.tolist() == [len(request.tokens) - len(request.prompt_ids) for request in requests]
    assert how.all_greedy == all(p.temperature == 0 for p in params)
    assert (how.filters.temperature.dtype, how.filters.top_p.dtype) == (np.float32, np.float32)
    assert (how.filters.top_k.dtype, how.seed.dtype, how.position.dtype) == (np.int64, np.uint64, np.int64)


TestBatchBuilder = BatchBuilderMachine.TestCase
TestBatchBuilder.settings = settings(
    max_examples=200, stateful_step_count=30, deadline=None, report_multiple_bugs=False
)


def test_a_step_of_prompts_that_go_on_samples_nothing() -> None:
    request = make_request("long", 10)
    table = BlockTable([3, 5, 9])
    batch = BatchBuilder(4, 1).build([ScheduledChunk(request, 6)], {"long": (table,)})
    assert batch.logits_indices.tolist() == []
    assert batch.sampling.seed.tolist() == []
    assert batch.block_tables[0].tolist() == [[3, 5]]
    assert batch.slot_mappings[0].tolist() == [12, 13, 14, 15, 20, 21]


def test_rows_are_used_again() -> None:
    """As many requests after one another as may come: the arrays stay as large as the most at a time."""
    builder = BatchBuilder(4, 1)
    for i in range(1000):
        request = make_request(str(i), 4)
        builder.build([ScheduledChunk(request, 4)], {str(i): (BlockTable([i + 2]),)})
        builder.forget(str(i))
    assert len(builder._num_logprobs) == 16
