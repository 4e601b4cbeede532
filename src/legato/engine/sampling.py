"""From logits to tokens, each row by its own parameters."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from legato.engine.batch import SamplingBatch, StepResult
from legato.kernels.sampling import native_sampler

_LOWEST = -87.0  # no token with a lower score is ever drawn: e^-87 is about the smallest number of float32


def sample(logits: Tensor, sampling: SamplingBatch, with_logprobs: bool) -> StepResult:
    """One token for each row.

    Args:
        logits: float32 [rows, vocabulary]. A row whose largest is no finite number takes it, whatever its parameters.
        sampling: the rows' parameters.
        with_logprobs: also return each token's log-probability under the processed distribution.
    """
    native = native_sampler() if logits.device.type == "cpu" else None
    if sampling.all_greedy and not with_logprobs:
        likeliest = logits.argmax(dim=-1) if native is None else native.argmax(logits)
        return StepResult(likeliest.tolist(), None)
    uniforms = uniform(sampling.seed, sampling.position)
    if native is None:
        return sample_with_torch(logits, sampling, uniforms, with_logprobs)
    tokens, logprobs = native.sample(
        logits, sampling.temperature, sampling.top_k, sampling.top_p, uniforms, with_logprobs
    )
    return StepResult(tokens.tolist(), None if logprobs is None else logprobs.tolist())


def sample_with_torch(
    logits: Tensor, sampling: SamplingBatch, uniforms: NDArray[np.float64], with_logprobs: bool
) -> StepResult:
    """The twin of `NativeSampler.sample`, for any device.

    Both draw in the vocabulary's order, so that a seed gives the same tokens by either.
    """
    token_ids = logits.argmax(dim=-1)
    if sampling.all_greedy:
        chosen = logits.log_softmax(dim=-1).gather(1, token_ids[:, None])[:, 0] if with_logprobs else None
        return StepResult(token_ids.tolist(), None if chosen is None else chosen.tolist())
    greedy = sampling.temperature == 0
    # Greedy rows are computed with for their log-probabilities alone: under the logits as they are.
    rows = np.arange(len(greedy)) if with_logprobs else np.flatnonzero(~greedy)
    temperature = _column(np.where(greedy, np.float32(1), sampling.temperature)[rows], logits)
    top_k, top_p = np.where(greedy, 0, sampling.top_k)[rows], np.where(greedy, np.float32(1), sampling.top_p)[rows]
    some = logits if with_logprobs else logits[torch.from_numpy(rows).to(logits.device)]
    largest = some.amax(dim=-1, keepdim=True)
    # Shifted so that the likeliest is 0: a tiny temperature would divide it to infinity.
    scores = (some - largest).div_(temperature)
    scores.masked_fill_(scores < _LOWEST, -torch.inf)
    if top_k.any() or (top_p < 1).any():
        scores = _keep_likeliest(scores, top_k, top_p)
    # float64: a float32 sum over a large vocabulary would round the unlikely tokens away.
    cumulative = scores.double().exp_().cumsum_(dim=-1)
    total = cumulative[:, -1:].clone()
    target = _column(uniforms[rows], logits) * total  # below the total, also once rounded
    drawn = torch.searchsorted(cumulative, target, right=True)
    takes_largest = _column(greedy[rows], logits) | ~largest.isfinite()
    some_rows = torch.from_numpy(rows).to(logits.device)
    token_ids[some_rows] = torch.where(takes_largest, token_ids[some_rows, None], drawn)[:, 0]
    if not with_logprobs:
        return StepResult(token_ids.tolist(), None)
    logprobs = scores.gather(1, token_ids[:, None]).double() - total.log()
    return StepResult(token_ids.tolist(), logprobs[:, 0].tolist())


def _keep_likeliest(scores: Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float32]) -> Tensor:
    """The scores with -inf for what top-k, and top-p of what that leaves, filter out."""
    kept, order = scores.sort(dim=-1, descending=True, stable=True)
    vocab_size = scores.shape[-1]
    if top_k.any():
        last = _column(np.where(top_k == 0, vocab_size, top_k) - 1, scores).clamp_(max=vocab_size - 1)
        kept = kept.masked_fill_(kept < kept.gather(1, last), -torch.inf)  # all that tie for the last place stay
    if (top_p < 1).any():
        cumulative = kept.double().exp_().cumsum_(dim=-1)
        limit = cumulative[:, -1:] * _column(np.where(top_p < 1, top_p, np.inf), scores)
        # The mass before each has reached the limit. The likeliest stays, however small that is.
        kept[:, 1:].masked_fill_(cumulative[:, :-1] >= limit, -torch.inf)
    return torch.empty_like(scores).scatter_(1, order, kept)


def _column(values: NDArray, like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)[:, None]


def uniform(seed: NDArray[np.uint64], position: NDArray[np.int64]) -> NDArray[np.float64]:
    """A random number in [0, 1) that depends on the seed and the position alone.

    So a request's tokens depend neither on its batch-mates nor on what was recomputed. SplitMix64 (Steele, Lea and
    Flood, "Fast splittable pseudorandom number generators", 2014): the position-th output of the generator that
    starts at a mix of the seed.
    """
    with np.errstate(over="ignore"):
        state = _mix(seed) + (position.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
