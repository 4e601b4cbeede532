"""The user's model while an engine uses it: who may run it, how, and the signs that it has changed."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import torch
from torch import nn

# Held while a model's attention is switched to ours. One for the process: the switch is in config objects, which
# several models may share, as several engines may share a model.
FORWARD_LOCK = Lock()


def sample_of_weights(model: nn.Module) -> int:
    """A number made of a few values of every parameter and every buffer."""
    with torch.no_grad():
        tensors = [*model.parameters(), *model.buffers()]
        samples = [t.flatten()[:: max(1, t.numel() // 8)].to(torch.float64) for t in tensors]
        return hash(torch.cat(samples).cpu().numpy().tobytes())


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """No dropout inside; the modules that were training train again after."""
    training = [module for module in model.modules() if module.training] if model.training else []
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
