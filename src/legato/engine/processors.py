"""transformers' logits processors for one request among others: those there is no batched way for, and a user's own.

A request that asks for one of them is processed by transformers alone, all its settings in transformers' own order, on
its own tokens and logits: so it gets what `model.generate` would give it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import LongTensor, Tensor
from transformers.generation import logits_process as hf
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList

from legato.errors import InvalidValueError
from legato.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request, as processors are made for it.

    Attributes:
        settings: by `GenerationConfig`'s names; those that ask for nothing are not in it.
        prompt: int64 [1, tokens].
        eos: end-of-sequence tokens, int64 [tokens], or None.
        stops: those and the request's own stop tokens, or None.
        max_length: of prompt and answer.
        vocab_size: of the logits.
    """

    settings: Mapping[str, Any]
    prompt: LongTensor
    eos: Tensor | None
    stops: Tensor | None
    max_length: int
    vocab_size: int

    @property
    def prompt_length(self) -> int:
        return self.prompt.shape[1]


class _OccurrencePenalty(LogitsProcessor):
    """Presence and frequency penalty, which transformers does not have."""

    def __init__(self, presence: float, frequency: float, prompt_length: int) -> None:
        self._presence, self._frequency, self._prompt_length = presence, frequency, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        counts = torch.zeros_like(scores)
        generated = input_ids[:, self._prompt_length :]
        counts.scatter_add_(1, generated, torch.ones_like(generated, dtype=scores.dtype))
        return scores - self._frequency * counts - self._presence * (counts > 0)


class _Bias(LogitsProcessor):
    def __init__(self, biases: Mapping[int, float]) -> None:
        self._biases = biases

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for token_id, bias in self._biases.items():
            scores[:, token_id] += bias
        return scores


def _first_after(asked: _Asked) -> int:
    """Where `begin_suppress_tokens` counts."""
    forced = asked.settings.get("forced_bos_token_id") is not None
    return asked.prompt_length if asked.prompt_length > 1 or not forced else asked.prompt_length + 1


_Make = Callable[[Any, _Asked], Any]

_COLDEST = 1e-30  # the likeliest token's alone is left; below it, logits would overflow
# In transformers' order; of a setting's value and the request.
_PROCESSORS: tuple[tuple[str, _Make], ...] = (
    ("logit_bias", lambda value, asked: _Bias(value)),
    ("sequence_bias", lambda value, asked: hf.SequenceBiasLogitsProcessor(value)),
    (
        "encoder_repetition_penalty",
        lambda value, asked: hf.EncoderRepetitionPenaltyLogitsProcessor(float(value), asked.prompt),
    ),
    ("repetition_penalty", lambda value, asked: hf.RepetitionPenaltyLogitsProcessor(float(value))),
    ("occurrence_penalties", lambda value, asked: _OccurrencePenalty(value[0], value[1], asked.prompt_length)),
    ("no_repeat_ngram_size", lambda value, asked: hf.NoRepeatNGramLogitsProcessor(value)),
    (
        "encoder_no_repeat_ngram_size",
        lambda value, asked: hf.EncoderNoRepeatNGramLogitsProcessor(value, asked.prompt),
    ),
    ("bad_words_ids", lambda value, asked: hf.NoBadWordsLogitsProcessor([list(v) for v in value], asked.eos)),
    ("min_length", lambda value, asked: asked.eos is not None and hf.MinLengthLogitsProcessor(value, asked.eos)),
    (
        "min_new_tokens",
        lambda value, asked: (
            asked.stops is not None and hf.MinNewTokensLengthLogitsProcessor(asked.prompt_length, value, asked.stops)
        ),
    ),
    ("forced_bos_token_id", lambda value, asked: hf.ForcedBOSTokenLogitsProcessor(value)),
    ("forced_eos_token_id", lambda value, asked: hf.ForcedEOSTokenLogitsProcessor(asked.max_length, value)),
    ("remove_invalid_values", lambda value, asked: hf.InfNanRemoveLogitsProcessor()),
    (
        "exponential_decay_length_penalty",
        lambda value, asked: (
            asked.eos is not None and hf.ExponentialDecayLengthPenalty(tuple(value), asked.eos, asked.prompt_length)
        ),
    ),
    ("suppress_tokens", lambda value, asked: hf.SuppressTokensLogitsProcessor(list(value))),
    (
        "begin_suppress_tokens",
        lambda value, asked: hf.SuppressTokensAtBeginLogitsProcessor(list(value), _first_after(asked)),
    ),
)
# Only where tokens are drawn.
_WARPERS: tuple[tuple[str, _Make], ...] = (
    ("temperature", lambda value, asked: hf.TemperatureLogitsWarper(max(float(value), _COLDEST))),
    ("top_h", lambda value, asked: hf.TopHLogitsWarper(value)),
    ("top_k", lambda value, asked: hf.TopKLogitsWarper(value)),
    ("top_p", lambda value, asked: hf.TopPLogitsWarper(float(value))),
    ("min_p", lambda value, asked: hf.MinPLogitsWarper(value)),
    ("typical_p", lambda value, asked: hf.TypicalLogitsWarper(value)),
    ("epsilon_cutoff", lambda value, asked: hf.EpsilonLogitsWarper(value)),
    ("eta_cutoff", lambda value, asked: hf.EtaLogitsWarper(value)),
)
_LAST: tuple[tuple[str, _Make], ...] = (
    ("watermarking_config", lambda value, asked: value.construct_processor(asked.vocab_size, "cpu")),
    ("renormalize_logits", lambda value, asked: hf.LogitNormalization()),
)

