"""Convex problems with a known minimiser, and with L, G and noise known in any norm.

A point is a stack (replicas, o, i) of independent runs. A vector is a column.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import Generator, Tensor

from sodaopt._errors import times

from .spaces import Space, apply

Constant: TypeAlias = float | Callable[[Space], float] | None
Function: TypeAlias = Callable[[Tensor], Tensor]
Sampler: TypeAlias = Callable[[Tensor, Generator], Tensor]

NAMES = {
    "minimiser": "a point x* where f is smallest",
    "L": "the smoothness, ||grad f(x) - grad f(y)||_* <= L ||x - y||",
    "G": "the largest dual norm of a gradient that the oracle returns",
    "v": "the noise, E ||g - grad f||_*^2 <= v^2 (measured_noise measures it)",
}


@dataclass(frozen=True)
class Problem:
    """A function f to minimise, with the constants that the bounds need.

    value: x -> f of each variable of the stack
    gradient: x -> a subgradient. None means autograd.
    sample: (x, generator) -> a stochastic gradient. None means the exact gradient.
    minimiser, L, G, v: constants, or None if unknown. A bound that needs an unknown one raises an
        error that names it. L, G and v are numbers or functions of the norm.
    interior: True if grad f(x*) = 0, False if x* is on the boundary of a ball
    start: z0, the origin by default
    """

    name: str
    shape: tuple[int, int]
    value: Function
    gradient: Function | None = None
    sample: Sampler | None = None
    minimiser: Tensor | None = None
    L: Constant = None
    G: Constant = None
    v: Constant = None
    interior: bool = True
    start: Tensor | None = field(default=None, compare=False)

    @property
    def z0(self) -> Tensor:
        """The start of every run and the centre of the regulariser. The default is the origin."""
        return torch.zeros(self.shape, dtype=torch.float64) if self.start is None else self.start

    @property
    def x_star(self) -> Tensor:
        if self.minimiser is None:
            raise ValueError(self._missing("minimiser"))
        return self.minimiser

    @property
    def stochastic(self) -> bool:
        return self.sample is not None

    def constant(self, name: str, space: Space) -> float:
        """Return L, G or v in this norm."""
        c = getattr(self, name)
        if name == "v" and not self.stochastic:
            return 0.0
        if c is None:
            raise ValueError(self._missing(name))
        return float(c(space) if callable(c) else c)

    def _missing(self, name: str) -> str:
        return f"{name} of {self.name} is unknown: {NAMES[name]}. Set Problem(..., {name}=...)."

    def gap(self, x: Tensor) -> Tensor:
        """Return f(x) - f(x*) of each variable of the stack."""
        return self.value(x) - self.value(self.x_star[None])

    def grad(self, x: Tensor) -> Tensor:
        if self.gradient is not None:
            return self.gradient(x)
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (g,) = torch.autograd.grad(self.value(x).sum(), x)
        return g

    def oracle(self, seed: int = 0) -> Callable[[int, Tensor], Tensor]:
        """Return the function (k, y) -> g^k. It draws from its own random generator."""
        if self.sample is None:
            return lambda k, y: self.grad(y)
        sample, generator = self.sample, torch.Generator().manual_seed(seed)
        return lambda k, y: sample(y, generator)

    def noisy(self, v: float) -> "Problem":
        """Return this problem with Gaussian gradient noise, E ||noise||_2^2 = v^2."""
        scale = v / math.sqrt(math.prod(self.shape))

        def sample(x: Tensor, generator: Generator) -> Tensor:
            noise = torch.randn(x.shape, generator=generator, dtype=x.dtype)
            return self.grad(x) + scale * noise

        def in_norm(space: Space) -> float:
            return scale * math.sqrt(space.gaussian(self.shape))

        return replace(self, name=f"{self.name}, noisy", sample=sample, v=in_norm, G=None)

    def at(self, start: Tensor) -> "Problem":
        """Return this problem with another z0."""
        if start.shape != self.shape:
            raise ValueError(
                f"z0 is {times(start.shape)}, but {self.name} has a variable of {times(self.shape)}"
            )
        return replace(self, start=start)


def measured_noise(
    problem: Problem, space: Space, points: Tensor, samples: int = 200, seed: int = 0
) -> float:
    """Return the largest root mean square of ||g - grad f||_* among points (n, o, i).

    samples: the number of gradients drawn at each point
    """
    oracle, worst = problem.oracle(seed), 0.0
    for x in points:
        stack = x.expand(samples, *x.shape)
        noise = oracle(0, stack) - problem.grad(x[None])
        worst = max(worst, float((space.dual(noise) ** 2).mean()))
    return math.sqrt(worst)


# -- quadratics -----------------------------------------------------------------------------------


def rotation(d: int, generator: Generator) -> Tensor:
    """Return a random orthogonal basis, so that no method can exploit the coordinates."""
    Q: Tensor = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64)).Q
    return Q


def quadratic(spectrum: Tensor, offset: Tensor, seed: int = 0) -> Problem:
    """Return f = 1/2 <x - x*, Q (x - x*)> with a random eigenbasis of Q.

    spectrum: the eigenvalues of Q
    offset: the coordinates of x* in the eigenbasis
    """
    V = rotation(len(spectrum), torch.Generator().manual_seed(seed))
    A = spectrum.sqrt()[:, None] * V.mT  # Q = A^T A
    Q, x_star = A.mT @ A, V @ offset[:, None]
    return Problem(
        "quadratic",
        (len(spectrum), 1),
        value=lambda x: (apply(A, x - x_star) ** 2).sum((-2, -1)) / 2,
        gradient=lambda x: apply(Q, x - x_star),
        minimiser=x_star,
        L=lambda space: space.operator(A) ** 2,
    )


def hard_quadratic(d: int = 64, L: float = 1.0, tilt: float = 0.06) -> Problem:
    """Return a quadratic on which gradient descent is as slow as its bound, with ||x*|| = 1.

    The eigenvalues l_i lie between 1e-6 L and L, evenly on a log scale, and x* has equal
    coordinates c_i. Then sum l_i c_i^2 (1 - l_i/L)^(2n) falls as 1/n for gradient descent and for
    other methods of the same order. `tilt` makes the coordinates of small eigenvalues a little
    smaller. Without it, the measured slopes start above their limits.
    """
    spectrum = L * torch.logspace(-6, 0, d, dtype=torch.float64)
    offset = (spectrum / L) ** (tilt / 2)
    return quadratic(spectrum, offset / offset.norm())


# -- problems on a ball, with the minimiser on its boundary ----------------------------------------


def box(d: int = 20, seed: int = 1) -> Problem:
    """Return f = 1/2 <x - b, Q (x - b)> on max |x_j| <= 1, with half of x* at the bounds.

    x* is optimal because Q (x* - b) = -c, where c_j has the sign of x*_j if that coordinate is at
    a bound and c_j = 0 otherwise.
    """
    generator = torch.Generator().manual_seed(seed)
    V = rotation(d, generator)
    spectrum = torch.logspace(-3, 0, d, dtype=torch.float64)
    A = spectrum.sqrt()[:, None] * V.mT
    x_star = torch.rand(d, 1, generator=generator, dtype=torch.float64) - 0.5
    x_star[: d // 2] = x_star[: d // 2].sign()
    c = torch.zeros_like(x_star)
    c[: d // 2] = 0.1 * x_star[: d // 2]
    b = x_star + V @ ((V.mT @ c) / spectrum[:, None])
    return Problem(
        "box",
        (d, 1),
        value=lambda x: (apply(A, x - b) ** 2).sum((-2, -1)) / 2,
        gradient=lambda x: apply(A.mT, apply(A, x - b)),
        minimiser=x_star,
        L=lambda space: space.operator(A) ** 2,
        interior=False,
    )


def spectral(o: int = 6, i: int = 8, seed: int = 2) -> Problem:
    """Return f = 1/2N ||X A - B||_F^2 on sigma_max(X) <= 1. Half of X*'s singular values are 1.

    B = X* A + N C (A A^T)^-1 A makes grad f(X*) = -C. X* is optimal because C = U_1 P V_1^T with
    P >= 0, where U_1 and V_1 are the singular vectors of X* with singular value 1.
    """
    generator = torch.Generator().manual_seed(seed)
    N = 4 * i
    U, V = rotation(o, generator), rotation(i, generator)[:, :o]
    s, P = torch.linspace(0.2, 0.8, o, dtype=torch.float64), torch.zeros(o, dtype=torch.float64)
    s[: o // 2], P[: o // 2] = 1.0, 0.2
    A = torch.randn(i, N, generator=generator, dtype=torch.float64)
    X_star, C = (U * s) @ V.mT, (U * P) @ V.mT
    B = X_star @ A + N * C @ torch.linalg.solve(A @ A.mT, A)
    return Problem(
        "spectral",
        (o, i),
        value=lambda X: ((X @ A - B) ** 2).sum((-2, -1)) / (2 * N),
        gradient=lambda X: (X @ A - B) @ A.mT / N,
        minimiser=X_star,
        L=lambda space: space.operator(A.mT) ** 2 / N,
        interior=False,
    )
