"""Text that comes in pieces, and conversations that cannot be encoded."""

import copy
import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from legato import InvalidValueError
from legato.text import IncrementalDecoder, decode, encode, encode_chat, token_bytes

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
TEXTS = [
    "Hello, world! It's 12 o'clock .  Isn't it ?",
    "naïve café, Zürich, Łódź, smörgåsbord, Ελλάδα, Привет",
    "你好，世界！こんにちは 안녕하세요",
    "🍵👨‍👩‍👧‍👦🏳️‍🌈 e\u0301 \u200d 𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "  two spaces,\ttabs\n\n    and code: def f(x):\r\n\treturn x",
    "\u2028 \u00a0 \ufeff \ufffd",
]


def llama2_tokenizer() -> Any:
    """The oldest kind that is still about: no space in front of the first word, bytes as tokens of their own."""
    words = ["<unk>", "<s>", "</s>", "▁Hello", "▁wor", "ld", "▁", ",", "你", "▁▁", "é"]
    vocabulary = {word: i for i, word in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module", params=["smollm2", "gemma3", "llama2"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return llama2_tokenizer() if request.param == "llama2" else request.getfixturevalue(f"{request.param}_tokenizer")


@pytest.fixture(scope="module")
def pools(tokenizer: Any) -> list[Sequence[int]]:
    """Token ids by kind: of real text, any, special, bytes, and single ones that end inside a character."""
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    of_bytes = [i for i, name in enumerate(names) if name and name.startswith("<0x")]
    of_text = [i for text in TEXTS for i in encode(tokenizer, text)]
    broken = [i for i in set(of_text) if decode(tokenizer, [i]).endswith(REPLACEMENT)]
    pools = [of_text, range(len(tokenizer)), tokenizer.all_special_ids, of_bytes, of_bytes, broken]
    return [pool for pool in pools if pool]


def pieces_of(tokenizer: Any, chunks: list[list[int]]) -> list[str]:
    decoder = IncrementalDecoder(tokenizer)
    return [*(decoder.push(chunk) for chunk in chunks), decoder.finish()]


def assert_pieces_are_right(pieces: list[str], whole: str) -> None:
    assert "".join(pieces) == whole
    end = 0
    for piece in pieces[:-1]:
        end += len(piece)
        assert not piece.endswith(REPLACEMENT) or whole[end - 1] == REPLACEMENT


@given(data=st.data())
@settings(max_examples=500, deadline=None)
def test_pieces_of_any_tokens_make_the_whole_text(
    tokenizer: Any, pools: list[Sequence[int]], data: st.DataObject
) -> None:
    token = st.one_of([st.sampled_from(pool) for pool in pools])
    chunks = data.draw(st.lists(st.lists(token, max_size=4), max_size=16))
    whole = decode(tokenizer, [i for chunk in chunks for i in chunk])
    assert_pieces_are_right(pieces_of(tokenizer, chunks), whole)


@given(text=st.lists(st.sampled_from("".join(TEXTS)) | st.characters(codec="utf-8"), max_size=30).map("".join))
@settings(max_examples=150, deadline=None)
def test_pieces_of_real_text_are_whole_characters(tokenizer: Any, text: str) -> None:
    token_ids = encode(tokenizer, text)
    pieces = pieces_of(tokenizer, [[i] for i in token_ids])
    whole = decode(tokenizer, token_ids)
    assert_pieces_are_right(pieces, whole)
    if REPLACEMENT not in whole:
        assert not any(REPLACEMENT in piece for piece in pieces)


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_text_comes_without_delay(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(f"{name}_tokenizer")
    decoder, given_out, pushed = IncrementalDecoder(tokenizer), "", []
    for token_id in encode(tokenizer, " ".join(TEXTS[:3])):
        pushed.append(token_id)
        given_out += decoder.push([token_id])
        whole = decode(tokenizer, pushed)
        assert given_out == whole or whole.endswith(REPLACEMENT)
    assert decoder.finish() == ""


def test_a_character_is_held_back_until_it_is_whole(smollm2_tokenizer: Any) -> None:
    token_ids = encode(smollm2_tokenizer, "a🍵")
    assert len(token_ids) > 2
    pieces = pieces_of(smollm2_tokenizer, [[i] for i in token_ids])
    assert pieces == ["a", *[""] * (len(token_ids) - 2), "🍵", ""]


def test_what_stays_broken_comes_at_the_end(smollm2_tokenizer: Any) -> None:
    cut = encode(smollm2_tokenizer, "a🍵")[:-1]
    assert pieces_of(smollm2_tokenizer, [cut])[0] == ""
    assert pieces_of(smollm2_tokenizer, [cut])[1] == decode(smollm2_tokenizer, cut)


def test_a_byte_can_still_change_the_bytes_before_it(gemma3_tokenizer: Any) -> None:
    """A run of byte tokens is text only if all of it is: one wrong byte at its end makes every one a �."""
    run = gemma3_tokenizer.convert_tokens_to_ids(["<0x41>", "<0xE2>", "<0x82>", "<0xAC>", "<0xFF>"])
    assert decode(gemma3_tokenizer, run[:4]) == "A€"
    assert decode(gemma3_tokenizer, run) == REPLACEMENT * 5
    assert_pieces_are_right(pieces_of(gemma3_tokenizer, [[i] for i in run]), REPLACEMENT * 5)
    for special in gemma3_tokenizer.convert_tokens_to_ids(["<bos>", "<unused0>"]):
        interrupted = [run[0], special, run[4]]  # left out before the bytes are put together
        assert_pieces_are_right(pieces_of(gemma3_tokenizer, [[i] for i in interrupted]), REPLACEMENT * 2)


def test_special_tokens_are_left_out(smollm2_tokenizer: Any) -> None:
    words = encode(smollm2_tokenizer, "one two")
    eos = smollm2_tokenizer.eos_token_id
    assert decode(smollm2_tokenizer, [eos, words[0], eos, *words[1:], eos]) == "one two"
    assert pieces_of(smollm2_tokenizer, [[eos], words[:1], [eos], words[1:], [eos]]) == ["", "one", "", " two", "", ""]


def test_nothing_pushed_is_no_text(tokenizer: Any) -> None:
    assert pieces_of(tokenizer, []) == [""]
    assert pieces_of(tokenizer, [[], []]) == ["", "", ""]


# Conversations


def test_a_conversation_ends_where_the_answer_begins(smollm2_tokenizer: Any) -> None:
    token_ids = encode_chat(smollm2_tokenizer, [{"role": "user", "content": "Hi"}])
    text = smollm2_tokenizer.decode(token_ids)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert all(type(i) is int for i in token_ids)


def test_without_a_chat_template_there_is_no_chat(gemma3_tokenizer: Any) -> None:
    with pytest.raises(InvalidValueError, match="no chat template"):
        encode_chat(gemma3_tokenizer, [{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "Hi",
        ["Hi"],
        [None],
        [{"role": "user"}],
        [{"content": "Hi"}],
        [{"role": "user", "content": "Hi"}, {"role": "assistant"}],
        [[{"role": "user", "content": "Hi"}]],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [1]}],
        [{"role": ["user"], "content": "Hi"}],
        [{"role": "user", "content": "half a character: \ud83c"}],
    ],
    ids=repr,
)
def test_malformed_messages_are_refused(smollm2_tokenizer: Any, messages: Any) -> None:
    with pytest.raises(InvalidValueError, match="messages"):
        encode_chat(smollm2_tokenizer, messages)


def test_text_that_is_no_text_is_refused(smollm2_tokenizer: Any) -> None:
    with pytest.raises(InvalidValueError):
        encode(smollm2_tokenizer, "half a character: \ud83c")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.nothing() }}", "nothing"),
        ("{{ messages[0]['content'] + 1 }}", "str"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages | no_such_filter }}", "no_such_filter"),
    ],
)
def test_a_template_that_raises_says_why(smollm2_tokenizer: Any, template: str, reason: str) -> None:
    tokenizer = copy.copy(smollm2_tokenizer)
    tokenizer.chat_template = template
    with pytest.raises(InvalidValueError, match=f"messages are refused by the chat template: .*{reason}"):
        encode_chat(tokenizer, [{"role": "user", "content": "Hi"}])


