"""Plays a trace through the engine: every decision is the real one, only the forward pass is a sum."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from legato.cache.block_manager import BlockManager, BlockTables
from legato.cache.eviction import EVICTION_POLICIES
from legato.cache.pool import RESERVED_CHUNKS, AttentionGroup
from legato.cache.prefix import PageHasher
from legato.cache.swap import CacheCopies, UnitCopies
from legato.checks import check_int, check_number, refuse
from legato.engine.batch import StepResult
from legato.engine.engine import Engine
from legato.engine.observer import StepObserver
from legato.engine.policy import SCHEDULING_POLICIES
from legato.engine.scheduler import ScheduledChunk, Scheduler, StepLimits
from legato.errors import InvalidValueError
from legato.request import GenerationOutput, Request, RequestStatus
from legato.sampling_params import SamplingParams
from legato.simulate.cost import CostModel, StepShape
from legato.simulate.optimum import optimal_hits
from legato.simulate.traces import TraceRequest

ONE_LAYER = (AttentionGroup((0,), None, 1, 1),)
PERCENTILES = (50, 90, 99)
MAX_BLOCKS = 100_000_000  # each takes some bytes of this process
_ANSWER_TOKEN = 0


@dataclass(frozen=True)
class SimulationConfig:
    """The engine that is simulated; see `ContinuousBatchingConfig` for what the figures mean.

    Attributes:
        page_size, max_batch_tokens, max_requests_per_batch, scheduler_type, allow_block_sharing, eviction_policy: so.
        num_blocks: None: as many as all requests could ever use.
        safety_margin: None: the scheduler's own.
        num_swap_blocks: blocks that offloaded requests may fill on the host.
        sequential: one request after another, each arriving when the one before has finished.
        cost: how long steps take.
    """

    page_size: int
    num_blocks: int | None = None
    max_batch_tokens: int = 8192
    max_requests_per_batch: int = 256
    scheduler_type: str = "fifo"
    safety_margin: float | None = None
    allow_block_sharing: bool = True
    eviction_policy: str = "lru"
    num_swap_blocks: int = 0
    sequential: bool = False
    cost: CostModel = field(default_factory=CostModel)

    def __post_init__(self) -> None:
        check_int("page_size", self.page_size, 1)
        check_int("num_blocks", self.num_blocks, 1, MAX_BLOCKS, optional=True)
        check_int("num_swap_blocks", self.num_swap_blocks, 0, MAX_BLOCKS)
        check_int("max_batch_tokens", self.max_batch_tokens, 1)
        check_int("max_requests_per_batch", self.max_requests_per_batch, 1)
        check_number("safety_margin", self.safety_margin, 0, 1, optional=True)
        for name, known in (("scheduler_type", SCHEDULING_POLICIES), ("eviction_policy", EVICTION_POLICIES)):
            if getattr(self, name) not in known:
                raise refuse(name, getattr(self, name), f"one of {', '.join(sorted(known))}")


class Simulation:
    """One run over a trace.

    Args:
        requests: in order of arrival.
        config: the engine.
        observer: told of every step.

    Raises:
        InvalidValueError: the page size does not divide the blocks that the trace knows the contents of.
    """

    def __init__(
        self, requests: Sequence[TraceRequest], config: SimulationConfig, observer: StepObserver | None = None
    ) -> None:
        _check_page_size(requests, config.page_size)
        self._requests = requests
        self._config = config
        self._clock = _VirtualClock()
        self._blocks = _blocks(requests, config)
        self._builder = _ShapeBuilder()
        self._scheduler = _scheduler(requests, config, self._blocks)
        self._engine = _engine(config, self._scheduler, self._blocks, self._builder, self._clock)
        self._engine.observer = observer
        self._leapt_steps = self._leapt_tokens = self._num_preempted = 0
        self._report = _Measurements()

    def run(self, progress: Callable[[int], object] = lambda num_requests: None) -> dict[str, Any]:
        """Play the whole trace.

        Args:
            progress: called with the number of requests that have just ended.

        Returns:
            What `legato simulate --json` prints: times in seconds, shares from 0 to 1.
        """
        engine, clock, report = self._engine, self._clock, self._report
        coming = _Arrivals(self._make_requests(), self._config.sequential)
        while engine.has_work or coming:
            if not engine.has_work:
                clock.now = max(clock.now, coming.next_arrival(busy=False))
            for request in coming.until(clock.now, idle=not engine.has_work):
                engine.submit(request)
            outputs = engine.step()
            for output in outputs:
                report.add(output)
            report.cache_use.add(clock.now, engine.stats.cache_used_share)
            if engine.observer is None:
                self._leap(coming.next_arrival(engine.has_work))
            progress(len(outputs) + report.take_refused())
        return self._result()

    def _leap(self, next_arrival: float) -> None:
        """Let those steps go by in one go in which the scheduler could only repeat its latest plan.

        So it is while every running request decodes, none ends, none needs another page, and nobody
        arrives: no block changes hands, so whoever had to wait has to wait still.
        """
        chunks, scheduler, stats = self._builder.chunks, self._scheduler, self._engine.stats
        num_preempted, self._num_preempted = self._num_preempted, stats.num_resets + stats.num_offloads
        if len(chunks) != len(scheduler.running):
            return
        if scheduler.waiting and num_preempted != self._num_preempted:
            return  # nobody could start in that step, for those who left had to stay out
        if scheduler.waiting and any(chunk.num_tokens > 1 for chunk in chunks):
            return  # the step had less room for them than the next one has
        steps = min((self._steps_alike(chunk.request) for chunk in chunks), default=0)
        if steps < 1:
            return
        times: list[float] = []
        shape = _decode_shape(chunks)
        while len(times) < steps and self._clock.now < next_arrival:
            shape = shape.next_decode()
            self._clock.now += self._config.cost.seconds(shape)
            times.append(self._clock.now)
        for chunk in chunks:
            request = chunk.request
            request.tokens += [_ANSWER_TOKEN] * len(times)
            request.num_computed_tokens += len(times)
            request.max_computed_tokens = max(request.num_computed_tokens, request.max_computed_tokens)
            if request.timestamps is not None:
                request.timestamps += times
        self._leapt_steps += len(times)
        self._leapt_tokens += len(times) * len(chunks)

    def _steps_alike(self, request: Request) -> int:
        """Steps in which the request only goes on decoding."""
        if request.status is not RequestStatus.DECODING or request.num_computed_tokens + 1 != len(request.tokens):
            return 0
        until_page_is_full = -request.num_computed_tokens % self._config.page_size
        return min(until_page_is_full, request.max_new_tokens - request.num_generated_tokens - 1)

    def _make_requests(self) -> Iterator[Request]:
        """Those that the cache can hold; the others are refused, as the manager would."""
        longest = self._blocks.max_tokens_alone()
        for number, traced in enumerate(self._requests):
            if traced.prompt_length + traced.output_length - 1 <= longest:
                yield _request(number, traced)
            else:
                self._report.refused += 1

    def _result(self) -> dict[str, Any]:
        config, report, stats = self._config, self._report, self._engine.stats
        num_blocks = sum(-(-r.prompt_length // config.page_size) for r in self._requests)
        hits = stats.num_cached_tokens // config.page_size
        return {
            "requests": len(self._requests),
            "refused": report.refused,
            "finished": stats.num_finished,
            "page_size": config.page_size,
            "num_blocks": self._blocks.pool.num_usable,
            "eviction_policy": config.eviction_policy,
            "prefix_block_hit_ratio": round(hits / max(num_blocks, 1), 5),
            **self._optimum(num_blocks),
            "simulated_seconds": round(self._clock.now, 3),
            "steps": stats.num_steps + self._leapt_steps,
            "prompt_tokens_computed": stats.num_prompt_tokens,
            "prompt_tokens_cached": stats.num_cached_tokens,
            "generated_tokens": stats.num_generated_tokens + self._leapt_tokens,
            "recomputed_tokens": stats.num_recomputed_tokens,
            "offloads": stats.num_offloads,
            "resets": stats.num_resets,
            "evicted_blocks": stats.num_evicted_blocks,
            **report.summary(),
            "cache_use": report.cache_use.points(),
            "cost": asdict(config.cost),
        }

    def _optimum(self, num_blocks: int) -> dict[str, float]:
        """Only of runs where it is the optimum: one request after another, contents known, none refused."""
        pages = [_page_ids(request, self._config.page_size) for request in self._requests]
        if not self._config.sequential or self._report.refused or not any(pages):
            return {}
        hits = optimal_hits(pages, self._config.num_blocks)
        return {"optimal_prefix_block_hit_ratio": round(hits / max(num_blocks, 1), 5)}


class _VirtualClock:
    """Seconds since the trace began."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class _ShapeBuilder:
    """Builds no arrays, only what the cost depends on. Remembers the latest step."""

    def __init__(self) -> None:
        self.chunks: Sequence[ScheduledChunk] = ()

    def build(self, chunks: Sequence[ScheduledChunk], tables: dict[str, BlockTables]) -> tuple[StepShape, int]:
        num_tokens = num_keys = num_pairs = num_sampled = 0
        for chunk in chunks:
            request, count = chunk.request, chunk.num_tokens
            end = request.num_computed_tokens + count
            num_tokens += count
            num_keys += end
            num_pairs += count * end
            num_sampled += end == len(request.tokens)
        self.chunks = chunks
        return StepShape(num_tokens, len(chunks), num_keys, num_pairs), num_sampled

    def forget(self, request_id: str) -> None:
        pass


