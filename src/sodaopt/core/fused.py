"""Steps of a bucket by Triton kernels on a GPU.

A geometry names its kernel (`Geometry.kernel`). "polar" is two passes before the products and one
after them. The other kernels take the whole step in one pass.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sodaopt import backends, rounding
from sodaopt.anchors import Source
from sodaopt.core.update import Bucket
from sodaopt.geometry import State
from sodaopt.geometry.polar import SMALLEST, Newton
from sodaopt.geometry.views import Shape, View
from sodaopt.parallel import sharded

ELEMENTWISE = ("diagonal", "sign", "identity")
WORKSPACE = 112 << 20
SHARE = 1 / 8
"""The matrices of one shape are multiplied in parts. A part takes at most WORKSPACE bytes, or this
share of the bucket's parameters if that is more."""


def kernels_run_on(p: Tensor) -> bool:
    return p.is_cuda and backends.usable(p.device)


def is_fusable(p: Tensor, state: dict[str, Any], kernel: str, z0: Source | None) -> bool:
    """Whether the kernel can read the parameter, its gradient, state and z0."""
    if p.dtype in rounding.HALVES and rounding.first_element(p) is None:
        return False
    moments = [state[name] for name in ("m", "v") if name in state]
    if any(t.dtype != torch.float32 for t in moments):
        return False
    tensors: list[Any] = [p, p.grad, *moments]
    if type(p) not in backends.PLAIN:
        if kernel == "polar" or not sharded.is_placed_like(p.grad, p):
            return False
        tensors = [sharded.local(t) for t in tensors]
    if isinstance(z0, Tensor):
        tensors.append(z0)
    elif z0 is not None and not isinstance(z0, float):
        return False
    return backends.readable_together(tensors)


class Pointers(NamedTuple):
    """Where the tensors of one parameter are. The addresses are read again at each step.

    z: the address of z0, or the bits of a number.
    kind: the dtype of z0, or the type of a number or None.
    start, prefix: for the rounding bits of a 16-bit parameter, the index of its first element and
    the key's prefix.
    """

    p: Callable[[], int]
    m: Callable[[], int]
    v: Callable[[], int]
    z: Callable[[], int]
    kind: Any
    start: int
    prefix: int


def pointers(b: Bucket) -> list[Pointers]:
    if not b.pointers:
        z0: list[Any] = b.z0 or [None] * len(b.params)
        each = zip(b.params, b.state, b.indices, z0, strict=True)
        b.pointers = [_pointers(b, *one) for one in each]
    return b.pointers


def _pointers(b: Bucket, p: Tensor, state: State, index: int, z: Any) -> Pointers:
    m, v = (sharded.local(state[n]).data_ptr if n in state else _nowhere for n in ("m", "v"))
    start, prefix = 0, 0
    if p.dtype in rounding.HALVES:
        start, prefix = rounding.first_element(p) or 0, rounding.cached_prefix(b.seed, index)
    if isinstance(z, Tensor):
        return Pointers(sharded.local(p).data_ptr, m, v, z.data_ptr, z.dtype, start, prefix)
    bits = 0 if z is None else _bits(z)
    return Pointers(sharded.local(p).data_ptr, m, v, lambda: bits, type(z), start, prefix)


def _nowhere() -> int:
    return 0


@lru_cache
def _bits(number: float) -> int:
    """The bits of a number in fp32."""
    return int(struct.unpack("<i", struct.pack("<f", number))[0])


def _centre(b: Bucket, kind: Any) -> tuple[str, torch.dtype | None]:
    """The name of the centre for a kernel, and the dtype of z0 if it is a tensor."""
    if b.method.centre != "init":
        return b.method.centre, None
    return ("number", None) if kind is float else ("tensor", kind)


# -- maps that act on each entry ------------------------------------------------------------------


