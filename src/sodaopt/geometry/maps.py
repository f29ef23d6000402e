"""The mirror maps. `sodaopt.geometry` has their table."""

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from sodaopt import schedules
from sodaopt._errors import count, number
from sodaopt.geometry.norms import Norm, matrixwise
from sodaopt.geometry.polar import Newton, divisor, lengths
from sodaopt.geometry.shards import Shards
from sodaopt.geometry.views import Frame, Shape, View, matrix
from sodaopt.schedules import Coef, Number

ELEMENTWISE = frozenset(("diagonal", "sign", "identity"))
"""The kernels that compute each entry of u from the same entry of their inputs."""
State: TypeAlias = dict[str, Any]
"""The optimizer's state of one parameter."""
Exchanged: TypeAlias = tuple[tuple[Shape, Frame], ...]
"""The shape and the frame of each tensor of a parameter that travels between ranks."""


@dataclass
class Context:
    """The inputs of a map besides m_bar, for parameters that share k and lr.

    shapes: the shapes of the whole parameters. A tensor in g or state may be this rank's shard.
    g: the gradients.
    k, lr: the step and the learning rate, as in `sodaopt.schedules`.
    state: each parameter's state, updated in place.
    shards: exchanges shards with other ranks. None: the map exchanges nothing.

    >>> g = torch.ones(2, 2)
    >>> context = geometry.Context([g.shape], [g], k=0, lr=0.1, state=[{}])
    """

    shapes: list[torch.Size]
    g: list[Tensor]
    k: Number
    lr: Number
    state: list[State]
    shards: Shards | None = field(default=None, kw_only=True)

    def kept(self, name: str) -> list[Tensor]:
        """Return the state tensor with this name of each parameter."""
        return [s[name] for s in self.state]

    @property
    def results(self) -> list[Tensor] | None:
        """This rank's shards of the results of `Geometry.mapped`, or None if nothing travelled."""
        return None if self.shards is None else self.shards.results


class Geometry:
    """The interface of a map. All tensors of one call share k, lr and gamma.

    On sharded parameters an elementwise map is called with this rank's shards, and needs nothing
    else. Any other map must set `exchanges`, and is then called with `context.shards`. It completes
    sums over shards by `context.shards.sum`. If it needs whole matrices, it describes them by
    `exchanged`, `tensors` and `mapped`. Each matrix is mapped by one rank before the map is called,
    and `context.results` has this rank's shards of the results.

    homogeneous: u(s gamma) = s u(gamma), so that the template may fold lam gamma into one number.
    exchanges: the map works on sharded parameters with `context.shards`.
    reads_m_bar: whether the map reads m_bar or `context.g` even if it has `context.results`.

    >>> zoo.shampoo().geometry.homogeneous
    True
    """

    homogeneous: ClassVar[bool] = True
    exchanges: ClassVar[bool] = False
    reads_m_bar: ClassVar[bool] = True

    @property
    def kernel(self) -> str | None:
        """The name of the fused kernel that computes the map, or None for plain operations.

        A kernel of ELEMENTWISE is one pass over memory. "polar" is two passes before the matrix
        products, and one after them. It needs `kernel_polar` and `kernel_frame`.
        """
        return None

    @property
    def elementwise(self) -> bool:
        """Whether each entry of u needs the same entry of the inputs only: a shard is enough."""
        return self.kernel in ELEMENTWISE

    def kernel_width(self, shape: torch.Size) -> float:
        """The kernel's factor of u for a parameter of this shape, besides gamma."""
        return 1.0

    def kernel_numbers(self, k: Number, lr: Number) -> tuple[Number, Number, Number]:
        """The kernel's factor of gamma, and the rate and eps of the kernel "diagonal"."""
        return 1.0, 0.0, 0.0

    @property
    def kernel_polar(self) -> Newton:
        """The iteration of the kernel "polar"."""
        raise NotImplementedError

    def kernel_frame(self, shape: Shape) -> Frame:
        """Return the matrices of a parameter whose polar factors the kernel "polar" computes."""
        raise NotImplementedError

    def check(self, shape: Shape) -> None:
        """Raise ValueError if a parameter of this shape cannot have this geometry."""

    def exchanged(self, shape: Shape) -> Exchanged:
        """Return (shape, frame) of each tensor of a parameter whose matrices must be whole.

        Several tensors must have the same number of matrices. They are cut like the parameter, and
        travel in their own dtype. Empty: the map needs no whole matrices.
        """
        return ()

    def tensors(self, m_bar: list[Tensor], context: Context) -> list[Tensor]:
        """Return the tensors that `exchanged` describes: whole, or this rank's shards of them."""
        return m_bar

    def mapped(self, matrices: list[Tensor]) -> list[Tensor]:
        """Return the result of each whole matrix (o, i), in new tensors of the same shapes.

        If a parameter has a single tensor, the result must not depend on the scale of the matrix,
        which changes if matrices travel in fp16.
        """
        raise NotImplementedError(f"{type(self).__name__} has `exchanged`, and needs `mapped` too")

    def with_view(self, view: View) -> "Geometry":
        """Return the map for a layer that stores its matrices in this way."""
        return self

    def state(self, p: Tensor, dtype: torch.dtype) -> State:
        """Return the map's state for p before the first step."""
        return {}

    def __call__(self, m_bar: list[Tensor], gamma: Number, context: Context) -> list[Tensor]:
        """Return u for each m_bar in new tensors, and update context.state in place."""
        raise NotImplementedError


