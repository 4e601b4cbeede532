"""The decoder follows the model's weights, and the model knows nothing of it."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from legato import ContinuousBatchingConfig, EngineError, GenerationConfig, SamplingParams, WorkloadHints, enable
from legato.decoder.fusing import FusedModel
from legato.decoder.spec import NotFusable
from legato.decoder.weights import Piece
from legato.engine.assemble import assemble
from legato.request import Request
from tests.decoder.serving import fused_logits, own_logits, read
from tests.parity.families import FUSED, tiny_model
from tests.parity.reference import reference

PROMPT = [5, 17, 80, 3, 44, 9, 61]
CONFIG = ContinuousBatchingConfig(page_size=4, num_blocks=64, max_batch_tokens=64, fused_decoder=True)


def train_a_step(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    ids = torch.tensor([PROMPT])
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def replace_a_parameter(model: Any) -> None:
    projection = model.model.layers[1].self_attn.o_proj
    projection.weight = nn.Parameter(0.2 * torch.randn_like(projection.weight))


def load_others(model: Any, assign: bool) -> None:
    model.load_state_dict({name: value + 0.05 for name, value in model.state_dict().items()}, assign=assign)


CHANGES: dict[str, Callable[[Any], None]] = {
    "an optimizer's step": train_a_step,
    "a replaced parameter": replace_a_parameter,
    "load_state_dict": lambda model: load_others(model, assign=False),
    "load_state_dict that assigns": lambda model: load_others(model, assign=True),
}


def check_same(fused: FusedModel, model: Any) -> None:
    (ours,) = fused_logits(fused, [PROMPT])
    torch.testing.assert_close(ours, own_logits(model, PROMPT), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe", "phi3"])
@pytest.mark.parametrize("change", CHANGES)
def test_refresh_follows(change: str, family: str, dtype: torch.dtype) -> None:
    model = tiny_model(family, tie_word_embeddings=True).to(dtype)
    fused = read(model)
    assert not fused.weights.refresh()
    before, version = own_logits(model, PROMPT), fused.weights.version()
    CHANGES[change](model)
    assert fused.weights.version() != version
    assert fused.weights.refresh()
    assert not fused.weights.refresh()
    assert float((own_logits(model, PROMPT) - before).abs().max()) > 1e-2, "nothing changed: the test lost its point"
    check_same(fused, copy.deepcopy(model).float())


def test_only_what_moved_is_packed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    fused = read(model)
    renewed: list[Piece] = []
    monkeypatch.setattr(Piece, "renew", lambda piece: renewed.append(piece))
    with torch.no_grad():
        model.model.layers[2].self_attn.v_proj.weight.mul_(2)
        model.model.norm.weight.mul_(2)
    fused.weights.refresh()
    assert renewed == [fused.weights.layers[2].qkv, fused.weights.norm]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_repack_follows_what_leaves_no_trace(dtype: torch.dtype) -> None:
    model = tiny_model("llama").to(dtype)
    fused = read(model)
    for parameter in model.parameters():
        parameter.data.mul_(1.1)
    fused.weights.repack()
    check_same(fused, model.float())


def test_another_shape_is_refused() -> None:
    model = tiny_model("llama")
    fused = read(model)
    model.model.layers[0].mlp.up_proj.weight = nn.Parameter(torch.zeros(50, 32))
    with pytest.raises(NotFusable, match=r"changed its shape from \(48, 32\) to \(50, 32\)"):
        fused.weights.refresh()


def test_inference_tensors_are_followed_by_identity() -> None:
    model = tiny_model("llama")
    with torch.inference_mode():
        model.load_state_dict({k: v + 0.01 for k, v in model.state_dict().items()}, assign=True)
    fused = read(model)
    assert not fused.weights.refresh()
    check_same(fused, model)


# Through the engine


@pytest.fixture
def manager_of() -> Iterator[Callable[[Any], Any]]:
    managers = []

    def make(model: Any) -> Any:
        managers.append(enable(model).init_continuous_batching(GenerationConfig(do_sample=False), CONFIG))
        managers[-1].start()
        return managers[-1]

    yield make
    for manager in managers:
        manager.stop(hard_stop=True)
        manager.destroy()


def generate(manager: Any, prompt: list[int] = PROMPT) -> list[int]:
    request_id = manager.add_request(prompt, max_new_tokens=12)
    tokens: list[int] = manager.get_result(request_id, timeout=60).generated_tokens
    return tokens


def write_through_data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))


def replace_a_module(model: Any) -> None:
    other = nn.Linear(32, 32, bias=True)
    model.model.layers[1].self_attn.q_proj = other
    for name in ("k_proj", "v_proj"):
        proj = getattr(model.model.layers[1].self_attn, name)
        proj.bias = nn.Parameter(torch.randn(proj.out_features))


@pytest.mark.parametrize("change", [*CHANGES.values(), write_through_data, replace_a_module])
def test_the_next_generation_uses_the_new_weights(change: Any, manager_of: Callable[[Any], Any]) -> None:
    model = tiny_model("llama")
    manager = manager_of(model)
    before = generate(manager)
    assert before == reference(model, PROMPT, 12).tokens
    with manager.pause():
        change(model)
    expected = reference(model, PROMPT, 12).tokens
    assert expected != before, "the same tokens: the test lost its point"
    assert generate(manager) == expected


def write_one_row_through_data(model: Any) -> None:
    model.model.embed_tokens.weight.data[PROMPT[-1]] += 5


def step_of_a_fused_optimizer(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    ids = torch.tensor([PROMPT])
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()


def turn_otherwise(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.3)


def scale_otherwise(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling *= 3


UNSEEN = [write_one_row_through_data, step_of_a_fused_optimizer, turn_otherwise, scale_otherwise]


@pytest.mark.parametrize("change", [step_of_a_fused_optimizer, turn_otherwise, scale_otherwise])
def test_changes_while_the_engine_is_idle_are_seen(change: Any, manager_of: Callable[[Any], Any]) -> None:
    model = tiny_model("llama")
    manager = manager_of(model)
    before = generate(manager)
    change(model)
    expected = reference(model, PROMPT, 12).tokens
    assert expected != before, "the same tokens: the test lost its point"
    assert generate(manager) == expected


@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize("change", [*UNSEEN, write_through_data])
def test_whatever_changes_in_a_pause_counts(change: Any, sharing: bool, manager_of: Callable[[Any], Any]) -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    manager = manager_of(model)
    before = generate(manager, PROMPT)
    with manager.pause():
        change(model)
    prompt = PROMPT if sharing else PROMPT[1:]
    expected = reference(model, prompt, 12).tokens
    assert expected != before, "the same tokens: the test lost its point"
    assert generate(manager, prompt) == expected


@pytest.mark.parametrize("change", [*UNSEEN, write_through_data, train_a_step])
def test_a_pause_counts_for_requests_that_run(change: Any) -> None:
    """Their K and V are of the old weights, what comes after of the new: as the reference path has it."""
    answers = []
    for fused in (True, False, None):
        torch.manual_seed(1)
        model = tiny_model("llama", tie_word_embeddings=True)
        engine, _ = assemble(model, replace(CONFIG, fused_decoder=bool(fused)), WorkloadHints(), samples=False)
        engine.submit(Request("0", PROMPT, SamplingParams(), 40, frozenset(), 0, False, 0.0, list(PROMPT)))
        steps = 0
        while engine.has_work:
            outputs = engine.step()
            steps += 1
            if steps == 8 and fused is not None:
                change(model)
                engine.forget_prefixes()
        answers.append(outputs[-1].generated_tokens)
    assert answers[0] == answers[1]
    assert answers[0][:8] == answers[2][:8] and answers[0] != answers[2], "nothing changed: the test lost its point"


@pytest.mark.parametrize("late", ["adapter", "hook"])
def test_a_model_that_outgrows_the_decoder_is_an_error_with_the_reason(
    late: str, manager_of: Callable[[Any], Any]
) -> None:
    model = tiny_model("llama")
    manager = manager_of(model)
    generate(manager)
    if late == "hook":
        model.model.layers[0].register_forward_hook(lambda *_: None)
    else:
        model.model.layers[0].self_attn.o_proj = nn.Sequential(model.model.layers[0].self_attn.o_proj)
    with pytest.raises(EngineError, match=r"has changed since the engine was made.*layer 0.*fused_decoder=False"):
        generate(manager)


@pytest.mark.parametrize("family", FUSED)
def test_the_model_is_untouched_and_trains(family: str) -> None:
    model = enable(tiny_model(family))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    pointers = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    modules = [(name, type(module)) for name, module in model.named_modules()]
    before = reference(model, PROMPT, 8)
    model.train()
    generation = GenerationConfig(max_new_tokens=8, do_sample=False)
    (output,) = model.generate_batch([PROMPT], generation, CONFIG).values()
    assert model.training
    model.eval()
    assert output.generated_tokens == before.tokens
    assert reference(model, PROMPT, 8) == before
    assert [(name, type(module)) for name, module in model.named_modules()] == modules
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == pointers
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.requires_grad and p.grad is None and p.is_leaf for p in model.parameters())
    train_a_step(model)
    (output,) = model.generate_batch([PROMPT], generation, CONFIG).values()
    assert output.generated_tokens == reference(model, PROMPT, 8).tokens != before.tokens
