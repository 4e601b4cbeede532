"""`legato bench` on a tiny model."""

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from legato.simulate.cost import CostModel, StepShape
from tests.tiny import tiny_llama

KEYS = [
    "engine", "workload", "dtype", "quantization", "kv_cache_dtype", "tokens", "seconds", "tokens_per_second", "runs"
]  # fmt: skip
LENGTHS = [(3, 12), (40, 5), (1, 1), (17, 20), (9, 8)]
NEW_TOKENS = sum(new for _, new in LENGTHS)
REQUESTS = [{"prompt_ids": [5 + i] * length, "max_new_tokens": new} for i, (length, new) in enumerate(LENGTHS)]
WORKLOAD = {"name": "tiny", "requests": REQUESTS}

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose every token ends the sequence, if one lets it."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    model = tiny_llama()
    model.generation_config.eos_token_id = list(range(97))
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def workload(tmp_path: Path) -> Callable[[Any], Path]:
    def write(content: Any) -> Path:
        path = tmp_path / "workload.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


@pytest.fixture
def bench(run_cli: Run, folder: str) -> Run:
    """Runs `legato bench COMMAND` on the model."""
    return lambda command, *arguments: run_cli("bench", command, "--model", folder, *arguments)


@pytest.fixture
def offline(bench: Run) -> Run:
    return lambda path, *arguments: bench("offline", "--workload", path, *arguments)


def assert_refused(done: tuple[int, str, str], *words: str) -> None:
    status, stdout, stderr = done
    assert (status, stdout) == (2, "")
    assert stderr.count("\n") == 1, stderr
    assert stderr.startswith("legato: error: ")
    assert all(word in stderr for word in words), stderr


@pytest.mark.parametrize("engine", ["legato", "transformers"])
def test_a_workload_is_one_line_of_json(offline: Run, workload: Callable[[Any], Path], engine: str) -> None:
    status, stdout, _ = offline(workload(WORKLOAD), "--engine", engine)
    assert status == 0
    assert stdout.count("\n") == 1
    result = json.loads(stdout)
    assert list(result) == KEYS
    assert (result["engine"], result["workload"], result["dtype"]) == (engine, "tiny", "float32")
    assert result["tokens"] == NEW_TOKENS  # every request to its end, whatever the model's end-of-sequence tokens
    assert result["runs"] == [result["seconds"]]
    assert result["tokens_per_second"] == pytest.approx(NEW_TOKENS / result["seconds"], rel=0.1)


def test_as_a_process_it_writes_nothing_else(folder: str, workload: Callable[[Any], Path]) -> None:
    command = [sys.executable, "-m", "legato.cli", "bench", "offline", "--model", folder]
    command += ["--workload", str(workload(WORKLOAD)), "--dtype", "bfloat16", "--page-size", "8"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)
    result = json.loads(done.stdout)
    assert (result["engine"], result["dtype"], result["tokens"]) == ("legato", "bfloat16", NEW_TOKENS)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "not JSON",
        "[]",
        "5",
        "null",
        {},
        REQUESTS,
        {"requests": REQUESTS},
        {"name": "x"},
        {"name": "x", "requests": []},
        {"name": "x", "requests": {"prompt_ids": [5]}},
        {"name": "x", "requests": [5]},
        {"name": "x", "requests": ["prompt_ids"]},
        {"name": "x", "requests": [{"prompt_ids": [5]}]},
        {"name": "x", "requests": [{"max_new_tokens": 5}]},
        {"name": "x", "requests": [*REQUESTS, {"prompt_ids": "text", "max_new_tokens": 5}]},
        {"name": "x", "requests": [*REQUESTS, {"prompt_ids": [5], "max_new_tokens": "5"}]},
        {"name": "x", "requests": [*REQUESTS, {"prompt_ids": [5], "max_new_tokens": 0}]},
        {"name": "x", "requests": [*REQUESTS, {"prompt_ids": [], "max_new_tokens": 5}]},
        {"name": "x", "requests": [*REQUESTS, {"prompt_ids": [97], "max_new_tokens": 5}]},
    ],
    ids=lambda content: json.dumps(content)[-60:],
)
def test_a_bad_workload_is_refused(offline: Run, workload: Callable[[Any], Path], content: Any) -> None:
    assert_refused(offline(workload(content)))


@pytest.mark.parametrize("dtype", ["float99", "Tensor", "int8", ""])
def test_a_bad_dtype_is_refused(offline: Run, workload: Callable[[Any], Path], dtype: str) -> None:
    assert_refused(offline(workload(WORKLOAD), "--dtype", dtype), dtype)


def test_settings_that_cannot_work(offline: Run, workload: Callable[[Any], Path]) -> None:
    path = workload(WORKLOAD)
    assert_refused(offline(path, "--model", "/no/such/model"), "/no/such/model")
    assert_refused(offline(path, "--page-size", "1"), "page_size=1")
    assert_refused(offline(path, "--quantization", "int3"), "quantization")
    assert_refused(offline(path, "--kv-cache-dtype", "float7"), "kv_cache_dtype")
    assert_refused(offline(path, "--engine", "transformers", "--quantization", "int8"), "transformers", "quantization")


