"""x <- x + lam (z0 - x) with z0 made from its seed in registers: no memory, one pass over x.

z0 has the bits that `sodaopt.anchors.distributions` makes on this device, so that this kernel may
fill a model and plain operations may check it. That is why the kernel is compiled without fused
multiply-add.
"""

import math
import struct
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from sodaopt.backends.triton.pull import lerp
from sodaopt.backends.triton.tables import CHUNK, DTYPES, address, chunk, launch, pointer

BLOCK = tl.constexpr(256)
"""Philox blocks of four words each that a program makes at a time."""
EDGE = tl.constexpr(math.erf(2 / math.sqrt(2)))
"""The probability of a normal number within two standard deviations."""
ROOT2 = tl.constexpr(math.sqrt(2))
TURN = tl.constexpr(2 * math.pi)


@triton.jit
def _pull(
    chunks, rows, lam, KIND: tl.constexpr, X: tl.constexpr, P: tl.constexpr, ALIGNED: tl.constexpr
):
    row, first, n = chunk(chunks, rows, 7, 2, ALIGNED)
    x_ptr = pointer(row, 0, X, ALIGNED) + first
    start = tl.load(row + 3) + first
    stream, key, numbers = tl.load(row + 4), tl.load(row + 5), tl.load(row + 6)
    a = numbers.to(tl.int32).to(tl.float32, bitcast=True)
    b = (numbers >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    PER_BLOCK: tl.constexpr = 2 if KIND == "normal" else 4  # elements
    STEP: tl.constexpr = PER_BLOCK * BLOCK
    # elements of the first block that come before this chunk
    behind = 0 if ALIGNED else start % PER_BLOCK
    STOP: tl.constexpr = CHUNK if ALIGNED else CHUNK + STEP
    streams = tl.full((BLOCK,), stream, tl.int64)
    stream_low, stream_high = streams.to(tl.uint32), (streams >> 32).to(tl.uint32)
    for begin in range(0, STOP, STEP):
        block = start // PER_BLOCK + begin // PER_BLOCK + tl.arange(0, BLOCK)
        low, high = block.to(tl.uint32), (block >> 32).to(tl.uint32)
        w0, w1, w2, w3 = tl.philox(key, low, high, stream_low, stream_high)
        even, odd = tl.interleave(w0, w2), tl.interleave(w1, w3)
        if KIND == "normal":
            r = tl.sqrt_rn(-2 * libdevice.log1p(-_fraction(even)))
            z = a + b * r * libdevice.cos(_fraction(odd) * TURN)
        else:
            w = tl.interleave(even, odd)
            if KIND == "between":
                z = a + b * _fraction(w)
            elif KIND == "sign":
                z = a * ((w & 1).to(tl.int32) * 2 - 1).to(tl.float32)
            else:
                u = (2 * _fraction(w) - 1) * EDGE
                z = a + b * tl.clamp(libdevice.erfinv(u) * ROOT2, -2.0, 2.0)
        z = z.to(P).to(tl.float32)

        at = begin - behind + tl.arange(0, STEP)
        inside = (at >= 0) & (at < n)
        x = tl.load(x_ptr + at, inside).to(tl.float32)
        tl.store(x_ptr + at, lerp(x, z, lam), inside)


@triton.jit
def _fraction(w):
    """`anchors.philox.fractions` of random words."""
    return (w >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2^-24


def pull_(
    xs: list[Tensor], specs: list[Any], starts: list[int], lam: float, dtype: torch.dtype
) -> None:
    """Pull each x toward its z0. All x are contiguous and share a device and a dtype.

    specs: an `anchors.distributions.Spec` for each x. All have one kind of distribution.
    starts: the index of each x's first element in its whole parameter.
    dtype: the dtype that z0 is rounded to first.
    """
    rows = tuple(
        (address(x), 4 * start, x.numel(), start, s.stream, s.seed, _pair(s.init.a, s.init.spread))
        for x, s, start in zip(xs, specs, starts, strict=True)
    )
    kind, X, P = specs[0].init.kind, DTYPES[xs[0].dtype], DTYPES[dtype]
    launch(_pull, rows, xs, lam, KIND=kind, X=X, P=P, enable_fp_fusion=False)


def _pair(a: float, b: float) -> int:
    """Two fp32 numbers in one 64-bit integer."""
    return int(struct.unpack("<q", struct.pack("<ff", a, b))[0])