class _KnownPages(PageHasher):
    """Knows the pages whose content the trace gives, and no others.

    A later prompt may hold an earlier answer, but a trace does not say so: an answer's pages are as good as blank.
    """

    def __init__(self, requests: Sequence[TraceRequest], page_size: int) -> None:
        super().__init__(page_size)
        self._requests = requests

    def root(self, cache_salt: str | None) -> bytes:
        return (cache_salt or "").encode()  # the request's number

    def extend(self, hashes: list[bytes], root: bytes, tokens: Sequence[int]) -> None:
        if not hashes:
            hashes += [page.to_bytes(16, "big") for page in _page_ids(self._requests[int(root)], self.page_size)]


@dataclass(slots=True)
class _VirtualRunner:
    """Lets the time of a forward pass go by."""

    clock: _VirtualClock
    cost: CostModel

    def weights_version(self) -> int:
        return 0

    weights_sample = weights_version

    def reread_weights(self) -> None:
        pass

    def run(self, batch: tuple[StepShape, int]) -> StepResult:
        shape, num_sampled = batch
        self.clock.now += self.cost.seconds(shape)
        return StepResult([_ANSWER_TOKEN] * num_sampled, [None] * num_sampled)


@dataclass(slots=True)
class _VirtualMover:
    """Lets the time of a transfer go by."""

    clock: _VirtualClock
    cost: CostModel

    def copy(self, copies: Sequence[CacheCopies]) -> None:
        pass  # traces have one answer a prompt

    def offload(self, copies: Sequence[UnitCopies]) -> None:
        self.clock.now += self.cost.moved_page * sum(len(copy.cache_units) for copy in copies)

    restore = offload


