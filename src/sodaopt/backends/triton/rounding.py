"""Stochastic rounding to 16 bits with the random bits of `sodaopt.rounding`, in one pass."""

import triton
import triton.language as tl
from torch import Tensor

from sodaopt.backends.triton.tables import CHUNK, DTYPES, address, chunk, launch, pointer

BLOCK = tl.constexpr(1024)
"""Elements that a program handles at a time."""


@triton.jit(do_not_specialize=["step"])
def _write(chunks, rows, step, P: tl.constexpr, ALIGNED: tl.constexpr):
    row, first, n = chunk(chunks, rows, 5, 2, ALIGNED)
    x_ptr = pointer(row, 0, tl.float32, ALIGNED) + first
    p_ptr = pointer(row, 1, P, ALIGNED) + first
    start = (tl.load(row + 3) + first).to(tl.uint32)
    key = step_key(tl.load(row + 4), step)
    for begin in range(0, CHUNK, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, at < n)
        tl.store(p_ptr + at, rounded(x, start + at.to(tl.uint32), key, P), at < n)


@triton.jit
def _mix(h):
    """`sodaopt.rounding._mix` of 32-bit words."""
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def step_key(prefix, step):
    """`sodaopt.rounding.key`, from the prefix that is the same at each step."""
    return _mix(_mix(prefix.to(tl.uint32) ^ step.to(tl.uint32)) + 0x9E3779B9)


@triton.jit
def rounded(x, index, key, P: tl.constexpr):
    """Round x to one of its two neighbours in P, as `sodaopt.rounding.stochastic` does.

    index: the index of each element in the whole parameter.
    """
    SPARE: tl.constexpr = 0xFFFF if tl.bfloat16 == P else 0x1FFF
    SCALE: tl.constexpr = 1.0 if tl.bfloat16 == P else 2.0**-112
    bits = (x * SCALE).to(tl.uint32, bitcast=True)
    bits = (bits + (_mix(index * 0x9E3779B1 + key) & SPARE)) & (0xFFFFFFFF - SPARE)
    y = bits.to(tl.float32, bitcast=True) * (1 / SCALE)
    y = tl.where(tl.abs(x) < float("inf"), y, x + x)  # the sum makes a NaN quiet
    if tl.bfloat16 == P:  # Triton's interpreter casts subnormals wrongly
        y = (y.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16).to(P, bitcast=True)
    return y.to(P)


def write_(members: list[tuple[Tensor, Tensor, int, int]], step: int) -> None:
    """Round each fp32 x into its p. All are contiguous on one device, and all p share a dtype.

    members: for each parameter p, x, the index of p's first element in the whole parameter, and the
    parameter's `rounding.prefix`.
    """
    ps = [p for p, *_ in members]
    rows = tuple((address(x), address(p), x.numel(), *numbers) for p, x, *numbers in members)
    launch(_write, rows, ps, step, P=DTYPES[ps[0].dtype])
