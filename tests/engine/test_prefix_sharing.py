"""Requests that begin alike share what they have in common: named examples on the toy engine."""

import pytest

from legato.engine.engine import EngineStats
from legato.request import Request, RequestStatus
from tests.cache.accounts import LAYOUTS
from tests.engine.checked import PLENTY, Setup
from tests.engine.toy import make_request, toy_generate, toy_prompt

COMMON = toy_prompt("common", 100)


def check_tokens(setup: Setup, *requests: Request, weights: int = 0) -> None:
    """Each has ended, with the tokens it would have got alone."""
    for request in requests:
        assert request.status is RequestStatus.FINISHED
        assert request.tokens[len(request.prompt_ids) :] == toy_generate(setup.blocks.groups, request, weights)


def finish(setup: Setup, *requests: Request) -> EngineStats:
    setup.submit(*requests)
    setup.run()
    check_tokens(setup, *requests)
    setup.check_nothing_leaks()
    return setup.engine.stats


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_identical_prompts_submitted_together_compute_the_prompt_once_in_one_step(name: str) -> None:
    setup = Setup.of(LAYOUTS[name], 30)
    first, second = (make_request(name, COMMON[:10], 5) for name in ("first", "second"))
    setup.submit(first, second)
    assert setup.step() == {"first": 10, "second": 2}
    assert setup.engine.stats.num_prompt_tokens == 10 + 2
    assert setup.engine.stats.num_cached_tokens == 8
    finish(setup)
    check_tokens(setup, first, second)


def test_identical_prompts_beyond_the_budget_are_computed_once_in_chunks() -> None:
    setup = Setup.of(LAYOUTS["full"], 30, max_batch_tokens=8)
    first, second = (make_request(name, COMMON[:20], 3) for name in ("first", "second"))
    other = make_request("other", 9, 2)
    setup.submit(first, second, other)
    assert [setup.step() for _ in range(3)] == [{"first": 8}, {"first": 8}, {"first": 4, "second": 4}]
    assert [setup.step() for _ in range(2)] == [
        {"first": 1, "second": 1, "other": 6},
        {"first": 1, "second": 1, "other": 3},
    ]
    assert setup.step() == {"other": 1}
    check_tokens(setup, first, second, other)
    assert setup.engine.stats.num_prompt_tokens == 20 + 4 + 9


def waiting_for_a_page(window: int, num_swap_units: int = 0) -> Setup:
    """All blocks are owned; "computing" got fewer tokens than it wanted, and "waiting" awaits what it computes next."""
    setup = Setup.of(LAYOUTS["sliding"], 7, window=window, max_batch_tokens=16, num_swap_units=num_swap_units)
    alike = [make_request(name, COMMON[:36], 3) for name in ("computing", "waiting")]
    setup.submit(make_request("running", 5, 30), *alike)
    assert setup.step() == {"running": 5, "computing": 11}
    assert setup.step() == {"running": 1, "computing": {20: 9, 8: 13}[window]}
    assert list(setup.scheduler._awaited) == ["waiting"]
    return setup


def test_a_request_that_waits_for_a_page_computes_it_when_the_one_that_was_to_is_cancelled() -> None:
    setup = waiting_for_a_page(window=8)
    waiting, computing = setup.scheduler.waiting["waiting"], setup.scheduler.running["computing"]
    setup.engine.cancel(computing)
    assert setup.step() == {"running": 1, "waiting": 12}
    assert waiting.num_cached_tokens == 24
    finish(setup)
    check_tokens(setup, waiting)


@pytest.mark.parametrize("num_swap_units", [0, PLENTY])
def test_a_request_that_waits_for_a_page_gets_to_its_end_when_the_one_that_was_to_compute_it_is_evicted(
    num_swap_units: int,
) -> None:
    setup = waiting_for_a_page(20, num_swap_units)
    requests = [*setup.scheduler.running.values(), *setup.scheduler.waiting.values()]
    assert setup.step() == {"running": 1}
    stats = setup.engine.stats
    assert (stats.num_resets, stats.num_offloads) == ((0, 1) if num_swap_units else (1, 0))
    assert list(setup.scheduler.waiting) == ["computing", "waiting"]
    finish(setup)
    check_tokens(setup, *requests)


def test_a_request_that_waits_for_a_page_can_itself_be_cancelled() -> None:
    setup = waiting_for_a_page(window=8)
    others = list(setup.scheduler.running.values())
    setup.engine.cancel(setup.scheduler.waiting["waiting"])
    finish(setup)
    check_tokens(setup, *others)


@pytest.mark.parametrize(("length", "computed"), [(1, 1), (4, 4), (5, 1), (7, 3), (8, 4), (9, 1), (40, 4)])
def test_a_prompt_that_is_cached_computes_the_rest_of_its_last_page_and_never_nothing(
    length: int, computed: int
) -> None:
    setup = Setup.of(LAYOUTS["full"], 30)
    finish(setup, make_request("first", COMMON[:length], 3))
    second = make_request("second", COMMON[:length], 3)
    setup.submit(second)
    assert setup.step() == {"second": computed}
    finish(setup)
    check_tokens(setup, second)
    assert second.output().num_cached_tokens == length - computed