class _Arrivals:
    """Requests as they come.

    Args:
        requests: in order of arrival; taken one by one, so that few of a long trace exist at a time.
        sequential: each comes when nothing else is under way.
    """

    def __init__(self, requests: Iterator[Request], sequential: bool) -> None:
        self._requests = requests
        self._sequential = sequential
        self._next = next(requests, None)

    def __bool__(self) -> bool:
        return self._next is not None

    def next_arrival(self, busy: bool) -> float:
        """When the next request comes; one that waits for the engine to be idle comes never or at once."""
        if self._next is None or (self._sequential and busy):
            return math.inf
        return 0.0 if self._sequential else self._next.created_time

    def until(self, now: float, idle: bool) -> Iterator[Request]:
        """Those that have come by now; one after another, the next one if the engine is idle."""
        if self._sequential and self._next is not None:
            self._next.created_time = now if idle else math.inf
        while self._next is not None and self._next.created_time <= now:
            yield self._next
            self._next = next(self._requests, None)
            if self._sequential:
                return


class _CacheUse:
    """Cache use over time in at most `size` points; each keeps the most of its stretch of steps."""

    def __init__(self, size: int = 200) -> None:
        self._size = size
        self._points: list[tuple[float, float]] = []
        self._stride = 1
        self._count = 0
        self._most = 0.0

    def add(self, now: float, share: float) -> None:
        self._most = max(self._most, share)
        self._count += 1
        if self._count < self._stride:
            return
        self._points.append((now, self._most))
        self._count, self._most = 0, 0.0
        if len(self._points) == self._size:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [(later[0], max(earlier[1], later[1])) for earlier, later in pairs]
            self._stride *= 2

    def points(self) -> list[list[float]]:
        """[seconds, share of the cache in use, from 0 to 1]."""
        return [[round(now, 3), round(share, 4)] for now, share in self._points]


