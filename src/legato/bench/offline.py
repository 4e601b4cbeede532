"""Throughput of a fixed set of requests, all submitted at once."""

import statistics
import time
from collections.abc import Callable
from typing import Any

from tqdm import tqdm
from transformers import GenerationConfig

from legato.bench.settings import EngineSettings
from legato.bench.workload import check_workload
from legato.errors import InvalidValueError
from legato.models import load_model, torch_dtype
from legato.progress import completed
from legato.request import RequestSpec

PEER_NUM_BLOCKS = 1536
WARM_UP = {"input_ids": [1, 2, 3], "max_new_tokens": 4}

Request = dict[str, Any]


def run_offline(
    engine: str, model_name: str, workload: dict[str, Any], settings: EngineSettings, repeat: int = 1
) -> dict[str, Any]:
    """Run a workload on an engine, after a short request that is not timed; progress goes to stderr.

    Args:
        engine: "legato", or "transformers" for its own continuous batching.
        workload: {"name", "requests": [{"prompt_ids", "max_new_tokens"}]}.
        settings: the engine's; transformers has no quantization or kv_cache_dtype.
        repeat: runs; each begins with an empty cache.

    Returns:
        {"engine", "workload", "dtype", "quantization", "kv_cache_dtype", "tokens", "seconds", "tokens_per_second",
        "runs"}: tokens are new ones, seconds the median of the runs, whose own seconds "runs" lists.

    Raises:
        InvalidValueError: the workload or a setting is not of that form.
    """
    check_workload(workload)
    run = ENGINES[engine]
    model = load_model(model_name, dtype=torch_dtype(settings.dtype)).eval()
    generation = GenerationConfig(max_new_tokens=256, do_sample=False, eos_token_id=-1, pad_token_id=0)
    runs = [run(model, generation, workload["requests"], settings) for _ in range(repeat)]
    tokens, seconds = runs[0][0], statistics.median(seconds for _, seconds in runs)
    return {
        "engine": engine,
        "workload": workload["name"],
        "dtype": settings.dtype,
        "quantization": settings.quantization,
        "kv_cache_dtype": settings.kv_cache_dtype,
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 1),
        "runs": [round(seconds, 3) for _, seconds in runs],
    }


def _run_legato(
    model: Any, generation: GenerationConfig, requests: list[Request], settings: EngineSettings
) -> tuple[int, float]:
    """(new tokens, seconds)."""
    from legato.model_api import enable

    specs = [RequestSpec(request["prompt_ids"], request["max_new_tokens"]) for request in requests]
    with enable(model).continuous_batching_context_manager(generation, settings.config()) as manager:
        manager.add_request(**WARM_UP)
        manager.get_result()
        start, tokens = time.perf_counter(), 0
        for index, output in completed(manager, specs, show=True):
            if output.error is not None:
                raise InvalidValueError(f"request {index} of the workload cannot be served: {output.error}")
            tokens += len(output.generated_tokens)
        return tokens, time.perf_counter() - start


def _run_transformers(
    model: Any, generation: GenerationConfig, requests: list[Request], settings: EngineSettings
) -> tuple[int, float]:
    """The peer, with the settings of its published figures; nothing else in Legato uses it."""
    from transformers import ContinuousBatchingConfig as PeerConfig

    if settings.quantization is not None or settings.kv_cache_dtype is not None:
        raise InvalidValueError("transformers runs without quantization and kv_cache_dtype only")
    page = "page_size" if hasattr(PeerConfig, "page_size") else "block_size"  # as of its release
    figures: dict[str, Any] = {page: settings.page_size, "max_batch_tokens": settings.max_batch_tokens}
    config = PeerConfig(num_blocks=PEER_NUM_BLOCKS, **figures)
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=config
    ) as manager:
        manager.add_request(**WARM_UP)
        next(iter(manager))
        start, tokens = time.perf_counter(), 0
        for i, request in enumerate(requests):
            manager.add_request(
                input_ids=request["prompt_ids"], request_id=str(i), max_new_tokens=request["max_new_tokens"]
            )
        outputs = iter(manager)
        for _ in tqdm(range(len(requests)), unit="req", disable=None, dynamic_ncols=True):
            tokens += len(next(outputs).generated_tokens)
        return tokens, time.perf_counter() - start


ENGINES: dict[str, Callable[..., tuple[int, float]]] = {"legato": _run_legato, "transformers": _run_transformers}
