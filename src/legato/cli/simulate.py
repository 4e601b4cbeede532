"""`legato simulate`: what a trace of requests would meet."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer


class TraceFormat(StrEnum):
    """Formats that `simulate` reads."""

    mooncake = "mooncake"
    azure = "azure"


def simulate(
    trace: Annotated[Path, typer.Option(help="The recorded requests.", exists=True, dir_okay=False)],
    trace_format: Annotated[TraceFormat, typer.Option("--format", help="What the file is.")],
    num_blocks: Annotated[
        int | None, typer.Option(min=1, help="Cache capacity in pages; without it, no limit.")
    ] = None,
    page_size: Annotated[int, typer.Option(min=4, help="Tokens a cache page holds.")] = 512,
    sequential: Annotated[
        bool,
        typer.Option("--sequential", help="One request after another, whenever they came: the cache alone."),
    ] = False,
    scheduler: Annotated[str, typer.Option(help="fifo or prefill_first.")] = "fifo",
    eviction: Annotated[str, typer.Option(help="lru or newest_filled.")] = "lru",
    sharing: Annotated[bool, typer.Option(help="Prefix caching.")] = True,
    swap_blocks: Annotated[int, typer.Option(min=0, help="Pages that offloaded requests may fill on the host.")] = 0,
    max_batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens in one forward pass.")] = 8192,
    max_requests: Annotated[int, typer.Option(min=1, help="Requests that run at once.")] = 256,
    cost: Annotated[
        Path | None,
        typer.Option(help="JSON with the times of a step, from `legato bench steps`.", exists=True, dir_okay=False),
    ] = None,
    repeat: Annotated[
        int, typer.Option(min=1, max=10_000, help="Play it so often, with other contents each time.")
    ] = 1,
    limit: Annotated[int | None, typer.Option(min=1, help="Requests at most.")] = None,
    timeline: Annotated[
        Path | None, typer.Option(help="Draw the run (.svg, .png or .pdf; needs legato[plot]).", dir_okay=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Play recorded requests through the real scheduler and cache, under a virtual clock, without a model.

    Reports how much of the prompts was found in the cache (prefix_block_hit_ratio; with --sequential beside the most
    that any eviction policy could find), times to the first token and between tokens, queueing, offloads, soft
    resets and cache use. How long a step takes is a sum over its tokens and keys: --cost says of which machine.

    \b
    Formats:
        mooncake    JSON lines: timestamp (ms), input_length, output_length, hash_ids (one per 512 prompt tokens)
        azure       CSV: TIMESTAMP, ContextTokens, GeneratedTokens; nothing is known of contents, nothing is shared
    """
    from tqdm import tqdm

    from legato.simulate.cost import CostModel
    from legato.simulate.simulation import Simulation, SimulationConfig
    from legato.simulate.traces import read_trace
    from legato.timeline import Timeline, check_can_draw, draw_timeline

    if timeline is not None:
        check_can_draw(timeline)
    config = SimulationConfig(
        page_size=page_size,
        num_blocks=num_blocks,
        max_batch_tokens=max_batch_tokens,
        max_requests_per_batch=max_requests,
        scheduler_type=scheduler,
        allow_block_sharing=sharing,
        eviction_policy=eviction,
        num_swap_blocks=swap_blocks,
        sequential=sequential,
        cost=CostModel() if cost is None else CostModel.load(cost),
    )
    requests = read_trace(trace, trace_format.value, repeat, limit)
    watched = Timeline() if timeline is not None else None
    simulation = Simulation(requests, config, None if watched is None else watched.add)
    with tqdm(total=len(requests), unit="req", disable=None, dynamic_ncols=True) as bar:
        result = simulation.run(bar.update)
    print(json.dumps(result) if as_json else _table(result), flush=True)
    if watched is not None and timeline is not None:
        draw_timeline(watched, timeline)


def _table(result: dict[str, Any]) -> str:
    lines = []
    for name, value in result.items():
        if isinstance(value, dict):
            value = "  ".join(f"{key} {number:.4g}" for key, number in value.items())
        elif isinstance(value, list):
            value = f"at most {max((share for _, share in value), default=0):.1%}"
        lines.append(f"{name:32} {value}")
    return "\n".join(lines)
