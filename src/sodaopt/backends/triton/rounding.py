"""Stochastic rounding to 16 bits with the random bits of `sodaopt.rounding`, in one pass."""

import triton
import triton.language as tl
from torch import Tensor

from sodaopt.backends.triton.tables import DTYPES, address, chunk, launch, pointer

BLOCK = 1024
"""Elements that a program handles at a time."""


@triton.jit(do_not_specialize=["step"])
def _write(
    chunks, rows, step, P: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, first, n = chunk(chunks, rows, 5, 2, ALIGNED, CHUNK)
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
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def step_key(prefix, step):
    """`sodaopt.rounding.key` from its prefix, which is the same at each step."""
    return _mix(_mix(prefix.to(tl.uint32) ^ step.to(tl.uint32)) + 0x9E3779B9)


@triton.jit
def rounded(x, index, key, P: tl.constexpr):
    """Round x to one of its two neighbours in P. index: of the elements in the whole parameter."""
    random = _mix(index * 0x9E3779B1 + key)
    bits = x.to(tl.uint32, bitcast=True)
    is_finite = (bits & 0x7F800000) != 0x7F800000
    if tl.bfloat16 == P:
        up = tl.where(is_finite, bits + (random & 0xFFFF), bits)
        quiet = tl.where(x != x, 0x40, 0)  # so that a NaN without its lower half is still a NaN
        y = ((up >> 16) | quiet).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        e = ((bits >> 23) & 0xFF).to(tl.int32) - 126
        e = tl.where(is_finite, tl.maximum(e - 11, -24), 0)
        ulp = ((e + 127) << 23).to(tl.float32, bitcast=True)
        q = x * ((127 - e) << 23).to(tl.float32, bitcast=True)
        low = tl.where(q < 0, tl.ceil(q), tl.floor(q))
        away = tl.abs(q - low) > (random >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2^-24
        sign = tl.where(q < 0, -1.0, tl.where(q > 0, 1.0, 0.0))
        y = ((low + tl.where(away, sign, 0.0 * sign)) * ulp).to(tl.float16)
    return y


def write_(
    ps: list[Tensor], xs: list[Tensor], starts: list[int], prefixes: list[int], step: int
) -> None:
    """Round each fp32 x into its p. All are contiguous on one device, and all p share a dtype.

    starts: the index of each p's first element in its whole parameter.
    prefixes: `rounding.prefix` of each parameter.
    """
    rows = tuple(
        (address(x), address(p), x.numel(), start, prefix)
        for p, x, start, prefix in zip(ps, xs, starts, prefixes, strict=True)
    )
    launch(_write, rows, ps, step, P=DTYPES[ps[0].dtype], BLOCK=BLOCK)
