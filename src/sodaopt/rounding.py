"""Stochastic rounding to 16 bits from a counter of (seed, parameter, step, element).

Plain rounding loses every change smaller than half a unit in the last place: from k = 510 on, the
factor 1 - 1/(k+2) changes no bf16 weight at all. Stochastic rounding rounds up with a probability
equal to the remainder, which keeps the mean. The random bits are a hash of the counter, so torch's
generators are untouched, replicas agree bitwise, and a resumed run rounds like the uninterrupted
one.
"""

from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from sodaopt import backends
from sodaopt.parallel import sharded

GRIDS = {torch.bfloat16: (1.0, 16), torch.float16: (2.0**-112, 13)}
"""(scale, spare) of each dtype. The dtype can hold an fp32 number x if the last `spare` bits of
scale x are zero. The scale 2^-112 turns the subnormals of fp16 into subnormals of fp32."""
HALVES = frozenset(GRIDS)
"""The 16-bit dtypes."""
_MASK = 0xFFFFFFFF
_Hash = TypeVar("_Hash", int, Tensor)


def _mix(h: _Hash) -> _Hash:
    """A 32-bit finaliser, on a number or on int64 tensors (multipliers of Wellons' lowbias32)."""
    h = h & _MASK
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & _MASK
    h = ((h ^ (h >> 15)) * 0x846CA68B) & _MASK
    return h ^ (h >> 16)


def key(seed: int, parameter: int, step: int) -> int:
    """The 32-bit key that selects the random bits of a parameter at a step."""
    return _mix(_mix(prefix(seed, parameter) ^ (step & _MASK)) + 0x9E3779B9)


def prefix(seed: int, parameter: int) -> int:
    """The part of a key that does not change from step to step."""
    h = 0x9E3779B9
    for word in (seed, seed >> 32, parameter):
        h = _mix(h ^ (word & _MASK)) + 0x9E3779B9 & _MASK
    return h


cached_prefix = lru_cache(maxsize=1 << 16)(prefix)
"""`prefix` for kernels. Plain operations use `prefix`: torch.compile warns if it traces a cache."""


def random_bits(index: Tensor, key: int) -> Tensor:
    """32 hashed bits for each element index (int64), as int64 in [0, 2^32)."""
    return _mix(index * 0x9E3779B1 + key)


def stochastic(x: Tensor, dtype: torch.dtype, key: int, index: Tensor) -> Tensor:
    """Round x (fp32) to one of its two neighbours in bf16 or fp16, without bias.

    Random bits are added to the last bits, which the dtype does not have. Then these are cut off.

    index: the index of each element of x in the whole parameter.
    """
    scale, spare = GRIDS[dtype]
    bits = (x * scale).contiguous().view(torch.int32)
    bits = bits + (random_bits(index, key) & (1 << spare) - 1).int() & -(1 << spare)
    return torch.where(x.isfinite(), bits.view(torch.float32) / scale, x).to(dtype)


SLICE = 1 << 22
"""Elements that plain operations round at a time. Their random bits need temporary memory."""


def write_(ps: list[Any], xs: list[Tensor], indices: list[int], seed: int, step: int) -> None:
    """Round each fp32 x into this rank's shard of its 16-bit parameter p.

    indices: the index of each parameter in its optimizer, which selects its random bits.
    """
    launches: dict[Any, list[tuple[Tensor, Tensor, int, int]]] = {}
    is_compiling = torch.compiler.is_compiling()  # torch.compile fuses the plain operations
    for p, x, index in zip(ps, xs, indices, strict=True):
        shard, first = sharded.local(p), first_element(p)
        if first is not None and not is_compiling and backends.run_on(shard, x):
            members = launches.setdefault((shard.device, shard.dtype), [])
            members.append((shard, x, first, cached_prefix(seed, index)))
            continue
        begin, step_key = 0, key(seed, index, step)
        shard, x = torch.atleast_1d(shard, x)  # type: ignore[no-untyped-call]
        height = max(1, SLICE // max(1, shard.shape[1:].numel()))
        for part, value in zip(torch.split(shard, height), torch.split(x, height), strict=True):
            elements = sharded.element_indices(p, begin, begin + part.numel())
            if isinstance(elements, range):
                elements = torch.arange(elements.start, elements.stop, device=part.device)
            part.copy_(stochastic(value, part.dtype, step_key, elements.view(part.shape)))
            begin += part.numel()
    for members in launches.values():
        from sodaopt.backends.triton import rounding

        rounding.write_(members, step)


def first_element(p: Any) -> int | None:
    """The index of this rank's first element in p, or None if its elements are not contiguous."""
    elements = sharded.element_indices(p, 0, 0)
    return elements.start if isinstance(elements, range) else None
