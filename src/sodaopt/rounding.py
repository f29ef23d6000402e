"""Stochastic rounding to 16 bits from a counter of (seed, parameter, step, element).

Plain rounding loses every change smaller than half a unit in the last place: from k = 510 on,
1 - 1/(k+2) moves no bf16 weight at all. Rounding up with a probability equal to the remainder
keeps the mean. The bits are a hash of the counter, so torch's generators are untouched, replicas
agree bitwise, and a resumed run rounds as the uninterrupted one.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def _mix(h: int) -> int:
    """A 32-bit finaliser (the multipliers are Wellons' lowbias32)."""
    h &= _MASK
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & _MASK
    h = ((h ^ (h >> 15)) * 0x846CA68B) & _MASK
    return h ^ (h >> 16)


def key(seed: int, parameter: int, step: int) -> int:
    """One 32-bit key for a parameter at a step."""
    h = 0x9E3779B9
    for word in (seed, seed >> 32, parameter, step):
        h = _mix(h ^ (word & _MASK)) + 0x9E3779B9
    return _mix(h)


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
