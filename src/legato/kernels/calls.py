"""The native kernels' arguments: the structs of `native/legato.h`, field by field."""

from ctypes import CDLL, POINTER, Structure, c_char_p, c_float, c_int64, c_void_p

_P, _I, _F = c_void_p, c_int64, c_float


class Linear(Structure):
    """Of `legato_linear`."""

    _fields_ = (
        ("kind", _I), ("by_tiles", _I), ("x", _P), ("x_stride", _I), ("rows", _I), ("depth", _I), ("weights", _P),
        ("column_scales", _P), ("bias", _P), ("columns", _I), ("out", _P), ("out_stride", _I), ("gated", _I),
        ("activation", _I),
    )  # fmt: skip


class Norm(Structure):
    """Of `legato_rms_norm`."""

    _fields_ = (
        ("x", _P), ("x_stride", _I), ("weight", _P), ("rows", _I), ("width", _I), ("out", _P), ("out_stride", _I),
        ("eps", _F),
    )  # fmt: skip


class AddNorm(Structure):
    """Of `legato_add_norm`."""

    _fields_ = (
        ("residual", _P), ("residual_stride", _I), ("x", _P), ("x_stride", _I), ("post_weight", _P), ("weight", _P),
        ("rows", _I), ("width", _I), ("out", _P), ("out_stride", _I), ("scale", _F), ("eps", _F),
    )  # fmt: skip


class Rotation(Structure):
    """Of `legato_rotate_and_store`."""

    _fields_ = (
        ("qkv", _P), ("qkv_stride", _I), ("tokens", _I), ("num_heads", _I), ("num_kv_heads", _I), ("head_dim", _I),
        ("query_weight", _P), ("key_weight", _P), ("norm_width", _I), ("position_ids", _P), ("cosines", _P),
        ("sines", _P), ("half", _I), ("key_rows", _P), ("value_rows", _P), ("cache", _P), ("bf16", _I), ("eps", _F),
    )  # fmt: skip


class Attention(Structure):
    """Of `legato_attention`."""

    _fields_ = (
        ("query", _P), ("query_stride", _I), ("num_heads", _I), ("num_kv_heads", _I), ("head_dim", _I), ("cache", _P),
        ("bf16", _I), ("page_size", _I), ("block_rows", _I), ("block_table", _P), ("table_stride", _I),
        ("cu_seqlens_q", _P), ("seqused_k", _P), ("requests", _I), ("window", _I), ("sinks", _P), ("out", _P),
        ("out_stride", _I), ("scaling", _F), ("softcap", _F),
    )  # fmt: skip


class Argmax(Structure):
    """Of `legato_argmax`."""

    _fields_ = (("logits", _P), ("stride", _I), ("rows", _I), ("vocab", _I), ("tokens", _P))


class Sampling(Structure):
    """Of `legato_sample`."""

    _fields_ = (
        ("logits", _P), ("stride", _I), ("rows", _I), ("vocab", _I), ("temperature", _P), ("top_k", _P), ("top_p", _P),
        ("min_p", _P), ("typical_p", _P), ("keys", _P), ("wants_logprob", _P), ("tokens", _P), ("logprobs", _P),
    )  # fmt: skip


class Forbidding(Structure):
    """Of `legato_forbid`."""

    _fields_ = (
        ("logits", _P), ("stride", _I), ("vocab", _I), ("count", _I), ("rows", _P), ("masks", _P), ("mask_bytes", _I),
        ("any", _P),
    )  # fmt: skip


class Call(Structure):
    """One of those that `legato_replay` makes."""

    _fields_ = (("kernel", _P), ("arguments", _P))


KERNELS: dict[str, type[Structure]] = {
    "legato_linear": Linear,
    "legato_rms_norm": Norm,
    "legato_add_norm": AddNorm,
    "legato_rotate_and_store": Rotation,
    "legato_attention": Attention,
    "legato_argmax": Argmax,
    "legato_sample": Sampling,
    "legato_forbid": Forbidding,
}


def declare(library: CDLL) -> None:
    """Tell ctypes what the library's functions take and return."""
    for function, arguments in KERNELS.items():
        getattr(library, function).argtypes = (_P, POINTER(arguments))
        getattr(library, function).restype = _I
    library.legato_replay.argtypes, library.legato_replay.restype = (_P, POINTER(Call), _I), _I
    library.legato_linear_has_tiles.argtypes, library.legato_linear_has_tiles.restype = (_I,), _I
    library.legato_pool_new.argtypes, library.legato_pool_new.restype = (_I,), _P
    library.legato_sources.restype = c_char_p
