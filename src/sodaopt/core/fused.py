"""The five lines in one pass over memory, by a Triton kernel on a GPU.

A geometry names its kernel (`Geometry.kernel`). "polar" is one pass before the products and one
after them. The other kernels are fused from end to end.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sodaopt import backends, rounding
from sodaopt.anchors import Source
from sodaopt.core.update import Bucket
from sodaopt.geometry.polar import SMALLEST, Newton
from sodaopt.geometry.views import Shape, View
from sodaopt.parallel import sharded

ELEMENTWISE = ("diagonal", "sign", "identity")
WORKSPACE = 112 << 20
SHARE = 1 / 8
"""The matrices of one shape are multiplied in parts. A part takes at most WORKSPACE bytes, or this
share of the bucket's parameters if that is more."""


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


# -- maps that act on each entry ------------------------------------------------------------------


def elementwise_step(b: Bucket) -> None:
    """Take one step, with one launch for each scale, dtype of the gradients and kind of z0."""
    from sodaopt.backends.triton.elementwise import step_

    method = b.method
    shards = [sharded.local(p) for p in b.params] if b.is_sharded else b.params
    m = b.kept("m") if method.keeps_m else []
    v = b.kept("v") if b.kernel == "diagonal" else []
    scales = method.geometry.kernel_scales(b.gamma, b)
    launches: dict[Any, list[tuple[int, tuple[int, ...]]]] = {}
    for j, (p, g, z) in enumerate(zip(shards, b.gradients(), _z0(b), strict=True)):
        m_address, v_address = m[j].data_ptr() if m else 0, v[j].data_ptr() if v else 0
        row = p.numel(), p.data_ptr(), g.data_ptr(), m_address, v_address, _last(z), *_counter(b, j)
        launches.setdefault((scales[j], g.dtype, _kind(z)), []).append((j, row))
    rate, eps = method.geometry.kernel_constants(b.k, b.lr)
    for (scale, dtype, kind), rows in launches.items():
        step_(
            [tensors[j] for tensors in (shards, m, v) if tensors for j, _ in rows],
            tuple([row for _, row in rows]),
            (b.c.alpha, b.c.alpha_bar, b.c.lam, rate, eps, scale),
            b.k,
            p=shards[0].dtype,
            g=dtype,
            z0=kind if isinstance(kind, torch.dtype) else None,
            MAP=b.kernel,
            CENTRE=_centre(b, kind),
            MOMENTUM=method.keeps_m,
            OPTIMISM=method.keeps_m and method.alpha_bar != 0,
            MAXIMIZE=b.maximize,
        )


# -- polar factors --------------------------------------------------------------------------------


def polar_step(b: Bucket) -> None:
    """Take one step along polar factors: a pass before the products, and one after them."""
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
    m: list[Any] = b.kept("m") if method.keeps_m else [None] * len(b.params)
    scales = method.geometry.kernel_scales(1.0, b)
    groups: dict[Any, tuple[list[tuple[int, ...]], list[Tensor]]] = {}
    for j, (p, g, z) in enumerate(zip(b.params, b.gradients(), _z0(b), strict=True)):
        number, prefix = _counter(b, j)
        short, long, is_turned, pitch, starts = _layout(view, p.shape)
        rows, written = groups.setdefault((short, long, g.dtype, _kind(z)), ([], []))
        written += [p] if m[j] is None else [p, m[j]]
        for start in starts:
            rows.append((
                p.data_ptr() + start * p.element_size(), g.data_ptr() + start * g.element_size(),
                0 if m[j] is None else m[j].data_ptr() + start * 4,
                z.data_ptr() + start * z.element_size() if isinstance(z, Tensor) else _last(z),
                pitch, is_turned, number + start, prefix, _bits(scales[j]),
            ))  # fmt: skip
    return [
        Matrices(
            tuple(rows), short, long, written, b.params[0].dtype, dtype,
            kind if isinstance(kind, torch.dtype) else None, MAXIMIZE=b.maximize,
            MOMENTUM=method.keeps_m, OPTIMISM=method.keeps_m and method.alpha_bar != 0,
            CENTRE=_centre(b, kind),
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


# -- what both read -------------------------------------------------------------------------------


def _z0(b: Bucket) -> list[Any]:
    return b.z0 or [None] * len(b.params)


def _kind(z: Source | None) -> Any:
    """What a launch must know of z0: a tensor's dtype, or that it is a number or unused."""
    return z.dtype if isinstance(z, Tensor) else type(z)


def _centre(b: Bucket, kind: Any) -> str:
    if b.method.centre != "init":
        return b.method.centre
    return "number" if kind is float else "tensor"


def _last(z: Any) -> int:
    """The address of z0, or the bits of a number."""
    return z.data_ptr() if isinstance(z, Tensor) else 0 if z is None else _bits(z)


def _counter(b: Bucket, j: int) -> tuple[int, int]:
    """The rounding bits of a 16-bit parameter: its first element's index, and the key's prefix."""
    if b.params[j].dtype not in rounding.HALVES:
        return 0, 0
    return rounding.first_element(b.params[j]) or 0, rounding.cached_prefix(b.seed, b.indices[j])


def _bits(number: float) -> int:
    """The bits of a number in fp32."""
    return int(struct.unpack("<i", struct.pack("<f", number))[0])
