"""Run a method with the library's optimizer and record the quantities of the theorems.

The indices are the paper's: n gradients g^0 ... g^{n-1}, n - 1 calls of step(), output x^{n-1}.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from sodaopt.core.method import Method
from sodaopt.core.optimizer import SODA
from sodaopt.geometry import Ball, Clip, Context, Geometry, Sharp, State
from sodaopt.geometry.norms import Euclidean
from sodaopt.geometry.views import Shape
from sodaopt.schedules import Number

from .problems import Problem
from .regularisers import Regulariser, Smoothed, name
from .spaces import dot

Oracle: TypeAlias = Callable[[int, Tensor], Tensor]
Weights: TypeAlias = Callable[[Number], Number]


class Point(NamedTuple):
    """The state before step k: the parameter y^k, its gradient g^k and the optimizer."""

    k: int
    y: Tensor
    g: Tensor
    optimizer: SODA

    def x(self) -> Tensor:
        """Return x^k, the output of the method so far."""
        self.optimizer.eval()
        x = self.y.detach().clone()
        self.optimizer.train()
        return x


def walk(
    method: Method, eta: float, n: int, x0: Tensor, oracle: Oracle, replicas: int = 1
) -> Iterator[Point]:
    """Run n - 1 steps of SODA from x0 on a stack of independent replicas, and yield n points."""
    p = x0.detach().expand(replicas, *x0.shape).clone().requires_grad_()
    _check_replicas(method.geometry, p.shape)
    optimizer = SODA([p], eta, method)
    for k in range(n):
        g = oracle(k, p.detach())
        yield Point(k, p, g, optimizer)
        if k < n - 1:
            p.grad = g
            optimizer.step()


def gaps(
    problem: Problem,
    method: Method,
    eta: float,
    ns: Sequence[int],
    *,
    replicas: int = 1,
    seed: int = 0,
    stop: float = torch.inf,
) -> dict[int, Tensor]:
    """Return f(x^{n-1}) - f* of each replica for every n in ns, all from one run.

    stop: the run ends early when a gap exceeds this number
    """
    out = {}
    for at in walk(method, eta, max(ns), problem.z0, problem.oracle(seed), replicas):
        if at.k + 1 in ns:
            gap = problem.gap(at.x())
            out[at.k + 1] = gap
            if not bool((gap <= stop).all()):
                break
    return out


def _check_replicas(geometry: Geometry, shape: Shape) -> None:
    """Raise ValueError if the geometry's norm spans the stack, which would couple the replicas."""
    base = geometry.base if isinstance(geometry, _Recorder) else geometry
    base = base.h if isinstance(base, Smoothed) else base
    linear = isinstance(base, Sharp) and isinstance(base.norm, Euclidean)
    if isinstance(base, Ball | Sharp | Clip) and not linear and base.norm.view(shape).n != shape[0]:
        raise ValueError(
            f"{name(base)} measures {shape[0]} replicas as one. Set view=matrix on its norm."
        )


# -- runs with a record ---------------------------------------------------------------------------


class Trace(NamedTuple):
    """The record of a run.

    x, y, z, g: the iterates and gradients, (n, replicas, o, i)
    dual: gamma_k m_bar^{k+1} of each step, (n-1, replicas, o, i)
    a: the weights a_0 ... a_n of the method
    A: their sums A_0 ... A_n
    """

    x: Tensor
    y: Tensor
    z: Tensor
    g: Tensor
    dual: Tensor
    eta: float
    a: Tensor
    A: Tensor

    @property
    def n(self) -> int:
        return len(self.g)

    @property
    def w(self) -> Tensor:
        """a_0 ... a_{n-1} as a column, to multiply tensors of shape (n, replicas)."""
        return self.a[: self.n, None]

    def variation(self) -> Tensor:
        """Return g^k - g^{k-1} with g^{-1} = 0."""
        return torch.cat([self.g[:1], self.g[1:] - self.g[:-1]])


