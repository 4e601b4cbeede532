"""Which kernels are taken, and the table of measured ways."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from legato.errors import InvalidValueError
from legato.kernels import library, load_kernels
from legato.kernels.library import LEVELS, NativeKernels, load_library
from legato.kernels.packing import pack
from legato.kernels.reference import TorchKernels
from legato.kernels.tuning import ROW_COUNTS, MeasuredWays


def test_the_environment_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEGATO_KERNELS", "torch")
    assert isinstance(load_kernels(), TorchKernels)
    monkeypatch.setenv("LEGATO_KERNELS", "portable")
    assert load_kernels().name == "portable"
    monkeypatch.setenv("LEGATO_KERNELS", "avx1024")
    with pytest.raises(InvalidValueError, match=r"LEGATO_KERNELS.*avx1024.*portable"):
        load_kernels()


def test_without_libraries_torch_does_it_and_a_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("LEGATO_KERNELS", raising=False)
    monkeypatch.setattr(library, "_FOLDER", tmp_path)
    assert isinstance(load_kernels(), TorchKernels)
    assert "without a compiler" in caplog.text


def test_a_library_of_other_sources_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library, "sources_digest", lambda: "0" * 32)
    assert load_library(LEVELS) is None
    assert "other sources" in caplog.text


def test_ways_are_measured_once_and_kept(tmp_path: Path) -> None:
    path, runs = tmp_path / "deep" / "ways.json", []

    def run(way: int, rows: int) -> None:
        runs.append((way, rows))

    ways = MeasuredWays.load(path).ways("a shape", (0, 1), run)
    assert len(ways) == len(ROW_COUNTS) and set(ways) <= {0, 1} and len(runs) > len(ROW_COUNTS)
    runs.clear()
    assert MeasuredWays.load(path).ways("a shape", (0, 1), run) == ways and not runs
    assert set(MeasuredWays.load(path).ways("a shape", (5,), run)) == {5}, "a way that is not there was taken"


def test_what_is_in_the_way_for_a_moment_misleads_nobody(tmp_path: Path) -> None:
    """Another process has a processor for milliseconds at a time: meanwhile every run of the better way is slow."""
    begun: dict[int, float] = {}

    def run(way: int, rows: int) -> None:
        is_disturbed = time.perf_counter() - begun.setdefault(rows, time.perf_counter()) < 0.008
        time.sleep(0.0003 if way == 0 else 0.0006 if is_disturbed else 0)

    assert MeasuredWays.load(tmp_path / "ways.json").ways("a", (0, 1), run) == [1] * len(ROW_COUNTS)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"a": 1}', '{"a": [0]}', json.dumps({"a": ["x"] * 7})])
def test_a_damaged_table_is_measured_again(tmp_path: Path, content: str) -> None:
    path = tmp_path / "ways.json"
    path.write_text(content)
    assert MeasuredWays.load(path).ways("a", (0,), lambda way, rows: None) == [0] * len(ROW_COUNTS)


def test_a_table_that_cannot_be_kept_still_serves(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ways = MeasuredWays.load(tmp_path / "file" / "ways.json")
    assert ways.ways("a", (0,), lambda way, rows: None) == [0] * len(ROW_COUNTS)


def product(kernels: NativeKernels, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(40, 128, generator=generator), torch.randn(512, 128, generator=generator)
    out = torch.empty(40, 512)
    kernels.multiply(0, x, pack(weight, None), out)
    assert torch.allclose(out, x @ weight.T, atol=1e-3)
    return out


def test_threads_may_share_the_pool(tmp_path: Path) -> None:
    found = load_library()
    assert found is not None
    errors = []

    def work(seed: int) -> None:
        try:
            own = NativeKernels(*found, MeasuredWays(tmp_path / "ways.json"))
            for i in range(200):
                product(own, seed + i)
        except AssertionError as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(1000 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_process_computes_without_the_pool_s_threads(tmp_path: Path) -> None:
    found = load_library()
    assert found is not None
    kernels = NativeKernels(*found, MeasuredWays(tmp_path / "ways.json"))
    expected = product(kernels, 1)
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(40, 128, generator=generator), torch.randn(512, 128, generator=generator)
    packed, out = pack(weight, None), torch.zeros(40, 512)
    child = os.fork()
    if child == 0:  # only our kernels here: torch's own threads do not survive a fork
        signal.alarm(30)
        status = 1
        try:
            kernels.multiply(0, x, packed, out)
            status = int(not np.array_equal(out.numpy(), expected.numpy()))
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
