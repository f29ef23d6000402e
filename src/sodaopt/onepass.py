"""The five lines in one pass over memory, on a GPU, for maps that act on each entry; and the last
three of them, where the map is a polar factor."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import kernels, rounding, schedules, sharded
from ._bare import address, is_bare
from .anchors import Anchor
from .geometry import Ball, Diagonal, Euclidean, Moment, Sharp, Sign, Spectral
from .msign import Newton

if TYPE_CHECKING:
    from .lines import Leaf, Step

KINDS = frozenset((torch.float32, *rounding.HALVES))
"""What the kernel reads parameters, gradients and z0 in."""


def update(leaves: list[Leaf], step: Step) -> list[Leaf]:
    """Returns those that it is not for, as they were."""
    device, how = leaves[0].p.device, map_of(step)
    if device.type != "cuda" or how is None or not kernels.usable(f"{how} lines", device):
        return leaves
    pieces = leaves[:FIRST], leaves[FIRST:]  # the device begins while the host does the others
    return [piece[j] for piece in pieces if piece for j in launch(piece, step)]


FIRST = 16


def map_of(step: Step) -> str | None:
    """The kernel's name for the map, if it has one."""
    geometry: Any = step.method.geometry
    if not _is_simple(step):
        return None
    if type(geometry) is Diagonal:
        return "diagonal"
    if type(geometry) is Ball and type(geometry.norm) is Sign:
        return "sign"
    if type(geometry) is Sharp and type(geometry.norm) is Euclidean:
        return "euclidean"
    return None


def polars(leaves: list[Leaf], step: Step, m_bar: list[Tensor]) -> list[Tensor] | None:
    """The polar factors of m_bar as the kernel can take them, if this is a step that it can end."""
    geometry: Any = step.method.geometry
    if leaves[0].p.device.type != "cuda" or not _is_simple(step) or type(geometry) is not Ball:
        return None
    norm, p = geometry.norm, leaves[0].p
    if type(norm) is not Spectral or type(norm.polar) is not Newton:
        return None
    # no factor is to be computed in vain
    if p.dtype not in KINDS or norm.polar.dtype_of(m_bar[0]) not in KINDS:
        return None
    if not all(type(leaf.p) in sharded.PLAIN and leaf.p.is_contiguous() for leaf in leaves):
        return None
    if step.method.centre == "init" and any(_z0(leaf, step)[1] is _NONE for leaf in leaves):
        return None
    if not kernels.usable("given lines", leaves[0].p.device):
        return None
    return norm.batched(norm.polar.raw, m_bar)


def _is_simple(step: Step) -> bool:
    return step.method.fused and all(isinstance(v, int | float) for v in step.c)


def launch(leaves: list[Leaf], step: Step, given: list[Tensor] | None = None) -> list[int]:
    """One for each scale and kind of z0; given: what points uphill, where it was computed before.
    Returns the places of what the kernel cannot read.

    The host's time for a parameter counts: a GPU does a small model sooner than this loop.
    """
    from .kernels import lines

    method, c = step.method, step.c
    geometry: Any = method.geometry
    momentum, anchored = method.keeps_m and given is None, method.centre == "init"
    diagonal, low = isinstance(geometry, Diagonal), leaves[0].p.dtype in rounding.HALVES
    launches: dict[tuple[float, Any, torch.dtype], list[tuple[tuple[int, ...], list[Any]]]] = {}
    left, start, prefix = [], 0, 0
    for j, (leaf, scale) in enumerate(zip(leaves, _scales(leaves, step), strict=True)):
        p, s, number = leaf
        g: Any = p.grad if given is None else given[j]
        tensors: list[Any] = [p, g, s["m"] if momentum else None, s["v"] if diagonal else None]
        if type(p) not in sharded.PLAIN:
            tensors = [t if t is None else sharded.local(t) for t in tensors]
            tensors[1] = sharded.local_like(g, p)
        z, kind = _z0(leaf, step) if anchored else (0, None)
        if low:
            numbers = sharded.numbers(leaf.p, 0, 0)
            start = numbers.start if isinstance(numbers, range) else -1
            prefix = rounding.kept_prefix(step.group["seed"], number)
        if kind is _NONE or start < 0 or not _is_readable(tensors):
            left.append(j)
            continue
        places = [0 if t is None else address(t) for t in tensors]
        places.append(address(z) if isinstance(z, Tensor) else z)
        row = tensors[0].numel(), *places, start, prefix
        # with the tensors: some of them may be nobody else's, and must live until the launch
        launches.setdefault((scale, kind, tensors[1].dtype), []).append((row, [*tensors, z]))
    rate = float(schedules.value(geometry.rate, step.k, step.lr)) if diagonal else 0.0
    for (scale, kind, dtype), rows in launches.items():
        lines.update_(
            [tensors[0] for _, tensors in rows],
            [t for _, tensors in rows for t in tensors[2:4] if t is not None],
            tuple(row for row, _ in rows),
            (c.alpha, c.alpha_bar, 1 - rate, rate, getattr(geometry, "eps", 0.0), scale),
            (c.lam, 1 - c.lam, step.k),
            map_="given" if given is not None else map_of(step),
            g=dtype,
            centre=method.centre,
            z0=kind,
            momentum=momentum,
            optimism=momentum and method.alpha_bar != 0,
            maximize=given is None and bool(step.group["maximize"]),
        )
    return left


def _is_readable(tensors: list[Any]) -> bool:
    """Parameter, gradient and fp32 state, of one size on one device, in memory from end to end."""
    p, g, *state = tensors
    if p.dtype not in KINDS or g.dtype not in KINDS or g.is_neg() or type(p) not in sharded.PLAIN:
        return False
    device, shape = p.device, p.shape
    if not p.is_contiguous() or type(g) not in sharded.PLAIN or not g.is_contiguous():
        return False
    if g.device != device or g.shape != shape:
        return False
    return all(
        t is None
        or (
            t.dtype is torch.float32
            and t.device == device
            and t.shape == shape
            and type(t) in sharded.PLAIN
            and t.is_contiguous()
        )
        for t in state
    )


def _scales(leaves: list[Leaf], step: Step) -> list[float]:
    """What the kernel's u is multiplied by, for each parameter."""
    geometry, gamma = step.method.geometry, step.gamma
    at = Moment([leaf.p.shape for leaf in leaves], [], step.k, step.lr, [])
    if isinstance(geometry, Ball):
        return [-(gamma * width) for width in geometry.widths(at)]
    if isinstance(geometry, Sharp):
        return [-(gamma * width * width) for width in geometry.widths(at)]
    return [-gamma] * len(leaves)


def _z0(leaf: Leaf, step: Step) -> tuple[Any, Any]:
    """A tensor and its dtype, or the bits of a number and float; or nothing the kernel reads."""
    p, anchor = sharded.local(leaf.p), step.anchor
    if type(anchor).pull_ is not Anchor.pull_:
        return 0, _NONE
    z = anchor.source(leaf.p, leaf.state["z0"])
    if z.shape != p.shape and z.is_cpu:
        return struct.unpack("<i", struct.pack("<f", float(z)))[0], float
    as_it_is = z.dtype in KINDS and anchor.dtype_of(leaf.p, z) == z.dtype and is_bare(z)
    same = z.shape == p.shape and z.device == p.device
    return (z, z.dtype) if as_it_is and same else (0, _NONE)


_NONE = object()
