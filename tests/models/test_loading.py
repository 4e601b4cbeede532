"""Names of models: what they mean, and that what they mean loads."""

from pathlib import Path

import pytest
import torch
from transformers import GgufConfig, LlamaConfig, LlamaForCausalLM

from legato.models import (
    AutoTokenizer,
    ModelNotFoundError,
    ModelSource,
    from_pretrained_kwargs,
    list_models,
    load_model,
    load_tokenizer,
    resolve,
)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A tiny random llama, saved as a folder."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.fixture
def smollm2() -> str:
    return pulled("smollm2")


def pulled(alias: str) -> str:
    if next(entry.folder for entry in list_models() if entry.model.alias == alias) is None:
        pytest.fail(f"this test needs the real model: run `legato pull {alias}` (`make test` does) first")
    return alias


def test_folder(llama: Path) -> None:
    assert resolve(str(llama)) == resolve(llama) == ModelSource("folder", str(llama), str(llama), None)
    model = load_model(llama, dtype=torch.float64)
    assert isinstance(model, LlamaForCausalLM)
    assert model.dtype == torch.float64


def test_gguf_file(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny_gguf.parent)
    assert resolve(tiny_gguf.name) == ModelSource("gguf", "tiny.gguf", str(tiny_gguf.parent), "tiny.gguf")
    model = load_model(tiny_gguf)
    assert isinstance(model, LlamaForCausalLM)
    assert {type(module) for module in model.modules() if "Linear" in type(module).__name__} == {torch.nn.Linear}
    tokenizer = AutoTokenizer.from_pretrained("tiny.gguf")
    assert tokenizer.decode(tokenizer("héllo").input_ids) == "héllo"


def test_callers_quantization_config_wins(tiny_gguf: Path) -> None:
    source = resolve(tiny_gguf)
    assert from_pretrained_kwargs(source)["quantization_config"].dequantize
    mine = GgufConfig(dequantize=False)
    assert from_pretrained_kwargs(source, quantization_config=mine)["quantization_config"] is mine


def test_hub_ids_are_left_to_transformers() -> None:
    for name in ("gpt2", "some-org/some-model"):
        assert resolve(name) == ModelSource("hub", name, name, None)


def test_alias_wins_over_a_folder_of_that_name(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve("./smollm2").kind == resolve(Path("smollm2")).kind == "folder"
    with pytest.raises(ModelNotFoundError, match="run `legato pull smollm2` first"):
        resolve("smollm2")


@pytest.mark.parametrize("name", ["/no/such", "./no", "../no", "~/no/such", "no.gguf", "a/b/c", Path("gpt2")])
def test_path_that_does_not_exist(name: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError, match="there is no such file or folder"):
        resolve(name)


def test_empty_name() -> None:
    with pytest.raises(ModelNotFoundError, match="the model's name is empty"):
        resolve("")


def test_file_that_is_not_gguf(llama: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"model.safetensors' is not a GGUF file"):
        resolve(llama / "model.safetensors")


@pytest.mark.parametrize("load", [load_model, load_tokenizer])
def test_unknown_name_is_told_of_the_aliases(load) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no model 'nobody': give an alias \(smollm2, gemma3\)") as failure:
        load("nobody", local_files_only=True)
    assert isinstance(failure.value.__cause__, OSError)


@pytest.mark.parametrize(("name", "meant"), [("smolm2", "smollm2"), ("SmolLM2", "smollm2"), ("gemma", "gemma3")])
def test_a_misspelt_alias_is_told_at_once(name: str, meant: str) -> None:
    with pytest.raises(ModelNotFoundError, match=f"no model {name!r}: .* Is {meant} meant?"):
        resolve(name)


@pytest.mark.parametrize("name", ["gpt2", "HuggingFaceTB/SmolLM2-135M-Instruct", "google/gemma-3-270m", "ai/gemma3"])
def test_other_names_are_the_hubs(name: str) -> None:
    assert resolve(name).kind == "hub"


def test_other_errors_of_transformers_are_left_alone(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Unrecognized model"):
        load_model(tmp_path)


def test_smollm2_chats(smollm2: str) -> None:
    tokenizer = load_tokenizer(smollm2)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert tokenizer.model_max_length == 8192
    assert tokenizer.tokenize("see  12") == ["see", "ĠĠ", "1", "2"]
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    assert prompt.startswith("<|im_start|>system\n")
    assert prompt.endswith("<|im_end|>\n<|im_start|>assistant\n")

    model = load_model(smollm2, dtype=torch.float32)
    assert model.generation_config.eos_token_id == 2
    inputs = tokenizer(prompt, return_tensors="pt")
    answer = model.generate(**inputs, max_new_tokens=8)[0, inputs.input_ids.shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


def test_gemma3_is_a_base_model_with_sliding_layers() -> None:
    tokenizer = load_tokenizer(pulled("gemma3"))
    assert tokenizer.chat_template is None
    inputs = tokenizer("Monday, Tuesday,", return_tensors="pt")
    assert inputs.input_ids[0, 0] == tokenizer.bos_token_id

    model = load_model("gemma3", dtype=torch.float32)
    assert set(model.config.layer_types) == {"sliding_attention", "full_attention"}
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 1
    answer = model.generate(**inputs, max_new_tokens=2)[0, inputs.input_ids.shape[1] :]
    assert tokenizer.decode(answer) == " Wednesday,"