def test_who_encodes_is_not_warned_of_length(smollm2_tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    """transformers warns once for each tokenizer, of a length that is checked here, with a message."""
    tokenizer = copy.deepcopy(smollm2_tokenizer)
    tokenizer.model_max_length = 5
    monitored = logging.getLogger("transformers")
    monitored.addHandler(caplog.handler)
    try:
        encode(tokenizer, "one two three four five six")
        encode_chat(tokenizer, [{"role": "user", "content": "one two three four five six"}])
        assert not caplog.records
        tokenizer("one two three four five six")
        assert caplog.records  # there is something not to be told of
    finally:
        monitored.removeHandler(caplog.handler)


def test_an_error_that_is_not_the_templates_passes_through(smollm2_tokenizer: Any) -> None:
    class Broken:
        chat_template = "x"
        apply_chat_template: Callable[..., Any] = lambda *_, **__: 1 / 0

    with pytest.raises(ZeroDivisionError):
        encode_chat(Broken(), [{"role": "user", "content": "Hi"}])


def test_bytes_of_tokens_put_together_are_the_text(tokenizer: Any) -> None:
    rng = random.Random(3)
    texts = [*TEXTS, "\x00\x07 ¡ÿĀġ", "<0xE2> 😀😃"]
    texts += ["".join(chr(rng.choice([rng.randrange(32, 0x3000), 0x1F600 + rng.randrange(80)])) for _ in range(40))]
    num_inside = 0
    for text in texts:
        spelled = [token_bytes(tokenizer, token_id) for token_id in encode(tokenizer, text)]
        assert b"".join(spelled).decode() == text
        num_inside += sum(REPLACEMENT in one.decode(errors="replace") for one in spelled)
    assert num_inside > 10


def test_a_word_keeps_its_space() -> None:
    tokenizer = llama2_tokenizer()
    assert [token_bytes(tokenizer, token_id) for token_id in (3, 4, 5, 9)] == [b" Hello", b" wor", b"ld", b"  "]
