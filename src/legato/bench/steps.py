"""How long steps of different shapes take on a model here: what `legato simulate` needs to know of a machine."""

import random
import time
from dataclasses import asdict
from typing import Any

from tqdm import tqdm

from legato.bench.requests import greedy_request
from legato.cache.kv import HostCache, KVCache
from legato.cache.pool import RESERVED_CHUNKS, ChunkLayout
from legato.cache.swap import UnitCopies
from legato.config import ContinuousBatchingConfig, WorkloadHints
from legato.engine.assemble import EngineFacts, assemble
from legato.engine.engine import Engine
from legato.engine.observer import StepRecord
from legato.models import load_model, torch_dtype
from legato.simulate.cost import CostModel, StepShape

MAX_PROMPT, MAX_NEW_TOKENS = 1024, 48
WAVES = (1, 2, 4, 8, 16, 32, 48)  # requests at once
WARM_UP_STEPS = 3


def measure_steps(model_name: str, dtype: str, page_size: int, max_batch_tokens: int) -> dict[str, Any]:
    """Run waves of random requests, time every step, and fit a cost model to the times; progress goes to stderr.

    Returns:
        {"model", "dtype", "steps", "median_error", "cost"}: the error is relative, of the fitted model on the steps.
    """
    model = load_model(model_name, dtype=torch_dtype(dtype)).eval()
    num_blocks = max(WAVES) * (-(-(MAX_PROMPT + MAX_NEW_TOKENS) // page_size) + 1)
    config = ContinuousBatchingConfig(
        page_size=page_size,
        num_blocks=num_blocks,
        max_batch_tokens=max_batch_tokens,
        safety_margin=0.0,
        allow_block_sharing=False,
    )
    engine, facts = assemble(model, config, WorkloadHints(num_requests=max(WAVES)), samples=False)
    steps = _StepTimes()
    engine.observer = steps.add
    with tqdm(total=sum(WAVES), unit="req", disable=None, dynamic_ncols=True) as bar:
        for count in WAVES:
            bar.set_postfix_str(f"{count} at once")
            _run_wave(engine, count, facts.shape.vocab_size, bar)
    measured = steps.measured[WARM_UP_STEPS:]
    cost = CostModel.fit(measured, _seconds_per_page(facts))
    errors = sorted(abs(cost.seconds(shape) / seconds - 1) for shape, seconds in measured)
    return {
        "model": model_name,
        "dtype": dtype,
        "steps": len(measured),
        "median_error": round(errors[len(errors) // 2], 3),
        "cost": {name: float(f"{value:.4g}") for name, value in asdict(cost).items()},
    }


class _StepTimes:
    """Shapes and seconds of an engine's steps, from what it tells of them."""

    def __init__(self) -> None:
        self.measured: list[tuple[StepShape, float]] = []
        self._num_computed: dict[str, int] = {}

    def add(self, record: StepRecord) -> None:
        counts = record.prefilled | dict.fromkeys(record.decoded, 1)
        if not counts:
            return
        num_keys = num_pairs = 0
        for request_id, count in counts.items():
            end = self._num_computed[request_id] = self._num_computed.get(request_id, 0) + count
            num_keys += end
            num_pairs += count * end
        shape = StepShape(sum(counts.values()), len(counts), num_keys, num_pairs)
        self.measured.append((shape, record.ended - record.started))


def _run_wave(engine: Engine, count: int, vocab_size: int, bar: Any) -> None:
    rng = random.Random(count)
    for i in range(count):
        prompt = [rng.randrange(vocab_size) for _ in range(rng.randint(16, MAX_PROMPT))]
        engine.submit(greedy_request(f"{count}.{i}", prompt, rng.randint(MAX_NEW_TOKENS // 3, MAX_NEW_TOKENS)))
    while engine.has_work:
        bar.update(sum(output.is_finished() for output in engine.step()))


def _seconds_per_page(facts: EngineFacts, num_blocks: int = 64) -> float:
    """Of one block of every attention group, there and back."""
    groups, page_size = facts.shape.groups, facts.size.page_size
    layout = ChunkLayout.of(groups, page_size)
    cache = KVCache(groups, page_size, RESERVED_CHUNKS + num_blocks * len(groups), facts.dtype, facts.device)
    num_units = num_blocks * sum(layout.units_per_block)
    host = HostCache(cache, num_units)
    units = list(range(num_units))
    copies = [UnitCopies(units, units)]
    host.offload(copies)
    start = time.perf_counter()
    host.offload(copies)
    host.restore(copies)
    return (time.perf_counter() - start) / (2 * num_blocks)
