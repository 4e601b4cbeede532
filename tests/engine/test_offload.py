"""What happens when running requests cannot get the blocks they need: the rules one by one, on the toy engine.

In the full layout a block is a chunk and a host unit; a prompt of 8 tokens takes 2 blocks, and its first answer token
needs a third.
"""

import pytest

from legato.request import Request, RequestStatus
from legato.sampling_params import SamplingParams
from tests.cache.accounts import LAYOUTS
from tests.engine.checked import PLENTY, Setup
from tests.engine.toy import make_request, toy_generate, toy_prompt


def check_tokens(setup: Setup, *requests: Request, weights: int = 0) -> None:
    for request in requests:
        assert request.status is RequestStatus.FINISHED
        assert request.tokens[len(request.prompt_ids) :] == toy_generate(setup.blocks.groups, request, weights)


def crowd(num_usable: int, names: str, num_swap_units: int = PLENTY, **settings: object) -> tuple[Setup, list[Request]]:
    """Requests, all running, that have filled the cache or nearly so and now need a block each."""
    setup = Setup.of(LAYOUTS["full"], num_usable, num_swap_units=num_swap_units, **settings)
    requests = [make_request(name, 8, 5, seed=i) for i, name in enumerate(names)]
    setup.submit(*requests)
    assert setup.step() == dict.fromkeys(names, 8)
    return setup, requests


def finish(setup: Setup, requests: list[Request]) -> None:
    setup.run()
    check_tokens(setup, *requests)
    setup.check_nothing_leaks()


def test_the_newest_is_offloaded_when_that_is_enough_and_the_others_run_in_the_same_step() -> None:
    setup, requests = crowd(6, "abc")
    assert setup.step() == {"a": 1, "b": 1}
    assert setup.mover.calls == [("offload", 1, 2)]
    assert list(setup.scheduler.waiting) == ["c"]
    assert (setup.engine.stats.num_offloads, setup.engine.stats.num_offloaded) == (1, 1)
    finish(setup, requests)


def test_as_many_are_offloaded_as_it_takes_newest_first_all_in_one_transfer() -> None:
    """One would free 2 blocks for three requests; two free 4 for two."""
    setup, requests = crowd(8, "abcd")
    assert setup.step() == {"a": 1, "b": 1}
    assert setup.mover.calls == [("offload", 2, 4)]
    assert list(setup.scheduler.waiting) == ["c", "d"]
    finish(setup, requests)


def test_none_is_offloaded_beyond_what_frees_enough() -> None:
    """ "a" takes the block that is left over. With the two of "d" the others can go on."""
    setup, requests = crowd(9, "abcd")
    assert setup.step() == {"a": 1}
    assert setup.mover.calls == [("offload", 1, 2)]
    assert setup.step() == {"a": 1, "b": 1, "c": 1}
    finish(setup, requests)


def test_one_that_is_in_the_steps_batch_is_never_offloaded_though_it_is_the_newest() -> None:
    setup = Setup.of(LAYOUTS["full"], 4, num_swap_units=PLENTY)
    requests = [make_request("stalled", 8, 5), make_request("newest", 6, 5)]
    setup.submit(*requests)
    setup.step()
    assert setup.step() == {"newest": 1}
    assert list(setup.scheduler.waiting) == ["stalled"]
    assert setup.engine.stats.num_offloads == 1
    finish(setup, requests)


def test_stalled_requests_beside_a_batch_leave_only_as_far_as_the_others_need_it() -> None:
    """Both "a" and "b" lack a block while "small" runs: "b" goes, and "a" has room in the next step."""
    setup = Setup.of(LAYOUTS["full"], 6, num_swap_units=PLENTY)
    requests = [make_request("a", 8, 5), make_request("b", 8, 5), make_request("small", 6, 2)]
    setup.submit(*requests)
    setup.step()
    assert setup.step() == {"small": 1}
    assert list(setup.scheduler.running) == ["a"]
    assert list(setup.scheduler.waiting) == ["b"]
    assert setup.step()["a"] == 1
    finish(setup, requests)


def test_the_last_running_request_stays() -> None:
    setup, requests = crowd(4, "ab")
    assert setup.step() == {"a": 1}
    assert list(setup.scheduler.running) == ["a"]
    finish(setup, requests)


def test_a_request_that_was_offloaded_goes_on_where_it_was_with_nothing_computed_again() -> None:
    setup, requests = crowd(6, "abc")
    c = requests[2]
    setup.step()
    assert (c.status, c.num_computed_tokens, c.num_generated_tokens) == (RequestStatus.DECODING, 8, 1)
    while "c" not in (planned := setup.step()):
        pass
    assert planned["c"] == 1
    finish(setup, requests)
    stats = setup.engine.stats
    assert (stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_recomputed_tokens) == (24, 0, 0)
    assert stats.num_generated_tokens == 15
    assert stats.num_resets == 0


