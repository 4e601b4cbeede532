"""The optimal policy against every possible choice of evictions."""

from functools import cache
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from legato.simulate.optimum import optimal_hits

# A tree of blocks: block 10 × parent + child; a request is the way from the root to a block.
blocks = st.lists(st.integers(1, 2), min_size=1, max_size=3).map(
    lambda path: [int("".join(map(str, path[: i + 1]))) for i in range(len(path))]
)


def best_by_trying_all(requests: list[list[int]], num_blocks: int) -> int:
    @cache
    def best(now: int, cached: frozenset[int]) -> int:
        if now == len(requests):
            return 0
        found = 0
        while found < len(requests[now]) and requests[now][found] in cached:
            found += 1
        wanted = cached | set(requests[now])
        # While the request runs, its own blocks stay; after it, any others may have gone.
        kept = [block for block in wanted if block not in requests[now]]
        room = num_blocks - len(requests[now])
        choices = combinations(kept, min(room, len(kept)))
        return found + max(best(now + 1, frozenset(choice) | set(requests[now])) for choice in choices)

    return best(0, frozenset())


@settings(max_examples=300, deadline=None)
@given(requests=st.lists(blocks, min_size=1, max_size=7), num_blocks=st.integers(3, 7))
def test_no_choice_of_evictions_finds_more(requests: list[list[int]], num_blocks: int) -> None:
    assert optimal_hits(requests, num_blocks) == best_by_trying_all(requests, num_blocks)


def test_without_a_limit_everything_seen_before_is_found() -> None:
    assert optimal_hits([[1, 2, 3], [1, 2], [4], [1, 2, 3]], None) == 5
    assert optimal_hits([], None) == 0
