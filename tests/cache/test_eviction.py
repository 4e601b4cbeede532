"""Eviction policies against lists that are searched from end to end."""

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from legato.cache.eviction import EVICTION_POLICIES, LeastRecentlyUsed, NewestFilled

NUM_CHUNKS = 7


def longest_idle(idle: Sequence[int], filled: Sequence[int]) -> int:
    """The chunk that was let go before all others."""
    return idle[0]


def newest_filled(idle: Sequence[int], filled: Sequence[int]) -> int:
    """The chunk that was given content after all others."""
    return next(chunk for chunk in reversed(filled) if chunk in idle)


FIRST_TO_GO = {"lru": longest_idle, "newest_filled": newest_filled}


class EvictionMachine(RuleBasedStateMachine):
    """Does with chunks what a pool does, and remembers it all.

    Attributes:
        owned: chunks that somebody owns.
        idle: chunks that nobody owns, in the order in which they were let go.
        filled: chunks as they were given content, each time anew.
    """

    @initialize(name=st.sampled_from(sorted(EVICTION_POLICIES)))
    def make(self, name: str) -> None:
        self.policy = EVICTION_POLICIES[name]()
        self.first_to_go = FIRST_TO_GO[name]
        self.owned = list(range(NUM_CHUNKS))
        self.idle: list[int] = []
        self.filled: list[int] = []

    @rule(index=st.integers(0, 99), times=st.integers(1, 3))
    def fill(self, index: int, times: int) -> None:
        """A chunk of several blocks is given content several times."""
        if self.owned:
            for _ in range(times):
                self.give_content(self.owned[index % len(self.owned)])

    @rule(indices=st.lists(st.integers(0, 99), min_size=1, max_size=NUM_CHUNKS))
    def let_go(self, indices: list[int]) -> None:
        """The blank ones are none of a policy's business, so they are filled before."""
        for index in indices:
            if self.owned:
                chunk = self.owned[index % len(self.owned)]
                if chunk not in self.filled:
                    self.give_content(chunk)
                self.add(chunk)

    @rule(index=st.integers(0, 99), times=st.sampled_from((1, 1, 2, 150)))
    def hit(self, index: int, times: int) -> None:
        """Owned again with its content; and let go and hit once more, as often as it may be."""
        if self.idle:
            chunk = self.idle[index % len(self.idle)]
            self.remove(chunk)
            for _ in range(times - 1):
                self.add(chunk)
                self.remove(chunk)

    @rule()
    def evict(self) -> None:
        if self.idle:
            expected = self.first_to_go(self.idle, self.filled)
            assert self.policy.pop() == expected
            self.idle.remove(expected)
            self.owned.append(expected)
            self.filled = [chunk for chunk in self.filled if chunk != expected]

    def give_content(self, chunk: int) -> None:
        self.policy.filled(chunk)
        self.filled.append(chunk)

    def add(self, chunk: int) -> None:
        self.policy.add(chunk)
        self.owned.remove(chunk)
        self.idle.append(chunk)

    def remove(self, chunk: int) -> None:
        self.policy.remove(chunk)
        self.idle.remove(chunk)
        self.owned.append(chunk)

    @invariant()
    def it_holds_what_was_added_and_not_taken_out(self) -> None:
        assert len(self.policy) == len(self.idle)

    def teardown(self) -> None:
        """All go in the order in which they should."""
        while getattr(self, "idle", None) and len(self.policy):
            self.evict()


TestEviction = EvictionMachine.TestCase
TestEviction.settings = settings(max_examples=200, stateful_step_count=60, deadline=None, report_multiple_bugs=False)


def test_every_policy_is_tested_here() -> None:
    assert FIRST_TO_GO.keys() == EVICTION_POLICIES.keys()


@pytest.mark.parametrize("make", EVICTION_POLICIES.values(), ids=EVICTION_POLICIES)
def test_each_pool_gets_a_policy_of_its_own(make: type) -> None:
    one, other = make(), make()
    one.filled(2)
    one.add(2)
    assert (len(one), len(other)) == (1, 0)


def test_the_least_recently_used_goes_first_also_when_it_was_filled_last() -> None:
    policy = LeastRecentlyUsed()
    for chunk in (2, 3, 4):
        policy.filled(chunk)
    for chunk in (4, 2, 3):
        policy.add(chunk)
    policy.remove(4)
    policy.add(4)
    assert [policy.pop() for _ in range(3)] == [2, 3, 4]


def test_the_newest_filled_goes_first_however_often_it_was_hit() -> None:
    policy = NewestFilled()
    for chunk in (2, 3, 4):
        policy.filled(chunk)
        policy.add(chunk)
    policy.remove(4)
    policy.add(4)
    policy.remove(2)
    policy.filled(2)
    policy.add(2)
    assert [policy.pop() for _ in range(3)] == [2, 4, 3]


def test_what_the_newest_filled_keeps_of_removed_chunks_does_not_pile_up() -> None:
    policy = NewestFilled()
    policy.filled(2)
    for _ in range(10_000):
        policy.add(2)
        policy.remove(2)
    assert len(policy._heap) < 100
