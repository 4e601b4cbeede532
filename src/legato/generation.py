"""From transformers' `GenerationConfig` and a caller's arguments to requests."""

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from transformers import GenerationConfig

from legato.checks import check_bool, check_int, optional_token_ids, refuse, token_ids
from legato.errors import InvalidValueError
from legato.request import MAX_SEED, Request, RequestSpec, SamplingParams

DEFAULT_NEW_TOKENS = 20  # what `model.generate` does when told nothing

# Settings that make a logits processor, with the values that ask for none.
_PROCESSORS: dict[str, tuple[Any, ...]] = {
    "min_length": (0,),
    "min_new_tokens": (0,),
    "min_p": (0, 0.0),
    "top_h": (),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "repetition_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "bad_words_ids": (),
    "renormalize_logits": (False,),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "remove_invalid_values": (False,),
    "exponential_decay_length_penalty": (),
    "suppress_tokens": (),
    "begin_suppress_tokens": (),
    "sequence_bias": (),
    "guidance_scale": (1, 1.0),
    "watermarking_config": (),
}

# Settings that change how generation proceeds or ends, so that leaving them out would give other tokens.
_NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "stop_strings": (),
    "max_time": (),
    "penalty_alpha": (0.0,),
    "dola_layers": (),
    "num_beam_groups": (1,),
    "constraints": (),
    "force_words_ids": (),
    "prompt_lookup_num_tokens": (),
    "assistant_early_exit": (),
    "token_healing": (False,),
}


@dataclass(frozen=True)
class GenerationDefaults:
    """What a request does unless it says otherwise.

    Attributes:
        do_sample: sample, or take the likeliest token.
        params: how it is sampled if it is.
        eos_token_ids: end-of-sequence tokens.
        max_new_tokens: new tokens; None: by `max_length`.
        max_length: prompt and answer together; None: 20 new tokens.
        dropped: settings that ask for logits processors which do not exist here.
    """

    do_sample: bool
    params: SamplingParams
    eos_token_ids: tuple[int, ...]
    max_new_tokens: int | None
    max_length: int | None
    dropped: tuple[str, ...]

    def new_tokens(self, prompt_length: int) -> int:
        """New tokens after a prompt; under 1 when `max_length` leaves no room for any."""
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        return DEFAULT_NEW_TOKENS if self.max_length is None else self.max_length - prompt_length

    @classmethod
    def of(cls, model: Any, config: GenerationConfig | None) -> "GenerationDefaults":
        """Merge as `model.generate` does: what `config` leaves open is as the model's own generation config says.

        Raises:
            InvalidValueError: a value out of range, or a setting that cannot be honoured.
        """
        if config is not None and not isinstance(config, GenerationConfig):
            raise refuse("generation_config", config, "a transformers GenerationConfig or None")
        sources = [source for source in (config, getattr(model, "generation_config", None)) if source is not None]

        def value(name: str, default: Any) -> Any:
            found = (getattr(source, name, None) for source in sources)
            return next((v for v in found if v is not None), default)

        _refuse_unsupported({name: value(name, None) for name in _NOT_SUPPORTED})
        max_new_tokens = value("max_new_tokens", None)
        check_int("max_new_tokens", max_new_tokens, 1, optional=True)
        return cls(
            do_sample=bool(value("do_sample", False)),
            params=SamplingParams(
                temperature=value("temperature", 1.0), top_k=value("top_k", 50), top_p=value("top_p", 1.0)
            ),
            eos_token_ids=tuple(optional_token_ids("eos_token_id", value("eos_token_id", None))),
            max_new_tokens=max_new_tokens,
            max_length=value("max_length", None),
            dropped=tuple(name for name, neutral in _PROCESSORS.items() if value(name, None) not in (None, *neutral)),
        )