def _check_coef(name: str, c: Coef, most: float = math.inf) -> None:
    if schedules.start(c):
        raise ValueError(f"{name} must be a function of (k, lr) alone, and {c!r} has a memory")
    if not callable(c):
        number(name, c, most)


@dataclass(frozen=True)
class _NormMap(Geometry):
    """The map of a norm. The radius and the width factor enter u to the power `degree`."""

    norm: Norm
    radius: Coef = 1.0
    exchanges: ClassVar[bool] = True
    degree: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if not isinstance(self.norm, Norm):
            raise TypeError(f"{type(self).__name__} needs a Norm such as Sign(), got {self.norm!r}")
        _check_coef("the radius", self.radius)

    def check(self, shape: Shape) -> None:
        self.norm.view(shape)

    def exchanged(self, shape: Shape) -> Exchanged:
        return ((shape, self.norm.view(shape)),) if self.norm.needs_matrices(shape) else ()

    def mapped(self, matrices: list[Tensor]) -> list[Tensor]:
        return matrixwise(self.norm.minimiser, matrices)

    def with_view(self, view: View) -> Geometry:
        return replace(self, norm=self.norm.with_view(view))

    def widths(self, context: Context) -> list[Number]:
        """rho times the norm's width factor, for each parameter."""
        rho = schedules.value(self.radius, context.k, context.lr)
        widths = {shape: rho * self.norm.width(shape) for shape in set(context.shapes)}
        return [widths[shape] for shape in context.shapes]

    def directions(self, ds: list[Tensor], shards: Shards | None) -> list[Tensor]:
        """u of each d, without rho, gamma and the width factor."""
        return self.norm.units(ds, shards)

    def __call__(self, m_bar: list[Tensor], gamma: Number, context: Context) -> list[Tensor]:
        u = self.directions(m_bar, context.shards)
        torch._foreach_mul_(u, [gamma * c**self.degree for c in self.widths(context)])
        return u

    @property
    def kernel_polar(self) -> Newton:
        return self.norm.polar  # type: ignore[attr-defined, no-any-return]

    def kernel_frame(self, shape: Shape) -> Frame:
        return self.norm.view(shape)

    def kernel_width(self, shape: torch.Size) -> float:
        return self.norm.width(shape) ** self.degree

    def kernel_numbers(self, k: Number, lr: Number) -> tuple[Number, Number, Number]:
        return schedules.value(self.radius, k, lr) ** self.degree, 0.0, 0.0


@dataclass(frozen=True)
class Ball(_NormMap):
    """u = gamma rho lmo(m_bar).

    >>> from sodaopt.geometry import Ball, Sign, unit
    >>> Method(Ball(Sign(unit), radius=2.0), alpha=0.1).geometry.radius
    2.0
    """

    reads_m_bar: ClassVar[bool] = False

    @property
    def kernel(self) -> str | None:
        return self.norm.ball_kernel


