"""Philox 4x32-10 (Salmon et al. 2011) in plain tensor operations: random numbers without a state.

Word i of a stream is a pure function of (key, i), so any part of a tensor can be made again, alone,
on any device. Words and fractions have the same bits everywhere.
"""

import torch
from torch import Tensor

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF


def block(counter: tuple[Tensor, ...], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Ten rounds: four words from four words of counter and two of key, all int64 in [0, 2^32)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # A product that wraps to a negative int64 still has the right low 64 bits. Bits of c1 and
        # c3 above the lowest 32 are cut off after the xor.
        p0, p1 = c0 * _M0, c2 * _M1
        c0 = (p1 >> 32).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(_MASK)
        c2 = (p0 >> 32).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(_MASK)
        c1, c3 = p1, p0
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1 & _MASK, c2, c3 & _MASK


def words(start: int, stop: int, key: tuple[int, int], stream: int, device: torch.device) -> Tensor:
    """Words start..stop-1 of a stream (a 64-bit number), as int64 in [0, 2^32)."""
    first, last = start // 4, (stop + 3) // 4
    out = _blocks(torch.arange(first, last, device=device), key, stream).flatten()
    return out[start - 4 * first : stop - 4 * first]


def words_at(index: Tensor, key: tuple[int, int], stream: int) -> Tensor:
    """The words with these indices, in any order: four times the work of a range."""
    four = _blocks(index >> 2, key, stream)
    return four.gather(-1, (index & 3).unsqueeze(-1)).squeeze(-1)


def _blocks(n: Tensor, key: tuple[int, int], stream: int) -> Tensor:
    """The four words of each block n, in a last dimension."""
    s0, s1 = (torch.full_like(n, w) for w in (stream & _MASK, stream >> 32 & _MASK))
    return torch.stack(block((n & _MASK, n >> 32, s0, s1), key), dim=-1)


def fractions(words: Tensor) -> Tensor:
    """fp32 in [0, 1), 24 bits each: exact, hence equal on every device."""
    return (words >> 8).float() * 2.0**-24
