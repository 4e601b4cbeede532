"""`best_of`: more samples are made than are wanted, and the likeliest returned."""

from collections.abc import Sequence
from dataclasses import replace

from legato.request import GenerationOutput
from legato.sampling_params import SamplingParams


def all_samples(params: SamplingParams) -> SamplingParams:
    """What is to be asked for: every sample, and how likely its tokens are."""
    if params.best_of is None:
        return params
    return replace(params, n=params.best_of, best_of=None, logprobs=params.logprobs or 0)


def best_samples(outputs: Sequence[GenerationOutput], params: SamplingParams) -> list[GenerationOutput]:
    """The `params.n` whose tokens are likeliest on average, best first; failed ones come last."""
    if params.best_of is None:
        return list(outputs)
    best = sorted(outputs, key=_mean_logprob, reverse=True)[: params.n]
    return [replace(one, logprobs=[]) for one in best] if params.logprobs is None else best


def _mean_logprob(output: GenerationOutput) -> float:
    if output.error is not None or not output.logprobs:
        return float("-inf")
    return sum(output.logprobs) / len(output.logprobs)
