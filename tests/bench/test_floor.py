"""The arithmetic of the floor, against numbers worked out by hand."""

from dataclasses import replace

import pytest

from legato.bench.floor import (
    PARTS,
    Machine,
    Matrices,
    ModelWork,
    PassShape,
    Work,
    floor_seconds,
    keys_in_sight,
    pass_work,
    query_key_pairs,
)
from legato.cache.pool import AttentionGroup

FULL = AttentionGroup((0, 1), None, num_kv_heads=2, head_dim=8)
SLIDING = AttentionGroup((2,), 4, num_kv_heads=2, head_dim=8)
MODEL = ModelWork(
    dense=Matrices(elements=1000, num_bytes=2000),
    experts=Matrices(),
    num_experts=1,
    experts_per_token=1,
    head=Matrices(elements=3200, num_bytes=12_800),
    vocab_size=100,
    num_heads=4,
    groups=(FULL,),
    kv_element_size=4,
)


@pytest.mark.parametrize(
    ("queries", "end", "window", "keys", "pairs"),
    [
        (1, 1, None, 1, 1),
        (1, 10, None, 10, 10),
        (3, 3, None, 3, 1 + 2 + 3),
        (3, 10, None, 10, 8 + 9 + 10),
        (1, 10, 4, 4, 4),
        (3, 10, 4, 6, 4 + 4 + 4),  # positions 7, 8, 9 see 4 to 7, 5 to 8, 6 to 9
        (6, 6, 4, 6, 1 + 2 + 3 + 4 + 4 + 4),
        (3, 5, 4, 5, 3 + 4 + 4),
        (2, 3, 4, 3, 2 + 3),
    ],
)
def test_what_queries_see(queries: int, end: int, window: int | None, keys: int, pairs: int) -> None:
    assert keys_in_sight(queries, end, window) == keys
    assert query_key_pairs(queries, end, window) == pairs


@pytest.mark.parametrize("window", [None, 1, 2, 5, 40])
def test_what_queries_see_one_by_one(window: int | None) -> None:
    for end in range(1, 12):
        for queries in range(1, end + 1):
            seen = [range(0 if window is None else max(0, q - window + 1), q + 1) for q in range(end - queries, end)]
            assert keys_in_sight(queries, end, window) == len(set().union(*seen))
            assert query_key_pairs(queries, end, window) == sum(map(len, seen))


def test_a_pass_by_hand() -> None:
    work = pass_work(MODEL, PassShape(((1, 10), (3, 3)), num_sampled=1))
    assert list(work) == list(PARTS)
    assert work["projections"] == Work(2000, 2 * 4 * 1000)
    # 13 keys read and 4 written, each 2 × 2 heads × 8 × 4 bytes, in 2 layers; 16 pairs, 4 × 4 heads × 8 each
    assert work["attention"] == Work(2 * (13 + 4) * 128, 2 * 16 * 128)
    assert work["head"] == Work(12_800, 2 * 3200)
    assert work["sampling"] == Work(400, 100)


def test_groups_add_up_and_16_bit_caches_are_half() -> None:
    shape = PassShape(((1, 10),), num_sampled=1)
    hybrid = replace(MODEL, groups=(FULL, SLIDING), kv_element_size=2)
    # 2 layers that see 10, one that sees 4; each writes one
    assert pass_work(hybrid, shape)["attention"] == Work((2 * 11 + 5) * 64, (2 * 10 + 4) * 128)


def test_nothing_sampled_needs_no_head() -> None:
    work = pass_work(MODEL, PassShape(((5, 5),), num_sampled=0))
    assert work["head"] == work["sampling"] == Work()


def test_experts_are_read_as_far_as_tokens_reach_them() -> None:
    model = replace(MODEL, experts=Matrices(8000, 16_000), num_experts=8, experts_per_token=2)
    one = pass_work(model, PassShape(((1, 1),), num_sampled=1))["projections"]
    assert one == Work(2000 + 16_000 / 4, 2 * (1000 + 2000))
    two = pass_work(model, PassShape(((2, 2),), num_sampled=1))["projections"]
    assert two == Work(2000 + 16_000 * (1 - 0.75**2), 2 * 2 * (1000 + 2000))
    many = pass_work(model, PassShape(((1000, 1000),), num_sampled=1))["projections"]
    assert many.num_bytes == pytest.approx(18_000)


def test_the_slower_of_memory_and_arithmetic_decides_pass_by_pass() -> None:
    machine = Machine(bytes_per_second=1000, flop_per_second=10_000)
    decode, prefill = PassShape(((1, 1),), num_sampled=1), PassShape(((50, 50),), num_sampled=1)
    floors = floor_seconds(MODEL, [decode, prefill], machine)
    assert floors["projections"] == pytest.approx(2000 / 1000 + 2 * 50 * 1000 / 10_000)
    assert floors["head"] == pytest.approx(2 * 12.8)
    assert Work(3000, 20_000).floor_seconds(machine) == 3
    assert Work(1000, 20_000).floor_seconds(machine) == 2
