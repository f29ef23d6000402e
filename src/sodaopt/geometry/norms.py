"""Norms of a parameter, with their lmo and dual norm. `sodaopt.geometry` has the table."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from sodaopt.geometry.polar import DIRECTION, KELLER, Newton, Polar, divisor, lengths
from sodaopt.geometry.scales import Scale, dense, unit
from sodaopt.geometry.shards import Shards
from sodaopt.geometry.views import Shape, View, elements, matrix, whole

EXAMPLES = {"scale": "geometry.rms", "view": "views.conv", "polar": "polar.EXACT"}
"""The fields of a norm that are functions, each with an example. Not every norm has all of them."""


def matrixwise(
    map_: Callable[[Tensor], Tensor], ds: list[Tensor], view: View = matrix
) -> list[Tensor]:
    """Apply a map of batches (n, o, i) to each d, with all matrices of one shape in one batch."""
    out = list(ds)
    frames = [view(d.shape) for d in ds]
    by_shape: dict[object, list[int]] = {}
    for j, (d, f) in enumerate(zip(ds, frames, strict=True)):
        by_shape.setdefault((f.o, f.i, f.taps, d.dtype, d.device), []).append(j)
    for members in by_shape.values():
        X = [frames[j].fold(ds[j]) for j in members]
        joined = _beside(X)
        U = map_(torch.cat(X) if joined is None else joined)
        for j, u in zip(members, torch.split(U, [len(x) for x in X]), strict=True):
            out[j] = frames[j].unfold(u, ds[j].shape)
    return out


def _beside(X: list[Tensor]) -> Tensor | None:
    """Join batches (n, o, i) into one without a copy, or return None.

    This is possible for one batch, and for single matrices at equal distances in one memory.
    Matrices that other ranks have sent lie there like this, and so do the experts that this rank
    has whole.
    """
    first, begins = X[0], [x.storage_offset() for x in X]
    if len(X) == 1:
        return first
    step = begins[1] - begins[0]
    is_regular = step > 0 and begins == list(range(begins[0], begins[-1] + 1, step))
    if is_regular and all(len(x) == 1 and _is_beside(x, first) for x in X):
        return first.as_strided((len(X), *first.shape[1:]), (step, *first.stride()[1:]))
    return None


def _is_beside(x: Tensor, first: Tensor) -> bool:
    """Whether two tensors are views of one memory with the same strides.

    `_base`, the tensor of a view, is private in torch. If torch removes it, return False: then
    `matrixwise` copies the matrices.
    """
    return first._base is not None and x._base is first._base and x.stride() == first.stride()


@dataclass(frozen=True)
class Norm:
    """A norm of each matrix X (o x i) of a parameter.

    A new norm defines `factor`, `minimiser` and `size`. In a stack of matrices each one is its own
    layer: dual(d) and norm(x) have one entry for each matrix.

    sharp_kernel: the name of the fused kernel for Sharp of this norm (see `Geometry.kernel`).

    >>> d, norm = torch.randn(4, 3), geometry.Sign(geometry.unit)
    >>> torch.allclose((d * norm.lmo(d)).sum(), -norm.dual(d))  # the linear minimisation oracle
    True
    """

    scale: Scale = dense
    view: View = matrix
    sharp_kernel: ClassVar[str | None] = None

    @property
    def ball_kernel(self) -> str | None:
        """The name of the fused kernel for Ball of this norm (see `Geometry.kernel`)."""
        return "polar" if isinstance(getattr(self, "polar", None), Newton) else None

    def __post_init__(self) -> None:
        for name, example in EXAMPLES.items():
            if hasattr(self, name) and not callable(got := getattr(self, name)):
                raise TypeError(f"{name} is a function such as {example}, got {got!r}")

    def factor(self, o: int, i: int) -> float:
        """The paper's width factor of the lmo."""
        raise NotImplementedError

    def minimiser(self, X: Tensor) -> Tensor:
        """argmin X . U over the unit ball, in a batch (n, o, i). Zero maps to zero."""
        raise NotImplementedError

    def size(self, X: Tensor) -> Tensor:
        """The norm before scaling of each matrix in a batch: (n, o, i) -> (n,)."""
        raise NotImplementedError

    def lmo(self, d: Tensor) -> Tensor:
        """argmin d . x over the unit ball, so d . lmo(d) = -dual(d)."""
        return self.units([d])[0] * self.width(d.shape)

    def dual(self, d: Tensor) -> Tensor:
        """The dual norm."""
        return -(d * self.lmo(d)).sum(self.view(d.shape).dims)

    def norm(self, x: Tensor) -> Tensor:
        """The norm. If a view cuts one matrix into blocks, it is the largest of their norms."""
        f = self.view(x.shape)
        size: Tensor = self.size(f.fold(x)) / self.width(x.shape)
        stack = [n for j, n in enumerate(x.shape) if j not in f.dims]
        return size.reshape(*stack, -1).amax(-1)

    def with_view(self, view: View) -> "Norm":
        """Return the norm with the view of a layer, unless it has a view of its own."""
        return replace(self, view=view) if self.view in (matrix, elements) else self

    def width(self, shape: Shape) -> float:
        """The width factor for a parameter of this shape."""
        return self.scale(self.factor, self.view(shape))

    def units(self, ds: list[Tensor], shards: Shards | None = None) -> list[Tensor]:
        """The lmo of each d, without the width factor.

        shards: None if ds are whole. Otherwise ds are this rank's shards, and `shards.results` has
        the results of the matrices that must be whole.
        """
        results = None if shards is None else shards.results
        return matrixwise(self.minimiser, ds, self.view) if results is None else results

    def needs_matrices(self, shape: Shape) -> bool:
        """Whether the lmo needs each matrix of a parameter whole on one rank."""
        return True

    def duals(self, ds: list[Tensor], units: list[Tensor], shards: Shards | None) -> list[Tensor]:
        """The dual norm of each d without the width factor, in a shape that broadcasts with d."""
        shapes = [d.shape for d in ds] if shards is None else shards.shapes
        dims = [self.view(shape).dims for shape in shapes]
        parts = [-(d * u).sum(n, keepdim=True) for d, u, n in zip(ds, units, dims, strict=True)]
        return parts if shards is None else shards.sum(parts, dims)

    def sharps(self, ds: list[Tensor], shards: Shards | None) -> list[Tensor]:
        """dual(d) lmo(d) of each d, without the width factor, which would enter squared."""
        u = self.units(ds, shards)
        return [a * b for a, b in zip(u, self.duals(ds, u, shards), strict=True)]


