"""Norms of a parameter: each owns its facts (lmo, dual, norm, init_).

A parameter is a batch of matrices (a view says how); the paper's width factors are named functions
of the shape (a scale says which). The lmo is the minimiser, so <d, lmo(d)> = -dual(d).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ._errors import times
from .msign import KELLER, Polar

Shape: TypeAlias = Sequence[int]

# -- how a parameter is a batch of matrices -------------------------------------------------------


class Frame(NamedTuple):
    """n matrices of o rows and i columns, each entry `taps` kernel positions wide.

    dims are the parameter's dimensions that one matrix spans; flipped: stored transposed.
    """

    n: int
    o: int
    i: int
    dims: tuple[int, ...]
    taps: int = 1
    flipped: bool = False

    def fold(self, d: Tensor) -> Tensor:
        """The parameter as (n, o, i taps)."""
        if self.flipped:
            return d.reshape(self.n, self.i, self.o).mT
        return d.reshape(self.n, self.o, self.i * self.taps)

    def unfold(self, X: Tensor, shape: Shape) -> Tensor:
        return (X.mT if self.flipped else X).reshape(tuple(shape))


View: TypeAlias = Callable[[Shape], Frame]


def matrix(shape: Shape) -> Frame:
    """(d_out, d_in) of a linear layer, or a stack (experts, d_out, d_in)."""
    if len(shape) not in (2, 3):
        raise ValueError(
            f"needs a matrix (or a 3-D stack of them), not a parameter of shape {times(shape)}; "
            "give vectors and scalars a Sign, BiasRMS or Diagonal geometry, kernels view=conv"
        )
    n = shape[0] if len(shape) == 3 else 1
    return Frame(n, shape[-2], shape[-1], (len(shape) - 2, len(shape) - 1))


def transposed(shape: Shape) -> Frame:
    """A matrix that is stored transposed: nn.Embedding (vocab, d), GPT-2's Conv1D (d_in, d_out)."""
    n, i, o, dims, *_ = matrix(shape)
    return Frame(n, o, i, dims, flipped=True)


def conv(shape: Shape) -> Frame:
    """A convolution kernel (d_out, d_in, k...), one matrix of d_out rows."""
    if len(shape) < 3:
        raise ValueError(f"view=conv needs a kernel (out, in, k...), not shape {times(shape)}")
    return Frame(1, shape[0], shape[1], tuple(range(len(shape))), math.prod(shape[2:]))


def whole(shape: Shape) -> Frame:
    """Any parameter as one long vector."""
    return Frame(1, math.prod(shape), 1, tuple(range(len(shape))))


def elements(shape: Shape) -> Frame:
    """Matrices as matrices, everything else as a vector: for maps that act on each entry."""
    return matrix(shape) if len(shape) in (2, 3) else whole(shape)


# -- width factors: named functions of the shape --------------------------------------------------

Factor: TypeAlias = Callable[[int, int], float]
Scale: TypeAlias = Callable[[Factor, Frame], float]


def hidden(factor: Factor, f: Frame) -> float:
    """The paper's factor for hidden, last and image-input layers; a kernel's is divided by taps."""
    return factor(f.o, f.i) / f.taps


def one_hot(factor: Factor, f: Frame) -> float:
    """The paper's factor for a one-hot (token) first layer: the same formula with d_in = 1."""
    return factor(f.o, 1) / f.taps


def unit(factor: Factor, f: Frame) -> float:
    """1: the plain norm (Lion, Signum, SSD)."""
    return 1.0


def original(factor: Factor, f: Frame) -> float:
    """sqrt(max(1, d_out/d_in)): Muon as first published, torch's "original"."""
    return math.sqrt(max(1.0, f.o / (f.i * f.taps)))


def rms(factor: Factor, f: Frame) -> float:
    """sqrt(max(d_out, d_in)): an orthogonal update of unit RMS, the paper's Muon baseline."""
    return math.sqrt(max(f.o, f.i * f.taps))


