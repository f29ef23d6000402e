"""Errors that several modules raise: unknown names, shapes, and numbers out of range."""

import math
import re
from collections.abc import Iterable
from difflib import get_close_matches
from numbers import Real
from typing import Any


def unknown(kind: str, name: object, known: Iterable[str]) -> str:
    """Say that a name is unknown, and suggest the nearest known one or list all of them.

    kind: the kind of thing that the name should be, such as "row" or "role".
    known: names. Names such as soda(muon) and soda(adam) are listed as one soda(...).
    """
    folded = {n.casefold(): n for n in sorted(known)}
    near = get_close_matches(str(name).casefold(), folded, n=1)
    listed = dict.fromkeys(re.sub(r"\(.*", "(...)", n) for n in folded.values())
    hint = f"did you mean {folded[near[0]]!r}?" if near else f"known: {', '.join(listed)}"
    return f"unknown {kind} {name!r}; {hint}"


def times(shape: Iterable[int]) -> str:
    """Write a shape: (4, 5) -> '4x5', () -> 'scalar'."""
    return "x".join(map(str, shape)) or "scalar"


def check_shape(name: str, shape: Iterable[int], wanted: Iterable[int]) -> None:
    """Raise if a loaded tensor has another shape than this optimizer's own."""
    if tuple(shape) != tuple(wanted):
        raise ValueError(
            f"the state to load has {name} of shape {times(shape)}, but this optimizer has "
            f"{times(wanted)}: load the state into an optimizer of the model that wrote it"
        )


def number(name: str, value: Any, most: float = math.inf) -> float:
    """Return the value as a float, or raise if it is not a number between 0 and `most`."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not 0 <= (x := float(value)) <= most or x == math.inf:
        must = "not be negative, infinite or nan" if most == math.inf else f"be in [0, {most:g}]"
        raise ValueError(f"{name} must {must}, got {value}")
    return x


def count(name: str, value: Any, least: int) -> int:
    """Return the value, or raise if it is not an integer of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    return value
