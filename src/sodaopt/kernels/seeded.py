"""x <- x + lam (z0 - x) with z0 made from its seed in registers: no memory, and one pass over x.

The bits are those of `sodaopt.philox` and `sodaopt.init` in plain torch operations on the same
device: z0 is rounded after each product and sum (the kernel is compiled without contraction), and
the pull is fused as torch's `lerp_` is.
"""

from __future__ import annotations

import math
import struct
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from ..init import Init, Spec
from .tables import CHUNK, DTYPES, table

BLOCK = 256
"""Philox blocks, of four words each, that a program makes at a time."""


@triton.jit
def _pull(
    rows, lam, KIND: tl.constexpr, X: tl.constexpr, P: tl.constexpr, ALIGNED: tl.constexpr,
    EDGE: tl.constexpr, ROOT2: tl.constexpr, TURN: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    rows += tl.program_id(0).to(tl.int64) * 6
    n, start = tl.load(rows), tl.load(rows + 2)
    x_ptr = tl.load(rows + 1).to(tl.pointer_type(X))
    stream, key, numbers = tl.load(rows + 3), tl.load(rows + 4), tl.load(rows + 5)
    a = numbers.to(tl.int32).to(tl.float32, bitcast=True)
    b = (numbers >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    PER_BLOCK: tl.constexpr = 2 if KIND == "normal" else 4  # elements
    STEP: tl.constexpr = PER_BLOCK * BLOCK
    behind = start % PER_BLOCK  # elements of the first block that come before this chunk
    STOP: tl.constexpr = CHUNK if ALIGNED else CHUNK + STEP
    if ALIGNED:
        behind = 0
        x_ptr = tl.multiple_of(x_ptr, 16)
    zero = tl.zeros((BLOCK,), tl.int64)
    for begin in range(0, STOP, STEP):
        block = start // PER_BLOCK + begin // PER_BLOCK + tl.arange(0, BLOCK)
        w0, w1, w2, w3 = tl.philox_impl(
            block.to(tl.uint32),
            (block >> 32).to(tl.uint32),
            (zero + stream).to(tl.uint32),
            (zero + (stream >> 32)).to(tl.uint32),
            (zero + key).to(tl.uint32),
            (zero + (key >> 32)).to(tl.uint32),
        )
        even, odd = tl.interleave(w0, w2), tl.interleave(w1, w3)
        if KIND == "normal":
            r = tl.sqrt_rn(-2 * libdevice.log1p(-_uniform(even)))
            z = a + b * r * libdevice.cos(TURN * _uniform(odd))
        else:
            w = tl.interleave(even, odd)
            if KIND == "uniform":
                z = a + b * _uniform(w)
            elif KIND == "sign":
                z = a * ((w & 1).to(tl.int32) * 2 - 1).to(tl.float32)
            else:
                u = (2 * _uniform(w) - 1) * EDGE
                z = a + b * tl.clamp(libdevice.erfinv(u) * ROOT2, -2.0, 2.0)
        z = z.to(P).to(tl.float32)

        at = begin - behind + tl.arange(0, STEP)
        inside = (at >= 0) & (at < n)
        x = tl.load(x_ptr + at, inside, 0.0).to(tl.float32)
        if lam < 0.5:
            x = tl.fma(z - x, lam, x)
        else:
            x = tl.fma(z - x, lam - 1, z)
        tl.store(x_ptr + at, x, inside)


@triton.jit
def _uniform(w):
    return (w >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2^-24


def pull_(
    xs: list[Tensor], specs: list[Spec], starts: list[int], lam: float, dtype: torch.dtype
) -> None:
    """x: contiguous, elements start.. of the parameter of its spec. All of one kind, on one device
    and of one dtype; dtype: which z0 is rounded to. Both in DTYPES."""
    at = tuple((x.numel(), x.data_ptr()) for x in xs)
    rows = _rows(at, tuple(starts), tuple(specs), xs[0].element_size(), xs[0].device)
    _pull[(len(rows),)](
        rows, lam, KIND=specs[0].init.kind, X=DTYPES[xs[0].dtype], P=DTYPES[dtype],
        ALIGNED=all(x % 16 == 0 for _, x in at) and all(start % 4 == 0 for start in starts),
        EDGE=math.erf(2 / math.sqrt(2)), ROOT2=math.sqrt(2), TURN=2 * math.pi, CHUNK=CHUNK,
        BLOCK=BLOCK, enable_fp_fusion=False,
    )  # fmt: skip


@lru_cache(maxsize=64)
def _rows(
    at: tuple[tuple[int, int], ...],
    starts: tuple[int, ...],
    specs: tuple[Spec, ...],
    size: int,
    device: torch.device,
) -> Tensor:
    tensors = []
    for (n, x), start, spec in zip(at, starts, specs, strict=True):
        same = (spec.stream, 0), (spec.seed, 0), (_numbers(spec.init), 0)
        tensors.append((n, ((x, size * CHUNK), (start, CHUNK), *same)))
    return table(tensors, device)


def _numbers(i: Init) -> int:
    """Two fp32 numbers in one: a, and what a random number is multiplied by."""
    (both,) = struct.unpack(
        "<q", struct.pack("<ff", i.a, i.b - i.a if i.kind == "uniform" else i.b)
    )
    return int(both)
