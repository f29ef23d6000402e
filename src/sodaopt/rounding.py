"""Stochastic rounding to 16 bits from a counter of (seed, parameter, step, element).

Plain rounding loses every change smaller than half a unit in the last place: from k = 510 on,
1 - 1/(k+2) moves no bf16 weight at all. Rounding up with a probability equal to the remainder
keeps the mean. The bits are a hash of the counter, so torch's generators are untouched, replicas
agree bitwise, and a resumed run rounds like the uninterrupted one.
"""

from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from sodaopt import backends
from sodaopt.parallel import sharded

HALVES = frozenset((torch.bfloat16, torch.float16))
_MASK = 0xFFFFFFFF
_Hash = TypeVar("_Hash", int, Tensor)


def _mix(h: _Hash) -> _Hash:
    """A 32-bit finaliser, on a number or on int64 tensors (multipliers of Wellons' lowbias32)."""
    h = h & _MASK
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & _MASK
    h = ((h ^ (h >> 15)) * 0x846CA68B) & _MASK
    return h ^ (h >> 16)


def key(seed: int, parameter: int, step: int) -> int:
    """One 32-bit key for a parameter at a step."""
    return _mix(_mix(prefix(seed, parameter) ^ (step & _MASK)) + 0x9E3779B9)


def prefix(seed: int, parameter: int) -> int:
    """The part of a key that does not change from step to step."""
    h = 0x9E3779B9
    for word in (seed, seed >> 32, parameter):
        h = _mix(h ^ (word & _MASK)) + 0x9E3779B9 & _MASK
    return h


cached_prefix = lru_cache(maxsize=1 << 16)(prefix)
"""For the launches of kernels. torch.compile warns if it traces a cache."""


def random_bits(index: Tensor, key: int) -> Tensor:
    """32 hashed bits for each element index (int64), as int64 in [0, 2^32)."""
    return _mix(index * 0x9E3779B1 + key)


SUM_DTYPE = dict.fromkeys(HALVES, torch.float32)
"""The dtype in which updates of 16-bit parameters are summed: SUM_DTYPE.get(dtype, dtype)."""


def stochastic(x: Tensor, dtype: torch.dtype, key: int, index: Tensor | None = None) -> Tensor:
    """Round x (fp32) to bf16 or fp16, to either neighbour with the right odds.

    index: the indices of x's elements in the whole parameter, if x is a part of it.
    """
    if index is None:
        index = torch.arange(x.numel(), device=x.device).view(x.shape)
    bits = random_bits(index, key)
    if dtype == torch.bfloat16:
        # bf16 is the upper half of fp32: add 16 random bits below it, then cut them off
        up = (x.contiguous().view(torch.int32) + (bits & 0xFFFF).int()) & -0x10000
        return torch.where(x.isfinite(), up.view(torch.float32), x).to(dtype)
    # fp16 has the spacing 2^(e-11) for a mantissa in [1/2, 1) times 2^e, and 2^-24 below 2^-14
    _, e = torch.frexp(x)
    ulp = torch.ldexp(torch.ones_like(x), (e - 11).clamp(min=-24))
    q = x / ulp  # exact, and so is its fraction: adding the bits to q would round them
    low = q.trunc()
    away = (q - low).abs() > (bits >> 8) * 2.0**-24
    return ((low + away * q.sign()) * ulp).to(dtype)


def write_(ps: list[Any], xs: list[Tensor], indices: list[int], seed: int, step: int) -> None:
    """Round each fp32 x into this rank's shard of its 16-bit parameter p.

    indices: the index of each parameter in its optimizer.
    """
    launches: dict[Any, list[tuple[Tensor, Tensor, int, int]]] = {}
    is_compiling = torch.compiler.is_compiling()  # it fuses the plain operations into one pass
    for p, x, index in zip(ps, xs, indices, strict=True):
        shard = sharded.local(p)
        numbers = sharded.numbers(p, 0, shard.numel())
        if isinstance(numbers, range):
            if not is_compiling and backends.run_on(shard, x):
                launch = launches.setdefault((shard.device, shard.dtype), [])
                launch.append((shard, x, numbers.start, cached_prefix(seed, index)))
                continue
            numbers = torch.arange(numbers.start, numbers.stop, device=shard.device)
        bits = key(seed, index, step)
        shard.copy_(stochastic(x, shard.dtype, bits, numbers.view(shard.shape)))
    for rows in launches.values():
        from sodaopt.backends.triton import rounding

        shards, xs_, starts, prefixes = (list(column) for column in zip(*rows, strict=True))
        rounding.write_(shards, xs_, starts, prefixes, step)


def first_element(p: Any) -> int | None:
    """The index of this rank's first element in p, or None if its elements are not contiguous."""
    numbers = sharded.numbers(p, 0, 0)
    return numbers.start if isinstance(numbers, range) else None
