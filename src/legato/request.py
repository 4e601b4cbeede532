"""A request, what it asks for, and what comes back."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from legato.sampling_params import SamplingParams

if TYPE_CHECKING:  # not imported for their names: the command line's help waits for what this file imports
    from legato.drafting import PromptLookup
    from legato.engine.token_edits import TokenEdits
    from legato.grammar import Grammar
    from legato.stop_text import StopText


class RequestStatus(IntEnum):
    """Where a request stands: PENDING → PREFILLING → DECODING → FINISHED (or FAILED, from anywhere)."""

    PENDING = 0
    PREFILLING = 1
    DECODING = 2
    FINISHED = 3
    FAILED = 4


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position.

    Attributes:
        logprob: of the token that is there.
        top: of the likeliest tokens, (token id, log-probability), as many as were asked for, likeliest first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


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
        priority: those with a lower one start first, and get what a step has first; of those that lack room in one step
            the least urgent makes way.
        score_from: generate nothing, but give the log-probabilities of the prompt's tokens from this one on, 1 or more.
    """

    input_ids: Any
    max_new_tokens: int | None = None
    streaming: bool = False
    record_timestamps: bool = False
    eos_token_id: int | list[int] | None = None
    cache_salt: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    priority: int = 0
    score_from: int | None = None


@dataclass
class GenerationOutput:
    """What a request has produced so far (streaming) or in the end.

    Attributes:
        request_id: the request's id.
        prompt_ids: token ids of the prompt.
        generated_tokens: all new token ids so far, an end-of-sequence token included.
        logprobs: log-probability of each generated token, if asked for; else empty.
        top_logprobs: for each generated token the likeliest in its place, (token id, log-probability), if asked for;
            fewer where filters leave fewer.
        prompt_logprobs: of the prompt's tokens, None for those that were not asked about, the first among them; None if
            none was, as in all but the first sample of a prompt.
        error: why the request failed, or None.
        status: FINISHED or FAILED on the final output.
        created_time: `time.perf_counter()` when the request was made, in seconds.
        lifespan: (first scheduled, finished) on the same clock; -1 for what has not happened.
        timestamps: when each token was generated, with `record_timestamps`; else None.
        finish_reason: "stop", "length", "cancelled" or "error" on the final output, else None.
        num_cached_tokens: prompt tokens whose K and V were found in the cache when the request started.
        text: the decoded text, where `LLM` made the request or texts may stop it: then it is cut where one did, and a
            partial output holds back what may be the beginning of one. Else None.
    """

    request_id: str
    prompt_ids: list[int] = field(default_factory=list)
    generated_tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
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
        priority: those with a lower one go first.
        num_logprobs: so many likeliest tokens' log-probabilities are wanted besides each new one's; None: none at all.
        score_from: the prompt's tokens from this one on are wanted the log-probabilities of; None: of none.
        stop_text: follows the answer's text up to one that ends it, or None.
        grammar: where its answer stands in the grammar it must follow, or None.
        edits: what its own tokens do to its logits, or None.
        processors: its own logits processors, see `batch.ProcessedRow`, or None.
        drafter: guesses how it goes on, or None.
        children: further samples of the prompt, not begun; they go on from the prompt once it is computed.
        prefix_root: where the chain of `page_hashes` begins; empty until it is asked for.
        page_hashes: of the leading complete pages of `tokens`, as far as they have been asked for.
        prompt_logprobs: of the prompt's tokens from `score_from` on, as far as they have been computed.
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
    priority: int = 0
    num_logprobs: int | None = None
    score_from: int | None = None
    stop_text: "StopText | None" = None
    grammar: "Grammar | None" = None
    edits: "TokenEdits | None" = None
    processors: Callable[[Sequence[int], Any], Any] | None = None
    drafter: "PromptLookup | None" = None
    children: list["Request"] = field(default_factory=list)
    prefix_root: bytes = b""
    page_hashes: list[bytes] = field(default_factory=list)
    status: RequestStatus = RequestStatus.PENDING
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    timestamps: list[float] | None = None
    first_scheduled_time: float = -1.0
    finished_time: float = -1.0
    finish_reason: str | None = None
    error: str | None = None

    @property
    def num_generated_tokens(self) -> int:
        return len(self.tokens) - len(self.prompt_ids)

    @property
    def num_tokens_left(self) -> int:
        """New tokens it may still get."""
        return self.max_new_tokens - self.num_generated_tokens

    @property
    def next_scored(self) -> int:
        """The next token of the prompt whose log-probability is wanted; past the prompt, if there is none."""
        if self.score_from is None:
            return len(self.prompt_ids)
        return self.score_from + len(self.prompt_logprobs)

    def num_scored(self, start: int, end: int) -> int:
        """Tokens whose log-probabilities the logits of those from `start` to `end` - 1 give."""
        return max(0, min(end + 1, len(self.prompt_ids)) - max(start + 1, self.next_scored))

    def samples(self, end: int) -> bool:
        """Whether a token is sampled after a pass over the tokens up to `end` - 1."""
        return end == len(self.tokens) and self.max_new_tokens > 0

    def take(self, token_id: int, now: float) -> tuple[str | None, str | None]:
        """A new token, and those that its grammar lets nothing but follow.

        Returns:
            Why the request ends with it, or None, and the error if that is the reason.
        """
        if self.grammar is not None and (error := self.grammar.accept(token_id)) is not None:
            return "error", error
        if self.grammar is not None and token_id == self.grammar.compiler.stand_in:
            return "stop", None
        tokens = [token_id]
        # Where nobody wants to know how likely they are, and nothing else may forbid them, they need not be sampled.
        only_grammar = self.num_logprobs is None and self.edits is None and self.processors is None
        if self.grammar is not None and only_grammar:
            tokens += self.grammar.forced()
        for token in tokens:
            self.tokens.append(token)
            if self.timestamps is not None:
                self.timestamps.append(now)
            reason = self._reason_to_end(token)
            if reason is not None:
                return reason, None
        return ("stop" if self.grammar is not None and self.grammar.is_finished else None), None

    def _reason_to_end(self, token_id: int) -> str | None:
        """Whether the request ends with the token it has just been given."""
        stop_text = self.stop_text
        if stop_text is not None and stop_text.push(token_id):
            return "stop"
        ended = token_id in self.stop_token_ids
        if not ended and self.num_generated_tokens < self.max_new_tokens:
            return None
        met = stop_text is not None and stop_text.finish()
        return "stop" if ended or met else "length"

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
            logprobs=[one.logprob for one in self.logprobs],
            top_logprobs=[one.top for one in self.logprobs] if self.num_logprobs else [],
            prompt_logprobs=self._all_prompt_logprobs(),
            error=self.error,
            status=self.status,
            created_time=self.created_time,
            lifespan=(self.first_scheduled_time, self.finished_time),
            timestamps=None if self.timestamps is None else self.timestamps.copy(),
            finish_reason=self.finish_reason,
            num_cached_tokens=self.num_cached_tokens,
            text=None if self.stop_text is None else self.stop_text.visible(self.status >= RequestStatus.FINISHED),
        )

    def _all_prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        if self.score_from is None:
            return None
        return [None] * self.score_from + list(self.prompt_logprobs)
