"""A runner with no model: its next token depends on all that it should have read from the cache, and on that alone."""

import random
from collections.abc import Sequence
from math import lcm

import numpy as np
from numpy.typing import NDArray

from legato.cache.pool import AttentionGroup, ChunkLayout
from legato.cache.swap import CacheCopies, UnitCopies
from legato.engine.batch import Batch, StepResult
from legato.request import Request, TokenLogprobs
from legato.sampling_params import SamplingParams

VOCAB_SIZE = 1009
_MASK = (1 << 64) - 1


class ToyRunner:
    """Keeps a number for each token in a paged memory that every attention group cuts its own way.

    A token's number is made of the token, its position and the numbers of all earlier tokens that it sees in the
    memory, so that one wrong read or write changes all that follows. It is also made of `weights`, which a test may
    change.
    """

    def __init__(self, groups: Sequence[AttentionGroup], page_size: int, num_chunks: int) -> None:
        self.num_runs = 0
        self.weights = 0
        self._groups = groups
        self._page_size = page_size
        chunk_size = lcm(*(page_size * width(group) for group in groups))
        self._memory = np.random.default_rng(0).integers(0, _MASK, num_chunks * chunk_size, np.uint64)
        self._memory[:chunk_size] = 0

    def weights_version(self) -> int:
        return self.weights

    weights_sample = weights_version

    def reread_weights(self) -> None:
        pass

    @property
    def units(self) -> NDArray[np.uint64]:
        """The memory in the pieces that `UnitCopies` count. It keeps a number where a cache keeps both K and V."""
        return self._memory.reshape(-1, ChunkLayout.of(self._groups, self._page_size).unit_size // 2)

    def run(self, batch: Batch) -> StepResult:
        self.num_runs += 1
        numbers = []
        for i, num_keys in enumerate(batch.seqused_k.tolist()):
            end = batch.cu_seqlens_q[i + 1]
            for row in range(batch.cu_seqlens_q[i], end):
                place = num_keys - (end - row)  # of this query among the keys, as attention kernels take it
                seen = sum(self._read(batch, group, i, place) for group in range(len(self._groups)))
                number = toy_number(int(batch.input_ids[row]), int(batch.position_ids[row]), seen, self.weights)
                self._write(batch, row, number)
                numbers.append(number)
        how = batch.sampling
        columns = (how.filters.temperature, how.filters.top_k, how.filters.top_p, how.seed, how.position)
        rows = batch.logits_indices.tolist()
        sampled = [numbers[row] for row in rows[: len(how.seed)]]
        scored = zip(rows[len(how.seed) :], batch.scored.token_ids.tolist(), strict=True)
        settings = zip(*(column.tolist() for column in columns), strict=True)
        tokens = [toy_token(number, *how) for number, how in zip(sampled, settings, strict=True)]
        scores = [TokenLogprobs(toy_score(numbers[row], token)) for row, token in scored]
        return StepResult(tokens, [TokenLogprobs(toy_logprob(token)) for token in tokens], scores)

    def _read(self, batch: Batch, group: int, row: int, place: int) -> int:
        positions = seen_before(self._groups[group], place)
        pages, offsets = np.divmod(positions, self._page_size)
        slots = batch.block_tables[group][row, pages] * self._page_size + offsets
        return weigh(self._memory[self._elements(group, slots)], positions)

    def _write(self, batch: Batch, row: int, number: int) -> None:
        for group, slots in enumerate(batch.slot_mappings):
            elements = self._elements(group, slots[row : row + 1])
            self._memory[elements] = spread(np.array([number], np.uint64), self._groups[group])

    def _elements(self, group: int, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """[slots, width]: a block is a page for each layer, one after the other."""
        blocks, offsets = np.divmod(slots, self._page_size)
        layers = np.arange(width(self._groups[group]))
        return (blocks[:, None] * len(layers) + layers) * self._page_size + offsets[:, None]


def toy_score(number: int, token: int) -> float:
    """How likely a runner with that number at a token finds another one after it."""
    return -float((number + 31 * token) % 1009)


class ToyMover:
    """Host memory for a runner's numbers. What was copied back is lost, so that nothing can be copied back twice.

    Attributes:
        calls: each call's direction, requests and units.
    """

    def __init__(self, runner: ToyRunner, num_units: int) -> None:
        self.calls: list[tuple[str, int, int]] = []
        self._cache = runner.units
        self._host = np.random.default_rng(1).integers(0, _MASK, (num_units, self._cache.shape[1]), np.uint64)

    def copy(self, copies: Sequence[CacheCopies]) -> None:
        sources = [unit for one in copies for unit in one.source_units]
        targets = [unit for one in copies for unit in one.target_units]
        assert len(set(targets)) == len(targets) == len(sources) > 0
        self._cache[targets] = self._cache[sources]

    def offload(self, copies: Sequence[UnitCopies]) -> None:
        cache, host = self._indices("offload", copies)
        assert len(set(host)) == len(host)
        self._host[host] = self._cache[cache]

    def restore(self, copies: Sequence[UnitCopies]) -> None:
        cache, host = self._indices("restore", copies)
        assert len(set(cache)) == len(cache)
        self._cache[cache] = self._host[host]
        self._host[host] = 0

    def units_moved(self, direction: str) -> int:
        return sum(num_units for way, _, num_units in self.calls if way == direction)

    def _indices(self, direction: str, copies: Sequence[UnitCopies]) -> tuple[list[int], list[int]]:
        cache = [unit for copy in copies for unit in copy.cache_units]
        host = [unit for copy in copies for unit in copy.host_units]
        assert len(cache) == len(host) > 0
        self.calls.append((direction, len(copies), len(cache)))
        return cache, host


def width(group: AttentionGroup) -> int:
    """Elements of one position in all layers of a group."""
    return len(group.layers) * group.num_kv_heads * group.head_dim


def seen_before(group: AttentionGroup, position: int) -> NDArray[np.int64]:
    """Earlier positions that a query at `position` sees."""
    return np.arange(0 if group.window is None else max(0, position - group.window + 1), position)


def spread(numbers: NDArray[np.uint64], group: AttentionGroup) -> NDArray[np.uint64]:
    """What each layer of a group keeps of `numbers`: [numbers, width]."""
    return numbers[:, None] + np.arange(width(group), dtype=np.uint64)


def weigh(kept: NDArray[np.uint64], positions: NDArray[np.int64]) -> int:
    """One number for all that was read, each by its place."""
    layers = np.arange(kept.shape[1], dtype=np.uint64)
    return int((kept * (62 * positions.astype(np.uint64)[:, None] + 2 * layers + 1)).sum(dtype=np.uint64))


def toy_number(token: int, position: int, seen: int, weights: int = 0) -> int:
    mixed = (token * 0x9E3779B97F4A7C15 + position * 0xC2B2AE3D27D4EB4F + weights * 0x165667B19E3779F9 + seen) & _MASK
    return ((mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9) & _MASK


def toy_token(number: int, *settings: float) -> int:
    return hash((number, *settings)) % VOCAB_SIZE


def toy_logprob(token: int) -> float:
    return -token / VOCAB_SIZE


def toy_generate(groups: Sequence[AttentionGroup], request: Request, weights: int = 0) -> list[int]:
    """The tokens that the runner would give for a request alone, worked out with a list for a memory."""
    numbers: list[int] = []
    tokens = request.prompt_ids.copy()
    generated: list[int] = []
    params = request.params
    settings = (float(np.float32(params.temperature)), max(params.top_k or 0, 0), float(np.float32(params.top_p)))
    while len(generated) < request.max_new_tokens and not (generated and generated[-1] in request.stop_token_ids):
        for position in range(len(numbers), len(tokens)):
            kept = np.array(numbers, np.uint64)
            places = [seen_before(group, position) for group in groups]
            seen = sum(weigh(spread(kept[place], group), place) for place, group in zip(places, groups, strict=True))
            numbers.append(toy_number(tokens[position], position, seen, weights))
        generated.append(toy_token(numbers[-1], *settings, request.seed, len(generated)))
        tokens.append(generated[-1])
    return generated


def toy_prompt(name: str, length: int) -> list[int]:
    """The first tokens of an endless text of that name."""
    text = random.Random(name)
    return [text.randrange(VOCAB_SIZE) for _ in range(length)]


def make_request(
    request_id: str,
    prompt: int | list[int],
    max_new_tokens: int = 1,
    *,
    stop_token_ids: frozenset[int] = frozenset(),
    params: SamplingParams | None = None,
    seed: int = 0,
    cache_salt: str | None = None,
    priority: int = 0,
    streaming: bool = False,
    record_timestamps: bool = False,
) -> Request:
    """A request; `prompt` is its tokens, or how many of a text of its own."""
    prompt = toy_prompt(f"{request_id} {seed}", prompt) if isinstance(prompt, int) else prompt
    return Request(
        request_id=request_id,
        prompt_ids=prompt,
        params=params or SamplingParams(),
        max_new_tokens=max_new_tokens,
        stop_token_ids=stop_token_ids,
        seed=seed,
        streaming=streaming,
        created_time=0.0,
        tokens=prompt.copy(),
        cache_salt=cache_salt,
        priority=priority,
        timestamps=[] if record_timestamps else None,
    )