def test_each_request_knows_how_many_of_its_tokens_were_cached() -> None:
    setup = Setup.of(LAYOUTS["full"], 60, max_requests_per_batch=1)
    lengths = {"none": (0, 20), "two pages": (8, 3), "not three": (11, 9), "all": (20, 0), "none again": (3, 20)}
    requests = [make_request("source", COMMON[:20])]
    requests += [make_request(name, COMMON[:n] + toy_prompt(name, own)) for name, (n, own) in lengths.items()]
    stats = finish(setup, *requests)
    assert [request.output().num_cached_tokens for request in requests] == [0, 0, 8, 8, 16, 0]
    assert stats.num_cached_tokens == 8 + 8 + 16
    assert stats.num_prompt_tokens + stats.num_cached_tokens == sum(len(request.prompt_ids) for request in requests)


def test_a_shared_prefix_outlives_the_request_that_computed_it() -> None:
    setup = Setup.of(LAYOUTS["full"], 30)
    first, second = (make_request(name, COMMON[:12] + toy_prompt(name, 2), n) for name, n in (("1", 1), ("2", 12)))
    setup.submit(first, second)
    assert setup.step() == {"1": 14, "2": 2}
    third = make_request("3", COMMON[:12] + toy_prompt("3", 2), 3)
    setup.submit(third)
    assert setup.step() == {"2": 1, "3": 2}
    finish(setup, make_request("other", 30))
    assert finish(setup, make_request("4", COMMON[:13])).num_cached_tokens == 36
    check_tokens(setup, first, second, third)


def test_a_prefix_that_had_to_make_room_is_computed_again() -> None:
    setup = Setup.of(LAYOUTS["full"], 5)
    finish(setup, make_request("first", COMMON[:16]))
    assert finish(setup, make_request("large", 20)).num_evicted_blocks == 4
    assert finish(setup, make_request("second", COMMON[:16])).num_cached_tokens == 0


def test_the_end_of_a_prefix_makes_room_before_its_beginning() -> None:
    """Of 5 blocks 4 hold the first prompt; the other takes the fifth and one of these."""
    setup = Setup.of(LAYOUTS["full"], 5)
    finish(setup, make_request("first", COMMON[:16]))
    assert finish(setup, make_request("other", 8)).num_evicted_blocks == 1
    assert finish(setup, make_request("second", COMMON[:16] + toy_prompt("own", 1))).num_cached_tokens == 12


def test_a_page_that_was_left_incomplete_is_not_shared() -> None:
    setup = Setup.of(LAYOUTS["full"], 30, max_batch_tokens=6)
    first, second = (make_request(name, COMMON[:20], 3) for name in ("first", "second"))
    setup.submit(first, second)
    assert setup.step() == {"first": 6}
    setup.engine.cancel(first)
    finish(setup)
    check_tokens(setup, second)
    assert second.num_cached_tokens == 4


def test_different_salts_never_share() -> None:
    setup = Setup.of(LAYOUTS["full"], 60, max_batch_tokens=200)
    salts = (None, "a", "b", "a", None, "1", "0")
    requests = [make_request(str(i), COMMON[:20], 3, cache_salt=salt) for i, salt in enumerate(salts)]
    finish(setup, *requests)
    assert [request.num_cached_tokens for request in requests] == [0, 0, 0, 16, 16, 0, 0]


def test_nothing_is_shared_when_sharing_is_off() -> None:
    setup = Setup.of(LAYOUTS["full"], 30, sharing=False)
    setup.submit(*(make_request(str(i), COMMON[:20], 3) for i in range(2)))
    assert setup.step() == {"0": 20, "1": 20}
    assert not {b for t in setup.blocks.tables["0"] for b in t.blocks} & {
        b for t in setup.blocks.tables["1"] for b in t.blocks
    }
    stats = finish(setup, make_request("2", COMMON[:20], 3))
    assert (stats.num_cached_tokens, stats.num_evicted_blocks, stats.num_prompt_tokens) == (0, 0, 60)
    assert not any(allocator.num_cached_blocks for allocator in setup.blocks.allocators)


@pytest.mark.parametrize("name", ["full", "two windows", "2 full, 3 sliding"])
def test_an_answer_is_shared_with_the_prompt_that_repeats_it(name: str) -> None:
    """The first answer's last token was never in the cache: 6 + 13 tokens were, in 4 complete pages."""
    setup = Setup.of(LAYOUTS[name], 30)
    first = make_request("first", COMMON[:6], 14)
    finish(setup, first)
    second = make_request("second", first.tokens + toy_prompt("and then", 5), 6)
    finish(setup, second)
    assert second.num_cached_tokens == 16


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "full"])
def test_sliding_layers_share_a_prefix_in_the_middle_of_a_longer_prompt(name: str) -> None:
    setup = Setup.of(LAYOUTS[name], 60, max_batch_tokens=5)
    finish(setup, make_request("first", COMMON[:45], 4))
    second = make_request("second", COMMON[:23] + toy_prompt("second", 9), 4)
    finish(setup, second)
    assert second.num_cached_tokens == 20


