"""Texts that end a request: found across tokens, cut or kept, and never shown in part."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato import LLM, ContinuousBatchingConfig, InvalidValueError, SamplingParams, enable
from legato.request import Request
from legato.stop_text import StopText
from tests.parity.families import tiny_model


class Letters:
    """A tokenizer whose tokens are short texts."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(self.pieces[i] for i in ids)

    def convert_tokens_to_ids(self, tokens: list[str]) -> list[None]:
        return [None for _ in tokens]


def first_match(text: str, stops: list[str]) -> tuple[int, int] | None:
    """(end, start) of the match that ends first; of those, the one that begins first."""
    found = [(end, start) for end in range(len(text) + 1) for start in range(end) if text[start:end] in stops]
    return min(found, default=None)


pieces = st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=12)
stops = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


@given(pieces, stops, st.booleans())
def test_a_text_ends_at_its_first_match_and_no_part_of_one_is_ever_shown(
    pieces: list[str], stops: list[str], keeps: bool
) -> None:
    watch, shown = StopText(Letters(pieces), stops, keeps), []
    for i in range(len(pieces)):
        met = watch.push(i)
        shown.append(watch.visible(at_end=met))
        if met:
            break
    met = watch.finish()
    final = watch.visible(at_end=True)
    text = "".join(pieces[: len(shown)])
    match = first_match(text, stops)
    assert met == (match is not None)
    assert final == (text if match is None else text[: match[0]] if keeps else text[: match[1]])
    for i, partial in enumerate(shown):
        assert final.startswith(partial), "what was shown is not in the answer"
        if i < len(shown) - 1 or not met:
            soon = "".join(pieces[: i + 1])
            held = soon[len(partial) :]
            assert not held or any(stop.startswith(held) for stop in stops), "held back for nothing"


@pytest.mark.parametrize("last", ["a token that stops", "the last token there may be"])
def test_what_was_held_back_is_in_the_answer_however_it_ends(last: str) -> None:
    tokenizer = Letters(["ab", "\N{REPLACEMENT CHARACTER}", "c"])
    stops = frozenset([2]) if last == "a token that stops" else frozenset()
    watch = StopText(tokenizer, ["never"], False)
    request = Request("r", [0], SamplingParams(), 3, stops, 0, True, 0.0, [0], stop_text=watch)
    assert [request.take(token, 0.0)[0] for token in (0, 1, 2)] == [None, None, "stop" if stops else "length"]
    assert watch.visible(at_end=True) == "ab\N{REPLACEMENT CHARACTER}c"


def test_a_manager_without_a_tokenizer_refuses_them() -> None:
    manager = enable(tiny_model("llama")).init_continuous_batching(
        continuous_batching_config=ContinuousBatchingConfig(page_size=4)
    )
    with pytest.raises(InvalidValueError, match=r"stop=\('x',\) needs the model's tokenizer"):
        manager.add_request([1, 2], stop="x")


@pytest.mark.slow
def test_answers_of_a_real_model(smollm2: Any, smollm2_tokenizer: Any) -> None:
    prompt = [{"role": "user", "content": "Count from one to ten in words, separated by commas."}]
    greedy = {"temperature": 0.0, "max_tokens": 40}
    with LLM(smollm2, smollm2_tokenizer) as llm:
        (free,) = llm.chat(prompt, SamplingParams(**greedy), use_tqdm=False)
        stop = free.text[len(free.text) // 2 :][:6]  # begins and ends anywhere
        cut_at = free.text.index(stop)
        for keeps in (False, True):
            params = SamplingParams(**greedy, stop=stop, include_stop_str_in_output=keeps)
            (output,) = llm.chat(prompt, params, use_tqdm=False)
            assert output.text == free.text[: cut_at + len(stop) if keeps else cut_at]
            assert output.finish_reason == "stop"
            assert free.generated_tokens[: len(output.generated_tokens)] == output.generated_tokens
            assert "".join(llm.stream(prompt, params)) == output.text
        (never,) = llm.chat(prompt, SamplingParams(**greedy, stop=["no such text"]), use_tqdm=False)
        assert never.text == free.text and never.finish_reason == free.finish_reason
        with pytest.raises(InvalidValueError, match=r"n=2, .*: a stream is of one answer"):
            llm.stream("a", SamplingParams(n=2))
        (whole,) = llm.chat(prompt, SamplingParams(**greedy, include_prompt=True), use_tqdm=False)
        assert whole.text.endswith(free.text) and "Count from one to ten" in whole.text