@dataclass(frozen=True)
class Sign(Norm):
    """max |x| over c, lmo(d) = -c sign(d), c = 1/d_in, or c = 1 if x is not a matrix.

    >>> geometry.Sign(geometry.unit).lmo(torch.tensor([[2.0, -0.5]]))
    tensor([[-1.,  1.]])
    """

    view: View = elements
    ball_kernel: ClassVar[str] = "sign"

    def factor(self, o: int, i: int) -> float:
        return 1 / i

    def with_view(self, view: View) -> Norm:
        depends = self.scale is dense and view is not matrix  # one_hot and unit do not use d_in
        return super().with_view(view) if depends else self

    def size(self, X: Tensor) -> Tensor:
        return X.abs().amax((-2, -1))

    def needs_matrices(self, shape: Shape) -> bool:
        return False

    def units(self, ds: list[Tensor], shards: Shards | None = None) -> list[Tensor]:
        u = list(torch._foreach_sign(ds))
        # torch's sign(NaN) is 0 and sign(inf) is 1: adding 0 d keeps both visible
        torch._foreach_add_(u, ds, alpha=0)
        torch._foreach_neg_(u)
        return u


@dataclass(frozen=True)
class Spectral(Norm):
    """The largest singular value over c, lmo(d) = -c U V^T with d = U S V^T, c = sqrt(d_out/d_in).

    polar: the backend of U V^T, see `sodaopt.geometry.polar`.

    >>> norm = geometry.Spectral(geometry.unit, polar=geometry.polar.EXACT)
    >>> norm.norm(torch.diag(torch.tensor([3.0, 2.0])))
    tensor(3.)
    """

    polar: Polar = KELLER

    def factor(self, o: int, i: int) -> float:
        return math.sqrt(o / i)

    def minimiser(self, X: Tensor) -> Tensor:
        return -self.polar(X)

    def size(self, X: Tensor) -> Tensor:
        s: Tensor = torch.linalg.matrix_norm(X, ord=2)
        return s