@pytest.mark.parametrize(
    "arguments",
    [["--engine", "vllm"], ["--workload", "/no/such/file"], ["--workload", "/tmp"], ["--page-size", "x"]],
    ids=" ".join,
)
def test_usage_errors(offline: Run, workload: Callable[[Any], Path], arguments: list[str]) -> None:
    status, stdout, stderr = offline(workload(WORKLOAD), *arguments)
    assert (status, stdout) == (2, "")
    last = stderr.splitlines()[-1]
    assert last.startswith("Error: ")
    assert arguments[0] in last


def lines_of(done: tuple[int, str, str]) -> list[Any]:
    """The JSON lines of a command that did its work and said nothing else."""
    status, stdout, stderr = done
    assert (status, stderr) == (0, "")
    return [json.loads(line) for line in stdout.splitlines()]


def test_repeated_runs_share_nothing_and_their_median_counts(offline: Run, workload: Callable[[Any], Path]) -> None:
    [result] = lines_of(offline(workload(WORKLOAD), "--repeat", 3, "--page-size", 4))
    assert len(result["runs"]) == 3
    assert result["seconds"] == sorted(result["runs"])[1]
    assert result["tokens"] == NEW_TOKENS


# Comparisons

PEER = {"tokens": NEW_TOKENS, "seconds": 2, "tokens_per_second": 20.0}


@pytest.fixture
def peer(tmp_path: Path) -> str:
    """A command that says how fast it was if it is given the workload."""
    answer = tmp_path / "answer.json"
    answer.write_text(json.dumps(PEER))
    return f"grep -q max_new_tokens {{workload}} && cat {answer}"


def test_a_comparison_is_a_table_of_medians_and_ratios(
    offline: Run, workload: Callable[[Any], Path], peer: str
) -> None:
    status, stdout, stderr = offline(workload(WORKLOAD), "--compare", f"peer={peer}", "--runs", 2)
    assert (status, stderr) == (0, "")
    assert [line.split()[:3] for line in stdout.splitlines()[1:]] == [
        ["legato", "2", str(NEW_TOKENS)],
        ["peer", "2", str(NEW_TOKENS)],
    ]
    assert "20.0 (20.0–20.0)" in stdout


def test_a_peer_that_fails_is_told_at_the_end_and_the_others_go_on(
    offline: Run, workload: Callable[[Any], Path], peer: str
) -> None:
    peers = ["--compare", "bad=echo the reason >&2; exit 3; {workload}", "--compare", f"good={peer}"]
    status, stdout, stderr = offline(workload(WORKLOAD), *peers, "--runs", 1, "--json", "--page-size", 8)
    result = json.loads(stdout)
    assert status == 1
    assert list(result["engines"]) == ["legato", "bad", "good"]
    assert result["failures"]["bad"] == {"round": 1, "reason": "exit status 3\n    the reason"}
    assert "the reason" in stderr
    speeds = {name: engine["tokens_per_second"] for name, engine in result["engines"].items()}
    assert speeds["bad"] is None
    ratio = result["engines"]["good"]["legato_ratio"]["median"]
    assert ratio == pytest.approx(speeds["legato"]["median"] / 20, rel=0.01)


def test_comparisons_that_cannot_be(offline: Run, workload: Callable[[Any], Path], peer: str) -> None:
    path = workload(WORKLOAD)
    assert_refused(offline(path, "--compare", "vllm"), "vllm", "{workload}")
    assert_refused(offline(path, "--compare", "x=run it"), "{workload}")
    assert_refused(offline(path, "--compare", f"legato={peer}"), "legato")
    assert_refused(offline(workload({"name": "x"}), "--compare", f"x={peer}"), "workload")
    status, _, stderr = offline(workload(WORKLOAD), "--engine", "transformers", "--compare", f"x={peer}")
    assert (status, "--engine" in stderr) == (2, True)


def test_who_compares_loads_no_torch() -> None:
    code = "import sys, legato.bench.compare; print({'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


# Latency


def test_latency_is_a_line_for_each_batch_size(bench: Run) -> None:
    sizes = ["--prompt-tokens", 20, "--new-tokens", 5, "--repeat", 2]
    lines = lines_of(bench("latency", "--batch", 1, "--batch", 3, *sizes))
    assert [(line["batch"], line["prompt_tokens"], line["new_tokens"]) for line in lines] == [(1, 20, 5), (3, 20, 5)]
    for line in lines:
        for times in (line["ttft_ms"], line["inter_token_ms"]):
            assert list(times) == ["median", "p90", "p99"]
            assert 0 < times["median"] <= times["p90"] <= times["p99"]
        assert line["tokens_per_second"] > 0


def test_single_tokens_have_no_time_between_them(bench: Run) -> None:
    [line] = lines_of(bench("latency", "--batch", 2, "--prompt-tokens", 3, "--new-tokens", 1, "--repeat", 1))
    assert line["inter_token_ms"] is None