@dataclass(frozen=True)
class Sharp(_NormMap):
    """u = gamma rho^2 dual(m_bar) lmo(m_bar).

    >>> zoo.sgd().geometry == geometry.Sharp(geometry.Euclidean())
    True
    """

    degree: ClassVar[int] = 2

    @property
    def kernel(self) -> str | None:
        return self.norm.sharp_kernel

    def directions(self, ds: list[Tensor], shards: Shards | None) -> list[Tensor]:
        return self.norm.sharps(ds, shards)


@dataclass(frozen=True)
class Clip(_NormMap):
    """u = rho min(1, gamma rho dual(m_bar)) lmo(m_bar). Not homogeneous in gamma.

    >>> clipped = Method(geometry.Clip(geometry.Sign(geometry.unit)), alpha=0.1)
    """

    homogeneous: ClassVar[bool] = False

    def __call__(self, m_bar: list[Tensor], gamma: Number, context: Context) -> list[Tensor]:
        u = self.norm.units(m_bar, context.shards)
        duals = self.norm.duals(m_bar, u, context.shards)
        for u_, dual, c in zip(u, duals, self.widths(context), strict=True):
            u_.mul_((dual * (gamma * c)).clamp(max=1.0) * c)
        return u


@dataclass(frozen=True)
class Diagonal(Geometry):
    """v <- (1 - rate) v + rate g^2, u = -gamma m_bar/(sqrt(v)+eps), psi = 1/2 u . (sqrt(v)+eps) u.

    v includes the current gradient.

    rate: in [0, 1]. 1-beta2 is the plain average, schedules.debias(beta2) Adam's corrected one.
    eps: at least 0.

    >>> zoo.adam().geometry == geometry.Diagonal(schedules.debias(0.999))
    True
    """

    rate: Coef = field(default_factory=lambda: schedules.debias(0.999))
    eps: float = 1e-8
    kernel: ClassVar[str] = "diagonal"

    def __post_init__(self) -> None:
        _check_coef("the rate", self.rate, 1)
        number("eps", self.eps)

    def kernel_numbers(self, k: Number, lr: Number) -> tuple[Number, Number, Number]:
        return 1.0, schedules.value(self.rate, k, lr), self.eps

    def state(self, p: Tensor, dtype: torch.dtype) -> State:
        return {"v": torch.zeros_like(p, dtype=dtype)}

    def __call__(self, m_bar: list[Tensor], gamma: Number, context: Context) -> list[Tensor]:
        v = context.kept("v")
        _, rate, eps = self.kernel_numbers(context.k, context.lr)
        torch._foreach_mul_(v, 1 - rate)
        torch._foreach_addcmul_(v, context.g, context.g, value=rate)
        H = list(torch._foreach_sqrt(v))
        torch._foreach_add_(H, eps)
        u = list(torch._foreach_div(m_bar, H))
        torch._foreach_mul_(u, -gamma)
        return u


@dataclass(frozen=True)
class MultiNorm(Geometry):
    """u = -gamma X, X = m_bar with rows of norm sqrt(i), then columns of norm sqrt(o), in turn.

    RMS(X) is 1, so gamma is a radius. It has no dual norm, so it has no sharp or clip form.

    iterations: how often rows and columns are normalised, at least 1.

    >>> zoo.multinorm(3).geometry == geometry.MultiNorm(3)
    True
    """

    iterations: int = 5
    view: View = matrix
    exchanges: ClassVar[bool] = True
    reads_m_bar: ClassVar[bool] = False

    def __post_init__(self) -> None:
        count("iterations", self.iterations, 1)

    def check(self, shape: Shape) -> None:
        self.view(shape)

    def exchanged(self, shape: Shape) -> Exchanged:
        return ((shape, self.view(shape)),)

    def mapped(self, matrices: list[Tensor]) -> list[Tensor]:
        return matrixwise(self._balanced, matrices)

    def with_view(self, view: View) -> Geometry:
        return replace(self, view=view) if self.view is matrix else self

    def __call__(self, m_bar: list[Tensor], gamma: Number, context: Context) -> list[Tensor]:
        u = context.results or matrixwise(self._balanced, m_bar, self.view)
        torch._foreach_mul_(u, -gamma)
        return u

    def _balanced(self, X: Tensor) -> Tensor:
        """Normalise a batch: rows to norm sqrt(i), then columns to norm sqrt(o), in turn."""
        for dim in (-1, -2) * self.iterations:
            X = X * (math.sqrt(X.shape[dim]) / divisor(lengths(X, (dim,)), X.dtype))
        return X
