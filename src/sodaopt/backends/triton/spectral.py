"""The kernels of a spectral step: passes before and after its products, and a symmetric product.

    average_      m <- lerp(m, g, alpha), and the squared norm of each m_bar
    normalised    m_bar / ||m_bar||, stacked for the products with the short side first
    product       alpha A B^T + beta C + diagonal I, whose result is symmetric
    finish_       y <- (1 - lam) y + lam centre + gamma width u, rounded once

A program handles one tile of one matrix. Tiles are square, so that a matrix and its transpose have
equally many of them.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sodaopt.backends.triton.elementwise import dual_average, pulled, rounding_key, write
from sodaopt.backends.triton.pull import lerp
from sodaopt.backends.triton.tables import COLUMNS, Launch, Table, constant, number, pointer, scale

TILE = tl.constexpr(64)


@triton.jit
def _tile(row, short, long, ALIGNED: tl.constexpr):
    """The rows and columns of this program's tile, the offsets of its elements, which of them are
    inside of the matrix, and whether its long side is stored first.

    ALIGNED: all tiles are full, and loads may be wide.
    """
    pitch, is_turned = tl.load(row + 5), tl.load(row + 10) != 0
    height, width = tl.where(is_turned, long, short), tl.where(is_turned, short, long)
    across = tl.cdiv(width, TILE)
    r = tl.program_id(0) // across * TILE + tl.arange(0, TILE)
    c = tl.program_id(0) % across * TILE + tl.arange(0, TILE)
    inside = (r[:, None] < height) & (c[None, :] < width)
    if ALIGNED:
        pitch = tl.multiple_of(pitch, 16)
        inside = tl.full((TILE, TILE), True, tl.int1)
    return r, c, r[:, None] * pitch + c[None, :], inside, is_turned


@triton.jit
def _average(
    rows, squares, numbers, short, long,
    MOMENTUM: tl.constexpr, OPTIMISM: tl.constexpr, G: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    if tl.load(numbers + 8) != 0:
        return
    row = rows + tl.program_id(1) * COLUMNS
    _r, _c, at, inside, _is_turned = _tile(row, short, long, ALIGNED)
    g = tl.load(pointer(row, 4, G, ALIGNED) + at, inside, other=0).to(tl.float32)
    g = g * number(numbers, 7)
    m_ptr = pointer(row, 1, tl.float32, ALIGNED) + at
    alpha, alpha_bar = number(numbers, 0), number(numbers, 1)
    d = dual_average(g, m_ptr, inside, alpha, alpha_bar, MOMENTUM, OPTIMISM)
    wide = d.to(tl.float64)  # squares of 1e20 overflow in fp32
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(squares + tile, tl.sum(wide * wide))


@triton.jit(do_not_specialize=["first"])
def _normalise(
    rows, squares, numbers, X, first, safety, smallest, short, long,
    MOMENTUM: tl.constexpr, OPTIMISM: tl.constexpr, G: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(1)
    row = rows + (first + n) * COLUMNS
    r, c, at, inside, is_turned = _tile(row, short, long, ALIGNED)
    # the compiler removes loads that are not used
    g = tl.load(pointer(row, 4, G, ALIGNED) + at, inside).to(tl.float32) * number(numbers, 7)
    d = g
    if MOMENTUM:
        d = tl.load(pointer(row, 1, tl.float32, ALIGNED) + at, inside)
    if OPTIMISM:
        d = lerp(d, g, number(numbers, 1))
    length = tl.sqrt(tl.load(squares + first + n)).to(tl.float32) * safety
    # an overflowed length becomes NaN: a division by infinity would look like a zero gradient
    d = tl.div_rn(d, tl.maximum(length, smallest) + length * 0)
    X += n.to(tl.int64) * short * long
    if is_turned:
        tl.store(X + c[:, None] * long + r[None, :], tl.trans(d), tl.trans(inside))
    else:
        tl.store(X + r[:, None] * long + c[None, :], d, inside)


@triton.jit(do_not_specialize=["first"])
def _finish(
    rows, U, numbers, first, short, long,
    CENTRE: tl.constexpr, P: tl.constexpr, Z: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    if tl.load(numbers + 8) != 0:
        return
    n = tl.program_id(1)
    row = rows + (first + n) * COLUMNS
    r, c, at, inside, is_turned = _tile(row, short, long, ALIGNED)
    U += n.to(tl.int64) * short * long
    if is_turned:
        u = tl.trans(tl.load(U + c[:, None] * long + r[None, :], tl.trans(inside)))
    else:
        u = tl.load(U + r[:, None] * long + c[None, :], inside)
    p_ptr, z_ptr = pointer(row, 0, P, ALIGNED), pointer(row, 3, Z, ALIGNED)
    y = pulled(p_ptr + at, z_ptr + at, constant(row), inside, number(numbers, 2), CENTRE)
    y += u.to(tl.float32) * scale(row, numbers)
    index = (tl.load(row + 6) + at).to(tl.uint32)
    write(p_ptr + at, y, inside, index, rounding_key(row, numbers), P)


class Matrices:
    """Matrices of one shape, up to transposition, that share all dtypes.

    dtype: the dtype of the products.
    safety, smallest: a matrix is divided by `safety` times its norm, or by `smallest`.
    """

    def __init__(
        self, table: Table, short: int, long: int, dtype: torch.dtype, safety: float,
        smallest: float, constants: dict[str, Any],
    ) -> None:  # fmt: skip
        self.dtype, self.safety, self.smallest = dtype, safety, smallest
        self.table, self.device, self.short, self.long = table, table.device, short, long
        self.n, self.tiles = len(table.owners), -(-short // TILE.value) * -(-long // TILE.value)
        self.fills = not (short % TILE.value or long % TILE.value)
        kernels = _average, _normalise, _finish
        launches = (Launch(kernel, self.device, constants) for kernel in kernels)
        self.average, self.normalise, self.finish = launches

    def _run(self, launch: Launch, n: int, *args: Any) -> None:
        """Run a kernel on n matrices."""
        is_aligned = self.fills and self.table.is_aligned
        launch((self.tiles, n, 1), is_aligned, self.table.rows, *args, self.short, self.long)

    def average_(self, numbers: Tensor) -> Tensor:
        """Average the gradients into m. Return the squared norm of each m_bar in float64."""
        squares = torch.empty(self.n, self.tiles, dtype=torch.float64, device=self.device)
        self._run(self.average, self.n, squares, numbers)
        return squares.sum(1)

    def normalised(self, part: range, squares: Tensor, numbers: Tensor) -> Tensor:
        """Each m_bar of a part divided by its norm. They are stacked as (n, short, long)."""
        X = torch.empty(len(part), self.short, self.long, dtype=self.dtype, device=self.device)
        divisor = self.safety, self.smallest
        self._run(self.normalise, len(part), squares, numbers, X, part.start, *divisor)
        return X

    def finish_(self, part: range, U: Tensor, numbers: Tensor) -> None:
        """Pull the parameters of a part to their centre, and add their scaled directions U."""
        self._run(self.finish, len(part), U, numbers, part.start)


# -- the symmetric product of fp16 matrices --------------------------------------------------------

SIDE = tl.constexpr(128)
DEPTH = tl.constexpr(64)
"""The side of a tile of the product, and the columns of A and B that are multiplied at a time."""
WARPS, STAGES = 8, 3
REGISTERS = 128
"""Registers of a thread. With more, only one program instead of two fits on a multiprocessor, and
while it stores, no other one multiplies."""


@triton.jit
def _product(
    A, B, C, out, alpha, beta, diagonal, side, depth,
    HAS_C: tl.constexpr, IS_SQUARE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Compute the tiles on and below the diagonal. Each is stored twice: in its own place, and
    transposed above the diagonal.

    IS_SQUARE: A and B are the same matrices.
    """
    tile = tl.program_id(0)
    i = ((tl.sqrt(8.0 * tile + 1.0) - 1.0) * 0.5).to(tl.int32)  # the row of tiles
    i = tl.where(i * (i + 1) // 2 > tile, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= tile, i + 1, i)
    j = tile - i * (i + 1) // 2
    n = tl.program_id(1).to(tl.int64)
    r, c = i * SIDE + tl.arange(0, SIDE), j * SIDE + tl.arange(0, SIDE)
    k = tl.arange(0, DEPTH)
    a_ptr = A + n * side * depth + r[:, None] * depth + k[None, :]
    b_ptr = B + n * side * depth + c[None, :] * depth + k[:, None]
    total = tl.zeros((SIDE, SIDE), tl.float32)
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
    across = -(-side // SIDE.value)
    constants = {"HAS_C": has_c, "IS_SQUARE": is_square}
    options = {"num_warps": WARPS, "num_stages": STAGES, "maxnreg": REGISTERS}
    launch = Launch(_product, device, constants, **options)
    return launch, across * (across + 1) // 2, side % SIDE.value == depth % DEPTH.value == 0