def trace(
    method: Method,
    eta: float,
    n: int,
    x0: Tensor,
    oracle: Oracle,
    a: Weights,
    replicas: int = 1,
) -> Trace:
    """Run a method with a fixed centre (init or origin) and return its record.

    a: the weights that the method was made from
    """
    recorded = _RecordedRun(method, eta, x0)
    xs, ys, zs, gs, duals = [], [], [], [], []
    for at in walk(recorded.method, eta, n, x0, oracle, replicas):
        dual, z = recorded.read(at)
        xs.append(at.x())
        ys.append(at.y.detach().clone())
        zs.append(z)
        gs.append(at.g.clone())
        duals.append(dual)
    weights = torch.tensor([float(a(k)) for k in range(n + 1)], dtype=torch.float64)
    x, y, z, g, dual = map(torch.stack, (xs, ys, zs, gs, duals))
    return Trace(x, y, z, g, dual[1:], eta, weights, weights.cumsum(0))


def gaps_and_regret(
    problem: Problem,
    rule: "Run",
    ns: Sequence[int],
    h: Regulariser,
    replicas: int = 1,
    seed: int = 0,
) -> tuple[dict[int, Tensor], float]:
    """Return the gaps of a rule by n, and the largest ratio of regret to bound among the replicas.

    Only the sums of regret and bound are kept, so the memory does not grow with n.
    """
    recorded, x = _RecordedRun(rule.method, rule.eta, problem.z0), problem.x_star
    R, out, share = h.gap((x - problem.z0)[None]), {}, 0.0
    regret = variation = g = torch.zeros((), dtype=torch.float64)
    points = walk(recorded.method, rule.eta, max(ns), problem.z0, problem.oracle(seed), replicas)
    for at in points:
        (_, z), a, before = recorded.read(at), float(rule.a(at.k)), g
        g = at.g
        regret = regret + a * dot(g, z - x)
        variation = variation + a**2 * h.space.dual(g - before) ** 2
        if at.k + 1 in ns:
            out[at.k + 1] = problem.gap(at.x())
            bound = R / rule.eta + rule.eta / (2 * h.mu) * variation
            used = (regret / bound).nan_to_num(nan=torch.inf)  # Python's max() ignores a NaN
            share = max(share, float(used.max()))
    return out, share


class Run(Protocol):
    """The part of a rule that a run reads."""

    @property
    def method(self) -> Method: ...
    @property
    def eta(self) -> float: ...
    @property
    def a(self) -> Weights: ...


class _RecordedRun:
    """A method whose geometry records its calls, so that z can be reconstructed."""

    def __init__(self, method: Method, eta: float, x0: Tensor) -> None:
        if method.centre == "last":
            raise ValueError(
                f"{method.name} has no fixed centre. The theory needs centre='init' or 'origin'."
            )
        # Same homogeneity as the geometry, so that the optimizer takes the same code path.
        self.recorder = (_Recorder if method.geometry.homogeneous else _UnscaledRecorder)(
            method.geometry
        )
        self.method = replace(method, geometry=self.recorder)
        self.eta, self.past = eta, method.memory
        self.centre = x0 if method.centre == "init" else torch.zeros_like(x0)

    def read(self, at: Point) -> tuple[Tensor, Tensor]:
        """Return gamma_{k-1} m_bar^k and z^k. Before the first step these are 0 and x^0."""
        if at.k == 0:
            return torch.zeros_like(at.y), at.y.detach().clone()
        gamma, m_bar, u = self.recorder.log.pop()
        self.past = self.method.advance(self.past, at.k - 1, self.eta)
        lam = 1.0
        if self.method._is_one_sum and self.recorder.homogeneous:  # the map received lam gamma
            lam = float(self.method.coefs(at.k - 1, self.eta, self.past).lam)
        return gamma / lam * m_bar, self.centre + u / lam


@dataclass(frozen=True, eq=False)
class _Recorder(Geometry):
    """A geometry that records (gamma, m_bar, u) of each call."""

    base: Geometry
    log: list[tuple[float, Tensor, Tensor]] = field(default_factory=list)

    def check(self, shape: Shape) -> None:
        self.base.check(shape)

    def state(self, p: Tensor, dtype: torch.dtype) -> State:
        return self.base.state(p, dtype)

    def __call__(self, m_bar: list[Tensor], gamma: Number, at: Context) -> list[Tensor]:
        u = self.base(m_bar, gamma, at)
        self.log.append((float(gamma), m_bar[0].clone(), u[0].clone()))
        return u


class _UnscaledRecorder(_Recorder):
    """A recorder of a map that is not homogeneous in gamma."""

    homogeneous: ClassVar[bool] = False