@dataclass(frozen=True)
class _Lengths(Norm):
    """The largest Euclidean length of a slice of X along the dimensions `along`.

    The lmo divides each slice by its length.
    """

    along: ClassVar[tuple[int, ...]] = (-2, -1)

    def minimiser(self, X: Tensor) -> Tensor:
        return X / -divisor(lengths(X, self.along), X.dtype)

    def needs_matrices(self, shape: Shape) -> bool:
        return self.view(shape).sides(shape) is None

    def units(self, ds: list[Tensor], shards: Shards | None = None) -> list[Tensor]:
        if shards is None or shards.results is not None:
            return super().units(ds, shards)
        sides = [self.view(shape).sides(shape) for shape in shards.shapes]
        dims = [sum((pair[n] for n in self.along), ()) for pair in sides if pair]
        parts = [  # torch takes dim=() for all dimensions, but here each entry is then a slice
            (lengths(d, n) if n else d.double()).square() for d, n in zip(ds, dims, strict=True)
        ]
        squares = shards.sum(parts, dims)
        return [d / -divisor(s.sqrt(), d.dtype) for d, s in zip(ds, squares, strict=True)]

    def size(self, X: Tensor) -> Tensor:
        return lengths(X, self.along).to(X.dtype).amax((-2, -1))


@dataclass(frozen=True)
class ColNorm(_Lengths):
    """The longest column over c, lmo(d) = -c column/length of each column, c = sqrt(d_out)/d_in.

    >>> geometry.ColNorm(geometry.unit).norm(torch.tensor([[3.0, 0.0], [4.0, 1.0]]))
    tensor(5.)
    """

    along: ClassVar[tuple[int, ...]] = (-2,)

    def factor(self, o: int, i: int) -> float:
        return math.sqrt(o) / i


@dataclass(frozen=True)
class RowNorm(_Lengths):
    """The longest row over c, lmo(d) = -c row/length of each row, c = 1/sqrt(d_in).

    >>> geometry.RowNorm(geometry.unit).norm(torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
    tensor(5.)
    """

    along: ClassVar[tuple[int, ...]] = (-1,)

    def factor(self, o: int, i: int) -> float:
        return 1 / math.sqrt(i)


@dataclass(frozen=True)
class Euclidean(_Lengths):
    """||x||_2 of the whole parameter, lmo(d) = -d/||d||_2. Sharp(Euclidean()) is gradient descent.

    >>> geometry.Euclidean().norm(torch.tensor([3.0, 4.0]))
    tensor(5.)
    """

    scale: Scale = unit
    view: View = whole
    polar: ClassVar[Polar] = DIRECTION
    sharp_kernel: ClassVar[str | None] = "identity"

    def factor(self, o: int, i: int) -> float:
        return 1.0

    def sharps(self, ds: list[Tensor], shards: Shards | None) -> list[Tensor]:
        return list(torch._foreach_neg(ds))


@dataclass(frozen=True)
class BiasRMS(_Lengths):
    """RMS(x) = ||x||_2/sqrt(n) of a vector, lmo(d) = -d/RMS(d). Scion's norm for biases and gains.

    >>> geometry.BiasRMS().norm(torch.tensor([3.0, 4.0, 0.0, 0.0]))
    tensor(2.5000)
    """

    view: View = whole
    polar: ClassVar[Polar] = DIRECTION

    def factor(self, o: int, i: int) -> float:
        return math.sqrt(o * i)
