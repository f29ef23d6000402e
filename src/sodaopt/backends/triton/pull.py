"""x <- x + lam (z - x) for fp32 x and z of any kernel dtype: one pass, without a copy of z."""

import triton
import triton.language as tl
from torch import Tensor

from sodaopt.backends.triton.tables import CHUNK, DTYPES, address, chunk, launch, pointer

BLOCK = tl.constexpr(2048)
"""Elements that a program handles at a time."""


@triton.jit
def _pull(chunks, rows, lam, Z: tl.constexpr, ALIGNED: tl.constexpr):
    row, first, n = chunk(chunks, rows, 3, 2, ALIGNED)
    x_ptr = pointer(row, 0, tl.float32, ALIGNED) + first
    z_ptr = pointer(row, 1, Z, ALIGNED) + first
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
    rows = tuple((address(x), address(z), x.numel()) for x, z in zip(xs, zs, strict=True))
    launch(_pull, rows, xs, lam, Z=DTYPES[zs[0].dtype])