def adamw(factor: Factor, f: Frame) -> float:
    """0.2 sqrt(max(d_out, d_in)): Moonlight, torch's "match_rms_adamw"."""
    return 0.2 * rms(factor, f)


SCALES: dict[str, Scale] = {s.__name__: s for s in (hidden, one_hot, unit, original, rms, adamw)}


def gaussian(shape: Shape, generator: torch.Generator | None) -> Tensor:
    """Normals on the host in fp32, whatever torch's defaults are."""
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32, device="cpu")


# -- norms ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Norm:
    """A norm of each matrix X (o x i) of a parameter, `scale` times larger a ball than `unit`'s.

    A new norm writes `factor`, `minimiser` and `size`; everything else follows. On a stack of
    matrices each is its own layer: dual(d) and norm(x) then have one entry a matrix.
    """

    scale: Scale = hidden
    view: View = matrix
    elementwise: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in ("scale", "view"):
            if not callable(getattr(self, name)):
                got = getattr(self, name)
                raise TypeError(f"{name} is a function, such as geometry.{got}, got {got!r}")

    def factor(self, o: int, i: int) -> float:
        """The paper's width factor of the lmo."""
        raise NotImplementedError

    def minimiser(self, X: Tensor) -> Tensor:
        """argmin <X, U> over the unit ball, for a batch (n, o, i); zero where X is."""
        raise NotImplementedError

    def size(self, X: Tensor) -> Tensor:
        """The norm before scaling, for a batch (n, o, i) -> (n,)."""
        raise NotImplementedError

    def lmo(self, d: Tensor) -> Tensor:
        """argmin <d, x> over the unit ball, so <d, lmo(d)> = -dual(d)."""
        return self.units([d])[0] * self.width(d.shape)

    def dual(self, d: Tensor) -> Tensor:
        """The dual norm."""
        return -(d * self.lmo(d)).sum(self.view(d.shape).dims)

    def norm(self, x: Tensor) -> Tensor:
        f = self.view(x.shape)
        size: Tensor = self.size(f.fold(x)) / self.width(x.shape)
        stack = [n for j, n in enumerate(x.shape) if j not in f.dims]
        return size.reshape(*stack, -1).amax(-1)  # the largest, where a view cuts one matrix up

    @torch.no_grad()
    def init_(self, w: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Fill w with a random point of norm 1: an extreme point of the unit ball."""
        return w.copy_(self.lmo(gaussian(w.shape, generator)))

    def width(self, shape: Shape) -> float:
        return self.scale(self.factor, self.view(shape))

    def units(self, ds: list[Tensor]) -> list[Tensor]:
        """lmo before scaling."""
        return self.batched(self.minimiser, ds)

    def batched(self, map_: Callable[[Tensor], Tensor], ds: list[Tensor]) -> list[Tensor]:
        """The map of each, all matrices of one shape in one batch."""
        out: list[Tensor] = list(ds)
        frames = {shape: self.view(shape) for shape in {d.shape for d in ds}}
        buckets: dict[object, list[int]] = {}
        for j, d in enumerate(ds):
            f = frames[d.shape]
            buckets.setdefault((f.o, f.i, f.taps, d.dtype, d.device), []).append(j)
        for members in buckets.values():
            X = [frames[ds[j].shape].fold(ds[j]) for j in members]
            U = map_(torch.cat(X) if len(X) > 1 else X[0])
            for j, u in zip(members, torch.split(U, [len(x) for x in X]), strict=True):
                out[j] = frames[ds[j].shape].unfold(u, ds[j].shape)
        return out

    def sharps(self, ds: list[Tensor]) -> list[Tensor]:
        """dual(d) lmo(d) before scaling (which enters squared)."""
        return [
            u * -(d * u).sum(self.view(d.shape).dims, keepdim=True)
            for d, u in zip(ds, self.units(ds), strict=True)
        ]


@dataclass(frozen=True)
class Sign(Norm):
    """max |x|; lmo = -sign. Anything but a matrix has factor 1."""

    view: View = elements
    elementwise: ClassVar[bool] = True

    def factor(self, o: int, i: int) -> float:
        return 1 / i

    def minimiser(self, X: Tensor) -> Tensor:
        return self.units([X])[0]

    def size(self, X: Tensor) -> Tensor:
        return X.abs().amax((-2, -1))

    def units(self, ds: list[Tensor]) -> list[Tensor]:
        u = list(torch._foreach_sign(ds))
        # torch's sign(NaN) is 0 and sign(inf) is 1: adding 0 d keeps both visible
        torch._foreach_add_(u, ds, alpha=0)
        torch._foreach_neg_(u)
        return u


@dataclass(frozen=True)
class Spectral(Norm):
    """The largest singular value; lmo = -U V^T by the polar backend (a polynomial by default)."""

    polar: Polar = KELLER

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.polar):
            raise TypeError(f"polar is a backend such as msign.EXACT, got {self.polar!r}")

    def factor(self, o: int, i: int) -> float:
        return math.sqrt(o / i)

    def minimiser(self, X: Tensor) -> Tensor:
        return -self.polar(X)

    def size(self, X: Tensor) -> Tensor:
        s: Tensor = torch.linalg.matrix_norm(X, ord=2)
        return s

    @torch.no_grad()
    def init_(self, w: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Semi-orthogonal, exactly: a polynomial would leave the singular values spread."""
        d = gaussian(w.shape, generator)
        f = self.view(w.shape)
        Q = torch.linalg.qr(f.fold(d).mT if f.o < f.i * f.taps else f.fold(d)).Q
        Q = Q.mT if f.o < f.i * f.taps else Q
        return w.copy_(f.unfold(Q, w.shape) * self.width(w.shape))


@dataclass(frozen=True)
class _Lengths(Norm):
    """The largest Euclidean length among the slices of X along `along`; lmo makes each one 1."""

    along: ClassVar[tuple[int, ...]] = (-2, -1)

    def minimiser(self, X: Tensor) -> Tensor:
        length: Tensor = torch.linalg.vector_norm(X, dim=self.along, keepdim=True)
        # 0/0 is 0, an underflown length cannot explode, an overflown one (inf) becomes NaN
        return X / -(length.clamp(min=1e-15) + length * 0)

    def size(self, X: Tensor) -> Tensor:
        length: Tensor = torch.linalg.vector_norm(X, dim=self.along, keepdim=True)
        return length.amax((-2, -1))


@dataclass(frozen=True)
class ColNorm(_Lengths):
    """The longest column."""

    along: ClassVar[tuple[int, ...]] = (-2,)

    def factor(self, o: int, i: int) -> float:
        return math.sqrt(o) / i


@dataclass(frozen=True)
class RowNorm(_Lengths):
    """The longest row."""

    along: ClassVar[tuple[int, ...]] = (-1,)

    def factor(self, o: int, i: int) -> float:
        return 1 / math.sqrt(i)


@dataclass(frozen=True)
class Euclidean(_Lengths):
    """The Euclidean length of the whole parameter. Sharp(Euclidean()) is gradient descent."""

    scale: Scale = unit
    view: View = whole

    def factor(self, o: int, i: int) -> float:
        return 1.0

    def sharps(self, ds: list[Tensor]) -> list[Tensor]:
        return list(torch._foreach_neg(ds))


@dataclass(frozen=True)
class BiasRMS(_Lengths):
    """Root mean square of a vector (Scion's norm for biases and gains); lmo = -d/RMS(d)."""

    view: View = whole

    def factor(self, o: int, i: int) -> float:
        return math.sqrt(o * i)

    @torch.no_grad()
    def init_(self, w: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Zero, as Scion starts its biases."""
        return w.zero_()
