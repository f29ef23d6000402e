"""Stochastic rounding to 16 bits from a counter of (seed, parameter, step, element).

Plain rounding loses every change smaller than half a unit in the last place: from k = 510 on,
1 - 1/(k+2) moves no bf16 weight at all. Rounding up with a probability equal to the remainder
keeps the mean. The bits are a hash of the counter, so torch's generators are untouched, replicas
agree bitwise, and a resumed run rounds as the uninterrupted one.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sodaopt import backends as kernels
from sodaopt._bare import is_bare
from sodaopt.parallel import sharded

HALVES = frozenset((torch.bfloat16, torch.float16))
_MASK = 0xFFFFFFFF


def _mix(h: int) -> int:
    """A 32-bit finaliser (the multipliers are Wellons' lowbias32)."""
    h &= _MASK
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & _MASK
    h = ((h ^ (h >> 15)) * 0x846CA68B) & _MASK
    return h ^ (h >> 16)


def key(seed: int, parameter: int, step: int) -> int:
    """One 32-bit key for a parameter at a step."""
    return _mix(_mix(prefix(seed, parameter) ^ (step & _MASK)) + 0x9E3779B9)


def prefix(seed: int, parameter: int) -> int:
    """The part of a key that stays from step to step."""
    h = 0x9E3779B9
    for word in (seed, seed >> 32, parameter):
        h = _mix(h ^ (word & _MASK)) + 0x9E3779B9 & _MASK
    return h


kept_prefix = lru_cache(maxsize=1 << 16)(prefix)


def random_bits(index: Tensor, key: int) -> Tensor:
    """32 hashed bits for each element number, as int64 in [0, 2^32). `index` is int64."""
    h = index * 0x9E3779B1 + key & _MASK
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & _MASK
    h = ((h ^ (h >> 15)) * 0x846CA68B) & _MASK
    return h ^ (h >> 16)


def stochastic(x: Tensor, dtype: torch.dtype, key: int, index: Tensor | None = None) -> Tensor:
    """x (float32) in bf16 or fp16, rounded to either neighbour with the right odds.

    index: the element numbers of x within its parameter, where x is only a part of it.
    """
    if index is None:
        index = torch.arange(x.numel(), device=x.device).view(x.shape)
    bits = random_bits(index, key)
    if dtype == torch.bfloat16:
        # bf16 is the upper half of fp32: add 16 random bits below it, then cut them off
        up = (x.contiguous().view(torch.int32) + (bits & 0xFFFF).int()) & -0x10000
        return torch.where(x.isfinite(), up.view(torch.float32), x).to(dtype)
    if dtype == torch.float16:
        # spacing 2^(e-11) for a mantissa in [1/2, 1) times 2^e, and 2^-24 below 2^-14
        _, e = torch.frexp(x)
        ulp = torch.ldexp(torch.ones_like(x), (e - 11).clamp(min=-24))
        q = x / ulp  # exact, and so is its fraction: adding the bits to q would round them
        low = q.trunc()
        away = (q - low).abs() > (bits >> 8) * 2.0**-24
        return ((low + away * q.sign()) * ulp).to(dtype)
    raise TypeError(f"stochastic rounding is to bf16 or fp16, not {dtype}")


def write_(ps: list[Any], xs: list[Tensor], numbers: list[int], seed: int, step: int) -> None:
    """p <- x rounded stochastically: 16-bit parameters of these numbers, and for each an fp32 x of
    the shape of this rank's part."""
    launches: dict[Any, list[tuple[Tensor, Tensor, int, int]]] = {}
    for p, x, number in zip(ps, xs, numbers, strict=True):
        part = sharded.local(p)
        start = _start(p, part, x)
        if start is not None:
            launch = launches.setdefault((part.device, part.dtype), [])
            launch.append((part, x, start, kept_prefix(seed, number)))
            continue
        k = key(seed, number, step)
        part.copy_(stochastic(x, part.dtype, k, sharded.element_numbers(p)))
    for rows in launches.values():
        from sodaopt.backends.triton import rounding

        parts, xs_, starts, prefixes = (list(column) for column in zip(*rows, strict=True))
        rounding.write_(parts, xs_, starts, prefixes, step)


def _start(p: Any, part: Tensor, x: Tensor) -> int | None:
    """The number of the first element, if they follow one another and a kernel can round."""
    if torch.compiler.is_compiling() or not (part.is_cuda and is_bare(part) and is_bare(x)):
        return None  # compiled, the plain operations are one pass too
    n = sharded.numbers(p, 0, 0)  # of none of them: whether it is a range, and where that begins
    return n.start if isinstance(n, range) and kernels.usable(str(p.dtype), x.device) else None
