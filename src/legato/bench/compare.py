"""Legato and its peers on one workload, in turns, each time as a process of its own.

A machine's speed drifts with the hour and with what else it does; two engines that ran in the same minute share that.
So a ratio is taken of every round, and the median of those ratios is worth more than a ratio of medians.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from legato.bench.settings import EngineSettings
from legato.bench.spread import Spread
from legato.bench.tables import table
from legato.errors import InvalidValueError

OURS = "legato"
BUILT_IN_PEER = "transformers"
PLACEHOLDER = "{workload}"
_STDERR_LINES = 15


class RunFailedError(RuntimeError):
    """A process that gave no result. The message says what it did instead."""


@dataclass(frozen=True)
class Competitor:
    """An engine and the command that runs it once: an argument list, or a line for the shell."""

    name: str
    command: list[str] | str


@dataclass(frozen=True, slots=True)
class Run:
    """What one process measured."""

    tokens: int
    seconds: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a competitor gave up, and in which round, from 1."""

    round: int
    reason: str


@dataclass
class Comparison:
    """What came of it.

    Attributes:
        workload: its name.
        rounds: how many there were.
        runs: of each competitor, in order of rounds, up to its failure if it failed.
        failures: of those that failed.
    """

    workload: str
    rounds: int
    runs: dict[str, list[Run]]
    failures: dict[str, Failure] = field(default_factory=dict)

    def speed(self, name: str) -> Spread | None:
        """New tokens per second; None where no run came to its end."""
        runs = self.runs[name]
        return Spread.of([run.tokens_per_second for run in runs]) if runs else None

    def ratio(self, peer: str) -> Spread | None:
        """Legato's speed to the peer's, of each round that both came through."""
        pairs = zip(self.runs[OURS], self.runs[peer], strict=False)
        ratios = [ours.tokens_per_second / theirs.tokens_per_second for ours, theirs in pairs]
        return Spread.of(ratios) if ratios else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON; speeds in new tokens per second."""
        engines = {}
        for name, runs in self.runs.items():
            speed, ratio = self.speed(name), None if name == OURS else self.ratio(name)
            engines[name] = {
                "tokens": [run.tokens for run in runs],
                "seconds": [run.seconds for run in runs],
                "tokens_per_second": None if speed is None else speed.rounded(1),
                "legato_ratio": None if ratio is None else ratio.rounded(3),
            }
        failures = {name: {"round": f.round, "reason": f.reason} for name, f in self.failures.items()}
        return {"workload": self.workload, "rounds": self.rounds, "engines": engines, "failures": failures}

    def text(self) -> str:
        """A table for people, and what to keep in mind when reading it."""
        rows = [(self.workload, "runs", "tokens", "tok/s, median (min–max)", "Legato is faster by, median (min–max)")]
        for name, runs in self.runs.items():
            speed, ratio = self.speed(name), None if name == OURS else self.ratio(name)
            rows.append(
                (
                    name,
                    str(len(runs)),
                    ", ".join(sorted({str(run.tokens) for run in runs})) or "-",
                    "-" if speed is None else speed.text(1),
                    "" if ratio is None else ratio.text(2),
                )
            )
        if len({run.tokens for runs in self.runs.values() for run in runs}) > 1:
            return table(rows) + "\nNot all made the same number of tokens: they did not do the same work."
        return table(rows)


def competitors(
    peers: Sequence[str], model: str, workload: Path, settings: EngineSettings, repeat: int
) -> list[Competitor]:
    """Legato, and the peers in the order given.

    Args:
        peers: "NAME=COMMAND" each, with `PLACEHOLDER` in the command, or `BUILT_IN_PEER`.
        model, workload, settings, repeat: of Legato, and of the built-in peer as far as it has them.

    Raises:
        InvalidValueError: a peer is not of that form, or a name is there twice.
    """
    common = ["--model", model, "--workload", str(workload), "--repeat", str(repeat)]
    legato = [sys.executable, "-m", "legato.cli", "bench", "offline", *common]
    found = [Competitor(OURS, legato + settings.options())]
    for peer in peers:
        name, given, command = peer.partition("=")
        name = name.strip()
        if name in {competitor.name for competitor in found}:
            raise InvalidValueError(f"compare={peer!r}: there is a {name!r} already; give each peer another name")
        if not given and name == BUILT_IN_PEER:
            plain = EngineSettings(settings.dtype, settings.page_size, settings.max_batch_tokens)
            found.append(Competitor(name, [*legato, "--engine", BUILT_IN_PEER, *plain.options()]))
        elif name and PLACEHOLDER in command:
            found.append(Competitor(name, command.replace(PLACEHOLDER, shlex.quote(str(workload.resolve())))))
        else:
            raise InvalidValueError(
                f"compare={peer!r} must be {BUILT_IN_PEER} or NAME=COMMAND, where the command has {PLACEHOLDER} in it"
            )
    return found


def compare(entrants: Sequence[Competitor], workload: str, rounds: int) -> Comparison:
    """Run all of them in turns, `rounds` times: A B C A B C. Progress and failures go to stderr.

    One that fails is left out from then on; the others go on.
    """
    comparison = Comparison(workload, rounds, {entrant.name: [] for entrant in entrants})
    with tqdm(total=rounds * len(entrants), unit="run", disable=None, dynamic_ncols=True) as bar:
        for number in range(1, rounds + 1):
            for entrant in entrants:
                if entrant.name not in comparison.failures:
                    bar.set_postfix_str(f"round {number}: {entrant.name}", refresh=True)
                    _take_part(entrant, number, comparison, bar)
                bar.update()
    return comparison


def _take_part(entrant: Competitor, number: int, comparison: Comparison, bar: Any) -> None:
    try:
        comparison.runs[entrant.name].append(run_once(entrant.command))
    except RunFailedError as error:
        comparison.failures[entrant.name] = Failure(number, str(error))
        bar.write(f"{entrant.name}, round {number}: {error}", file=sys.stderr)


def run_once(command: list[str] | str) -> Run:
    """Run a command to its end and read the last line that it printed.

    Raises:
        RunFailedError: its status is not 0, or that line is not an object with `Run`'s fields.
    """
    done = subprocess.run(
        command,
        shell=isinstance(command, str),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode != 0:
        raise RunFailedError(f"exit status {done.returncode}{_tail(done.stderr)}")
    try:
        result = json.loads(last)
        run = Run(int(result["tokens"]), float(result["seconds"]), float(result["tokens_per_second"]))
    except (ValueError, TypeError, KeyError):
        raise RunFailedError(
            "the last line of its output must be a JSON object with tokens, seconds and tokens_per_second, "
            f"not {last[:200]!r}{_tail(done.stderr)}"
        ) from None
    if run.tokens_per_second <= 0:
        raise RunFailedError(f"{run.tokens_per_second} tokens per second cannot be{_tail(done.stderr)}")
    return run


def _tail(stderr: str) -> str:
    lines = stderr.rstrip().splitlines()[-_STDERR_LINES:]
    return "".join(f"\n    {line}" for line in lines)
