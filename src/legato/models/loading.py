"""A name -> a model or a tokenizer. The name: an alias, a folder, a `.gguf` file or a Hugging Face hub id."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from legato.checks import refuse
from legato.errors import InvalidValueError, LegatoError
from legato.models.catalog import CATALOG

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ModelName = str | os.PathLike[str]

FORMS = f"an alias ({', '.join(CATALOG)}), a model folder, a .gguf file, or a Hugging Face hub id"

_CLOSE = 0.8  # how alike a name must be to an alias, from 0 to 1, to be taken for that one misspelt


# An OSError too, because that is what transformers raises for a name that leads nowhere.
class ModelNotFoundError(LegatoError, OSError):
    """A name that leads to no model. The message says which forms of name there are."""


@dataclass(frozen=True)
class ModelSource:
    """What a name turned out to mean."""

    kind: Literal["alias", "folder", "gguf", "hub"]
    name: str  # as given
    location: str  # what transformers loads from: a folder, or a hub id
    gguf_file: str | None  # the file in that folder, for kind "gguf"


def resolve(name: ModelName) -> ModelSource:
    """Finds out what `name` means; loads nothing and asks no network.

    In this order: an alias (`./smollm2` names the folder instead), an existing folder, an existing GGUF file,
    a hub id. A `Path` is always a folder or a file.

    Raises `ModelNotFoundError` for an alias that was not pulled or is misspelt, for a file that is not GGUF, and for
    what is plainly a path but does not exist.
    """
    text = os.fspath(name)
    if not text:
        raise ModelNotFoundError(f"the model's name is empty: give {FORMS}")
    if isinstance(name, str) and name in CATALOG:
        return _resolve_alias(name)
    path = Path(text).expanduser()
    if path.is_dir():
        return ModelSource("folder", text, str(path), None)
    if path.is_file():
        return _resolve_file(text, path)
    if isinstance(name, os.PathLike) or _looks_like_path(text):
        raise ModelNotFoundError(f"no model at {text!r}: there is no such file or folder")
    if "/" not in text and (meant := get_close_matches(text.lower(), CATALOG, 1, _CLOSE)):
        # To ask the hub first, again and again where it does not answer, takes half a minute.
        raise ModelNotFoundError(f"no model {text!r}: give {FORMS}. Is {meant[0]} meant?")
    return ModelSource("hub", text, text, None)


def from_pretrained_kwargs(source: ModelSource, **kwargs: Any) -> dict[str, Any]:
    """What a transformers model class needs to load `source.location`, beyond it: `kwargs` and more.

    GGUF weights are dequantized unless the caller gives a `quantization_config`.
    """
    if source.gguf_file is None:
        return kwargs
    from transformers import GgufConfig

    return {"quantization_config": GgufConfig(dequantize=True), "gguf_file": source.gguf_file} | kwargs


def torch_dtype(name: str) -> "torch.dtype":
    """The floating-point type of torch that is called so, for instance "float32".

    Raises `InvalidValueError` for any other name.
    """
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise refuse("dtype", name, "a floating-point type of torch, like float32 or bfloat16")
    return dtype


def load_model(name: ModelName, *args: Any, **kwargs: Any) -> "PreTrainedModel":
    """The causal language model called `name` (see `resolve`); the rest goes to its `from_pretrained`.

    Raises `ModelNotFoundError`, `InvalidValueError` for a GPU that is not there, and what transformers raises for a
    model that it finds but cannot load.
    """
    source = resolve(name)
    import torch
    from transformers import AutoModelForCausalLM

    device = kwargs.get("device_map")
    if str(device).startswith("cuda") and not torch.cuda.is_available():
        raise InvalidValueError(f"device={str(device)!r} is not to be had: torch {torch.__version__} sees no CUDA here")

    with _hub_errors_explained(source):
        arguments = from_pretrained_kwargs(source, **kwargs)
        return AutoModelForCausalLM.from_pretrained(source.location, *args, **arguments)


def load_tokenizer(name: ModelName, *args: Any, **kwargs: Any) -> "PreTrainedTokenizerBase":
    """The tokenizer of the model called `name` (see `resolve`); the rest goes to its `from_pretrained`.

    Raises as `load_model` does.
    """
    source = resolve(name)
    from transformers import AutoTokenizer as TransformersAutoTokenizer

    if source.gguf_file is not None:
        kwargs = {"gguf_file": source.gguf_file} | kwargs
    with _hub_errors_explained(source):
        return TransformersAutoTokenizer.from_pretrained(source.location, *args, **kwargs)


class AutoTokenizer:
    """transformers' `AutoTokenizer`, for every form of name that `resolve` knows."""

    @staticmethod
    def from_pretrained(
        pretrained_model_name_or_path: ModelName, *inputs: Any, **kwargs: Any
    ) -> "PreTrainedTokenizerBase":
        """The same as `load_tokenizer`."""
        return load_tokenizer(pretrained_model_name_or_path, *inputs, **kwargs)


class AutoConfig:
    """transformers' `AutoConfig`, for every form of name that `resolve` knows."""

    @staticmethod
    def from_pretrained(pretrained_model_name_or_path: ModelName, *inputs: Any, **kwargs: Any) -> Any:
        """The config of the model called so; the rest goes to transformers. Raises as `load_model` does."""
        source = resolve(pretrained_model_name_or_path)
        from transformers import AutoConfig as TransformersAutoConfig

        if source.gguf_file is not None:
            kwargs = {"gguf_file": source.gguf_file} | kwargs
        with _hub_errors_explained(source):
            return TransformersAutoConfig.from_pretrained(source.location, *inputs, **kwargs)


def _resolve_alias(name: str) -> ModelSource:
    folder = CATALOG[name].folder
    if not folder.is_dir():
        raise ModelNotFoundError(f"{name} is not on this machine yet: run `legato pull {name}` first")
    return ModelSource("alias", name, str(folder), None)


def _resolve_file(text: str, path: Path) -> ModelSource:
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelNotFoundError(
                f"{text!r} is not a GGUF file: give a .gguf file, or the folder that holds config.json"
            )
    path = path.absolute()
    return ModelSource("gguf", text, str(path.parent), path.name)


def _looks_like_path(text: str) -> bool:
    starts = ("/", "./", "../", "~", os.sep)
    return text.startswith(starts) or text.endswith(".gguf") or text.count("/") > 1


@contextmanager
def _hub_errors_explained(source: ModelSource) -> Iterator[None]:
    """Adds the other forms of name to the error of a hub id that cannot be had: it may be one misspelt."""
    try:
        yield
    except OSError as error:
        # One with a number comes from this machine: disk full, no access.
        if source.kind != "hub" or error.errno is not None:
            raise
        reason = str(error).partition("\n")[0]
        raise ModelNotFoundError(f"no model {source.name!r}: give {FORMS}. As a hub id it failed: {reason}") from error
