"""The passes of a spectral step before and after the products.

    average_      m <- lerp(m, g, alpha), and the squared norm of each m_bar
    normalised    m_bar / ||m_bar||, stacked for the products with the short side first
    finish_       y <- (1 - lam) y + lam centre + gamma scale u, rounded once

A program handles one tile of one matrix. Tiles are square, so that a matrix and its transpose have
equally many of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sodaopt.backends.triton.pull import lerp
from sodaopt.backends.triton.rounding import _key, _mix, _rounded
from sodaopt.backends.triton.tables import DTYPES, Rows, aligned, table

TILE = 64


@dataclass(frozen=True)
class Matrices:
    """Matrices of one shape, up to transposition, that share all dtypes.

    rows: nine numbers a matrix. The first four are the addresses of its first element in the
    parameter, the gradient, m and z0 (0 if unused, the bits of a constant z0). Then come the
    distance of two rows in memory, whether the long side is stored first, the index of its first
    element in the parameter, `rounding.prefix`, and the bits of its scale.
    written: the parameters and their m.
    p, g, z0: dtypes of parameters, gradients and z0.
    CENTRE, MAXIMIZE, MOMENTUM, OPTIMISM: constants of the kernels.
    """

    rows: Rows
    short: int
    long: int
    written: list[Tensor]
    p: torch.dtype
    g: torch.dtype
    CENTRE: str
    z0: torch.dtype | None
    MAXIMIZE: bool
    MOMENTUM: bool
    OPTIMISM: bool

    @cached_property
    def table(self) -> Tensor:
        return table(self.rows, self.written[0].device)

    @cached_property
    def tiles(self) -> int:
        return -(-self.short // TILE) * -(-self.long // TILE)

    @cached_property
    def even(self) -> bool:
        """Whether all tiles are full and wide loads may be used."""
        last = 4 if self.CENTRE == "tensor" else 3
        addresses = (a for row in self.rows for a in (*row[:last], row[4]))
        return self.short % TILE == self.long % TILE == 0 and aligned(*addresses)


@triton.jit
def _tile(row, short, long, EVEN: tl.constexpr, TILE: tl.constexpr):
    """The rows and columns of this program's tile, the elements' indices, and which exist."""
    pitch, is_turned = tl.load(row + 4), tl.load(row + 5) != 0
    height, width = tl.where(is_turned, long, short), tl.where(is_turned, short, long)
    across = tl.cdiv(width, TILE)
    r = tl.program_id(0) // across * TILE + tl.arange(0, TILE)
    c = tl.program_id(0) % across * TILE + tl.arange(0, TILE)
    inside = (r[:, None] < height) & (c[None, :] < width)
    if EVEN:
        pitch = tl.multiple_of(pitch, 16)
        inside = tl.full((TILE, TILE), True, tl.int1)
    return r, c, r[:, None] * pitch + c[None, :], inside, is_turned


@triton.jit
def _pointer(row, column: tl.constexpr, T: tl.constexpr, EVEN: tl.constexpr):
    pointer = tl.load(row + column).to(tl.pointer_type(T))
    if EVEN:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _average(
    rows, squares, alpha, alpha_bar, short, long,
    MAXIMIZE: tl.constexpr, MOMENTUM: tl.constexpr, OPTIMISM: tl.constexpr, G: tl.constexpr,
    EVEN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = rows + tl.program_id(1) * 9
    _r, _c, at, inside, _is_turned = _tile(row, short, long, EVEN, TILE)
    d = tl.load(_pointer(row, 1, G, EVEN) + at, inside, other=0).to(tl.float32)
    if MAXIMIZE:
        d = -d
    if MOMENTUM:
        g, m_ptr = d, _pointer(row, 2, tl.float32, EVEN)
        d = lerp(tl.load(m_ptr + at, inside, other=0), g, alpha)
        tl.store(m_ptr + at, d, inside)
        if OPTIMISM:
            d = lerp(d, g, alpha_bar)
    wide = d.to(tl.float64)  # squares of 1e20 overflow in fp32
    tl.store(
        squares + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), tl.sum(wide * wide)
    )


@triton.jit(do_not_specialize=["first"])
def _normalise(
    rows, squares, X, first, alpha_bar, safety, short, long,
    MAXIMIZE: tl.constexpr, MOMENTUM: tl.constexpr, OPTIMISM: tl.constexpr, G: tl.constexpr,
    EVEN: tl.constexpr, SMALLEST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(1)
    row = rows + (first + n) * 9
    r, c, at, inside, is_turned = _tile(row, short, long, EVEN, TILE)
    if OPTIMISM or not MOMENTUM:
        d = tl.load(_pointer(row, 1, G, EVEN) + at, inside).to(tl.float32)
        if MAXIMIZE:
            d = -d
    if MOMENTUM:
        m = tl.load(_pointer(row, 2, tl.float32, EVEN) + at, inside)
        if OPTIMISM:
            d = lerp(m, d, alpha_bar)
        else:
            d = m
    length = tl.sqrt(tl.load(squares + first + n)).to(tl.float32) * safety
    # an overflowed length becomes NaN: a division by infinity would look like a zero gradient
    d = tl.div_rn(d, tl.maximum(length, SMALLEST) + length * 0)
    X += n.to(tl.int64) * short * long
    if is_turned:
        tl.store(X + c[:, None] * long + r[None, :], tl.trans(d), tl.trans(inside))
    else:
        tl.store(X + r[:, None] * long + c[None, :], d, inside)


@triton.jit(do_not_specialize=["first", "step"])
def _finish(
    rows, U, first, lam, gamma, step, short, long,
    CENTRE: tl.constexpr, P: tl.constexpr, Z: tl.constexpr, EVEN: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(1)
    row = rows + (first + n) * 9
    r, c, at, inside, is_turned = _tile(row, short, long, EVEN, TILE)
    p_ptr = _pointer(row, 0, P, EVEN)
    y = tl.load(p_ptr + at, inside).to(tl.float32)
    if CENTRE == "origin":
        y = y * (1 - lam)
    elif CENTRE == "tensor":
        y = lerp(y, tl.load(_pointer(row, 3, Z, EVEN) + at, inside).to(tl.float32), lam)
    elif CENTRE == "number":
        y = lerp(y, tl.load(row + 3).to(tl.int32).to(tl.float32, bitcast=True), lam)
    U += n.to(tl.int64) * short * long
    if is_turned:
        u = tl.trans(tl.load(U + c[:, None] * long + r[None, :], tl.trans(inside)))
    else:
        u = tl.load(U + r[:, None] * long + c[None, :], inside)
    scale = tl.load(row + 8).to(tl.int32).to(tl.float32, bitcast=True) * gamma
    y = y + u.to(tl.float32) * scale
    if tl.float32 != P:
        number = (tl.load(row + 6) + at).to(tl.uint32)
        key = _key(tl.load(row + 7).to(tl.uint32), step)
        y = _rounded(y, _mix(number * 0x9E3779B1 + key), P)
    tl.store(p_ptr + at, y, inside)


def average_(M: Matrices, alpha: float, alpha_bar: float) -> Tensor:
    """Average the gradients into m. Return the squared norm of each m_bar in float64."""
    n, tiles = len(M.rows), M.tiles
    squares = torch.empty(n, tiles, dtype=torch.float64, device=M.written[0].device)
    _average[(tiles, n)](
        M.table, squares, float(alpha), float(alpha_bar), M.short, M.long,
        **_constants(M),
    )  # fmt: skip
    torch.autograd.graph.increment_version(M.written)
    return squares.sum(1)


def normalised(
    M: Matrices, part: range, squares: Tensor, safety: float, smallest: float, alpha_bar: float,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Each m_bar of a part divided by `safety` times its norm, or by `smallest`.

    They are stacked as (n, short, long).
    """
    X = torch.empty(len(part), M.short, M.long, dtype=dtype, device=M.written[0].device)
    _normalise[(M.tiles, len(part))](
        M.table, squares, X, part.start, float(alpha_bar), safety,
        M.short, M.long, SMALLEST=smallest, **_constants(M),
    )  # fmt: skip
    return X


def finish_(M: Matrices, part: range, U: Tensor, lam: float, gamma: float, step: int) -> None:
    """Pull the parameters of a part to their centre, and add their scaled directions U."""
    _finish[(M.tiles, len(part))](
        M.table, U, part.start, float(lam), float(gamma), step,
        M.short, M.long, CENTRE=M.CENTRE, P=DTYPES[M.p],
        Z=None if M.z0 is None else DTYPES[M.z0], EVEN=M.even, TILE=TILE,
    )  # fmt: skip


def _constants(M: Matrices) -> dict[str, Any]:
    return {
        "MAXIMIZE": M.MAXIMIZE, "MOMENTUM": M.MOMENTUM, "OPTIMISM": M.OPTIMISM, "G": DTYPES[M.g],
        "EVEN": M.even, "TILE": TILE,
    }  # fmt: skip
