"""Sampling against transformers' own logits warpers, and the random numbers behind it."""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from legato.engine import sampling
from legato.engine.batch import SamplingBatch
from legato.engine.sampling import random_keys, sample
from legato.filters import Filters
from legato.kernels.sampling import native_sampler
from tests.kernels.race import key_for

VOCAB_SIZE = 48
NUM_DRAWS = 20_000
UNLIKELY = 1e-4  # the seeds are fixed, so a p-value under this is a bug and not bad luck
FILTERS = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": VOCAB_SIZE},
    {"top_k": 10 * VOCAB_SIZE},
    {"top_p": 0.02},
    {"top_p": 0.6},
    {"top_p": 0.97},
    {"temperature": 1.7, "top_k": 11, "top_p": 0.8},
    {"temperature": 0.6, "top_k": 3, "top_p": 0.999},
    {"min_p": 0.02},
    {"min_p": 0.3, "temperature": 1.4},
    {"typical_p": 0.9},
    {"typical_p": 0.2},
    {"temperature": 1.7, "top_k": 30, "top_p": 0.9, "min_p": 0.05, "typical_p": 0.8},
]


@pytest.fixture(autouse=True, params=["native", "torch"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """All of this holds for both."""
    if request.param == "torch":
        monkeypatch.setattr(sampling, "native_sampler", lambda: None)
    elif native_sampler() is None:
        pytest.skip("the package was built without native kernels")
    return request.param


@dataclass(frozen=True)
class Row:
    """How one row is sampled."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    seed: int = 0
    position: int = 0


def batch(rows: list[Row], with_logprobs: bool) -> SamplingBatch:
    return SamplingBatch(
        filters=Filters(
            temperature=np.array([row.temperature for row in rows], np.float32),
            top_k=np.array([row.top_k for row in rows], np.int64),
            top_p=np.array([row.top_p for row in rows], np.float32),
            min_p=np.array([row.min_p for row in rows], np.float32),
            typical_p=np.array([row.typical_p for row in rows], np.float32),
        ),
        seed=np.array([row.seed for row in rows], np.uint64),
        position=np.array([row.position for row in rows], np.int64),
        num_logprobs=np.full(len(rows), 0 if with_logprobs else -1),
        raw_logprobs=np.zeros(len(rows), np.bool_),
    )


def draw(logits: Tensor, rows: list[Row]) -> tuple[list[int], list[float]]:
    result = sample(logits, batch(rows, True))
    assert sample(logits, batch(rows, False)).token_ids == result.token_ids
    return result.token_ids, [one.logprob for one in result.logprobs if one is not None]


def draw_many(logits: Tensor, **filters: float) -> tuple[list[int], list[float]]:
    """`NUM_DRAWS` draws from one row's logits, each with a seed of its own."""
    rows = [Row(seed=seed, position=3, **filters) for seed in range(NUM_DRAWS)]  # type: ignore[arg-type]
    return draw(logits.expand(NUM_DRAWS, -1), rows)


def warped(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    typical_p: float = 1.0,
) -> Tensor:
    """The logits [vocabulary] as `model.generate` would sample from them."""
    scores = TemperatureLogitsWarper(float(temperature))(None, logits[None])
    if top_k:
        scores = TopKLogitsWarper(int(top_k))(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(float(top_p))(None, scores)
    if min_p > 0:
        scores = MinPLogitsWarper(min_p)(None, scores)
    if typical_p < 1:
        scores = TypicalLogitsWarper(typical_p)(None, scores)
    return scores[0]


def some_logits(seed: int = 0, num_rows: int | None = None, spread: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (VOCAB_SIZE,) if num_rows is None else (num_rows, VOCAB_SIZE)
    return torch.randn(shape, generator=generator) * spread


def chi_squared_p_value(counts: NDArray[np.int64], expected: NDArray[np.float64]) -> float:
    """How likely counts that far from the expected ones are. Categories must be large enough, say 5 each."""
    statistic = float((np.square(counts - expected) / expected).sum())
    degrees = len(expected) - 1
    return torch.special.gammaincc(torch.tensor(degrees / 2.0).double(), torch.tensor(statistic / 2).double()).item()


def random_rows(rng: np.random.Generator, count: int) -> list[Row]:
    """A third greedy, the others with whatever filters."""
    return [
        Row(
            temperature=float(rng.choice([0.0, 0.7, 1.9])),
            top_k=int(rng.choice([0, 1, 5, 30])),
            top_p=float(rng.choice([1.0, 0.9, 0.4])),
            seed=int(rng.integers(2**64, dtype=np.uint64)),
            position=int(rng.integers(5000)),
        )
        for _ in range(count)
    ]


# Tokens and log-probabilities


def test_greedy_rows_take_the_likeliest_token() -> None:
    logits = some_logits(num_rows=200)
    for filters in ({}, {"top_k": 5}, {"top_p": 0.1}):
        tokens, logprobs = draw(logits, [Row(temperature=0.0, seed=i, **filters) for i in range(200)])
        assert tokens == logits.argmax(dim=-1).tolist()
        np.testing.assert_allclose(logprobs, logits.log_softmax(dim=-1).amax(dim=-1), atol=1e-5)


def test_without_logprobs_there_are_none() -> None:
    assert sample(some_logits(num_rows=1), batch([Row(0.0)], False)).logprobs == [None]
    assert sample(some_logits(num_rows=1), batch([Row(1.0)], False)).logprobs == [None]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_the_tokens_drawn_and_their_logprobs_are_those_of_transformers(filters: dict[str, float]) -> None:
    logits = some_logits(seed=1)
    expected = warped(logits, **filters).log_softmax(dim=-1)  # type: ignore[arg-type]
    tokens, logprobs = draw_many(logits, **filters)
    assert not set(tokens) - set(expected.isfinite().nonzero()[:, 0].tolist()), "a token that is filtered out"
    likely = expected > np.log(30 / NUM_DRAWS)  # one of these is missing with probability e^-30
    assert not set(likely.nonzero()[:, 0].tolist()) - set(tokens), "a token that is not filtered out never comes"
    np.testing.assert_allclose(logprobs, expected[tokens], atol=1e-5)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_tokens_are_as_frequent_as_they_should_be(filters: dict[str, float]) -> None:
    logits = some_logits(seed=2)
    probabilities = warped(logits, **filters).double().softmax(dim=-1).numpy()  # type: ignore[arg-type]
    tokens, _ = draw_many(logits, **filters)
    counts = np.bincount(tokens, minlength=VOCAB_SIZE)
    expected = probabilities * NUM_DRAWS
    common = expected >= 10
    counts = np.append(counts[common], counts[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    counts, expected = (counts[:-1], expected[:-1]) if expected[-1] < 5 else (counts, expected)
    if len(expected) > 1:
        assert chi_squared_p_value(counts, expected * counts.sum() / expected.sum()) > UNLIKELY


def test_positions_draw_as_seeds_do() -> None:
    """One request's tokens, one after the other, have the right frequencies too."""
    logits = some_logits(seed=3)
    tokens, _ = draw(logits.expand(NUM_DRAWS, -1), [Row(seed=11, position=i) for i in range(NUM_DRAWS)])
    counts, expected = np.bincount(tokens, minlength=VOCAB_SIZE), logits.double().softmax(dim=-1).numpy() * NUM_DRAWS
    assert expected.min() > 5
    assert chi_squared_p_value(counts, expected) > UNLIKELY


def test_top_k_keeps_all_that_tie_for_the_last_place() -> None:
    logits = torch.full((VOCAB_SIZE,), -3.0)
    logits[[4, 9, 20, 33]] = torch.tensor([2.0, 1.0, 1.0, 1.0])
    tokens, _ = draw_many(logits, top_k=2)
    assert set(tokens) == set(warped(logits, top_k=2).isfinite().nonzero()[:, 0].tolist()) == {4, 9, 20, 33}


def test_the_likeliest_token_is_always_left() -> None:
    """Also where a parameter is no number of float32 any more."""
    logits = some_logits(num_rows=5)
    best = logits.argmax(dim=-1).tolist()
    for row in (Row(top_p=1e-30), Row(top_p=1e-50), Row(temperature=1e-30)):
        tokens, logprobs = draw(logits, [row] * 5)
        assert tokens == best, row
        np.testing.assert_allclose(logprobs, 0.0, atol=1e-6)


@pytest.mark.parametrize("temperature", [1e-38, 1e-42])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    """Dividing by it must not overflow."""
    logits = some_logits(num_rows=5, spread=10.0)
    tokens, logprobs = draw(logits, [Row(temperature)] * 5)
    assert tokens == logits.argmax(dim=-1).tolist()
    assert np.isfinite(logprobs).all()


# The two implementations


def test_both_draw_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, rows = some_logits(seed=7, num_rows=400, spread=3.0), random_rows(np.random.default_rng(7), 400)
    tokens, logprobs = draw(logits, rows)
    monkeypatch.setattr(sampling, "native_sampler", lambda: None)
    expected, expected_logprobs = draw(logits, rows)
    assert tokens == expected
    np.testing.assert_allclose(logprobs, expected_logprobs, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 4000}, {"top_p": 0.95}, {"min_p": 1e-4}, {"typical_p": 0.9}], ids=str
)
def test_a_rounding_of_one_logit_moves_no_other_token(implementation: str, filters: dict[str, float]) -> None:
    """As batch-mates bring it about. One random number looked up in summed probabilities would move nearly all."""
    logits = torch.randn(1, 5000, generator=torch.Generator().manual_seed(1))
    logits[0, 0] = math.log(5000)
    rounded = logits.clone()
    rounded[0, 0] += 1e-3
    rows = [Row(seed=i, position=3, **filters) for i in range(500)]
    ours, theirs = draw(logits.expand(500, -1), rows)[0], draw(rounded.expand(500, -1), rows)[0]
    assert 100 < sum(token != 0 for token in ours) < 400
    assert sum(a != b for a, b in zip(ours, theirs, strict=True)) <= 2


def test_greedy_batches_take_the_largest_and_no_more(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("sampling work for a greedy batch")

    logits = some_logits(num_rows=5)
    monkeypatch.setattr(sampling, "random_keys", refuse)
    monkeypatch.setattr(sampling, "draw_with_torch", refuse)
    assert sample(logits, batch([Row(0.0)] * 5, False)).token_ids == logits.argmax(dim=-1).tolist()


# Rows do not affect each other


@pytest.mark.parametrize("seed", range(8))
def test_a_row_does_not_depend_on_its_batch_mates(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits, rows = some_logits(seed, num_rows=24, spread=2.0), random_rows(rng, 24)
    tokens, logprobs = draw(logits, rows)
    some = np.sort(rng.choice(24, size=9, replace=False))
    for picked in (rng.permutation(24), some, *[[i] for i in range(24)]):
        again, logprobs_again = draw(logits[list(picked)], [rows[i] for i in picked])
        assert again == [tokens[i] for i in picked]
        np.testing.assert_allclose(logprobs_again, [logprobs[i] for i in picked], rtol=0, atol=1e-6)


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    logits = some_logits(seed=5, num_rows=300)
    rows = [Row(temperature=0.0 if i % 3 == 0 else 1.3, top_k=0 if i % 2 else 6, seed=i) for i in range(300)]
    tokens, logprobs = draw(logits, rows)
    for i, row in enumerate(rows):
        expected = warped(logits[i], row.temperature or 1.0, row.top_k if row.temperature else 0).log_softmax(dim=-1)
        assert tokens[i] == logits[i].argmax() or row.temperature
        assert logprobs[i] == pytest.approx(expected[tokens[i]].item(), abs=1e-5)
    assert sum(tokens[i] != logits[i].argmax() for i in range(300)) > 50


def test_the_logits_are_left_as_they_are() -> None:
    logits = some_logits(num_rows=12)
    before = logits.clone()
    draw(logits, random_rows(np.random.default_rng(0), 12))
    assert torch.equal(logits, before)


def test_a_rare_token_is_not_lost_to_a_batch_mate(monkeypatch: pytest.MonkeyPatch) -> None:
    """top_p=1 keeps every token, also where float32 sums reach 1 before the last."""
    keys = np.array([key_for(1, high=1), 5], np.uint64)
    monkeypatch.setattr(sampling, "random_keys", lambda seed, position: keys[: len(seed)])
    logits = torch.tensor([[0.0, math.log(1e-8)], [0.0, 0.0]])
    alone, _ = draw(logits[:1], [Row()])
    beside, _ = draw(logits, [Row(), Row(top_p=0.5)])
    assert alone == [1]
    assert beside[:1] == alone


# Random numbers


def test_random_numbers_are_those_of_splitmix64() -> None:
    """In Python's integers, which do not wrap around by themselves."""

    def mix(z: int) -> int:
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    cases = list(itertools.product([0, 1, 2**31, 2**63, 2**64 - 1], [0, 1, 2**31, 2**40]))
    keys = random_keys(np.array([s for s, _ in cases], np.uint64), np.array([p for _, p in cases]))
    golden = 0x9E3779B97F4A7C15
    assert keys.tolist() == [mix((mix(s) + (p + 1) * golden) % 2**64) for s, p in cases]


def uniform(seed: NDArray[np.uint64], position: NDArray[np.int64]) -> NDArray[np.float64]:
    return (random_keys(seed, position) >> np.uint64(11)) * 2.0**-53


def of_tokens(seed: NDArray[np.uint64], position: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    keys = torch.from_numpy(random_keys(seed, position).view(np.int64))
    return (sampling._random_bits(keys, torch.from_numpy(tokens)).numpy() + 0.5) / 2**32


SEEDS = np.arange(200_000, dtype=np.uint64)
POSITIONS = np.arange(200_000, dtype=np.int64)
STREAMS = {
    "seeds": lambda seed, position: uniform(SEEDS + np.uint64(seed), np.full_like(POSITIONS, position)),
    "positions": lambda seed, position: uniform(np.full_like(SEEDS, seed), POSITIONS + position),
    "both": lambda seed, position: uniform(SEEDS + np.uint64(seed), POSITIONS + position),
    "far seeds": lambda seed, position: uniform(
        (SEEDS << np.uint64(40)) + np.uint64(seed), np.full_like(POSITIONS, position)
    ),
    "tokens of a row": lambda seed, position: of_tokens(
        np.full_like(SEEDS, seed), np.full_like(POSITIONS, 7), POSITIONS + position
    ),
    "a token at all positions": lambda seed, position: of_tokens(
        np.full_like(SEEDS, seed), POSITIONS, np.full_like(POSITIONS, position)
    ),
    "a token of all seeds": lambda seed, position: of_tokens(
        SEEDS, np.full_like(POSITIONS, 7), np.full_like(POSITIONS, position + seed % 1000)
    ),
}


@pytest.mark.parametrize("stream", STREAMS)
def test_random_numbers_are_uniform(stream: str) -> None:
    for seed, position in ((0, 0), (1, 7), (2**63, 1000)):
        numbers = STREAMS[stream](seed, position)
        assert numbers.dtype == np.float64
        assert numbers.min() >= 0
        assert numbers.max() < 1
        assert len(np.unique(numbers)) == len(numbers) or "token" in stream  # of 32 bits, some come twice
        counts = np.bincount((numbers * 256).astype(int), minlength=256)
        assert chi_squared_p_value(counts, np.full(256, len(numbers) / 256)) > UNLIKELY


@pytest.mark.parametrize("step", [(1, 0), (0, 1), (1, 1), (2, -1), (256, 0)], ids=str)
@pytest.mark.parametrize("stream", STREAMS)
def test_neighbouring_seeds_and_positions_have_nothing_in_common(stream: str, step: tuple[int, int]) -> None:
    ours, theirs = STREAMS[stream](500, 50), STREAMS[stream](500 + step[0], 50 + step[1])
    cells = (ours * 16).astype(int) * 16 + (theirs * 16).astype(int)
    counts = np.bincount(cells, minlength=256)
    assert chi_squared_p_value(counts, np.full(256, len(ours) / 256)) > UNLIKELY
    assert abs(np.corrcoef(ours, theirs)[0, 1]) < 4 / np.sqrt(len(ours))
