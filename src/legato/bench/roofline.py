"""What the machine could do with a workload, and how much of that is reached, part by part."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tqdm import tqdm
from transformers import GenerationConfig

from legato.bench.floor import PARTS, Machine, ModelWork, Work, floor_seconds, pass_work
from legato.bench.machine import measure_machine
from legato.bench.model_work import model_work
from legato.bench.requests import greedy_request
from legato.bench.settings import EngineSettings
from legato.bench.tables import table
from legato.bench.timed import OTHER, PassTimes
from legato.bench.workload import check_workload
from legato.config import ContinuousBatchingConfig, WorkloadHints
from legato.engine.assemble import EngineFacts, Wrappers, assemble
from legato.engine.engine import Engine
from legato.generation import GenerationDefaults, RequestFactory
from legato.kernels import load_kernels
from legato.models import load_model, torch_dtype
from legato.request import Request, RequestSpec

IN_PASS = "Python in a pass"
AROUND_PASS = "Python around it"


@dataclass(frozen=True, slots=True)
class PartFigures:
    """One part of all passes.

    Attributes:
        name: of the part.
        work: bytes and operations of all passes.
        memory_seconds, compute_seconds: what each of them alone would take.
        floor_seconds: the least it can take, summed over passes; 0 for what an engine could do without.
        seconds: what it took; None: not measured, as on the reference path.
    """

    name: str
    work: Work
    memory_seconds: float
    compute_seconds: float
    floor_seconds: float
    seconds: float | None

    @property
    def reached(self) -> float | None:
        """Share of the floor that is reached, 1 being all of it."""
        return self.floor_seconds / self.seconds if self.seconds and self.floor_seconds else None

    @property
    def bound(self) -> str:
        """Which of the two takes longer over all passes."""
        if not self.floor_seconds:
            return ""
        return "memory" if self.memory_seconds >= self.compute_seconds else "compute"


@dataclass(frozen=True)
class Roofline:
    """The floor of a workload, and the run.

    Attributes:
        model, workload: their names.
        settings: of the engine.
        description: the engine's line about itself.
        machine: what it can do at best, measured just now.
        peak_of: which product gave its peak.
        num_steps: forward passes.
        num_tokens: new tokens.
        seconds: of the run.
        parts: of it.
    """

    model: str
    workload: str
    settings: EngineSettings
    description: str
    machine: Machine
    peak_of: str
    num_steps: int
    num_tokens: int
    seconds: float
    parts: tuple[PartFigures, ...]

    @property
    def floor_seconds(self) -> float:
        return sum(part.floor_seconds for part in self.parts)

    @property
    def reached(self) -> float:
        """Share of the floor that is reached, 1 being all of it."""
        return self.floor_seconds / self.seconds

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "model": self.model,
            "workload": self.workload,
            "dtype": self.settings.dtype,
            "quantization": self.settings.quantization,
            "kv_cache_dtype": self.settings.kv_cache_dtype,
            "engine": self.description,
            "gb_per_second": round(self.machine.bytes_per_second / 1e9, 2),
            "gflop_per_second": round(self.machine.flop_per_second / 1e9, 1),
            "peak_of": self.peak_of,
            "steps": self.num_steps,
            "tokens": self.num_tokens,
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(self.num_tokens / self.seconds, 1),
            "floor_seconds": round(self.floor_seconds, 4),
            "reached": round(self.reached, 4),
            "parts": {part.name: _part_dict(part) for part in self.parts},
        }

    def text(self) -> str:
        """For people."""
        rows: list[tuple[str, ...]] = [("part", "GB", "GFLOP", "floor s", "bound by", "took s", "reached")]
        rows += [_part_row(part) for part in self.parts]
        rows.append(("all", "", "", f"{self.floor_seconds:.3f}", "", f"{self.seconds:.3f}", f"{self.reached:.0%}"))
        machine = self.machine
        return (
            f"{self.description}\n"
            f"machine: {machine.bytes_per_second / 1e9:.1f} GB/s, {machine.flop_per_second / 1e9:.0f} GFLOP/s "
            f"({self.peak_of})\n"
            f"{self.workload}: {self.num_tokens} new tokens in {self.num_steps} steps, "
            f"{self.num_tokens / self.seconds:.1f} tok/s; at the floor {self.num_tokens / self.floor_seconds:.1f}\n\n"
            f"{table(rows)}"
        )


def _part_dict(part: PartFigures) -> dict[str, Any]:
    return {
        "gigabytes": round(part.work.num_bytes / 1e9, 4),
        "gflop": round(part.work.flop / 1e9, 3),
        "floor_seconds": round(part.floor_seconds, 4),
        "bound": part.bound or None,
        "seconds": None if part.seconds is None else round(part.seconds, 4),
        "reached": None if part.reached is None else round(part.reached, 4),
    }


def _part_row(part: PartFigures) -> tuple[str, ...]:
    has_floor = part.floor_seconds > 0
    return (
        part.name,
        f"{part.work.num_bytes / 1e9:.2f}" if has_floor else "",
        f"{part.work.flop / 1e9:.1f}" if has_floor else "",
        f"{part.floor_seconds:.3f}" if has_floor else "",
        part.bound,
        "?" if part.seconds is None else f"{part.seconds:.3f}",
        "" if part.reached is None else f"{part.reached:.0%}",
    )


def measure_roofline(model_name: str, workload: dict[str, Any], settings: EngineSettings) -> Roofline:
    """Run a workload through the engine in this thread, and measure the machine before and after it.

    Progress goes to stderr.

    Args:
        workload: {"name", "requests": [{"prompt_ids", "max_new_tokens"}]}.

    Raises:
        InvalidValueError: the workload or a setting cannot work.
    """
    check_workload(workload)
    config = settings.config()
    dtype = torch_dtype(settings.dtype)
    model = load_model(model_name, dtype=dtype).eval()
    quantized = settings.quantization is not None
    before = measure_machine(dtype, quantized, _kernels(model))
    vocab_size = int(model.get_input_embeddings().weight.shape[0])
    whole, parts = PassTimes(vocab_size), PassTimes(vocab_size)
    facts, num_tokens, seconds = _run(model, config, workload["requests"], whole, Wrappers(runner=whole.runner))
    # Once more for the parts: a pass taken apart cannot be replayed in one call, and so takes longer.
    config = replace(config, num_blocks=facts.size.num_blocks, max_requests_per_batch=facts.size.max_requests_per_batch)
    _run(model, config, workload["requests"], parts, Wrappers(parts.kernels, parts.runner))
    whole.parts = parts.parts
    best = before.better(measure_machine(dtype, quantized, _kernels(model)))
    return Roofline(
        model=model_name,
        workload=workload["name"],
        settings=settings,
        description=facts.description,
        machine=best.machine,
        peak_of=best.peak_of,
        num_steps=len(whole.shapes),
        num_tokens=num_tokens,
        seconds=seconds,
        parts=tuple(_figures(model_work(model, facts, quantized), whole, best.machine, seconds)),
    )


# The run


def _kernels(model: Any) -> Any:
    """The kernels whose products count toward the peak: none off the CPU."""
    return load_kernels() if model.device.type == "cpu" else None


def _warm_up(engine: Engine) -> None:
    """So that what is tuned or compiled at first use is, and memory that is used again has been touched."""
    engine.submit(greedy_request("warm-up", [1, 2, 3], 4))
    while engine.has_work:
        engine.step()


def _requests(model: Any, facts: EngineFacts, requests: Sequence[dict[str, Any]]) -> list[Request]:
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    defaults = GenerationDefaults.of(model, generation)
    factory = RequestFactory(facts.shape.vocab_size, facts.shape.max_length, facts.max_request_tokens, seed=0)
    specs = [RequestSpec(request["prompt_ids"], request["max_new_tokens"]) for request in requests]
    return [factory.make(defaults, str(i), spec) for i, spec in enumerate(specs)]


def _run(
    model: Any, config: ContinuousBatchingConfig, asked: Sequence[dict[str, Any]], times: PassTimes, wrappers: Wrappers
) -> tuple[EngineFacts, int, float]:
    """What the engine was, new tokens, and seconds; the rest is in `times`."""
    engine, facts = assemble(model, config, WorkloadHints(), samples=False, wrappers=wrappers)
    _warm_up(engine)
    requests = _requests(model, facts, asked)
    times.clear()
    before = engine.stats.num_generated_tokens
    total = sum(request.max_new_tokens for request in requests)
    with tqdm(total=total, unit="tok", disable=None, dynamic_ncols=True) as bar:
        start = time.perf_counter()
        for request in requests:
            engine.submit(request)
        while engine.has_work:
            engine.step()
            bar.update(engine.stats.num_generated_tokens - before - bar.n)
        return facts, engine.stats.num_generated_tokens - before, time.perf_counter() - start


def _figures(model: ModelWork, times: PassTimes, machine: Machine, seconds: float) -> Iterator[PartFigures]:
    floors = floor_seconds(model, times.shapes, machine)
    work = dict.fromkeys(PARTS, Work())
    for shape in times.shapes:
        work = {part: work[part] + more for part, more in pass_work(model, shape).items()}
    for part in PARTS:
        yield PartFigures(
            part, work[part], work[part].memory_seconds(machine), work[part].compute_seconds(machine), floors[part],
            times.parts.get(part),
        )  # fmt: skip
    rest = {IN_PASS: times.passes - sum(times.parts.values()), AROUND_PASS: seconds - times.passes}
    if OTHER in times.parts:
        rest = {OTHER: times.parts[OTHER], **rest}
    elif not times.parts:
        rest = {"forward passes": times.passes, AROUND_PASS: rest[AROUND_PASS]}
    for name, took in rest.items():
        yield PartFigures(name, Work(), 0.0, 0.0, 0.0, took)
