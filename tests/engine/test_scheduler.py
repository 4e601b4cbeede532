"""Scheduler and engine, driven with a toy runner whose tokens betray every wrong block, slot, position or stale row."""

from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from legato.engine.batch import Batch, StepResult
from legato.engine.engine import EngineStats
from legato.engine.policy import SCHEDULING_POLICIES, SchedulingPolicy, register_scheduling_policy
from legato.request import GenerationOutput, Request, RequestStatus
from legato.sampling_params import SamplingParams
from tests.cache.accounts import LAYOUTS
from tests.engine.checked import PLENTY, Setup
from tests.engine.toy import VOCAB_SIZE, make_request, toy_generate, toy_logprob, toy_prompt


class EngineMachine(RuleBasedStateMachine):
    """Submits, cancels, changes weights and steps at random, in caches that are too small."""

    @initialize(
        name=st.sampled_from(list(LAYOUTS)),
        num_usable=st.sampled_from((8, 12, 6, 4, 3, 2, 1, 16, 24)),
        crowd=st.sampled_from((2, 1, 3, 1)),
        window=st.sampled_from((8, 4, 5, 1, 2, 9, 13, 20)),
        page_size=st.sampled_from((4, 4, 5, 8)),
        policy=st.sampled_from(("fifo", "prefill_first")),
        max_batch_tokens=st.sampled_from((24, 16, 9, 9, 4, 2)),
        max_requests_per_batch=st.sampled_from((16, 8, 5, 3, 2)),
        safety_margin=st.sampled_from((0.0, 0.0, 0.15, 0.0, 0.5, 1.0)),
        sharing=st.sampled_from((True, True, False)),
        eviction=st.sampled_from(("lru", "newest_filled")),
        num_swap_units=st.sampled_from((0, PLENTY, 30, 12, 5)),
    )
    def make(self, name: str, num_usable: int, crowd: int, window: int, **settings: object) -> None:
        """An engine, and the longest requests it gets: about `crowd` of them fit in its cache."""
        layout = LAYOUTS[name]
        self.groups = layout.groups(window)
        while True:
            self.setup = Setup.of(layout, num_usable, window=window, **settings)
            longest = min(self.setup.blocks.max_tokens_alone(), 60)
            if longest:
                break
            num_usable += 1
        self.max_tokens = max(longest // crowd, min(longest, 9))
        self.all: list[Request] = []
        self.unfinished: dict[str, Request] = {}
        self.expected: dict[Request, list[int]] = {}
        self.num_computed: dict[Request, int] = {}  # the farthest each has come
        self.num_prefilled: dict[Request, int] = {}
        self.num_recomputed = 0
        self.num_finished = 0
        self.failed = False

    @precondition(lambda self: len(self.unfinished) < 12)
    @rule(
        lengths=st.lists(st.tuples(st.integers(1, 40) | st.just(60), st.integers(3, 30)), min_size=3, max_size=8),
        common=st.sampled_from((9, 4, 16, 24, 60, 0)),
        text=st.sampled_from(("one", "two", "again")),
        long_answers=st.booleans(),
        salts=st.sampled_from(((None,), (None, None, "a"), ("a", "b"))),
        priorities=st.sampled_from(((0,), (0, 0, 1), (5, -3, 0))),
        sampled=st.booleans(),
        stops=st.booleans(),
        streaming=st.booleans(),
    )
    def submit(
        self,
        lengths: list[tuple[int, int]],
        common: int,
        text: str,
        long_answers: bool,
        salts: tuple[str | None, ...],
        priorities: tuple[int, ...],
        sampled: bool,
        stops: bool,
        streaming: bool,
    ) -> None:
        """New requests that begin alike, perhaps under the names of ones that have ended."""
        for prompt_length, max_new_tokens in lengths:
            prompt_length = min(prompt_length, max(self.max_tokens // (3 if long_answers else 1), 1))
            request = make_request(
                next(name for name in map(str, count()) if name not in self.unfinished),
                self.prompt(text, common, prompt_length),
                # The last token is never read back: it needs no place.
                min(max_new_tokens, self.max_tokens - prompt_length + 1),
                stop_token_ids=frozenset(range(0, VOCAB_SIZE, 9) if stops else ()),
                params=SamplingParams(temperature=0.7, top_k=5, top_p=0.9) if sampled else None,
                seed=len(self.all),
                cache_salt=salts[len(self.all) % len(salts)],
                priority=priorities[len(self.all) % len(priorities)],
                streaming=streaming,
                record_timestamps=not streaming,
            )
            self.all.append(request)
            self.unfinished[request.request_id] = request
            self.expected[request] = toy_generate(self.groups, request)
            self.setup.submit(request)

    def prompt(self, text: str, common: int, length: int) -> list[int]:
        """The first tokens are those of a text, or of an earlier request and its answer; the others its own."""
        if text == "again" and self.all:
            earlier = self.all[len(self.all) // 2]
            beginning = earlier.prompt_ids + self.expected[earlier]
        else:
            beginning = toy_prompt(text, common)
        beginning = beginning[: min(common, length)]
        return beginning + toy_prompt(f"own {len(self.all)}", length - len(beginning))

    @precondition(lambda self: self.all)
    @rule(index=st.integers(0, 99))
    def cancel(self, index: int) -> None:
        """Running, waiting or ended long ago; seen by the next step."""
        self.cancel_and_step(self.all[-1 - index % len(self.all)])

    @precondition(lambda self: self.idlers())
    @rule(index=st.integers(0, 99))
    def cancel_one_that_is_offloaded_or_waits_for_a_page(self, index: int) -> None:
        idlers = self.idlers()
        self.cancel_and_step(idlers[index % len(idlers)])

    def idlers(self) -> list[Request]:
        setup = self.setup
        waiting = setup.scheduler.waiting
        return [r for name, r in waiting.items() if setup.blocks.is_offloaded(name) or name in setup.scheduler._awaited]

    def cancel_and_step(self, request: Request) -> None:
        self.setup.engine.cancel(request)
        self.check_step(cancelled={request} & set(self.unfinished.values()))

    @precondition(lambda self: self.unfinished)
    @rule(twice=st.booleans())
    def forget_prefixes(self, twice: bool) -> None:
        for _ in range(1 + twice):
            self.setup.engine.forget_prefixes()

    @precondition(lambda self: self.unfinished)
    @rule(times=st.integers(1, 8))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.check_step(cancelled=set())

    def check_step(self, cancelled: set[Request]) -> None:
        setup, engine = self.setup, self.setup.engine
        self.failed = True
        assert engine.has_work or not self.unfinished
        lengths = {request: request.num_generated_tokens for request in self.all}
        num_runs = setup.runner.num_runs
        outputs = engine.step()
        grown = [r for r in self.all if r.num_generated_tokens > lengths[r]]
        assert setup.runner.num_runs == num_runs + bool(set(self.unfinished.values()) - cancelled), "no progress"
        self._note_progress(grown)
        self._check_outputs(outputs, grown, cancelled)
        for request in self.unfinished.values():
            self._check_tokens(request)
            assert request not in grown or request.status is RequestStatus.DECODING
        setup.blocks.check()
        assert set(setup.blocks.tables) == set(setup.scheduler.running)
        assert set(setup.builder._rows) <= set(setup.scheduler.running)
        self._check_stats()
        self.failed = False

    def _note_progress(self, grown: list[Request]) -> None:
        for chunk in self.setup.scheduler.plan.chunks:
            request, end = chunk.request, chunk.request.num_computed_tokens
            before = self.num_computed.get(request, 0)
            assert end == len(request.tokens) - (request in grown) or request not in grown
            self.num_recomputed += max(min(end, before) - (end - chunk.num_tokens), 0)
            self.num_computed[request] = max(end, before)
            if request in self.setup.scheduler.prefilled:
                self.num_prefilled[request] = self.num_prefilled.get(request, 0) + chunk.num_tokens

    def _check_outputs(self, outputs: list[GenerationOutput], grown: list[Request], cancelled: set[Request]) -> None:
        """One final output for each request that ended, one partial output for each new token of a streaming one."""
        by_id = {output.request_id: output for output in outputs}
        assert len(by_id) == len(outputs)
        for request in list(self.unfinished.values()):
            output = by_id.pop(request.request_id, None)
            ended = request in cancelled or request.num_generated_tokens == len(self.expected[request])
            if output is None:
                assert not ended
                assert not (request.streaming and request in grown)
                continue
            assert output.is_finished() == ended
            assert ended or (request.streaming and request in grown)
            assert output.prompt_ids == request.prompt_ids
            assert output.generated_tokens == request.tokens[len(request.prompt_ids) :]
            assert output.num_cached_tokens == self.setup.blocks.num_found.get(request, 0)
            assert output.logprobs == [toy_logprob(token) for token in output.generated_tokens]
            assert (output.timestamps is None) == (request.timestamps is None)
            assert output.timestamps is None or len(output.timestamps) == len(output.generated_tokens)
            if ended:
                self._check_end(request, output, request in cancelled)
        assert not by_id, "an output of a request that had ended"

    def _check_end(self, request: Request, output: GenerationOutput, cancelled: bool) -> None:
        del self.unfinished[request.request_id]
        self.num_finished += 1
        self._check_tokens(request)
        if cancelled:
            assert (output.status, output.finish_reason) == (RequestStatus.FAILED, "cancelled")
            assert "cancelled" in output.error
            return
        stopped = output.generated_tokens[-1] in request.stop_token_ids
        assert (output.status, output.error) == (RequestStatus.FINISHED, None)
        assert output.finish_reason == ("stop" if stopped else "length")
        assert 0 < output.created_time + output.lifespan[0] <= output.lifespan[1]

    def _check_tokens(self, request: Request) -> None:
        assert request.tokens[: len(request.prompt_ids)] == request.prompt_ids
        generated = request.tokens[len(request.prompt_ids) :]
        assert generated == self.expected[request][: len(generated)]

    def _check_stats(self) -> None:
        stats, scheduler, blocks = self.setup.engine.stats, self.setup.scheduler, self.setup.blocks
        assert stats.num_steps == self.setup.runner.num_runs
        assert stats.num_running == len(scheduler.running)
        assert stats.num_waiting == self.setup.engine.num_waiting == len(scheduler.waiting)
        assert stats.num_running + stats.num_waiting == len(self.unfinished)
        assert stats.num_batch_requests == len(scheduler.plan.chunks)
        assert stats.num_batch_tokens == scheduler.plan.num_tokens
        assert stats.num_generated_tokens == sum(request.num_generated_tokens for request in self.all)
        assert stats.num_finished == self.num_finished
        assert stats.num_prompt_tokens == sum(self.num_prefilled.values())
        assert stats.num_cached_tokens == sum(blocks.num_found.values())
        assert stats.num_recomputed_tokens == self.num_recomputed
        assert (stats.num_resets, stats.num_offloads) == (scheduler.num_resets, scheduler.num_offloads)
        assert stats.num_offloaded == len(blocks.swapped)
        assert stats.cache_used_share == 1 - blocks.accounts.free_share
        if not stats.num_resets:
            assert not stats.num_recomputed_tokens
            for request in self.all:
                if request.num_generated_tokens:
                    assert self.num_prefilled[request] + request.num_cached_tokens == len(request.prompt_ids)
        if not scheduler.sharing:
            assert stats.num_cached_tokens == stats.num_evicted_blocks == 0
        if blocks.num_swap_units == PLENTY:
            assert not stats.num_resets

    def teardown(self) -> None:
        """Whatever was accepted comes to its end, and nothing is left behind."""
        if not hasattr(self, "setup") or self.failed:
            return
        for _ in range(3000):
            if not self.unfinished:
                break
            self.check_step(cancelled=set())
        assert not self.unfinished
        self.check_step(cancelled=set())
        assert not self.setup.engine.has_work
        self.setup.check_nothing_leaks()


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=200, stateful_step_count=30, deadline=None, report_multiple_bugs=False)


@pytest.mark.parametrize("policy", ["fifo", "prefill_first"])
@pytest.mark.parametrize(("sharing", "num_swap_units"), [(True, 0), (False, 0), (True, PLENTY), (False, 40)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_crowded_cache_changes_no_token(name: str, policy: str, sharing: bool, num_swap_units: int) -> None:
    """Short prompts with long answers: all are let in and then outgrow the cache together."""
    settings = {"policy": policy, "sharing": sharing, "num_swap_units": num_swap_units}
    num_usable = 2
    while (setup := Setup.of(LAYOUTS[name], num_usable, **settings)).blocks.max_tokens_alone() < 44:
        num_usable += 1
    requests = [make_request(str(i), 3 + i % 5, 30 + i, seed=i) for i in range(8)]
    setup.submit(*requests)
    outputs = {output.request_id: output for output in setup.run()}
    stats = setup.engine.stats
    assert stats.num_resets + stats.num_offloads > 0
    assert (stats.num_offloads > 0) == (num_swap_units > 0)
    assert num_swap_units < PLENTY or stats.num_resets == stats.num_recomputed_tokens == 0
    for request in requests:
        expected = toy_generate(LAYOUTS[name].groups(8), request)
        assert outputs[request.request_id].generated_tokens == expected
    setup.check_nothing_leaks()


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("fifo", {"decoding": 1, "prefilling": 6, "waiting": 3}),
        ("prefill_first", {"prefilling": 6, "decoding": 1, "waiting": 3}),
    ],
)
def test_order_of_a_step(policy: str, order: dict[str, int]) -> None:
    setup = Setup.of(LAYOUTS["full"], 30, policy=policy, max_batch_tokens=10)
    setup.submit(make_request("decoding", 4, 9), make_request("prefilling", 12, 9))
    setup.engine.step()
    assert list(setup.planned().items()) == [("decoding", 4), ("prefilling", 6)]
    setup.submit(make_request("waiting", 20), make_request("later", 1))
    setup.engine.step()
    assert list(setup.planned().items()) == list(order.items())


@pytest.mark.parametrize(("policy", "order"), [("fifo", "bdac"), ("prefill_first", "acbd")])
def test_order_of_running_requests_keeps_the_oldest_first_in_each_half(policy: str, order: str) -> None:
    requests = [make_request(name, 1) for name in "abcd"]
    for request in requests:
        request.status = RequestStatus.DECODING if request.request_id in "bd" else RequestStatus.PREFILLING
    assert "".join(r.request_id for r in SCHEDULING_POLICIES[policy].order(requests)) == order


def test_a_long_prompt_is_read_in_chunks_beside_decodes() -> None:
    setup = Setup.of(LAYOUTS["full"], 30, max_batch_tokens=8)
    setup.submit(make_request("decoding", 2, 9), make_request("long", 20, 2))
    steps = []
    for _ in range(5):
        setup.engine.step()
        steps.append(setup.planned())
    assert [step["decoding"] for step in steps] == [2, 1, 1, 1, 1]
    assert [step["long"] for step in steps if "long" in step] == [6, 7, 7, 1]


def test_the_request_limit_holds_back_the_next_request() -> None:
    setup = Setup.of(LAYOUTS["full"], 30, max_requests_per_batch=2)
    setup.submit(*(make_request(str(i), 2, 2) for i in range(3)))
    setup.engine.step()
    assert list(setup.planned()) == ["0", "1"]
    setup.engine.step()
    assert list(setup.planned()) == ["0", "1"]
    setup.engine.step()
    assert list(setup.planned()) == ["2"]


def test_no_prompt_starts_under_the_safety_margin() -> None:
    """Of 10 chunks, 4 are free once two prompts of 3 pages run: just enough for a third with a margin of 0.4."""
    for safety_margin, num_started in ((0.4, 3), (0.41, 2)):
        setup = Setup.of(LAYOUTS["full"], 10, safety_margin=safety_margin)
        setup.submit(*(make_request(str(i), 12, 3) for i in range(4)))
        setup.engine.step()
        assert len(setup.planned()) == num_started


def test_the_safety_margin_never_starves_a_lone_request() -> None:
    setup = Setup.of(LAYOUTS["full"], 4, safety_margin=1.0)
    setup.submit(make_request("first", 12, 5), make_request("second", 12, 5))
    assert [output.request_id for output in setup.run()] == ["first", "second"]


def test_a_large_request_at_the_head_is_not_overtaken_by_small_ones() -> None:
    setup = Setup.of(LAYOUTS["full"], 4)
    setup.submit(make_request("running", 4, 6), make_request("large", 16), make_request("small", 1))
    assert [output.request_id for output in setup.run()] == ["running", "large", "small"]


def test_the_more_urgent_start_first_and_else_who_came_first() -> None:
    setup = Setup.of(LAYOUTS["full"], 30, max_requests_per_batch=1)
    priorities = {"a": 0, "b": 3, "c": 0, "d": -2, "e": 3, "f": -2, "g": 1}
    setup.submit(*(make_request(name, 4, 2, priority=priority) for name, priority in priorities.items()))
    assert [output.request_id for output in setup.run()] == list("dfacgbe")


def test_the_least_urgent_leaves_a_full_cache_and_comes_back_before_its_likes() -> None:
    setup = Setup.of(LAYOUTS["full"], 6)
    setup.submit(*(make_request(name, 8, 9, priority=priority) for name, priority in (("low", 5), ("a", 0), ("b", 0))))
    setup.submit(make_request("later", 4, 9, priority=5))
    assert [output.request_id for output in setup.run()] == ["a", "b", "low", "later"]
    assert setup.scheduler.num_resets > 0


def test_blocks_that_come_free_go_to_a_stalled_request_before_a_waiting_one() -> None:
    """At position 7 a request gives back the first of two blocks (window and pages of 4), at 8 it needs another."""
    setup = Setup.of(LAYOUTS["sliding"], 4, window=4)
    setup.submit(make_request("a", 5, 9), make_request("b", 4, 9))
    for _ in range(3):
        setup.engine.step()
    setup.submit(make_request("c", 3, 2), make_request("d", 1, 2))
    setup.engine.step()
    assert setup.planned() == {"a": 1, "b": 1, "c": 3}
    setup.engine.step()
    assert setup.planned() == {"b": 1, "c": 1}
    assert setup.blocks.accounts.num_free_chunks > 0
    setup.engine.step()
    assert next(iter(setup.planned())) == "a"
    assert setup.engine.stats.num_resets == 0


def test_a_request_cancelled_before_it_was_taken_in_ends_without_running() -> None:
    setup = Setup.of(LAYOUTS["full"], 4)
    request = make_request("cancelled", 4, 6)
    setup.submit(request)
    setup.engine.cancel(request)
    setup.engine.cancel(request)
    (output,) = setup.engine.step()
    assert output.is_finished()
    assert (output.status, output.generated_tokens) == (RequestStatus.FAILED, [])
    assert setup.runner.num_runs == 0
    assert not setup.engine.has_work


def test_an_idle_step_does_nothing() -> None:
    setup = Setup.of(LAYOUTS["full"], 4)
    assert not setup.engine.has_work
    assert setup.engine.step() == []
    assert setup.engine.stats == EngineStats()


def test_every_prompt_token_is_counted_also_one_that_is_a_chunk_of_its_own() -> None:
    setup = Setup.of(LAYOUTS["full"], 9, max_batch_tokens=4)
    setup.submit(make_request("one token", 1, 3), make_request("nine tokens", 9, 3))
    setup.run()
    assert setup.engine.stats.num_prompt_tokens == 1 + 9
    assert setup.engine.stats.num_generated_tokens == 3 + 3


class FailingRunner:
    """Gives token 7 to every row, once; then it breaks."""

    def __init__(self) -> None:
        self.failed = True

    def weights_version(self) -> int:
        return 0

    weights_sample = weights_version

    def reread_weights(self) -> None:
        pass

    def run(self, batch: Batch) -> StepResult:
        self.failed = not self.failed
        if self.failed:
            raise RuntimeError("out of luck")
        return StepResult([7] * len(batch.logits_indices), [None] * len(batch.logits_indices))


def test_cancel_all_ends_running_waiting_and_just_submitted_requests() -> None:
    setup = Setup.of(LAYOUTS["2 full, 3 sliding"], 9, max_requests_per_batch=2, runner=FailingRunner())
    setup.submit(*(make_request(str(i), 3, 9) for i in range(3)))
    assert setup.engine.step() == []
    with pytest.raises(RuntimeError, match="out of luck"):
        setup.engine.step()
    setup.submit(make_request("3", 3, 9))
    outputs = setup.engine.cancel_all("RuntimeError: out of luck")
    assert [output.request_id for output in outputs] == ["0", "1", "2", "3"]
    assert {(o.status, o.error, o.finish_reason) for o in outputs} == {
        (RequestStatus.FAILED, "RuntimeError: out of luck", "cancelled")
    }
    assert [output.generated_tokens for output in outputs] == [[7], [7], [], []]
    assert [output.logprobs for output in outputs] == [[], [], [], []]
    assert not setup.engine.has_work
    setup.check_nothing_leaks()


def test_outputs_are_snapshots() -> None:
    setup = Setup.of(LAYOUTS["full"], 9)
    setup.submit(make_request("streaming", 3, 4, streaming=True, record_timestamps=True))
    partial, *_, final = setup.run()
    assert [len(o.generated_tokens) for o in (partial, final)] == [1, 4]
    assert [len(o.logprobs) for o in (partial, final)] == [1, 4]
    assert [len(o.timestamps) for o in (partial, final)] == [1, 4]
    assert (partial.status, final.status) == (RequestStatus.DECODING, RequestStatus.FINISHED)
    assert partial.finish_reason is None
    assert partial.lifespan[1] == -1
    assert 0 < partial.lifespan[0] == final.lifespan[0] < final.lifespan[1]


def test_a_policy_name_is_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = SchedulingPolicy(lambda running: list(running)[::-1], safety_margin=0.5)
    monkeypatch.setitem(SCHEDULING_POLICIES, "newest first", policy)
    monkeypatch.delitem(SCHEDULING_POLICIES, "newest first")  # and once more when the test is over
    register_scheduling_policy("newest first", policy)
    assert SCHEDULING_POLICIES["newest first"] is policy
    for name in ("newest first", "fifo"):
        with pytest.raises(ValueError, match=name):
            register_scheduling_policy(name, policy)


def test_a_request_left_alone_gets_to_its_end_however_its_blocks_lie() -> None:
    """A chunk holds 5 full blocks or 1 sliding one. A prompt of 7 pages alone takes 2 chunks and 7: all there are.
    Beside a prompt of 4 pages its full blocks begin in the chunk that this one left open, and lie in 3."""
    setup = Setup.of(LAYOUTS["3 full, 15 sliding"], 9, window=100, max_batch_tokens=16)
    assert setup.blocks.max_tokens_alone() == 28
    short, long = make_request("short", 13), make_request("long", 28)
    setup.submit(short, long)
    outputs = setup.run()
    assert [output.request_id for output in outputs] == ["short", "long"]
    assert outputs[1].generated_tokens == toy_generate(LAYOUTS["3 full, 15 sliding"].groups(100), long)
    setup.check_nothing_leaks()


@pytest.mark.parametrize("num_swap_units", [0, PLENTY])
@pytest.mark.parametrize("sharing", [False, True])
def test_a_request_left_alone_does_not_take_its_scattered_blocks_again(sharing: bool, num_swap_units: int) -> None:
    """As above, but what it has computed by the time it is stuck lies in 3 chunks of full blocks, where 2 would do.
    All of it is still in the cache, yet with these blocks it would be stuck again."""
    settings = {"window": 200, "max_batch_tokens": 16, "sharing": sharing, "num_swap_units": num_swap_units}
    setup = Setup.of(LAYOUTS["3 full, 15 sliding"], 12, **settings)
    assert setup.blocks.max_tokens_alone() == 40
    short, long = make_request("short", 13), make_request("long", 40)
    setup.submit(short, long)
    outputs = setup.run(max_steps=20)
    assert [output.request_id for output in outputs] == ["short", "long"]
    assert outputs[1].generated_tokens == toy_generate(setup.blocks.groups, long)
    assert setup.engine.stats.num_resets + setup.engine.stats.num_offloads == 1
    setup.check_nothing_leaks()


def test_layers_of_different_width_do_not_stop_decoding() -> None:
    """One wide full layer and three narrow sliding ones: a chunk holds 3 pages of the one or 12 of the others."""
    setup = Setup.of(LAYOUTS["wide full"], 2, window=8)
    setup.submit(make_request("a", 4, 5))
    (output,) = setup.run(max_steps=20)
    assert len(output.generated_tokens) == 5
