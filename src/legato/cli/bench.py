"""`legato bench`: how fast a model runs here."""

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from legato.bench.settings import EngineSettings

DEFAULT_BATCHES = (1, 2, 4, 8, 16, 32, 64)

bench = typer.Typer(name="bench", no_args_is_help=True, help="Measure how fast a model runs here.")


Model = Annotated[str, typer.Option(help="Alias, model folder, .gguf file or hub id.")]
Workload = Annotated[
    Path,
    typer.Option(
        help='JSON: {"name": ..., "requests": [{"prompt_ids": [...], "max_new_tokens": N}, ...]}.',
        exists=True,
        dir_okay=False,
    ),
]
Dtype = Annotated[str, typer.Option(help="Type of weights, cache and arithmetic.")]
PageSize = Annotated[int, typer.Option(help="Tokens a cache page holds.")]
MaxBatchTokens = Annotated[int, typer.Option(help="Tokens in one forward pass.")]
Quantization = Annotated[str | None, typer.Option(metavar="int8", help="How weights are stored; as they are without.")]
KVCacheDtype = Annotated[str | None, typer.Option(help="Type of K and V in the cache; the engine's choice without.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON also on a terminal.")]


class EngineName(StrEnum):
    """Engines that `bench offline` can run."""

    legato = "legato"
    transformers = "transformers"


@bench.callback()
def _group() -> None:
    """Measure how fast a model runs here."""


@bench.command()
def offline(
    model: Model,
    workload: Workload,
    engine: Annotated[EngineName, typer.Option(help="What runs the model.")] = EngineName.legato,
    dtype: Dtype = "float32",
    page_size: PageSize = 32,
    max_batch_tokens: MaxBatchTokens = 1024,
    quantization: Quantization = None,
    kv_cache_dtype: KVCacheDtype = None,
    repeat: Annotated[int, typer.Option(min=1, help="Runs in one process, whose median counts.")] = 1,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=COMMAND", help="Compare Legato with this peer (see above); may be given several times."
        ),
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="Rounds of a comparison.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print a comparison as JSON, not as a table.")] = False,
) -> None:
    """All requests at once, greedy, end-of-sequence ignored; prints one JSON line with new tokens per second.

    The clock runs from the first submission to the last result: loading the model, making the cache, and a short
    request to warm up are not in it. With --repeat the cache is empty again for each run.

    With --compare, Legato and its peers take turns, A B C A B C, each time in a process of their own. A table shows the
    median tokens per second of each, and by what factor Legato is faster: the median of the rounds' ratios, with the
    smallest and the greatest. A peer is a name and a command for the shell, or just "transformers" for its own
    continuous batching. In the command {workload} stands for the path of the workload (without quotes around it). The
    last line that it prints must be a JSON object with at least these, as this command itself prints them:

    \b
        tokens                new tokens of all requests
        seconds               from the first submission to the last result
        tokens_per_second     the one by the other

    \b
    For example:
        legato bench offline --model smollm2 --workload bench/mixed.json --runs 3 \\
            --compare transformers --compare "other=python run_other.py a/model {workload}"

    A peer that fails is reported and left out from then on; the exit status is 1 then.
    """
    from legato.bench.settings import EngineSettings
    from legato.bench.workload import read_workload

    settings = EngineSettings(dtype, page_size, max_batch_tokens, quantization, kv_cache_dtype)
    content = read_workload(workload)
    if compare:
        if engine is not EngineName.legato:
            raise typer.BadParameter("--compare is of Legato and its peers: leave it out", param_hint="--engine")
        _compare(compare, model, workload, content["name"], settings, repeat, runs, as_json)
        return

    from legato.bench.offline import run_offline
    from legato.cli.terminal import quiet_libraries_when_piped

    quiet_libraries_when_piped()
    print(json.dumps(run_offline(engine.value, model, content, settings, repeat)))


def _compare(
    peers: list[str],
    model: str,
    workload: Path,
    name: str,
    settings: "EngineSettings",
    repeat: int,
    rounds: int,
    as_json: bool,
) -> None:
    """Imports no torch: it would only stand in the way of those that run."""
    from legato.bench.compare import compare, competitors

    comparison = compare(competitors(peers, model, workload, settings, repeat), name, rounds)
    print(json.dumps(comparison.as_dict()) if as_json else comparison.text())
    if comparison.failures:
        raise typer.Exit(1)


