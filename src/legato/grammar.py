"""Structured output: which tokens may come next, by a grammar. The grammar engine is llguidance."""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from legato.errors import InvalidValueError, MissingExtraError
from legato.sampling_params import STRUCTURED, SamplingParams

MOST_KEPT = 256  # compiled grammars
MOST_KEPT_CHARACTERS = 4 << 20  # that they have in all; each takes some tens of bytes in its compiled form
MOST_SAID = 500  # characters of what is wrong with one
# Keywords of JSON schema that it cannot enforce are refused, not passed over; whitespace that nobody needs would have
# no end at a high temperature.
JSON_SETTINGS: Any = {"lenient": False, "coerce_one_of": False, "whitespace_flexible": False}


class GrammarCompiler:
    """Grammars over one model's tokens. Any number of threads may use it.

    Args:
        tokenizer: a fast tokenizer of transformers.
        vocab_size: of the logits.
        eos_token_ids: tokens that may come where the grammar may end.

    Raises:
        MissingExtraError: llguidance is not installed.
        InvalidValueError: the tokenizer is none that it knows.

    Attributes:
        end_ids: tokens that may come where a grammar may end.
        stand_in: the token that says "the end" where the model has none that does, and is no part of an answer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        try:
            import llguidance
        except ModuleNotFoundError as error:
            raise MissingExtraError("structured output needs llguidance: pip install 'legato[grammar]'") from error
        self._engine = llguidance
        try:
            text = tokenizer.backend_tokenizer.to_str()
            eos = [token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size]
            # Without an end token it would take id 0 for one. The last token stands in: drawn, it ends an answer.
            self.stand_in = None if eos else vocab_size - 1
            self.end_ids = frozenset(eos or [vocab_size - 1])
            self._tokens = llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=eos or [vocab_size - 1])
            self._special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        except (AttributeError, ValueError) as error:
            raise InvalidValueError(f"structured output cannot work with this model's tokenizer: {error}") from error
        self._num_words = (vocab_size + 31) // 32
        self._fill = llguidance.LLExecutor(1)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="legato-grammar")
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str], Future[Any]] = OrderedDict()

    def grammar(self, params: SamplingParams) -> "Grammar":
        """The grammar that a request asks for, at its start.

        Raises:
            InvalidValueError: it is none, or asks for what cannot be enforced; the message says what.
        """
        name, text = self._text(params)
        self._refuse_special(name, params)
        template = self._template(name, text)
        with self._lock:
            return Grammar(self, name, template.deep_copy())

    def start_masks(self, grammars: Sequence["Grammar"]) -> Callable[[], NDArray[np.uint8]]:
        """Begin to find what may come next in each, beside whatever the caller does next.

        Returns:
            Waits for it: uint8 [grammars, bytes], bit i of a row, from the lowest, says whether token i may come.
        """
        masks = np.empty((len(grammars), self._num_words), np.int32)
        matchers = [(grammar.matcher, row) for row, grammar in enumerate(grammars)]

        def fill() -> NDArray[np.uint8]:  # holds the array, whatever becomes of who waits for it
            self._fill.unsafe_compute_mask_ptr(matchers, masks.ctypes.data, masks.shape[1] * 4, len(masks))
            return masks.view(np.uint8)

        return self._worker.submit(fill).result

    def _text(self, params: SamplingParams) -> tuple[str, str]:
        """The parameter that asks for a grammar, and the grammar in llguidance's own form."""
        matcher = self._engine.LLMatcher
        try:
            if params.json_schema is not None:
                schema = params.json_schema
                schema = json.loads(schema) if isinstance(schema, str) else dict(schema)
                return "json_schema", matcher.grammar_from_json_schema(schema, overrides=JSON_SETTINGS)
            if params.regex is not None:
                return "regex", matcher.grammar_from_regex(params.regex)
            if params.choice:
                return "choice", matcher.grammar_from_regex("|".join(map(re.escape, params.choice)))
            assert params.grammar is not None
            if "::=" in params.grammar:
                return "grammar", self._engine.grammar_from("gbnf", params.grammar)
            return "grammar", matcher.grammar_from_lark(params.grammar)
        except (ValueError, TypeError, RecursionError) as error:
            name = next(n for n in STRUCTURED if getattr(params, n) not in (None, ()))
            raise InvalidValueError(f"{name} cannot be used: {_short(str(error))}") from error

    def _template(self, name: str, text: str) -> Any:
        """Compiled once, which may take seconds; only those wait who want the same."""
        key = (name, text)
        with self._lock:
            compiled = self._kept.get(key)
            is_new = compiled is None
            if compiled is None:
                compiled = self._kept[key] = Future()
                while len(self._kept) > 1 and self._are_too_many():
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
        if is_new:
            try:
                compiled.set_result(self._compiled(name, text))
            except BaseException as error:
                with self._lock:
                    self._kept.pop(key, None)
                compiled.set_exception(error)
                raise
        return compiled.result()

    def _are_too_many(self) -> bool:
        return len(self._kept) > MOST_KEPT or sum(len(text) for _, text in self._kept) > MOST_KEPT_CHARACTERS

    def _refuse_special(self, name: str, params: SamplingParams) -> None:
        """A special token's text, letter by letter, would be taken for the token itself."""
        given = getattr(params, name)
        if isinstance(given, Mapping):
            given = json.dumps(given, ensure_ascii=False)
        elif not isinstance(given, str):
            given = "\n".join(given)
        spelled = [text for text in self._special if text in given.replace("\\", "")]
        if name == "grammar":  # where it may be named outside of quotes
            spelled = [text for text in spelled if re.search(f'"[^"\n]*{re.escape(text)}', given)]
        if spelled:
            raise InvalidValueError(f"{name} cannot be used: it spells the special token {spelled[0]!r}")

    def _compiled(self, name: str, text: str) -> Any:
        matcher = self._engine.LLMatcher(self._tokens, text, log_level=0)
        if matcher.is_error():
            raise InvalidValueError(f"{name} cannot be used: {_short(matcher.get_error())}")
        for _ in range(2):  # one that takes too much is told of at the second attempt only
            first = matcher.deep_copy()
            first.compute_bitmask()
        if not first.get_error():
            first.compute_ff_tokens()
        reason = first.get_error()
        has_no_more = reason.startswith("NoExtensionBias")
        if reason and not (has_no_more and matcher.is_accepting()):
            told = "no text satisfies it" if has_no_more else _short(reason)
            raise InvalidValueError(f"{name} cannot be used: {told}")
        return matcher


