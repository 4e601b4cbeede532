"""The `legato` command. One file a command; each imports what it needs when it runs, so help is instant."""

import logging
import sys
from typing import Annotated

import typer

from legato.cli.bench import bench
from legato.cli.generate import generate
from legato.cli.pull import pull
from legato.cli.serve import serve
from legato.cli.settings import CommandWithPanels
from legato.cli.simulate import simulate
from legato.errors import LegatoError

logger = logging.getLogger(__name__)

app = typer.Typer(
    name="legato",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

# A new command: write the function in its own file, import it above, and name it here.
for command in (generate, pull, simulate):
    app.command()(command)
app.command(cls=CommandWithPanels)(serve)
app.add_typer(bench)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"legato {version('legato')}")
        raise typer.Exit()


@app.callback()
def legato(
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Log what Legato does, and show where an error came from.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Continuous batching for Hugging Face models: many prompts at once, on your own machine, CPU or GPU.

    To begin, fetch a small real model, then use it by its alias:

    \b
        legato pull --list        which models have an alias
        legato pull smollm2       fetch one (93 MB) and print its folder

    Wherever a command takes a MODEL, it may be such an alias, a model folder, a .gguf file, or a Hugging Face
    hub id. Results go to stdout, all else to stderr. Exit status: 0 done, 1 it failed while running, 2 what
    was asked cannot work.

    \b
    Environment:
        LEGATO_CACHE              where pulled models are kept (default ~/.cache/legato)
    """
    if verbose:
        logging.basicConfig(stream=sys.stderr, format="%(levelname).1s %(asctime)s %(name)s: %(message)s")
        logging.getLogger("legato").setLevel(logging.DEBUG)


def main() -> None:
    """Runs the command line; an error that Legato raises on purpose becomes one line on stderr."""
    try:
        app()
    except (LegatoError, ValueError, OSError, NotImplementedError) as error:
        logger.debug("where the error came from", exc_info=True)
        print(f"legato: error: {' '.join(str(error).split())}", file=sys.stderr)
        # A RuntimeError is a failure on the way (network, engine); the others: what was asked cannot work.
        sys.exit(1 if isinstance(error, RuntimeError) else 2)
