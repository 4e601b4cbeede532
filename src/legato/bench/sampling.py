"""What sampling, grammars, samples and guesses cost or save: each against the plain way, taking turns."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm
from transformers import GenerationConfig

from legato.bench.settings import EngineSettings
from legato.bench.spread import Spread
from legato.bench.workload import check_workload
from legato.errors import InvalidValueError
from legato.manager import ContinuousBatchingManager
from legato.model_api import enable
from legato.models import load_model, load_tokenizer, torch_dtype
from legato.request import RequestSpec

_BATCH, _NEW_TOKENS = 64, 64
_PROMPTS_WITH_SAMPLES, _SAMPLES = 8, 16
_PEOPLE = {  # never complete within the tokens there are, so that all answers are of one length
    "type": "array",
    "minItems": 100,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "role": {"enum": ["reader", "writer", "editor"]},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["name", "age", "role", "tags"],
        "additionalProperties": False,
    },
}


@dataclass(frozen=True)
class _Way:
    """How prompts are run.

    Attributes:
        specs: the requests.
        config: settings of the engine.
        one_by_one: each after the one before has ended, and not all at once.
    """

    specs: Sequence[RequestSpec]
    config: dict[str, Any] = field(default_factory=dict)
    one_by_one: bool = False


@dataclass(frozen=True, slots=True)
class _Run:
    seconds: float
    steps: int
    tokens: int
    prompt_tokens: int


def measure_sampling(
    model_name: str, workload: dict[str, Any], what: Sequence[str], settings: EngineSettings, rounds: int
) -> Iterator[dict[str, Any]]:
    """Compare ways to run a workload's prompts; progress goes to stderr.

    Args:
        workload: see `read_workload`; "settings" and "grammar" take 64 of its prompts, "samples" 8, "guesses" all.
        what: names of `COMPARISONS`.
        rounds: both ways are run so often, in turns, after a round that is not counted.

    Yields:
        For each of `what` {"what", "plain", "other": {"seconds", "steps", "tokens", "prompt_tokens"} of the median
        round, "seconds", "seconds_a_step", "tokens_a_second": by what factor the other way has more, {"median", "low",
        "high"}}.

    Raises:
        InvalidValueError: a setting, or a name that is none of `COMPARISONS`.
    """
    check_workload(workload)
    unknown = [name for name in what if name not in COMPARISONS]
    if unknown:
        raise InvalidValueError(f"what={unknown[0]!r} is not allowed: it must be one of {', '.join(COMPARISONS)}")
    model = enable(load_model(model_name, dtype=torch_dtype(settings.dtype)).eval())
    tokenizer = load_tokenizer(model_name) if "grammar" in what else None
    for name in what:
        plain, other = COMPARISONS[name](workload["requests"])
        with ExitStack() as stack:
            managers = [
                stack.enter_context(
                    model.continuous_batching_context_manager(
                        GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, top_k=0),
                        settings.config(**way.config),
                        tokenizer=tokenizer,
                    )
                )
                for way in (plain, other)
            ]
            pairs = []
            for _ in tqdm(range(rounds + 1), desc=name, unit="round", disable=None, dynamic_ncols=True):
                pairs.append((_run(managers[0], plain), _run(managers[1], other)))
        yield _figures(name, pairs[1:])


def _run(manager: ContinuousBatchingManager, way: _Way) -> _Run:
    with manager.pause():
        pass  # prefixes are forgotten
    before, start, tokens = manager.stats, time.perf_counter(), 0
    for specs in [[spec] for spec in way.specs] if way.one_by_one else [way.specs]:
        for _, output in manager.as_completed(specs):
            if output.error is not None:
                raise InvalidValueError(output.error)
            tokens += len(output.generated_tokens)
    seconds, after = time.perf_counter() - start, manager.stats
    num_steps = after.num_steps - before.num_steps
    return _Run(seconds, num_steps, tokens, after.num_prompt_tokens - before.num_prompt_tokens)


def _figures(name: str, pairs: Sequence[tuple[_Run, _Run]]) -> dict[str, Any]:
    def ratios(figure: Callable[[_Run], float]) -> dict[str, float]:
        return Spread.of([figure(other) / figure(plain) for plain, other in pairs]).rounded(3)

    def shown(run: _Run) -> dict[str, Any]:
        return {
            "seconds": round(run.seconds, 3),
            "steps": run.steps,
            "tokens": run.tokens,
            "prompt_tokens": run.prompt_tokens,
        }

    plain, other = sorted(pairs, key=lambda pair: pair[1].seconds / pair[0].seconds)[len(pairs) // 2]
    return {
        "what": name,
        "plain": shown(plain),
        "other": shown(other),
        "seconds": ratios(lambda run: run.seconds),
        "seconds_a_step": ratios(lambda run: run.seconds / run.steps),
        "tokens_a_second": ratios(lambda run: run.tokens / run.seconds),
    }


# What is compared: of a workload's requests the plain way, and the other


def _settings(requests: Sequence[dict[str, Any]]) -> tuple[_Way, _Way]:
    """All greedy, and each with settings of its own."""
    prompts = [one["prompt_ids"] for one in requests[:_BATCH]]
    return (
        _Way([_spec(prompt) for prompt in prompts]),
        _Way([_spec(prompt, **_different(number, prompt)) for number, prompt in enumerate(prompts)]),
    )


def _different(number: int, prompt: list[int]) -> dict[str, Any]:
    """Settings that no other number has; every parameter is among those of any eight numbers."""
    sampling: dict[str, Any] = {"temperature": 0.5 + number / 64, "seed": number}
    extra: dict[str, Any] = {
        "top_k": 10 + number,
        "top_p": 0.8 + number / 512,
        "min_p": 0.01 + number / 1024,
        "typical_p": 0.8 + number / 512,
        "repetition_penalty": 1.05 + number / 256,
        "frequency_penalty": 0.1 + number / 128,
        "logit_bias": {prompt[0]: 2.0, prompt[-1]: -5.0},
        "bad_words_ids": [[prompt[0], prompt[-1]]],
    }
    for offset in (0, 1, 4):  # three of them each
        name = list(extra)[(number + offset) % len(extra)]
        sampling[name] = extra[name]
    return sampling


def _grammar(requests: Sequence[dict[str, Any]]) -> tuple[_Way, _Way]:
    """Free text, and text that a JSON schema allows, both drawn."""
    prompts = [one["prompt_ids"] for one in requests[:_BATCH]]
    return (
        _Way([_spec(prompt, temperature=1.0, seed=i) for i, prompt in enumerate(prompts)]),
        _Way([_spec(prompt, temperature=1.0, seed=i, json_schema=_PEOPLE) for i, prompt in enumerate(prompts)]),
    )


def _samples(requests: Sequence[dict[str, Any]]) -> tuple[_Way, _Way]:
    """Many requests for a prompt, and one for many samples."""
    prompts = [one["prompt_ids"] for one in requests[:_PROMPTS_WITH_SAMPLES]]
    each = [_spec(prompt, temperature=1.0, seed=i) for prompt in prompts for i in range(_SAMPLES)]
    return _Way(each), _Way([_spec(prompt, temperature=1.0, seed=0, n=_SAMPLES) for prompt in prompts])


def _guesses(requests: Sequence[dict[str, Any]]) -> tuple[_Way, _Way]:
    """A token at a time, and with guesses, one request after the other."""
    specs = [RequestSpec(one["prompt_ids"], one["max_new_tokens"]) for one in requests]
    return _Way(specs, one_by_one=True), _Way(specs, {"speculative": "ngram"}, one_by_one=True)


def _spec(prompt_ids: list[int], **sampling: Any) -> RequestSpec:
    return RequestSpec(prompt_ids, _NEW_TOKENS, sampling=sampling)


COMPARISONS: dict[str, Callable[[Sequence[dict[str, Any]]], tuple[_Way, _Way]]] = {
    "settings": _settings,
    "grammar": _grammar,
    "samples": _samples,
    "guesses": _guesses,
}
