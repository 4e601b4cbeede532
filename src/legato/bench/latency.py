"""How long requests wait for their first token and for each next one, at several batch sizes."""

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from tqdm import tqdm
from transformers import GenerationConfig

from legato.bench.settings import EngineSettings
from legato.config import WorkloadHints
from legato.errors import InvalidValueError
from legato.manager import ContinuousBatchingManager
from legato.model_api import enable
from legato.models import load_model, torch_dtype
from legato.request import GenerationOutput, RequestSpec

FIRST_TOKEN_ID = 3  # those below are special in many vocabularies
WARM_UP_TOKENS = 4
TABLE_HEADER = ("batch", "TTFT ms", "p90", "p99", "inter-token ms", "p90", "p99", "tok/s")
TABLE_WIDTHS = (5, 9, 9, 9, 14, 9, 9, 8)


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of times, in milliseconds."""

    median: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Percentiles":
        """Of at least one time; between two neighbours in proportion."""
        return cls(*(round(float(value) * 1e3, 2) for value in np.percentile(seconds, (50, 90, 99))))


@dataclass(frozen=True)
class Latency:
    """What was measured at one batch size.

    Attributes:
        batch: requests at once.
        prompt_tokens, new_tokens: of each.
        ttft_ms: from a request's submission to its first token.
        inter_token_ms: from each token of a request to its next; None where there is none.
        tokens_per_second: new tokens of all requests, from the first submission to the last token.
    """

    batch: int
    prompt_tokens: int
    new_tokens: int
    ttft_ms: Percentiles
    inter_token_ms: Percentiles | None
    tokens_per_second: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def row(self) -> tuple[str, ...]:
        """For a table under `TABLE_HEADER`."""
        cells = [*_cells(self.ttft_ms), *_cells(self.inter_token_ms)]
        return (str(self.batch), *cells, f"{self.tokens_per_second:.1f}")


def _cells(times: Percentiles | None) -> tuple[str, str, str]:
    if times is None:
        return ("-", "-", "-")
    return (f"{times.median:.1f}", f"{times.p90:.1f}", f"{times.p99:.1f}")


def measure_latency(
    model_name: str,
    batches: Sequence[int],
    prompt_tokens: int,
    new_tokens: int,
    settings: EngineSettings,
    repeat: int,
) -> Iterator[Latency]:
    """Stream batches of requests with random prompts that share nothing; progress goes to stderr.

    Args:
        batches: sizes, measured in this order after a warm-up.
        prompt_tokens, new_tokens: of each request.
        repeat: times that each size is run; its figures are over the requests of all.

    Raises:
        InvalidValueError: a setting, or requests that the model or the cache cannot take.
    """
    model = enable(load_model(model_name, dtype=torch_dtype(settings.dtype)).eval())
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    hints = WorkloadHints(prompt_tokens, new_tokens, max(batches))
    config = settings.config(allow_block_sharing=False)
    prompts = _prompts(max(batches), prompt_tokens, model.get_input_embeddings().num_embeddings)
    total = sum(batches) * new_tokens * repeat
    with (
        model.continuous_batching_context_manager(generation, config, workload_hints=hints) as manager,
        tqdm(total=total, unit="tok", disable=None, dynamic_ncols=True) as bar,
    ):
        warm_up = min(WARM_UP_TOKENS, new_tokens)
        _stream(manager, prompts[:1], warm_up, tqdm(disable=True))
        for batch in batches:
            bar.set_postfix_str(f"batch {batch}")
            start = time.perf_counter()
            outputs = [out for _ in range(repeat) for out in _stream(manager, prompts[:batch], new_tokens, bar)]
            seconds = time.perf_counter() - start
            bar.clear()  # its caller may print now
            yield _latency(outputs, batch, prompt_tokens, new_tokens, seconds)


def _prompts(count: int, length: int, vocab_size: int) -> list[list[int]]:
    rng = random.Random(0)
    return [
        [rng.randrange(min(FIRST_TOKEN_ID, vocab_size - 1), vocab_size) for _ in range(length)] for _ in range(count)
    ]


def _stream(
    manager: ContinuousBatchingManager, prompts: Sequence[list[int]], new_tokens: int, bar: Any
) -> list[GenerationOutput]:
    """Final outputs of all prompts at once."""
    specs = [RequestSpec(prompt, new_tokens, streaming=True, record_timestamps=True) for prompt in prompts]
    finished = []
    for _, output in manager.as_completed(specs):
        if output.error is not None:
            raise InvalidValueError(output.error)
        bar.update()
        if output.is_finished():
            finished.append(output)
    return finished


def _latency(
    outputs: Sequence[GenerationOutput], batch: int, prompt_tokens: int, new_tokens: int, seconds: float
) -> Latency:
    times = [output.timestamps or [] for output in outputs]
    gaps = [later - earlier for stamps in times for earlier, later in itertools.pairwise(stamps)]
    return Latency(
        batch,
        prompt_tokens,
        new_tokens,
        Percentiles.of([stamps[0] - output.created_time for stamps, output in zip(times, outputs, strict=True)]),
        Percentiles.of(gaps) if gaps else None,
        round(sum(map(len, times)) / seconds, 1),
    )
