"""Regularisers h with a known modulus of strong convexity, and their mirror maps.

Every h here has its minimum at the centre z0, so R = h(x*) - inf h is a function of x* - z0.

    Sharp(Euclidean(), r)      1/2 ||u/r||_2^2                         mu = 1/r^2 in l2
    Clip(Euclidean(), r)       1/2 ||u/r||_2^2 if ||u||_2 <= r         mu = 1/r^2 in l2
    FixedMetric(H)             1/2 <u, H u>                            mu = 1 in ||.||_H
    PNorm(p), 1 < p <= 2       1/2 ||u||_p^2                           mu = p - 1 in l_p
    Smoothed(h, tau)           h + tau/2 ||u||_2^2                     mu = tau in l2

The h of Smoothed is any ball, sharp or clip.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from sodaopt._errors import times
from sodaopt.geometry import Ball, Clip, Context, Geometry, Sharp
from sodaopt.geometry.norms import Euclidean, Norm, Sign, Spectral
from sodaopt.geometry.scales import unit
from sodaopt.geometry.views import Shape, matrix
from sodaopt.schedules import Number

from .spaces import Lp, Metric, Space, apply, dot, length


@dataclass(frozen=True)
class Regulariser:
    """A function h that is mu-strongly convex in the norm of `space`.

    gap: the function u -> h(z0 + u) - inf h
    """

    geometry: Geometry
    space: Space
    mu: float
    gap: Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class FixedMetric(Geometry):
    """h = 1/2 <u, H u> with the map u = -gamma H^-1 m_bar.

    H: a positive definite d x d matrix, symmetric up to 16 d eps max|H| with the eps of its dtype

    A product such as A A^T is symmetric only up to rounding on some CPUs. The geometry therefore
    keeps (H + H^T)/2.
    """

    H: Tensor

    def __post_init__(self) -> None:
        if self.H.dim() != 2 or self.H.shape[0] != self.H.shape[1]:
            raise ValueError(f"H must be a square matrix, got {times(self.H.shape)}")
        error, largest = float((self.H - self.H.mT).abs().max()), float(self.H.abs().max())
        if not error <= 16 * len(self.H) * torch.finfo(self.H.dtype).eps * largest:
            raise ValueError(
                f"H must be symmetric, but H and H^T differ by up to {error:.2g}. "
                "Pass (H + H.mT) / 2 if that is the metric you want."
            )
        object.__setattr__(self, "H", (self.H + self.H.mT) / 2)
        if torch.linalg.cholesky_ex(self.H).info != 0:
            raise ValueError(
                "H must be positive definite, but it has an eigenvalue that is zero or negative. "
                "Add a multiple of the identity."
            )

    def check(self, shape: Shape) -> None:
        if len(shape) < 2 or shape[-2] != len(self.H):
            d = len(self.H)
            raise ValueError(
                f"H is {d}x{d}, so the parameter must be (..., {d}, i), got {times(shape)}"
            )

    @cached_property
    def inverse(self) -> Tensor:
        inverse: Tensor = torch.linalg.inv(self.H)
        return inverse

    def __call__(self, m_bar: list[Tensor], gamma: Number, at: Context) -> list[Tensor]:
        return [apply(self.inverse, d) * -gamma for d in m_bar]


@dataclass(frozen=True)
class PNorm(Geometry):
    """h = 1/2 ||u||_p^2 with u = -gamma ||m_bar||_q^(2-q) |m_bar|^(q-1) sign(m_bar).

    p: in (1, 2], with 1/p + 1/q = 1
    """

    p: float

    def __post_init__(self) -> None:
        if not 1 < self.p <= 2:
            raise ValueError(
                f"1/2 ||.||_p^2 is strongly convex only if 1 < p <= 2, got p = {self.p}. "
                "For a norm close to l1, use p = 1 + 1/log(d)."
            )

    def __call__(self, m_bar: list[Tensor], gamma: Number, at: Context) -> list[Tensor]:
        return [self._map(d) * -gamma for d in m_bar]

    def _map(self, d: Tensor) -> Tensor:
        q = self.p / (self.p - 1)
        size = length(d, q)
        share = d.abs() / size.clamp(min=1e-300)  # divide first: |d|^(q-1) may underflow
        u: Tensor = size * share ** (q - 1) * d.sign()
        return u


@dataclass(frozen=True)
class Smoothed(Geometry):
    """h + tau/2 ||u||_2^2 for a ball, sharp or clip h. The second term makes it strongly convex.

    The map replaces the sizes s of m_bar by -min(gamma s/tau, t). The sizes are the absolute
    entries, the singular values or the Euclidean length, and t is the largest size that h allows.
    For a ball, t is the radius r, so u is the projection of -gamma m_bar/tau onto the ball. (A clip
    would scale all sizes by one factor.) For a sharp with sizes in descending order,
    t = max_j (gamma s_1 + ... + gamma s_j)/(1/r^2 + j tau).
    """

    h: Ball | Sharp | Clip
    tau: float = 1.0
    homogeneous: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.tau > 0:
            raise ValueError(f"tau must be positive, got {self.tau}")
        if not isinstance(self.h, Ball | Sharp | Clip):
            raise TypeError(f"Smoothed takes a Ball, a Sharp or a Clip, got {self.h!r}")
        if not isinstance(self.h.norm, Sign | Spectral | Euclidean):
            raise TypeError(
                f"Smoothed has no map for {self.h.norm!r}. Use Sign, Spectral or Euclidean."
            )
        if callable(self.h.radius):
            raise TypeError(
                "Smoothed takes a number as radius, not a schedule, because the theory's h is fixed"
            )

    def check(self, shape: Shape) -> None:
        self.h.check(shape)

    def __call__(self, m_bar: list[Tensor], gamma: Number, at: Context) -> list[Tensor]:
        return [self._map(d, gamma, r) for d, r in zip(m_bar, self.h.widths(at), strict=True)]

    def _map(self, d: Tensor, gamma: Number, r: float) -> Tensor:
        s, rebuild = _sizes(self.h.norm, d)
        return rebuild((gamma * s / self.tau).minimum(self._level(gamma * s, r)))

    def _level(self, s: Tensor, r: float) -> Tensor:
        """Return t for each row of s."""
        top = torch.full_like(s[:, :1], torch.inf if isinstance(self.h, Sharp) else r)
        if isinstance(self.h, Ball):
            return top
        j = torch.arange(1, s.shape[1] + 1, dtype=s.dtype)
        sums = s.sort(descending=True).values.cumsum(-1) / (1 / r**2 + j * self.tau)
        return sums.amax(-1, keepdim=True).minimum(top)


def _sizes(norm: Norm, d: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return the sizes that the norm measures, and a function that makes u from new sizes.

    Each row holds the sizes of one variable. u points against d.
    """
    f = norm.view(d.shape)
    X = f.fold(d)
    if isinstance(norm, Sign):
        return X.abs().flatten(1), lambda s: f.unfold(-X.sign() * s.view_as(X), d.shape)
    if isinstance(norm, Spectral):
        U, S, Vh = torch.linalg.svd(X, full_matrices=False)
        return S, lambda s: f.unfold(-(U * s[:, None]) @ Vh, d.shape)
    size = length(X, 2)
    return size[..., 0], lambda s: f.unfold(-X / size.clamp(min=1e-300) * s[..., None], d.shape)


