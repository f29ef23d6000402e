"""x <- x + lam (z - x) where z has another dtype than x: one pass, without a copy of z."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tables import CHUNK, DTYPES, table

BLOCK = 2048


@triton.jit
def _pull(
    rows, lam, X: tl.constexpr, Z: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    rows += tl.program_id(0).to(tl.int64) * 3
    n = tl.load(rows)
    x_ptr, z_ptr = (
        tl.load(rows + 1).to(tl.pointer_type(X)),
        tl.load(rows + 2).to(tl.pointer_type(Z)),
    )
    if ALIGNED:
        x_ptr, z_ptr = tl.multiple_of(x_ptr, 16), tl.multiple_of(z_ptr, 16)
    for begin in range(0, CHUNK, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        inside = at < n
        x = tl.load(x_ptr + at, inside).to(tl.float32)
        z = tl.load(z_ptr + at, inside).to(tl.float32)
        if lam < 0.5:
            x = tl.fma(z - x, lam, x)
        else:
            x = tl.fma(z - x, lam - 1, z)
        tl.store(x_ptr + at, x, inside)


def pull_(xs: list[Tensor], zs: list[Tensor], lam: float) -> None:
    """Contiguous, on one device; all x of one dtype and all z of one, both in DTYPES."""
    at = tuple((x.numel(), x.data_ptr(), z.data_ptr()) for x, z in zip(xs, zs, strict=True))
    rows = _rows(at, xs[0].element_size(), zs[0].element_size(), xs[0].device)
    _pull[(len(rows),)](
        rows, lam, X=DTYPES[xs[0].dtype], Z=DTYPES[zs[0].dtype],
        ALIGNED=all(x % 16 == z % 16 == 0 for _, x, z in at), CHUNK=CHUNK, BLOCK=BLOCK,
    )  # fmt: skip


@lru_cache(maxsize=64)
def _rows(
    at: tuple[tuple[int, int, int], ...], x_size: int, z_size: int, device: torch.device
) -> Tensor:
    return table(((n, ((x, x_size * CHUNK), (z, z_size * CHUNK))) for n, x, z in at), device)
