"""From outputs to what OpenAI's clients expect, whole or piece by piece."""

import codecs
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from legato.request import GenerationOutput, TokenLogprobs
from legato.server.tools import ToolCallReader, ToolStyle
from legato.text import OutputPieces, decode, token_bytes


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

    def num_untold(self, output: GenerationOutput) -> int:
        """Log-probabilities in an output that are new, those of its prompt included."""
        of_prompt = 0 if self._num_logprobs else len(output.prompt_logprobs or ())
        return of_prompt + len(output.logprobs) - self._num_logprobs

    def push(self, output: GenerationOutput) -> tuple[str, list[tuple[int, TokenLogprobs]]]:
        """The new text, and the new tokens with their log-probabilities if those were asked for."""
        start, self._num_logprobs = self._num_logprobs, len(output.logprobs)
        tops = output.top_logprobs or [()] * len(output.logprobs)
        new = [
            (output.generated_tokens[i], TokenLogprobs(output.logprobs[i], tops[i]))
            for i in range(start, len(output.logprobs))
        ]
        return self._pieces.push(output), new


class Choices:
    """The choices of a call, each from its first output on.

    Args:
        num_samples: choices of each prompt.
    """

    def __init__(self, tokenizer: Any, num_samples: int) -> None:
        self._tokenizer, self._num_samples = tokenizer, num_samples
        self._begun: dict[int, ChoiceText] = {}

    def of(self, prompt: int, output: GenerationOutput) -> ChoiceText:
        """The one that an output of a prompt, counted from 0, belongs to."""
        index = prompt * self._num_samples + sample_of(output)
        if index not in self._begun:
            self._begun[index] = ChoiceText(self._tokenizer, index)
        return self._begun[index]


class Form(Protocol):
    """How outputs are told.

    Attributes:
        kind: of the whole answer.
        prefix: of its id.
    """

    kind: str
    prefix: str

    def delta(self, choice: ChoiceText, output: GenerationOutput) -> dict[str, Any] | None:
        """What is new in a partial or final output; None: nothing."""

    def choice(self, choice: ChoiceText, output: GenerationOutput) -> dict[str, Any]:
        """All of a final output."""


# Chat


class ToolCalls:
    """The calls in one answer while it comes, and the text beside them.

    Args:
        style: in which calls are written; None: there are none.
    """

    def __init__(self, style: ToolStyle | None) -> None:
        self._reader = None if style is None else ToolCallReader(style)
        self.number = 0

    def push(self, text: str, is_last: bool) -> tuple[str, list[dict[str, Any]]]:
        """The text, and what is new of calls in the form of OpenAI's deltas: a name comes once, arguments in pieces."""
        if self._reader is None:
            return text, []
        content: str = ""
        calls: list[dict[str, Any]] = []
        for kind, piece in self._reader.push(text, is_last):
            if kind == "content":
                content += piece
            elif kind == "name":
                function = {"name": piece, "arguments": ""}
                call_id = f"call_{uuid.uuid4().hex[:24]}"
                calls.append({"index": self.number, "id": call_id, "type": "function", "function": function})
                self.number += 1
            elif calls:
                calls[-1]["function"]["arguments"] += piece
            else:
                calls.append({"index": self.number - 1, "function": {"arguments": piece}})
        return content, calls

    def finish_reason(self, output: GenerationOutput) -> str | None:
        """Of a final output; None for others."""
        return "tool_calls" if output.finish_reason == "stop" and self.number else output.finish_reason


