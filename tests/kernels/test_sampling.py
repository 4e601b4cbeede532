"""Native sampling, for every instruction set that this processor has, against float64 and against its twin in torch."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from legato.engine.sampling import draw_with_torch, forbid_with_torch
from legato.filters import Filters
from legato.kernels.choose import VARIABLE
from legato.kernels.library import LEVELS, load_library
from legato.kernels.sampling import NativeSampler, native_sampler
from tests.kernels.race import head_starts, key_for

# Around a vector, a block and several of them; the last is more than top-p looks at before it takes all.
VOCAB_SIZES = [1, 2, 3, 7, 15, 16, 17, 63, 100, 255, 256, 257, 511, 1000, 9000]
TEMPERATURES = [0.0, 1.0, 0.7, 1.9, 50.0, 1e-3, 1e-38, 1e-42]
TOP_PS = [1.0, 0.999, 0.9, 0.5, 0.1, 1e-6, 1e-50]
ROUNDING = 1e-6  # of a mass in float32: nearer to a boundary than this, either side is right


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    if load_library((request.param,)) is None:
        pytest.skip(f"no {request.param} kernels here: not built, or not for this processor")
    return request.param


@pytest.fixture
def sampler(level: str) -> NativeSampler:
    return new_sampler(level)


def new_sampler(level: str) -> NativeSampler:
    found = load_library((level,))
    assert found is not None
    return NativeSampler(found[1])


@dataclass(frozen=True)
class Settings:
    """How one row is sampled."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0


def filters_of(settings: list[Settings]) -> Filters:
    return Filters(
        temperature=np.array([s.temperature for s in settings], np.float32),
        top_k=np.array([s.top_k for s in settings], np.int64),
        top_p=np.array([s.top_p for s in settings], np.float32),
        min_p=np.array([s.min_p for s in settings], np.float32),
        typical_p=np.array([s.typical_p for s in settings], np.float32),
    )


def draw(
    sampler: NativeSampler | None, logits: Tensor, settings: list[Settings], keys: NDArray[np.uint64]
) -> tuple[list[int], list[float]]:
    """Tokens and log-probabilities; by the twin if there is no sampler."""
    draw_by = draw_with_torch if sampler is None else sampler.sample
    wanted = np.ones(len(settings), np.bool_)
    tokens, logprobs = draw_by(logits, filters_of(settings), keys, wanted)
    alone, _ = draw_by(logits, filters_of(settings), keys, ~wanted)
    assert alone.tolist() == tokens.tolist()
    return tokens.tolist(), logprobs.tolist()


def random_logits(rng: np.random.Generator, vocab_size: int) -> NDArray[np.float32]:
    """Of every shape: peaked, flat, with ties, sorted, with impossible tokens."""
    logits = rng.normal(size=vocab_size) * rng.choice([0.01, 1.0, 5.0, 40.0]) + rng.choice([0.0, 300.0])
    match rng.integers(8):
        case 0:
            logits = np.round(logits)
        case 1:
            logits = np.full(vocab_size, logits[0])
        case 2:
            logits = np.sort(logits)
        case 3:
            logits = -np.sort(-logits)
        case 4:
            logits[rng.random(vocab_size) < 0.5] = -np.inf
            logits[rng.integers(vocab_size)] = 1.0
        case 5:
            logits[:] = rng.choice(logits[:3], vocab_size)
    return logits.astype(np.float32)


def random_settings(rng: np.random.Generator, vocab_size: int) -> Settings:
    top_ks = [0, 0, 0, 1, 2, 5, 40, max(1, vocab_size - 1), vocab_size, vocab_size + 5, np.iinfo(np.int64).max]
    return Settings(
        float(rng.choice(TEMPERATURES)), int(rng.choice(top_ks)), float(rng.choice(TOP_PS)),
        float(rng.choice([0.0, 0.0, 0.013, 0.31, 1.0])), float(rng.choice([1.0, 1.0, 0.9, 0.43, 0.05])),
    )  # fmt: skip


def kept_masses(logits: NDArray[np.float32], settings: Settings, off: float = 0.0) -> NDArray[np.float64]:
    """What each token weighs, likeliest 1 and filtered 0; with top_p's limit off by so much of all that is left."""
    with np.errstate(over="ignore"):
        scores = (logits - logits.max()) / np.float32(
            settings.temperature
        )  # in float32: which scores tie is a matter of it
    masses = np.where(scores < -87, 0.0, np.exp(scores.astype(np.float64)))
    order = np.argsort(-scores, kind="stable")
    if 0 < settings.top_k < len(logits):
        masses[scores < scores[order[settings.top_k - 1]]] = 0
    if settings.top_p < 1:
        before = np.append(0, np.cumsum(masses[order])[:-1])
        dropped = before >= (float(np.float32(settings.top_p)) + off) * masses.sum()
        dropped[0] = False
        masses[order[dropped]] = 0
    if settings.min_p > 0:
        masses[scores < np.float32(np.log(np.float32(settings.min_p)))] = 0
    if settings.typical_p < 1:
        keep_typical(masses, scores, float(np.float32(settings.typical_p)) + off)
    return masses


