"""The five lines of the paper in one pass, for maps that act on each entry."""

import triton
import triton.language as tl

from sodaopt.backends.triton.pull import lerp
from sodaopt.backends.triton.rounding import rounded, step_key
from sodaopt.backends.triton.tables import CHUNK, COLUMNS, chunk, constant, number, pointer, scale

BLOCK = tl.constexpr(1024)
"""Elements that a program handles at a time."""


@triton.jit
def step(
    chunks, rows, numbers,
    MAP: tl.constexpr, CENTRE: tl.constexpr, MOMENTUM: tl.constexpr, OPTIMISM: tl.constexpr,
    P: tl.constexpr, G: tl.constexpr, Z: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    if tl.load(numbers + 8) != 0:
        return
    row, first, n = chunk(chunks, rows, COLUMNS, 5, ALIGNED)
    alpha, alpha_bar, lam = number(numbers, 0), number(numbers, 1), number(numbers, 2)
    rate, eps, factor_of_g = number(numbers, 4), number(numbers, 5), number(numbers, 7)
    width = scale(row, numbers)
    p_ptr = pointer(row, 0, P, ALIGNED) + first
    m_ptr = pointer(row, 1, tl.float32, ALIGNED) + first
    v_ptr = pointer(row, 2, tl.float32, ALIGNED) + first
    z_ptr = pointer(row, 3, Z, ALIGNED) + first
    g_ptr = pointer(row, 4, G, ALIGNED) + first
    z, key = constant(row), rounding_key(row, numbers)
    start = (tl.load(row + 6) + first).to(tl.uint32)
    for begin in range(0, CHUNK, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        inside = at < n
        y = pulled(p_ptr + at, z_ptr + at, z, inside, lam, CENTRE)  # loads come before stores
        g = tl.load(g_ptr + at, inside, other=0).to(tl.float32) * factor_of_g
        d = dual_average(g, m_ptr + at, inside, alpha, alpha_bar, MOMENTUM, OPTIMISM)
        if MAP == "diagonal":
            v = g * g * rate + tl.load(v_ptr + at, inside) * (1 - rate)
            tl.store(v_ptr + at, v, inside)
            u = tl.div_rn(d, tl.sqrt_rn(v) + eps) * width
        elif MAP == "sign":
            sign = tl.where(d > 0, 1.0, tl.where(d < 0, -1.0, 0.0))
            u = (sign + 0.0 * d) * width  # 0 d keeps NaN and inf visible
        else:  # "identity"
            u = d * width
        write(p_ptr + at, y + u, inside, start + at.to(tl.uint32), key, P)


@triton.jit
def dual_average(
    g, m_ptr, inside, alpha, alpha_bar, MOMENTUM: tl.constexpr, OPTIMISM: tl.constexpr
):
    """m <- lerp(m, g, alpha). Return m_bar = lerp(m, g, alpha_bar)."""
    d = g
    if MOMENTUM:
        d = lerp(tl.load(m_ptr, inside, other=0), g, alpha)
        tl.store(m_ptr, d, inside)
    if OPTIMISM:
        d = lerp(d, g, alpha_bar)
    return d


@triton.jit
def pulled(p_ptr, z_ptr, z, inside, lam, CENTRE: tl.constexpr):
    """(1 - lam) y + lam centre.

    z: the z0 of the centre "number".
    """
    y = tl.load(p_ptr, inside).to(tl.float32)
    if CENTRE == "origin":
        y = y * (1 - lam)
    elif CENTRE == "tensor":
        y = lerp(y, tl.load(z_ptr, inside).to(tl.float32), lam)
    elif CENTRE == "number":
        y = lerp(y, z, lam)
    return y


@triton.jit
def rounding_key(row, numbers):
    """The rounding key of this step. For fp32 it is not used, and the compiler removes it."""
    return step_key(tl.load(row + 7), tl.load(numbers + 6).to(tl.int64))


@triton.jit
def write(p_ptr, y, inside, index, key, P: tl.constexpr):
    """Store y, rounded if P has 16 bits.

    index: the index of each element in the whole parameter.
    """
    if tl.float32 != P:
        y = rounded(y, index, key, P)
    tl.store(p_ptr, y, inside)
