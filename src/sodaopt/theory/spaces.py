"""Norms in which a problem states its constants: ||x||, its dual and its operator norms.

A point is a stack (..., o, i). The last two dimensions are the variable, and a vector is a column.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor


def dot(u: Tensor, v: Tensor) -> Tensor:
    """Return <u, v> of each variable of a stack."""
    return (u * v).sum((-2, -1))


def apply(A: Tensor, x: Tensor) -> Tensor:
    """Return A x of each variable of a stack, as one product (A @ x would be one per variable)."""
    return (x.mT @ A.mT).mT


def length(x: Tensor, p: float) -> Tensor:
    """Return ||x||_p of each variable, with shape (..., 1, 1).

    The entries are divided by the largest one, because |x|^p overflows for a large p.
    """
    top = x.abs().amax((-2, -1), keepdim=True).clamp(min=1e-300)
    scaled: Tensor = torch.linalg.vector_norm(x / top, p, dim=(-2, -1), keepdim=True)
    return top * scaled


class Space:
    """A norm.

    hilbert: whether the variances of independent noise add, which makes the noise constants smaller
    """

    hilbert: ClassVar[bool] = True

    def norm(self, x: Tensor) -> Tensor:
        """Return ||x||."""
        raise NotImplementedError

    def dual(self, g: Tensor) -> Tensor:
        """Return ||g||_* = max <g, x> over ||x|| <= 1."""
        raise NotImplementedError

    def operator(self, A: Tensor) -> float:
        """Return an upper bound of max ||A x||_2 over ||x|| <= 1.

        If f is L-smooth in l2, then f(A x) is L operator(A)^2-smooth in this norm.
        """
        raise NotImplementedError

    def gaussian(self, shape: tuple[int, int]) -> float:
        """Return an upper bound of E ||xi||_*^2 for a standard normal xi."""
        raise NotImplementedError


@dataclass(frozen=True)
class Lp(Space):
    """||x||_p with 1 < p <= 2. The dual is ||g||_q with 1/p + 1/q = 1."""

    p: float = 2.0

    @property
    def hilbert(self) -> bool:  # type: ignore[override]
        return self.p == 2

    @property
    def q(self) -> float:
        return self.p / (self.p - 1)

    def norm(self, x: Tensor) -> Tensor:
        return length(x, self.p)[..., 0, 0]

    def dual(self, g: Tensor) -> Tensor:
        return length(g, self.q)[..., 0, 0]

    def operator(self, A: Tensor) -> float:
        """Interpolate (Riesz-Thorin) between the longest column and the largest singular value.

        These are the operator norms for p = 1 and p = 2.
        """
        t = 2 / self.p - 1
        column = float(torch.linalg.vector_norm(A, dim=0).max())
        return float(column**t * float(torch.linalg.matrix_norm(A, 2)) ** (1 - t))

    def gaussian(self, shape: tuple[int, int]) -> float:
        """Return (d E|N|^q)^(2/q), an upper bound by Jensen's inequality. It is d for q = 2."""
        moment = 2 ** (self.q / 2) * math.gamma((self.q + 1) / 2) / math.sqrt(math.pi)
        return float((math.prod(shape) * moment) ** (2 / self.q))


@dataclass(frozen=True, eq=False)
class Metric(Space):
    """||x||_H = <x, H x>^(1/2). The dual is <g, H^-1 g>^(1/2)."""

    H: Tensor

    @cached_property
    def inverse(self) -> Tensor:
        inverse: Tensor = torch.linalg.inv(self.H)
        return inverse

    def norm(self, x: Tensor) -> Tensor:
        return dot(x, apply(self.H, x)).sqrt()

    def dual(self, g: Tensor) -> Tensor:
        return dot(g, apply(self.inverse, g)).sqrt()

    def operator(self, A: Tensor) -> float:
        """Return ||A C^-T||_2 with H = C C^T, since ||C^T x||_2 = ||x||_H."""
        C = torch.linalg.cholesky(self.H)
        return float(torch.linalg.matrix_norm(torch.linalg.solve(C, A.mT), 2))

    def gaussian(self, shape: tuple[int, int]) -> float:
        return shape[1] * float(self.inverse.diagonal().sum())