def keep_typical(masses: NDArray[np.float64], scores: NDArray[np.float32], typical_p: float) -> None:
    """What weighs something, nearest to the expected information first, until it is enough, and what ties with it."""
    some = np.flatnonzero(masses)
    expected = (masses[some] * -scores[some]).sum() / masses.sum()
    distances = np.abs(-scores[some] - np.float32(expected))
    order = np.argsort(distances, kind="stable")
    reached = np.searchsorted(np.cumsum(masses[some][order]), typical_p * masses.sum())
    masses[some[distances > distances[order[min(reached, len(some) - 1)]]]] = 0


def is_right(logits: NDArray[np.float32], settings: Settings, key: int, token: int, logprob: float) -> bool:
    """Whether these may give that token with that log-probability; a rounding from a border both sides are right."""
    if not settings.temperature:
        exact = logits.astype(np.float64) - logits.max()
        return token == logits.argmax() and bool(np.isclose(logprob, -np.log(np.exp(exact).sum()), rtol=0, atol=2e-6))
    starts = head_starts(key, len(logits))
    for off in (0.0, -ROUNDING, ROUNDING):
        masses = kept_masses(logits, settings, off)
        with np.errstate(divide="ignore"):
            logprobs = np.log(masses / masses.sum())
        reached = logprobs + starts
        if reached[token] >= reached.max() - 1e-5 and abs(logprob - logprobs[token]) < 1e-5:
            return True
    return False


def some_keys(rng: np.random.Generator, count: int) -> NDArray[np.uint64]:
    return rng.integers(2**64, size=count, dtype=np.uint64)


def cases(seed: int) -> Iterator[tuple[Tensor, list[Settings], NDArray[np.uint64]]]:
    """For every size some rows, each with settings of its own."""
    rng = np.random.default_rng(seed)
    for vocab_size in VOCAB_SIZES:
        rows = 60 if vocab_size < 5000 else 25
        logits = torch.from_numpy(np.stack([random_logits(rng, vocab_size) for _ in range(rows)]))
        keys = some_keys(rng, rows)
        keys[:2] = 0, 2**64 - 1
        yield logits, [random_settings(rng, vocab_size) for _ in range(rows)], keys


@pytest.mark.parametrize("seed", range(5))
def test_tokens_and_logprobs_are_those_of_float64(sampler: NativeSampler, seed: int) -> None:
    for logits, settings, keys in cases(seed):
        tokens, logprobs = draw(sampler, logits, settings, keys)
        for i, row in enumerate(logits.numpy()):
            assert is_right(row, settings[i], keys[i], tokens[i], logprobs[i]), (
                f"row {i} of {len(row)}: {settings[i]}, {keys[i]} gave {tokens[i]} with {logprobs[i]}"
            )


@pytest.mark.parametrize("seed", range(100, 105))
def test_the_twin_draws_the_same_tokens(sampler: NativeSampler, seed: int) -> None:
    for logits, settings, keys in cases(seed):
        tokens, logprobs = draw(sampler, logits, settings, keys)
        expected, expected_logprobs = draw(None, logits, settings, keys)
        assert tokens == expected
        np.testing.assert_allclose(logprobs, expected_logprobs, rtol=0, atol=2e-6)


@pytest.mark.parametrize("seed", range(30))
def test_every_token_that_is_kept_can_come(sampler: NativeSampler, seed: int) -> None:
    rng = np.random.default_rng(seed)
    vocab_size = int(rng.choice([40, 300, 700]))
    logits = random_logits(rng, vocab_size)
    settings = Settings(float(rng.choice(TEMPERATURES[1:])), int(rng.choice([0, 3, 60])), float(rng.choice(TOP_PS)))
    masses = kept_masses(logits, settings)
    (tokens,) = np.nonzero(masses > 1e-3 * masses.sum())
    keys = np.array([key_for(token) for token in tokens.tolist()])
    for which in (sampler, None):
        drawn, _ = draw(which, torch.from_numpy(logits).expand(len(tokens), -1), [settings] * len(tokens), keys)
        assert drawn == tokens.tolist(), settings


