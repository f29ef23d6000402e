"""Stochastic rounding: the right odds, either neighbour, and bits that depend on the key alone."""

import math
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sodaopt import rounding
from sodaopt.rounding import key, random_bits, stochastic
from tests.support.reference import rounded

DTYPES = [torch.bfloat16, torch.float16]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
N = 1 << 16
# Exponents of 2 to draw from: normal numbers, subnormals of the 16 bits, and zero below them.
EXPONENTS = {torch.bfloat16: (-132, 126), torch.float16: (-26, 15)}


def wild(dtype: torch.dtype, seed: int, n: int = N) -> Tensor:
    """float32 of both signs over the whole range of dtype, subnormals included."""
    g, (low, high) = torch.Generator().manual_seed(seed), EXPONENTS[dtype]
    e = low + (high - low) * torch.rand(n, generator=g, dtype=torch.float64)
    return (2**e * torch.randn(n, generator=g, dtype=torch.float64).sign()).float()


def neighbours(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The largest number of dtype not above x, and the smallest not below it."""
    near, inf = x.to(dtype), torch.tensor(math.inf, dtype=dtype)
    down = torch.where(near.float() <= x, near, torch.nextafter(near, -inf))
    up = torch.where(near.float() >= x, near, torch.nextafter(near, inf))
    return down.float(), up.float()


@each_dtype
@pytest.mark.parametrize("seed", range(4))
def test_result_is_a_neighbour(dtype, seed) -> None:
    x = wild(dtype, seed)
    y, (down, up) = rounded(x, dtype, key(0, 0, seed)), neighbours(x, dtype)
    assert y.dtype == dtype
    assert ((y == down) | (y == up)).all()
    inside = down < up
    assert 0.4 < (y == up)[inside].float().mean() < 0.6  # both of them, about as often


@each_dtype
@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), number=st.integers(0, 2**32))
def test_mean(dtype, seed, number) -> None:
    """Rounded up with a probability equal to the remainder."""
    x = wild(dtype, seed, 1)
    down, up = (t.double() for t in neighbours(x, dtype))
    odds = ((x - down) / (up - down)).nan_to_num(0.0).item()
    y = rounded(x.expand(N), dtype, key(0, number, 0))
    ups = (y.double() == up).double().mean().item() if up > down else 0.0
    assert abs(ups - odds) < 5 * math.sqrt(odds * (1 - odds) / N) + 1e-4


@each_dtype
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("part", [0.01, 0.25, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("at", ["one", "last subnormal", "first subnormal", "below it"])
def test_odds(dtype, sign, part, at) -> None:
    """`part` of the way to the next number: that is the share of those that go there."""
    info = torch.finfo(dtype)
    least = info.smallest_normal * info.eps
    base, gap = {
        "one": (1.0, info.eps),
        "last subnormal": (info.smallest_normal - least, least),
        "first subnormal": (least, least),
        "below it": (0.0, least),
    }[at]
    x = torch.full((4 * N,), sign * (base + part * gap), dtype=torch.float64).float()
    y = rounded(x, dtype, key(1, 2, 3)).double()
    away = (y.abs() - base) / gap
    assert set(away.unique().tolist()) == {0.0, 1.0}
    assert ((y * sign) >= 0).all()
    error = 5 * math.sqrt(part * (1 - part) / len(x)) + 1e-4
    assert abs(away.mean().item() - part) < error


@each_dtype
def test_representable_stays(dtype) -> None:
    """Every finite 16-bit number, under many keys."""
    codes = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    x = codes[codes.isfinite()].float()
    for step in range(20):
        assert torch.equal(rounded(x, dtype, key(0, 0, step)).float(), x)


@each_dtype
def test_not_finite_passes(dtype) -> None:
    """Also the NaNs next to inf (0x7F800001) and to the end of the codes (0x7FFFFFFF)."""
    nans = torch.tensor([0x7F800001, 0x7FFFFFFF, -0x7FFFFF, -1], dtype=torch.int32)
    x = torch.cat([torch.tensor([math.inf, -math.inf, 0.0]), nans.view(torch.float32)])
    y = rounded(x.repeat(999), dtype, key(0, 0, 0)).view(999, -1).float()
    assert y[:, 3:].isnan().all()
    assert torch.equal(y[:, :3], x[:3].expand(999, 3))


@each_dtype
def test_repeats(dtype) -> None:
    """The same key gives the same bits, and torch's generator is neither read nor moved."""
    x, before = wild(dtype, 0), torch.get_rng_state()
    first = rounded(x, dtype, key(5, 6, 7))
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(123)
    assert torch.equal(first, rounded(x.clone(), dtype, key(5, 6, 7)))


@each_dtype
def test_a_part_rounds_as_in_the_whole(dtype) -> None:
    x = wild(dtype, 0).view(256, 256)
    number, k = torch.arange(N).view(256, 256), key(1, 2, 3)
    y = rounded(x, dtype, k)
    for part in (slice(100, 200), (slice(None), slice(3, 90)), (slice(None, None, 7), 5)):
        assert torch.equal(stochastic(x[part], dtype, k, number[part]), y[part])
    assert torch.equal(stochastic(x.mT, dtype, k, number.mT), y.mT)
    assert rounded(x[0, 0], dtype, k).shape == ()
    assert rounded(x[:0], dtype, k).shape == (0, 256)


# -- the bits -------------------------------------------------------------------------------------

KEYS = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (1 << 32, 0, 0), (-1, 0, 0)]


def test_keys_differ() -> None:
    """Seed (64 bits of it), parameter and step each count, and do not stand for each other."""
    keys = {key(s, p, k) for s in (0, 1, 2, 1 << 32) for p in range(40) for k in range(40)}
    assert len(keys) == 4 * 40 * 40
    assert all(0 <= k < 1 << 32 for k in keys)


@pytest.mark.parametrize("k", KEYS, ids=str)
def test_bits_are_equally_likely(k) -> None:
    """Chi-square of each byte (255 degrees of freedom, deviation 22.6), also of neighbours."""
    bits = random_bits(torch.arange(N), key(*k))
    assert 0 <= bits.min() <= bits.max() < 1 << 32
    for j in (0, 8, 16, 24):
        byte = bits >> j & 0xFF
        mixed = byte[1:] ^ byte[:-1]
        for b in (byte, mixed):
            counts = torch.bincount(b, minlength=256).double()
            expected = len(b) / 256
            assert 140 < ((counts - expected) ** 2 / expected).sum() < 400


@pytest.mark.parametrize(("a", "b"), list(combinations(KEYS, 2)), ids=str)
def test_keys_are_decorrelated(a, b) -> None:
    x, y = (random_bits(torch.arange(N), key(*k)).double() / 2**32 - 0.5 for k in (a, b))
    assert abs((x * y).mean() * 12) < 5 / math.sqrt(N)
    assert (x == y).sum() < 3


@each_dtype
@pytest.mark.parametrize("shape", [(), (5,), (7, 9), (3, 4, 5), (0, 4), (1, 11)], ids=str)
def test_slices_round_as_the_whole(dtype, shape, monkeypatch) -> None:
    """Random bits take much more memory than the parameter, so large ones are rounded in slices."""
    monkeypatch.setattr(rounding, "SLICE", 4)
    p, x = torch.zeros(shape, dtype=dtype), torch.randn(shape)
    rounding.write_([p], [x], [3], 7, 11)
    assert torch.equal(p, rounded(x, dtype, key(7, 3, 11)))
