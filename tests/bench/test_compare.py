"""Comparing engines: turns, statistics, and engines that fail. The engines are lines for the shell."""

import json
from pathlib import Path

import pytest

from legato.bench.compare import (
    OURS,
    Comparison,
    Competitor,
    Failure,
    Run,
    RunFailedError,
    compare,
    competitors,
    run_once,
)
from legato.bench.settings import EngineSettings
from legato.bench.spread import Spread
from legato.errors import InvalidValueError


def result(tokens_per_second: float, tokens: int = 100) -> str:
    run = {"tokens": tokens, "seconds": tokens / tokens_per_second, "tokens_per_second": tokens_per_second}
    return f"echo '{json.dumps(run)}'"


def runs(*speeds: float) -> list[Run]:
    return [Run(100, 100 / speed, speed) for speed in speeds]


def test_spread() -> None:
    assert Spread.of([3, 1, 8, 2]) == Spread(2.5, 1, 8)
    assert Spread.of([2.0]).text(1) == "2.0 (2.0–2.0)"
    assert Spread.of([1.234, 5.678]).rounded(1) == {"median": 3.5, "low": 1.2, "high": 5.7}


def test_the_ratio_is_the_median_of_the_rounds_ratios() -> None:
    comparison = Comparison("w", 3, {OURS: runs(100, 50, 80), "peer": runs(50, 50, 20)})
    assert comparison.ratio("peer") == Spread(2, 1, 4)
    assert comparison.speed(OURS) == Spread(80, 50, 100)  # whose ratio to the peer's median, 50, would be 1.6
    engines = comparison.as_dict()["engines"]
    assert engines["peer"]["legato_ratio"] == {"median": 2, "low": 1, "high": 4}
    assert engines[OURS]["legato_ratio"] is None


def test_only_rounds_that_both_came_through_make_a_ratio() -> None:
    failures = {"peer": Failure(2, "broke"), "never": Failure(1, "absent")}
    comparison = Comparison("w", 3, {OURS: runs(100, 50, 80), "peer": runs(50), "never": []}, failures)
    assert comparison.ratio("peer") == Spread(2, 2, 2)
    assert comparison.ratio("never") is None
    assert comparison.as_dict()["failures"]["peer"] == {"round": 2, "reason": "broke"}
    lines = comparison.text().splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [[OURS, "3"], ["peer", "1"], ["never", "0"]]


def test_different_numbers_of_tokens_are_pointed_out() -> None:
    same = Comparison("w", 1, {OURS: runs(100), "peer": runs(50)})
    assert "same work" not in same.text()
    other = Comparison("w", 1, {OURS: runs(100), "peer": [Run(99, 1, 99)]})
    assert "not do the same work" in other.text()


def test_engines_take_turns_and_one_that_fails_is_left_out(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    entrants = [
        Competitor("a", f"echo a >> {log}; {result(10)}"),
        Competitor("b", f"echo b >> {log}; echo the reason >&2; exit 3"),
        Competitor("c", f"echo c >> {log}; echo chatter; {result(20)}"),
    ]
    comparison = compare(entrants, "w", 3)
    assert log.read_text().split() == ["a", "b", "c", "a", "c", "a", "c"]
    assert {name: len(done) for name, done in comparison.runs.items()} == {"a": 3, "b": 0, "c": 3}
    assert comparison.failures["b"].round == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert "b, round 1: exit status 3\n    the reason" in err


def test_what_a_run_must_print() -> None:
    assert run_once(result(25)) == Run(100, 4, 25)
    assert run_once(["sh", "-c", f"echo progress; {result(25)}; echo; echo warning >&2"]) == Run(100, 4, 25)


@pytest.mark.parametrize(
    "command",
    ["true", "echo words", "echo '[1]'", "echo 5", 'echo \'{"tokens": 1, "seconds": 1}\'', result(25) + "; echo bye"],
)
def test_any_other_last_line_is_a_failure(command: str) -> None:
    with pytest.raises(RunFailedError, match="the last line of its output must be a JSON object"):
        run_once(command)


def test_the_end_of_a_failed_runs_stderr_is_told() -> None:
    with pytest.raises(RunFailedError, match="exit status 7") as failed:
        run_once("seq 100 >&2; exit 7")
    assert str(failed.value).split()[-2:] == ["99", "100"]
    assert str(failed.value).count("\n") == 15


def test_commands(tmp_path: Path) -> None:
    workload = tmp_path / "it's a workload.json"
    settings = EngineSettings(quantization="int8")
    ours, built_in, peer = competitors(["transformers", "x=run {workload} a=b"], "m", workload, settings, 2)
    assert (ours.name, built_in.name, peer.name) == ("legato", "transformers", "x")
    assert ours.command[-2:] == ["--quantization", "int8"]
    assert "--engine" in built_in.command
    assert "--quantization" not in built_in.command
    log = tmp_path / "log"
    echo = competitors([f"x=printf %s {{workload}} > {log}; {result(1)}"], "m", workload, settings, 1)[1]
    run_once(echo.command)
    assert log.read_text() == str(workload)


@pytest.mark.parametrize(
    "peers", [["vllm"], ["=run {workload}"], ["x=run"], ["legato=run {workload}"], ["x=a {workload}"] * 2]
)
def test_peers_that_cannot_be(peers: list[str], tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="compare="):
        competitors(peers, "m", tmp_path / "w.json", EngineSettings(), 1)