@pytest.mark.parametrize("num_swap_units", [0, 1])
def test_without_room_on_the_host_a_request_starts_over(num_swap_units: int) -> None:
    setup, requests = crowd(6, "abc", num_swap_units)
    c = requests[2]
    assert setup.step() == {"a": 1, "b": 1}
    assert setup.mover.calls == []
    assert (c.status, c.num_computed_tokens, c.num_generated_tokens) == (RequestStatus.PENDING, 0, 1)
    assert list(setup.scheduler.waiting) == ["c"]
    finish(setup, requests)
    stats = setup.engine.stats
    assert (stats.num_resets, stats.num_offloads) == (1, 0)
    # Its 8 prompt tokens again, or as many as the cache no longer held; its generated token was never computed.
    assert 0 < stats.num_recomputed_tokens <= 8
    assert stats.num_cached_tokens == 0
    assert c.output().num_cached_tokens == 0


def test_a_soft_reset_computes_all_again_when_nothing_is_shared() -> None:
    setup, requests = crowd(6, "abc", 0, sharing=False)
    finish(setup, requests)
    stats = setup.engine.stats
    assert stats.num_recomputed_tokens == 8
    assert stats.num_prompt_tokens == 24 + 8 + 1  # and the token that it had generated


def test_a_request_that_starts_over_finds_its_own_pages() -> None:
    """As long as nobody took its blocks. That is no new hit: its prompt was computed by itself."""
    setup, (a, b, c, d) = crowd(9, "abcd", 0)
    setup.step()
    for request in (b, c):
        setup.engine.cancel(request)
    assert setup.step() == {"a": 1, "d": 1}
    finish(setup, [a, d])
    stats = setup.engine.stats
    assert (stats.num_resets, stats.num_recomputed_tokens, stats.num_cached_tokens) == (1, 0, 0)
    assert d.output().num_cached_tokens == 0


def test_those_that_fit_on_the_host_go_there_and_the_others_start_over() -> None:
    """The newest takes 2 of 3 units; the next needs 2."""
    setup, requests = crowd(8, "abcd", 3)
    assert setup.step() == {"a": 1, "b": 1}
    assert setup.mover.calls == [("offload", 1, 2)]
    assert [request.num_computed_tokens for request in requests] == [9, 9, 0, 8]
    assert list(setup.scheduler.waiting) == ["c", "d"]
    finish(setup, requests)
    assert (setup.engine.stats.num_resets, setup.engine.stats.num_offloads) == (1, 1)


def test_all_that_come_back_in_a_step_come_in_one_transfer() -> None:
    setup, requests = crowd(8, "abcd", sharing=False)
    setup.step()
    while setup.engine.stats.num_offloaded == 2:
        setup.step()
    assert setup.mover.calls == [("offload", 2, 4), ("restore", 2, 4)]
    assert setup.planned() == {"c": 1, "d": 1}
    finish(setup, requests)


def test_host_memory_is_used_again_and_again() -> None:
    """It has room for one request at a time."""
    setup, requests = crowd(6, "abc", 2)
    finish(setup, requests)
    for i in range(1, 4):
        assert (setup.engine.stats.num_resets, setup.engine.stats.num_offloads) == (0, i)
        requests = [make_request(f"{name}{i}", 8, 5) for name in "abc"]
        setup.submit(*requests)
        finish(setup, requests)


def test_a_cancelled_request_gives_its_host_memory_back_at_once() -> None:
    setup, (a, b, c) = crowd(6, "abc")
    setup.step()
    assert setup.blocks.swap.num_free == PLENTY - 2
    setup.engine.cancel(c)
    outputs = setup.engine.step()
    assert setup.blocks.swap.num_free == PLENTY
    (output,) = [output for output in outputs if output.request_id == "c"]
    assert (output.finish_reason, output.generated_tokens) == ("cancelled", toy_generate(setup.blocks.groups, c)[:1])
    assert setup.engine.stats.num_offloaded == 0
    finish(setup, [a, b])


def test_cancel_all_gives_all_host_memory_back() -> None:
    setup, _ = crowd(8, "abcd")
    setup.step()
    assert {output.request_id for output in setup.engine.cancel_all("broken")} == set("abcd")
    assert setup.engine.stats.num_offloaded == 0
    setup.check_nothing_leaks()


