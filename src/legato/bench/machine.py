"""What the machine can do at best, measured: reading memory, and multiplying matrices."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from legato.bench.floor import Machine
from legato.engine.sizing import available_host_bytes

SIZE = 2048  # of the matrices: large enough for the peak, small enough for a few milliseconds
ROUNDS = 7
_MIN_BUFFER_BYTES, _CACHE_FACTOR = 1 << 30, 2
_MAX_MEMORY_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured at one moment.

    Attributes:
        machine: at its best then.
        peak_of: which product gave the peak.
    """

    machine: Machine
    peak_of: str

    def better(self, other: "Measured") -> "Measured":
        """The best of two moments: in either of them something else may have run."""
        ours, theirs = self.machine, other.machine
        peak = max(self, other, key=lambda measured: measured.machine.flop_per_second)
        bandwidth = max(ours.bytes_per_second, theirs.bytes_per_second)
        return Measured(Machine(bandwidth, peak.machine.flop_per_second), peak.peak_of)


def measure_machine(dtype: torch.dtype, quantized: bool, kernels: Any) -> Measured:
    """Bandwidth and peak of all the cores that torch uses, at this moment.

    Args:
        dtype: type of the arithmetic: products in it count as well as float32 ones.
        quantized: whether int8 products count too.
        kernels: `legato.kernels` whose `linear` counts too, or None.
    """
    bandwidth = _measure_bandwidth()
    rates = {name: _flop_per_second(product) for name, product in _products(dtype, quantized, kernels).items()}
    best = max(rates, key=lambda name: rates[name])
    return Measured(Machine(bandwidth, rates[best]), best)


def _measure_bandwidth() -> float:
    """The fastest of several ways to read a buffer that no cache holds, in bytes a second."""
    numel = _buffer_bytes() // 4 // SIZE * SIZE
    buffer = torch.ones(numel)
    rows, vector = buffer.view(-1, SIZE), torch.ones(SIZE)
    readers = (buffer.sum, lambda: torch.dot(buffer, buffer), lambda: torch.mv(rows, vector))
    return numel * 4 / min(_best_seconds(reader) for reader in readers)


def _buffer_bytes() -> int:
    """Twice the caches, a GiB at least, a quarter of the free memory at most."""
    caches = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    largest = max((_bytes_in(path.read_text()) for path in caches), default=0)
    wanted = max(_MIN_BUFFER_BYTES, _CACHE_FACTOR * largest)
    return int(min(wanted, available_host_bytes() * _MAX_MEMORY_SHARE))


def _bytes_in(text: str) -> int:
    """Of a size as Linux writes it, like "32768K"; 0 for any other."""
    number, unit = text.strip()[:-1], text.strip()[-1:]
    shift = {"K": 10, "M": 20, "G": 30}.get(unit)
    return int(number) << shift if shift is not None and number.isdecimal() else 0


def _products(dtype: torch.dtype, quantized: bool, kernels: Any) -> dict[str, Callable[[], object]]:
    """Ways to multiply two square matrices of `SIZE`, by name."""
    left, right, out = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE), torch.empty(SIZE, SIZE)
    products: dict[str, Callable[[], object]] = {"torch float32": lambda: torch.mm(left, right, out=out)}
    if dtype is not torch.float32:
        low_left, low_right = left.to(dtype), right.to(dtype)
        products[f"torch {str(dtype).removeprefix('torch.')}"] = lambda: torch.mm(low_left, low_right)
    if quantized:
        int_left, int_right = (left * 20).to(torch.int8), (right * 20).to(torch.int8)
        products["torch int8"] = lambda: torch._int_mm(int_left, int_right)
    if kernels is not None:
        # Weights that bfloat16 holds exactly may go another way.
        packed, exact = kernels.pack(right, None), kernels.pack(right.bfloat16().float(), None)
        products[f"{kernels.name} linear"] = lambda: kernels.linear(left, packed, out)
        products[f"{kernels.name} linear, bfloat16 weights"] = lambda: kernels.linear(left, exact, out)
    return products


def _flop_per_second(product: Callable[[], object]) -> float:
    return 2 * SIZE**3 / _best_seconds(product)


def _best_seconds(run: Callable[[], object]) -> float:
    """The least of several times: what others do on the machine can only add."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)
