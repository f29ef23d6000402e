"""More ways in which a parameter is a batch of matrices: fused, grouped and transposed layers.

`matrix`, `transposed`, `conv` and `whole` are beside the norms. These are values: they compare
and pickle. Where blocks of one parameter are matrices of their own, the parameter's norm is the
largest of theirs, and its dual the sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from ._errors import times
from .norms import Frame, Shape, View, conv, matrix, transposed

__all__ = ["conv", "deconv", "grouped", "label", "matrix", "split", "transposed"]


class _Columns(Frame):
    """Blocks side by side in a parameter that is stored transposed: (stack, i, blocks, o)."""

    def fold(self, d: Tensor) -> Tensor:
        stack = d.shape[0] if d.ndim == 3 else 1
        blocks = d.reshape(stack, self.i, self.n // stack, self.o)
        return blocks.permute(0, 2, 3, 1).reshape(self.n, self.o, self.i)

    def unfold(self, X: Tensor, shape: Shape) -> Tensor:
        stack = shape[0] if len(shape) == 3 else 1
        blocks = X.reshape(stack, self.n // stack, self.o, self.i)
        return blocks.permute(0, 3, 1, 2).reshape(tuple(shape))


@dataclass(frozen=True)
class split:
    """A fused layer as n equal blocks of outputs, one after the other: split(3) for QKV."""

    n: int
    of: View = matrix

    def __call__(self, shape: Shape) -> Frame:
        f = self.of(shape)
        if self.n < 1 or f.o % self.n or f.taps != 1:
            raise ValueError(f"cannot cut shape {times(shape)} into {self.n} equal blocks")
        cut = _Columns if f.flipped else Frame
        return cut(f.n * self.n, f.o // self.n, f.i, f.dims, flipped=f.flipped)

    def __repr__(self) -> str:
        return f"split({self.n})" if self.of is matrix else f"split({self.n}, {label(self.of)})"


@dataclass(frozen=True)
class grouped:
    """The kernel of a convolution with n groups: each group is a matrix."""

    n: int

    def __call__(self, shape: Shape) -> Frame:
        f = conv(shape)
        return f._replace(n=self.n, o=f.o // self.n)

    def __repr__(self) -> str:
        return f"grouped({self.n})"


def deconv(shape: Shape) -> Frame:
    """A transposed convolution's kernel (d_in, d_out, k...): the matrix from d_in to d_out k..."""
    return Frame(1, math.prod(shape[1:]), shape[0], tuple(range(len(shape))), flipped=True)


def label(view: View) -> str:
    return getattr(view, "__name__", None) or repr(view)
