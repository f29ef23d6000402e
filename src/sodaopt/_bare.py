"""What is behind a tensor: its memory, and the parameter that it stands for."""

from __future__ import annotations

from torch import Tensor

from sodaopt.parallel.sharded import PLAIN


def owner(p: Tensor) -> Tensor:
    """The parameter that p takes the place of while a wrapped optimizer steps, or p itself."""
    return getattr(p, "stands_for", p)


def is_bare(t: Tensor) -> bool:
    """Its values are what lies in memory from end to end."""
    return type(t) in PLAIN and t.is_contiguous() and not t.is_neg()


def address(t: Tensor) -> int:
    at = t.data_ptr()
    if not at and t.numel():
        raise RuntimeError("a tensor has no memory: its storage was freed")
    return at