@bench.command()
def latency(
    model: Model,
    batch: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Requests at once; may be given several times. [default: 1, 2, 4, ... 64]"),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 96,
    new_tokens: Annotated[int, typer.Option(min=1, help="New tokens of each request.")] = 128,
    dtype: Dtype = "float32",
    page_size: PageSize = 32,
    max_batch_tokens: MaxBatchTokens = 1024,
    quantization: Quantization = None,
    kv_cache_dtype: KVCacheDtype = None,
    repeat: Annotated[int, typer.Option(min=1, help="Times that each batch is run; its figures are over all.")] = 3,
    as_json: AsJson = False,
) -> None:
    """How long requests wait for their first token and for each next one, at several batch sizes.

    All requests of a batch are submitted at once and streamed: random prompts that share nothing, greedy, end of
    sequence ignored, after a short warm-up. On a terminal a table, else one JSON line for each batch size:

    \b
        batch, prompt_tokens, new_tokens
        ttft_ms               from submission to the first token: median, p90, p99 over requests
        inter_token_ms        from each token to the next of its request: median, p90, p99 over tokens
        tokens_per_second     new tokens of all requests
    """
    from legato.bench.latency import TABLE_HEADER, TABLE_WIDTHS, measure_latency
    from legato.bench.settings import EngineSettings
    from legato.bench.tables import line
    from legato.cli.terminal import quiet_libraries_when_piped

    quiet_libraries_when_piped()
    settings = EngineSettings(dtype, page_size, max_batch_tokens, quantization, kv_cache_dtype)
    as_table = sys.stdout.isatty() and not as_json
    figures = measure_latency(model, batch or DEFAULT_BATCHES, prompt_tokens, new_tokens, settings, repeat)
    for number, figure in enumerate(figures):
        if as_table and number == 0:
            print(line(TABLE_HEADER, TABLE_WIDTHS))
        print(line(figure.row(), TABLE_WIDTHS) if as_table else json.dumps(figure.as_dict()), flush=True)


@bench.command()
def roofline(
    model: Model,
    workload: Workload,
    dtype: Dtype = "float32",
    page_size: PageSize = 32,
    max_batch_tokens: MaxBatchTokens = 1024,
    quantization: Quantization = None,
    kv_cache_dtype: KVCacheDtype = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """How much of what this machine could do with a workload is reached, in all and part by part.

    Measured before and after: how fast all cores read memory, and multiply large matrices, by the best way at hand.
    A part of a forward pass then takes at least its bytes over the one or its operations over the other, whichever is
    more; the floor is the sum of that over all passes of the run. Bytes are those of weights (2 an element where
    bfloat16 holds them exactly, 1 with int8), of K and V in sight, and of logits; activations are taken to stay in the
    processor's caches. Models that fit into those, weights and all, may seem to do better than possible.

    \b
    Parts:
        projections           products of all layers
        attention             of all layers, with rotation and the writing of K and V
        head                  logits, only of rows that are sampled
        sampling              from logits to tokens
        norms, gates          other kernels: no floor, as they could be fused into those above
        Python                in a pass: what calls the kernels; around it: schedule, allocate, build and commit

    Parts are timed by a wrapper around the kernels of the fused decoder; for a model that runs on the reference path
    ("?") only the whole passes are. The engine is stepped in the main thread, so that nothing else is in the figures.
    """
    from legato.bench.roofline import measure_roofline
    from legato.bench.settings import EngineSettings
    from legato.bench.workload import read_workload
    from legato.cli.terminal import quiet_libraries_when_piped

    quiet_libraries_when_piped()
    settings = EngineSettings(dtype, page_size, max_batch_tokens, quantization, kv_cache_dtype)
    result = measure_roofline(model, read_workload(workload), settings)
    print(json.dumps(result.as_dict()) if as_json else result.text())


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
    model: Model,
    dtype: Dtype = "float32",
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


@bench.command()
def sampling(
    model: Model,
    workload: Workload,
    what: Annotated[
        list[str] | None,
        typer.Option(help="settings, grammar, samples or guesses; may be given several times. [default: all]"),
    ] = None,
    dtype: Dtype = "float32",
    page_size: PageSize = 32,
    max_batch_tokens: MaxBatchTokens = 1024,
    quantization: Quantization = None,
    kv_cache_dtype: KVCacheDtype = None,
    rounds: Annotated[int, typer.Option(min=1, help="Times that both ways are run, in turns.")] = 5,
) -> None:
    """What sampling costs and what it saves, on a workload's prompts: each against the plain way, in turns.

    \b
        settings    64 requests with different sampling settings, against 64 greedy ones
        grammar     64 requests whose answers follow a JSON schema, against free text
        samples     8 prompts with 16 samples each, against 16 requests for each prompt
        guesses     speculative="ngram", against a token at a time; one request after the other

    One JSON line each: seconds, steps, new tokens and prompt tokens computed, both ways, and by what factor the other
    way has more seconds, seconds a step and tokens a second: median, low and high of the rounds. Answers are of 64
    tokens, those of "guesses" as long as the workload says; end of sequence is ignored.
    """
    from legato.bench.sampling import COMPARISONS, measure_sampling
    from legato.bench.settings import EngineSettings
    from legato.bench.workload import read_workload
    from legato.cli.terminal import quiet_libraries_when_piped

    quiet_libraries_when_piped()
    settings = EngineSettings(dtype, page_size, max_batch_tokens, quantization, kv_cache_dtype)
    content = read_workload(workload)
    for figures in measure_sampling(model, content, what or list(COMPARISONS), settings, rounds):
        print(json.dumps(figures), flush=True)
