"""What a model's layers ask of the cache, found by watching one tiny forward pass rather than by reading its config."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from legato.attention.interface import IMPLEMENTATION, AttentionCall, attention_implementation
from legato.cache.pool import AttentionGroup
from legato.errors import UnsupportedModelError


def find_attention_groups(model: Any, configs: Sequence[Any]) -> tuple[AttentionGroup, ...]:
    """Run two tokens through the model and group its layers by what they store and see.

    Args:
        model: a causal language model of transformers.
        configs: the config objects its attention layers look their implementation up in.

    Returns:
        One for each window and shape of K and V, full attention first.

    Raises:
        UnsupportedModelError: the model's attention is not all in one plain call of the attention interface a layer.
    """
    _check_config(model)
    calls: list[AttentionCall] = []

    def record(call: AttentionCall) -> Tensor:
        calls.append(call)
        _, heads, tokens, _ = call.query.shape
        return call.query.new_zeros((1, tokens, heads, call.value.shape[3]))

    ids = torch.zeros((1, 2), dtype=torch.long, device=model.device)
    positions = torch.arange(2, device=ids.device)[None]
    with torch.no_grad(), attention_implementation(configs, IMPLEMENTATION):
        try:
            model(input_ids=ids, position_ids=positions, use_cache=False, paged=record)
        except torch.OutOfMemoryError:
            raise
        except (TypeError, ValueError, RuntimeError, KeyError, AttributeError) as error:
            raise _unsupported(model, f"a forward pass over two tokens failed: {error}") from error
    _check_calls(model, calls)
    layers = defaultdict(list)
    for call in calls:
        layers[call.window, call.key.shape[1], call.key.shape[3]].append(call.layer)
    groups = [
        AttentionGroup(tuple(sorted(indices)), window, num_kv_heads, head_dim)
        for (window, num_kv_heads, head_dim), indices in layers.items()
    ]
    return tuple(sorted(groups, key=lambda group: (group.window is not None, group.window or 0, group.layers)))


def _check_config(model: Any) -> None:
    config = model.config.get_text_config()
    if getattr(model.config, "is_encoder_decoder", False):
        raise _unsupported(model, "it is an encoder-decoder")
    if getattr(config, "num_kv_shared_layers", 0):
        raise _unsupported(model, "some layers reuse the K and V of others")
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        raise _unsupported(model, "it has chunked attention layers")


def _check_calls(model: Any, calls: list[AttentionCall]) -> None:
    num_layers = model.config.get_text_config().num_hidden_layers
    seen = [call.layer for call in calls]
    if sorted(seen) != list(range(num_layers)):
        raise _unsupported(
            model,
            f"{len(set(seen))} of its {num_layers} layers, in {len(seen)} calls, compute attention through "
            "transformers' attention interface; Legato needs one call in each",
        )
    for call in calls:
        if call.unknown:
            raise _unsupported(model, f"layer {call.layer} passes {', '.join(call.unknown)} to its attention")
        if call.key.shape != call.value.shape:
            raise _unsupported(model, f"layer {call.layer} has keys and values of different width")


def _unsupported(model: Any, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{type(model).__name__} cannot be served: {reason}")
