"""The five lines of the paper in one pass, for maps that act on each entry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sodaopt.backends.triton.pull import lerp
from sodaopt.backends.triton.rounding import _key, _mix, _rounded
from sodaopt.backends.triton.tables import (
    CHUNK,
    COLUMNS,
    Launch,
    Table,
    chunk,
    chunks,
    constant,
    number,
    pointer,
    scale,
)

BLOCK = 1024
"""Elements that a program handles at a time."""


@triton.jit
def _step(
    chunks, rows, numbers,
    MAP: tl.constexpr, CENTRE: tl.constexpr, MOMENTUM: tl.constexpr, OPTIMISM: tl.constexpr,
    P: tl.constexpr, G: tl.constexpr, Z: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(numbers + 8) != 0:
        return
    row, first, n = chunk(chunks, rows, COLUMNS, 5, ALIGNED, CHUNK)
    alpha, alpha_bar, lam = number(numbers, 0), number(numbers, 1), number(numbers, 2)
    rate, eps, sign_of_g = number(numbers, 4), number(numbers, 5), number(numbers, 7)
    width = scale(row, numbers)
    p_ptr = pointer(row, 0, P, ALIGNED) + first
    m_ptr = pointer(row, 1, tl.float32, ALIGNED) + first
    v_ptr = pointer(row, 2, tl.float32, ALIGNED) + first
    g_ptr = pointer(row, 4, G, ALIGNED) + first
    if CENTRE == "tensor":
        z_ptr = pointer(row, 3, Z, ALIGNED) + first
    if CENTRE == "number":
        z = constant(row)
    if tl.float32 != P:
        start = (tl.load(row + 6) + first).to(tl.uint32)
        key = _key(tl.load(row + 7).to(tl.uint32), tl.load(numbers + 6).to(tl.int64))
    for begin in range(0, CHUNK, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        y = tl.load(p_ptr + at, at < n).to(tl.float32)
        g = tl.load(g_ptr + at, at < n).to(tl.float32) * sign_of_g
        d = g
        if MOMENTUM:
            d = lerp(tl.load(m_ptr + at, at < n), g, alpha)
            tl.store(m_ptr + at, d, at < n)
        if OPTIMISM:
            d = lerp(d, g, alpha_bar)
        if MAP == "diagonal":
            v = g * g * rate + tl.load(v_ptr + at, at < n) * (1 - rate)
            tl.store(v_ptr + at, v, at < n)
            u = tl.div_rn(d, tl.sqrt_rn(v) + eps) * width
        elif MAP == "sign":
            sign = tl.where(d > 0, 1.0, tl.where(d < 0, -1.0, 0.0))
            u = (sign + 0.0 * d) * width  # 0 d keeps NaN and inf visible
        else:  # "identity"
            u = d * width
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


def planned(
    table: Table, device: torch.device, constants: dict[str, Any]
) -> Callable[[Tensor], None]:
    """Return a function of the numbers of a step that steps the parameters of a table."""
    programs = chunks(tuple(table.offsets[:, 5].tolist()), device)
    launch = Launch(_step, device, constants | {"CHUNK": CHUNK, "BLOCK": BLOCK})
    grid = len(programs), 1, 1
    return lambda numbers: launch(grid, table.is_aligned, programs, table.rows, numbers)
