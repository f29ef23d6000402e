"""alpha A B^T + beta C + diagonal I for batches of fp16 matrices whose result is symmetric.

Only tiles on and below the diagonal are computed. Each tile is stored twice: in its own place, and
transposed above the diagonal.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from sodaopt.backends.triton.tables import Launch

BLOCK, DEPTH, WARPS, STAGES = 128, 64, 8, 3
REGISTERS = 128
"""Registers of a thread. With more, only one program instead of two fits on a multiprocessor, and
while it stores, no other one multiplies."""


@triton.jit
def _product(
    A, B, C, out, alpha, beta, diagonal, side, depth,
    HAS_C: tl.constexpr, IS_SQUARE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """IS_SQUARE: A and B are the same matrices."""
    tile = tl.program_id(0)
    i = ((tl.sqrt(8.0 * tile + 1.0) - 1.0) * 0.5).to(tl.int32)  # the row of tiles
    i = tl.where(i * (i + 1) // 2 > tile, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= tile, i + 1, i)
    j = tile - i * (i + 1) // 2
    n = tl.program_id(1).to(tl.int64)
    r, c = i * BLOCK + tl.arange(0, BLOCK), j * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, DEPTH)
    a_ptr = A + n * side * depth + r[:, None] * depth + k[None, :]
    b_ptr = B + n * side * depth + c[None, :] * depth + k[:, None]
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for begin in range(0, depth, DEPTH):
        if ALIGNED:
            a, b = tl.load(a_ptr + begin), tl.load(b_ptr + begin)
        else:
            inside = begin + k < depth
            a = tl.load(a_ptr + begin, (r[:, None] < side) & inside[None, :], other=0)
            b = tl.load(b_ptr + begin, (c[None, :] < side) & inside[:, None], other=0)
        total = tl.dot(a, b, total)
    here, there = r[:, None] * side + c[None, :], c[:, None] * side + r[None, :]
    inside = (r[:, None] < side) & (c[None, :] < side)
    if HAS_C:
        C += n * side * side
        total = total * alpha + beta * tl.load(C + here, inside).to(tl.float32)
        total += tl.where(r[:, None] == c[None, :], diagonal, 0.0)
    out += n * side * side
    result = total.to(out.dtype.element_ty)
    if IS_SQUARE:  # also a tile on the diagonal is symmetric, bit by bit
        tl.store(out + here, result, inside)
        if i != j:
            tl.store(out + there, tl.trans(result), tl.trans(inside))
    elif i == j:  # A B^T is symmetric up to rounding: store one half twice, by narrow stores
        half = inside & (r[:, None] >= c[None, :])
        tl.store(out + here, result, half)
        tl.store(out + there, tl.trans(result), tl.trans(half))
    else:
        tl.store(out + here, result, inside)
        tl.store(out + there, tl.trans(result), tl.trans(inside))


def product(
    A: Tensor, B: Tensor | None = None, C: Tensor | None = None, alpha: float = 1, beta: float = 1,
    diagonal: float = 0,
) -> Tensor:  # fmt: skip
    """A product as described in `sodaopt.backends.products.Symmetric`.

    All matrices are contiguous and begin at a multiple of 16 bytes, as new tensors do.
    """
    n, side, depth = A.shape
    out = torch.empty(n, side, side, dtype=A.dtype, device=A.device)
    if n:
        B = A if B is None else B
        launch, tiles, is_even = _launch(A.device, side, depth, C is not None, A is B)
        numbers = float(alpha), float(beta), float(diagonal)
        launch((tiles, n, 1), is_even, A, B, A if C is None else C, out, *numbers, side, depth)
    return out


@cache
def _launch(
    device: torch.device, side: int, depth: int, has_c: bool, is_square: bool
) -> tuple[Launch, int, bool]:
    """The kernel for a shape, its number of tiles, and whether all tiles are full."""
    across = -(-side // BLOCK)
    constants = {"HAS_C": has_c, "IS_SQUARE": is_square, "BLOCK": BLOCK, "DEPTH": DEPTH}
    options = {"num_warps": WARPS, "num_stages": STAGES, "maxnreg": REGISTERS}
    launch = Launch(_product, device, constants, **options)
    return launch, across * (across + 1) // 2, side % BLOCK == depth % DEPTH == 0
