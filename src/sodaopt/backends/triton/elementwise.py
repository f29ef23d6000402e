"""The five lines for maps that act on each entry, in one pass: what `sodaopt.lines` does in many.

The bits are those of its plain operations, for the kernel is compiled without contraction and fuses
a product and a sum where torch's own passes do.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from sodaopt.backends.triton.pull import lerp
from sodaopt.backends.triton.rounding import _key, _mix, _rounded
from sodaopt.backends.triton.tables import DTYPES, launch

BLOCK = 1024
"""Elements that a program does at a time."""


@triton.jit(do_not_specialize=["step"])
def _update(
    chunks, columns, alpha, alpha_bar, keep, rate, eps, scale, lam, stay, step,
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
            g = g * -1.0  # a minus is a difference from zero here, and loses the sign of zeros
        d = g
        if MOMENTUM:
            d = lerp(tl.load(m_ptr + at, at < n), g, alpha)
            tl.store(m_ptr + at, d, at < n)
        if OPTIMISM:
            d = lerp(d, g, alpha_bar)
        if MAP == "diagonal":
            v = tl.fma(g * g, rate, tl.load(v_ptr + at, at < n) * keep)
            tl.store(v_ptr + at, v, at < n)
            u = tl.div_rn(d, tl.sqrt_rn(v) + eps) * scale
        elif MAP == "sign":
            sign = tl.where(d > 0, 1.0, tl.where(d < 0, -1.0, 0.0))
            u = (sign + 0.0 * d) * scale
        else:  # d itself, or a direction that was computed before
            u = d * scale
        if CENTRE == "origin":
            y = y * stay
        elif CENTRE == "tensor":
            y = lerp(y, tl.load(z_ptr + at, at < n).to(tl.float32), lam)
        elif CENTRE == "number":
            y = lerp(y, z, lam)
        y = y + u
        if tl.float32 != P:
            y = _rounded(y, _mix((start + at.to(tl.uint32)) * 0x9E3779B1 + key), P)
        tl.store(p_ptr + at, y, at < n)


def update_(
    ps: list[Tensor], state: list[Tensor], rows: tuple[tuple[int, ...], ...],
    coefs: tuple[float, ...], pull: tuple[float, float, int], *, map_: str | None, g: Any,
    centre: str, z0: Any, momentum: bool, optimism: bool, maximize: bool,
) -> None:  # fmt: skip
    """state: what else is written; rows: for each p its size, where p, its gradient, m, v and z0
    are (or the bits of a number), the number of the first element and `rounding.prefix`; coefs,
    pull: the kernel's numbers."""
    if centre == "init":
        centre = "number" if z0 is float else "tensor"
    low, stop = 0, 6 if centre == "tensor" else 5
    for row in rows:
        for place in row[1:stop]:
            low |= place
    launch(
        _update, rows, [*ps, *state], *map(float, coefs), *map(float, pull[:2]), pull[2], MAP=map_,
        CENTRE=centre, MOMENTUM=momentum, OPTIMISM=optimism, MAXIMIZE=maximize,
        P=DTYPES[ps[0].dtype], G=DTYPES[g], Z=DTYPES.get(z0), ALIGNED=low % 16 == 0, BLOCK=BLOCK,
        enable_fp_fusion=False,
    )  # fmt: skip
