"""Changes to single tokens' logits that a request's own tokens call for: penalties, biases, what must not come.

Host arrays only. A request's tokens only grow, so each is looked at once, and a step costs what is new in it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from legato.sampling_params import SamplingParams

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]


class Changes(NamedTuple):
    """Of one row: x becomes (x + bias) / repetition, or × repetition if that is negative, less `less`.

    Attributes:
        token_ids: int64 [tokens], each once.
        bias, repetition, less: float32 [tokens].
        forbidden: tokens whose logit becomes -inf after that.
    """

    token_ids: IntArray
    bias: FloatArray
    repetition: FloatArray
    less: FloatArray
    forbidden: Sequence[int]


class TokenEdits:
    """The changes to one request's logits, from token to token.

    Args:
        params: of the request.
        num_prompt_tokens: the first tokens, which no presence or frequency penalty counts.
        stop_token_ids: what ends it, forbidden up to `params.min_new_tokens`.
    """

    def __init__(self, params: SamplingParams, num_prompt_tokens: int, stop_token_ids: frozenset[int]) -> None:
        self._params = params
        self._num_prompt_tokens = num_prompt_tokens
        self._stop_token_ids = tuple(stop_token_ids)
        endings = [ids for ids in params.bad_words_ids if len(ids) > 1]
        self._bad_endings = [(list(ids[:-1]), ids[-1]) for ids in endings]
        singles = {ids[0] for ids in params.bad_words_ids if len(ids) == 1} - stop_token_ids
        self._forbidden = [*{*params.suppress_tokens, *singles}]
        self._counts_tokens = params.repetition_penalty != 1 or self._has_penalties
        self._num_seen = 0
        self._place: dict[int, int] = {}
        self._generated: set[int] = set()
        self._token_ids = np.zeros(64, np.int64)
        self._values = np.zeros((3, 64), np.float32)  # bias, repetition, less
        for token_id, bias in params.logit_bias.items():
            place = self._add(token_id)  # may make the arrays anew
            self._values[0, place] = bias

    @classmethod
    def needed(
        cls, params: SamplingParams, num_prompt_tokens: int, stop_token_ids: frozenset[int]
    ) -> "TokenEdits | None":
        """None, if nothing ever changes."""
        edits = cls(params, num_prompt_tokens, stop_token_ids)
        has_some = edits._counts_tokens or edits._place or edits._forbidden or edits._bad_endings
        return edits if has_some or (params.min_new_tokens and stop_token_ids) else None

    @property
    def _has_penalties(self) -> bool:
        return bool(self._params.presence_penalty or self._params.frequency_penalty)

    def after(self, tokens: Sequence[int]) -> Changes:
        """The changes to the logits of what follows `tokens`, of which those asked about before are a part."""
        if self._counts_tokens:
            for position in range(self._num_seen, len(tokens)):
                self._count(tokens[position], position >= self._num_prompt_tokens)
        self._num_seen = len(tokens)
        size = len(self._place)
        bias, repetition, less = self._values[:, :size]
        return Changes(self._token_ids[:size], bias, repetition, less, self._forbidden_after(tokens))

    def _forbidden_after(self, tokens: Sequence[int]) -> Sequence[int]:
        endings = [last for start, last in self._bad_endings if list(tokens[-len(start) :]) == start]
        early = len(tokens) - self._num_prompt_tokens < self._params.min_new_tokens
        stops = self._stop_token_ids if early else ()
        return [*self._forbidden, *endings, *stops] if endings or stops else self._forbidden

    def _count(self, token_id: int, generated: bool) -> None:
        if not generated and self._params.repetition_penalty == 1:
            return
        place = self._place.get(token_id)
        if place is None:
            place = self._add(token_id)
        params, values = self._params, self._values
        values[1, place] = params.repetition_penalty
        if generated and self._has_penalties:
            first = token_id not in self._generated
            self._generated.add(token_id)
            values[2, place] += params.frequency_penalty + (params.presence_penalty if first else 0)

    def _add(self, token_id: int) -> int:
        place = self._place[token_id] = len(self._place)
        if place == len(self._token_ids):
            self._token_ids = np.concatenate([self._token_ids, self._token_ids])
            self._values = np.concatenate([self._values, self._values], axis=1)
        self._token_ids[place] = token_id
        self._values[:, place] = (0, 1, 0)
        return place


@dataclass(frozen=True, slots=True)
class EditsBatch:
    """`Changes` of several rows, one after the other.

    Attributes:
        rows, token_ids: int64 [tokens]; no pair comes twice.
        bias, repetition, less: float32 [tokens].
        forbidden_rows, forbidden_ids: int64; tokens whose logit becomes -inf.
    """

    rows: IntArray
    token_ids: IntArray
    bias: FloatArray
    repetition: FloatArray
    less: FloatArray
    forbidden_rows: IntArray
    forbidden_ids: IntArray

    @classmethod
    def of(cls, rows: Sequence[int], changes: Sequence[Changes]) -> "EditsBatch":
        """Row `rows[i]` has `changes[i]`."""
        return cls(
            np.repeat(np.array(rows, np.int64), [len(c.token_ids) for c in changes]),
            np.concatenate([c.token_ids for c in changes]),
            np.concatenate([c.bias for c in changes]),
            np.concatenate([c.repetition for c in changes]),
            np.concatenate([c.less for c in changes]),
            np.repeat(np.array(rows, np.int64), [len(c.forbidden) for c in changes]),
            np.array([token_id for c in changes for token_id in c.forbidden], np.int64),
        )
