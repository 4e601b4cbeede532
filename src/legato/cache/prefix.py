"""What a page holds, as a number: the hashes by which equal prefixes of different requests find each other."""

import hashlib
from array import array
from collections.abc import Sequence


class PageHasher:
    """Hashes complete pages, each chained to the one before it.

    A page's K and V depend on its tokens, on all tokens before them, and on the weights. The hash covers all three (the
    weights by a count of their changes), and the caller's salt. It has 256 bits (SHA-256), so that two contents with
    one hash cannot be met by chance nor made on purpose, even by a tenant who chooses prompts to that end: comparing
    tokens would add nothing.

    Args:
        page_size: tokens a page holds.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._num_weight_changes = 0

    def weights_changed(self) -> None:
        """Chains that start from now on match none from before."""
        self._num_weight_changes += 1

    def root(self, cache_salt: str | None) -> bytes:
        """Where the chain of a request that starts now begins."""
        return hashlib.sha256(f"{self._num_weight_changes} {cache_salt!a}".encode()).digest()

    def private_root(self, request_id: str) -> bytes:
        """A chain that no other request has: for one whose pages were computed under different weights."""
        return hashlib.sha256(f"{self._num_weight_changes} private {request_id!a}".encode()).digest()

    def extend(self, hashes: list[bytes], root: bytes, tokens: Sequence[int]) -> None:
        """Append the hashes of the complete pages of `tokens` beyond those that `hashes` covers already."""
        size = self.page_size
        previous = hashes[-1] if hashes else root
        for start in range(len(hashes) * size, len(tokens) - size + 1, size):
            previous = hashlib.sha256(previous + array("Q", tokens[start : start + size]).tobytes()).digest()
            hashes.append(previous)
