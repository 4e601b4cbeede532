"""What watchers are told, against a timeline of the same steps."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from legato import ContinuousBatchingConfig, ContinuousBatchingManager, GenerationConfig
from legato.engine.observer import StepRecord
from legato.server.live import MAX_ROWS, Board, LiveView
from legato.timeline import RequestState, Timeline
from tests.tiny import tiny_llama

GENERATION = GenerationConfig(max_new_tokens=30, do_sample=False, eos_token_id=-1)
SMALL: dict[str, Any] = {"page_size": 4, "num_blocks": 60, "max_batch_tokens": 32, "scheduler_type": "prefill_first"}
LETTERS = {"w": RequestState.WAITING, "p": RequestState.PREFILL, "d": RequestState.DECODE}
LETTERS |= {"o": RequestState.OFFLOADED, "x": RequestState.RESET}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


@pytest.fixture
def manager(model: Any) -> Iterator[ContinuousBatchingManager]:
    manager = model.init_continuous_batching(GENERATION, ContinuousBatchingConfig(page_size=8, num_blocks=200))
    yield manager
    manager.stop(hard_stop=True)
    manager.destroy()


def _records(model: Any, num_requests: int, **config: Any) -> list[StepRecord]:
    """Of a run in which every request gets 30 tokens."""
    records: list[StepRecord] = []
    with model.continuous_batching_context_manager(GENERATION, ContinuousBatchingConfig(**config)) as manager:
        manager.watch(records.append)
        prompts = [[1 + (7 * i + j) % 90 for j in range(4 + 5 * i % 41)] for i in range(num_requests)]
        for request_id in manager.add_requests(prompts):
            assert manager.get_result(request_id).error is None
    return records


@pytest.mark.parametrize("offload_space", [0.0, 0.1])
def test_columns_are_the_states_that_a_timeline_records(model: Any, offload_space: float) -> None:
    records = _records(model, 16, cpu_offload_space=offload_space, **SMALL)
    timeline, board = Timeline(), Board()
    for record in records:
        timeline.add(record)
        board.add(record)
    lanes = [lane.intervals(timeline.ended) for lane in timeline.lanes()]
    assert board.num_steps == len(records) == len(board.steps) and not board.requests
    for record, (column, *_) in zip(records, board.steps, strict=True):
        middle = (record.started + record.ended) / 2
        states = [state for intervals in lanes for state, start, end in intervals if start <= middle < end]
        assert Counter(LETTERS[letter] for letter in column.lower().replace(" ", "")) == Counter(states)
        assert sum(letter.isupper() for letter in column) == len(record.finished)
    letters = set("".join(column for column, *_ in board.steps).lower())
    assert letters == set("wpd ") | {"o" if offload_space else "x"}


def test_a_row_is_one_requests_until_its_end(model: Any) -> None:
    board, rows = Board(), dict[str, int | None]()
    for record in _records(model, 16, cpu_offload_space=0.1, **SMALL):
        board.add(record)
        for request_id, request in board.requests.items():
            assert rows.setdefault(request_id, request.row) == request.row
    assert len(rows) == 16 and set(rows.values()) <= set(range(16))


def test_more_requests_than_rows(model: Any) -> None:
    board, num_ends = Board(), 0
    for record in _records(model, MAX_ROWS + 20, page_size=8, num_blocks=400, max_requests_per_batch=8):
        board.add(record)
        column = board.steps[-1][0]
        assert len(column) <= MAX_ROWS
        num_ends += sum(letter.isupper() for letter in column)
        waiting_above = [r for r in board.requests.values() if r.row is None and r.state is not RequestState.WAITING]
        assert waiting_above == []  # who runs is seen
    assert num_ends == MAX_ROWS + 20


def test_requests_are_heard_of_again_after_steps_were_missed(model: Any) -> None:
    board, records = Board(), _records(model, 4, page_size=8, num_blocks=200)
    for record in records[:10]:
        board.add(record)
    board.forget_requests()
    for record in records[20:]:  # all four run still
        board.add(record)
    assert board.steps[10][0] == "dddd" and not board.requests


def test_first_tokens(model: Any) -> None:
    with model.continuous_batching_context_manager(GENERATION, ContinuousBatchingConfig(**SMALL)) as manager:
        board = Board()
        manager.watch(board.add)
        ids = manager.add_requests([[5] * 50, [6] * 3, [7] * 9], record_timestamps=True)
        one = manager.add_request([8] * 3, max_new_tokens=1, record_timestamps=True)
        outputs = [manager.get_result(request_id) for request_id in (*ids, one)]
    told = sorted(board.first_tokens)
    true = sorted(output.timestamps[0] - output.created_time for output in outputs)
    assert told == pytest.approx(true, abs=0.005)  # a step ends a little after its tokens are drawn


def _snapshot(event: bytes) -> dict[str, Any]:
    return json.loads(event.removeprefix(b"data: "))


def test_the_engine_is_watched_while_somebody_watches(manager: ContinuousBatchingManager) -> None:
    def observer() -> Any:
        return manager._thread._engine.observer

    async def watch() -> None:
        live = LiveView(manager)
        first, second = live.events(lambda: True), live.events(lambda: True)
        assert observer() is None
        assert _snapshot(await anext(first))["num_steps"] == 0 and observer() is not None
        await anext(second)
        await first.aclose()
        assert observer() is not None
        manager.add_request([3] * 20, request_id="it")
        await asyncio.to_thread(manager.get_result, "it")
        snapshot = _snapshot(await anext(second))
        assert sum(column.lower() == "d" for column, *_ in snapshot["steps"]) == 29
        assert snapshot["cache"]["used"] == 0 and 0 < snapshot["cache"]["blank"] < 1 and not snapshot["requests"]
        await second.aclose()
        assert observer() is None

    manager.start()
    asyncio.run(watch())


def test_a_slow_reader_gets_the_latest_steps(manager: ContinuousBatchingManager) -> None:
    async def watch() -> None:
        live = LiveView(manager)
        slow, quick = live.events(lambda: True), live.events(lambda: True)
        await anext(slow), await anext(quick)
        for name in ("one", "two"):
            manager.add_request([3] * 20, request_id=name)
            await asyncio.to_thread(manager.get_result, name)
            await anext(quick)
        snapshot = _snapshot(await anext(slow))
        assert len(snapshot["steps"]) == snapshot["num_steps"] == 60
        closing = live.events(lambda: False)
        assert [event async for event in closing] == []
        await slow.aclose(), await quick.aclose()

    manager.start()
    asyncio.run(watch())
