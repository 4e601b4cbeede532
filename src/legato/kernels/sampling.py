"""Sampling on the CPU by the native kernels, which do not sort the vocabulary. Its twin in torch is in `engine/`."""

import ctypes
import os
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from legato.filters import Filters
from legato.kernels.calls import Argmax, Forbidding, Sampling
from legato.kernels.choose import VARIABLE, find_library
from legato.kernels.library import thread_pool


class NativeSampler:
    """Tokens from logits. Any number of threads may call.

    Args:
        library: from `load_library`.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._pool = thread_pool(library, torch.get_num_threads())

    def argmax(self, logits: Tensor) -> NDArray[np.int64]:
        """The likeliest token of each row, the first of those that tie.

        Args:
            logits: float32 [rows, vocabulary] on the CPU, as for `sample`.
        """
        logits = _rows_of(logits)
        rows, vocab_size = logits.shape
        tokens = np.empty(rows, np.int64)
        arguments = Argmax(logits.data_ptr(), logits.stride(0), rows, vocab_size, tokens.ctypes.data)
        self._library.legato_argmax(self._pool, ctypes.byref(arguments))
        return tokens

    def sample(
        self, logits: Tensor, filters: Filters, keys: NDArray[np.uint64], wants_logprob: NDArray[np.bool_]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """A token for each row, and its log-probability after temperature and filters where it is wanted.

        Args:
            logits: float32 [rows, vocabulary] on the CPU.
            filters: of the rows.
            keys: each row's random number.
            wants_logprob: of each row.
        """
        logits = _rows_of(logits)
        rows, vocab_size = logits.shape
        tokens, logprobs = np.empty(rows, np.int64), np.empty(rows, np.float64)
        arrays = [
            np.ascontiguousarray(values, dtype)
            for values, dtype in (
                (filters.temperature, np.float32), (filters.top_k, np.int64), (filters.top_p, np.float32),
                (filters.min_p, np.float32), (filters.typical_p, np.float32), (keys, np.uint64),
                (wants_logprob, np.uint8), (tokens, np.int64), (logprobs, np.float64),
            )
        ]  # fmt: skip
        addresses = (values.ctypes.data for values in arrays)
        arguments = Sampling(logits.data_ptr(), logits.stride(0), rows, vocab_size, *addresses)
        if self._library.legato_sample(self._pool, ctypes.byref(arguments)):
            raise MemoryError("sampling found no memory for its candidates")
        return tokens, logprobs

    def forbid(self, logits: Tensor, rows: NDArray[np.int64], masks: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """-inf for tokens that must not come, in place. Returns for each of `rows` whether any may.

        Args:
            logits: float32 [rows, vocabulary] on the CPU, each row's side by side.
            rows: which of them have a mask.
            masks: [rows, bytes], bit i of a row, from the lowest, says whether token i may come.
        """
        if logits.dtype != torch.float32 or logits.device.type != "cpu" or logits.stride(1) != 1:
            raise ValueError(f"forbidding takes whole rows of float32 on the CPU, not {logits.dtype}")
        rows, masks = np.ascontiguousarray(rows, np.int64), np.ascontiguousarray(masks)
        any_may = np.empty(len(rows), np.bool_)
        arguments = Forbidding(
            logits.data_ptr(), logits.stride(0), logits.shape[1], len(rows), rows.ctypes.data, masks.ctypes.data,
            masks.shape[1], any_may.ctypes.data,
        )  # fmt: skip
        self._library.legato_forbid(self._pool, ctypes.byref(arguments))
        return any_may


def native_sampler() -> NativeSampler | None:
    """The one for the processor at hand; None where the package has no library for it, or torch's kernels are wanted.

    As `load_kernels` does it takes what the environment variable `LEGATO_KERNELS` names.
    """
    return _load_sampler(os.environ.get(VARIABLE), os.getpid())


@lru_cache
def _load_sampler(wanted: str | None, process: int) -> NativeSampler | None:
    found = find_library()
    return None if found is None else NativeSampler(found[1])


def _rows_of(logits: Tensor) -> Tensor:
    """The logits with each row's side by side."""
    if logits.dtype != torch.float32 or logits.device.type != "cpu":
        raise ValueError(f"native sampling takes float32 on the CPU, not {logits.dtype} on {logits.device}")
    return logits if logits.stride(1) == 1 else logits.contiguous()
