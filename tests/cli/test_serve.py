"""`legato serve`'s command line: what it takes and refuses before anything is loaded."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from legato.config import NOT_IMPLEMENTED, ContinuousBatchingConfig

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def no_model(tmp_path: Path) -> str:
    """A folder without a model: what is asked of it gets as far as that, or is refused before."""
    (tmp_path / "no-model").mkdir()
    return str(tmp_path / "no-model")


def test_every_setting_that_does_something_is_a_flag(run_cli: Run) -> None:
    status, told, _ = run_cli("serve", "--help")
    missing = {one.name for one in fields(ContinuousBatchingConfig) if f"--{one.name.replace('_', '-')} " not in told}
    assert status == 0
    assert missing == {"block_size", "per_request_processors", "auto_switch_to_flash", *NOT_IMPLEMENTED}
    for words in ("Memory:\n", '"lru" or', "--no-allow-block-sharing", "[default: 256]", "Left out: what fits."):
        assert words in told
    assert "None" not in told


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--page-size", "2"], "page_size=2 is not allowed: it must be an integer, at least 4"),
        (["--num-blocks", "many"], "'--num-blocks': Input should be a valid integer"),
        (["--max-memory-percent", "1.5"], "max_memory_percent=1.5 is not allowed"),
        (["--eviction-policy", "random"], "eviction_policy='random' is not allowed: it must be one of"),
        (["--speculative", "magic"], "'--speculative': Value error, 'magic' is not one of 'ngram'"),
        (["--use-cuda-graph"], "No such option: --use-cuda-graph"),
        (["--api-key", " "], "--api-key or LEGATO_API_KEY is empty"),
    ],
)
def test_what_is_wrong_is_named(run_cli: Run, no_model: str, flags: list[str], words: str) -> None:
    status, _, told = run_cli("serve", no_model, *flags)
    assert status == 2 and words in " ".join(told.split())


def test_flags_overrule_the_file(run_cli: Run, no_model: str, tmp_path: Path) -> None:
    file = tmp_path / "engine.toml"
    file.write_text("page_size = 2\nallow_block_sharing = 3\n")
    assert "page_size=2 is not allowed" in run_cli("serve", no_model, "--config", file)[2]
    assert "allow_block_sharing=3" in run_cli("serve", no_model, "--config", file, "--page-size", 16)[2]
    *_, told = run_cli("serve", no_model, "--config", file, "--page-size", 16, "--no-allow-block-sharing")
    assert "not allowed" not in told and "Unrecognized model in" in told


@pytest.mark.parametrize(
    ("text", "words"), [("pagesize = 16", "engine.toml has 'pagesize'"), ("page_size", "is not TOML")]
)
def test_a_wrong_file_is_refused(run_cli: Run, no_model: str, tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "engine.toml"
    file.write_text(text)
    status, _, told = run_cli("serve", no_model, "--config", file)
    assert status == 2 and words in told


@pytest.mark.parametrize("keys", ["", " \t"])
def test_an_empty_key_in_the_environment_is_refused(
    run_cli: Run, no_model: str, monkeypatch: pytest.MonkeyPatch, keys: str
) -> None:
    monkeypatch.setenv("LEGATO_API_KEY", keys)
    status, _, told = run_cli("serve", no_model)
    assert status == 2 and "LEGATO_API_KEY is empty" in told
    assert "Unrecognized model in" in run_cli("serve", no_model, "--api-key", "sk-a")[2]


@pytest.mark.slow
def test_a_missing_extra_is_named() -> None:
    program = (
        "import sys; sys.modules['uvicorn'] = None; sys.argv = ['legato', 'serve', 'smollm2', '--port', '0']\n"
        "from legato.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert "legato: error: serve needs uvicorn: pip install 'legato[serve]'" in done.stderr
    assert done.returncode == 2 and "Traceback" not in done.stderr
