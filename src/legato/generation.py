"""From transformers' `GenerationConfig` and a caller's arguments to requests."""

import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from transformers import GenerationConfig

from legato.checks import check_bool, check_int, optional_token_ids, refuse, token_ids
from legato.drafting import PromptLookup
from legato.engine.processors import RowProcessors
from legato.engine.token_edits import TokenEdits
from legato.errors import InvalidValueError
from legato.filters import NAMES
from legato.grammar import Grammar, GrammarCompiler
from legato.request import Request, RequestSpec
from legato.sampling_params import MAX_SEED, PROCESSOR_SETTINGS, SamplingParams
from legato.stop_text import StopText

_MOST_COMPILERS = 4
MAX_PRIORITY = 2**31 - 1
DEFAULT_NEW_TOKENS = 20  # what `model.generate` does when told nothing

# Settings that ask for a logits processor which cannot work here, with the values that ask for none.
_DROPPED: dict[str, tuple[Any, ...]] = {"guidance_scale": (1, 1.0)}  # it runs the model a second time

# Settings that change how generation proceeds or ends, so that leaving them out would give other tokens.
_NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
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
        dropped: settings that ask for logits processors which cannot work here.
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
            params=_default_params(value),
            eos_token_ids=tuple(optional_token_ids("eos_token_id", value("eos_token_id", None))),
            max_new_tokens=max_new_tokens,
            max_length=value("max_length", None),
            dropped=tuple(name for name, neutral in _DROPPED.items() if value(name, None) not in (None, *neutral)),
        )


