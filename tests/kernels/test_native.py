"""The native kernels, for every instruction set of this processor, against float64 and against their torch twins."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from legato.cache.kv import KVCache, LayerCache
from legato.cache.pool import AttentionGroup
from legato.kernels.interface import Activation, AttentionSpec, HeadLayout, HeadNorm, PassTables, Rotary, new_rows
from legato.kernels.library import LEVELS, NativeKernels, load_library
from legato.kernels.packing import BFLOAT16, FLOAT32, KINDS, Quantization, pack, pack_int8
from legato.kernels.reference import TorchKernels
from legato.kernels.tuning import MeasuredWays

HERE = [level for level in LEVELS if load_library((level,))]


@pytest.fixture(params=LEVELS)
def kernels(request: pytest.FixtureRequest, tmp_path: Path) -> NativeKernels:
    found = load_library((request.param,))
    if found is None:
        pytest.skip(f"no {request.param} kernels here: not built, or not for this processor")
    return NativeKernels(*found, MeasuredWays(tmp_path / "ways.json"))


def randn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def test_the_portable_kernels_were_built() -> None:
    assert "portable" in HERE, "the package was built without a compiler: nothing below was tested"


# Row counts around every register tile, tile pair and chunk; depths and widths with every kind of edge.
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 11, 12, 13, 16, 17, 31, 33, 47, 64, 100, 700])
@pytest.mark.parametrize(("depth", "columns"), [(576, 96), (64, 32), (33, 31), (7, 70), (96, 1), (1536, 48)])
@pytest.mark.parametrize("exact_in_bfloat16", [True, False])
def test_linear_is_as_exact_as_float32(
    kernels: NativeKernels, rows: int, depth: int, columns: int, exact_in_bfloat16: bool
) -> None:
    weight, bias, x = randn(columns, depth, seed=1), randn(columns, seed=2), randn(rows, depth, seed=3)
    if exact_in_bfloat16:
        weight = weight.bfloat16().float()
    packed = pack(weight, bias if rows % 2 else None)
    assert packed.kind == (BFLOAT16 if exact_in_bfloat16 else FLOAT32)
    expected = x.double() @ weight.double().T + (bias.double() if rows % 2 else 0)
    # A float32 sum of `depth` products in any order: far below what bfloat16 activations would give, 2**-9.
    bound = (x.double().abs() @ weight.double().abs().T).max() * 2.0**-21
    for way in kernels.ways(packed.kind):
        out = torch.full((rows, columns + 3), 7.0)
        kernels.multiply(way, x, packed, out[:, :columns])
        assert (out[:, :columns].double() - expected).abs().max() < bound
        assert (out[:, columns:] == 7).all(), "wrote past the end of its rows"


@pytest.mark.parametrize("rows", [1, 3, 16, 17, 40, 100])
@pytest.mark.parametrize(("depth", "columns"), [(576, 96), (33, 31), (100, 65)])
def test_int8_is_the_product_of_rounded_weights(kernels: NativeKernels, rows: int, depth: int, columns: int) -> None:
    weight, bias, x = randn(columns, depth, seed=1), randn(columns, seed=2), randn(rows, depth, seed=3)
    x[rows // 2] = 0
    packed = pack_int8(weight, bias)
    column_scales = weight.double().abs().amax(1) / 127
    whole_weight = (weight.double() / column_scales[:, None]).round()
    expected = (x.double() @ whole_weight.T) * column_scales + bias.double()
    # Of x, half of the last of 16 bits in each number.
    largest = x.double().abs().amax(1, keepdim=True) / 127 / 254
    bound = (largest / 2 * (whole_weight * column_scales[:, None]).abs().sum(1)).max() + 1e-5
    for way in kernels.ways(packed.kind):
        out = new_rows(rows, columns)
        kernels.multiply(way, x, packed, out)
        assert (out.double() - expected).abs().max() < bound
    twin, out = TorchKernels(), new_rows(rows, columns)
    twin.linear(x, twin.pack(weight, bias, "int8"), out)
    assert (out.double() - expected).abs().max() < bound


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("depth", "columns"), [(576, 96), (1536, 64), (33, 31), (100, 65)])
def test_an_int8_row_is_the_same_bits_whatever_is_beside_it(
    kernels: NativeKernels, depth: int, columns: int, gated: bool
) -> None:
    weight, bias, x = (
        randn((1 + gated) * columns, depth, seed=1),
        randn((1 + gated) * columns, seed=2),
        randn(70, depth),
    )
    packed = pack_int8(weight, bias, gated)
    found = []
    for way in kernels.ways(packed.kind):
        for rows in (1, 2, 3, 4, 5, 8, 15, 16, 17, 32, 33, 70):
            out = new_rows(rows, columns)
            kernels.multiply(way, x[-rows:], packed, out)
            found.append(out[-1])
    assert all(torch.equal(row, found[0]) for row in found)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_stays_none_in_int8_and_in_its_row(kernels: NativeKernels, wrong: float) -> None:
    packed, x = pack_int8(randn(96, 80, seed=1), None), randn(20, 80, seed=2)
    x[[0, 7, 19], 5] = wrong
    for way in kernels.ways(packed.kind):
        for rows in (1, 20):
            out = new_rows(rows, 96)
            kernels.multiply(way, x[:rows], packed, out)
            is_none = ~out.isfinite()
            assert is_none.all(dim=1).tolist() == [row in (0, 7, 19) for row in range(rows)]
            assert is_none.any(dim=1).tolist() == [row in (0, 7, 19) for row in range(rows)]


def test_packing_pads_with_zeros() -> None:
    for packed in (
        pack(torch.ones(33, 5), None),
        pack(torch.full((33, 5), 1.001), None),
        pack_int8(torch.ones(33, 5), None),
    ):
        assert packed.panels.shape[0] == 2 and (packed.panels != 0).sum() == 33 * 5


@pytest.mark.parametrize("width", [64, 576, 50, 7])
@pytest.mark.parametrize("rows", [1, 5, 300])
def test_norms(kernels: NativeKernels, rows: int, width: int) -> None:
    x, weight, post, residual = (randn(n, width, seed=i) for i, n in enumerate((rows, 1, 1, rows)))
    weight, post = weight[0], post[0]
    twin = TorchKernels()
    for with_post in (None, post):
        for with_weight in (None, weight):
            ours, theirs = residual.clone(), residual.clone()
            our_out, their_out = torch.zeros_like(x), torch.zeros_like(x)
            kernels.add_norm(ours, x, 0.7, with_post, with_weight, 1e-5, our_out)
            twin.add_norm(theirs, x, 0.7, with_post, with_weight, 1e-5, their_out)
            torch.testing.assert_close(ours, theirs)
            torch.testing.assert_close(our_out, their_out)
    out = torch.zeros_like(x)
    kernels.rms_norm(x, weight, 1e-6, out)
    expected = functional.rms_norm(x.double(), (width,), weight.double(), 1e-6)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize(
    ("rows", "depth", "width"), [(1, 576, 1536), (40, 64, 300), (3, 33, 5), (17, 40, 64), (700, 70, 33)]
)
@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8"])
def test_gated_products(
    kernels: NativeKernels, activation: Activation, rows: int, depth: int, width: int, form: str
) -> None:
    weight, bias, x = randn(2 * width, depth, seed=1), randn(2 * width, seed=2), randn(rows, depth, seed=3)
    bias[:4] = torch.tensor([-100.0, 100.0, 0.0, -1e-8])
    if form == "bfloat16":
        weight = weight.bfloat16().float()
    quantization: Quantization | None = "int8" if form == "int8" else None
    bias_or_none = bias if rows % 2 else None
    twin = TorchKernels()
    packed = kernels.pack(weight, bias_or_none, quantization, gated=True)
    assert KINDS[packed.kind] == form
    expected, both = new_rows(rows, width), new_rows(rows, 2 * width)
    twin.gated_linear(x, twin.pack(weight, bias_or_none, quantization, gated=True), activation, expected)
    twin.linear(x, twin.pack(weight, bias_or_none, quantization), both)
    # What a rounding, in the product or of an activation to its other neighbour, does to gate and to what is gated.
    largest = both.abs().max() * (depth * 2e-5 if form == "int8" else depth**0.5 * 2e-6)
    for way in kernels.ways(packed.kind):
        out = torch.full((rows, width + 3), 7.0)
        kernels.multiply(way, x, packed, out[:, :width], activation)
        assert (out[:, :width] - expected).abs().max() <= largest + 1e-5
        assert (out[:, width:] == 7).all(), "wrote past the end of its rows"


class Sequences:
    """Requests at various places of their sequences, with pages strewn over a cache full of noise."""

    def __init__(
        self, layout: HeadLayout, page_size: int, lengths: list[tuple[int, int]], window: int | None, dtype: torch.dtype
    ) -> None:
        self.layout = layout
        group = AttentionGroup((0, 1), window, layout.num_kv_heads, layout.head_dim)
        pages = [-(-end // page_size) for _, end in lengths]
        num_blocks = sum(pages) + 2
        self.cache = KVCache([group], page_size, num_blocks + 4, dtype, torch.device("cpu"))
        self.cache.units.copy_(randn(*self.cache.units.shape, seed=9).to(dtype))
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(4)) + 2
        table = torch.full((len(lengths), max(pages) + 3), 1 << 40)  # what must not be read leads far away
        counts = torch.tensor([count for count, _ in lengths])
        ends = torch.tensor([end for _, end in lengths])
        positions = torch.cat([torch.arange(end - count, end) for count, end in lengths])
        slots = []
        for i, (count, end) in enumerate(lengths):
            table[i, : pages[i]] = order[sum(pages[:i]) : sum(pages[: i + 1])]
            at = torch.arange(end - count, end)
            slots.append(table[i, at // page_size] * page_size + at % page_size)
            if window is not None:
                table[i, : max(0, end - count - window + 1) // page_size] = -(1 << 40)
        cu_seqlens_q = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        rows = self.cache.rows(0, torch.cat(slots))
        self.tables = PassTables(positions, cu_seqlens_q, ends, table, rows, page_size, 2 * 2 * page_size)
        self.qkv = randn(len(positions), layout.width, seed=5)

    @property
    def layer(self) -> LayerCache:
        return self.cache.layers[1]

    def run(
        self, kernels: Any, spec: AttentionSpec, norm: HeadNorm | None, rotary: Rotary | None
    ) -> tuple[Tensor, ...]:
        """Q, the whole cache and the attention after both kernels, from the same start."""
        before = self.cache.units.clone()
        qkv = self.qkv.clone()
        out = new_rows(len(qkv), self.layout.num_heads * self.layout.head_dim)
        kernels.rotate_and_store(qkv, self.layout, norm, rotary, self.tables, self.layer)
        kernels.attention(qkv, self.layout, spec, self.tables, self.layer, out)
        after = self.cache.units.clone()
        self.cache.units.copy_(before)
        return qkv[:, : self.layout.num_heads * self.layout.head_dim], after, out


LENGTHS = [(1, 1), (1, 40), (5, 5), (33, 70), (1, 33), (70, 71), (1, 200), (2, 18)]
LAYOUTS = [
    HeadLayout(9, 3, 64),
    HeadLayout(4, 1, 256),
    HeadLayout(2, 2, 16),
    HeadLayout(6, 2, 20),
    HeadLayout(8, 1, 128),
]


@pytest.mark.parametrize(
    "layout", LAYOUTS, ids=lambda layout: f"{layout.num_heads}-{layout.num_kv_heads}-{layout.head_dim}"
)
@pytest.mark.parametrize("page_size", [4, 5, 16, 256])
@pytest.mark.parametrize("window", [None, 7, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_is_its_twin(
    kernels: NativeKernels, layout: HeadLayout, page_size: int, window: int | None, dtype: torch.dtype
) -> None:
    sequences = Sequences(layout, page_size, LENGTHS, window, dtype)
    half = layout.head_dim // 2 if page_size != 5 else layout.head_dim // 4  # a part of the head stays as it is
    angles = randn(200, half, seed=6)
    rotary = Rotary(angles.cos(), angles.sin())
    heads = (layout.num_heads, layout.num_kv_heads) if page_size == 16 else (1, 1)
    norm = HeadNorm(*(randn(n * layout.head_dim, seed=7) for n in heads), eps=1e-6)
    for spec, with_norm, with_rotary in [
        (AttentionSpec(layout.head_dim**-0.5, window), None, rotary),
        (AttentionSpec(2 * layout.head_dim**-0.5, window, softcap=1.5), norm, rotary),
        (AttentionSpec(1.5 * layout.head_dim**-0.5, window, sinks=randn(layout.num_heads, seed=8)), norm, None),
    ]:
        ours = sequences.run(kernels, spec, with_norm, with_rotary)
        theirs = sequences.run(TorchKernels(), spec, with_norm, with_rotary)
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours[1], theirs[1], rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
        # A rounding of K to the other side, in bfloat16, is multiplied by the scaling.
        tolerance = 3e-2 if dtype == torch.bfloat16 else 2e-5
        torch.testing.assert_close(ours[2], theirs[2], rtol=tolerance, atol=tolerance)


def test_scores_of_any_size_stay_finite(kernels: NativeKernels) -> None:
    layout = HeadLayout(2, 1, 64)
    sequences = Sequences(layout, 16, [(40, 80), (1, 90)], None, torch.float32)
    for scaling in (0.0, 1e-30, 50.0):
        spec = AttentionSpec(scaling)
        ours, theirs = (sequences.run(k, spec, None, None)[2] for k in (kernels, TorchKernels()))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_bfloat16_is_rounded_to_even_and_keeps_what_is_no_number(kernels: NativeKernels) -> None:
    layout = HeadLayout(1, 1, 20)
    sequences = Sequences(layout, 4, [(1, 1)], None, torch.bfloat16)
    special = torch.tensor([1.00390625, 1.01171875, torch.inf, -torch.inf, torch.nan, 3.4e38, 1e-40, -0.0] * 3)[:20]
    sequences.qkv[0, 20:40] = special
    kernels.rotate_and_store(sequences.qkv, layout, None, None, sequences.tables, sequences.layer)
    stored = sequences.layer.storage[sequences.tables.write_rows[0, 0]]
    torch.testing.assert_close(stored, special.bfloat16(), rtol=0, atol=0, equal_nan=True)
