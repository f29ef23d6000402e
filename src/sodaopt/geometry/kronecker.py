"""The Kronecker-factored metric of Shampoo."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sodaopt._errors import times
from sodaopt.geometry.maps import Context, Exchanged, Geometry, State
from sodaopt.geometry.views import Shape, matrix
from sodaopt.schedules import Number


@dataclass(frozen=True)
class Kronecker(Geometry):
    """Shampoo: L += G G^T, R += G^T G, u = -gamma L^(-1/4) m_bar R^(-1/4), from L = R = eps I.

    The first step is -gamma U V^T. L and R are o^2 + i^2 numbers, and a step takes two
    eigendecompositions in float64, so it is for small matrices.

    eps: L and R start at eps times the identity, eps > 0.

    >>> zoo.shampoo().geometry == geometry.Kronecker()
    True
    """

    eps: float = 1e-12
    exchanges: ClassVar[bool] = True
    reads_m_bar: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.eps > 0:
            raise ValueError(f"eps must be positive, got {self.eps}")

    def check(self, shape: Shape) -> None:
        if len(shape) != 2:
            raise ValueError(f"Kronecker needs a matrix, not a parameter of shape {times(shape)}")

    def state(self, p: Tensor, dtype: torch.dtype) -> State:
        sides = zip("LR", p.shape, strict=True)
        return {s: self.eps * torch.eye(n, dtype=dtype, device=p.device) for s, n in sides}

    def exchanged(self, shape: Shape) -> Exchanged:
        o, i = shape
        return tuple((s, matrix(s)) for s in ((o, i), (o, i), (o, o), (i, i)))

    def tensors(self, m_bar: list[Tensor], context: Context) -> list[Tensor]:
        L, R = context.kept("L"), context.kept("R")
        return [t for four in zip(m_bar, context.g, L, R, strict=True) for t in four]

    def __call__(self, m_bar: list[Tensor], gamma: Number, context: Context) -> list[Tensor]:
        new = context.results or self.mapped(self.tensors(m_bar, context))
        torch._foreach_copy_(context.kept("L") + context.kept("R"), new[2::4] + new[3::4])
        u = new[0::4]
        torch._foreach_mul_(u, -gamma)
        return u

    def mapped(self, fours: list[Tensor]) -> list[Tensor]:
        """Map m_bar, G, L and R of each parameter to L^(-1/4) m_bar R^(-1/4), G, new L and R."""
        out = []
        for d, G, L, R in zip(*(fours[j::4] for j in range(4)), strict=True):
            L, R = L + G @ G.mT, R + G.mT @ G
            d4 = self._root(L) @ d.double() @ self._root(R)
            out += [d4.to(d.dtype), G, L, R]
        return out

    def _root(self, A: Tensor) -> Tensor:
        """A^(-1/4). Rounding may push a zero eigenvalue below eps, so it is clamped there."""
        poison = (A * 0).sum()  # NaN if A has NaN or inf, else 0
        w, Q = torch.linalg.eigh(A.double().nan_to_num(0.0, 0.0, 0.0))
        root: Tensor = (Q * w.clamp(min=self.eps).pow(-0.25)) @ Q.mT + poison
        return root
