"""Which kernels the machine at hand can run."""

import hashlib
import logging
import os
from importlib.metadata import version
from pathlib import Path

from legato.checks import refuse
from legato.kernels.interface import Kernels
from legato.kernels.library import LEVELS, NativeKernels, load_library
from legato.kernels.reference import TorchKernels
from legato.kernels.tuning import MeasuredWays, processor_name
from legato.models.catalog import cache_dir

logger = logging.getLogger(__name__)

VARIABLE = "LEGATO_KERNELS"  # of the environment: which kernels to take instead of the best


def load_kernels() -> Kernels:
    """The fastest there are, or those that the environment variable `LEGATO_KERNELS` names.

    Raises:
        InvalidValueError: it names none.
    """
    wanted = os.environ.get(VARIABLE)
    if wanted == TorchKernels.name:
        return TorchKernels()
    if wanted and wanted not in LEVELS:
        raise refuse(VARIABLE, wanted, f"one of {', '.join((*LEVELS, TorchKernels.name))}")
    found = load_library((wanted,) if wanted else LEVELS)
    if found is not None:
        return NativeKernels(*found, MeasuredWays.load(_measured_ways()))
    if wanted:
        raise refuse(VARIABLE, wanted, "kernels that the package was built with and this processor runs")
    logger.warning("Legato was installed without a compiler: no native CPU kernels, so torch's, which are slower")
    return TorchKernels()


def _measured_ways() -> Path:
    """A file of its own for each processor and release: a cache folder may be shared by several machines."""
    key = hashlib.sha256(f"{processor_name()} {os.cpu_count()} {version('legato')}".encode()).hexdigest()[:16]
    return cache_dir() / "kernels" / f"{key}.json"