def _short(reason: str) -> str:
    """Without the parser's innards; some quote all of the grammar."""
    reason = reason.partition("<state>")[0].strip()
    return reason if len(reason) <= MOST_SAID else f"{reason[:MOST_SAID]} ..."


class Grammar:
    """Where one request's answer stands in its grammar.

    Args:
        compiler: that made it.
        name: of the parameter that asked for it.
        matcher: llguidance's.
    """

    def __init__(self, compiler: GrammarCompiler, name: str, matcher: Any) -> None:
        self.compiler, self.name, self.matcher = compiler, name, matcher

    def copy(self) -> "Grammar":
        """Another answer that stands there."""
        return Grammar(self.compiler, self.name, self.matcher.deep_copy())

    def accept(self, token_id: int) -> str | None:
        """Go on by a token. Returns what is wrong with it, if anything."""
        matcher = self.matcher
        if token_id in self.compiler.end_ids and not matcher.is_accepting() and (reason := matcher.get_error()):
            return f"{self.name} cannot go on: {_short(reason)}"  # at its limits it allows nothing but the end
        if matcher.consume_token(token_id):
            return None
        return f"{self.name} cannot go on with token {token_id}: {_short(matcher.get_error())}"

    def forced(self) -> list[int]:
        """The tokens that must come next; the grammar goes on by them."""
        tokens: list[int] = self.matcher.compute_ff_tokens()
        if tokens:
            self.matcher.consume_tokens(tokens)
        return tokens

    @property
    def is_finished(self) -> bool:
        """Whether nothing can come any more."""
        return bool(self.matcher.is_stopped())
