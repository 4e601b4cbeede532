"""Throughput of a fixed set of requests, all submitted at once."""

import time
from collections.abc import Callable
from typing import Any

from transformers import GenerationConfig

from legato.checks import check_int, refuse, token_ids
from legato.errors import InvalidValueError
from legato.models import load_model, torch_dtype

PEER_NUM_BLOCKS = 1536


def run_offline(
    engine: str, model_name: str, workload: dict[str, Any], dtype: str, page_size: int, max_batch_tokens: int
) -> dict[str, Any]:
    """Run a workload on an engine.

    Args:
        engine: "legato", or "transformers" for its own continuous batching.
        workload: {"name", "requests": [{"prompt_ids", "max_new_tokens"}]}.
        dtype: name of a torch type.

    Returns:
        {"engine", "workload", "dtype", "tokens", "seconds", "tokens_per_second"}; tokens are new ones.

    Raises:
        InvalidValueError: the workload or the type is not of that form.
    """
    check_workload(workload)
    model = load_model(model_name, dtype=torch_dtype(dtype)).eval()
    generation = GenerationConfig(max_new_tokens=256, do_sample=False, eos_token_id=-1, pad_token_id=0)
    tokens, seconds = ENGINES[engine](model, generation, workload["requests"], page_size, max_batch_tokens)
    return {
        "engine": engine,
        "workload": workload["name"],
        "dtype": dtype,
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 1),
    }


def check_workload(workload: Any) -> None:
    """Raises `InvalidValueError` for anything that is not of the form `run_offline` takes."""
    requests = workload.get("requests") if isinstance(workload, dict) else None
    if not isinstance(requests, list) or not requests or not isinstance(workload.get("name"), str):
        raise InvalidValueError("the workload must be an object with a name and a list of requests")
    for request in requests:
        if not isinstance(request, dict) or not {"prompt_ids", "max_new_tokens"} <= set(request):
            raise refuse("requests", request, "objects with prompt_ids and max_new_tokens")
        check_int("max_new_tokens", request["max_new_tokens"], 1)
        if not token_ids("prompt_ids", request["prompt_ids"]):
            raise refuse("prompt_ids", [], "at least 1 token id")


def _run_legato(
    model: Any, generation: GenerationConfig, requests: list[dict[str, Any]], page_size: int, max_batch_tokens: int
) -> tuple[int, float]:
    from legato.config import ContinuousBatchingConfig
    from legato.model_api import enable

    config = ContinuousBatchingConfig(page_size=page_size, max_batch_tokens=max_batch_tokens)
    manager = enable(model).continuous_batching_context_manager(generation, config)
    return _measure(manager, requests)


def _run_transformers(
    model: Any, generation: GenerationConfig, requests: list[dict[str, Any]], page_size: int, max_batch_tokens: int
) -> tuple[int, float]:
    """The peer, with the settings of its published figures; nothing else in Legato uses it."""
    from transformers import ContinuousBatchingConfig as PeerConfig

    page = "page_size" if hasattr(PeerConfig, "page_size") else "block_size"  # as of its release
    settings: dict[str, Any] = {page: page_size, "num_blocks": PEER_NUM_BLOCKS, "max_batch_tokens": max_batch_tokens}
    config = PeerConfig(**settings)
    manager = model.continuous_batching_context_manager(generation_config=generation, continuous_batching_config=config)
    return _measure(manager, requests)


def _measure(context: Any, requests: list[dict[str, Any]]) -> tuple[int, float]:
    """(new tokens, seconds) of all requests through a manager of either kind."""
    with context as manager:
        start, tokens = time.perf_counter(), 0
        for i, request in enumerate(requests):
            manager.add_request(
                input_ids=request["prompt_ids"], request_id=str(i), max_new_tokens=request["max_new_tokens"]
            )
        for done, output in enumerate(manager, start=1):
            tokens += len(output.generated_tokens)
            if done == len(requests):
                break
        return tokens, time.perf_counter() - start


ENGINES: dict[str, Callable[..., tuple[int, float]]] = {"legato": _run_legato, "transformers": _run_transformers}
