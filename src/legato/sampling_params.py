"""`SamplingParams`: how one request is sampled, and when it stops."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from legato.checks import check_bool, check_int, check_number, optional_token_ids, refuse, token_ids
from legato.errors import InvalidValueError

MAX_SEED = 2**64 - 1
MAX_TOP_LOGPROBS = 20
MAX_SAMPLES = 1024
STRUCTURED = ("json_schema", "regex", "choice", "grammar")  # each asks for a grammar

# transformers' further logits processors, by the setting of `GenerationConfig` that asks for each, with the values that
# ask for none. `engine/processors.py` makes them.
PROCESSOR_SETTINGS: dict[str, tuple[Any, ...]] = {
    "min_length": (0,),
    "top_h": (),
    "epsilon_cutoff": (0, 0.0),
    "eta_cutoff": (0, 0.0),
    "encoder_repetition_penalty": (1, 1.0),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "renormalize_logits": (False,),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "remove_invalid_values": (False,),
    "exponential_decay_length_penalty": (),
    "begin_suppress_tokens": ((), []),
    "sequence_bias": (),
    "watermarking_config": (),
}


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it stops.

    Args:
        temperature: 0 is greedy; logits are divided by it otherwise. Finite, at least 0.
        top_k: sample from the k likeliest tokens; 0, -1 or None: from all.
        top_p: sample from the smallest set of likeliest tokens whose probability reaches this, in (0, 1].
        min_p: sample from tokens at least this times as likely as the likeliest, in [0, 1].
        typical_p: sample from the tokens whose information is nearest to the expected one, as many as reach this
            probability, in (0, 1] (Meister et al., "Locally typical sampling", 2022).
        repetition_penalty: divides the positive logits of tokens that occurred, in prompt or answer, and multiplies the
            negative ones; from 1e-6 to 1e6, 1 is none (Keskar et al., "CTRL", 2019).
        presence_penalty: taken off the logits of tokens that occurred in the answer, in [-2, 2].
        frequency_penalty: the same for each time they did, in [-2, 2].
        logit_bias: added to the logits of single tokens, {token id: -100 to 100}.
        bad_words_ids: sequences of tokens that must not come about.
        suppress_tokens: tokens that must not.
        min_new_tokens: no end-of-sequence or stop token before so many new ones.
        max_tokens: new tokens at most, at least 1. None: what the model's generation config says, else 256.
        stop_token_ids: tokens that end the request besides the model's own end-of-sequence tokens.
        stop: texts that end the request; needs the tokenizer, so `LLM` or a manager that was given it.
        include_stop_str_in_output: whether a text that ended the request stays in its output.
        ignore_eos: go on past the model's end-of-sequence tokens (`stop_token_ids` still stop).
        include_prompt: put the prompt before the generated text.
        logprobs: return the log-probability of each new token, and of so many of the likeliest besides, up to 20. None:
            none, unless the manager's `return_logprobs` says so.
        prompt_logprobs: the same of the prompt's tokens, each given those before it. They are computed again for it,
            whatever prefix is cached, and are always those of the model's own logits.
        logprobs_mode: "processed": under the distribution the token was drawn from, after penalties, temperature and
            filters; "raw": under the model's own logits.
        n: samples of the prompt, which is computed once; each is an output of its own.
        best_of: samples made, of which the `n` are returned whose tokens are likeliest on average, by `logprobs_mode`,
            best first; needs all of them to be done, so `LLM`. None: all that are made.
        json_schema: the answer is JSON that this schema, a dict or text, allows; what cannot be enforced is refused.
        regex: the answer matches it, all of it.
        choice: the answer is one of these texts.
        grammar: the answer is one of a grammar's, in Lark's notation or, with `::=`, in llama.cpp's GBNF. Any of these
            four needs the tokenizer, and none goes with another; an answer that is cut by its length says so.
        seed: in [0, 2**64); the same seed gives the same tokens whatever runs beside it. None: drawn at random.
        logits_processors: transformers' `LogitsProcessor`s of the caller's own, called with the request's tokens and
            logits alone.
        processors: further settings of transformers' `GenerationConfig` that ask for logits processors, by name,
            besides those of the generation config; a value that asks for nothing overrules the config's.

    Raises:
        InvalidValueError: a value out of range.
    """

    temperature: float = 1.0
    top_k: int | None = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words_ids: Sequence[Sequence[int]] = ()
    suppress_tokens: Sequence[int] = ()
    min_new_tokens: int = 0
    max_tokens: int | None = None
    stop_token_ids: Sequence[int] = ()
    stop: str | Sequence[str] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    include_prompt: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: Literal["processed", "raw"] = "processed"
    n: int = 1
    best_of: int | None = None
    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: Sequence[str] = ()
    grammar: str | None = None
    seed: int | None = None
    logits_processors: Sequence[Callable[..., Any]] = ()
    processors: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._check_numbers()
        for name in ("include_stop_str_in_output", "ignore_eos", "include_prompt"):
            check_bool(name, getattr(self, name))
        self._settle("top_k", max(self.top_k or 0, 0))
        self._settle("stop_token_ids", tuple(optional_token_ids("stop_token_ids", self.stop_token_ids)))
        self._settle("suppress_tokens", tuple(optional_token_ids("suppress_tokens", self.suppress_tokens)))
        self._settle("bad_words_ids", _sequences("bad_words_ids", self.bad_words_ids))
        self._settle("logit_bias", _biases(self.logit_bias))
        self._settle("stop", _texts("stop", self.stop))
        if self.choice == []:  # asked for, and nothing to choose from
            raise refuse("choice", self.choice, "a text or a list of texts, at least one")
        self._settle("choice", _texts("choice", self.choice))
        self._check_structured()
        self._settle("logits_processors", _callables("logits_processors", self.logits_processors))
        self._settle("processors", _settings(self.processors))

    def _check_numbers(self) -> None:
        check_number("temperature", self.temperature, 0)
        check_int("top_k", self.top_k, -1, optional=True)
        check_number("top_p", self.top_p, 0, 1, above=True)
        check_number("min_p", self.min_p, 0, 1)
        check_number("typical_p", self.typical_p, 0, 1, above=True)
        check_number("repetition_penalty", self.repetition_penalty, 1e-6, 1e6)  # beyond, logits overflow
        check_number("presence_penalty", self.presence_penalty, -2, 2)
        check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        check_int("min_new_tokens", self.min_new_tokens, 0)
        check_int("max_tokens", self.max_tokens, 1, optional=True)
        check_int("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS, optional=True)
        check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_TOP_LOGPROBS, optional=True)
        check_int("n", self.n, 1, MAX_SAMPLES)
        check_int("best_of", self.best_of, self.n, MAX_SAMPLES, optional=True)
        if self.logprobs_mode not in ("processed", "raw"):
            raise refuse("logprobs_mode", self.logprobs_mode, '"processed" or "raw"')
        check_int("seed", self.seed, 0, MAX_SEED, optional=True)
        if self.max_tokens is not None and self.min_new_tokens > self.max_tokens:
            raise refuse("min_new_tokens", self.min_new_tokens, f"no more than max_tokens={self.max_tokens}")

    def _check_structured(self) -> None:
        if self.json_schema is not None and not isinstance(self.json_schema, str | Mapping):
            raise refuse("json_schema", self.json_schema, "a JSON schema, as a dict or as text, or None")
        if self.json_schema == "":
            raise refuse("json_schema", self.json_schema, "a JSON schema, as a dict or as text, or None")
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise refuse(name, value, "a text that is not empty, or None")
        asked = [name for name in STRUCTURED if getattr(self, name) not in (None, ())]
        if len(asked) > 1:
            raise InvalidValueError(f"{asked[0]} and {asked[1]} are not allowed together: an answer has one grammar")

    @property
    def active_processors(self) -> dict[str, Any]:
        """Those of `processors` that ask for something."""
        return {n: v for n, v in self.processors.items() if v not in PROCESSOR_SETTINGS[n]}

    @property
    def is_structured(self) -> bool:
        """Whether the answer has a grammar."""
        return any(getattr(self, name) not in (None, ()) for name in STRUCTURED)

    def _settle(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # frozen, but for its birth

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "SamplingParams":
        """`SamplingParams(**values)`, unknown names refused by name; those of `processors` may stand by themselves.

        Raises:
            InvalidValueError: an unknown name or a value out of range.
        """
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known - set(PROCESSOR_SETTINGS))
        if unknown:
            names = ", ".join(sorted(known | set(PROCESSOR_SETTINGS)))
            raise InvalidValueError(f"unknown sampling parameter {unknown[0]!r}; known ones are {names}")
        loose = {name: value for name, value in values.items() if name in PROCESSOR_SETTINGS}
        settings = {name: value for name, value in values.items() if name in known}
        if loose:
            settings["processors"] = {**settings.get("processors", {}), **loose}
        return cls(**settings)

    def as_dict(self) -> dict[str, Any]:
        """Every field by name; values are not copied."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def _sequences(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    if value is None:
        return ()
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
        raise refuse(name, value, "a list of lists of token ids")
    sequences = tuple(tuple(token_ids(name, one)) for one in value)
    if not all(sequences):
        raise refuse(name, value, "a list of lists of token ids, none of them empty")
    return sequences


def _biases(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise refuse("logit_bias", value, "a dict of token ids and numbers")
    biases = {}
    for token, bias in value.items():
        token = (
            int(token) if isinstance(token, str) and token.isdecimal() and len(token) < 20 else token
        )  # as JSON has it
        check_int("logit_bias", token, 0)
        check_number("logit_bias", bias, -100, 100)
        biases[token] = float(bias)
    return biases


def _texts(name: str, value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    if texts is None:
        return ()
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) and text for text in texts):
        raise refuse(name, value, "a text or a list of texts, none of them empty")
    return tuple(texts)


def _callables(name: str, value: Any) -> tuple[Callable[..., Any], ...]:
    if not isinstance(value, Sequence) or not all(map(callable, value)):
        raise refuse(name, value, "a list of callables, each taking (input_ids, scores)")
    return tuple(value)


def _settings(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise refuse("processors", value, "a dict of settings of transformers' GenerationConfig")
    unknown = sorted(set(value) - set(PROCESSOR_SETTINGS), key=str)
    if unknown:
        raise refuse("processors", unknown[0], f"one of {', '.join(sorted(PROCESSOR_SETTINGS))}")
    return {n: v for n, v in value.items() if v is not None}
