"""Files of prompts, one a line."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from legato.errors import InvalidValueError

_PROMPT_FIELDS = ("prompt", "messages", "prompt_ids")
SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "seed", "stop_token_ids", "ignore_eos")
_OTHER_FIELDS = ("id", "max_new_tokens", "cache_salt", "priority")

_SEED_STRIDE = 0x9E3779B97F4A7C15  # odd and large: neighbouring seeds share no line's seed


@dataclass(frozen=True)
class PromptLine:
    """One line of a prompt file.

    Attributes:
        index: which, from 0, blank ones not counted.
        number: which line of the file, from 1.
        fields: what it says, the common settings filled in.
        error: why it can never be answered, or None.
    """

    index: int
    number: int
    fields: Mapping[str, Any]
    error: str | None

    @property
    def digest(self) -> str:
        """Stands for everything that decides the answer, the model included."""
        text = json.dumps(self.fields, sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def read_lines(
    source: Path | TextIO, chat: bool, common: Mapping[str, Any], seed: int | None = None
) -> list[PromptLine]:
    """Read a prompt file; blank lines are skipped. A line that makes no sense becomes one with an error.

    Args:
        source: a path, or an open text file.
        chat: plain text is a user's message and not a bare prompt.
        common: settings for lines that do not bring their own.
        seed: with a line's index it makes the line's own, so that each line's samples differ, yet stay the same
            whatever else is run; None: at random.
    """
    try:
        text = source.read_text(encoding="utf-8-sig") if isinstance(source, Path) else source.read()
    except UnicodeDecodeError as error:
        name = source if isinstance(source, Path) else "standard input"
        raise InvalidValueError(f"{name} is not utf-8 text: {error.reason} at byte {error.start}") from error
    lines = [(n, line.rstrip("\r")) for n, line in enumerate(text.split("\n"), start=1) if line.strip()]
    seeds = [{} if seed is None else {"seed": (seed * _SEED_STRIDE + index) % 2**64} for index in range(len(lines))]
    return [_parse_line(i, n, line, chat, {**common, **seeds[i]}) for i, (n, line) in enumerate(lines)]


def _parse_line(index: int, number: int, line: str, chat: bool, common: Mapping[str, Any]) -> PromptLine:
    fields: Any = line
    if line.lstrip().startswith("{"):
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:  # not JSON; a number or a nesting beyond all reason
            return PromptLine(index, number, {"line": line}, f"not a JSON object: {error}")
    if isinstance(fields, str):
        fields = {"messages": [{"role": "user", "content": fields}]} if chat else {"prompt": fields}
    return PromptLine(index, number, {**common, **fields}, _what_is_wrong(fields))


def _what_is_wrong(fields: Mapping[str, Any]) -> str | None:
    given = [name for name in _PROMPT_FIELDS if name in fields]
    if len(given) != 1:
        return f"a line needs exactly one of {', '.join(_PROMPT_FIELDS)}; this one has {', '.join(given) or 'none'}"
    unknown = sorted(set(fields) - {*_PROMPT_FIELDS, *SAMPLING_FIELDS, *_OTHER_FIELDS})
    if unknown:
        known = ", ".join([*_PROMPT_FIELDS, *_OTHER_FIELDS, *SAMPLING_FIELDS])
        return f"unknown field {unknown[0]!r}; known ones are {known}"
    if "prompt" in fields and not isinstance(fields["prompt"], str):
        return f"prompt={fields['prompt']!r} is not allowed: it must be text"
    if "messages" in fields and not isinstance(fields["messages"], list):
        return f"messages={fields['messages']!r} is not allowed: it must be a list"
    return None