def _refuse_unsupported(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if value is not None and value not in _NOT_SUPPORTED[name]:
            raise InvalidValueError(f"{name}={value!r} is not supported by continuous batching here")


class RequestFactory:
    """Checks what callers submit and makes requests of it.

    Args:
        vocab_size: token ids are below this.
        max_length: tokens a sequence may have by the model.
        cache_tokens: tokens a sequence may have by the cache.
        seed: of the seeds of requests that bring none; None: at random.
    """

    def __init__(self, vocab_size: int, max_length: int, cache_tokens: int, seed: int | None) -> None:
        self._vocab_size = vocab_size
        self._max_length = max_length
        self._cache_tokens = cache_tokens
        self._random = random.Random(seed)

    def make(self, defaults: GenerationDefaults, request_id: str, spec: RequestSpec) -> Request:
        """A request that the engine can see through to its end.

        Raises:
            InvalidValueError: naming the field, the value and the limit.
        """
        if not isinstance(request_id, str) or not request_id:
            raise refuse("request_id", request_id, "a non-empty string")
        check_bool("streaming", spec.streaming)
        if not isinstance(spec.cache_salt, str | None):
            raise refuse("cache_salt", spec.cache_salt, "a string or None")
        prompt = self._prompt(spec.input_ids)
        params = _sampling(defaults, spec.sampling)
        eos = spec.eos_token_id
        eos_token_ids = defaults.eos_token_ids if eos is None else optional_token_ids("eos_token_id", eos)
        stops = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else eos_token_ids)
        return Request(
            request_id=request_id,
            prompt_ids=prompt,
            params=params,
            max_new_tokens=self._new_tokens(defaults, len(prompt), spec.max_new_tokens, params.max_tokens),
            stop_token_ids=stops,
            seed=self._random.randint(0, MAX_SEED) if params.seed is None else params.seed,
            streaming=spec.streaming,
            created_time=time.perf_counter(),
            tokens=prompt.copy(),
            cache_salt=spec.cache_salt,
            timestamps=[] if spec.record_timestamps else None,
        )

    def make_failed(self, request_id: str, spec: RequestSpec, error: str) -> Request:
        """The request that stands for a spec which can never be served: it has failed already."""
        request = Request(
            request_id=request_id,
            prompt_ids=[],
            params=SamplingParams(),
            max_new_tokens=1,
            stop_token_ids=frozenset(),
            seed=0,
            streaming=spec.streaming is True,
            created_time=time.perf_counter(),
            tokens=[],
        )
        request.finish("error", error, request.created_time)
        return request

    def _prompt(self, input_ids: Any) -> list[int]:
        prompt = token_ids("input_ids", input_ids)
        if not prompt:
            raise InvalidValueError("input_ids is empty: a prompt needs at least 1 token")
        low, high = min(prompt), max(prompt)
        if low < 0 or high >= self._vocab_size:
            bad = low if low < 0 else high
            raise InvalidValueError(f"input_ids has token id {bad}: the model knows 0 to {self._vocab_size - 1}")
        if len(prompt) >= self._max_length:
            raise InvalidValueError(
                f"input_ids has {len(prompt)} tokens: the model takes at most {self._max_length}, new ones included"
            )
        return prompt

    def _new_tokens(
        self, defaults: GenerationDefaults, prompt_length: int, max_new_tokens: int | None, max_tokens: int | None
    ) -> int:
        """New tokens to generate at most; the model's own length limit ends a request early, the cache's refuses it."""
        check_int("max_new_tokens", max_new_tokens, 1, optional=True)
        wanted = max_new_tokens or max_tokens or defaults.new_tokens(prompt_length)
        if wanted < 1:
            raise InvalidValueError(
                f"input_ids has {prompt_length} tokens: max_length={defaults.max_length} allows fewer"
            )
        wanted = min(wanted, self._max_length - prompt_length)
        # The last token is never read back, so it takes no place in the cache.
        if prompt_length + wanted - 1 > self._cache_tokens:
            raise InvalidValueError(
                f"input_ids has {prompt_length} tokens and max_new_tokens={wanted}: {prompt_length + wanted - 1} "
                f"tokens must fit in the cache, which holds {self._cache_tokens}"
            )
        return wanted


def _sampling(defaults: GenerationDefaults, given: Mapping[str, Any]) -> SamplingParams:
    """The defaults with what the request sets itself; temperature 0 unless it is to be sampled."""
    settings = {name: value for name, value in given.items() if value is not None}
    do_sample = settings.pop("do_sample", None)
    check_bool("do_sample", do_sample, optional=True)
    params = SamplingParams.from_mapping(settings)
    unset = {f: getattr(defaults.params, f) for f in ("temperature", "top_k", "top_p") if f not in settings}
    if do_sample is None:
        do_sample = defaults.do_sample or len(unset) < 3
    return replace(params, **unset) if do_sample else replace(params, temperature=0.0)
