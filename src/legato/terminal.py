"""Manners on a terminal, and off it."""

import sys


def notice(text: str) -> None:
    """A line on stderr, where somebody is looking."""
    if sys.stderr.isatty():
        sys.stderr.write(f"{text}\n")


def quiet_libraries_when_piped() -> None:
    """No progress bars of transformers where nobody looks at them."""
    if not sys.stderr.isatty():
        from transformers.utils import logging

        logging.disable_progress_bar()
