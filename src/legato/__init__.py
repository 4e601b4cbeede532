"""Legato: continuous batching for Hugging Face models, in process, on the model object you already have."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import GenerationConfig as GenerationConfig

    from legato.config import ContinuousBatchingConfig as ContinuousBatchingConfig
    from legato.config import WorkloadHints as WorkloadHints
    from legato.engine.policy import SchedulingPolicy as SchedulingPolicy
    from legato.engine.policy import register_scheduling_policy as register_scheduling_policy
    from legato.errors import EngineError as EngineError
    from legato.errors import InvalidValueError as InvalidValueError
    from legato.errors import LegatoError as LegatoError
    from legato.errors import ManagerStateError as ManagerStateError
    from legato.errors import OutOfCacheMemoryError as OutOfCacheMemoryError
    from legato.errors import QueueFullError as QueueFullError
    from legato.errors import UnsupportedModelError as UnsupportedModelError
    from legato.llm import LLM as LLM
    from legato.manager import ContinuousBatchingManager as ContinuousBatchingManager
    from legato.model_api import AutoModelForCausalLM as AutoModelForCausalLM
    from legato.model_api import enable as enable
    from legato.models import AutoConfig as AutoConfig
    from legato.models import AutoTokenizer as AutoTokenizer
    from legato.request import GenerationOutput as GenerationOutput
    from legato.request import RequestStatus as RequestStatus
    from legato.sampling_params import SamplingParams as SamplingParams

__version__ = "0.1.0"

# Found when first used: `legato --help` should not wait for torch.
_HOME = {
    "AutoConfig": "legato.models",
    "AutoModelForCausalLM": "legato.model_api",
    "AutoTokenizer": "legato.models",
    "ContinuousBatchingConfig": "legato.config",
    "ContinuousBatchingManager": "legato.manager",
    "EngineError": "legato.errors",
    "GenerationConfig": "transformers",
    "GenerationOutput": "legato.request",
    "InvalidValueError": "legato.errors",
    "LLM": "legato.llm",
    "LegatoError": "legato.errors",
    "ManagerStateError": "legato.errors",
    "OutOfCacheMemoryError": "legato.errors",
    "QueueFullError": "legato.errors",
    "RequestStatus": "legato.request",
    "SamplingParams": "legato.request",
    "SchedulingPolicy": "legato.engine.policy",
    "UnsupportedModelError": "legato.errors",
    "WorkloadHints": "legato.config",
    "enable": "legato.model_api",
    "register_scheduling_policy": "legato.engine.policy",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'legato' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