class ChatForm:
    """As `/v1/chat/completions` tells them."""

    kind, prefix = "chat.completion", "chatcmpl"

    def __init__(self, tokenizer: Any, style: ToolStyle | None) -> None:
        self._tokenizer = tokenizer
        self._style = style
        self._calls: dict[int, ToolCalls] = {}

    def delta(self, choice: ChoiceText, output: GenerationOutput) -> dict[str, Any] | None:
        is_first = choice.index not in self._calls
        calls, content, new_calls, logprobs = self._push(choice, output)
        if not (content or new_calls or logprobs or output.is_finished() or is_first):
            return None
        delta = {
            **({"role": "assistant"} if is_first else {}),
            **({"content": content} if content or is_first else {}),
            **({"tool_calls": new_calls} if new_calls else {}),
        }
        reason = calls.finish_reason(output)
        return {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def choice(self, choice: ChoiceText, output: GenerationOutput) -> dict[str, Any]:
        calls, content, all_calls, logprobs = self._push(choice, output)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if all_calls:
            told = [{name: value for name, value in call.items() if name != "index"} for call in all_calls]
            message |= {"content": content or None, "tool_calls": told}
        reason = calls.finish_reason(output)
        return {"index": choice.index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _push(
        self, choice: ChoiceText, output: GenerationOutput
    ) -> tuple[ToolCalls, str, list[dict[str, Any]], dict[str, Any] | None]:
        """The choice's calls, and what is new: text, calls, log-probabilities."""
        calls = self._calls.setdefault(choice.index, ToolCalls(self._style))
        text, logprobs = choice.push(output)
        content, new_calls = calls.push(text, output.is_finished())
        return calls, content, new_calls, chat_logprobs(self._tokenizer, logprobs)


def chat_logprobs(tokenizer: Any, tokens: Sequence[tuple[int, TokenLogprobs]]) -> dict[str, Any] | None:
    """Of tokens of an answer; None without any."""
    if not tokens:
        return None

    def one(token_id: int, logprob: float) -> dict[str, Any]:
        spelled = token_bytes(tokenizer, token_id) or tokenizer.decode([token_id]).encode()  # special ones by name
        return {"token": spelled.decode(errors="replace"), "logprob": logprob, "bytes": list(spelled)}

    content = [
        {**one(token_id, found.logprob), "top_logprobs": [one(*top) for top in found.top]} for token_id, found in tokens
    ]
    return {"content": content, "refusal": None}


# Completions


class TextForm:
    """As `/v1/completions` tells them.

    Args:
        echo: whether the prompt comes first.
    """

    kind, prefix = "text_completion", "cmpl"

    def __init__(self, tokenizer: Any, echo: bool) -> None:
        self._tokenizer, self._echo = tokenizer, echo
        self._places: dict[int, TokenPlaces] = {}

    def delta(self, choice: ChoiceText, output: GenerationOutput) -> dict[str, Any] | None:
        is_first = choice.index not in self._places
        told = self.choice(choice, output)
        return told if told["text"] or told["logprobs"] or is_first or output.is_finished() else None

    def choice(self, choice: ChoiceText, output: GenerationOutput) -> dict[str, Any]:
        text, new = choice.push(output)
        tokens: list[Any] = list(new)
        start = 0
        if self._echo and choice.index not in self._places:
            prompt, prompt_tokens = with_prompt(self._tokenizer, output)
            text, tokens = prompt + text, prompt_tokens + tokens
            start = 0 if prompt_tokens else len(prompt)  # only the first sample has them
        places = self._places.setdefault(choice.index, TokenPlaces(self._tokenizer, start))
        logprobs = text_logprobs(self._tokenizer, tokens, places)
        return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": output.finish_reason}


class TokenPlaces:
    """Where tokens begin in a text, in characters, while they come; one inside a character begins where that does.

    Args:
        start: where the first of them begins.
    """

    def __init__(self, tokenizer: Any, start: int) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = start

    def next(self, token_id: int) -> int:
        """Of the token that comes next."""
        place = self._length
        self._length += len(self._decoder.decode(token_bytes(self._tokenizer, token_id)))
        return place


def text_logprobs(
    tokenizer: Any, tokens: Sequence[tuple[int, TokenLogprobs | None]], places: TokenPlaces
) -> dict[str, Any] | None:
    """Of tokens of a completion; a prompt's first token has none."""
    if not tokens:
        return None
    return {
        "tokens": [_spelled(tokenizer, token_id) for token_id, _ in tokens],
        "token_logprobs": [None if found is None else found.logprob for _, found in tokens],
        "top_logprobs": [
            None if found is None else {_spelled(tokenizer, token_id): value for token_id, value in found.top}
            for _, found in tokens
        ],
        "text_offset": [places.next(token_id) for token_id, _ in tokens],
    }


def _spelled(tokenizer: Any, token_id: int) -> str:
    """A token's text; one that holds part of a character as OpenAI writes it, so that no two are the same."""
    given = token_bytes(tokenizer, token_id)
    try:
        return given.decode() or str(tokenizer.decode([token_id]))
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in given)


def with_prompt(tokenizer: Any, output: GenerationOutput) -> tuple[str, list[tuple[int, TokenLogprobs | None]]]:
    """The prompt's text, and its tokens with their log-probabilities if they were asked for: for `echo`."""
    found = output.prompt_logprobs or []
    return decode(tokenizer, output.prompt_ids), list(zip(output.prompt_ids, found, strict=False))
