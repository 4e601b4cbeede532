"""`legato bench`: how fast a model runs here."""

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from legato.cli.simulate import TraceFormat

if TYPE_CHECKING:
    from legato.bench.load import Load
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
    from legato.terminal import quiet_libraries_when_piped

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
    from legato.terminal import quiet_libraries_when_piped

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
    from legato.terminal import quiet_libraries_when_piped

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
    from legato.terminal import quiet_libraries_when_piped

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
    from legato.terminal import quiet_libraries_when_piped

    quiet_libraries_when_piped()
    settings = EngineSettings(dtype, page_size, max_batch_tokens, quantization, kv_cache_dtype)
    content = read_workload(workload)
    for figures in measure_sampling(model, content, what or list(COMPARISONS), settings, rounds):
        print(json.dumps(figures), flush=True)


@bench.command()
def serve(
    model: Annotated[str, typer.Option(help="As the server calls it.")],
    url: Annotated[str, typer.Option(help="Of the server; /v1 at its end may be left out.")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None, typer.Option(envvar="LEGATO_API_KEY", help="A key, if the server wants one.")
    ] = None,
    workload: Annotated[
        Path | None, typer.Option(help="Requests, as `bench offline` takes them.", exists=True, dir_okay=False)
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Prompts, as `legato generate` takes them.", exists=True, dir_okay=False)
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Recorded requests; needs --format.", exists=True, dir_okay=False)
    ] = None,
    trace_format: Annotated[TraceFormat | None, typer.Option("--format", help="What the trace is.")] = None,
    clients: Annotated[
        int | None, typer.Option(min=1, help="So many send the next request when their last one has ended.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=1e-6, help="So many requests a second, at random (Poisson), whatever ends.")
    ] = None,
    speedup: Annotated[float, typer.Option(min=1e-6, help="Play a trace so many times as fast as it was.")] = 1.0,
    requests: Annotated[
        int | None,
        typer.Option(min=1, help="So many, the file from the beginning again if need be. [default: all once]"),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens of a prompt whose line does not say.")] = 128,
    chat: Annotated[bool, typer.Option("--chat", help="Plain text prompts are messages of a chat.")] = False,
    ignore_eos: Annotated[bool, typer.Option(help="Ask for answers of full length.")] = True,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds that a request may take.")] = 600.0,
    slo_ttft: Annotated[float | None, typer.Option(min=0, help="Objective: ms to the first text.")] = None,
    slo_itl: Annotated[
        float | None, typer.Option(min=0, help="Objective: ms between tokens, on average over a request.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same arrivals and same token ids of a trace.")] = 0,
    as_json: AsJson = False,
) -> None:
    """What clients of a server see under load: any server that speaks OpenAI's protocol, over HTTP, streamed.

    What is asked is a --workload, a file of --prompts, or a --trace (random token ids as long as it says, alike where
    it says so). When it is asked is up to --clients or --rate; a trace without either is played as it was recorded.
    Temperature 0 unless a line says otherwise. A short request goes before, to warm up and to see that it works.

    \b
        legato bench serve --model smollm2 --prompts examples/prompts.jsonl --clients 16 --requests 64
        legato bench serve --model smollm2 --workload bench/mixed.json --rate 2 --slo-ttft 500 --slo-itl 50
        legato bench serve --model smollm2 --trace tests/data/azure_200.csv --format azure --speedup 4

    On a terminal a table, else one JSON object. Waits are counted from when a request was due, so that a generator that
    is late cannot hide a server that is slow; how late it was is told, with a warning if that matters. Tokens are those
    that the server counts (usage), not chunks. Ctrl-C prints what is finished and exits with 130; 1: no request was
    answered.

    \b
        ttft_ms               from when it was due to the first text
        inter_token_ms        between the tokens of a request, its mean: exact whatever a chunk holds
        gap_ms                from each chunk with text to the next of its request
        request_ms            from when it was due to its end
        goodput               requests a second that met both objectives
        lateness_ms, lag_ms, cpu_share    the generator: sent too late, woke up too late, cores that it took
    """
    try:
        from legato.bench.serve import Target, measure_serve
        from legato.bench.serve_figures import Slo
    except ModuleNotFoundError as error:
        from legato.errors import MissingExtraError

        raise MissingExtraError(f"bench serve needs {error.name}: pip install 'legato[serve]'") from error

    common = {"temperature": 0, "max_tokens": max_tokens, **({"ignore_eos": True} if ignore_eos else {})}
    files = {"workload": workload, "prompts": prompts, "trace": trace}
    load = _load(files, trace_format, chat, common, clients, rate, speedup, requests, seed)
    figures, finished = measure_serve(load, Target(url, model, api_key, timeout), Slo(slo_ttft, slo_itl))
    as_table = sys.stdout.isatty() and not as_json
    print(figures.text() if as_table else json.dumps(figures.as_dict()), flush=True)
    if (warning := figures.warning()) is not None:
        typer.echo(f"legato: {warning}", err=True)
    if not finished or not figures.completed:
        raise typer.Exit(1 if finished else 130)


def _load(
    files: dict[str, Path | None],
    trace_format: TraceFormat | None,
    chat: bool,
    common: dict[str, Any],
    clients: int | None,
    rate: float | None,
    speedup: float,
    requests: int | None,
    seed: int,
) -> "Load":
    """Raises `BadParameter` for options that do not go together."""
    from legato.bench.load import Load, Repeated, TraceBodies, bodies_of_prompts, bodies_of_workload, poisson
    from legato.simulate.traces import read_trace

    given = [(name, path) for name, path in files.items() if path is not None]
    if len(given) != 1:
        raise typer.BadParameter("give one of --workload, --prompts and --trace: what is to be asked")
    kind, path = given[0]
    if clients is not None and rate is not None:
        raise typer.BadParameter("give --clients or --rate: when is it to be asked?")
    if kind != "trace" and clients is None and rate is None:
        raise typer.BadParameter("give --clients or --rate: only a --trace says itself when it came")
    if speedup != 1 and (kind != "trace" or clients is not None or rate is not None):
        raise typer.BadParameter(
            "only a --trace that is played as it was recorded can be faster", param_hint="--speedup"
        )
    if (kind == "trace") != (trace_format is not None):
        raise typer.BadParameter("a --trace needs it, and nothing else does", param_hint="--format")
    if kind == "trace" and trace_format is not None:
        recorded = read_trace(path, trace_format.value)
        if clients is None and rate is None:
            recorded = read_trace(path, trace_format.value, -(-(requests or 1) // max(1, len(recorded))), requests)
            return Load(TraceBodies(recorded, seed, common), [one.arrival / speedup for one in recorded])
        bodies: Any = TraceBodies(recorded, seed, common)
    elif kind == "prompts":
        bodies = bodies_of_prompts(path, chat, common)
    else:
        bodies = bodies_of_workload(path, common)
    bodies = Repeated(bodies, requests or len(bodies))
    due = None if rate is None else poisson(rate, len(bodies), seed)
    return Load(bodies, due, clients or 0)
