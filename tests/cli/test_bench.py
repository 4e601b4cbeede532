"""`legato bench offline` on a tiny model."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from legato import cli
from legato.simulate.cost import CostModel, StepShape
from tests.tiny import tiny_llama

KEYS = ["engine", "workload", "dtype", "tokens", "seconds", "tokens_per_second"]
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
def bench(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], folder: str) -> Run:
    """Runs the command line in this process; an exception that would be a traceback fails the test."""

    def run(path: Path, *arguments: str) -> tuple[int, str, str]:
        command = ["legato", "bench", "offline", "--model", folder, "--workload", str(path), *arguments]
        monkeypatch.setattr(sys, "argv", command)
        capfd.readouterr()
        try:
            cli.main()
        except SystemExit as exited:
            return exited.code or 0, *capfd.readouterr()  # type: ignore[return-value]
        return 0, *capfd.readouterr()

    return run


def assert_refused(done: tuple[int, str, str], *words: str) -> None:
    status, stdout, stderr = done
    assert (status, stdout) == (2, "")
    assert stderr.count("\n") == 1, stderr
    assert stderr.startswith("legato: error: ")
    assert all(word in stderr for word in words), stderr


@pytest.mark.parametrize("engine", ["legato", "transformers"])
def test_a_workload_is_one_line_of_json(bench: Run, workload: Callable[[Any], Path], engine: str) -> None:
    status, stdout, _ = bench(workload(WORKLOAD), "--engine", engine)
    assert status == 0
    assert stdout.count("\n") == 1
    result = json.loads(stdout)
    assert list(result) == KEYS
    assert (result["engine"], result["workload"], result["dtype"]) == (engine, "tiny", "float32")
    assert result["tokens"] == NEW_TOKENS  # every request to its end, whatever the model's end-of-sequence tokens
    assert 0 < result["seconds"] < 60
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
def test_a_bad_workload_is_refused(bench: Run, workload: Callable[[Any], Path], content: Any) -> None:
    assert_refused(bench(workload(content)))


@pytest.mark.parametrize("dtype", ["float99", "Tensor", "int8", ""])
def test_a_bad_dtype_is_refused(bench: Run, workload: Callable[[Any], Path], dtype: str) -> None:
    assert_refused(bench(workload(WORKLOAD), "--dtype", dtype), dtype)


def test_settings_that_cannot_work(bench: Run, workload: Callable[[Any], Path]) -> None:
    path = workload(WORKLOAD)
    assert_refused(bench(path, "--model", "/no/such/model"), "/no/such/model")
    assert_refused(bench(path, "--page-size", "1"), "page_size=1")


@pytest.mark.parametrize(
    "arguments",
    [["--engine", "vllm"], ["--workload", "/no/such/file"], ["--workload", "/tmp"], ["--page-size", "x"]],
    ids=" ".join,
)
def test_usage_errors(bench: Run, workload: Callable[[Any], Path], arguments: list[str]) -> None:
    status, stdout, stderr = bench(workload(WORKLOAD), *arguments)
    assert (status, stdout) == (2, "")
    last = stderr.splitlines()[-1]
    assert last.startswith("Error: ")
    assert arguments[0] in last


def lines_of(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *arguments: str) -> list[Any]:
    monkeypatch.setattr(sys, "argv", ["legato", "bench", *arguments])
    capfd.readouterr()
    with pytest.raises(SystemExit) as exited:
        cli.main()
    assert not exited.value.code
    return [json.loads(line) for line in capfd.readouterr().out.splitlines()]


def test_steps_print_a_cost_model_that_simulate_takes(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], folder: str, tmp_path: Path
) -> None:
    [result] = lines_of(monkeypatch, capfd, "steps", "--model", folder)
    assert result["steps"] > 50
    file = tmp_path / "cost.json"
    file.write_text(json.dumps(result))
    cost = CostModel.load(file)
    assert cost.seconds(StepShape(100, 10, 1000, 10_000)) > 0
    assert cost.moved_page > 0


def test_pool_prints_microseconds_of_every_operation(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    [result] = lines_of(monkeypatch, capfd, "pool", "--blocks", "5000")
    assert list(result) == ["blocks", "allocate", "share", "free", "find", "acquire", "evict_and_allocate"]
    assert result["blocks"] == 5000
    assert all(value > 0 for value in result.values())
