"""DTensors: the only file that knows them.

The template works on each rank's shard, which is exact for elementwise maps. A map that needs the
whole matrix (a polar factor, a norm) runs on the gathered tensor, on every rank, and each rank
keeps its shard of the result. A Newton-Schulz iteration on a shard alone would be wrong without
any sign of it.
"""

from __future__ import annotations

import math
import sys
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn


def _dtensor() -> Any:
    """The class, or None if nobody has imported it: then no DTensor exists."""
    module = sys.modules.get("torch.distributed.tensor")
    return getattr(module, "DTensor", None)


PLAIN = frozenset((Tensor, nn.Parameter))


def is_sharded(t: Tensor) -> bool:
    if type(t) in PLAIN:  # nearly always, and asked several times for each parameter and step
        return False
    cls = _dtensor()
    return cls is not None and isinstance(t, cls)


def local(t: Any) -> Tensor:
    """This rank's shard, which shares memory with t."""
    part: Tensor = t.to_local() if is_sharded(t) else t
    return part


def is_placed_like(t: Any, p: Any) -> bool:
    """Whether t (a gradient) has the placements of the DTensor p."""
    return is_sharded(t) and t.placements == p.placements


def local_like(t: Any, p: Any) -> Tensor:
    """This rank's shard of t (a gradient), placed like the parameter p."""
    if is_sharded(t) and t.placements != p.placements:
        t = t.redistribute(p.device_mesh, p.placements)
    return local(t)


def exchange(a: Tensor, b: Tensor) -> None:
    """Exchange the values of two tensors of one dtype, bit by bit."""
    a, b = local(a), local(b)
    held = a.clone()
    a.copy_(b)
    b.copy_(held)


def like(t: Tensor, p: Any) -> Tensor:
    """The DTensor whose shard on this rank is t, placed like p. It is t itself if p is plain."""
    if not is_sharded(p):
        return t
    shape, stride = p.shape, p.stride()
    made: Tensor = type(p).from_local(t, p.device_mesh, p.placements, shape=shape, stride=stride)
    return made


def refill(t: Any, part: Tensor) -> None:
    """Replace the memory of this rank's shard of t.

    torch has no public way to do it for a DTensor. If `_local_tensor` goes, make a new DTensor with
    `from_local`, and the copies in wrappers/low_precision.py become new objects at each step.
    """
    if is_sharded(t):
        t._local_tensor = part
    else:
        t.data = part


def gather(t: Tensor, p: Any) -> Tensor:
    """The whole tensor, gathered from its shards t, which are placed like p."""
    whole: Any = like(t, p)
    return whole.full_tensor() if is_sharded(p) else t


def scatter(t: Tensor, p: Any) -> Tensor:
    """This rank's shard of a whole tensor that every rank has."""
    if not is_sharded(p):
        return t
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(t, p.device_mesh, p.placements, src_data_rank=None).to_local()


def part(t: Tensor, p: Any) -> Tensor:
    """This rank's shard of a whole tensor on any device, as a view if possible."""
    if is_sharded(p):
        for d, axis in enumerate(_axes(tuple(p.shape), p.device_mesh, tuple(p.placements))):
            if isinstance(axis, range):
                t = t.narrow(d, axis.start, len(axis))
            else:
                t = t.index_select(d, axis.to(t.device))
    return t


def total(t: Tensor, p: Any) -> Tensor:
    """Sum t over the ranks that have different shards of p. Every one of them must call it."""
    if is_sharded(p):
        import torch.distributed as dist

        t = t.to(p.device_mesh.device_type)
        for dim, placement in enumerate(p.placements):
            if placement.is_shard():
                dist.all_reduce(t, group=p.device_mesh.get_group(dim))
    return t


def pinned(t: Any) -> Tensor:
    """A host tensor in pinned memory, from which the device can copy by itself."""
    if not is_sharded(t):
        return t.pin_memory()  # type: ignore[no-any-return]
    t._local_tensor = t._local_tensor.pin_memory()
    return t  # type: ignore[no-any-return]


def constant(t: Any) -> Tensor | None:
    """The one value that all elements have on every rank, or None if they differ."""
    mine = local(t.detach())
    if not is_sharded(t):
        first = mine.reshape(-1)[0]
        return first.clone() if bool((mine == first).all()) else None
    import torch.distributed as dist

    device, lowest = t.device_mesh.device_type, torch.full((2,), torch.inf)
    if mine.numel():
        lowest = torch.stack([mine.amin(), -mine.amax()]).nan_to_num(-torch.inf, torch.inf)
    lowest = lowest.to(device, torch.float64)
    for group in t.device_mesh.get_all_groups():
        dist.all_reduce(lowest, dist.ReduceOp.MIN, group=group)
    low, high = lowest[0], -lowest[1]
    return low.to(mine.device, mine.dtype) if bool(low == high) else None


def element_numbers(p: Any) -> Tensor | None:
    """The indices of this rank's elements in the whole parameter, or None if it has them all.

    They are computed from one index a dimension: numbering the whole parameter would take more
    memory than p on every rank.
    """
    if not is_sharded(p):
        return None
    device = local(p).device
    index = torch.zeros((), dtype=torch.int64, device=device)
    for d, axis in enumerate(_axes(tuple(p.shape), p.device_mesh, tuple(p.placements))):
        own = _along(axis, device).view([-1 if j == d else 1 for j in range(p.ndim)])
        index = index * p.shape[d] + own
    return index


def numbers(p: Any, begin: int, stop: int) -> range | Tensor:
    """The indices of this rank's elements begin..stop-1, as a range if they are contiguous."""
    if not is_sharded(p):
        return range(begin, stop)
    axes = _axes(tuple(p.shape), p.device_mesh, tuple(p.placements))
    if not axes:
        return range(begin, stop)
    inner = math.prod(p.shape[1:])
    if isinstance(axes[0], range) and math.prod(map(len, axes[1:])) == inner:
        first = axes[0].start * inner
        return range(first + begin, first + stop)
    device = local(p).device
    at = torch.arange(begin, stop, device=device)
    index, stride = torch.zeros_like(at), 1
    for axis, size in zip(reversed(axes), reversed(p.shape), strict=True):
        index += _along(axis, device)[at % len(axis)] * stride
        at, stride = at // len(axis), stride * size
    return index


@lru_cache(maxsize=4096)
def _axes(shape: tuple[int, ...], mesh: Any, placements: Any) -> tuple[range | Tensor, ...]:
    """For each dimension the positions that this rank has, as a range if they are contiguous."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    axes: list[range | Tensor] = []
    for d, size in enumerate(shape):
        along = [q if getattr(q, "dim", None) == d else Replicate() for q in placements]
        at = torch.arange(size).view([-1 if j == d else 1 for j in range(len(shape))])
        at = distribute_tensor(at, mesh, along, src_data_rank=None).to_local().cpu().flatten()
        first = int(at[0]) if len(at) else 0
        run = torch.equal(at, torch.arange(first, first + len(at)))
        axes.append(range(first, first + len(at)) if run else at)
    return tuple(axes)


def _along(axis: range | Tensor, device: torch.device) -> Tensor:
    if isinstance(axis, range):
        return torch.arange(axis.start, axis.stop, device=device)
    return axis.to(device)
