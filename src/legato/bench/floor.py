"""The least a forward pass can take on a machine: bytes over bandwidth, or arithmetic over peak, whichever is more.

Counted is what no engine can do without: each weight matrix read once a pass, K and V of each request read once a
layer, the multiplications. Not counted are activations, which stay in the processor's caches, and all else. In one
thing it is more than the least: tokens that are not sampled could leave the last layer once their K and V are written.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from legato.cache.pool import AttentionGroup

PARTS = ("projections", "attention", "head", "sampling")
_LOGIT_BYTES = 4  # float32


@dataclass(frozen=True, slots=True)
class Machine:
    """What a machine can do at best.

    Attributes:
        bytes_per_second: read from memory.
        flop_per_second: floating-point operations (int8 ones where the weights are int8), a multiplication and an
            addition being two.
    """

    bytes_per_second: float
    flop_per_second: float


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes that must come from memory, and operations."""

    num_bytes: float = 0.0
    flop: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.num_bytes + other.num_bytes, self.flop + other.flop)

    def memory_seconds(self, machine: Machine) -> float:
        return self.num_bytes / machine.bytes_per_second

    def compute_seconds(self, machine: Machine) -> float:
        return self.flop / machine.flop_per_second

    def floor_seconds(self, machine: Machine) -> float:
        """Both go on at once, so the slower one decides."""
        return max(self.memory_seconds(machine), self.compute_seconds(machine))


@dataclass(frozen=True, slots=True)
class Matrices:
    """Weights that are multiplied with.

    Attributes:
        elements: how many.
        num_bytes: what they take as stored.
    """

    elements: int = 0
    num_bytes: int = 0

    def __add__(self, other: "Matrices") -> "Matrices":
        return Matrices(self.elements + other.elements, self.num_bytes + other.num_bytes)


@dataclass(frozen=True)
class ModelWork:
    """What the work of a pass depends on.

    Attributes:
        dense: the matrices of all layers that every token goes through.
        experts: those of all experts of all layers.
        num_experts, experts_per_token: of a layer; both 1 where there are none.
        head: the matrix that makes logits.
        vocab_size: logits a row.
        num_heads: query heads.
        groups: the attention groups.
        kv_element_size: bytes of an element of K or V.
    """

    dense: Matrices
    experts: Matrices
    num_experts: int
    experts_per_token: int
    head: Matrices
    vocab_size: int
    num_heads: int
    groups: tuple[AttentionGroup, ...]
    kv_element_size: int


@dataclass(frozen=True, slots=True)
class PassShape:
    """One forward pass.

    Attributes:
        spans: of each request, its query tokens and the tokens of it in the cache once the pass is done.
        num_sampled: rows whose logits are sampled.
    """

    spans: tuple[tuple[int, int], ...]
    num_sampled: int

    @property
    def num_tokens(self) -> int:
        return sum(queries for queries, _ in self.spans)


def pass_work(model: ModelWork, shape: PassShape) -> dict[str, Work]:
    """The work of each of `PARTS`."""
    return {
        "projections": _projections(model, shape.num_tokens),
        "attention": sum((_attention(model, group, shape) for group in model.groups), Work()),
        "head": _head(model, shape.num_sampled),
        "sampling": _sampling(model, shape.num_sampled),
    }


def floor_seconds(model: ModelWork, shapes: Iterable[PassShape], machine: Machine) -> dict[str, float]:
    """Floors of each of `PARTS`, summed over passes: a pass cannot use what another one leaves idle, nor a part."""
    floors = dict.fromkeys(PARTS, 0.0)
    for shape in shapes:
        for part, work in pass_work(model, shape).items():
            floors[part] += work.floor_seconds(machine)
    return floors


def _projections(model: ModelWork, tokens: int) -> Work:
    """Experts are read if any token goes there: as many as a router that favours none would choose."""
    share = model.experts_per_token / model.num_experts
    touched = 1 - (1 - share) ** tokens
    return Work(
        model.dense.num_bytes + touched * model.experts.num_bytes,
        2 * tokens * (model.dense.elements + share * model.experts.elements),
    )


def _attention(model: ModelWork, group: AttentionGroup, shape: PassShape) -> Work:
    """K and V in sight are read, those of the new tokens written; each pair is a product with K and one with V."""
    keys = sum(keys_in_sight(queries, end, group.window) for queries, end in shape.spans)
    pairs = sum(query_key_pairs(queries, end, group.window) for queries, end in shape.spans)
    token_bytes = 2 * group.num_kv_heads * group.head_dim * model.kv_element_size
    return Work(
        len(group.layers) * (keys + shape.num_tokens) * token_bytes,
        len(group.layers) * pairs * 4 * model.num_heads * group.head_dim,
    )


def _head(model: ModelWork, rows: int) -> Work:
    if rows == 0:
        return Work()
    return Work(model.head.num_bytes, 2 * rows * model.head.elements)


def _sampling(model: ModelWork, rows: int) -> Work:
    """Greedy: every logit is read and compared once."""
    return Work(rows * model.vocab_size * _LOGIT_BYTES, rows * model.vocab_size)


def keys_in_sight(queries: int, end: int, window: int | None) -> int:
    """Keys that the last `queries` of `end` tokens see between them."""
    return end if window is None else min(end, window + queries - 1)


def query_key_pairs(queries: int, end: int, window: int | None) -> int:
    """(query, key) pairs of the last `queries` of `end` tokens, each of which sees itself and those before it."""
    first = end - queries + 1  # keys that the first query could see
    limit = end if window is None else window
    growing = max(0, min(end, limit) - first + 1)  # queries that see all that came before
    return growing * (2 * first + growing - 1) // 2 + (queries - growing) * limit