def test_latency_on_a_terminal_is_a_table(folder: str) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "legato.cli", "bench", "latency", "--model", folder, "--batch", "2"]
    done = subprocess.run([*command, "--new-tokens", "3"], stdout=theirs, stderr=subprocess.PIPE, text=True)
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert (done.returncode, done.stderr) == (0, "")
    header, row = shown.splitlines()
    assert header.split()[0] == "batch"
    assert row.split()[0] == "2"


def test_requests_that_do_not_fit_the_model_are_refused(bench: Run) -> None:
    assert_refused(bench("latency", "--batch", 1, "--prompt-tokens", 5000), "5000 tokens")


# Roofline


@pytest.fixture
def small_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is measured on next to nothing."""
    monkeypatch.setattr("legato.bench.machine.SIZE", 64)
    monkeypatch.setattr("legato.bench.machine._MIN_BUFFER_BYTES", 1 << 20)
    monkeypatch.setattr("legato.bench.machine._CACHE_FACTOR", 0)


@pytest.mark.usefixtures("small_products")
def test_a_roofline_has_the_floor_and_the_run_part_by_part(bench: Run, workload: Callable[[Any], Path]) -> None:
    [result] = lines_of(bench("roofline", "--workload", workload(WORKLOAD), "--json"))
    assert (result["workload"], result["tokens"]) == ("tiny", NEW_TOKENS)
    assert result["steps"] >= max(new for _, new in LENGTHS)
    assert min(result["gb_per_second"], result["gflop_per_second"], result["seconds"], result["reached"]) > 0
    parts = result["parts"]
    assert list(parts)[:4] == ["projections", "attention", "head", "sampling"]
    assert result["floor_seconds"] == pytest.approx(sum(part["floor_seconds"] for part in parts.values()), abs=5e-4)
    assert result["seconds"] == pytest.approx(sum(part["seconds"] or 0 for part in parts.values()), abs=5e-3)
    # Every token but the last of each request, once through 2 layers of a tiny llama: Q and O 32², K and V 32 × 16,
    # three of the MLP 32 × 48; tokens of one prompt are computed once, as no two begin alike.
    tokens = sum(prompt + new - 1 for prompt, new in LENGTHS)
    assert parts["projections"]["gflop"] == pytest.approx(2 * tokens * 2 * (3072 + 4608) / 1e9, abs=6e-4)


@pytest.mark.usefixtures("small_products")
def test_a_roofline_for_people(bench: Run, workload: Callable[[Any], Path]) -> None:
    status, stdout, stderr = bench("roofline", "--workload", workload(WORKLOAD))
    assert (status, stderr) == (0, "")
    for words in ("GB/s", "GFLOP/s", f"{NEW_TOKENS} new tokens", "projections", "Python around it", "reached"):
        assert words in stdout
    assert_refused(bench("roofline", "--workload", workload({"name": "x"})), "workload")


def test_sampling_compares_two_ways_to_run_the_same_prompts(bench: Run, workload: Callable[[Any], Path]) -> None:
    path = workload({"name": "x", "requests": [{**one, "max_new_tokens": 20} for one in REQUESTS]})
    what = [word for name in ("settings", "samples", "guesses") for word in ("--what", name)]
    settings, samples, guesses = lines_of(bench("sampling", "--workload", path, *what, "--rounds", 2))
    assert settings["plain"]["tokens"] == settings["other"]["tokens"] == 64 * len(REQUESTS)
    assert settings["plain"]["steps"] == settings["other"]["steps"]
    prompt_tokens = sum(len(one["prompt_ids"]) for one in REQUESTS)
    assert samples["other"]["prompt_tokens"] == prompt_tokens < samples["plain"]["prompt_tokens"]
    assert samples["other"]["tokens"] == 16 * 64 * len(REQUESTS)
    assert guesses["other"]["tokens"] == 20 * len(REQUESTS) == guesses["plain"]["tokens"]
    assert guesses["other"]["steps"] < guesses["plain"]["steps"]  # tiny models repeat themselves
    for one in (settings, samples, guesses):
        assert one["seconds"]["low"] <= one["seconds"]["median"] <= one["seconds"]["high"]
    assert_refused(bench("sampling", "--workload", path, "--what", "nothing"), "nothing", "settings, grammar")


def test_steps_print_a_cost_model_that_simulate_takes(bench: Run, tmp_path: Path) -> None:
    [result] = lines_of(bench("steps"))
    assert result["steps"] > 50
    file = tmp_path / "cost.json"
    file.write_text(json.dumps(result))
    cost = CostModel.load(file)
    assert cost.seconds(StepShape(100, 10, 1000, 10_000)) > 0
    assert cost.moved_page > 0


def test_pool_prints_microseconds_of_every_operation(run_cli: Run) -> None:
    [result] = lines_of(run_cli("bench", "pool", "--blocks", 5000))
    assert list(result) == ["blocks", "allocate", "share", "free", "find", "acquire", "evict_and_allocate"]
    assert result["blocks"] == 5000
    assert all(value > 0 for value in result.values())
