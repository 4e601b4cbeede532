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


def best_samples(
    outputs: Sequence[GenerationOutput], params: SamplingParams, returns_logprobs: bool
) -> list[GenerationOutput]:
    """The `params.n` whose tokens are likeliest on average, best first; failed ones come last.

    Args:
        outputs: of all samples, in the order of their ids.
        returns_logprobs: whether log-probabilities are wanted besides.
    """
    if params.best_of is None:
        return list(outputs)
    of_prompt = outputs[0].prompt_logprobs  # the first sample's, which need not be among the best
    best = [replace(one, prompt_logprobs=None) for one in sorted(outputs, key=_mean_logprob, reverse=True)]
    best[0].prompt_logprobs = of_prompt
    return best[: params.n] if returns_logprobs else [replace(one, logprobs=[]) for one in best[: params.n]]


def _mean_logprob(output: GenerationOutput) -> float:
    if output.error is not None or not output.logprobs:
        return float("-inf")
    mean = sum(output.logprobs) / len(output.logprobs)
    return mean if mean == mean else float("-inf")  # NaN has no place in an order
