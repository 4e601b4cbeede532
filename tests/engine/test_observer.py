"""`StepRecord`: what an engine tells of each step, against what the step is seen to do."""

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legato.engine import engine as engine_module
from legato.engine.engine import Engine
from legato.engine.observer import StepRecord
from legato.request import Request, RequestStatus
from tests.cache.accounts import LAYOUTS
from tests.engine.checked import PLENTY, Setup
from tests.engine.toy import make_request, toy_prompt


class Watch:
    """An engine with a clock that ticks at each look, watched from outside: what each step does to each request."""

    def __init__(self, setup: Setup) -> None:
        ticks = count(1)
        self.setup = setup
        self.engine = setup.engine = Engine(
            setup.scheduler, setup.blocks, setup.builder, setup.runner, setup.mover, clock=lambda: float(next(ticks))
        )
        self.records: list[StepRecord] = []
        self.engine.observer = self.records.append
        self.requests: list[Request] = []
        self.arrived: dict[str, float] = {}

    def submit(self, *requests: Request) -> None:
        for request in requests:
            request.created_time = 100.0 + len(self.requests)
            self.requests.append(request)
            self.arrived[request.request_id] = request.created_time
        self.setup.submit(*requests)

    def step(self) -> StepRecord:
        """One step, its record checked."""
        before = [(request, request.num_generated_tokens, request.status) for request in self.requests]
        running, offloaded = list(self.setup.scheduler.running), self.offloaded()
        num_resets = self.engine.stats.num_resets
        outputs = self.engine.step()
        record = self.records[-1]
        plan = self.setup.planned()
        assert record.arrived == self.arrived
        self.arrived = {}
        assert list(record.prefilled) + list(record.decoded) == sorted(plan, key=lambda r: r in record.decoded)
        assert {**record.prefilled, **dict.fromkeys(record.decoded, 1)} == plan
        for request, num_generated, status in before:
            name = request.request_id
            if name in record.decoded:
                assert status is RequestStatus.DECODING
                assert request.num_generated_tokens == num_generated + 1
            if name in record.prefilled:
                assert status is not RequestStatus.DECODING
        assert record.finished == tuple(output.request_id for output in outputs if output.is_finished())
        gone = [n for n in running if n not in self.setup.scheduler.running and n not in record.finished]
        assert set(gone) <= {*record.offloaded, *record.reset} <= set(running)
        assert set(self.offloaded()) - set(offloaded) <= set(record.offloaded)
        assert len(record.reset) == self.engine.stats.num_resets - num_resets
        self.check_counts(record)
        return record

    def offloaded(self) -> list[str]:
        blocks = self.setup.blocks
        return [request.request_id for request in self.requests if blocks.is_offloaded(request.request_id)]

    def check_counts(self, record: StepRecord) -> None:
        scheduler = self.setup.scheduler
        assert record.num_batch_tokens == sum(record.prefilled.values()) + len(record.decoded)
        assert record.cache_used_share == 1 - self.setup.blocks.accounts.free_share
        assert record.num_running == len(scheduler.running)
        assert record.num_waiting + record.num_offloaded == len(scheduler.waiting)
        assert record.num_offloaded == len(self.offloaded())
        previous_end = self.records[-2].ended if len(self.records) > 1 else 0
        assert previous_end < record.started < record.ended


