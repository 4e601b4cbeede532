"""From logits to tokens, each row by its own parameters."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from legato.engine.batch import AllowedTokens, Batch, SamplingBatch, StepResult
from legato.engine.token_edits import EditsBatch
from legato.filters import Filters
from legato.kernels.sampling import native_sampler
from legato.request import TokenLogprobs

_LOWEST = -87.0  # no token with a lower score is ever drawn: e^-87 is about the smallest number of float32
_ROWS_AT_ONCE = 16  # of what takes several times the logits' memory


def finish_pass(logits: Tensor, batch: Batch) -> StepResult:
    """What is wanted of a pass's logits, float32 [rows of `batch.logits_indices`, vocabulary]; processed in place."""
    num_sampled, scored = len(batch.sampling.seed), batch.scored
    scores = (
        token_logprobs(logits[num_sampled:], scored.token_ids, scored.num_likeliest) if len(scored.token_ids) else []
    )
    if not num_sampled:
        return StepResult([], [], scores)
    return replace(sample(logits[:num_sampled], batch.sampling), scores=scores)


def sample(logits: Tensor, sampling: SamplingBatch) -> StepResult:
    """One token for each row.

    Args:
        logits: float32 [rows, vocabulary]; processed in place. A row whose largest is no finite number takes it,
            whatever its parameters.
        sampling: the rows' parameters.
    """
    raw_rows = np.flatnonzero(sampling.raw_logprobs & (sampling.num_logprobs >= 0))
    raw = logits[_on(raw_rows, logits)] if len(raw_rows) else None
    errors = process_logits(logits, sampling)
    tokens, logprobs = draw(logits, sampling)
    if sampling.may_forbid:
        drawn = logits[torch.arange(len(tokens), device=logits.device), _on(tokens, logits)].cpu().numpy()
        for without in np.flatnonzero(np.isneginf(drawn)).tolist():
            errors.setdefault(without, "every token is forbidden")
    results: list[TokenLogprobs | None] = [None] * len(tokens)
    if sampling.wants_logprobs:
        for row in np.flatnonzero((sampling.num_logprobs >= 0) & ~sampling.raw_logprobs):
            results[row] = TokenLogprobs(float(logprobs[row]))
        _add_likeliest(results, logits, sampling)
        if raw is not None:
            wanted = sampling.num_logprobs[raw_rows]
            for row, result in zip(raw_rows, token_logprobs(raw, tokens[raw_rows], wanted), strict=True):
                results[row] = result
    return StepResult(tokens.tolist(), results, errors=errors)


def process_logits(logits: Tensor, sampling: SamplingBatch) -> dict[int, str]:
    """Edit and process rows, in place. Returns what went wrong in a row's own processors."""
    if sampling.edits is not None:
        _edit(logits, sampling.edits)
    errors: dict[int, str] = {}
    if sampling.allowed is not None and sampling.processed:
        _restrict(logits, sampling.allowed, errors)  # filters among the processors must choose from what may come
    for one in sampling.processed:
        row = logits[one.row : one.row + 1]
        try:
            processed = one.process(one.tokens, row.cpu())
            if processed.shape != row.shape:
                raise ValueError(f"it returned scores of shape {tuple(processed.shape)}, not {tuple(row.shape)}")
            row.copy_(processed)
        except Exception as error:  # noqa: BLE001 - a caller's own code: whatever it raises, it must not harm the others
            errors[one.row] = f"a logits processor failed: {type(error).__name__}: {error}"
    if sampling.allowed is not None:
        _restrict(logits, sampling.allowed, errors)  # whatever processors have made of it
    return errors


def _restrict(logits: Tensor, allowed: AllowedTokens, errors: dict[int, str]) -> None:
    """-inf for what a row's grammar does not allow."""
    native = native_sampler() if logits.device.type == "cpu" and logits.stride(1) == 1 else None
    any_may = (forbid_with_torch if native is None else native.forbid)(logits, allowed.rows, allowed.masks())
    errors.update(dict.fromkeys(allowed.rows[~any_may].tolist(), "no token fits the grammar"))


