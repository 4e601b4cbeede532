"""A model so small that a step takes a millisecond, for tests of everything around it."""

from typing import Any

from legato import enable
from tests.parity.families import tiny_model


def tiny_llama(**changes: Any) -> Any:
    """A random llama with Legato's methods, and a vocabulary of 97 tokens."""
    return enable(tiny_model("llama", "sdpa", num_hidden_layers=2, max_position_embeddings=4096, **changes))
