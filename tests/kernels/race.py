"""The random numbers by which tokens race to be drawn, told once more, and keys made to measure."""

import numpy as np
from numpy.typing import NDArray

MULTIPLIERS = 0x9E3779B9, 0x7FEB352D, 0x846CA68B
BITS = 0xFFFFFFFF


def random_bits(key: int, token: int) -> int:
    """In Python's integers, which do not wrap around by themselves."""
    x = (token * MULTIPLIERS[0] + (key & BITS)) & BITS
    x = ((x ^ x >> 16) * MULTIPLIERS[1] & BITS) ^ key >> 32
    x = (x ^ x >> 15) * MULTIPLIERS[2] & BITS
    return x ^ x >> 16


def key_for(token: int, high: int = 77) -> np.uint64:
    """One that gives a token the random bits 0, and so a head start that no other can have; by going backwards."""
    x = high * pow(MULTIPLIERS[1], -1, 2**32) & BITS  # what comes after it must be 0 from end to beginning
    x ^= x >> 16
    key = high << 32 | (x - token * MULTIPLIERS[0]) & BITS
    assert random_bits(key, token) == 0
    return np.uint64(key)


def head_starts(key: int, vocab_size: int) -> NDArray[np.float64]:
    """Gumbel-distributed numbers of a row's tokens."""
    bits = np.array([random_bits(int(key), token) for token in range(vocab_size)], np.float64)
    return -np.log(-np.log1p(-(bits + 0.5) / 2**32))