def forbid_with_torch(logits: Tensor, rows: NDArray[np.int64], masks: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """The twin of `NativeSampler.forbid`, for any device."""
    may_come = np.unpackbits(masks, axis=1, bitorder="little")[:, : logits.shape[1]] != 0
    for row, allowed in zip(rows.tolist(), may_come, strict=True):
        logits[row].masked_fill_(_on(~allowed, logits), -torch.inf)
    return np.asarray(may_come.any(axis=1))


def _edit(logits: Tensor, edits: EditsBatch) -> None:
    if len(edits.rows):
        places = _on(edits.rows, logits), _on(edits.token_ids, logits)
        bias, repetition, less = (_on(values, logits) for values in (edits.bias, edits.repetition, edits.less))
        values = logits[places] + bias
        logits[places] = torch.where(values < 0, values * repetition, values / repetition) - less
    if len(edits.forbidden_rows):
        logits[_on(edits.forbidden_rows, logits), _on(edits.forbidden_ids, logits)] = -torch.inf


def draw(logits: Tensor, sampling: SamplingBatch) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """A token for each row of processed logits, and its log-probability under what it was drawn from where wanted."""
    native = native_sampler() if logits.device.type == "cpu" else None
    wants_logprob = (sampling.num_logprobs >= 0) & ~sampling.raw_logprobs
    if sampling.all_greedy and not wants_logprob.any():
        likeliest = logits.argmax(dim=-1).cpu().numpy() if native is None else native.argmax(logits)
        return likeliest, np.empty(0)
    keys = random_keys(sampling.seed, sampling.position)
    if native is not None:
        return native.sample(logits, sampling.filters, keys, wants_logprob)
    return draw_with_torch(logits, sampling.filters, keys, wants_logprob)


def draw_with_torch(
    logits: Tensor, filters: Filters, keys: NDArray[np.uint64], wants_logprob: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The twin of `NativeSampler.sample`, for any device: a seed gives the same tokens by either."""
    token_ids = logits.argmax(dim=-1)
    logprobs = torch.full((len(logits),), torch.nan, dtype=torch.float64, device=logits.device)
    greedy = filters.temperature == 0
    rows = np.flatnonzero(~greedy | wants_logprob)
    if len(rows):
        some = logits[_on(rows, logits)]
        largest = some.amax(dim=-1, keepdim=True)
        scores = filtered_scores(some, filters[rows])
        drawn = torch.cat([_race(*part) for part in _in_parts(scores, _on(keys[rows].view(np.int64), logits))])
        takes_largest = _column(greedy[rows], logits) | ~largest.isfinite()
        some_rows = _on(rows, logits)
        chosen = torch.where(takes_largest, token_ids[some_rows, None], drawn)
        token_ids[some_rows] = chosen[:, 0]
        # float64: a float32 sum over a large vocabulary would round the unlikely tokens away.
        logprobs[some_rows] = scores.gather(1, chosen).double()[:, 0] - scores.double().logsumexp(dim=-1)
    return token_ids.cpu().numpy(), logprobs.cpu().numpy()


def _in_parts(scores: Tensor, keys: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(scores.split(_ROWS_AT_ONCE), keys.split(_ROWS_AT_ONCE), strict=True)


def _race(scores: Tensor, keys: Tensor) -> Tensor:
    """The token of each row, [rows, 1], that comes first when each token's time is exponentially distributed.

    It is the faster the likelier it is, so that each wins as often as its probability says (Gumbel's trick). As every
    token has a random number of its own, a rounding of one logit does not move the others: see native/sampling.c.

    Args:
        scores: float32 [rows, vocabulary], -inf for what cannot win.
        keys: int64 [rows].
    """
    u = (
        _random_bits(keys[:, None], torch.arange(scores.shape[1], device=scores.device))
        .double()
        .add_(0.5)
        .mul_(2.0**-32)
    )
    return u.neg_().log1p_().neg_().log_().neg_().add_(scores).argmax(dim=-1, keepdim=True)


def _random_bits(keys: Tensor, tokens: Tensor) -> Tensor:
    """32 for each token, as whole numbers in int64; multipliers of Wellons' `lowbias32`."""
    mask = 0xFFFFFFFF
    x = (tokens * 0x9E3779B9 + (keys & mask)) & mask
    x = (x ^ x >> 16) * 0x7FEB352D & mask ^ (keys >> 32 & mask)
    x = (x ^ x >> 15) * 0x846CA68B & mask
    return x ^ x >> 16


def filtered_scores(logits: Tensor, filters: Filters) -> Tensor:
    """Logits over temperature, the likeliest at 0, and -inf for what filters leave out; greedy rows have none."""
    greedy = filters.temperature == 0
    temperature = np.where(greedy, np.float32(1), filters.temperature)
    # Shifted so that the likeliest is 0: a tiny temperature would divide it to infinity.
    scores = (logits - logits.amax(dim=-1, keepdim=True)).div_(_column(temperature, logits))
    scores.masked_fill_(scores < _LOWEST, -torch.inf)
    top_k = np.where(greedy, 0, filters.top_k)
    top_p, typical_p = (np.where(greedy, np.float32(1), each) for each in (filters.top_p, filters.typical_p))
    min_p = np.where(greedy, np.float32(0), filters.min_p)
    if top_k.any() or (top_p < 1).any():
        scores = _keep_likeliest(scores, top_k, top_p)
    if min_p.any():
        scores.masked_fill_(scores < _column(np.log(np.maximum(min_p, 1e-38)), scores), -torch.inf)
    if (typical_p < 1).any():
        typical = np.flatnonzero(typical_p < 1)
        for rows in np.array_split(typical, -(-len(typical) // _ROWS_AT_ONCE)):
            some = _on(rows, scores)
            scores[some] = _keep_typical(scores[some], _column(typical_p[rows], scores))
    return scores


def token_logprobs(
    logits: Tensor, token_ids: NDArray[np.int64], num_likeliest: NDArray[np.int64]
) -> list[TokenLogprobs]:
    """Log-probabilities of a token in each row, and of the row's likeliest ones.

    Args:
        logits: float32 [rows, vocabulary], the distribution itself.
        token_ids: int64 [rows].
        num_likeliest: int64 [rows].
    """
    logprobs = logits.double().log_softmax(dim=-1)
    chosen = logprobs.gather(1, _column(token_ids, logits))[:, 0].tolist()
    most = int(num_likeliest.max(initial=0))
    if not most:
        return [TokenLogprobs(logprob) for logprob in chosen]
    values, ids = logprobs.topk(min(most, logprobs.shape[1]), dim=-1)
    counts = np.minimum(num_likeliest, (values > -torch.inf).sum(-1).cpu().numpy())  # filters may leave fewer
    return [
        TokenLogprobs(logprob, tuple(zip(row_ids[:n], row_values[:n], strict=True)))
        for logprob, n, row_ids, row_values in zip(chosen, counts.tolist(), ids.tolist(), values.tolist(), strict=True)
    ]


def _add_likeliest(results: list[TokenLogprobs | None], logits: Tensor, sampling: SamplingBatch) -> None:
    """The likeliest tokens, of the rows that want them, under what was drawn from."""
    rows = np.flatnonzero((sampling.num_logprobs > 0) & ~sampling.raw_logprobs)
    if not len(rows):
        return
    scores = filtered_scores(logits[_on(rows, logits)], sampling.filters[rows])
    likeliest = token_logprobs(scores, np.zeros(len(rows), np.int64), sampling.num_logprobs[rows])
    for row, found in zip(rows, likeliest, strict=True):
        drawn = results[row]
        assert drawn is not None
        results[row] = TokenLogprobs(drawn.logprob, found.top)


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


def _keep_typical(scores: Tensor, typical_p: Tensor) -> Tensor:
    """The scores with -inf for all but those whose information is nearest to the expected one."""
    logprobs = scores.double().log_softmax(dim=-1)
    masses = logprobs.exp()
    expected = -(masses * logprobs).nan_to_num_().sum(-1, keepdim=True)
    distances = (-logprobs - expected).abs_()
    ordered, order = distances.sort(dim=-1, stable=True)
    before = masses.gather(1, order).cumsum_(dim=-1) < typical_p
    last = before.sum(-1, keepdim=True).clamp_(max=scores.shape[1] - 1)
    return scores.masked_fill(distances > ordered.gather(1, last), -torch.inf)


def _on(values: NDArray, like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)


def _column(values: NDArray, like: Tensor) -> Tensor:
    return _on(values, like)[:, None]


def random_keys(seed: NDArray[np.uint64], position: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Random numbers of 64 bits, each of which depends on its seed and position alone.

    So a request's tokens depend neither on its batch-mates nor on what was recomputed. SplitMix64 (Steele, Lea and
    Flood, "Fast splittable pseudorandom number generators", 2014): the position-th output of the generator that
    starts at a mix of the seed.
    """
    with np.errstate(over="ignore"):
        state = _mix(seed) + (position.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        return _mix(state)


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
