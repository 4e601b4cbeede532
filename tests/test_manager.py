"""Each row of SPEC's manager table, from one thread and from several at once."""

import asyncio
import gc
import random
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from legato import (
    ContinuousBatchingConfig,
    ContinuousBatchingManager,
    EngineError,
    GenerationConfig,
    GenerationOutput,
    InvalidValueError,
    ManagerStateError,
    QueueFullError,
    RequestStatus,
    WorkloadHints,
    enable,
)
from legato.cache.kv import KVCache
from legato.decoder.decoder import Decoder
from legato.decoder.weights import Weights
from legato.kernels.packing import PackedMatrix
from legato.request import RequestSpec
from legato.router import Inbox, LoopMail
from tests.parity.reference import reference
from tests.tiny import tiny_llama

LONG = 2000
CONFIG = ContinuousBatchingConfig(page_size=8, num_blocks=600, max_batch_tokens=64, max_requests_per_batch=16)
GENERATION = GenerationConfig(max_new_tokens=6, do_sample=False)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


@pytest.fixture
def manager(model: Any, request: pytest.FixtureRequest) -> Iterator[ContinuousBatchingManager]:
    manager = model.init_continuous_batching(GENERATION, getattr(request, "param", CONFIG))
    yield manager
    manager.stop(hard_stop=True)
    manager.destroy()


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    deadline = time.monotonic() + 5
    while engine_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not engine_threads()


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "legato-engine"]


def assert_nothing_leaked(manager: ContinuousBatchingManager) -> None:
    assert manager.stats.num_running == manager.stats.num_waiting == 0
    assert manager._thread._engine._blocks.pool.num_free == manager._thread._engine._blocks.pool.num_usable
    assert not manager._thread._engine._blocks.tables
    assert not manager._thread._engine._builder._rows


def in_thread(function: Callable[[], Any]) -> "Call":
    return Call(function)


