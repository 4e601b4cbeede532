"""`legato bench`: how fast a model runs here."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

bench = typer.Typer(name="bench", no_args_is_help=True, help="Measure how fast a model runs here.")


class EngineName(StrEnum):
    """Engines that `bench offline` can run."""

    legato = "legato"
    transformers = "transformers"


@bench.callback()
def _group() -> None:
    """Measure how fast a model runs here."""


@bench.command()
def offline(
    model: Annotated[str, typer.Option(help="Alias, model folder, .gguf file or hub id.")],
    workload: Annotated[
        Path,
        typer.Option(
            help='JSON: {"name": ..., "requests": [{"prompt_ids": [...], "max_new_tokens": N}, ...]}.',
            exists=True,
            dir_okay=False,
        ),
    ],
    engine: Annotated[EngineName, typer.Option(help="What runs the model.")] = EngineName.legato,
    dtype: Annotated[str, typer.Option(help="Type of weights, cache and arithmetic.")] = "float32",
    page_size: Annotated[int, typer.Option(help="Tokens a cache page holds.")] = 32,
    max_batch_tokens: Annotated[int, typer.Option(help="Tokens in one forward pass.")] = 1024,
) -> None:
    """All requests at once, greedy, end-of-sequence ignored; prints one JSON line with new tokens per second.

    The clock runs from the first submission to the last result: loading the model and making the cache are not in it.
    """
    from legato.bench.offline import run_offline
    from legato.cli.terminal import quiet_libraries_when_piped

    quiet_libraries_when_piped()
    requests = json.loads(workload.read_text())
    result = run_offline(engine.value, model, requests, dtype, page_size, max_batch_tokens)
    print(json.dumps(result))


@bench.command()
def overhead(
    requests: Annotated[list[int] | None, typer.Option(help="Running requests; may be given several times.")] = None,
    page_size: Annotated[int, typer.Option(help="Tokens a cache page holds.")] = 16,
) -> None:
    """What a decode step costs besides the model: schedule, allocate, build and commit. One JSON line a figure."""
    from legato.bench.overhead import GROUPS, measure_overhead

    for model in GROUPS:
        for num_requests in requests or [64, 256, 1024, 4096]:
            print(json.dumps(measure_overhead(num_requests, model, page_size)), flush=True)


@bench.command()
def steps(
    model: Annotated[str, typer.Option(help="Alias, model folder, .gguf file or hub id.")],
    dtype: Annotated[str, typer.Option(help="Type of weights, cache and arithmetic.")] = "float32",
    page_size: Annotated[int, typer.Option(min=4, help="Tokens a cache page holds.")] = 16,
    max_batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens in one forward pass.")] = 1024,
) -> None:
    """How long steps of many shapes take, and a cost model fitted to them: one JSON line for `simulate --cost`."""
    from legato.bench.steps import measure_steps
    from legato.cli.terminal import quiet_libraries_when_piped

    quiet_libraries_when_piped()
    print(json.dumps(measure_steps(model, dtype, page_size, max_batch_tokens)))


@bench.command()
def pool(
    blocks: Annotated[int, typer.Option(min=1000, max=10_000_000, help="Blocks of the pool.")] = 1_000_000,
) -> None:
    """What the cache's accounts cost: allocate, free, find by hash and evict, one JSON line with microseconds each."""
    from legato.bench.pool import measure_pool

    print(json.dumps(measure_pool(blocks)))
