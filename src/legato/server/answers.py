"""From outputs to what OpenAI's clients expect, whole or piece by piece."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from legato.request import GenerationOutput, TokenLogprobs
from legato.text import OutputPieces, decode

FINISH_REASONS = {"stop": "stop", "length": "length"}


@dataclass
class Usage:
    """Tokens of a call, all its prompts and samples together."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def add(self, output: GenerationOutput) -> None:
        """A final output; a prompt of several samples counts once."""
        self.completion_tokens += len(output.generated_tokens)
        if sample_of(output) == 0:
            self.prompt_tokens += len(output.prompt_ids)
            self.cached_tokens += output.num_cached_tokens

    def as_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True)
class Envelope:
    """What all parts of an answer have in common.

    Attributes:
        id, model: as the client is told.
        kind: "chat.completion" or "text_completion".
        created: seconds since 1970.
    """

    id: str
    model: str
    kind: str
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        return {**self._common(self.kind), "choices": choices, "usage": usage.as_dict()}

    def chunk(self, choices: list[dict[str, Any]], usage: Usage | None = None) -> dict[str, Any]:
        kind = f"{self.kind}.chunk" if self.kind == "chat.completion" else self.kind
        return {**self._common(kind), "choices": choices, **({} if usage is None else {"usage": usage.as_dict()})}

    def _common(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def sample_of(output: GenerationOutput) -> int:
    """Which of its prompt's samples an output is, from 0."""
    return int(output.request_id.partition(":")[2] or 0)


class ChoiceText:
    """One choice while it comes: its text and its log-probabilities, as far as they are new."""

    def __init__(self, tokenizer: Any, index: int) -> None:
        self.index = index
        self._pieces = OutputPieces(tokenizer)
        self._num_logprobs = 0

    def push(self, output: GenerationOutput) -> tuple[str, list[tuple[int, TokenLogprobs]]]:
        """The new text, and the new tokens with their log-probabilities if those were asked for."""
        start, self._num_logprobs = self._num_logprobs, len(output.logprobs)
        tops = output.top_logprobs or [()] * len(output.logprobs)
        new = [
            (output.generated_tokens[i], TokenLogprobs(output.logprobs[i], tops[i]))
            for i in range(start, len(output.logprobs))
        ]
        return self._pieces.push(output), new


# Chat


def chat_choice(index: int, text: str, logprobs: Any, finish_reason: str | None) -> dict[str, Any]:
    """A whole answer of a chat."""
    message = {"role": "assistant", "content": text, "refusal": None}
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish_reason}


def chat_delta(index: int, text: str, logprobs: Any, finish_reason: str | None, is_first: bool) -> dict[str, Any]:
    """A piece of it."""
    delta = {**({"role": "assistant"} if is_first else {}), **({"content": text} if text or is_first else {})}
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def chat_logprobs(tokenizer: Any, tokens: Sequence[tuple[int, TokenLogprobs]]) -> dict[str, Any] | None:
    """Of tokens of an answer; None without any."""
    if not tokens:
        return None

    def one(token_id: int, logprob: float) -> dict[str, Any]:
        text = tokenizer.decode([token_id])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    content = [
        {**one(token_id, found.logprob), "top_logprobs": [one(*top) for top in found.top]} for token_id, found in tokens
    ]
    return {"content": content, "refusal": None}


# Completions


def text_choice(index: int, text: str, logprobs: Any, finish_reason: str | None) -> dict[str, Any]:
    """An answer of a completion, or a piece of it."""
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def text_logprobs(
    tokenizer: Any, tokens: Sequence[tuple[int, TokenLogprobs | None]], offset: int = 0
) -> dict[str, Any] | None:
    """Of tokens of a completion whose text begins `offset` characters in; a prompt's first token has none."""
    if not tokens:
        return None
    texts, offsets = [tokenizer.decode([token_id]) for token_id, _ in tokens], []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [None if found is None else found.logprob for _, found in tokens],
        "top_logprobs": [
            None if found is None else {tokenizer.decode([token_id]): value for token_id, value in found.top}
            for _, found in tokens
        ],
        "text_offset": offsets,
    }


def with_prompt(tokenizer: Any, output: GenerationOutput) -> tuple[str, list[tuple[int, TokenLogprobs | None]]]:
    """The prompt's text, and its tokens with their log-probabilities if they were asked for: for `echo`."""
    found = output.prompt_logprobs or []
    return decode(tokenizer, output.prompt_ids), list(zip(output.prompt_ids, found, strict=False))