class Call:
    """A call in a thread of its own; `result` waits for it, re-raises what it raised, and never waits for ever."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._outcome: list[Any] = []
        self._error: list[BaseException] = []
        self._function = function
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._outcome.append(self._function())
        except BaseException as error:  # noqa: BLE001 - handed to the waiting test
            self._error.append(error)

    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def result(self, timeout: float = 10) -> Any:
        self._thread.join(timeout)
        assert self.is_done(), "the call hangs"
        if self._error:
            raise self._error[0]
        return self._outcome[0]


# Life


def test_start_stop_and_start_again(manager: ContinuousBatchingManager) -> None:
    assert not manager.is_running()
    for _ in range(3):
        manager.start()
        assert manager.is_running()
        request_id = manager.add_request([5, 6, 7])
        manager.stop()
        assert not manager.is_running()
        assert manager.get_result(request_id).status is RequestStatus.FINISHED
    assert_nothing_leaked(manager)


def test_requests_added_before_the_start_run_after_it(manager: ContinuousBatchingManager) -> None:
    request_id = manager.add_request([5, 6, 7])
    assert manager.get_result(request_id, timeout=0.05) is None
    manager.start()
    assert len(manager.get_result(request_id, timeout=10).generated_tokens) == 6


def test_a_soft_stop_finishes_what_was_accepted_and_takes_no_more(
    manager: ContinuousBatchingManager, caplog: pytest.LogCaptureFixture
) -> None:
    manager.start()
    accepted = manager.add_requests([[i + 3] * (i + 1) for i in range(40)])
    manager.stop(block=False)
    assert manager.add_request([5]) is None
    assert manager.add_requests([[5], [6]]) == []
    assert "dropped" in caplog.text
    outputs = list(manager)
    assert Counter(output.request_id for output in outputs) == Counter(accepted)
    assert all(output.status is RequestStatus.FINISHED for output in outputs)
    assert_nothing_leaked(manager)


def test_a_hard_stop_fails_what_is_unfinished(manager: ContinuousBatchingManager) -> None:
    manager.start()
    ids = manager.add_requests([[i + 3] * 9 for i in range(30)], max_new_tokens=LONG)
    manager.stop(hard_stop=True)
    outputs = {output.request_id: output for output in manager}
    assert set(outputs) == set(ids)
    assert all(o.status is RequestStatus.FAILED and "RuntimeError" in o.error for o in outputs.values())
    assert_nothing_leaked(manager)


def test_a_hard_stop_hastens_a_soft_one(manager: ContinuousBatchingManager) -> None:
    manager.start()
    manager.add_request([5], max_new_tokens=LONG)
    soft = in_thread(manager.stop)
    time.sleep(0.05)
    assert not soft.is_done()
    manager.stop(hard_stop=True)
    soft.result()
    assert not manager.is_running()


def test_stop_keeps_its_timeout_and_the_work_goes_on(manager: ContinuousBatchingManager) -> None:
    manager.start()
    request_id = manager.add_request([5], max_new_tokens=600)
    started = time.monotonic()
    manager.stop(timeout=0.05)
    assert time.monotonic() - started < 1
    assert manager.is_running()
    assert len(manager.get_result(request_id, timeout=20).generated_tokens) == 600


def test_stopping_a_manager_that_never_started_fails_its_requests(manager: ContinuousBatchingManager) -> None:
    request_id = manager.add_request([5, 6])
    manager.stop()
    assert manager.get_result(request_id).status is RequestStatus.FAILED


def test_start_waits_for_a_stop_under_way(manager: ContinuousBatchingManager) -> None:
    manager.start()
    manager.add_request([5], max_new_tokens=100)
    manager.stop(block=False)
    manager.start()
    assert manager.is_running()
    assert manager.add_request([5]) is not None


def test_destroy_is_final(model: Any) -> None:
    manager = model.init_continuous_batching(GENERATION, CONFIG)
    manager.start()
    request_id = manager.add_request([5, 6])
    manager.destroy()
    assert manager.get_result(request_id).status is RequestStatus.FINISHED
    for call in (manager.start, lambda: manager.add_request([5]), lambda: manager.add_requests([[5]])):
        with pytest.raises(ManagerStateError, match="destroyed"):
            call()
    manager.stop()
    manager.destroy()
    manager.cancel_request("anything")
    assert manager.get_result() is None
    assert list(manager) == []


# Requests in


def test_an_id_in_use_is_refused_until_its_output_is_fetched(manager: ContinuousBatchingManager) -> None:
    manager.start()
    manager.add_request([5], "twice")
    with pytest.raises(InvalidValueError, match="'twice' is in use"):
        manager.add_request([5], "twice")
    assert manager.get_result("twice", timeout=10) is not None
    manager.add_request([5], "twice")
    assert manager.get_result("twice", timeout=10) is not None


def test_made_ids_never_meet_the_users_own(manager: ContinuousBatchingManager) -> None:
    mine = [manager.add_request([5], f"req_{i}") for i in range(5)]
    made = manager.add_requests([[5]] * 5)
    assert len({*mine, *made}) == 10


def test_results_of_many_are_in_input_order(manager: ContinuousBatchingManager) -> None:
    manager.start()
    prompts = [[i % 90 + 3] * (1 + i % 13) for i in range(50)]
    ids = manager.add_requests(prompts)
    assert [manager.get_result(i, timeout=20).prompt_ids for i in ids] == prompts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": []}, "input_ids is empty"),
        ({"input_ids": [97]}, "token id 97"),
        ({"input_ids": [-1]}, "token id -1"),
        ({"input_ids": ["a"]}, "input_ids"),
        ({"input_ids": "text"}, "input_ids"),
        ({"input_ids": [[1, 2]]}, "input_ids"),
        ({"input_ids": None}, "input_ids"),
        ({"input_ids": [1.5]}, "input_ids"),
        ({"input_ids": [5] * 4096}, "takes at most 4096"),
        ({"input_ids": [5] * 10, "max_new_tokens": 4790}, None),  # ends at the model's length, which the cache holds
        ({"input_ids": [5], "max_new_tokens": 0}, "max_new_tokens=0"),
        ({"input_ids": [5], "max_new_tokens": "6"}, "max_new_tokens='6'"),
        ({"input_ids": [5], "request_id": ""}, "request_id=''"),
        ({"input_ids": [5], "request_id": 7}, "request_id=7"),
        ({"input_ids": [5], "streaming": "yes"}, "streaming='yes'"),
        ({"input_ids": [5], "temperature": -1}, "temperature=-1"),
        ({"input_ids": [5], "temperature": float("nan")}, "temperature=nan"),
        ({"input_ids": [5], "top_p": 0}, "top_p=0"),
        ({"input_ids": [5], "top_k": 1.5}, "top_k=1.5"),
        ({"input_ids": [5], "seed": -3}, "seed=-3"),
        ({"input_ids": [5], "eos_token_id": "x"}, "eos_token_id='x'"),
        ({"input_ids": [5], "temprature": 1}, "'temprature'"),
    ],
)
def test_a_bad_request_is_refused_alone(
    manager: ContinuousBatchingManager, arguments: dict[str, Any], message: str | None
) -> None:
    manager.start()
    other = manager.add_request([5, 6, 7], max_new_tokens=50)
    if message is None:
        manager.cancel_request(manager.add_request(**arguments))
    else:
        with pytest.raises(InvalidValueError, match=message):
            manager.add_request(**arguments)
    assert len(manager.get_result(other, timeout=10).generated_tokens) == 50


def test_a_request_that_the_cache_can_never_hold_names_both_sizes(model: Any) -> None:
    config = ContinuousBatchingConfig(page_size=8, num_blocks=4)
    manager = model.init_continuous_batching(GENERATION, config)
    with pytest.raises(InvalidValueError, match=r"33 tokens must fit in the cache, which holds 32"):
        manager.add_request([5] * 20, max_new_tokens=14)
    manager.start()
    assert len(manager.get_result(manager.add_request([5] * 20, max_new_tokens=13)).generated_tokens) == 13
    manager.destroy()


def test_bad_prompts_among_many_fail_alone(manager: ContinuousBatchingManager) -> None:
    manager.start()
    ids = manager.add_requests([[5], [], [6], [500], [7] * 5000])
    outputs = [manager.get_result(i, timeout=10) for i in ids]
    assert [o.status is RequestStatus.FINISHED for o in outputs] == [True, False, True, False, False]
    assert all(o.error for o in outputs if o.status is RequestStatus.FAILED)
    with pytest.raises(InvalidValueError, match="top_p"):
        manager.add_requests([[5], [6]], top_p=3)


def test_a_full_queue_refuses_whole_submissions(model: Any) -> None:
    manager = model.init_continuous_batching(GENERATION, ContinuousBatchingConfig(num_blocks=4, max_queue_size=3))
    manager.add_requests([[5], [6]])
    with pytest.raises(QueueFullError, match="max_queue_size=3: 2 requests are waiting, 2 more"):
        manager.add_requests([[5], [6]])
    manager.add_request([7])
    with pytest.raises(QueueFullError):
        manager.add_request([8])
    manager.start()
    manager.stop()
    assert len(list(manager)) == 3
    manager.destroy()


def test_prompts_may_be_tensors_and_arrays(manager: ContinuousBatchingManager) -> None:
    manager.start()
    prompts = [[5, 6, 7], (5, 6, 7), torch.tensor([5, 6, 7]), torch.tensor([5, 6, 7]).numpy()]
    outputs = [manager.get_result(manager.add_request(p), timeout=10) for p in prompts]
    assert all(o.prompt_ids == [5, 6, 7] and o.generated_tokens == outputs[0].generated_tokens for o in outputs)


def test_timestamps_and_lifespan(manager: ContinuousBatchingManager) -> None:
    manager.start()
    output = manager.get_result(manager.add_request([5], record_timestamps=True), timeout=10)
    start, end = output.lifespan
    assert output.created_time <= start <= output.timestamps[0] <= output.timestamps[-1] <= end
    assert len(output.timestamps) == 6
    assert manager.get_result(manager.add_request([5]), timeout=10).timestamps is None


# Cancelling


def test_cancelling_a_running_a_waiting_and_a_finished_request(manager: ContinuousBatchingManager) -> None:
    manager.start()
    ids = manager.add_requests([[5]] * 20, max_new_tokens=LONG)
    first = manager.request_id_iter(ids[0])
    manager.cancel_request(ids[19])
    waiting = manager.get_result(ids[19], timeout=5)
    assert (waiting.status, waiting.finish_reason) == (RequestStatus.FAILED, "cancelled")
    for request_id in ids:
        manager.cancel_request(request_id)
    (output,) = list(first)
    assert output.finish_reason == "cancelled"
    for request_id in ids[1:19]:
        assert manager.get_result(request_id, timeout=5).finish_reason == "cancelled"
    manager.cancel_request(ids[0])
    manager.cancel_request("never heard of")
    manager.stop()
    assert_nothing_leaked(manager)


def test_a_late_cancel_does_not_hit_the_next_request_of_that_id(manager: ContinuousBatchingManager) -> None:
    manager.start()
    for _ in range(50):
        manager.add_request([5], "again", max_new_tokens=1)
        assert manager.get_result("again", timeout=5).finish_reason == "length"
        manager.cancel_request("again")


# Outputs out


def test_each_consumer_gets_its_own_outputs(manager: ContinuousBatchingManager) -> None:
    """Threads that wait by id beside one that takes whatever comes: nothing is lost, doubled, or late for anyone."""
    manager.start()
    mine = [f"mine_{i}" for i in range(20)]
    by_id = {request_id: in_thread(lambda r=request_id: manager.get_result(r, timeout=20)) for request_id in mine}
    time.sleep(0.1)
    assert all(call.result() is None for call in by_id.values())  # not known yet: nobody waits for what cannot come
    for request_id in mine:
        manager.add_request([5], request_id, max_new_tokens=30)
    by_id = {request_id: in_thread(lambda r=request_id: manager.get_result(r, timeout=20)) for request_id in mine}
    others = set(manager.add_requests([[6]] * 20))
    whatever = in_thread(lambda: list(manager))
    assert {call.result().request_id for call in by_id.values()} == set(mine)
    manager.stop()
    assert {output.request_id for output in whatever.result()} == others


def test_a_consumer_waiting_by_id_keeps_its_timeout(manager: ContinuousBatchingManager) -> None:
    manager.start()
    manager.add_request([5], "slow", max_new_tokens=LONG)
    for _ in range(10):
        manager.add_request([6], streaming=True)
    started = time.monotonic()
    assert manager.get_result("slow", timeout=0.2) is None
    assert 0.15 < time.monotonic() - started < 1


def test_streaming_gives_all_tokens_so_far(model: Any, manager: ContinuousBatchingManager) -> None:
    manager.start()
    manager.add_request([5, 6], "s", streaming=True)
    chunks = list(manager.request_id_iter("s"))
    assert [len(chunk.generated_tokens) for chunk in chunks] == [1, 2, 3, 4, 5, 6]
    assert [chunk.status for chunk in chunks] == [RequestStatus.DECODING] * 5 + [RequestStatus.FINISHED]
    assert chunks[-1].generated_tokens == reference(model, [5, 6], 6).tokens
    assert list(manager.request_id_iter("s")) == []


def test_the_session_threads_loop_ends_when_all_is_handed_out(model: Any) -> None:
    with model.continuous_batching_context_manager(GENERATION, CONFIG) as manager:
        ids = manager.add_requests([[5], [6], [7]])
        assert {output.request_id for output in manager} == set(ids)
        elsewhere = in_thread(lambda: list(manager))
        time.sleep(0.1)
        assert not elsewhere.is_done()
        again = manager.add_request([8])
    assert [output.request_id for output in elsewhere.result()] == [again]


def test_an_exception_in_a_session_stops_it_hard(model: Any) -> None:
    started = time.monotonic()
    with (
        pytest.raises(KeyError),
        model.continuous_batching_context_manager(GENERATION, CONFIG) as manager,
    ):
        manager.add_requests([[5]] * 50, max_new_tokens=LONG)
        raise KeyError("mine")
    assert time.monotonic() - started < 5
    assert not manager.is_running()


def test_handlers_get_every_output_of_their_request(manager: ContinuousBatchingManager) -> None:
    got: list[GenerationOutput] = []
    done = threading.Event()

    def handler(output: GenerationOutput) -> None:
        got.append(output)
        if output.is_finished():
            done.set()
            raise RuntimeError("a handler's error is its own")

    manager.add_request([5], "h", streaming=True)
    manager.register_result_handler("h", handler)
    manager.start()
    assert done.wait(10)
    assert [len(output.generated_tokens) for output in got] == [1, 2, 3, 4, 5, 6]
    assert manager.get_result(manager.add_request([5]), timeout=10).status is RequestStatus.FINISHED
    assert manager.is_running()


def test_a_handler_may_not_wait_for_its_own_thread(manager: ContinuousBatchingManager) -> None:
    errors: list[BaseException] = []
    done = threading.Event()

    def handler(_: GenerationOutput) -> None:
        for call in (manager.destroy, lambda: manager.pause().__enter__()):
            try:
                call()
            except ManagerStateError as error:
                errors.append(error)
        manager.stop()  # does not wait here
        done.set()

    manager.start()
    manager.add_request([5], "h")
    manager.register_result_handler("h", handler)
    assert done.wait(10)
    assert len(errors) == 2


def test_as_completed_needs_a_running_manager(manager: ContinuousBatchingManager) -> None:
    with pytest.raises(ManagerStateError, match="start"):
        next(manager.as_completed([RequestSpec([5])]))
    manager.start()
    specs = [RequestSpec([5 + i], max_new_tokens=9 - i, sampling={"top_p": 2 if i == 3 else 1}) for i in range(6)]
    outputs = dict(manager.as_completed(specs))
    assert [len(outputs[i].generated_tokens) for i in range(6)] == [9, 8, 7, 0, 5, 4]
    assert "top_p" in outputs[3].error


def test_a_handler_registered_late_gets_what_is_stored(manager: ContinuousBatchingManager) -> None:
    manager.start()
    manager.add_request([5], "h")
    manager.stop()
    got: list[GenerationOutput] = []
    manager.register_result_handler("h", got.append)
    assert [output.status for output in got] == [RequestStatus.FINISHED]
    assert manager.get_result("h") is None


def test_what_a_consumer_does_to_an_output_stays_there(manager: ContinuousBatchingManager) -> None:
    manager.start()
    manager.add_request([5, 6], "s", streaming=True)
    for chunk in manager.request_id_iter("s"):
        chunk.prompt_ids += chunk.generated_tokens
        chunk.generated_tokens.clear()
    assert len(manager.get_result(manager.add_request([5]), timeout=10).generated_tokens) == 6
    assert manager.is_running()


def test_a_handler_that_exits_harms_nobody(manager: ContinuousBatchingManager) -> None:
    def leave(_: GenerationOutput) -> None:
        raise SystemExit

    manager.add_request([5], "h")
    manager.register_result_handler("h", leave)
    manager.start()
    assert manager.get_result(manager.add_request([5]), timeout=10).status is RequestStatus.FINISHED


def test_asyncio(manager: ContinuousBatchingManager) -> None:
    manager.start()

    async def one(i: int) -> int:
        manager.add_request([5 + i], f"a{i}", streaming=True)
        return len([chunk async for chunk in manager.request_id_iter(f"a{i}")])

    async def by_handler() -> GenerationOutput:
        future: asyncio.Future[GenerationOutput] = asyncio.get_running_loop().create_future()
        manager.add_request([5], "handled")
        manager.register_result_handler("handled", future.set_result)
        return await future

    async def main() -> list[int]:
        counts = await asyncio.wait_for(asyncio.gather(*(one(i) for i in range(10))), 20)
        assert (await asyncio.wait_for(by_handler(), 20)).status is RequestStatus.FINISHED
        ids = manager.add_requests([[5]] * 5)
        manager.stop(block=False)
        assert {output.request_id async for output in manager} == set(ids)
        return counts

    assert asyncio.run(main()) == [6] * 10


def test_a_cancelled_task_loses_no_output(manager: ContinuousBatchingManager) -> None:
    manager.start()

    async def main() -> None:
        manager.add_request([5], "a", max_new_tokens=300)
        iterator = manager.request_id_iter("a")
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext(iterator), 0.01)
        output = await asyncio.wait_for(anext(iterator), 20)
        assert len(output.generated_tokens) == 300

    asyncio.run(main())


# Pausing


def test_no_step_runs_inside_pause(manager: ContinuousBatchingManager) -> None:
    manager.start()
    request_id = manager.add_request([5], max_new_tokens=400)
    with manager.pause():
        steps = manager.stats.num_steps
        with manager.pause():
            time.sleep(0.1)
        time.sleep(0.1)
        assert manager.stats.num_steps == steps
    assert len(manager.get_result(request_id, timeout=20).generated_tokens) == 400


def test_pauses_of_several_threads(manager: ContinuousBatchingManager) -> None:
    manager.start()
    request_id = manager.add_request([5], max_new_tokens=200)

    def pause_often() -> None:
        for _ in range(20):
            with manager.pause():
                steps = manager.stats.num_steps
                time.sleep(0.001)
                assert manager.stats.num_steps == steps

    for call in [in_thread(pause_often) for _ in range(4)]:
        call.result()
    assert len(manager.get_result(request_id, timeout=20).generated_tokens) == 200


def test_stopping_inside_pause(manager: ContinuousBatchingManager) -> None:
    manager.start()
    manager.add_request([5], max_new_tokens=LONG)
    with manager.pause():
        with pytest.raises(ManagerStateError, match="wait for ever"):
            manager.stop()
        in_thread(lambda: manager.stop(hard_stop=True)).result()
        assert not manager.is_running()


def test_starting_where_it_could_only_wait_for_ever(manager: ContinuousBatchingManager) -> None:
    manager.start()
    manager.add_request([5], max_new_tokens=LONG)
    with manager.pause():
        manager.stop(block=False)
        with pytest.raises(ManagerStateError, match="wait for ever"):
            manager.start()
    manager.stop(hard_stop=True)


def test_weights_changed_in_a_pause_are_used_at_once() -> None:
    model = tiny_llama()
    with model.continuous_batching_context_manager(GENERATION, CONFIG) as manager:
        before = manager.get_result(manager.add_request([5, 6, 7]), timeout=10)
        with manager.pause(), torch.no_grad():
            model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
        after = manager.get_result(manager.add_request([5, 6, 7]), timeout=10)
    assert after.generated_tokens != before.generated_tokens
    assert after.generated_tokens == reference(model, [5, 6, 7], 6).tokens


# Failing


class Planted(Exception):
    """The planted failure."""


def plant_failure(model: Any) -> Callable[[], None]:
    """Make forward passes raise from the next one on, the model's and the fused decoder's; returns how to undo it."""

    def fail(*_: Any, **__: Any) -> None:
        raise Planted("boom")

    patch = pytest.MonkeyPatch()
    patch.setattr(Decoder, "forward", fail)
    hook = model.model.register_forward_pre_hook(fail)

    def undo() -> None:
        patch.undo()
        hook.remove()

    return undo


@pytest.mark.parametrize("manager", [CONFIG, replace(CONFIG, fused_decoder=False)], indirect=True, ids=["fused", "own"])
def test_a_failed_engine_wakes_everyone_with_the_cause(model: Any, manager: ContinuousBatchingManager) -> None:
    manager.start()
    for request_id in ("a", "b", "c"):
        manager.add_request([5], request_id, max_new_tokens=LONG)
    handled: list[GenerationOutput] = []
    manager.register_result_handler("c", handled.append)

    async def async_for() -> None:
        async for _ in manager:
            pass

    waiters = [
        in_thread(lambda: manager.get_result("a")),
        in_thread(lambda: manager.get_result()),
        in_thread(lambda: list(manager)),
        in_thread(lambda: list(manager.request_id_iter("b"))),
        in_thread(lambda: asyncio.run(async_for())),
        in_thread(lambda: model.generate_batch([[5]] * 3, None, manager.config, max_new_tokens=LONG)),
    ]
    while len(engine_threads()) < 2:  # generate_batch's engine is up, too
        time.sleep(0.01)
    time.sleep(0.2)
    undo = plant_failure(model)
    try:
        started = time.monotonic()
        for waiter in waiters:
            with pytest.raises(EngineError, match="Planted: boom") as caught:
                waiter.result(timeout=5)
            assert isinstance(caught.value.__cause__, Planted)
        assert time.monotonic() - started < 1
        for call in (lambda: manager.add_request([5]), manager.start, manager.get_result, lambda: next(iter(manager))):
            with pytest.raises(EngineError, match="boom") as caught:
                call()
            assert isinstance(caught.value.__cause__, Planted)
        assert [output.status for output in handled] == [RequestStatus.FAILED]
        assert not manager.is_running()
        manager.stop()
        manager.destroy()
    finally:
        undo()
    assert model.config._attn_implementation == "sdpa"


def test_outputs_finished_before_a_failure_are_not_lost(model: Any, manager: ContinuousBatchingManager) -> None:
    manager.start()
    manager.add_request([5], "good")
    while manager.stats.num_finished < 1:
        time.sleep(0.01)
    undo = plant_failure(model)
    manager.add_request([5], "bad")
    with pytest.raises(EngineError):
        manager.get_result("bad", timeout=5)
    undo()
    assert manager.get_result("good").status is RequestStatus.FINISHED
    with pytest.raises(EngineError):
        manager.get_result("good")


def test_who_iterates_gets_what_finished_before_a_failure(model: Any, manager: ContinuousBatchingManager) -> None:
    """Though it comes to him after it."""
    manager.start()
    specs = [RequestSpec([5], 2), RequestSpec([6], 2), RequestSpec([7], LONG, streaming=True, eos_token_id=-1)]

    async def ask() -> list[int]:
        finished = []
        with pytest.raises(EngineError, match="boom"):
            async for index, output in manager.as_completed_async(specs):
                while manager.stats.num_finished < 2:  # the loop stands still, and nothing is handed on
                    time.sleep(0.001)
                if manager.is_running():
                    undo.append(plant_failure(model))
                    while manager.is_running():
                        time.sleep(0.001)
                if output.is_finished():
                    finished.append(index)
        return finished

    undo: list[Callable[[], None]] = []
    try:
        assert asyncio.run(ask()) == [0, 1]
    finally:
        for one in undo:
            one()


# On the model


def test_generate_batch_in_input_order(model: Any) -> None:
    prompts = [[i + 3] * (i % 7 + 1) for i in range(25)]
    outputs = model.generate_batch(prompts, GENERATION, CONFIG, progress_bar=False)
    assert [output.prompt_ids for output in outputs.values()] == prompts
    assert [o.generated_tokens for o in outputs.values()] == [reference(model, p, 6).tokens for p in prompts]
    assert model.generate_batch([]) == {}


def test_generate_batch_takes_generation_settings_as_keywords(model: Any) -> None:
    (output,) = model.generate_batch([[5, 6]], continuous_batching_config=CONFIG, max_new_tokens=3).values()
    assert len(output.generated_tokens) == 3
    with pytest.raises(InvalidValueError, match="'max_new_toks'"):
        model.generate_batch([[5, 6]], max_new_toks=3)
    with pytest.raises(InvalidValueError, match="num_beams=4"):
        model.generate_batch([[5, 6]], num_beams=4)
    (output,) = model.generate_batch([[5, 6]], continuous_batching_config=CONFIG).values()
    assert output.generated_tokens == model.generate(torch.tensor([[5, 6]]), do_sample=False)[0, 2:].tolist()


def test_processors_are_dropped_with_a_warning_or_refused(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    generation = GenerationConfig(max_new_tokens=2, guidance_scale=1.5)
    model.generate_batch([[5]], generation, CONFIG)
    assert "guidance_scale" in caplog.text
    strict = ContinuousBatchingConfig(page_size=8, num_blocks=8, drop_unsupported_processors=False)
    with pytest.raises(InvalidValueError, match="guidance_scale"):
        model.generate_batch([[5]], generation, strict)


def test_a_persistent_manager_is_kept_and_reused(model: Any) -> None:
    managers = []
    for max_new_tokens in (2, 5):
        generation = GenerationConfig(max_new_tokens=max_new_tokens)
        with model.continuous_batching_context_manager(generation, CONFIG, persistent_manager=True) as manager:
            managers.append(manager)
            assert len(manager.get_result(manager.add_request([5]), timeout=10).generated_tokens) == max_new_tokens
        assert not manager.is_running()
    assert managers[0] is managers[1]
    other = ContinuousBatchingConfig(page_size=4, num_blocks=50)
    with model.continuous_batching_context_manager(GENERATION, other) as manager:
        assert manager is not managers[0]


def test_a_persistent_manager_lives_and_dies_with_its_use(model: Any) -> None:
    def persistent() -> list[GenerationOutput]:
        return list(model.generate_batch([[5]], GENERATION, CONFIG, persistent_manager=True).values())

    assert persistent()[0].status is RequestStatus.FINISHED
    kept = model._legato.manager
    model.generate_batch([[5]], GENERATION, ContinuousBatchingConfig(page_size=4, num_blocks=20))
    assert model._legato.manager is None
    with pytest.raises(ManagerStateError):
        kept.start()
    assert persistent()[0].status is RequestStatus.FINISHED
    undo = plant_failure(model)
    with pytest.raises(EngineError):
        persistent()
    undo()
    assert model._legato.manager is None
    assert persistent()[0].status is RequestStatus.FINISHED
    model._legato.manager.destroy()
    model._legato.manager = None


def test_max_tokens_is_another_name_of_max_new_tokens(manager: ContinuousBatchingManager) -> None:
    manager.start()
    assert len(manager.get_result(manager.add_request([5], max_tokens=3), timeout=10).generated_tokens) == 3


def test_two_managers_of_one_model_take_turns(model: Any) -> None:
    prompts = [[i + 3] * 5 for i in range(10)]
    expected = [reference(model, p, 6).tokens for p in prompts]
    calls = [in_thread(lambda: model.generate_batch(prompts, GENERATION, CONFIG)) for _ in range(3)]
    for call in calls:
        assert [output.generated_tokens for output in call.result(30).values()] == expected


def test_models_that_share_a_config_object() -> None:
    models = [tiny_llama(), tiny_llama()]
    models[1].config = models[1].model.config = models[0].config
    for module in models[1].modules():
        if hasattr(module, "config"):
            module.config = models[0].config
    with torch.no_grad():
        models[1].lm_head.weight.copy_(models[1].lm_head.weight.flip(0))
    prompts = [[i + 3] * 5 for i in range(10)]
    expected = [[reference(model, p, 6).tokens for p in prompts] for model in models]
    for _ in range(3):
        calls = [in_thread(lambda m=model: m.generate_batch(prompts, GENERATION, CONFIG)) for model in models]
        for call, tokens in zip(calls, expected, strict=True):
            assert [output.generated_tokens for output in call.result(30).values()] == tokens
    assert models[0].config._attn_implementation == "sdpa"


def test_serving_inside_inference_mode(model: Any) -> None:
    with torch.inference_mode():
        (output,) = model.generate_batch([[5, 6]], GENERATION, CONFIG).values()
    assert output.generated_tokens == reference(model, [5, 6], 6).tokens


def test_a_persistent_manager_notices_that_the_model_was_cast() -> None:
    model = tiny_llama()
    model.generate_batch([[5]], GENERATION, CONFIG, persistent_manager=True)
    model.to(torch.bfloat16)
    (output,) = model.generate_batch([[5]], GENERATION, CONFIG, persistent_manager=True).values()
    assert output.status is RequestStatus.FINISHED
    model._legato.manager.destroy()


def test_config_inside_the_generation_config_still_works(model: Any) -> None:
    generation = GenerationConfig(max_new_tokens=2)
    generation.continuous_batching_config = ContinuousBatchingConfig(page_size=4, num_blocks=7)
    with pytest.warns(FutureWarning, match="continuous_batching_config"):
        manager = model.init_continuous_batching(generation)
    assert manager.config.num_blocks == 7
    manager.destroy()


def test_a_model_in_training_mode_is_served_without_dropout_and_trains_on() -> None:
    model = tiny_llama(attention_dropout=0.9)
    expected = reference(model, [5, 6, 7], 6).tokens
    model.train()
    frozen = model.model.layers[0].mlp.eval()
    (output,) = model.generate_batch([[5, 6, 7]], GENERATION, CONFIG).values()
    assert output.generated_tokens == expected
    assert model.training and model.model.layers[1].training and not frozen.training
    model(torch.tensor([[5, 6, 7]]), labels=torch.tensor([[5, 6, 7]])).loss.backward()
    assert model.lm_head.weight.grad is not None


def test_copies_and_pickles_of_a_served_model_work(tmp_path: Any) -> None:
    import copy

    model = tiny_llama()
    model.generate_batch([[5]], GENERATION, CONFIG, persistent_manager=True)
    twin = copy.deepcopy(model)
    assert twin._legato.manager is None
    with torch.no_grad():
        twin.lm_head.weight.copy_(twin.lm_head.weight.flip(0))
    (output,) = twin.generate_batch([[5, 6]], GENERATION, CONFIG).values()
    assert output.generated_tokens == reference(twin, [5, 6], 6).tokens
    torch.save(model, tmp_path / "model.pt")
    loaded = enable(torch.load(tmp_path / "model.pt", weights_only=False))
    (output,) = loaded.generate_batch([[5, 6]], GENERATION, CONFIG).values()
    assert output.generated_tokens == reference(model, [5, 6], 6).tokens
    assert set(model.state_dict()) == set(twin.state_dict())
    model._legato.manager.destroy()


def test_transformers_own_config_class_is_converted(model: Any) -> None:
    from transformers import ContinuousBatchingConfig as TransformersConfig

    page = "page_size" if hasattr(TransformersConfig, "page_size") else "block_size"  # as of its release
    config = TransformersConfig(**{page: 16}, num_blocks=20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        manager = model.init_continuous_batching(GENERATION, config)
    assert (manager.config.page_size, manager.config.num_blocks) == (16, 20)
    manager.destroy()


def test_workload_hints_size_the_cache(model: Any) -> None:
    hints = WorkloadHints(max_prompt_length=20, max_generated_length=12, num_requests=3)
    manager = model.init_continuous_batching(GENERATION, ContinuousBatchingConfig(page_size=8), hints)
    assert 12 <= manager._facts.size.num_blocks <= 16
    manager.destroy()


# All of it at once


def test_a_request_cancelled_the_moment_it_was_submitted_ends_once(manager: ContinuousBatchingManager) -> None:
    """Whichever of the two the engine sees first."""
    manager.start()
    ids = []
    for _ in range(300):
        ids.append(manager.add_request([5] * 30, max_new_tokens=2))
        manager.cancel_request(ids[-1])
    manager.stop()
    finals = Counter(output.request_id for output in manager)
    assert finals == Counter(ids)


@pytest.mark.slow
def test_random_lives_end_with_nothing_left(model: Any) -> None:
    """200 random sequences of start, add, cancel, pause, stop, hard stop and restart, by three threads each."""
    config = ContinuousBatchingConfig(page_size=4, num_blocks=40, max_batch_tokens=32, max_requests_per_batch=6)
    for seed in range(200):
        manager = model.init_continuous_batching(GENERATION, config)
        accepted: set[str] = set()
        finals: Counter[str] = Counter()
        lock = threading.Lock()

        def collect(output: GenerationOutput | None, finals: Counter = finals, lock: Any = lock) -> None:
            if output is not None and output.is_finished():
                with lock:
                    finals[output.request_id] += 1

        def live(rng: random.Random, manager: Any = manager, accepted: set = accepted, lock: Any = lock) -> None:
            for _ in range(8):
                action = rng.choice(["start", "add", "add", "adds", "cancel", "stop", "hard", "get", "pause", "wait"])
                if action == "start":
                    manager.start()
                elif action == "add":
                    request_id = manager.add_request(
                        [rng.randrange(3, 90)] * rng.randrange(1, 30), max_new_tokens=rng.randrange(1, 40),
                        streaming=rng.random() < 0.3,
                    )  # fmt: skip
                    with lock:
                        accepted.update({request_id} - {None})
                elif action == "adds":
                    ids = manager.add_requests([[rng.randrange(3, 90)] * rng.randrange(20) for _ in range(4)])
                    with lock:
                        accepted.update(ids)
                elif action == "cancel":
                    with lock:
                        known = sorted(accepted)
                    if known:
                        manager.cancel_request(rng.choice(known))
                elif action == "get":
                    collect(manager.get_result(timeout=0.001))
                elif action == "pause":
                    with manager.pause():
                        time.sleep(0.001)
                elif action == "wait":
                    time.sleep(0.003)
                else:
                    manager.stop(block=rng.random() < 0.5, hard_stop=action == "hard")

        rngs = [random.Random(f"{seed}-{thread}") for thread in range(3)]
        calls = [in_thread(lambda rng=rng: live(rng)) for rng in rngs]
        for call in calls:
            call.result(30)
        manager.stop(hard_stop=seed % 2 == 0)
        for output in manager:
            collect(output)
        assert finals == Counter(dict.fromkeys(accepted, 1))
        assert_nothing_leaked(manager)
        manager.destroy()
    assert not engine_threads()


@pytest.mark.parametrize("fused_decoder", [True, False])
def test_what_a_manager_took_goes_with_it(fused_decoder: bool) -> None:
    """At once, not when a collector comes by: caches and packed weights are gigabytes in a few objects."""
    model, config = tiny_llama(), ContinuousBatchingConfig(page_size=16, num_blocks=64, fused_decoder=fused_decoder)

    def count() -> int:
        return sum(type(one) in (Weights, PackedMatrix, Decoder, KVCache) for one in gc.get_objects())

    gc.collect()
    before = count()
    gc.disable()
    try:
        manager = model.init_continuous_batching(GenerationConfig(max_new_tokens=8, eos_token_id=-1), config)
        with manager.session():
            manager.add_requests([[1, 2, 3], [4, 5], [6]], temperature=1.0)
            during = count()
            outputs = list(manager)
        manager.destroy()
        del manager
        assert len(outputs) == 3 and during > before
        assert count() == before
    finally:
        gc.enable()


@pytest.mark.parametrize("last_token", range(4))
def test_a_handler_that_comes_late_is_given_outputs_in_order_and_one_at_a_time(
    manager: ContinuousBatchingManager, last_token: int
) -> None:
    lengths, inside, is_over = list[int](), threading.Lock(), threading.Event()

    def handle(output: GenerationOutput) -> None:
        assert inside.acquire(blocking=False)
        time.sleep(0.002)
        lengths.append(len(output.generated_tokens))
        inside.release()
        if output.is_finished():
            is_over.set()

    with manager.session():
        request_id = manager.add_request([1, 2, last_token], max_new_tokens=300, streaming=True, eos_token_id=-1)
        while manager.stats.num_generated_tokens < 20:
            time.sleep(0.001)
        manager.register_result_handler(request_id, handle)
        assert is_over.wait(30)
    assert lengths == sorted(set(lengths)) and lengths[0] == 1 and lengths[-1] == 300


def test_outputs_of_the_last_step_come_though_no_other_follows(manager: ContinuousBatchingManager) -> None:
    tokens: list[int] = []

    async def take() -> None:
        spec = RequestSpec([5, 6, 7], 3000, streaming=True, eos_token_id=-1)
        async for _, output in manager.as_completed_async([spec]):
            tokens[:] = output.generated_tokens

    def pause(started: threading.Event, over: threading.Event) -> None:
        with manager.pause():
            started.set()
            assert over.wait(30)

    async def ask() -> None:
        loop, started, over = asyncio.get_running_loop(), threading.Event(), threading.Event()
        taking = asyncio.ensure_future(take())
        while not tokens:
            await asyncio.sleep(0.001)
        pausing = loop.run_in_executor(None, pause, started, over)
        await loop.run_in_executor(None, started.wait)
        deadline = time.monotonic() + 10
        try:
            while len(tokens) < manager.stats.num_generated_tokens and time.monotonic() < deadline:
                await asyncio.sleep(0.01)
            assert len(tokens) == manager.stats.num_generated_tokens < 3000
        finally:
            over.set()
            await pausing
            taking.cancel()

    with manager.session():
        asyncio.run(ask())


@pytest.mark.parametrize("interval", [0.005, 3600.0])
def test_between_the_first_and_the_last_part_streams_wait(interval: float) -> None:
    config = ContinuousBatchingConfig(page_size=16, num_blocks=400, stream_interval=interval)
    manager = ContinuousBatchingManager(tiny_llama(), GenerationConfig(eos_token_id=-1), config)

    async def lengths() -> list[int]:
        spec = RequestSpec([5, 6, 7], 700, streaming=True)
        return [len(output.generated_tokens) async for _, output in manager.as_completed_async([spec])]

    with manager.session():
        found = asyncio.run(lengths())
    assert sorted(set(found)) == found and found[-1] == 700
    assert len(found) <= 2 if interval > 1 else len(found) >= 3


def test_who_waits_for_a_first_or_last_output_is_woken_and_nobody_else() -> None:
    """Of two consumers with one interval."""

    def partial(request_id: str, length: int) -> GenerationOutput:
        return GenerationOutput(request_id, generated_tokens=[5] * length)

    async def run() -> None:
        mail, inboxes = LoopMail(asyncio.get_running_loop(), 3600.0), (Inbox(), Inbox())
        send = [mail.handler(inbox) for inbox in inboxes]

        async def arrives(which: int) -> int | None:
            mail.wake()
            try:
                return len((await asyncio.wait_for(inboxes[which].get(), 0.05)).generated_tokens)
            except TimeoutError:
                return None

        send[0](partial("a", 2))
        assert await arrives(0) == 2  # the first, of however many tokens
        send[0](partial("a", 4))
        send[1](partial("b", 1))
        assert await arrives(1) == 1
        assert await arrives(0) is None
        send[1](partial("b", 2))
        assert await arrives(1) is None
        send[0](GenerationOutput("a", generated_tokens=[5] * 9, status=RequestStatus.FINISHED))
        assert await arrives(0) == 9 and await arrives(0) is None  # what came before is in it, and not told after it
        assert await arrives(1) is None

    asyncio.run(run())


def test_a_loop_that_was_closed_is_written_to_in_vain() -> None:
    loop = asyncio.new_event_loop()
    mail, inbox = LoopMail(loop, 0.0), Inbox()
    loop.close()
    mail.handler(inbox)(GenerationOutput("a"))
    mail.wake()


def test_a_slow_consumer_in_asyncio_gets_the_latest(manager: ContinuousBatchingManager) -> None:
    specs = [RequestSpec([5, 6, 7 + i], 40, streaming=True) for i in range(3)]

    async def ask(num_finished: int) -> tuple[int, dict[int, list[int]]]:
        """How many outputs came, and the final ones; one who is slow takes no second before so many have finished."""
        lengths: list[list[int]] = [[], [], []]
        tokens = {}
        async for index, output in manager.as_completed_async(specs):
            lengths[index].append(len(output.generated_tokens))
            tokens[index] = output.generated_tokens
            while manager.stats.num_finished < num_finished:
                await asyncio.sleep(0.01)
        assert all(sorted(set(of)) == of and of[-1] == 40 for of in lengths)
        return sum(map(len, lengths)), tokens

    async def many() -> list[tuple[int, dict[int, list[int]]]]:
        return list(await asyncio.gather(*(ask(0) for _ in range(8))))

    with manager.session():
        count, tokens = asyncio.run(ask(3))
        assert count < 20
        assert tokens == {
            index: output.generated_tokens for index, output in manager.as_completed(specs) if output.is_finished()
        }
        assert all(told[1] == tokens for told in asyncio.run(many()))
