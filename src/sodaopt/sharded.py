"""DTensor: the only file that knows it.

The template works on each rank's local shard, which is exact for elementwise maps. A map that
needs the whole matrix (a polar factor, a norm) gets it gathered, on every rank, and gives its
shard back: a Newton-Schulz iteration on a shard alone would be silently wrong.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor


def _dtensor() -> Any:
    """The class, or None while nobody has imported it (then no DTensor can exist)."""
    module = sys.modules.get("torch.distributed.tensor")
    return getattr(module, "DTensor", None)


def is_sharded(t: Tensor) -> bool:
    cls = _dtensor()
    return cls is not None and isinstance(t, cls)


def local(t: Any) -> Tensor:
    """This rank's part, sharing memory with t."""
    part: Tensor = t.to_local() if is_sharded(t) else t
    return part


def local_like(t: Any, p: Any) -> Tensor:
    """This rank's part of t (a gradient), laid out as the parameter p is."""
    if is_sharded(t) and t.placements != p.placements:
        t = t.redistribute(p.device_mesh, p.placements)
    return local(t)


def exchange(a: Tensor, b: Tensor) -> None:
    """Two tensors of one dtype trade their values, bit by bit."""
    a, b = local(a), local(b)
    held = a.clone()
    a.copy_(b)
    b.copy_(held)


def gather(t: Tensor, p: Any) -> Tensor:
    """The whole tensor of which t is this rank's part, laid out as p is."""
    if not is_sharded(p):
        return t
    whole: Tensor = (
        type(p)
        .from_local(t, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
        .full_tensor()
    )
    return whole


def scatter(t: Tensor, p: Any) -> Tensor:
    """This rank's part of a whole tensor that every rank has."""
    if not is_sharded(p):
        return t
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(t, p.device_mesh, p.placements, src_data_rank=None).to_local()


def element_numbers(p: Any) -> Tensor | None:
    """The positions of this rank's elements in the whole parameter; None where it has them all.

    One dimension at a time: numbering the whole parameter would take more than p on every rank.
    """
    if not is_sharded(p):
        return None
    from torch.distributed.tensor import Replicate, distribute_tensor

    index = torch.zeros((), dtype=torch.int64, device=local(p).device)
    for d in range(p.ndim):
        at = torch.arange(p.shape[d], device=index.device)
        at = at.view([-1 if j == d else 1 for j in range(p.ndim)])
        along = [q if getattr(q, "dim", None) == d else Replicate() for q in p.placements]
        own = distribute_tensor(at, p.device_mesh, along, src_data_rank=None).to_local()
        index = index * p.shape[d] + own
    return index
