"""Simulated runs, against a cache kept with plain lists and against each other."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legato.errors import InvalidValueError
from legato.simulate.cost import CostModel
from legato.simulate.simulation import Simulation, SimulationConfig
from legato.simulate.traces import TraceRequest, read_trace
from legato.timeline import Timeline

DATA = Path(__file__).parent.parent / "data"
PAGE = 4


def run(requests: list[TraceRequest], **config: Any) -> dict[str, Any]:
    return Simulation(requests, SimulationConfig(**{"page_size": 512, **config})).run()


def plain_lru_hits(requests: list[TraceRequest], page_size: int, num_blocks: int) -> int:
    """Pages found when requests run one after another, a leaf going before its ancestors."""
    cached: OrderedDict[tuple[int, int], None] = OrderedDict()  # first is next to go
    hits = 0
    for request in requests:
        per_block = request.block_size // page_size
        ids = request.block_ids or []
        pages = [(ids[i // per_block], i % per_block) for i in range(request.prompt_length // page_size)]
        most = (request.prompt_length - 1) // page_size  # the last token is always computed
        found = 0
        while found < min(most, len(pages)) and pages[found] in cached:
            found += 1
        hits += found
        for page in pages[:found]:
            del cached[page]  # owned: not to be evicted
        while len(cached) + -(-request.prompt_length // page_size) > num_blocks:
            cached.popitem(last=False)
        for page in pages:
            cached.pop(page, None)  # of a prompt known whole the last page is computed again: the copy is worth nothing
        tokens = request.prompt_length + max(request.output_length, 1) - 1
        while len(cached) + -(-tokens // page_size) > num_blocks:
            cached.popitem(last=False)
        for page in reversed(pages):
            cached[page] = None
    return hits


ids = st.lists(st.integers(1, 2), min_size=1, max_size=4).map(
    lambda path: [int("".join(map(str, path[: i + 1]))) for i in range(len(path))]
)


@st.composite
def traces(draw: st.DrawFn) -> list[TraceRequest]:
    requests, now = [], 0.0
    for block_ids in draw(st.lists(ids, min_size=1, max_size=25)):
        now += draw(st.floats(0, 0.5))
        length = len(block_ids) * 2 * PAGE - draw(st.integers(0, 2 * PAGE - 1))
        requests.append(TraceRequest(now, length, draw(st.integers(0, 12)), block_ids, 2 * PAGE))
    return requests


@settings(max_examples=200, deadline=None)
@given(requests=traces(), num_blocks=st.integers(11, 40))
def test_hits_one_after_another_are_those_of_a_plain_cache(requests: list[TraceRequest], num_blocks: int) -> None:
    result = run(requests, page_size=PAGE, num_blocks=num_blocks, sequential=True)
    assert result["prompt_tokens_cached"] == PAGE * plain_lru_hits(requests, PAGE, num_blocks)
    assert result.get("optimal_prefix_block_hit_ratio", 0) >= result["prefix_block_hit_ratio"]
    assert result["finished"] == len(requests)
    cached, computed = result["prompt_tokens_cached"], result["prompt_tokens_computed"]
    assert cached + computed == sum(r.prompt_length for r in requests)


@settings(max_examples=400, deadline=None)
@given(
    requests=traces(),
    num_blocks=st.integers(11, 60),
    sequential=st.booleans(),
    swap=st.sampled_from((0, 5, 200)),
    scheduler=st.sampled_from(("fifo", "prefill_first")),
)
def test_leaping_over_steps_that_are_alike_changes_nothing(
    requests: list[TraceRequest], num_blocks: int, sequential: bool, swap: int, scheduler: str
) -> None:
    config = SimulationConfig(
        page_size=PAGE,
        num_blocks=num_blocks,
        max_batch_tokens=16,
        sequential=sequential,
        num_swap_blocks=swap,
        scheduler_type=scheduler,
        cost=CostModel(step=0.01, key=1e-5),
    )
    leaping = Simulation(requests, config).run()
    watched = Simulation(requests, config, Timeline().add).run()  # step by step
    del leaping["cache_use"], watched["cache_use"]
    assert leaping.keys() == watched.keys()
    for name, value in watched.items():
        assert leaping[name] == (pytest.approx(value, rel=0.02) if "seconds" in name else value), name


def test_the_whole_of_a_real_trace_gets_to_its_end_under_pressure() -> None:
    requests = read_trace(DATA / "azure_200.csv", "azure")
    for swap in (0, 100_000):
        result = run(requests, page_size=16, num_blocks=600, num_swap_blocks=swap, scheduler_type="prefill_first")
        assert (result["finished"], result["refused"]) == (200, 0)
        assert result["generated_tokens"] == sum(r.output_length for r in requests)
        assert (result["offloads"] > 0, result["resets"] > 0) == (swap > 0, swap == 0)
        assert (result["recomputed_tokens"] == 0) == (swap > 0)
        times = result["ttft_seconds"]
        assert 0 < times["p50"] <= times["p90"] <= times["p99"]
        assert max(share for _, share in result["cache_use"]) > 0.9


def test_a_trace_without_contents_shares_nothing() -> None:
    result = run(read_trace(DATA / "azure_200.csv", "azure"), page_size=256)
    assert (result["prompt_tokens_cached"], result["finished"]) == (0, 200)
    assert "optimal_prefix_block_hit_ratio" not in result


def test_a_request_that_the_cache_cannot_hold_is_refused_alone() -> None:
    requests = [TraceRequest(0.0, 100, 5), TraceRequest(0.0, 1000, 5), TraceRequest(1.0, 100, 5)]
    result = run(requests, page_size=16, num_blocks=20)
    assert (result["finished"], result["refused"]) == (2, 1)


def test_a_request_waits_for_its_arrival_and_its_first_token() -> None:
    cost = CostModel(step=1.0, token=0, request=0, key=0, pair=0)
    requests = [TraceRequest(0.0, 10, 3), TraceRequest(10.0, 10, 2)]
    result = run(requests, page_size=16, cost=cost)
    assert result["simulated_seconds"] == 12
    assert result["ttft_seconds"] == {"p50": 1, "p90": 1, "p99": 1}
    assert result["inter_token_seconds"]["p50"] == pytest.approx(1, rel=0.01)
    assert run(requests, page_size=16, cost=cost, sequential=True)["simulated_seconds"] == 5


def test_a_page_size_that_cuts_across_the_traces_blocks_is_refused() -> None:
    with pytest.raises(InvalidValueError, match=r"page_size=100 is not allowed: it must divide 512"):
        run([TraceRequest(0.0, 10, 3, [1], 512)], page_size=100)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_blocks": 10**14}, "num_blocks"),
        ({"num_swap_blocks": -1}, "num_swap_blocks"),
        ({"scheduler_type": "lifo"}, "scheduler_type='lifo'"),
        ({"eviction_policy": "random"}, "eviction_policy='random'"),
        ({"safety_margin": 2}, "safety_margin"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        run([TraceRequest(0.0, 10, 3)], **config)


def test_times_beyond_all_reason_are_counted_too() -> None:
    result = run([TraceRequest(0.0, 10, 3)], page_size=16, cost=CostModel(step=1e12))
    assert result["inter_token_seconds"]["p50"] > 1e7
