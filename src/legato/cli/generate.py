"""`legato generate`: answers to a file of prompts."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from legato.terminal import notice, quiet_libraries_when_piped


def generate(
    model: Annotated[str, typer.Option(help="Alias, model folder, .gguf file or hub id.")],
    prompts: Annotated[str, typer.Option(metavar="FILE|-", help="Prompts, one a line; - for standard input.")],
    output: Annotated[
        Path | None,
        typer.Option(
            help="Where results go, in place of what is there, but for --resume; standard output otherwise.",
            dir_okay=False,
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep what OUTPUT has already, and run only what is missing or failed.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="New tokens a prompt, unless its line says.")] = 256,
    chat: Annotated[bool, typer.Option("--chat", help="Plain text prompts are messages to a chat model.")] = False,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Sample, unless a line says otherwise; greedy without.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Same seed, same samples.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Type of weights and cache; float32 on CPU, else the model's own.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, mps.")] = "cpu",
    page_size: Annotated[int, typer.Option(help="Tokens a cache page holds.")] = 256,
    num_blocks: Annotated[int | None, typer.Option(help="Cache capacity in pages; what fits otherwise.")] = None,
    max_batch_tokens: Annotated[int | None, typer.Option(help="Tokens in one forward pass.")] = None,
    scheduler: Annotated[str, typer.Option(help="fifo or prefill_first.")] = "fifo",
    sharing: Annotated[bool, typer.Option(help="Prefix caching: prompts that begin alike share it.")] = True,
    offload_space: Annotated[
        float, typer.Option(min=0, help="GiB of host memory for requests that must make room.")
    ] = 0.0,
    timeline: Annotated[
        Path | None,
        typer.Option(help="Draw what each request went through (svg, png or pdf; needs legato[plot]).", dir_okay=False),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write the same as a Chrome trace, for ui.perfetto.dev.", dir_okay=False)
    ] = None,
) -> None:
    """Answer prompts, hundreds at a time, and write one JSON line for each, in input order.

    A line of FILE is plain text, or a JSON object with "prompt" (text), "messages" (a conversation for the model's
    chat template) or "prompt_ids" (token ids). Beside it may stand "id" (given back), "max_new_tokens", and sampling
    for this line alone: "temperature", "top_k", "top_p", "seed", "stop_token_ids", "ignore_eos". Lines with different
    "cache_salt" share no cached prefix, and those of a lower "priority" start first.

    \b
    A result line has:
        index, id             which prompt (from 0; blank lines are none), and the id it gave
        text                  the answer
        finish_reason         stop, length or error
        error                 why this line failed, else null; the others are not touched
        num_prompt_tokens, num_generated_tokens, num_cached_tokens
        digest                of what was asked: --resume keeps a result only if its line is still the same

    Ctrl-C writes what is finished and exits with 130; --resume goes on from there. Exit status 1: some lines failed.
    """
    notice("legato: starting")
    from legato.batch_file import Pictures, run_lines
    from legato.config import ContinuousBatchingConfig
    from legato.models import torch_dtype
    from legato.prompt_file import read_lines

    if resume and output is None:
        raise typer.BadParameter("needs --output: there is nothing to resume on standard output", param_hint="--resume")
    for option, path in (("--output", output), ("--timeline", timeline), ("--trace", trace)):
        if path is not None and prompts != "-" and path.resolve() == Path(prompts).resolve():
            raise typer.BadParameter(f"{path} is the prompt file itself: give another file", param_hint=option)
    quiet_libraries_when_piped()
    config = ContinuousBatchingConfig(
        page_size=page_size,
        num_blocks=num_blocks,
        max_batch_tokens=max_batch_tokens,
        scheduler_type=scheduler,
        allow_block_sharing=sharing,
        cpu_offload_space=offload_space,
    )
    load = {"device_map": device, **({} if dtype is None else {"dtype": torch_dtype(dtype)})}
    settings = {"model": model, "dtype": dtype, "max_new_tokens": max_new_tokens, "temperature": temperature}
    common = {name: value for name, value in settings.items() if value is not None}
    lines = read_lines(sys.stdin if prompts == "-" else Path(prompts), chat, common, seed)
    raise typer.Exit(run_lines(lines, model, load, config, output, resume, Pictures(timeline, trace)))
