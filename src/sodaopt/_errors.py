"""Errors that several modules raise: suggestions for unknown names, and shapes."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def unknown(kind: str, name: object, known: Iterable[str]) -> str:
    """Say that a name is unknown, and suggest the nearest known one or list all of them.

    kind: the kind of thing that the name should be, such as "row" or "role".
    """
    names = sorted(known)
    folded = {n.casefold(): n for n in names}
    near = get_close_matches(str(name).casefold(), folded, n=1)
    hint = f"did you mean {folded[near[0]]!r}?" if near else f"known: {', '.join(names)}"
    return f"unknown {kind} {name!r}; {hint}"


def times(shape: Iterable[int]) -> str:
    """Write a shape: (4, 5) -> '4x5', () -> 'scalar'."""
    return "x".join(map(str, shape)) or "scalar"


def check_shape(name: str, shape: Iterable[int], wanted: Iterable[int]) -> None:
    """Raise if a loaded tensor has another shape than this optimizer's own."""
    if tuple(shape) != tuple(wanted):
        raise ValueError(
            f"the state to load has {name} of shape {times(shape)}, and here it is "
            f"{times(wanted)}: it was written for another model"
        )
