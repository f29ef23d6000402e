"""Words for errors: the nearest known name, and shapes as people write them."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def unknown(kind: str, name: object, known: Iterable[str]) -> str:
    """`unknown row 'adamm'; did you mean 'adam'?`, else the whole list."""
    names = sorted(known)
    folded = {n.casefold(): n for n in names}
    near = get_close_matches(str(name).casefold(), folded, n=1)
    hint = f"did you mean {folded[near[0]]!r}?" if near else f"known: {', '.join(names)}"
    return f"unknown {kind} {name!r}; {hint}"


def times(shape: Iterable[int]) -> str:
    """(4, 5) -> '4x5', () -> 'scalar'."""
    return "x".join(map(str, shape)) or "scalar"
