"""The command line, run in this process."""

import sys
from collections.abc import Callable

import pytest

from legato import cli


@pytest.fixture
def run_cli(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Gives (exit status, stdout, stderr); an exception that would be a traceback fails the test."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["legato", *map(str, arguments)])
        capfd.readouterr()
        try:
            cli.main()
        except SystemExit as exited:
            return exited.code or 0, *capfd.readouterr()  # type: ignore[return-value]
        return 0, *capfd.readouterr()

    return run
