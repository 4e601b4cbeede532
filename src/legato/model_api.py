"""Legato's methods on a transformers model."""

import copy
import logging
import os
import types
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from legato.config import ContinuousBatchingConfig, WorkloadHints
from legato.errors import InvalidValueError
from legato.generation import GenerationDefaults
from legato.manager import ContinuousBatchingManager
from legato.models import load_model
from legato.progress import completed_in_order
from legato.request import GenerationOutput, RequestSpec

logger = logging.getLogger(__name__)


@dataclass
class ModelState:
    """What Legato keeps on a model. A copy of the model, or a pickle, starts without.

    Attributes:
        manager: the persistent manager, if any.
    """

    manager: ContinuousBatchingManager | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModelState":
        return ModelState()

    def __reduce__(self) -> tuple[type["ModelState"], tuple[()]]:
        return ModelState, ()


class AutoModelForCausalLM:
    """transformers' class of that name, with Legato's methods on the models it returns."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """Load a model as transformers does; an alias of `legato pull` or a `.gguf` file will also do."""
        return enable(load_model(pretrained_model_name_or_path, *args, **kwargs))


def enable(model: Any) -> Any:
    """Put Legato's methods on a model that is already loaded, wrapped by PEFT or a trainer or not, and return it.

    A deep copy keeps them; a model that comes out of a pickle does not, and needs `enable` again.
    """
    if not hasattr(model, "_legato"):
        model._legato = ModelState()
    for method in (generate_batch, init_continuous_batching, continuous_batching_context_manager):
        setattr(model, method.__name__, types.MethodType(method, model))
    return model


def init_continuous_batching(
    self: Any,
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    workload_hints: WorkloadHints | None = None,
    tokenizer: Any = None,
) -> ContinuousBatchingManager:
    """A manager for this model, not started. See `ContinuousBatchingManager` for arguments and errors."""
    generation_config, continuous_batching_config = _split_configs(generation_config, continuous_batching_config)
    return ContinuousBatchingManager(self, generation_config, continuous_batching_config, workload_hints, tokenizer)


@contextmanager
def continuous_batching_context_manager(
    self: Any,
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    block: bool = True,
    timeout: float | None = None,
    persistent_manager: bool = False,
    warmup: bool = True,
    workload_hints: WorkloadHints | None = None,
    tokenizer: Any = None,
) -> Iterator[ContinuousBatchingManager]:
    """A running manager, stopped and destroyed on leaving.

    Args:
        block, timeout: as of `ContinuousBatchingManager.stop`.
        persistent_manager: keep the manager on the model after stopping it, for the next use with equal settings.
        warmup: nothing needs warming on the reference path; accepted for the paths that do.
        tokenizer: as of `ContinuousBatchingManager`; a persistent manager keeps the one it was made with.
    """
    generation_config, continuous_batching_config = _split_configs(generation_config, continuous_batching_config)
    manager = _take_persistent(self, generation_config, continuous_batching_config)
    if manager is None:
        manager = init_continuous_batching(
            self, generation_config, continuous_batching_config, workload_hints, tokenizer
        )
    try:
        with manager.session(block, timeout):
            yield manager
    except BaseException:
        manager.destroy()
        raise
    if persistent_manager and self._legato.manager is None:
        self._legato.manager = manager
    elif not manager.is_running():  # else it goes on finishing, as block or timeout asked
        manager.destroy()


def generate_batch(
    self: Any,
    inputs: Sequence[Sequence[int]],
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    record_timestamps: bool = False,
    progress_bar: bool = True,
    persistent_manager: bool = False,
    warmup: bool = True,
    tokenizer: Any = None,
    **kwargs: Any,
) -> dict[str, GenerationOutput]:
    """Generate for a list of prompts, and return when all are done.

    Args:
        inputs: token ids of each prompt.
        generation_config: as of `model.generate`; `kwargs` override single settings.
        continuous_batching_config: memory and scheduling.
        record_timestamps: note when each token was generated.
        progress_bar: show one where stderr is a terminal.
        persistent_manager, warmup, tokenizer: as of `continuous_batching_context_manager`.

    Returns:
        Each prompt's final outputs by request id, in input order, one for each of `num_return_sequences`. A prompt that
        can never be served (empty, or longer than cache or model allow) has status FAILED and says why in `error`; the
        others are not touched.

    Raises:
        EngineError: the engine failed; `__cause__` is why.
        ValueError: a setting that cannot work.
    """
    inputs = list(inputs)
    if not inputs:
        return {}
    generation_config, continuous_batching_config = _split_configs(generation_config, continuous_batching_config)
    generation_config = _with_overrides(generation_config, kwargs)
    hints = None if persistent_manager else _hints(self, inputs, generation_config)
    specs = [RequestSpec(ids, record_timestamps=record_timestamps) for ids in inputs]
    with continuous_batching_context_manager(
        self,
        generation_config,
        continuous_batching_config,
        persistent_manager=persistent_manager,
        warmup=warmup,
        workload_hints=hints,
        tokenizer=tokenizer,
    ) as manager:
        outputs = completed_in_order(manager, specs, progress_bar)
    return {output.request_id: output for samples in outputs for output in samples}


def _split_configs(
    generation_config: GenerationConfig | None, config: ContinuousBatchingConfig | None
) -> tuple[GenerationConfig | None, ContinuousBatchingConfig | None]:
    """Take a continuous batching config out of a generation config, where it used to be passed."""
    inside = getattr(generation_config, "continuous_batching_config", None)
    if generation_config is None or inside is None:
        return generation_config, config
    warnings.warn(
        "continuous_batching_config inside generation_config is deprecated: pass it as its own argument",
        FutureWarning,
        stacklevel=3,
    )
    generation_config = copy.copy(generation_config)
    generation_config.continuous_batching_config = None
    return generation_config, inside if config is None else config


def _with_overrides(config: GenerationConfig | None, overrides: dict[str, Any]) -> GenerationConfig | None:
    if not overrides:
        return config
    merged = copy.deepcopy(config) if config is not None else GenerationConfig()
    unknown = merged.update(**overrides)
    if unknown:
        raise InvalidValueError(f"unknown generation parameter {sorted(unknown)[0]!r}")
    return merged


def _hints(model: Any, inputs: Sequence[Sequence[int]], config: GenerationConfig | None) -> WorkloadHints:
    longest, defaults = max(1, *(len(ids) for ids in inputs)), GenerationDefaults.of(model, config)
    return WorkloadHints(longest, max(1, defaults.new_tokens(longest)), len(inputs) * defaults.params.n)


def _take_persistent(
    model: Any, generation_config: GenerationConfig | None, config: ContinuousBatchingConfig | None
) -> ContinuousBatchingManager | None:
    """Take the persistent manager off the model, if its settings are those asked for; one with others is destroyed."""
    manager, model._legato.manager = model._legato.manager, None
    if manager is None:
        return None
    if not manager.fits(ContinuousBatchingConfig.convert(config)):
        manager.destroy()
        return None
    manager.use_generation_config(generation_config)
    return manager
