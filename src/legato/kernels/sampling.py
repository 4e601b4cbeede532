"""Sampling on the CPU by the native kernels, which do not sort the vocabulary. Its twin in torch is in `engine/`."""

import ctypes
import os
from ctypes import c_int64, c_void_p
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from legato.kernels.choose import VARIABLE, find_library
from legato.kernels.library import thread_pool

_P, _I = c_void_p, c_int64


class NativeSampler:
    """Tokens from logits. Any number of threads may call.

    Args:
        library: from `load_library`.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._argmax, self._sample = library.legato_argmax, library.legato_sample
        self._argmax.argtypes, self._argmax.restype = [_P, _P, _I, _I, _I, _P], None
        self._sample.argtypes, self._sample.restype = [_P, _P, _I, _I, _I, _P, _P, _P, _P, _P, _P], c_int64
        self._pool = thread_pool(library, torch.get_num_threads())

    def argmax(self, logits: Tensor) -> NDArray[np.int64]:
        """The likeliest token of each row, the first of those that tie.

        Args:
            logits: float32 [rows, vocabulary] on the CPU, as for `sample`.
        """
        logits = _rows_of(logits)
        rows, vocab_size = logits.shape
        tokens = np.empty(rows, np.int64)
        self._argmax(self._pool, logits.data_ptr(), logits.stride(0), rows, vocab_size, tokens.ctypes.data)
        return tokens

    def sample(
        self,
        logits: Tensor,
        temperature: NDArray[np.float32],
        top_k: NDArray[np.int64],
        top_p: NDArray[np.float32],
        uniforms: NDArray[np.float64],
        with_logprobs: bool,
    ) -> tuple[NDArray[np.int64], NDArray[np.float64] | None]:
        """A token for each row, and its log-probability after temperature and filters if asked for.

        Args:
            logits: float32 [rows, vocabulary] on the CPU.
            temperature: of each row; 0 takes the likeliest token and none of the filters.
            top_k, top_p: of each row; 0 and 1 are none.
            uniforms: each row's random number in [0, 1).
            with_logprobs: whether to return log-probabilities.
        """
        logits = _rows_of(logits)
        rows, vocab_size = logits.shape
        tokens = np.empty(rows, np.int64)
        logprobs = np.empty(rows, np.float64) if with_logprobs else None
        settings = [
            np.ascontiguousarray(values, dtype)
            for values, dtype in (
                (temperature, np.float32), (top_k, np.int64), (top_p, np.float32), (uniforms, np.float64)
            )
        ]  # fmt: skip
        failed = self._sample(
            self._pool, logits.data_ptr(), logits.stride(0), rows, vocab_size,
            *(values.ctypes.data for values in settings), tokens.ctypes.data,
            None if logprobs is None else logprobs.ctypes.data,
        )  # fmt: skip
        if failed:
            raise MemoryError("sampling found no memory for its candidates")
        return tokens, logprobs


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