@given(
    name=st.sampled_from(list(LAYOUTS)),
    num_usable=st.integers(4, 12),
    num_swap_units=st.sampled_from((0, 4, PLENTY)),
    policy=st.sampled_from(("fifo", "prefill_first")),
    max_batch_tokens=st.sampled_from((5, 9, 16, 40)),
    coming=st.lists(st.tuples(st.integers(1, 16), st.integers(1, 14), st.integers(0, 5)), min_size=3, max_size=9),
    cancelled=st.integers(0, 20),
)
@settings(max_examples=100, deadline=None)
def test_each_record_tells_what_its_step_did(
    coming: list[tuple[int, int, int]], cancelled: int, name: str, num_usable: int, **kinds: object
) -> None:
    while (setup := Setup.of(LAYOUTS[name], num_usable, **kinds)).blocks.max_tokens_alone() < 30:
        num_usable += 1
    watch = Watch(setup)
    for i, (prompt_length, max_new_tokens, num_steps) in enumerate(coming):
        watch.submit(make_request(str(i), toy_prompt("common", prompt_length), max_new_tokens, seed=i))
        for _ in range(num_steps):
            watch.step()
        if i == cancelled:
            watch.engine.cancel(watch.requests[i // 2])
    while watch.engine.has_work:
        watch.step()
    by_name = [request.request_id for request in watch.requests]
    assert sorted(name for record in watch.records for name in record.finished) == by_name
    stats = watch.engine.stats
    assert sum(sum(record.prefilled.values()) for record in watch.records) == stats.num_prompt_tokens
    assert sum(record.num_batch_tokens > 0 for record in watch.records) == stats.num_steps
    assert sum(len(record.offloaded) for record in watch.records) == stats.num_offloads


def test_a_record_of_each_kind_of_event() -> None:
    """One swap unit less than two requests need: of the four that outgrow the cache one is offloaded, one reset."""
    watch = Watch(Setup.of(LAYOUTS["full"], 8, num_swap_units=3))
    watch.submit(*(make_request(name, 8, 4) for name in "abcd"))
    first, second = watch.step(), watch.step()
    assert first.arrived == {"a": 100.0, "b": 101.0, "c": 102.0, "d": 103.0}
    assert first.prefilled == dict.fromkeys("abcd", 8)
    assert (first.decoded, first.offloaded, first.reset, first.finished) == ((), (), (), ())
    assert (first.num_batch_tokens, first.cache_used_share) == (32, 1.0)
    assert (second.arrived, second.prefilled, second.decoded) == ({}, {}, ("a", "b"))
    assert (second.offloaded, second.reset, second.finished) == (("d",), ("c",), ())
    assert (second.num_running, second.num_waiting, second.num_offloaded) == (2, 1, 1)
    assert second.num_batch_tokens == 2
    assert second.cache_used_share == 6 / 8
    watch.engine.cancel(watch.requests[3])
    assert watch.step().finished == ("d",)
    assert watch.step().finished == ("a", "b")


def test_a_reset_request_prefills_its_answer_too() -> None:
    watch = Watch(Setup.of(LAYOUTS["full"], 4, sharing=False))
    watch.submit(*(make_request(name, 8, 4) for name in "ab"))
    records = [watch.step() for _ in range(5)]
    assert [record.reset for record in records] == [(), ("b",), (), (), ()]
    assert records[-1].prefilled == {"b": 9}


def test_tokens_found_in_the_cache_are_not_prefilled() -> None:
    watch = Watch(Setup.of(LAYOUTS["full"], 8))
    watch.submit(*(make_request(name, toy_prompt("common", 10), 2) for name in "ab"))
    assert watch.step().prefilled == {"a": 10, "b": 2}


def test_a_step_without_a_pass_is_recorded_too() -> None:
    watch = Watch(Setup.of(LAYOUTS["full"], 8))
    watch.submit(request := make_request("a", 4, 2))
    watch.engine.cancel(request)
    record = watch.step()
    assert (record.arrived, record.finished) == ({"a": 100.0}, ("a",))
    assert (record.num_batch_tokens, record.prefilled, record.decoded) == (0, {}, ())


def test_cancel_all_is_recorded() -> None:
    watch = Watch(Setup.of(LAYOUTS["full"], 8))
    watch.submit(make_request("running", 4, 9))
    watch.step()
    watch.submit(make_request("submitted", 4, 9))
    watch.engine.cancel_all("broken")
    record = watch.records[-1]
    assert (list(record.arrived), record.finished) == (["submitted"], ("running", "submitted"))
    assert (record.num_running, record.num_waiting, record.num_batch_tokens) == (0, 0, 0)


def test_nothing_is_recorded_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a record that nobody asked for")

    monkeypatch.setattr(engine_module, "StepRecord", refuse)
    setup = Setup.of(LAYOUTS["full"], 8)
    setup.submit(make_request("a", 8, 4), make_request("b", 8, 4))
    setup.run()
    watch = Watch(setup)
    watch.submit(make_request("c", 4, 2))
    with pytest.raises(AssertionError, match="nobody asked for"):
        watch.engine.step()


def test_an_observer_may_come_and_go_between_steps() -> None:
    watch = Watch(Setup.of(LAYOUTS["full"], 8))
    watch.submit(make_request("a", 4, 9))
    watch.step()
    watch.engine.observer = None
    watch.engine.step()
    assert len(watch.records) == 1
    watch.engine.observer = watch.records.append
    assert watch.step().decoded == ("a",)