@dataclass
class _Measurements:
    """What the requests met."""

    refused: int = 0
    refused_shown: int = 0
    queued: list[float] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)
    between_tokens: "_LogHistogram" = field(default_factory=lambda: _LogHistogram())
    cache_use: _CacheUse = field(default_factory=_CacheUse)

    def add(self, output: GenerationOutput) -> None:
        timestamps = output.timestamps or [output.lifespan[1]]
        self.queued.append(output.lifespan[0] - output.created_time)
        self.first_token.append(timestamps[0] - output.created_time)
        if len(timestamps) > 1:
            self.between_tokens.add(np.diff(timestamps))

    def take_refused(self) -> int:
        """Refused requests that have not been asked for yet."""
        fresh = self.refused - self.refused_shown
        self.refused_shown = self.refused
        return fresh

    def summary(self) -> dict[str, dict[str, float]]:
        return {
            "ttft_seconds": _percentiles(self.first_token),
            "inter_token_seconds": self.between_tokens.percentiles(),
            "queue_seconds": _percentiles(self.queued),
        }


class _LogHistogram:
    """Hundreds of millions of times in 1% wide buckets, from a microsecond to a year."""

    _WIDTH = math.log(1.01)

    def __init__(self) -> None:
        self._counts = np.zeros(3200, np.int64)

    def add(self, seconds: np.ndarray) -> None:
        buckets = np.log(np.maximum(seconds, 1e-6) / 1e-6) / self._WIDTH
        np.add.at(self._counts, np.clip(buckets, 0, len(self._counts) - 1).astype(np.int64), 1)

    def percentiles(self) -> dict[str, float]:
        total = self._counts.sum()
        if not total:
            return {}
        reached = np.cumsum(self._counts)
        buckets = {p: int(np.searchsorted(reached, total * p / 100)) for p in PERCENTILES}
        return {f"p{p}": float(f"{1e-6 * math.exp((b + 0.5) * self._WIDTH):.4g}") for p, b in buckets.items()}


def _percentiles(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    found = np.percentile(values, PERCENTILES)
    return {f"p{p}": float(f"{value:.4g}") for p, value in zip(PERCENTILES, found, strict=True)}


def _check_page_size(requests: Sequence[TraceRequest], page_size: int) -> None:
    for size in {request.block_size for request in requests if request.block_ids is not None}:
        if size % page_size:
            raise InvalidValueError(
                f"page_size={page_size} is not allowed: it must divide {size}, the tokens whose content the trace knows"
            )


def _blocks(requests: Sequence[TraceRequest], config: SimulationConfig) -> BlockManager:
    num_blocks = config.num_blocks
    if num_blocks is None:
        num_blocks = sum(-(-(r.prompt_length + r.output_length) // config.page_size) for r in requests) + 1
    policy = EVICTION_POLICIES[config.eviction_policy]()
    return BlockManager(ONE_LAYER, config.page_size, RESERVED_CHUNKS + num_blocks, policy, config.num_swap_blocks)


def _scheduler(requests: Sequence[TraceRequest], config: SimulationConfig, blocks: BlockManager) -> Scheduler:
    policy = SCHEDULING_POLICIES[config.scheduler_type]
    margin = policy.safety_margin if config.safety_margin is None else config.safety_margin
    limits = StepLimits(config.max_batch_tokens, config.max_requests_per_batch, margin)
    hasher = _KnownPages(requests, config.page_size) if config.allow_block_sharing else None
    return Scheduler(policy, limits, blocks, hasher)


def _engine(
    config: SimulationConfig, scheduler: Scheduler, blocks: BlockManager, builder: _ShapeBuilder, clock: _VirtualClock
) -> Engine:
    runner, mover = _VirtualRunner(clock, config.cost), _VirtualMover(clock, config.cost)
    return Engine(scheduler, blocks, builder, runner, mover, clock)


def _decode_shape(chunks: Sequence[ScheduledChunk]) -> StepShape:
    """Of the step after which the requests have computed what they have, had it been a decode of each."""
    num_keys = sum(chunk.request.num_computed_tokens for chunk in chunks)
    return StepShape(len(chunks), len(chunks), num_keys, num_keys)


def _page_ids(traced: TraceRequest, page_size: int) -> list[int]:
    """A number for the content of each complete page of the prompt that the trace knows the content of."""
    if traced.block_ids is None:
        return []
    per_block = traced.block_size // page_size
    num_pages = traced.prompt_length // page_size
    return [traced.block_ids[page // per_block] * per_block + page % per_block for page in range(num_pages)]


def _request(number: int, traced: TraceRequest) -> Request:
    prompt = [0] * traced.prompt_length
    return Request(
        request_id=str(number),
        prompt_ids=prompt,
        params=SamplingParams(temperature=0),
        max_new_tokens=traced.output_length,
        stop_token_ids=frozenset(),
        seed=0,
        streaming=False,
        created_time=traced.arrival,
        tokens=prompt.copy(),
        timestamps=[],
        cache_salt=str(number),
    )
