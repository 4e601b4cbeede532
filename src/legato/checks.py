"""Checks of what callers hand in. Every refusal names the field, the value and what is allowed."""

import operator
from collections.abc import Iterable
from math import inf
from typing import Any

from legato.errors import InvalidValueError


def refuse(name: str, value: Any, allowed: str) -> InvalidValueError:
    """The error to raise for `name=value`, where only `allowed` would do."""
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return InvalidValueError(f"{name}={shown} is not allowed: it must be {allowed}")


def check_int(name: str, value: Any, low: int, high: float = inf, *, optional: bool = False) -> None:
    """An integer (not a bool) in [low, high], or None where `optional`."""
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        bounds = f"at least {low}" if high == inf else f"from {low} to {high}"
        raise refuse(name, value, f"an integer, {bounds}" + (", or None" if optional else ""))


def check_number(
    name: str, value: Any, low: float, high: float = inf, *, above: bool = False, optional: bool = False
) -> None:
    """A finite number in [low, high] (in (low, high] with `above`), or None where `optional`."""
    if value is None and optional:
        return
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not (low < value if above else low <= value) or not value <= high or value == inf:
        bounds = f"above {low}" if above else f"at least {low}"
        bounds += "" if high == inf else f" and at most {high}"
        raise refuse(name, value, f"a finite number, {bounds}" + (", or None" if optional else ""))


def check_bool(name: str, value: Any, *, optional: bool = False) -> None:
    """True or False, or None where `optional`."""
    if not isinstance(value, bool) and not (value is None and optional):
        raise refuse(name, value, "True or False" + (" or None" if optional else ""))


def token_ids(name: str, value: Any) -> list[int]:
    """A sequence of integers (list, tuple, array or one-dimensional tensor) as a list of Python ints."""
    if isinstance(value, str | bytes | dict) or not isinstance(value, Iterable):
        raise refuse(name, value, "a sequence of token ids")
    ids = value.tolist() if hasattr(value, "tolist") else list(value)
    try:
        return [operator.index(i) for i in ids]
    except TypeError:
        raise refuse(name, value, "a flat sequence of token ids") from None


def optional_token_ids(name: str, value: Any) -> list[int]:
    """None as no ids, a single id as one, a sequence as `token_ids` gives it."""
    if value is None:
        return []
    if isinstance(value, int) and not isinstance(value, bool):
        return [value]
    return token_ids(name, value)
