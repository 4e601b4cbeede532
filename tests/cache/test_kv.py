"""The cache's tensors on the CPU: where a block lies, and that what goes to the host comes back as it was."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from legato.cache.kv import HostCache, KVCache
from legato.cache.pool import AttentionGroup, ChunkLayout
from legato.cache.swap import UnitCopies
from tests.cache.accounts import LAYOUTS

CPU = torch.device("cpu")
page_sizes = st.integers(1, 6)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[AttentionGroup, ...]:
    """One to three groups of any shape, their layers interleaved."""
    owner = draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
    shapes = st.tuples(st.none() | st.integers(1, 9), st.integers(1, 3), st.sampled_from((1, 2, 3)))
    groups = []
    for group in sorted(set(owner)):
        layers = tuple(layer for layer, belongs_to in enumerate(owner) if belongs_to == group)
        groups.append(AttentionGroup(layers, *draw(shapes)))
    return tuple(groups)


def make_cache(groups: tuple[AttentionGroup, ...], page_size: int, num_chunks: int = 4) -> KVCache:
    """A cache full of numbers that all differ."""
    cache = KVCache(groups, page_size, num_chunks, torch.float32, CPU)
    cache.units.view(-1).copy_(torch.arange(cache.units.numel()))
    return cache


def units_of(cache: KVCache, group: int, block: int) -> range:
    """A block's units, by the layout's figures."""
    per_block = ChunkLayout.of(cache.groups, cache.page_size).units_per_block[group]
    return range(block * per_block, (block + 1) * per_block)


@given(groups=layouts(), page_size=page_sizes, data=st.data())
@settings(max_examples=200, deadline=None)
def test_what_went_to_the_host_comes_back_to_any_place_byte_for_byte(
    groups: tuple[AttentionGroup, ...], page_size: int, data: st.DataObject
) -> None:
    """Several transfers a call, the cache scribbled over in between, and no other unit touched."""
    cache = make_cache(groups, page_size)
    num_units = len(cache.units)
    num_host_units = data.draw(st.integers(1, num_units), label="host units")
    host = HostCache(cache, num_host_units)
    moved = data.draw(st.integers(1, num_host_units), label="moved")
    source, target, on_host = (
        data.draw(st.permutations(range(n)))[:moved] for n in (num_units, num_units, num_host_units)
    )
    cut = data.draw(st.integers(0, moved), label="cut")
    before = cache.units.clone()
    host.offload([UnitCopies(source[:cut], on_host[:cut]), UnitCopies(source[cut:], on_host[cut:])])
    assert torch.equal(cache.units, before)
    cache.units.neg_()
    scribbled = cache.units.clone()
    order = data.draw(st.permutations(range(moved)), label="order")
    host.restore([UnitCopies([target[i]], [on_host[i]]) for i in order])
    scribbled[list(target)] = before[list(source)]
    assert torch.equal(cache.units, scribbled)


@given(groups=layouts(), page_size=page_sizes, data=st.data())
@settings(max_examples=100, deadline=None)
def test_host_units_keep_what_they_have_until_they_are_written_again(
    groups: tuple[AttentionGroup, ...], page_size: int, data: st.DataObject
) -> None:
    """Against a dictionary of what each host unit should hold."""
    cache = make_cache(groups, page_size)
    host = HostCache(cache, 5)
    held: dict[int, Tensor] = {}
    for _ in range(data.draw(st.integers(1, 6))):
        on_host = data.draw(st.lists(st.integers(0, 4), min_size=1, unique=True))
        in_cache = data.draw(st.permutations(range(len(cache.units))))[: len(on_host)]
        on_host = on_host[: len(in_cache)]
        if data.draw(st.booleans()):
            host.offload([UnitCopies(in_cache, on_host)])
            held.update({unit: cache.units[source].clone() for unit, source in zip(on_host, in_cache, strict=True)})
            cache.units += 1
        elif set(on_host) <= set(held):
            host.restore([UnitCopies(in_cache, on_host)])
            for unit, place in zip(on_host, in_cache, strict=True):
                assert torch.equal(cache.units[place], held[unit])


@given(groups=layouts(), page_size=page_sizes, data=st.data())
@settings(max_examples=200, deadline=None)
def test_units_and_layers_agree_on_where_a_block_lies(
    groups: tuple[AttentionGroup, ...], page_size: int, data: st.DataObject
) -> None:
    """What the layers of a group write to a block's slots fills the block's units, and no other."""
    cache = make_cache(groups, page_size)
    group = data.draw(st.integers(0, len(groups) - 1))
    per_chunk = ChunkLayout.of(groups, page_size).blocks_per_chunk[group]
    block = data.draw(st.integers(0, 4 * per_chunk - 1))
    before = cache.units.clone()
    rows = cache.rows(group, torch.arange(block * page_size, (block + 1) * page_size))
    kind = groups[group]
    for layer in kind.layers:
        key, value = -torch.rand(2, 1, kind.num_kv_heads, page_size, kind.head_dim) - 1
        cache.layers[layer].write(rows.view(-1), key, value)
        read_key, read_value = cache.layers[layer].read(rows[:, None])
        assert torch.equal(read_key, key)
        assert torch.equal(read_value, value)
    changed = [unit for unit in range(len(cache.units)) if not torch.equal(cache.units[unit], before[unit])]
    assert changed == list(units_of(cache, group, block))
    assert (cache.units[changed] < 0).all()


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_block_that_comes_back_elsewhere_reads_as_it_was_written(name: str) -> None:
    block, other = 2, 3
    cache = make_cache(LAYOUTS[name].groups(8), page_size=4)
    host = HostCache(cache, len(cache.units))
    for group, kind in enumerate(cache.groups):
        written = torch.rand(len(kind.layers), 2, 1, kind.num_kv_heads, cache.page_size, kind.head_dim)
        for layer, (key, value) in zip(kind.layers, written, strict=True):
            cache.layers[layer].write(rows_of(cache, group, block).view(-1), key, value)
        source, target = list(units_of(cache, group, block)), list(units_of(cache, group, other))
        host.offload([UnitCopies(source, source)])
        cache.units[source] = -1.0
        host.restore([UnitCopies(target, source)])
        for layer, expected in zip(kind.layers, written, strict=True):
            read = cache.layers[layer].read(rows_of(cache, group, other)[:, None])
            assert torch.equal(torch.stack(read), expected)


def rows_of(cache: KVCache, group: int, block: int) -> Tensor:
    return cache.rows(group, torch.arange(block * cache.page_size, (block + 1) * cache.page_size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_host_holds_what_the_cache_holds_to_the_bit(dtype: torch.dtype) -> None:
    cache = KVCache(LAYOUTS["two windows"].groups(8), 4, 4, dtype, CPU)
    bits = torch.int32 if dtype.itemsize == 4 else torch.int16
    cache.units.view(bits).random_()  # NaNs of all kinds among them
    before = cache.units.clone()
    host = HostCache(cache, len(cache.units))
    every = list(range(len(cache.units)))
    host.offload([UnitCopies(every, every[::-1])])
    cache.units.zero_()
    host.restore([UnitCopies(every, every[::-1])])
    assert torch.equal(cache.units.view(bits), before.view(bits))


def test_the_chunk_for_padding_reads_starts_as_zeros() -> None:
    cache = KVCache(LAYOUTS["wide full"].groups(8), 4, 3, torch.float32, CPU)
    assert not cache.units[: len(cache.units) // 3 * 2].any()


def test_no_host_memory_is_taken_when_none_is_asked_for() -> None:
    cache = make_cache(LAYOUTS["full"].groups(8), 4)
    assert HostCache(cache, 0).num_units == 0


def test_both_can_be_used_where_they_were_made_in_inference_mode() -> None:
    with torch.inference_mode():
        cache = KVCache(LAYOUTS["full"].groups(8), 4, 4, torch.float32, CPU)
        host = HostCache(cache, 2)
    cache.units.copy_(torch.arange(cache.units.numel()).view_as(cache.units))
    host.offload([UnitCopies([3, 2], [0, 1])])
    host.restore([UnitCopies([2, 3], [0, 1])])
    assert cache.units[:, 0].tolist() == [cache.units.shape[1] * unit for unit in (0, 1, 3, 2)]
