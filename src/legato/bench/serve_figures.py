"""What a load on a server comes to, in figures."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from legato.bench.tables import table

BEHIND_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Reply:
    """What became of one request. Times in seconds since the start.

    Attributes:
        due, sent, ended: when it should have been sent, was sent, and had ended.
        pieces: when each piece of its text came; a piece may be several tokens.
        prompt_tokens, cached_tokens, output_tokens: as the server counts them, all 0 where there is an error.
        error: of which kind, or None.
    """

    due: float
    sent: float
    ended: float
    pieces: Sequence[float] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        """From when it was due to its first text; to its end, if it has none."""
        return (self.pieces[0] if self.pieces else self.ended) - self.due

    @property
    def inter_token(self) -> float | None:
        """From a token to the next, on average; None where there is no next."""
        if self.output_tokens < 2 or not self.pieces:
            return None
        return (self.pieces[-1] - self.pieces[0]) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Times:
    """Of waits, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Times | None":
        """Between two neighbours in proportion; None of no waits."""
        if not seconds:
            return None
        values = (np.mean(seconds), *np.percentile(seconds, (50, 90, 99)))
        return cls(*(round(float(value) * 1e3, 2) for value in values))


@dataclass(frozen=True)
class Slo:
    """What a request must not exceed to be a good one, in ms; None: it does not matter.

    Attributes:
        ttft_ms: to its first text.
        inter_token_ms: from a token to the next, on average over the request.
    """

    ttft_ms: float | None = None
    inter_token_ms: float | None = None

    def is_met(self, reply: Reply) -> bool:
        """By a request that has its answer."""
        waits = ((reply.ttft, self.ttft_ms), (reply.inter_token or 0.0, self.inter_token_ms))
        return all(limit is None or seconds * 1e3 <= limit for seconds, limit in waits)


@dataclass(frozen=True)
class ServeFigures:
    """What was measured.

    Attributes:
        requests, completed: sent or to be sent, and answered in full.
        errors: how many of each kind; what is neither completed nor here was interrupted.
        seconds: from the start to the end of the last answer.
        prompt_tokens, cached_tokens, tokens: of completed requests, as the server counts them.
        requests_per_second, tokens_per_second: completed ones, over all of `seconds`.
        tokens_per_piece: output tokens to a chunk that brings text.
        ttft_ms: from when a request was due to its first text.
        inter_token_ms: between a request's tokens, on average over the request: exact whatever a chunk holds.
        gap_ms: from each chunk that brings text to the next of its request.
        request_ms: from when a request was due to its end.
        goodput: completed requests a second that met the objective; None without one.
        concurrency: requests under way, {"mean", "most"}.
        lateness_ms: from when a request was due to when it was sent, the load generator's own fault.
        lag_ms: by how much the generator woke up too late.
        cpu_share: cores that the generator took.
    """

    requests: int
    completed: int
    errors: dict[str, int]
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    requests_per_second: float
    tokens_per_second: float
    tokens_per_piece: float | None
    ttft_ms: Times | None
    inter_token_ms: Times | None
    gap_ms: Times | None
    request_ms: Times | None
    goodput: float | None
    concurrency: dict[str, float]
    lateness_ms: Times | None
    lag_ms: Times | None
    cpu_share: float

    @classmethod
    def of(
        cls, requests: int, replies: Sequence[Reply], slo: Slo, lags: Sequence[float], cpu_seconds: float
    ) -> "ServeFigures":
        """Of what became of the requests.

        Args:
            requests: how many there were to be.
            replies: of those that ended.
            lags: seconds by which the generator woke up too late, over the run.
            cpu_seconds: that it took.
        """
        good = [reply for reply in replies if reply.error is None]
        seconds = max((reply.ended for reply in replies), default=0.0)
        per_second = 1 / seconds if seconds else 0.0
        tokens, pieces = sum(reply.output_tokens for reply in good), sum(len(reply.pieces) for reply in good)
        has_slo = slo != Slo()
        return cls(
            requests=requests,
            completed=len(good),
            errors=dict(Counter(reply.error for reply in replies if reply.error is not None)),
            seconds=round(seconds, 3),
            prompt_tokens=sum(reply.prompt_tokens for reply in good),
            cached_tokens=sum(reply.cached_tokens for reply in good),
            tokens=tokens,
            requests_per_second=round(len(good) * per_second, 3),
            tokens_per_second=round(tokens * per_second, 1),
            tokens_per_piece=round(tokens / pieces, 3) if pieces else None,
            ttft_ms=Times.of([reply.ttft for reply in good]),
            inter_token_ms=Times.of([wait for reply in good if (wait := reply.inter_token) is not None]),
            gap_ms=Times.of([later - earlier for reply in good for earlier, later in pairwise(reply.pieces)]),
            request_ms=Times.of([reply.ended - reply.due for reply in good]),
            goodput=round(sum(map(slo.is_met, good)) * per_second, 3) if has_slo else None,
            concurrency=_concurrency(replies, seconds),
            lateness_ms=Times.of([reply.sent - reply.due for reply in replies]),
            lag_ms=Times.of(lags),
            cpu_share=round(cpu_seconds * per_second, 3),
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def warning(self) -> str | None:
        """That the generator fell behind, so that its figures are not the server's alone."""
        late = {"sent requests": self.lateness_ms, "woke up": self.lag_ms}
        behind = [f"{what} {of.p99:.0f} ms" for what, of in late.items() if of and of.p99 > BEHIND_SECONDS * 1e3]
        if not behind:
            return None
        return f"the load generator fell behind: it {' and '.join(behind)} too late at the 99th percentile"

    def text(self) -> str:
        """For people."""
        waits = {
            "time to first text": self.ttft_ms, "between tokens, a request's mean": self.inter_token_ms,
            "between pieces": self.gap_ms, "whole request": self.request_ms,
            "the generator's lateness": self.lateness_ms,
        }  # fmt: skip
        rows: list[tuple[str, ...]] = [("ms", "mean", "p50", "p90", "p99")]
        rows += [(name, *(f"{ms:.1f}" for ms in (of.mean, of.p50, of.p90, of.p99))) for name, of in waits.items() if of]
        failed = ", ".join(f"{count} × {kind}" for kind, count in self.errors.items()) or "none"
        goodput = "" if self.goodput is None else f", {self.goodput:.2f} within the objective"
        facts = [
            f"{self.completed} of {self.requests} requests in {self.seconds:.1f} s; errors: {failed}",
            f"{self.tokens_per_second:.1f} output tokens/s, {self.requests_per_second:.2f} requests/s{goodput}",
            f"{self.prompt_tokens} prompt tokens ({self.cached_tokens} cached), {self.tokens} output tokens",
            f"at once: {self.concurrency['mean']:.1f}, {self.concurrency['most']:.0f} at most; "
            f"the generator took {self.cpu_share:.2f} cores",
        ]
        return "\n".join([*facts, table(rows)])


def _concurrency(replies: Sequence[Reply], seconds: float) -> dict[str, float]:
    # At the same instant the one that ends goes before the one that begins.
    changes = sorted([(reply.sent, 1) for reply in replies] + [(reply.ended, -1) for reply in replies])
    most = max(accumulate(change for _, change in changes), default=0)
    mean = sum(reply.ended - reply.sent for reply in replies) / seconds if seconds else 0.0
    return {"mean": round(mean, 2), "most": most}
