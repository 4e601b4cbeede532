"""GGUF file -> model folder: `python -m legato.models.conversion GGUF FOLDER [--split-digits]`.

A process of its own, because the conversion needs gigabytes for half a minute and draws progress bars that
the caller did not ask for.
"""

import argparse
import shutil
from pathlib import Path
from typing import Any


def convert(gguf: Path, folder: Path, split_digits: bool) -> None:
    """Writes bfloat16 safetensors, tokenizer and generation config made from `gguf` into `folder`.

    Raises `RuntimeError` when the file does not hold every weight of its architecture, and what transformers
    raises when it cannot read the file.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
        output_loading_info=True,
    )
    model, report = loaded
    # transformers fills these in at random and only warns.
    if unset := report["missing_keys"] | report["mismatched_keys"]:
        raise RuntimeError(f"{gguf.name} lacks these weights: {sorted(map(str, unset))}")
    config = model.config
    # No sampling defaults: greedy unless asked otherwise, so that a result can be reproduced.
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.model_max_length = config.max_position_embeddings
    for how_it_was_loaded in ("is_local", "local_files_only"):  # no business of those who load it next
        tokenizer.init_kwargs.pop(how_it_was_loaded, None)
    if split_digits:
        _split_digits(tokenizer)

    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for weights in folder.glob("*.safetensors"):  # written for the owner only; the cache may be shared
        shutil.copymode(folder / "config.json", weights)


def _split_digits(tokenizer: Any) -> None:
    from tokenizers import pre_tokenizers

    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert a GGUF file to a model folder.")
    parser.add_argument("gguf", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--split-digits", action="store_true")
    options = parser.parse_args()
    convert(options.gguf, options.folder, options.split_digits)


if __name__ == "__main__":
    main()
