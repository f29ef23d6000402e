"""Tensors as pieces of memory, for code that is handed their addresses."""

from __future__ import annotations

from torch import Tensor

from .sharded import PLAIN


def is_bare(t: Tensor) -> bool:
    """Its values are what lies in memory from end to end."""
    return type(t) in PLAIN and t.is_contiguous() and not t.is_neg()


def address(t: Tensor) -> int:
    at = t.data_ptr()
    if not at and t.numel():
        raise RuntimeError("a tensor has no memory: its storage was freed")
    return at
