"""Guesses at what a request's answer goes on with, made of its own tokens (prompt lookup)."""

from collections.abc import Sequence

_NGRAMS = (4, 3, 2)  # what is looked up, longest first
_MAX_PAUSE = 64  # tokens
_INDEXED_AT_ONCE = 2048  # tokens: some 4 ms


class PromptLookup:
    """Drafts of one request: what followed the last time its latest few tokens came, in prompt or answer.

    A draft costs rows of a forward pass, whether it is right or not. So drafts grow while they are right, to
    `max_tokens`, shrink when they are wrong, and pause for ever longer while nothing of them is, as in text that copies
    nothing.

    Source: Saxena, "Prompt Lookup Decoding", 2023. Verified by comparison: a draft is right if the token drawn in its
    place, with the random number of that place, is the same, so guessing changes no token at all.

    Args:
        max_tokens: of a draft.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._length = max(1, max_tokens // 2)
        self._num_failures = 0  # in a row
        self._resume_at = 0  # tokens
        self._num_indexed = 0
        self._next: dict[tuple[int, ...], int] = {}  # n-gram: where what followed it begins

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """Up to `most` tokens that may follow `tokens`, of which those asked about before are a part."""
        most = min(most, self._length)
        if most < 1 or len(tokens) < self._resume_at:
            return []
        if not self._index(tokens):
            return []
        for size in _NGRAMS:
            start = self._next.get(tuple(tokens[-size:]))
            if start is not None:
                return _continued(tokens, start, most)
        return []

    def learn(self, num_drafted: int, num_accepted: int, num_tokens: int) -> None:
        """How a draft fared, and how many tokens there are now."""
        if num_accepted == num_drafted:
            self._length = min(2 * self._length, self._max_tokens)
        else:
            self._length = max(1, num_accepted)
        if num_accepted:
            self._num_failures = 0
        else:
            self._num_failures += 1
            self._resume_at = num_tokens + min(1 << self._num_failures, _MAX_PAUSE) - 1

    def _index(self, tokens: Sequence[int]) -> bool:
        """All n-grams but those that end with the last token: nothing follows them yet.

        A long prompt takes several calls, since everybody waits for each. Returns whether all is indexed.
        """
        until = min(len(tokens), self._num_indexed + _INDEXED_AT_ONCE)
        for end in range(max(1, self._num_indexed), until):
            for size in _NGRAMS:
                if end >= size:
                    self._next[tuple(tokens[end - size : end])] = end
        self._num_indexed = until
        return until == len(tokens)


def _continued(tokens: Sequence[int], start: int, most: int) -> list[int]:
    """What came at `start`; where that reaches the end, it goes round: the text repeats itself."""
    period = len(tokens) - start
    return [tokens[start + i % period] for i in range(most)]
