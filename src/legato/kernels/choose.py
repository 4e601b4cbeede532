"""Which kernels the machine at hand can run."""

import ctypes
import hashlib
import logging
import os
from pathlib import Path

from legato.checks import refuse
from legato.kernels.interface import Kernels
from legato.kernels.library import LEVELS, NativeKernels, load_library
from legato.kernels.reference import TorchKernels
from legato.kernels.sources import sources_digest
from legato.kernels.tuning import MeasuredWays, processor_name
from legato.models.catalog import cache_dir

logger = logging.getLogger(__name__)

VARIABLE = "LEGATO_KERNELS"  # of the environment: which kernels to take instead of the best


def load_kernels() -> Kernels:
    """The fastest there are, or those that the environment variable `LEGATO_KERNELS` names.

    Raises:
        InvalidValueError: it names none.
    """
    found = find_library()
    if found is not None:
        return NativeKernels(*found, MeasuredWays.load(_measured_ways()))
    if not os.environ.get(VARIABLE):
        logger.warning("Legato was installed without a compiler: no native CPU kernels, so torch's, which are slower")
    return TorchKernels()


def find_library() -> tuple[str, ctypes.CDLL] | None:
    """Name and library of the native kernels to use; None where there are none, or torch's are asked for.

    Raises:
        InvalidValueError: `LEGATO_KERNELS` names none that are here.
    """
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return load_library()
    if wanted == TorchKernels.name:
        return None
    found = load_library((wanted,)) if wanted in LEVELS else None
    if found is None:
        here = [level for level in LEVELS if load_library((level,))]
        raise refuse(VARIABLE, wanted, f"one of {', '.join((*here, TorchKernels.name))}")
    return found


def _measured_ways() -> Path:
    """A file for each processor and state of the kernels: several machines may share a cache folder."""
    key = hashlib.sha256(f"{processor_name()} {os.cpu_count()} {sources_digest()}".encode()).hexdigest()[:16]
    return cache_dir() / "kernels" / f"{key}.json"
