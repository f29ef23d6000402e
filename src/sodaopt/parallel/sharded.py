"""DTensors: this rank's shard of a tensor, and the slice of the whole tensor that it is.

An optimizer works on each rank's shard, which is exact for elementwise maps. Maps that need whole
matrices or whole rows use `exchange.py`. A Newton-Schulz iteration on a shard alone would return a
wrong result without an error.
"""

import math
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sodaopt.backends import PLAIN
from sodaopt.parallel.layout import Box, Placement


def is_sharded(t: Tensor) -> bool:
    if type(t) in PLAIN:  # nearly always, and asked several times for each parameter and step
        return False
    module = sys.modules.get("torch.distributed.tensor")  # no DTensor exists before its import
    return module is not None and isinstance(t, module.DTensor)


def local(t: Any) -> Tensor:
    """This rank's shard, which shares memory with t."""
    part: Tensor = t.to_local() if is_sharded(t) else t
    return part


def is_placed_like(t: Any, p: Any) -> bool:
    """Whether t (a gradient) has the placements of the DTensor p."""
    return is_sharded(t) and t.placements == p.placements


def local_like(t: Any, p: Any) -> Tensor:
    """This rank's shard of t (a gradient), redistributed to the placements of the parameter p."""
    if is_sharded(t) and not is_placed_like(t, p):
        t = t.redistribute(p.device_mesh, p.placements)
    return local(t)


def swap(a: Tensor, b: Tensor) -> None:
    """Exchange the values of two tensors of one dtype, bit by bit."""
    a, b = local(a), local(b)
    held = a.clone()
    a.copy_(b)
    b.copy_(held)


def like(t: Tensor, p: Any, whole: Any = None) -> Tensor:
    """Return the DTensor, placed like p, whose shard on this rank is t. If p is plain, it is t.

    whole: a tensor with the shape and the strides of the DTensor. By default it is p.
    """
    if not is_sharded(p):
        return t
    whole = p if whole is None else whole
    shape, stride = whole.shape, whole.stride()
    made: Tensor = type(p).from_local(t, p.device_mesh, p.placements, shape=shape, stride=stride)
    return made


def refill(t: Any, part: Tensor) -> None:
    """Replace the memory of this rank's shard of t.

    torch has no public way to do this for a DTensor. If `_local_tensor` goes, make a new DTensor by
    `from_local`. The copies in wrappers/low_precision.py are then new objects at each step.
    """
    if is_sharded(t):
        t._local_tensor = part
    else:
        t.data = part


def place(t: Tensor, p: Any) -> Tensor:
    """Return t, which every rank has whole, as a DTensor placed like p. If p is plain, return t."""
    if not is_sharded(p) or is_sharded(t):
        return t
    return like(part(t, p).clone(), p, t)


def part(t: Tensor, p: Any) -> Tensor:
    """This rank's shard of a whole tensor on any device, as a view.

    p: the parameter whose placement cuts t.
    """
    for d, axis in enumerate(box(p, t.shape) if is_sharded(p) else ()):
        t = t.narrow(d, axis.start, len(axis))
    return t


def total(t: Tensor, p: Any) -> Tensor:
    """Sum t over the ranks that have different shards of p. All of these ranks must call it."""
    if is_sharded(p):
        import torch.distributed as dist

        t = t.to(p.device_mesh.device_type)
        for dim, cut in enumerate(placement_of(p).cuts):
            if cut is not None:
                dist.all_reduce(t, group=p.device_mesh.get_group(dim))
    return t


def element_indices(p: Any, begin: int, stop: int) -> range | Tensor:
    """The indices in p of elements begin..stop-1 of this rank's shard, as a range if contiguous."""
    if not is_sharded(p) or not p.ndim:
        return range(begin, stop)
    axes = box(p, p.shape)
    if tuple(map(len, axes[1:])) == p.shape[1:]:
        first = axes[0].start * p.shape[1:].numel()
        return range(first + begin, first + stop)
    at = torch.arange(begin, stop, device=local(p).device)
    index = torch.zeros_like(at)
    for axis, size, i in zip(axes, p.shape, torch.unravel_index(at, local(p).shape), strict=True):
        index = index * size + axis.start + i
    return index


def placement_of(p: Any) -> Placement:
    """How the mesh of the DTensor p cuts it."""
    return _placement(tuple(p.device_mesh.shape), tuple(p.placements), p.ndim)


def box(p: Any, shape: Sequence[int]) -> Box:
    """The slice that this rank has of a tensor of this shape, cut like the DTensor p.

    `fully_shard` and this function cut an uneven dimension of FSDP x TP alike. torch's
    `distribute_tensor` cuts it differently.
    """
    outside = p.device_mesh.shape  # beyond the mesh: an empty slice of each dimension that is cut
    return placement_of(p).box(tuple(shape), p.device_mesh.get_coordinate() or outside)


@lru_cache(maxsize=1024)
def _placement(mesh: tuple[int, ...], placements: tuple[Any, ...], ndim: int) -> Placement:
    """The `Placement` of torch's placements.

    FSDP on top of tensor parallelism yields torch's private `_StridedShard`. A mesh dimension with
    this placement cuts the parameter last, after the mesh dimensions that follow it. Its
    split_factor is the number of parts that these dimensions make.
    """
    cuts = tuple(None if q.is_replicate() else getattr(q, "dim", ndim) % ndim for q in placements)
    for d, q in enumerate(placements):
        later = math.prod(mesh[e] for e in range(d + 1, len(mesh)) if cuts[e] == cuts[d])
        if q.is_partial() or getattr(q, "split_factor", later) != later:
            raise NotImplementedError(
                f"parameters with the placements {placements} are not supported: use Shard and "
                "Replicate, as FSDP2 and tensor parallelism do"
            )
    order = sorted(range(len(mesh)), key=lambda d: hasattr(placements[d], "split_factor"))
    return Placement(mesh, cuts, tuple(order))
