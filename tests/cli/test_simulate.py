"""`legato simulate`."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

DATA = Path(__file__).parent.parent / "data"
MOONCAKE = ["--trace", str(DATA / "mooncake_400.jsonl"), "--format", "mooncake"]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def simulate(run_cli: Run) -> Run:
    return lambda *arguments: run_cli("simulate", *arguments)


def test_json_is_one_object_with_the_hit_ratio_and_the_optimum(simulate: Run) -> None:
    status, out, err = simulate(*MOONCAKE, "--sequential", "--num-blocks", "2000", "--json")
    assert (status, err) == (0, "")  # no progress bar where nobody looks
    result = json.loads(out)
    assert 0 < result["prefix_block_hit_ratio"] < result["optimal_prefix_block_hit_ratio"] < 0.14
    assert (result["requests"], result["finished"], result["num_blocks"]) == (400, 400, 2000)
    unlimited = json.loads(simulate(*MOONCAKE, "--sequential", "--json")[1])
    assert unlimited["prefix_block_hit_ratio"] == unlimited["optimal_prefix_block_hit_ratio"]
    assert unlimited["prefix_block_hit_ratio"] > result["prefix_block_hit_ratio"]


def test_people_get_a_table(simulate: Run) -> None:
    status, out, _ = simulate("--trace", str(DATA / "azure_200.csv"), "--format", "azure", "--page-size", "16")
    assert status == 0
    names = [line.split()[0] for line in out.splitlines()]
    assert {"prefix_block_hit_ratio", "ttft_seconds", "inter_token_seconds", "offloads", "cache_use"} <= set(names)
    assert "{" not in out


def test_the_policies_differ(simulate: Run) -> None:
    ratios = []
    for policy in ("lru", "newest_filled"):
        _, out, _ = simulate(*MOONCAKE, "--sequential", "--num-blocks", "3000", "--eviction", policy, "--json")
        ratios.append(json.loads(out)["prefix_block_hit_ratio"])
    assert ratios[0] != ratios[1]
    assert min(ratios) > 0


def test_a_timeline_is_drawn(simulate: Run, tmp_path: Path) -> None:
    picture = tmp_path / "out.svg"
    status, _, _ = simulate(*MOONCAKE, "--limit", "20", "--timeline", str(picture))
    assert status == 0
    assert "<svg" in picture.read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--page-size", "100"], ["page_size=100", "divide 512"]),
        (["--scheduler", "lifo"], ["scheduler_type='lifo'", "fifo, prefill_first"]),
        (["--eviction", "random"], ["eviction_policy='random'", "lru, newest_filled"]),
        (["--timeline", "out.gif"], ["out.gif", ".svg"]),
        (["--cost", str(DATA / "gsm8k_64.jsonl")], ["gsm8k_64.jsonl", "JSON"]),
        (["--format", "azure"], ["request 1 is not in azure format"]),
    ],
)
def test_what_cannot_work_is_refused_in_a_line(simulate: Run, arguments: list[str], words: list[str]) -> None:
    status, out, err = simulate(*MOONCAKE, *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("legato: error: ")
    assert all(word in err for word in words), err
