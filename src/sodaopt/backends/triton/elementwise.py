"""The five lines of the paper in one pass, for maps that act on each entry."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sodaopt.backends.triton.pull import lerp
from sodaopt.backends.triton.rounding import _key, _mix, _rounded
from sodaopt.backends.triton.tables import DTYPES, Rows, aligned, launch

BLOCK = 1024
"""Elements that a program handles at a time."""


@triton.jit(do_not_specialize=["step"])
def _step(
    chunks, columns, alpha, alpha_bar, lam, rate, eps, scale, step,
    MAP: tl.constexpr, CENTRE: tl.constexpr, MOMENTUM: tl.constexpr, OPTIMISM: tl.constexpr,
    MAXIMIZE: tl.constexpr, P: tl.constexpr, G: tl.constexpr, Z: tl.constexpr,
    ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    chunks += tl.program_id(0).to(tl.int64) * 2
    columns += tl.load(chunks) * 8
    first = tl.load(chunks + 1).to(tl.int64) * CHUNK
    n = tl.minimum(tl.load(columns) - first, CHUNK)
    p_ptr = tl.load(columns + 1).to(tl.pointer_type(P)) + first
    g_ptr = tl.load(columns + 2).to(tl.pointer_type(G)) + first
    m_ptr = tl.load(columns + 3).to(tl.pointer_type(tl.float32)) + first
    v_ptr = tl.load(columns + 4).to(tl.pointer_type(tl.float32)) + first
    start = (tl.load(columns + 6) + first).to(tl.uint32)
    key = _key(tl.load(columns + 7).to(tl.uint32), step)
    if CENTRE == "tensor":
        z_ptr = tl.load(columns + 5).to(tl.pointer_type(Z)) + first
    if CENTRE == "number":
        z = tl.load(columns + 5).to(tl.int32).to(tl.float32, bitcast=True)
    if ALIGNED:
        p_ptr, g_ptr = tl.multiple_of(p_ptr, 16), tl.multiple_of(g_ptr, 16)
        m_ptr, v_ptr = tl.multiple_of(m_ptr, 16), tl.multiple_of(v_ptr, 16)
        if CENTRE == "tensor":
            z_ptr = tl.multiple_of(z_ptr, 16)
    for begin in range(0, CHUNK, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        y = tl.load(p_ptr + at, at < n).to(tl.float32)
        g = tl.load(g_ptr + at, at < n).to(tl.float32)
        if MAXIMIZE:
            g = -g
        d = g
        if MOMENTUM:
            d = lerp(tl.load(m_ptr + at, at < n), g, alpha)
            tl.store(m_ptr + at, d, at < n)
        if OPTIMISM:
            d = lerp(d, g, alpha_bar)
        if MAP == "diagonal":
            v = g * g * rate + tl.load(v_ptr + at, at < n) * (1 - rate)
            tl.store(v_ptr + at, v, at < n)
            u = tl.div_rn(d, tl.sqrt_rn(v) + eps) * scale
        elif MAP == "sign":
            sign = tl.where(d > 0, 1.0, tl.where(d < 0, -1.0, 0.0))
            u = (sign + 0.0 * d) * scale  # 0 d keeps NaN and inf visible
        else:  # "identity"
            u = d * scale
        if CENTRE == "origin":
            y = y * (1 - lam)
        elif CENTRE == "tensor":
            y = lerp(y, tl.load(z_ptr + at, at < n).to(tl.float32), lam)
        elif CENTRE == "number":
            y = lerp(y, z, lam)
        y = y + u
        if tl.float32 != P:
            y = _rounded(y, _mix((start + at.to(tl.uint32)) * 0x9E3779B1 + key), P)
        tl.store(p_ptr + at, y, at < n)


def step_(
    written: list[Tensor], rows: Rows, coefs: tuple[float, ...], step: int, *, p: torch.dtype,
    g: torch.dtype, z0: torch.dtype | None, **options: Any,
) -> None:  # fmt: skip
    """Step many parameters of one method.

    written: the parameters and their state.
    rows: eight numbers a parameter: its size, the addresses of parameter, gradient, m, v and z0
    (0 if unused, the bits of a constant z0), the index of its first element, `rounding.prefix`.
    coefs: alpha, alpha_bar, lam, rate, eps, scale.
    p, g, z0: dtypes of parameters, gradients and z0.
    options: the kernel's constants MAP, CENTRE, MOMENTUM, OPTIMISM and MAXIMIZE.
    """
    if any(row[1] == 0 or row[2] == 0 for row in rows):
        raise RuntimeError("a parameter or gradient has no memory: its storage was freed")
    last = 6 if options["CENTRE"] == "tensor" else 5
    wide = aligned(*(a for row in rows for a in row[1:last]))
    launch(
        _step, rows, written, *map(float, coefs), step, P=DTYPES[p], G=DTYPES[g],
        Z=None if z0 is None else DTYPES[z0], ALIGNED=wide, BLOCK=BLOCK, **options,
    )  # fmt: skip
