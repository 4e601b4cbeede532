"""Between text and token ids, with the tokenizer the model came with."""

import inspect
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from legato.errors import InvalidValueError

if TYPE_CHECKING:
    from legato.request import GenerationOutput

Message = dict[str, Any]  # {"role": ..., "content": ...}
_QUIET = {"verbose": False}  # else a text that is too long, which is refused with a message, is warned of besides


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a prompt, with whatever the tokenizer puts in front of every text.

    Raises:
        InvalidValueError: the text holds half of a character.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidValueError("prompt is not Unicode text: it holds a lone surrogate") from error
    return list(tokenizer(text, **_QUIET)["input_ids"])


def longest_token(tokenizer: Any) -> int:
    """Characters of the longest token: a text has at least its length divided by this of them."""
    return max(map(len, tokenizer.get_vocab()))


def encode_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    template: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a conversation by the model's chat template, up to where the answer begins.

    Args:
        tools: functions that the model may call, as chat templates know them.
        template: whatever else the model's template takes.

    Raises:
        InvalidValueError: the model has no chat template, or the template refuses the messages.
    """
    encoded = _apply_template(tokenizer, messages, tools, template, tokenize=True)
    return list(encoded["input_ids"] if hasattr(encoded, "keys") else encoded)


def render_chat(tokenizer: Any, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
    """The text that `encode_chat` encodes."""
    return str(_apply_template(tokenizer, messages, tools, None, tokenize=False))


def _apply_template(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    template: Mapping[str, Any] | None,
    tokenize: bool,
) -> Any:
    if getattr(tokenizer, "chat_template", None) is None:
        raise InvalidValueError("this model's tokenizer has no chat template: give plain prompts instead of messages")
    if not messages or not all(isinstance(m, dict) and "role" in m and "content" in m for m in messages):
        raise InvalidValueError(f"messages={messages!r} is not allowed: it must be dicts with role and content")
    try:
        "".join(str(message["content"]) for message in messages).encode()
    except UnicodeEncodeError as error:
        raise InvalidValueError("messages are not Unicode text: they hold a lone surrogate") from error
    template = template or {}
    own = {"self", "messages", *inspect.signature(tokenizer.apply_chat_template).parameters}
    reserved = sorted(template.keys() & own)
    if reserved:
        raise InvalidValueError(f"template has {reserved[0]!r}, which is not for a chat template to say")
    settings = {
        "add_generation_prompt": True, "tokenize": tokenize, "tools": tools, "tokenizer_kwargs": _QUIET,
    }  # fmt: skip
    try:
        return tokenizer.apply_chat_template(list(messages), **settings, **template)
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        raise InvalidValueError(f"messages are refused by the chat template: {error}") from error


def decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """Text of token ids, special tokens left out."""
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=True))


def token_bytes(tokenizer: Any, token_id: int) -> bytes:
    """What a token adds to a text, in UTF-8; it need not be whole characters. Special tokens add nothing."""
    text = decode(tokenizer, [token_id])
    token = str(tokenizer.convert_ids_to_tokens(token_id))
    if byte := _BYTE_TOKEN.fullmatch(token):
        return bytes.fromhex(byte[1])
    if _SPACE in token and text:  # by itself it might lose the one in front of it
        return token.replace(_SPACE, " ").encode()
    if "\N{REPLACEMENT CHARACTER}" in text and all(character in _BYTES for character in token):
        return bytes(_BYTES[character] for character in token)
    return text.encode()


def _byte_characters() -> dict[str, int]:
    """The characters by which byte-level vocabularies, GPT-2's and those after it, spell bytes that are no text."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_characters()
_LONG_CONTEXT = 16  # tokens that are decoded again with each new one: to decode more takes longer, to cut costs as well
_SPACE = "▁"  # as SentencePiece writes it
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")  # SentencePiece's


@lru_cache(maxsize=8)  # by tokenizer, for each of which it takes as long as many tokens
def _byte_ids(tokenizer: Any) -> frozenset[int]:
    """Ids of the tokens that are bytes."""
    found = tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in range(256)])
    return frozenset(found) - {None, getattr(tokenizer, "unk_token_id", None)}


class IncrementalDecoder:
    """Text piece by piece as tokens come; the pieces together are what `decode` gives for all of them.

    A piece is held back while it ends inside a character, or inside a run of byte tokens (`<0xE2>`, as SentencePiece
    falls back to), which is text only if all of it is. Only the last few tokens are decoded, however long the text is:
    those that are held back, and those of one piece before at least, which tell the tokenizer whether a space is due.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []  # the last few: those that are decoded
        self._last = 0  # where the tokens of the last piece begin
        self._given = 0  # and where they end
        self._given_text = ""  # of all before that end
        self._byte_ids = _byte_ids(tokenizer)

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that the new tokens complete, perhaps none."""
        if self._last and self._given >= _LONG_CONTEXT:
            self._forget()
        self._token_ids += token_ids
        text = decode(self._tokenizer, self._token_ids)
        if len(text) <= len(self._given_text) or text.endswith("\N{REPLACEMENT CHARACTER}") or self._ends_in_bytes():
            return ""
        return self._give(text)

    def finish(self) -> str:
        """The text held back until now; no tokens come any more."""
        is_all_given = self._given == len(self._token_ids)
        return "" if is_all_given else self._give(decode(self._tokenizer, self._token_ids))

    def _give(self, text: str) -> str:
        """What is new in the text of all tokens that are kept."""
        piece = text[len(self._given_text) :]
        self._last, self._given, self._given_text = self._given, len(self._token_ids), text
        return piece

    def _forget(self) -> None:
        """All but the last piece, and what has come since."""
        del self._token_ids[: self._last]
        self._given -= self._last
        self._last = 0
        self._given_text = decode(self._tokenizer, self._token_ids[: self._given])

    def _ends_in_bytes(self) -> bool:
        if not self._byte_ids:
            return False
        for token_id in reversed(self._token_ids[self._given :]):
            if token_id in self._byte_ids:
                return True
            if decode(self._tokenizer, [token_id]):  # special tokens are left out, and do not end a run
                return False
        return False


class OutputPieces:
    """The text of one request's outputs, partial ones and the final one, each as far as it is new."""

    def __init__(self, tokenizer: Any) -> None:
        self._decoder = IncrementalDecoder(tokenizer)
        self._num_tokens = 0
        self._num_characters = 0

    def push(self, output: "GenerationOutput") -> str:
        """What has come since the output before."""
        if output.text is not None:  # texts may stop it: it is decoded already
            piece, self._num_characters = output.text[self._num_characters :], len(output.text)
            return piece
        piece = self._decoder.push(output.generated_tokens[self._num_tokens :])
        self._num_tokens = len(output.generated_tokens)
        return piece + self._decoder.finish() if output.is_finished() else piece