def kept_by(sampler: NativeSampler | None, logits: Tensor, settings: Settings) -> set[int]:
    """The tokens that come when each in turn has a head start over all others."""
    keys = np.array([key_for(token) for token in range(len(logits))])
    return set(draw(sampler, logits.expand(len(keys), -1), [settings] * len(keys), keys)[0])


def test_ties_at_the_cut(sampler: NativeSampler) -> None:
    """Top-k keeps all that tie for its last place, top-p the first of them, in the vocabulary's order."""
    logits = torch.full((300,), -50.0)
    logits[[7, 20, 130, 290]] = torch.tensor([1.0, 2.0, 1.0, 1.0])
    for which in (sampler, None):
        assert kept_by(which, logits, Settings(top_k=2)) == {7, 20, 130, 290}
        assert kept_by(which, logits, Settings(top_p=0.5)) == {7, 20}  # the likeliest alone has 0.475
        assert kept_by(which, logits, Settings(top_p=0.7)) == {7, 20, 130}
        assert kept_by(which, logits, Settings(top_k=2, top_p=0.7)) == {7, 20, 130}


@pytest.mark.parametrize("vocab_size", [4, 64, 600])
def test_a_token_is_dropped_once_those_before_it_have_reached_top_p(sampler: NativeSampler, vocab_size: int) -> None:
    """To the last bit: equal logits all weigh 1."""
    logits = torch.full((vocab_size,), 3.25)
    for which in (sampler, None):
        for quarters in (1, 2, 3):
            kept = kept_by(which, logits, Settings(top_p=quarters / 4))
            assert kept == set(range(vocab_size * quarters // 4))
        assert kept_by(which, logits, Settings(top_p=0.0)) == {0}
        assert kept_by(which, logits, Settings()) == set(range(vocab_size))


@pytest.mark.parametrize("settings", [Settings(), Settings(top_k=4)], ids=str)
@pytest.mark.parametrize("places", [[0, 1, 2, 3], [10, 20, 300, 301], [5, 300, 600, 900]], ids=str)
def test_tokens_far_rarer_than_a_float32_resolves_are_told_apart(
    sampler: NativeSampler, settings: Settings, places: list[int]
) -> None:
    logits = torch.full((1000,), -torch.inf)
    logits[places] = torch.tensor([0.0] + [float(np.log(1e-9))] * 3)
    for place in places[1:]:
        keys = (key_for(place, high) for high in range(100))
        key = next(key for key in keys if head_starts(int(key), 1000)[places[0]] < 1)
        for which in (sampler, None):
            assert draw(which, logits.expand(1, -1), [settings], np.array([key]))[0] == [place]


def test_a_flat_distribution_is_searched_to_its_end(sampler: NativeSampler) -> None:
    """No few candidates suffice, and the cut is among the least likely."""
    logits = torch.randn(50_000, generator=torch.Generator().manual_seed(1)) * 0.01
    for settings in (Settings(top_p=0.99), Settings(top_k=49_000), Settings(top_k=30_000, top_p=0.7)):
        masses = kept_masses(logits.numpy(), settings)
        (kept,) = np.nonzero(masses)
        (left_out,) = np.nonzero(masses == 0)
        keys = np.array([key_for(int(token)) for token in (kept[0], kept[-1], left_out[0])])
        tokens, logprobs = draw(sampler, logits.expand(3, -1), [settings] * 3, keys)
        assert tokens[:2] == [kept[0], kept[-1]] and masses[tokens[2]] > 0
        np.testing.assert_allclose(logprobs, np.log(masses[tokens] / masses.sum()), rtol=0, atol=1e-5)


@pytest.mark.parametrize("vocab_size", [1, 7, 16, 31, 100, 4099])
def test_forbidding_is_that_of_torch_and_stays_in_its_rows(sampler: NativeSampler, vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    wide = torch.from_numpy(rng.normal(size=(9, vocab_size + 5)).astype(np.float32))
    rows = np.array([0, 3, 4, 8])
    masks = rng.integers(0, 256, (4, (vocab_size + 31) // 32 * 4), dtype=np.uint8)
    masks[1], masks[2] = 0, 255
    masks[3, vocab_size // 8] &= (1 << vocab_size % 8) - 1
    masks[3, : vocab_size // 8] = 0
    ours, theirs = wide.clone(), wide.clone()
    any_may = sampler.forbid(ours[:, :vocab_size], rows, masks)
    assert any_may.tolist() == forbid_with_torch(theirs[:, :vocab_size], rows, masks).tolist()
    assert any_may.tolist()[1:3] == [False, True]
    assert torch.equal(ours, theirs)
    expected = wide.clone()
    for row, mask in zip(rows, masks, strict=True):
        for token in range(vocab_size):
            if not mask[token // 8] >> (token % 8) & 1:
                expected[row, token] = -torch.inf
    assert torch.equal(ours, expected)
    with pytest.raises(ValueError, match="float32 on the CPU"):
        sampler.forbid(wide.T, rows, masks)


def test_rows_lie_anywhere(sampler: NativeSampler) -> None:
    """As columns of something wider, all the same, back to back, transposed."""
    rng = np.random.default_rng(0)
    wide = torch.from_numpy(rng.normal(size=(20, 411)).astype(np.float32))
    settings, keys = [random_settings(rng, 300) for _ in range(20)], some_keys(rng, 20)
    for logits in (wide[:, 5:305], wide[:1, 7:307].expand(20, -1), wide[::2, 100:400], wide[:, :20].T.expand(20, 20)):
        rows = len(logits)
        expected = draw(sampler, logits.contiguous().clone(), settings[:rows], keys[:rows])
        assert draw(sampler, logits, settings[:rows], keys[:rows]) == expected
        assert sampler.argmax(logits).tolist() == logits.argmax(dim=-1).tolist()


def test_what_is_not_float32_on_the_cpu_is_refused(sampler: NativeSampler) -> None:
    for logits in (torch.zeros(2, 5).double(), torch.zeros(2, 5, device="meta")):
        with pytest.raises(ValueError, match="float32 on the CPU"):
            sampler.argmax(logits)


@pytest.mark.parametrize("largest", [torch.nan, torch.inf, -torch.inf])
def test_a_largest_logit_that_is_no_number_is_taken(sampler: NativeSampler, largest: float) -> None:
    logits = torch.randn(6, 700, generator=torch.Generator().manual_seed(3))
    logits[:, 300:302] = largest
    if largest < 0:
        logits[:] = largest
    logits[5] = 0.0
    settings = [Settings(0.0), Settings(), Settings(top_k=3), Settings(top_p=0.5), Settings(1.5, 9, 0.9), Settings()]
    for which in (sampler, None):
        tokens, logprobs = draw(which, logits, settings, np.full(6, 5, np.uint64))
        assert tokens == [300 if largest > 0 or largest != largest else 0] * 5 + [head_starts(5, 700).argmax()]
        assert np.isnan(logprobs[:5]).all() and np.isfinite(logprobs[5])


@pytest.mark.parametrize("vocab_size", [1, 5, 16, 17, 256, 300, 16_384, 40_000, 2_000_001])
def test_argmax_is_that_of_torch(sampler: NativeSampler, vocab_size: int) -> None:
    """The first of those that tie, and what is no number before all others."""
    rng = np.random.default_rng(vocab_size)
    for rows in (1, 2, 9) if vocab_size < 100_000 else (1,):
        for special in ([], [np.inf], [-np.inf], [np.nan], [np.nan, np.inf], [0.0, -0.0]):
            logits = torch.from_numpy(rng.integers(-50, 3, size=(rows, vocab_size)).astype(np.float32))
            for value in special * 3:
                logits[rng.integers(rows), rng.integers(vocab_size)] = value
            assert sampler.argmax(logits).tolist() == logits.argmax(dim=-1).tolist()
    assert sampler.argmax(torch.zeros(3, vocab_size)).tolist() == [0, 0, 0]


def test_no_rows_give_no_tokens(sampler: NativeSampler) -> None:
    logits = torch.zeros(0, 50)
    assert len(sampler.argmax(logits)) == 0
    assert draw(sampler, logits, [], np.zeros(0, np.uint64)) == ([], [])


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_nothing(level: str, threads: int) -> None:
    """Neither those that share the work nor those that ask at the same time."""
    rng = np.random.default_rng(5)
    logits = torch.from_numpy(rng.normal(size=(90, 20_000)).astype(np.float32)) * 3
    settings, keys = [random_settings(rng, 20_000) for _ in range(90)], some_keys(rng, 90)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        sampler = new_sampler(level)
    finally:
        torch.set_num_threads(before)
    alone = [draw(sampler, logits[i : i + 1], settings[i : i + 1], keys[i : i + 1]) for i in range(90)]
    expected = [token for (token,), _ in alone], [logprob for _, (logprob,) in alone]
    with ThreadPoolExecutor(3) as callers:
        for result in callers.map(lambda _: draw(sampler, logits, settings, keys), range(3)):
            assert result == expected
    assert sampler.argmax(logits).tolist() == logits.argmax(dim=-1).tolist()


def test_the_sampler_is_loaded_once_and_is_the_one_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native_sampler() is native_sampler()
    for level, there in (("torch", False), ("portable", load_library(("portable",)) is not None)):
        monkeypatch.setenv(VARIABLE, level)
        assert (native_sampler() is not None) == there
