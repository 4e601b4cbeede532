"""`legato serve`: an OpenAI-compatible server."""

import gc
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from legato.cli.settings import read_settings, with_settings
from legato.config import WorkloadHints
from legato.errors import InvalidValueError, MissingExtraError
from legato.terminal import quiet_libraries_when_piped

KEY_VARIABLE = "LEGATO_API_KEY"
CPU_BATCH_TOKENS = 512  # every stream waits for all of a pass, which is a second of a small model with 2,000


@with_settings(
    max_batch_tokens="query tokens in one forward pass, which every stream waits for. "
    f"None: {CPU_BATCH_TOKENS} on a CPU, else 8192, lowered to what memory allows"
)
def serve(
    model: Annotated[str, typer.Argument(help="Alias, model folder, .gguf file or hub id.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar=KEY_VARIABLE,
            help="A key that clients must bring; may be given several times (in the variable: parted by blanks).",
        ),
    ] = None,
    served_model_name: Annotated[str | None, typer.Option(help="What clients call the model. [default: MODEL]")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Type of weights; float32 on CPU, else the model's own.", rich_help_panel="Model"),
    ] = None,
    device: Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, mps.", rich_help_panel="Model")] = "cpu",
    config: Annotated[
        Path | None,
        typer.Option(
            help="TOML: settings of ContinuousBatchingConfig by name; flags overrule it.", exists=True, dir_okay=False
        ),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse fields that are not known.")] = False,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Largest body of a call.")] = 4 << 20,
    request_timeout: Annotated[
        float | None, typer.Option(min=0.001, help="Seconds for one call, to its last token. [default: no limit]")
    ] = None,
    drain_timeout: Annotated[float, typer.Option(min=0, help="Seconds for running calls after SIGTERM.")] = 60.0,
    **settings: Any,
) -> None:
    """Serve a model to OpenAI's clients: chat, completions, streaming, metrics.

    \b
        legato serve smollm2 --port 8000
        curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\
            -d '{"model": "smollm2", "messages": [{"role": "user", "content": "Hello!"}]}'

    \b
    POST /v1/chat/completions, /v1/completions, /v1/responses, /tokenize, /detokenize
    GET  /v1/models, /health (the engine lives), /ready (new calls are taken), /metrics (Prometheus), /version

    The first SIGTERM or Ctrl-C lets running calls finish and refuses new ones, the second ends them too. Without
    --api-key everybody who reaches the port may use it: it listens on 127.0.0.1 unless --host says otherwise.
    """
    if (not api_key and KEY_VARIABLE in os.environ) or any(not key.strip() for key in api_key or ()):
        raise InvalidValueError(f"--api-key or {KEY_VARIABLE} is empty: leave it out to let everybody in")
    engine = read_settings(config, settings)
    _check_address(host, port)
    quiet_libraries_when_piped()
    with _imports_uncollected():
        from legato.llm import LLM
        from legato.models import torch_dtype

        try:
            from legato.server.limits import Limits
            from legato.server.run import run
            from legato.server.service import Service
        except ModuleNotFoundError as error:
            raise MissingExtraError(f"serve needs {error.name}: pip install 'legato[serve]'") from error
        from legato.text import longest_token

    load = {"device_map": device, **({} if dtype is None else {"dtype": torch_dtype(dtype)})}
    hints = WorkloadHints(max_batch_tokens=CPU_BATCH_TOKENS if device.startswith("cpu") else None)
    with LLM(model, continuous_batching_config=engine, workload_hints=hints, **load) as llm:
        service = Service(
            llm.manager,
            llm.tokenizer,
            served_model_name or model,
            tuple(api_key or ()),
            strict,
            Limits(
                max_body_bytes,
                characters=llm.manager.max_tokens * longest_token(llm.tokenizer),
                seconds=request_timeout,
            ),
        )
        facts = llm.manager.describe()
        status = run(
            service, host, port, drain_timeout,
            ready=lambda url: typer.echo(f"legato: serving {service.model} on {url} ({facts})", err=True),
        )  # fmt: skip
        if status is not None:
            os._exit(status)  # neither the step under way nor a grammar is waited for, which may take a minute


def _check_address(host: str, port: int) -> None:
    """Before a model is loaded for nothing."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise InvalidValueError(f"--host {host} --port {port} cannot be listened on: {error}") from error


@contextmanager
def _imports_uncollected() -> Iterator[None]:
    """No garbage collection meanwhile, nor ever of what is there at the end.

    Importing torch and transformers makes a million objects that stay: looking through them again and again takes a
    sixth of the start, and later tens of milliseconds whenever a full collection comes while requests run.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