def _default_params(value: Callable[[str, Any], Any]) -> SamplingParams:
    """Of what a generation config says, by the names it has there."""
    return SamplingParams(
        temperature=value("temperature", 1.0),
        top_k=value("top_k", 50),
        top_p=value("top_p", 1.0),
        min_p=value("min_p", 0.0),
        typical_p=value("typical_p", 1.0),
        repetition_penalty=value("repetition_penalty", 1.0),
        bad_words_ids=value("bad_words_ids", ()),
        suppress_tokens=value("suppress_tokens", ()),
        min_new_tokens=value("min_new_tokens", 0),
        stop=value("stop_strings", ()),
        n=value("num_return_sequences", 1),
        processors={name: value(name, None) for name in PROCESSOR_SETTINGS},
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
        return_logprobs: give every request's tokens their log-probabilities.
        tokenizer: for texts that stop and for grammars; None: they are refused.
        num_draft_tokens: tokens guessed ahead at most, where a request allows it.
    """

    def __init__(
        self,
        vocab_size: int,
        max_length: int,
        cache_tokens: int,
        seed: int | None,
        return_logprobs: bool = False,
        tokenizer: Any = None,
        num_draft_tokens: int = 0,
    ) -> None:
        self._vocab_size = vocab_size
        self._max_length = max_length
        self._cache_tokens = cache_tokens
        self._random = random.Random(seed)
        self._return_logprobs = return_logprobs
        self._tokenizer = tokenizer
        self._num_draft_tokens = num_draft_tokens
        # By end-of-sequence tokens; one takes seconds to make for a large vocabulary.
        self._compilers: OrderedDict[tuple[int, ...], GrammarCompiler] = OrderedDict()
        self._making = threading.Lock()

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
        check_int("priority", spec.priority, -MAX_PRIORITY, MAX_PRIORITY)
        prompt = self._prompt(spec.input_ids, is_answered=spec.score_from is None)
        params = _sampling(defaults, spec.sampling)
        self._check_token_ids(params)
        if params.best_of is not None:
            raise InvalidValueError(f"best_of={params.best_of} needs all samples at once: use LLM, or n and choose")
        eos = spec.eos_token_id
        eos_token_ids = () if params.ignore_eos else defaults.eos_token_ids if eos is None else _eos(eos)
        if spec.score_from is None:
            max_new_tokens = self._new_tokens(defaults, len(prompt), spec.max_new_tokens, params.max_tokens)
        else:
            check_int("score_from", spec.score_from, 1, len(prompt))
            if len(prompt) > self._cache_tokens:
                told = f"they must fit in the cache, which holds {self._cache_tokens}"
                raise InvalidValueError(f"input_ids has {len(prompt)} tokens: {told}")
            max_new_tokens = 0
        seed = self._random.randint(0, MAX_SEED) if params.seed is None else params.seed

        def sample(number: int) -> Request:
            changes = _logits_changes(params, prompt, eos_token_ids, max_new_tokens, self._vocab_size)
            may_guess = grammar is None and all(change is None for change in changes.values())
            return Request(
                request_id=request_id if number == 0 else f"{request_id}:{number}",
                prompt_ids=prompt,
                params=params,
                max_new_tokens=max_new_tokens,
                stop_token_ids=frozenset((*params.stop_token_ids, *eos_token_ids)),
                seed=(seed + number) % (MAX_SEED + 1),
                streaming=spec.streaming,
                created_time=created_time,
                tokens=prompt.copy(),
                cache_salt=spec.cache_salt,
                priority=spec.priority,
                num_logprobs=0 if params.logprobs is None and self._return_logprobs else params.logprobs,
                score_from=_score_from(params, spec) if number == 0 else None,
                stop_text=self._stop_text(params),
                grammar=None if grammar is None else grammar.copy(),
                timestamps=[] if spec.record_timestamps else None,
                drafter=PromptLookup(self._num_draft_tokens) if may_guess and self._num_draft_tokens else None,
                **changes,
            )

        grammar = self._grammar(params, eos_token_ids) if max_new_tokens else None
        created_time = time.perf_counter()
        request = sample(0)
        if max_new_tokens:
            request.children += [sample(number) for number in range(1, params.n)]
        return request

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

    def _stop_text(self, params: SamplingParams) -> StopText | None:
        if not params.stop:
            return None
        if self._tokenizer is None:
            raise InvalidValueError(
                f"stop={params.stop!r} needs the model's tokenizer: use LLM, or give tokenizer= to the manager"
            )
        return StopText(self._tokenizer, params.stop, params.include_stop_str_in_output)

    def _grammar(self, params: SamplingParams, eos_token_ids: tuple[int, ...]) -> Grammar | None:
        if not params.is_structured:
            return None
        if self._tokenizer is None:
            raise InvalidValueError("structured output needs the model's tokenizer: use LLM, or give it to the manager")
        with self._making:
            compiler = self._compilers.get(eos_token_ids)
            if compiler is None:
                compiler = GrammarCompiler(self._tokenizer, self._vocab_size, eos_token_ids)
                self._compilers[eos_token_ids] = compiler
                if len(self._compilers) > _MOST_COMPILERS:
                    self._compilers.popitem(last=False)
            self._compilers.move_to_end(eos_token_ids)
        return compiler.grammar(params)

    def _check_token_ids(self, params: SamplingParams) -> None:
        named = {
            "logit_bias": params.logit_bias,
            "suppress_tokens": params.suppress_tokens,
            "bad_words_ids": [token_id for ids in params.bad_words_ids for token_id in ids],
        }
        for name, ids in named.items():
            bad = [token_id for token_id in ids if not 0 <= token_id < self._vocab_size]
            if bad:
                raise InvalidValueError(f"{name} has token id {bad[0]}: the model knows 0 to {self._vocab_size - 1}")

    def _prompt(self, input_ids: Any, is_answered: bool) -> list[int]:
        prompt = token_ids("input_ids", input_ids)
        if not prompt:
            raise InvalidValueError("input_ids is empty: a prompt needs at least 1 token")
        low, high = min(prompt), max(prompt)
        if low < 0 or high >= self._vocab_size:
            bad = low if low < 0 else high
            raise InvalidValueError(f"input_ids has token id {bad}: the model knows 0 to {self._vocab_size - 1}")
        if len(prompt) + is_answered > self._max_length:
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
                f"input_ids has {prompt_length} tokens: with {wanted} new ones, {prompt_length + wanted - 1} "
                f"tokens must fit in the cache, which holds {self._cache_tokens}"
            )
        return wanted


def _score_from(params: SamplingParams, spec: RequestSpec) -> int | None:
    return 1 if spec.score_from is None and params.prompt_logprobs is not None else spec.score_from


def _eos(value: Any) -> tuple[int, ...]:
    """-1 is none."""
    return tuple(token_id for token_id in optional_token_ids("eos_token_id", value) if token_id >= 0)


def _logits_changes(
    params: SamplingParams, prompt: list[int], eos_token_ids: tuple[int, ...], max_new_tokens: int, vocab_size: int
) -> dict[str, Any]:
    """Edits where they are enough, else processors that do everything."""
    if RowProcessors.needed(params):
        eos = [token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size]
        return {"processors": RowProcessors(params, prompt, eos, max_new_tokens, vocab_size)}
    # Those that the model has no logit for cannot come anyway.
    stops = frozenset(t for t in (*params.stop_token_ids, *eos_token_ids) if 0 <= t < vocab_size)
    return {"edits": TokenEdits.needed(params, len(prompt), stops)}


def _sampling(defaults: GenerationDefaults, given: Mapping[str, Any]) -> SamplingParams:
    """The defaults with what the request sets itself; temperature 0 unless it is to be sampled.

    Giving any of what is about drawing makes a request sample.
    """
    settings = {name: value for name, value in given.items() if value is not None}
    do_sample = settings.pop("do_sample", None)
    check_bool("do_sample", do_sample, optional=True)
    if do_sample is None:
        do_sample = defaults.do_sample or any(name in settings for name in NAMES)
    merged = {**defaults.params.as_dict(), **settings}
    loose = [name for name in settings if name in PROCESSOR_SETTINGS]
    own = SamplingParams(processors=settings.get("processors", {})).processors
    merged["processors"] = {**defaults.params.processors, **own, **{name: merged.pop(name) for name in loose}}
    params = SamplingParams.from_mapping(merged)
    return params if do_sample else replace(params, temperature=0.0)
