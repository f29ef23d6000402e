"""Views: how a parameter is a batch of matrices.

A view is a function from a shape to a `Frame`. The plain ones are functions. The parametrised ones
(`split`, `grouped`) are frozen dataclasses, so that they compare and pickle. They cut one matrix or
kernel into several: its norm is then the largest of their norms, and its dual norm the sum of
theirs. The matrices of a stack have a norm each.

shape: the shape of the parameter.
n: the number of equal blocks or groups, at least 1.
of: the view of the whole parameter, which is then cut.
view: a view.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple, TypeAlias

from torch import Tensor

from sodaopt._errors import times

__all__ = [
    "Frame", "Shape", "View", "conv", "deconv", "elements", "grouped", "heads", "label", "matrix",
    "split", "transposed", "whole",
]  # fmt: skip

Shape: TypeAlias = Sequence[int]
"""The shape of a parameter."""


class Stored(NamedTuple):
    """Where matrices of rows x columns lie in memory.

    starts: the index of the first element of each matrix.
    pitch: the distance from one row to the next, in elements.
    """

    starts: Sequence[int]
    rows: int
    columns: int
    pitch: int


class Frame(NamedTuple):
    """n matrices of o rows and i columns, each entry `taps` kernel positions wide.

    n: the number of matrices in the parameter.
    o, i: d_out and d_in of one matrix.
    taps: the positions of a convolution's kernel, 1 for other layers.
    dims: the dimensions of the parameter that one matrix spans.
    flipped: the matrices are stored transposed, as (n / beside, i, beside, o).
    beside: how many transposed matrices lie side by side in memory.

    >>> views.matrix((64, 16)).o, views.matrix((64, 16)).i
    (64, 16)
    """

    n: int
    o: int
    i: int
    dims: tuple[int, ...]
    taps: int = 1
    flipped: bool = False
    beside: int = 1

    def fold(self, d: Tensor) -> Tensor:
        """Return the parameter as a batch (n, o, i * taps)."""
        if self.flipped:
            rows = d.reshape(self.n // self.beside, self.i, self.beside, self.o)
            return rows.permute(0, 2, 3, 1).reshape(self.n, self.o, self.i)
        return d.reshape(self.n, self.o, self.i * self.taps)

    def unfold(self, X: Tensor, shape: Shape) -> Tensor:
        """Return a batch (n, o, i * taps) in the parameter's own shape."""
        if self.flipped:
            X = X.reshape(self.n // self.beside, self.beside, self.o, self.i).permute(0, 3, 1, 2)
        return X.reshape(tuple(shape))

    def stored(self, shape: Shape) -> Stored:
        """Return where the matrices lie in the memory of a contiguous parameter."""
        rows, columns = (self.i, self.o) if self.flipped else (self.o, self.i * self.taps)
        pitch = columns * self.beside
        begins = range(0, math.prod(shape), rows * pitch)
        starts = [begin + column for begin in begins for column in range(0, pitch, columns)]
        return Stored(starts, rows, columns, pitch)

    def boxes(self, shape: Shape) -> list[tuple[range, ...]]:
        """Return the slice of the parameter that is each matrix: a range for each dimension."""
        if self.beside > 1:
            stack = [_steps(n, 1) for n in shape[:-2]]
            return list(product(*stack, [range(self.i)], _steps(shape[-1], self.o)))
        size = math.prod(shape) // self.n
        # a matrix has one index of each dimension before d, a part of d, and all later dimensions
        d = next(d for d in range(len(shape)) if math.prod(shape[d + 1 :]) <= size)
        rows = size // math.prod(shape[d + 1 :])
        axes = [_steps(n, 1) for n in shape[:d]] + [_steps(shape[d], rows)]
        return list(product(*axes, *([range(n)] for n in shape[d + 1 :])))

    def one(self) -> "Frame":
        """Return the frame of a single matrix that one of the boxes cuts out."""
        return Frame(1, self.o, self.i, self.dims, self.taps, self.flipped)

    def sides(self, shape: Shape) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return the parameter's dimensions along o, and its dimensions along i.

        None if a matrix is only a part of a dimension, as in a fused layer.
        """
        if self.n * math.prod(shape[d] for d in self.dims) != math.prod(shape):
            return None
        first, size, count = self.i if self.flipped else self.o, 1, 0
        while size < first:
            size, count = size * shape[self.dims[count]], count + 1
        sides = self.dims[:count], self.dims[count:]
        return sides[::-1] if self.flipped else sides


View: TypeAlias = Callable[[Shape], Frame]
"""A function from a shape to its frame."""


def _steps(n: int, size: int) -> list[range]:
    return [range(j, j + size) for j in range(0, n, size)]


def matrix(shape: Shape) -> Frame:
    """(o, i) of a linear layer, or a stack (n, o, i) of them, such as experts.

    >>> frame = views.matrix((4, 64, 16))  # four experts
    >>> frame.n, frame.o, frame.i
    (4, 64, 16)
    """
    if len(shape) not in (2, 3):
        raise ValueError(
            f"expected a matrix (or a 3-D stack of them), not the shape {times(shape)}: "
            "give vectors and scalars a Sign, BiasRMS or Diagonal geometry, and kernels view=conv"
        )
    n = shape[0] if len(shape) == 3 else 1
    return Frame(n, shape[-2], shape[-1], (len(shape) - 2, len(shape) - 1))


def transposed(shape: Shape) -> Frame:
    """(i, o), a matrix stored transposed: nn.Embedding (vocab, d), GPT-2's Conv1D (d_in, d_out).

    >>> frame = views.transposed((50304, 768))
    >>> frame.o, frame.i
    (768, 50304)
    """
    n, i, o, dims, *_ = matrix(shape)
    return Frame(n, o, i, dims, flipped=True)


def conv(shape: Shape) -> Frame:
    """(o, i, k...), a convolution's kernel, as one matrix o x (i taps), taps the product of k.

    >>> frame = views.conv((64, 16, 3, 3))
    >>> frame.o, frame.taps
    (64, 9)
    """
    if len(shape) < 3:
        raise ValueError(f"view=conv needs a kernel (out, in, k...), not shape {times(shape)}")
    return Frame(1, shape[0], shape[1], tuple(range(len(shape))), math.prod(shape[2:]))


def deconv(shape: Shape) -> Frame:
    """(i, d_out, k...), a transposed convolution's kernel, as the matrix with o = d_out k...

    >>> views.deconv((16, 64, 3, 3)).i
    16
    """
    return Frame(1, math.prod(shape[1:]), shape[0], tuple(range(len(shape))), flipped=True)


def heads(shape: Shape) -> Frame:
    """(i, heads, d_head), an attention's projection, as the matrix with o = heads d_head.

    >>> views.heads((64, 8, 16)).o
    128
    """
    return deconv(shape)


def whole(shape: Shape) -> Frame:
    """Any parameter as one vector: o is the number of its entries, and i = 1.

    >>> views.whole((4, 3)).n
    1
    """
    return Frame(1, math.prod(shape), 1, tuple(range(len(shape))))


def elements(shape: Shape) -> Frame:
    """Matrices as matrices, everything else as a vector: for maps that act on each entry.

    >>> views.elements((4, 3)).o
    4
    """
    return matrix(shape) if len(shape) in (2, 3) else whole(shape)


@dataclass(frozen=True)
class split:
    """(n o, i), a fused layer, as n matrices o x i, one after the other: split(3) for QKV.

    >>> views.split(3)((192, 64)).n
    3
    """

    n: int
    of: View = matrix

    def __call__(self, shape: Shape) -> Frame:
        f = self.of(shape)
        if self.n < 1 or f.o % self.n or f.taps != 1:
            fix = f"pass a divisor of d_out = {f.o}, or views.grouped for a convolution"
            raise ValueError(f"cannot cut shape {times(shape)} into {self.n} equal blocks: {fix}")
        beside = f.beside * self.n if f.flipped else 1
        return f._replace(n=f.n * self.n, o=f.o // self.n, beside=beside)

    def __repr__(self) -> str:
        return f"split({self.n})" if self.of is matrix else f"split({self.n}, {label(self.of)})"


@dataclass(frozen=True)
class grouped:
    """(n o, i, k...), the kernel of a convolution with n groups, as n matrices o x (i taps).

    >>> views.grouped(4)((64, 16, 3, 3)).n
    4
    """

    n: int
    of: View = conv

    def __call__(self, shape: Shape) -> Frame:
        if self.n < 1 or shape[0] % self.n:
            fix = f"pass a divisor of {shape[0]}"
            raise ValueError(f"cannot cut shape {times(shape)} into {self.n} groups: {fix}")
        one = self.of((shape[0] // self.n, *shape[1:]))  # dimension 0 has the groups
        return one._replace(n=self.n)

    def __repr__(self) -> str:
        return f"grouped({self.n})" if self.of is conv else f"grouped({self.n}, {label(self.of)})"


def label(view: View) -> str:
    """The name of a view, as a table shows it.

    >>> views.label(views.split(3))
    'split(3)'
    """
    return getattr(view, "__name__", None) or repr(view)