def test_pages_that_are_still_in_the_cache_are_shared_and_not_copied_back() -> None:
    """Of the 2 blocks that "c" left, one is taken: its last one, since a prefix outlives what follows it."""
    setup, requests = crowd(7, "abc")
    setup.step()
    finish(setup, requests)
    assert setup.mover.calls == [("offload", 1, 2), ("restore", 1, 1)]


def test_nothing_is_copied_back_when_all_is_still_in_the_cache() -> None:
    """ "d" left for the sake of "b" and "c", which end before they take its blocks."""
    setup, (a, b, c, d) = crowd(9, "abcd")
    setup.step()
    for request in (b, c):
        setup.engine.cancel(request)
    assert setup.step() == {"a": 1, "d": 1}
    assert setup.mover.calls == [("offload", 1, 2)]
    finish(setup, [a, d])


def test_pages_that_others_own_are_copied_to_the_host_but_not_back() -> None:
    """Two of the 3 pages of "b" are also those of "a". That one may end first, so the host keeps all three."""
    common = toy_prompt("common", 8)
    setup = Setup.of(LAYOUTS["full"], 6, num_swap_units=PLENTY)
    requests = [make_request(name, common + toy_prompt(name, 4), n) for name, n in (("a", 5), ("b", 3))]
    other = make_request("other", 6, 3)
    setup.submit(other, *requests)
    assert setup.step() == {"other": 6, "a": 12, "b": 4}
    assert setup.step() == {"other": 1}
    assert setup.mover.calls == [("offload", 1, 3)]
    finish(setup, [*requests, other])
    assert setup.mover.calls[1:] == [("restore", 1, 1)]


def test_sampled_requests_go_on_with_the_same_random_numbers() -> None:
    setup = Setup.of(LAYOUTS["full"], 6, num_swap_units=PLENTY)
    params = SamplingParams(temperature=0.7, top_k=50, top_p=0.9)
    requests = [make_request(str(i), 8, 14, params=params, seed=i) for i in range(3)]
    setup.submit(*requests)
    finish(setup, requests)
    assert setup.engine.stats.num_offloads > 0
    assert len({tuple(request.tokens[8:]) for request in requests}) == 3


@pytest.mark.parametrize("sharing", [True, False])
def test_a_prompt_that_is_offloaded_half_read_goes_on_with_its_other_half(sharing: bool) -> None:
    settings = {"window": 20, "max_batch_tokens": 16, "sharing": sharing, "num_swap_units": PLENTY}
    setup = Setup.of(LAYOUTS["sliding"], 7, **settings)
    requests = [make_request("older", 5, 30), make_request("prompt", 36, 3)]
    setup.submit(*requests)
    assert [setup.step() for _ in range(2)] == [{"older": 5, "prompt": 11}, {"older": 1, "prompt": 9}]
    while setup.engine.stats.num_offloads == 0:
        setup.step()
    assert (requests[1].status, requests[1].num_computed_tokens) == (RequestStatus.PREFILLING, 20)
    finish(setup, requests)
    assert setup.engine.stats.num_prompt_tokens == 5 + 36
    assert setup.engine.stats.num_recomputed_tokens == 0


@pytest.mark.parametrize("name", LAYOUTS)
def test_with_enough_host_memory_nothing_is_ever_computed_again(name: str) -> None:
    num_usable = next(n for n in range(1, 60) if Setup.of(LAYOUTS[name], n).blocks.max_tokens_alone() >= 40)
    setup = Setup.of(LAYOUTS[name], num_usable + 2 * (name == "sliding"), num_swap_units=PLENTY)
    requests = [make_request(str(i), 5 + i, 30, seed=i) for i in range(6)]
    setup.submit(*requests)
    finish(setup, requests)
    stats = setup.engine.stats
    assert stats.num_offloads > 0
    assert stats.num_resets == stats.num_recomputed_tokens == 0
    assert stats.num_prompt_tokens + stats.num_cached_tokens == sum(5 + i for i in range(6))


def test_what_an_offloaded_request_computed_is_not_shared_after_a_change_of_weights() -> None:
    setup, requests = crowd(6, "abc")
    setup.step()
    assert setup.engine.stats.num_offloaded == 1
    setup.runner.weights = 1
    setup.engine.forget_prefixes()
    after = [make_request(f"like {r.request_id}", r.prompt_ids + r.tokens[8:9], 6) for r in requests]
    setup.submit(*after)
    setup.run()
    check_tokens(setup, *after, weights=1)
    assert [request.num_cached_tokens for request in after] == [0, 0, 0]
    setup.check_nothing_leaks()
