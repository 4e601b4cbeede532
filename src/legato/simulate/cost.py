"""How long a step takes: a linear model, given or fitted to measured steps."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from legato.checks import refuse
from legato.errors import InvalidValueError


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the time of a forward pass depends on.

    Attributes:
        num_tokens: query tokens.
        num_requests: requests they belong to.
        num_keys: tokens in the cache that the requests read, each request's counted once.
        num_pairs: (query, key) pairs: for a request with q queries and k keys in the end, q × k.
    """

    num_tokens: int
    num_requests: int
    num_keys: int
    num_pairs: int

    def next_decode(self) -> "StepShape":
        """The step after this one, if this one decodes a token of each request."""
        return StepShape(
            self.num_tokens, self.num_requests, self.num_keys + self.num_requests, self.num_pairs + self.num_requests
        )


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a forward pass, and of moving cache pages.

    Attributes:
        step: whatever it computes.
        token: for each query token.
        request: for each request in the batch.
        key: for each token read from the cache, once a request.
        pair: for each (query, key) pair.
        moved_page: for each page that goes to the host or comes back.
    """

    step: float = 0.02
    token: float = 1.1e-3
    request: float = 1e-3
    key: float = 2e-6
    pair: float = 1e-8
    moved_page: float = 1e-4

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise refuse(f"cost {name}", value, "a number of seconds, at least 0")

    def seconds(self, shape: StepShape) -> float:
        """Time of one forward pass."""
        return (
            self.step
            + self.token * shape.num_tokens
            + self.request * shape.num_requests
            + self.key * shape.num_keys
            + self.pair * shape.num_pairs
        )

    @classmethod
    def load(cls, path: Path) -> "CostModel":
        """Read a JSON object of this class's fields, in seconds, as `legato bench steps` prints it.

        Raises:
            InvalidValueError: an unknown field or a value that is no time.
        """
        known = {f.name for f in dataclasses.fields(cls)}
        try:
            values = json.loads(path.read_text())
        except ValueError as error:
            raise InvalidValueError(f"{path} holds no JSON: {error}") from error
        if isinstance(values, dict):
            values = values.get("cost", values)
        if not isinstance(values, dict) or not set(values) <= known:
            raise InvalidValueError(f"{path} must hold an object with some of {', '.join(sorted(known))}, in seconds")
        return cls(**values)

    @classmethod
    def fit(cls, steps: Sequence[tuple[StepShape, float]], moved_page: float) -> "CostModel":
        """The non-negative model that is nearest to measured steps, by relative error.

        Coefficients that come out negative are set to 0, the worst first, and the others fitted again.
        """
        rows = np.array([(1, s.num_tokens, s.num_requests, s.num_keys, s.num_pairs) for s, _ in steps], np.float64)
        seconds = np.array([t for _, t in steps])
        rows, target = rows / seconds[:, None], np.ones(len(seconds))
        kept = list(range(rows.shape[1]))
        while True:
            scale = rows[:, kept].max(axis=0)
            found = np.linalg.lstsq(rows[:, kept] / scale, target, rcond=None)[0] / scale
            if (found >= 0).all():
                break
            del kept[int(np.argmin(found * scale))]
        names = ("step", "token", "request", "key", "pair")
        fitted = {names[column]: float(value) for column, value in zip(kept, found, strict=True)}
        return cls(**{**dict.fromkeys(names, 0.0), **fitted}, moved_page=moved_page)