def clip(radius: float) -> Clip:
    """Return h = 1/2 ||u/radius||_2^2 on the Euclidean ball, with u one variable of a stack."""
    return Clip(Euclidean(view=matrix), radius)


def regulariser(geometry: Geometry) -> Regulariser:
    """Return h, its norm and its modulus for a geometry.

    Raise ValueError if h is not strongly convex, because then no bound holds.
    """
    match geometry:
        case FixedMetric(H):
            space = Metric(H)
            return Regulariser(geometry, space, 1.0, lambda u: space.norm(u) ** 2 / 2)
        case PNorm(p):
            lp = Lp(p)
            return Regulariser(geometry, lp, p - 1, lambda u: lp.norm(u) ** 2 / 2)
        case Smoothed(h, tau):
            return Regulariser(geometry, Lp(), tau, lambda u: _base(h, u) + tau / 2 * dot(u, u))
        case Sharp() | Clip() if _euclidean(geometry.norm) and not callable(geometry.radius):
            mu = 1 / geometry.radius**2
            return Regulariser(geometry, Lp(), mu, lambda u: _base(geometry, u))
    raise ValueError(
        f"{name(geometry)} is not strongly convex, so no bound holds for it. {_fix(geometry)}"
    )


def name(geometry: Geometry) -> str:
    """Return a short name such as Ball(Sign()), without the other fields."""
    inside = getattr(geometry, "norm", None) or getattr(geometry, "h", None)
    if isinstance(inside, Geometry):
        return f"{type(geometry).__name__}({name(inside)})"
    return f"{type(geometry).__name__}({type(inside).__name__ + '()' if inside else ''})"


def _euclidean(norm: Norm) -> bool:
    return isinstance(norm, Euclidean) and norm.scale is unit


def _base(h: Ball | Sharp | Clip, u: Tensor) -> Tensor:
    """Return h(z0 + u) - inf h: the squared norm, the indicator of the ball, or their sum."""
    u = u if u.dim() == 3 else u[None]
    if isinstance(h.norm, Euclidean):  # h.norm.norm may measure the whole stack as one
        size = Lp().norm(u) / h.norm.width(u.shape)
    else:
        size = h.norm.norm(u)
    size = size / float(h.radius)  # type: ignore[arg-type]
    square = torch.zeros_like(size) if isinstance(h, Ball) else size**2 / 2
    outside = size > 1 + 1e-12  # a point on the boundary may be outside by rounding
    return square if isinstance(h, Sharp) else square.masked_fill(outside, torch.inf)


def _fix(geometry: Geometry) -> str:
    """Return advice on a strongly convex geometry to use instead."""
    if isinstance(geometry, Ball | Sharp | Clip):
        return f"Smooth it, h + tau/2 ||u||^2: theory.Smoothed({name(geometry)}, tau=1.0)"
    return "Use theory.FixedMetric(H), theory.PNorm(p) or theory.Smoothed(Ball(Sign()), tau=1.0)."
