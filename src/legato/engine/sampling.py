"""From logits to tokens, each row by its own parameters."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from legato.engine.batch import SamplingBatch, StepResult


def sample(logits: Tensor, sampling: SamplingBatch, with_logprobs: bool) -> StepResult:
    """One token for each row.

    Args:
        logits: float32 [rows, vocabulary].
        sampling: the rows' parameters.
        with_logprobs: also return each token's log-probability under the processed distribution.
    """
    if sampling.all_greedy:
        token_ids, processed = logits.argmax(dim=-1), logits
    else:
        token_ids, processed = _sample_rows(logits, sampling, with_logprobs)
    logprobs = None
    if with_logprobs:
        logprobs = processed.log_softmax(dim=-1).gather(1, token_ids[:, None])[:, 0].tolist()
    return StepResult(token_ids.tolist(), logprobs)


def _sample_rows(logits: Tensor, sampling: SamplingBatch, with_logprobs: bool) -> tuple[Tensor, Tensor]:
    """(tokens [rows], processed logits [rows, vocabulary]); greedy rows keep their argmax and their logits."""
    device = logits.device
    (sampled,) = np.nonzero(sampling.temperature)
    rows = torch.from_numpy(sampled).to(device)
    temperature = torch.from_numpy(sampling.temperature[sampled]).to(device)
    # Shifted so that the likeliest is 0: a tiny temperature would divide it to infinity.
    scores = (logits[rows] - logits[rows].amax(dim=-1, keepdim=True)) / temperature[:, None]
    kept, order = _keep_likeliest(scores, sampling, sampled)
    uniforms = torch.from_numpy(uniform(sampling.seed[sampled], sampling.position[sampled])).to(device)
    # float64: a float32 sum over a large vocabulary would round the unlikely tokens away.
    cumulative = kept.double().softmax(dim=-1).cumsum(dim=-1)
    ranks = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True)
    token_ids = logits.argmax(dim=-1)
    token_ids[rows] = order.gather(1, ranks.clamp_(max=logits.shape[-1] - 1))[:, 0]
    if not with_logprobs:
        return token_ids, logits
    processed = logits.clone()
    processed[rows] = torch.empty_like(kept).scatter_(1, order, kept)
    return token_ids, processed


def _keep_likeliest(scores: Tensor, sampling: SamplingBatch, sampled: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """Scores from the likeliest token down, with -inf past top-k and top-p, and the tokens in that order."""
    kept, order = scores.sort(dim=-1, descending=True, stable=True)
    top_k, top_p = sampling.top_k[sampled], sampling.top_p[sampled]
    if top_k.any():
        last = torch.from_numpy(np.where(top_k == 0, scores.shape[-1], top_k) - 1).to(scores.device)
        threshold = kept.gather(1, last.clamp_(max=scores.shape[-1] - 1)[:, None])
        kept = kept.masked_fill(kept < threshold, -torch.inf)
    if (top_p < 1).any():
        limit = torch.from_numpy(np.where(top_p < 1, top_p, np.inf)).to(scores.device)
        probabilities = kept.double().softmax(dim=-1)
        beyond = probabilities.cumsum(dim=-1) - probabilities >= limit[:, None]
        beyond[:, 0] = False  # the likeliest stays, however small the limit
        kept = kept.masked_fill(beyond, -torch.inf)
    return kept, order


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
