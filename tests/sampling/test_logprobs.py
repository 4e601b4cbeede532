"""Log-probabilities of new tokens, of prompts and of given texts, against transformers' scores."""

from typing import Any

import pytest
import torch
from torch import Tensor

from legato import LLM, ContinuousBatchingConfig, GenerationConfig, InvalidValueError, RequestStatus, enable
from legato.request import RequestSpec
from tests.parity.families import tiny_model

PROMPTS = [[5, 17, 80, 3, 44, 9, 61, 17, 80], [40, 41], [9], [(7 * i) % 90 + 3 for i in range(50)]]
TOLERANCE = 1e-4


def own_logprobs(model: Any, tokens: list[int]) -> Tensor:
    """Of what comes after each token, [tokens, vocabulary]."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].double().log_softmax(-1)


def manager_of(family: str = "llama", **config: Any) -> Any:
    settings = {"page_size": 4, "num_blocks": 100, "safety_margin": 0.0, "max_batch_tokens": 64, **config}
    generation = GenerationConfig(eos_token_id=-1, pad_token_id=0)
    return enable(tiny_model(family)).init_continuous_batching(generation, ContinuousBatchingConfig(**settings))


def run(manager: Any, requests: list[dict[str, Any]]) -> list[Any]:
    with manager.session():
        ids = [manager.add_request(prompt, max_new_tokens=8, **r) for prompt, r in zip(PROMPTS, requests, strict=True)]
        return [manager.get_result(request_id, timeout=60) for request_id in ids]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_new_tokens(fused: bool, mode: str, temperature: float) -> None:
    asked = [{"logprobs": n, "logprobs_mode": mode, "temperature": temperature, "top_k": 0} for n in (0, 1, 5, 20)]
    outputs = run(manager_of(fused_decoder=fused), asked)
    model = tiny_model("llama")
    for prompt, request, output in zip(PROMPTS, asked, outputs, strict=True):
        expected = own_logprobs(model, prompt + output.generated_tokens)[len(prompt) - 1 : -1]
        if mode == "processed" and temperature:
            expected = (expected / temperature).log_softmax(-1)
        chosen = expected.gather(1, torch.tensor(output.generated_tokens)[:, None])[:, 0]
        assert output.logprobs == pytest.approx(chosen.tolist(), abs=TOLERANCE)
        assert len(output.top_logprobs) == (8 if request["logprobs"] else 0)
        for top, row in zip(output.top_logprobs, expected, strict=False):
            values, ids = row.topk(request["logprobs"])
            assert [token for token, _ in top] == ids.tolist()
            assert [logprob for _, logprob in top] == pytest.approx(values.tolist(), abs=TOLERANCE)


def test_processed_ones_are_those_of_what_was_drawn_from() -> None:
    asked = [{"logprobs": 5, "temperature": 0.7, "top_k": 3, "repetition_penalty": 1.5, "seed": i} for i in range(4)]
    for output in run(manager_of(), asked):
        for logprob, token, top in zip(output.logprobs, output.generated_tokens, output.top_logprobs, strict=True):
            kept = dict(top)  # those that top_k left, and no others
            assert len(kept) == 3 and kept[token] == pytest.approx(logprob, abs=1e-5)
            assert sum(torch.tensor(list(kept.values())).exp()) == pytest.approx(1.0, abs=1e-4)


def test_only_those_who_ask_get_any() -> None:
    outputs = run(manager_of(), [{}, {"logprobs": 2}, {"temperature": 1.0}, {"prompt_logprobs": 0}])
    assert [len(output.logprobs) for output in outputs] == [0, 8, 0, 0]
    assert [output.prompt_logprobs is None for output in outputs] == [True, True, True, False]
    outputs = run(manager_of(return_logprobs=True), [{}, {"logprobs": 2}, {"temperature": 1.0}, {}])
    assert [len(output.logprobs) for output in outputs] == [8] * 4
    assert [len(output.top_logprobs) for output in outputs] == [0, 8, 0, 0]


def check_prompt_logprobs(model: Any, prompt: list[int], output: Any, start: int, top: int) -> None:
    expected = own_logprobs(model, prompt)
    assert output.status is RequestStatus.FINISHED, output.error
    assert output.prompt_logprobs[:start] == [None] * start and len(output.prompt_logprobs) == len(prompt)
    for position in range(start, len(prompt)):
        found, row = output.prompt_logprobs[position], expected[position - 1]
        assert found.logprob == pytest.approx(float(row[prompt[position]]), abs=TOLERANCE)
        assert [logprob for _, logprob in found.top] == pytest.approx(row.topk(top).values.tolist(), abs=TOLERANCE)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
@pytest.mark.parametrize(
    "config", [{}, {"max_requests_per_batch": 3}, {"num_blocks": 16}, {"scheduler_type": "prefill_first"}]
)
def test_prompts(family: str, config: dict[str, Any]) -> None:
    """Whatever is cached, however few rows of logits a pass has, beside requests that just generate."""
    manager = manager_of(family, **config)
    for _ in range(2):  # the second time, all of it is cached
        outputs = run(
            manager, [{"prompt_logprobs": 0}, {"prompt_logprobs": 3}, {"prompt_logprobs": 1}, {"prompt_logprobs": 2}]
        )
        for prompt, output, top in zip(PROMPTS, outputs, (0, 3, 1, 2), strict=True):
            check_prompt_logprobs(tiny_model(family), prompt, output, 1, top)
            assert len(output.generated_tokens) == 8
        run(manager, [{}, {"temperature": 1.0}, {}, {"n": 2}])


def test_scores_generate_nothing_and_compute_shared_prefixes_once() -> None:
    manager = manager_of()
    context, endings = PROMPTS[3], [[4, 5, 6], [4, 9], [77]]
    specs = [RequestSpec([*context, *ending], score_from=len(context)) for ending in endings]
    with manager.session():
        outputs = dict(manager.as_completed(specs))
    for index, ending in enumerate(endings):
        assert outputs[index].generated_tokens == [] and outputs[index].finish_reason == "length"
        check_prompt_logprobs(tiny_model("llama"), [*context, *ending], outputs[index], len(context), 0)
    assert manager.stats.num_prompt_tokens < len(context) + 3 * 8
    assert manager.stats.cache_used_share == 0


def test_a_text_as_long_as_the_model_takes_can_be_scored() -> None:
    manager = manager_of(num_blocks=80)
    text = [(11 * i) % 90 + 3 for i in range(256)]
    with manager.session():
        ((_, output),) = manager.as_completed([RequestSpec(text, score_from=200)])
    check_prompt_logprobs(tiny_model("llama"), text, output, 200, 0)


@pytest.mark.parametrize("space", [0.0, 0.1])
def test_scores_survive_being_preempted(space: float) -> None:
    manager = manager_of(num_blocks=20, cpu_offload_space=space, max_batch_tokens=16, allow_block_sharing=False)
    with manager.session():
        ids = [manager.add_request(PROMPTS[3][i:], max_new_tokens=25, prompt_logprobs=1) for i in range(6)]
        outputs = [manager.get_result(request_id, timeout=60) for request_id in ids]
    for i, output in enumerate(outputs):
        check_prompt_logprobs(tiny_model("llama"), PROMPTS[3][i:], output, 1, 1)


@pytest.mark.slow
def test_texts(smollm2: Any, smollm2_tokenizer: Any) -> None:
    prompts = ["The capital of France is", "2 + 2 =", "Hello"]
    completions = [" Paris, of course.", " 4", " there, how are you?"]
    with LLM(smollm2, smollm2_tokenizer) as llm:
        outputs = llm.score(prompts, completions, top=1, use_tqdm=False)
        (ids,) = llm.score([[504, 3575]], [[282, 4649]], use_tqdm=False)
        with pytest.raises(InvalidValueError, match="completions has 1 entries for 2 prompts"):
            llm.score(["a", "b"], ["c"])
    for prompt, completion, output in zip(prompts, completions, outputs, strict=True):
        whole = smollm2_tokenizer(prompt + completion)["input_ids"]
        start = len(smollm2_tokenizer(prompt)["input_ids"])
        assert output.prompt_ids == whole
        check_prompt_logprobs(smollm2, whole, output, start, 1)
    check_prompt_logprobs(smollm2, [504, 3575, 282, 4649], ids, 2, 0)