def elementwise_step(b: Bucket) -> None:
    """Take one step, with one launch for each scale, dtype of the gradients and kind of z0."""
    from sodaopt.backends.triton.elementwise import step_

    method = b.method
    shards = [sharded.local(p) for p in b.params] if b.is_sharded else b.params
    written = [shards, *(b.kept(n) for n in ("m", "v") if n in b.state[0])]
    scales = method.geometry.kernel_scales(b.gamma, b)
    launches: dict[Any, tuple[list[int], list[tuple[int, ...]]]] = {}
    for j, (p, g, at) in enumerate(zip(shards, b.gradients(), pointers(b), strict=True)):
        members, rows = launches.setdefault((scales[j], g.dtype, at.kind), ([], []))
        members.append(j)
        rows.append((p.numel(), at.p(), g.data_ptr(), at.m(), at.v(), at.z(), at.start, at.prefix))
    rate, eps = method.geometry.kernel_constants(b.k, b.lr)
    for (scale, dtype, kind), (members, rows) in launches.items():
        centre, z0 = _centre(b, kind)
        step_(
            [tensors[j] for tensors in written for j in members],
            tuple(rows),
            (b.c.alpha, b.c.alpha_bar, b.c.lam, rate, eps, scale),
            b.k,
            p=shards[0].dtype,
            g=dtype,
            z0=z0,
            MAP=b.kernel,
            CENTRE=centre,
            MOMENTUM=method.keeps_m,
            OPTIMISM=method.keeps_m and method.alpha_bar != 0,
            MAXIMIZE=b.maximize,
        )


# -- polar factors --------------------------------------------------------------------------------


def polar_step(b: Bucket) -> None:
    """Take one step along polar factors: two passes before the products, and one after them."""
    from sodaopt.backends.triton import spectral

    polar: Newton = b.method.geometry.norm.polar  # type: ignore[attr-defined]
    dtype = polar.dtype_on(b.params[0].device, torch.float32)
    limit = max(WORKSPACE, SHARE * sum(p.nbytes for p in b.params))
    with torch.cuda.device_of(b.params[0]):  # type: ignore[no-untyped-call]
        for M in _matrices(b):
            squares = spectral.average_(M, b.c.alpha, b.c.alpha_bar)
            divisor = squares, polar.safety, SMALLEST
            # X, U and one Gram matrix. They have no names here, so that they are freed early.
            for part in _parts(
                len(M.rows), M.short * (2 * M.long + M.short) * dtype.itemsize, limit
            ):
                spectral.finish_(
                    M, part, polar.products(
                        spectral.normalised(M, part, *divisor, b.c.alpha_bar, dtype)
                    ),
                    b.c.lam, b.gamma, b.k,
                )  # fmt: skip


def _matrices(b: Bucket) -> list[Any]:
    """The matrices of the bucket by shape, dtype of the gradients and kind of z0."""
    from sodaopt.backends.triton.spectral import Matrices

    method, view = b.method, b.method.geometry.norm.view  # type: ignore[attr-defined]
    scales = method.geometry.kernel_scales(1.0, b)
    p_size = b.params[0].element_size()
    groups: dict[Any, tuple[list[tuple[int, ...]], list[Tensor]]] = {}
    for j, (p, g, at) in enumerate(zip(b.params, b.gradients(), pointers(b), strict=True)):
        short, long, is_turned, pitch, starts = _layout(view, p.shape)
        rows, written = groups.setdefault((short, long, g.dtype, at.kind), ([], []))
        written += [p, b.state[j]["m"]] if method.keeps_m else [p]
        z_size = at.kind.itemsize if isinstance(at.kind, torch.dtype) else 0
        for n in starts:
            rows.append((
                at.p() + n * p_size, g.data_ptr() + n * g.element_size(), at.m() + n * 4,
                at.z() + n * z_size, pitch, is_turned, at.start + n, at.prefix, _bits(scales[j]),
            ))  # fmt: skip
    return [
        Matrices(
            tuple(rows), short, long, written, b.params[0].dtype, dtype, *_centre(b, kind),
            MAXIMIZE=b.maximize, MOMENTUM=method.keeps_m,
            OPTIMISM=method.keeps_m and method.alpha_bar != 0,
        )
        for (short, long, dtype, kind), (rows, written) in groups.items()
    ]  # fmt: skip


@lru_cache(maxsize=1024)
def _layout(view: View, shape: Shape) -> tuple[int, int, int, int, tuple[int, ...]]:
    """The short and the long side of the matrices of a parameter, and where they are in memory."""
    starts, rows, columns, pitch = view(shape).stored(shape)
    short, long = sorted((rows, columns))
    return short, long, int(rows > columns), pitch, tuple(starts)


def _parts(n: int, bytes_each: int, limit: float) -> list[range]:
    """Cut range(n) into equal parts of at most `limit` bytes, or single matrices."""
    most = max(1, int(limit // bytes_each))
    size = -(-n // -(-n // most))
    return [range(begin, min(begin + size, n)) for begin in range(0, n, size)]
