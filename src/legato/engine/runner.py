"""Computes batches on the user's model, through transformers' own modelling code (the reference path)."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from legato.attention.interface import IMPLEMENTATION, PagedAttention, TileAttention, attention_implementation
from legato.attention.tiles import plan_attention
from legato.cache.kv import KVCache
from legato.engine.batch import Batch, StepResult
from legato.engine.sampling import finish_pass
from legato.live_model import FORWARD_LOCK, evaluation_mode, sample_of_weights


class ReferenceRunner:
    """Runs the model as it is, with paged attention in place of its own.

    Args:
        model: a causal language model of transformers, perhaps wrapped; left as it was after every pass.
        configs: the config objects its attention layers look their implementation up in.
        cache: K and V.
        attend: the attention backend.
    """

    def __init__(
        self,
        model: Any,
        configs: Sequence[Any],
        cache: KVCache,
        attend: TileAttention,
    ) -> None:
        self._model = model
        self._configs = configs
        self._cache = cache
        self._attend = attend
        self._device = model.device
        self._keeps_logits = takes_logits_to_keep(model)

    def weights_version(self) -> int:
        """A number that changes when a parameter is written to in place or replaced, or a module is.

        Writes through `weight.data` or by fused optimizers, to buffers, or a switch of adapters leave no trace here.
        """
        live = (p for module in self._model.modules() for p in module._parameters.values() if p is not None)
        return hash(tuple((id(p), p.data_ptr(), 0 if p.is_inference() else p._version) for p in live))

    def weights_sample(self) -> int:
        """A number made of a few values of every parameter and buffer, which no training step leaves all alike."""
        return sample_of_weights(self._model)

    def reread_weights(self) -> None:
        """Nothing to do: every pass reads them."""

    def run(self, batch: Batch) -> StepResult:
        """One forward pass: writes K and V, returns what is wanted of the logits."""
        device = self._device
        paged = PagedAttention(self._cache, plan_attention(batch, self._cache), self._attend)
        rows = torch.from_numpy(batch.logits_indices).to(device)
        extra = {"logits_to_keep": rows} if self._keeps_logits else {}
        # no_grad and not inference_mode: buffers a model caches on the way must stay usable in training.
        with (
            FORWARD_LOCK,
            torch.no_grad(),
            attention_implementation(self._configs, IMPLEMENTATION),
            evaluation_mode(self._model),
        ):
            logits = self._model(
                input_ids=torch.from_numpy(batch.input_ids).to(device)[None],
                position_ids=torch.from_numpy(batch.position_ids).to(device)[None],
                use_cache=False,
                paged=paged,
                **extra,
            ).logits[0]
        if not self._keeps_logits:
            logits = logits[rows]
        return finish_pass(logits.float(), batch)


def takes_logits_to_keep(model: Any) -> bool:
    """Whether the model can compute logits for chosen tokens only."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return "logits_to_keep" in inspect.signature(inner.forward).parameters


def attention_configs(model: nn.Module) -> list[Any]:
    """Every config object of the model's modules that names an attention implementation, once each."""
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    return [config for config in configs.values() if hasattr(config, "_attn_implementation")]