# What of the ordinary parameters asks for nothing.
_NEUTRAL: dict[str, Any] = {
    "logit_bias": {}, "repetition_penalty": 1, "bad_words_ids": (), "min_new_tokens": 0, "suppress_tokens": (),
    "temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "typical_p": 1,
}  # fmt: skip


class RowProcessors:
    """One request's processors, the warpers included.

    Args:
        params: of the request.
        prompt_ids: its prompt.
        eos_token_ids: what ends it.
        max_new_tokens: new tokens at most.
        vocab_size: of the logits.

    Raises:
        InvalidValueError: a setting that transformers refuses.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        eos_token_ids: Sequence[int],
        max_new_tokens: int,
        vocab_size: int,
    ) -> None:
        settings = {n: getattr(params, n) for n in _NEUTRAL if getattr(params, n) != _NEUTRAL[n]}
        if params.presence_penalty or params.frequency_penalty:
            settings["occurrence_penalties"] = (params.presence_penalty, params.frequency_penalty)
        eos = torch.tensor(list(eos_token_ids)) if eos_token_ids else None
        stop_ids = [*eos_token_ids, *(t for t in params.stop_token_ids if 0 <= t < vocab_size)]
        stops = torch.tensor(stop_ids) if stop_ids else None
        prompt = _long([prompt_ids])
        asked = _Asked(
            {**settings, **params.active_processors}, prompt, eos, stops, len(prompt_ids) + max_new_tokens, vocab_size
        )
        made = [*_made(_PROCESSORS, asked), *params.logits_processors]
        made += _made(_WARPERS, asked) if params.temperature > 0 else []
        self._processors = LogitsProcessorList([*made, *_made(_LAST, asked)])

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        """Whether the request asks for something there is no batched way for."""
        return bool(params.active_processors or params.logits_processors)

    def __call__(self, tokens: Sequence[int], logits: Tensor) -> Tensor:
        """Processed logits, float32 [1, vocabulary] on the CPU, of what follows `tokens`; `logits` stay as they are."""
        return self._processors(_long([tokens]), logits.clone())


def _long(rows: Sequence[Sequence[int]]) -> LongTensor:
    return cast(LongTensor, torch.tensor([list(row) for row in rows], dtype=torch.int64))


def _made(table: tuple[tuple[str, _Make], ...], asked: _Asked) -> list[Any]:
    made = []
    for name, make in table:
        if name in asked.settings:
            try:
                processor = make(asked.settings[name], asked)
            except (TypeError, ValueError, AttributeError, IndexError) as error:
                raise InvalidValueError(f"{name}={asked.settings[name]!r} is not allowed: {error}") from error
            made += [processor] if processor else []
    return made
