"""Computes batches with the fused decoder, in the model's stead."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from legato.cache.kv import KVCache
from legato.decoder.decoder import Decoder
from legato.decoder.fusing import FusedModel
from legato.decoder.reader import read_spec
from legato.decoder.spec import NotFusable
from legato.engine.batch import Batch, StepResult
from legato.engine.sampling import finish_pass
from legato.errors import UnsupportedModelError
from legato.live_model import sample_of_weights


class FusedRunner:
    """Keeps the packed weights like the model's, and runs the decoder; the model itself is never called.

    Args:
        fused: the model.
        cache: K and V.
        num_positions: every token's position is below.
    """

    def __init__(self, fused: FusedModel, cache: KVCache, num_positions: int) -> None:
        self._fused = fused
        self._cache = cache
        self._num_positions = num_positions
        self._decoder: Decoder = fused.decoder(cache, num_positions)
        self._num_rebuilt = 0
        self._sample = sample_of_weights(fused.model)

    def weights_version(self) -> int:
        """A number that changes when a parameter is written to in place or replaced, or a module is.

        Raises:
            UnsupportedModelError: the model has become one that the fused decoder cannot stand in for; as all below.
        """
        with self._following():
            if any(place.parent._modules.get(place.name) is not place.module for place in self._fused.spec.places):
                self._read_again()
            return hash((self._num_rebuilt, self._fused.weights.version()))

    def weights_sample(self) -> int:
        """A number made of a few values of every parameter and buffer; all is made anew when it changes."""
        with self._following():
            self._read_again()  # hooks, say, leave no trace in the weights
            seen = sample_of_weights(self._fused.model)
            if seen != self._sample:
                self._make_anew()
            return hash((self._num_rebuilt, seen))

    def reread_weights(self) -> None:
        """Make everything that was made of the model anew: it has changed, perhaps without a trace."""
        with self._following():
            self._read_again()
            self._make_anew()

    def run(self, batch: Batch) -> StepResult:
        """One forward pass: writes K and V, returns what is wanted of the logits."""
        with torch.no_grad():
            with self._following():
                self._fused.weights.refresh()
            return finish_pass(self._decoder.forward(batch), batch)

    def _read_again(self) -> None:
        """Start afresh if the model is no longer what it was."""
        fused = self._fused
        if read_spec(fused.model, fused.groups) != fused.spec:
            self._fused = FusedModel.read(fused.model, fused.groups, fused.kernels, fused.quantization)
            self._decoder = self._fused.decoder(self._cache, self._num_positions)
            self._num_rebuilt += 1

    def _make_anew(self) -> None:
        self._sample = sample_of_weights(self._fused.model)
        self._fused.weights.repack()
        self._decoder = self._fused.decoder(self._cache, self._num_positions)  # its rotary tables, that is

    @contextmanager
    def _following(self) -> Iterator[None]:
        try:
            yield
        except NotFusable as error:
            raise UnsupportedModelError(
                f"{type(self._fused.model).__name__} has changed since the engine was made, and the fused decoder "
                f"cannot follow: {error}; make a new manager, or set fused_decoder=False"
            ) from error