@pytest.mark.parametrize(("length", "cached"), [(16, 0), (20, 0), (24, 24), (28, 28), (32, 32)])
def test_a_hit_needs_the_full_prefix_and_only_the_last_window_of_the_sliding_one(length: int, cached: int) -> None:
    """A prompt of 8 pages read page by page takes 8 chunks for the full layer and 8 for the sliding one, which gives
    each back as its window (two pages) moves on. Of 12 chunks, 8 and 4 hold what is left: sliding pages 4 to 7."""
    setup = Setup.of(LAYOUTS["1 full, 1 sliding"], 12, window=8, max_batch_tokens=4)
    finish(setup, make_request("first", COMMON[:32]))
    assert setup.engine.stats.num_evicted_blocks == 4
    longer = make_request("longer", COMMON[:length] + toy_prompt("own", 1))
    finish(setup, longer)
    assert longer.num_cached_tokens == cached


def test_sliding_layers_alone_need_the_last_window_only() -> None:
    setup = Setup.of(LAYOUTS["sliding"], 4, window=8, max_batch_tokens=4)
    finish(setup, make_request("first", COMMON[:80]))
    second = make_request("second", COMMON[:80] + toy_prompt("own", 3), 5)
    finish(setup, second)
    assert second.num_cached_tokens == 80


def test_requests_that_share_a_prefix_run_together_however_often_it_is_read() -> None:
    """10 chunks hold a prefix of 4 blocks and one more block for each of 6 requests, which read 30 blocks in a pass."""
    setup = Setup.of(LAYOUTS["full"], 10, max_batch_tokens=64)
    requests = [make_request(str(i), COMMON[:16] + toy_prompt(str(i), 1), 3) for i in range(6)]
    setup.submit(*requests)
    assert [len(setup.step()) for _ in range(3)] == [6, 6, 6]
    assert not setup.engine.has_work
    check_tokens(setup, *requests)
    assert setup.engine.stats.num_prompt_tokens == 17 + 5


# Weights


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("name", ["full", "sliding", "two windows"])
def test_what_starts_after_a_change_of_weights_shares_nothing_from_before(name: str, told: bool) -> None:
    """Neither with a request that has ended nor with one that runs."""
    setup = Setup.of(LAYOUTS[name], 30, max_batch_tokens=64)
    finish(setup, make_request("ended", COMMON[:20], 3))
    setup.submit(make_request("running", COMMON[:40], 20))
    setup.step()
    assert setup.engine.stats.num_cached_tokens == 20
    change_weights(setup, told)
    after = [make_request(str(i), COMMON[: 19 + i], 9) for i in range(3)]
    setup.submit(*after)
    setup.run()
    check_tokens(setup, *after, weights=1)
    assert [request.num_cached_tokens for request in after] == [0, 16, 20]
    setup.check_nothing_leaks()


def change_weights(setup: Setup, told: bool) -> None:
    setup.runner.weights += 1
    if told:
        setup.engine.forget_prefixes()


@pytest.mark.parametrize("told", [True, False])
def test_a_page_begun_before_a_change_of_weights_is_not_shared_after_it(told: bool) -> None:
    """Its first page was not yet complete, so that it had no hash yet."""
    setup = Setup.of(LAYOUTS["full"], 30)
    running = make_request("running", COMMON[:3], 12)
    setup.submit(running)
    setup.step()
    change_weights(setup, told)
    setup.submit(make_request("other", 5))
    for _ in range(6):
        setup.step()
    after = make_request("after", running.tokens[:9], 5)
    setup.submit(after)
    setup.run()
    check_tokens(setup, after, weights=1)
    assert after.num_cached_tokens == 0


@pytest.mark.parametrize("told", [True, False])
def test_a_request_in_the_queue_shares_nothing_from_before_a_change_of_weights(told: bool) -> None:
    setup = Setup.of(LAYOUTS["full"], 30, max_requests_per_batch=1)
    waiting = make_request("waiting", COMMON[:20], 5)
    setup.submit(make_request("running", COMMON[:20], 5), waiting)
    for _ in range(3):
        setup.step()
    change_weights(setup, told)
    setup.run()
    check_tokens(setup, waiting, weights=1)
    assert waiting.num_cached_tokens == 0


def test_a_request_that_waits_for_a_page_does_not_take_it_after_a_change_of_weights() -> None:
    setup = waiting_for_a_page(window=8)
    waiting = setup.scheduler.waiting["waiting"]
    change_weights(setup, told=True)
    setup.run()
    check_tokens(setup, waiting, weights=1)
    setup.check_nothing_leaks()


def test_what_is_computed_after_a_change_of_weights_is_shared_again() -> None:
    setup = Setup.of(LAYOUTS["full"], 30)
    finish(setup, make_request("before", COMMON[:20]))
    change_weights(setup, told=True)
    after = [make_request(f"after {i}", COMMON[:20], 4) for i in range(2)]
    for request in after:
        setup.submit(request)
        setup.run()
    check_tokens(setup, *after, weights=1)
    assert [request.num_cached_tokens for request in after] == [0, 16]
