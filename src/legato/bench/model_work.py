"""What there is to multiply with in a loaded model, and how small it can be stored."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from legato.bench.floor import Matrices, ModelWork
from legato.engine.assemble import EngineFacts, unwrap
from legato.kernels.packing import is_exact_in_bfloat16


def model_work(model: Any, facts: EngineFacts, quantized: bool) -> ModelWork:
    """What the work of a pass on this model depends on, read off its weights and its config."""
    inner = unwrap(model)
    config = inner.config.get_text_config()
    head = inner.get_output_embeddings().weight
    matrices = [(name, weight) for name, weight in _matrices(inner) if weight is not head]
    dense, experts = (
        sum((stored(w, quantized) for name, w in matrices if (".experts." in name) is wanted), Matrices())
        for wanted in (False, True)
    )
    num_experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 1
    return ModelWork(
        dense=dense,
        experts=experts,
        num_experts=num_experts if experts.elements else 1,
        experts_per_token=config.num_experts_per_tok if experts.elements else 1,
        head=stored(head, quantized),
        vocab_size=facts.shape.vocab_size,
        num_heads=facts.shape.num_heads,
        groups=facts.shape.groups,
        kv_element_size=facts.shape.cache_element_size,
    )


def _matrices(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Weights that are multiplied with, once each; embeddings are looked up in, not multiplied with."""
    for prefix, module in model.named_modules():
        if not isinstance(module, nn.Embedding):
            for name, parameter in module.named_parameters(prefix, recurse=False):
                if parameter.dim() > 1:
                    yield name, parameter


def stored(weight: Tensor, quantized: bool) -> Matrices:
    """A matrix as small as it can be stored: a byte an element if quantised, 2 where bfloat16 holds it exactly."""
    if quantized:
        size = 1
    elif weight.element_size() <= 2 or is_exact_in_bfloat16(weight):
        size = min(weight.element_size(), 2)
    else:
        size = weight.element_size()
    return Matrices(weight.numel(), weight.numel() * size)
