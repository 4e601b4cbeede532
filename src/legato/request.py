"""A request, what it asks for, and what comes back."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any

from legato.checks import check_bool, check_int, check_number, optional_token_ids
from legato.errors import InvalidValueError

MAX_SEED = 2**64 - 1


class RequestStatus(IntEnum):
    """Where a request stands: PENDING → PREFILLING → DECODING → FINISHED (or FAILED, from anywhere)."""

    PENDING = 0
    PREFILLING = 1
    DECODING = 2
    FINISHED = 3
    FAILED = 4


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it stops.

    Args:
        temperature: 0 is greedy; logits are divided by it otherwise. Finite, at least 0.
        top_k: sample from the k likeliest tokens; 0, -1 or None: from all.
        top_p: sample from the smallest set of likeliest tokens whose probability reaches this, in (0, 1].
        max_tokens: new tokens at most, at least 1. None: what the model's generation config says, else 256.
        stop_token_ids: tokens that end the request besides the model's own end-of-sequence tokens.
        seed: in [0, 2**64); the same seed gives the same tokens whatever runs beside it. None: drawn at random.
        ignore_eos: go on past the model's end-of-sequence tokens (`stop_token_ids` still stop).

    Raises:
        InvalidValueError: a value out of range.
    """

    temperature: float = 1.0
    top_k: int | None = 0
    top_p: float = 1.0
    max_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, 0)
        check_int("top_k", self.top_k, -1, optional=True)
        check_number("top_p", self.top_p, 0, 1, above=True)
        check_int("max_tokens", self.max_tokens, 1, optional=True)
        check_int("seed", self.seed, 0, MAX_SEED, optional=True)
        check_bool("ignore_eos", self.ignore_eos)
        object.__setattr__(self, "top_k", max(self.top_k or 0, 0))
        stop_token_ids = tuple(optional_token_ids("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "stop_token_ids", stop_token_ids)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "SamplingParams":
        """`SamplingParams(**values)`, with unknown names refused by name.

        Raises:
            InvalidValueError: an unknown name or a value out of range.
        """
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise InvalidValueError(
                f"unknown sampling parameter {unknown[0]!r}; known ones are {', '.join(sorted(known))}"
            )
        return cls(**values)


@dataclass(frozen=True)
class RequestSpec:
    """What a caller asks for, not yet checked.

    Attributes:
        input_ids: token ids of the prompt.
        max_new_tokens: new tokens at most; None: as the generation config says.
        streaming: give an output for each new token, not only a final one.
        record_timestamps: note when each token was generated.
        eos_token_id: tokens that end the request instead of the generation config's; -1 for none.
        cache_salt: only requests with the same one share cached prefixes: keeps tenants apart.
        sampling: `do_sample`, or fields of `SamplingParams`, where this request differs from the generation config.
    """

    input_ids: Any
    max_new_tokens: int | None = None
    streaming: bool = False
    record_timestamps: bool = False
    eos_token_id: int | list[int] | None = None
    cache_salt: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class GenerationOutput:
    """What a request has produced so far (streaming) or in the end.

    Attributes:
        request_id: the request's id.
        prompt_ids: token ids of the prompt.
        generated_tokens: all new token ids so far, an end-of-sequence token included.
        logprobs: log-probability of each generated token, with `return_logprobs`; else empty.
        error: why the request failed, or None.
        status: FINISHED or FAILED on the final output.
        created_time: `time.perf_counter()` when the request was made, in seconds.
        lifespan: (first scheduled, finished) on the same clock; -1 for what has not happened.
        timestamps: when each token was generated, with `record_timestamps`; else None.
        finish_reason: "stop", "length", "cancelled" or "error" on the final output, else None.
        num_cached_tokens: prompt tokens whose K and V were found in the cache when the request started.
        text: the decoded text, where `LLM` made the request; else None.
    """

    request_id: str
    prompt_ids: list[int] = field(default_factory=list)
    generated_tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    error: str | None = None
    status: RequestStatus = RequestStatus.PENDING
    created_time: float = field(default_factory=time.perf_counter)
    lifespan: tuple[float, float] = (-1.0, -1.0)
    timestamps: list[float] | None = None
    finish_reason: str | None = None
    num_cached_tokens: int = 0
    text: str | None = None

    def is_finished(self) -> bool:
        """True on the final output, whether it succeeded or failed."""
        return self.status >= RequestStatus.FINISHED


@dataclass(slots=True, eq=False)
class Request:
    """State about one prompt.

    Attributes:
        request_id, prompt_ids, params, max_new_tokens, stop_token_ids, seed, streaming, created_time: what was asked.
        tokens: the prompt and all that was generated after it.
        num_computed_tokens: how many of them have their K and V in the cache, or on the host.
        max_computed_tokens: how many ever had: what is computed below that is computed again.
        num_cached_tokens: prompt tokens that were found in the cache when the request first started.
        cache_salt: only requests with the same one share pages.
        prefix_root: where the chain of `page_hashes` begins; empty until it is asked for.
        page_hashes: of the leading complete pages of `tokens`, as far as they have been asked for.
        status, logprobs, timestamps, first_scheduled_time, finished_time, finish_reason, error: for its output.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    max_new_tokens: int
    stop_token_ids: frozenset[int]
    seed: int
    streaming: bool
    created_time: float
    tokens: list[int]
    num_computed_tokens: int = 0
    max_computed_tokens: int = 0
    num_cached_tokens: int = 0
    cache_salt: str | None = None
    prefix_root: bytes = b""
    page_hashes: list[bytes] = field(default_factory=list)
    status: RequestStatus = RequestStatus.PENDING
    logprobs: list[float] = field(default_factory=list)
    timestamps: list[float] | None = None
    first_scheduled_time: float = -1.0
    finished_time: float = -1.0
    finish_reason: str | None = None
    error: str | None = None

    @property
    def num_generated_tokens(self) -> int:
        return len(self.tokens) - len(self.prompt_ids)

    def start_chain(self, prefix_root: bytes) -> None:
        """Hash the pages anew, chained from `prefix_root`; empty: the root is to be asked for."""
        self.prefix_root = prefix_root
        self.page_hashes.clear()

    def start_over(self) -> None:
        """Soft reset: nothing is in the cache any more; all tokens stay."""
        self.status = RequestStatus.PENDING
        self.num_computed_tokens = 0
        self.start_chain(b"")

    def finish(self, reason: str, error: str | None, now: float) -> None:
        """End the request at `now`, in seconds: with an error it has failed, without one it is finished."""
        self.status = RequestStatus.FINISHED if error is None else RequestStatus.FAILED
        self.finish_reason, self.error = reason, error
        self.finished_time = now

    def output(self) -> GenerationOutput:
        """A snapshot that later steps do not change."""
        return GenerationOutput(
            request_id=self.request_id,
            prompt_ids=self.prompt_ids.copy(),
            generated_tokens=self.tokens[len(self.prompt_ids) :],
            logprobs=self.logprobs.copy(),
            error=self.error,
            status=self.status,
            created_time=self.created_time,
            lifespan=(self.first_scheduled_time, self.finished_time),
            timestamps=None if self.timestamps is None else self.timestamps.copy(),
            finish_reason=self.finish_reason,
            num_cached_tokens=self.num_cached_tokens,
        )
