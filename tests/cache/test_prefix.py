"""Page hashes: equal where all is equal that a page's K and V depend on, and only there."""

from hypothesis import assume, given
from hypothesis import strategies as st

from legato.cache.prefix import PageHasher

page_sizes = st.integers(1, 5)
token_lists = st.lists(st.integers(0, 3) | st.integers(0, 2**63), max_size=24)
salts = st.none() | st.text(max_size=3)


def hasher_after(page_size: int, num_weight_changes: int) -> PageHasher:
    hasher = PageHasher(page_size)
    for _ in range(num_weight_changes):
        hasher.weights_changed()
    return hasher


def hashes_of(tokens: list[int], page_size: int, salt: str | None = None, num_weight_changes: int = 0) -> list[bytes]:
    hashes: list[bytes] = []
    hasher = hasher_after(page_size, num_weight_changes)
    hasher.extend(hashes, hasher.root(salt), tokens)
    return hashes


@given(tokens=token_lists, page_size=page_sizes, salt=salts)
def test_equal_texts_have_equal_hashes_whoever_makes_them(tokens: list[int], page_size: int, salt: str | None) -> None:
    assert hashes_of(tokens, page_size, salt) == hashes_of(tuple(tokens), page_size, salt)


@given(tokens=token_lists, page_size=page_sizes)
def test_each_complete_page_has_a_hash_and_an_incomplete_one_has_none(tokens: list[int], page_size: int) -> None:
    hashes = hashes_of(tokens, page_size)
    assert len(hashes) == len(tokens) // page_size
    assert hashes_of(tokens[: len(hashes) * page_size], page_size) == hashes


@given(tokens=token_lists, page_size=page_sizes)
def test_no_two_pages_of_a_text_have_one_hash_even_if_they_repeat(tokens: list[int], page_size: int) -> None:
    hashes = hashes_of(tokens * 2, page_size)
    assert len(set(hashes)) == len(hashes)
    assert {len(page_hash) for page_hash in hashes} <= {32}


@given(tokens=token_lists, page_size=page_sizes, place=st.integers(0, 99), token=st.integers(0, 3))
def test_another_token_changes_the_hashes_from_its_page_on_and_none_before(
    tokens: list[int], page_size: int, place: int, token: int
) -> None:
    assume(tokens)
    place %= len(tokens)
    assume(tokens[place] != token)
    changed = [*tokens[:place], token, *tokens[place + 1 :]]
    page = place // page_size
    one, other = hashes_of(tokens, page_size), hashes_of(changed, page_size)
    assert one[:page] == other[:page]
    assert not set(one[page:]) & set(other[page:])


@given(
    tokens=token_lists,
    page_size=page_sizes,
    one=st.tuples(salts, st.integers(0, 12)),
    other=st.tuples(salts, st.integers(0, 12)),
)
def test_another_salt_or_other_weights_change_every_hash(
    tokens: list[int], page_size: int, one: tuple[str | None, int], other: tuple[str | None, int]
) -> None:
    assume(one != other)
    assert not set(hashes_of(tokens, page_size, *one)) & set(hashes_of(tokens, page_size, *other))


@given(tokens=token_lists, page_size=page_sizes, salt=salts, cuts=st.lists(st.integers(0, 24), max_size=6))
def test_a_text_that_grows_has_the_hashes_of_one_that_was_always_that_long(
    tokens: list[int], page_size: int, salt: str | None, cuts: list[int]
) -> None:
    hasher, hashes = PageHasher(page_size), []
    root = hasher.root(salt)
    for cut in sorted(cuts):
        before = hashes.copy()
        hasher.extend(hashes, root, tokens[:cut])
        assert hashes[: len(before)] == before
        assert len(hashes) == len(tokens[:cut]) // page_size
    hasher.extend(hashes, root, tokens)
    assert hashes == hashes_of(tokens, page_size, salt)


@given(tokens=token_lists, page_size=page_sizes, num_known=st.integers(0, 24))
def test_a_chain_that_was_begun_under_old_weights_goes_on_as_one(
    tokens: list[int], page_size: int, num_known: int
) -> None:
    """Its later pages were computed from the old ones' K and V, so that a text begun since must not find them."""
    hasher, hashes = PageHasher(page_size), []
    root = hasher.root(None)
    hasher.extend(hashes, root, tokens[:num_known])
    hasher.weights_changed()
    hasher.extend(hashes, root, tokens)
    assert hashes == hashes_of(tokens, page_size)
    assert not set(hashes) & set(hashes_of(tokens, page_size, None, 1))


def test_any_string_is_a_salt() -> None:
    """JSON can spell halves of surrogate pairs, which UTF-8 cannot."""
    assert len({hashes_of([1], 1, salt)[0] for salt in (None, "\ud800", "\udc00", "\ud800x")}) == 4
