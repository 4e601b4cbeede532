"""What the engine is run with: the options that all of `legato bench` shares."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from legato.config import ContinuousBatchingConfig
from legato.errors import InvalidValueError


@dataclass(frozen=True)
class EngineSettings:
    """Settings of a run.

    Attributes:
        dtype: name of the torch type of weights and arithmetic.
        page_size: tokens a cache page holds.
        max_batch_tokens: tokens in one forward pass.
        quantization: how weights are stored, "int8"; None: as they are.
        kv_cache_dtype: type of K and V in the cache; None: the engine's choice.
    """

    dtype: str = "float32"
    page_size: int = 32
    max_batch_tokens: int = 1024
    quantization: str | None = None
    kv_cache_dtype: str | None = None

    def config(self, **more: Any) -> ContinuousBatchingConfig:
        """The engine's configuration, with `more` of its fields.

        Raises:
            InvalidValueError: a value, or a setting, that this Legato does not know.
        """
        settings = {name: value for name, value in dataclasses.asdict(self).items() if value is not None} | more
        del settings["dtype"]  # the model is loaded in it
        unknown = settings.keys() - {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
        if unknown:
            raise InvalidValueError(f"this version of Legato has no setting {', '.join(sorted(unknown))}")
        return ContinuousBatchingConfig(**settings)

    def options(self) -> list[str]:
        """The same for the command line of another process."""
        options = []
        for name, value in dataclasses.asdict(self).items():
            if value is not None:
                options += [f"--{name.replace('_', '-')}", str(value)]
        return options
