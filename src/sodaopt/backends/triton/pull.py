"""x <- x + lam (z - x) for fp32 x and z of any kernel dtype: one pass, without a copy of z."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sodaopt.backends.triton.tables import DTYPES, address, launch

BLOCK = 2048
"""Elements that a program handles at a time."""


@triton.jit
def _pull(
    chunks, columns, lam, Z: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    chunks += tl.program_id(0).to(tl.int64) * 2
    columns += tl.load(chunks) * 3
    first = tl.load(chunks + 1).to(tl.int64) * CHUNK
    n = tl.minimum(tl.load(columns) - first, CHUNK).to(tl.int32)
    x_ptr = tl.load(columns + 1).to(tl.pointer_type(tl.float32)) + first
    z_ptr = tl.load(columns + 2).to(tl.pointer_type(Z)) + first
    if ALIGNED:
        x_ptr, z_ptr = tl.multiple_of(x_ptr, 16), tl.multiple_of(z_ptr, 16)
        n = tl.multiple_of(n, 16)  # otherwise the masks make all loads narrow
    for begin in range(0, CHUNK, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, at < n)
        z = tl.load(z_ptr + at, at < n).to(tl.float32)
        tl.store(x_ptr + at, lerp(x, z, lam), at < n)


@triton.jit
def lerp(x, z, lam):
    """x + lam (z - x), in the form that is exact at the nearer end, as torch's lerp is."""
    if lam < 0.5:
        y = tl.fma(z - x, lam, x)
    else:
        y = tl.fma(z - x, lam - 1, z)
    return y


def pull_(xs: list[Tensor], zs: list[Tensor], lam: float) -> None:
    """Pull each fp32 x toward its z. All are contiguous on one device, and all z share a dtype."""
    rows = tuple((x.numel(), address(x), address(z)) for x, z in zip(xs, zs, strict=True))
    launch(_pull, rows, xs, lam, Z=DTYPES[zs[0].dtype], BLOCK=BLOCK)
