"""The five lines in one pass over memory, on a GPU, for maps that act on each entry; and the last
three of them, where the map is a polar factor."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sodaopt import backends as kernels
from sodaopt import rounding, schedules
from sodaopt._bare import address, is_bare
from sodaopt.anchors import Anchor
from sodaopt.geometry import Ball, Context, Diagonal, Euclidean, Sharp, Sign, Spectral
from sodaopt.geometry.polar import Newton
from sodaopt.parallel import sharded

if TYPE_CHECKING:
    from sodaopt.core.update import Leaf, Step

KINDS = frozenset((torch.float32, *rounding.HALVES))
"""What the kernel reads parameters, gradients and z0 in."""


def update(leaves: list[Leaf], step: Step) -> list[Leaf]:
    """Returns those that it is not for, as they were."""
    how = map_of(step)
    if how is None or not _runs(how, leaves[0].p.device):
        return leaves
    pieces = leaves[:FIRST], leaves[FIRST:]  # the device begins while the host does the others
    return [piece[j] for piece in pieces if piece for j in launch(piece, step, _z0s(piece, step))]


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


def finish(leaves: list[Leaf], step: Step, m_bar: list[Tensor]) -> bool:
    """End a step along the polar factors of m_bar; False, with nothing done, where the kernel could
    not take all of them, for no factor is to be computed in vain."""
    geometry: Any = step.method.geometry
    if not _is_simple(step) or type(geometry) is not Ball or type(geometry.norm) is not Spectral:
        return False
    norm, p = geometry.norm, leaves[0].p
    if type(norm.polar) is not Newton or not {p.dtype, norm.polar.dtype_of(m_bar[0])} <= KINDS:
        return False
    if not all(type(leaf.p) in sharded.PLAIN and leaf.p.is_contiguous() for leaf in leaves):
        return False
    z0s = _z0s(leaves, step)
    if any(kind is _NONE for _, kind in z0s) or not _runs("given", p.device):
        return False
    polars = [u.contiguous() for u in norm.batched(norm.polar.raw, m_bar)]
    if launch(leaves, step, z0s, polars):
        raise AssertionError("the kernel did not take what it was to take")
    return True


def _runs(map_: str, device: torch.device) -> bool:
    return device.type == "cuda" and kernels.usable(f"{map_} lines", device)


def _is_simple(step: Step) -> bool:
    return step.method.fused and all(isinstance(v, int | float) for v in step.c)


def launch(
    leaves: list[Leaf], step: Step, z0s: list[Any], given: list[Tensor] | None = None
) -> list[int]:
    """One for each scale and kind of z0; given: what points uphill, where it was computed before.
    Returns the places of what the kernel cannot read.

    The host's time for a parameter counts: a GPU does a small model sooner than this loop.
    """
    from sodaopt.backends.triton import elementwise as lines

    method, c = step.method, step.c
    geometry: Any = method.geometry
    momentum = method.keeps_m and given is None
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
        z, kind = z0s[j]
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
    """Parameter, gradient and fp32 state, of one shape on one device, in memory from end to end."""
    p, g, *state = tensors
    if p.dtype not in KINDS or g.dtype not in KINDS or g.is_neg():
        return False
    if not all(t is None or t.dtype is torch.float32 for t in state):
        return False
    alike = (p.device, p.shape)
    return all(
        t is None
        or (type(t) in sharded.PLAIN and t.is_contiguous() and (t.device, t.shape) == alike)
        for t in tensors
    )


def _scales(leaves: list[Leaf], step: Step) -> list[float]:
    """What the kernel's u is multiplied by, for each parameter."""
    geometry, gamma = step.method.geometry, step.gamma
    at = Context([leaf.p.shape for leaf in leaves], [], step.k, step.lr, [])
    if isinstance(geometry, Ball):
        return [-(gamma * width) for width in geometry.widths(at)]
    if isinstance(geometry, Sharp):
        return [-(gamma * width * width) for width in geometry.widths(at)]
    return [-gamma] * len(leaves)


def _z0s(leaves: list[Leaf], step: Step) -> list[tuple[Any, Any]]:
    anchored = step.method.centre == "init"
    return [_z0(leaf, step) if anchored else (0, None) for leaf in leaves]


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
