"""Texts that end a request, wherever tokens begin and end in them."""

from collections.abc import Sequence
from typing import Any

from legato.text import IncrementalDecoder


class StopText:
    """Follows the text of one request's answer up to the first of some texts.

    Args:
        tokenizer: of the model.
        stops: the texts, none of them empty.
        keeps_match: whether the text that ended the answer stays a part of it.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], keeps_match: bool) -> None:
        self._decoder = IncrementalDecoder(tokenizer)
        self._stops, self._keeps_match = tuple(stops), keeps_match
        self._text = ""
        self._searched = 0  # no match begins before this
        self.is_met = False

    def push(self, token_id: int) -> bool:
        """Go on by a token. Returns whether one of the texts has come about."""
        self._text += self._decoder.push([token_id])
        return self._search()

    def finish(self) -> bool:
        """No tokens come any more: what was held back, the rest of a character say, counts too."""
        if not self.is_met:
            self._text += self._decoder.finish()
            self._search()
        return self.is_met

    def visible(self, at_end: bool) -> str:
        """The answer's text so far; before its end without what may turn out to be the beginning of a match."""
        if at_end or self.is_met:
            return self._text
        return self._text[: self._searched]

    def _search(self) -> bool:
        """The match that ends first counts; of those that end together the one that begins first."""
        found = [(at + len(stop), at) for stop in self._stops if (at := self._text.find(stop, self._searched)) >= 0]
        if found:
            end, start = min(found)
            self._text = self._text[: end if self._keeps_match else start]
            self.is_met = True
        else:
            self._searched = self._first_partial_match()
        return self.is_met

    def _first_partial_match(self) -> int:
        """Where the end of the text, at the earliest, begins like one of the texts."""
        longest = max(len(stop) for stop in self._stops) - 1
        for start in range(max(self._searched, len(self._text) - longest), len(self._text)):
            if any(stop.startswith(self._text[start:]) for stop in self._stops):
                return start
        return len(self._text)
