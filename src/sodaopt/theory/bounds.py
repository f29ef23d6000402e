"""The right-hand sides of the paper's results.

The bounds of a run (regret, online-to-batch) take its trace and return one number per replica. The
bounds of the corollaries take the constants of a problem. The weights are a_k > 0 with the sums
A_k = a_0 + ... + a_k.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from sodaopt.geometry import Geometry
from sodaopt.schedules import Number

from .problems import NAMES, Problem
from .regularisers import Regulariser, name, regulariser
from .runs import Trace, Weights
from .spaces import Space, dot


def equal_weights(k: Number) -> Number:
    """a_k = 1."""
    return 1.0


def linear_weights(k: Number) -> Number:
    """a_k = k + 1."""
    return k + 1.0


# -- bounds of a run ------------------------------------------------------------------------------


def regret(t: Trace, x: Tensor) -> Tensor:
    """Return the regret sum_k a_k <g^k, z^k - x>."""
    return (t.w * dot(t.g, t.z - x)).sum(0)


def regret_bound(t: Trace, h: Regulariser, x: Tensor, z0: Tensor) -> Tensor:
    """Return (h(x) - inf h)/eta + eta/(2 mu) sum_k a_k^2 ||g^k - g^{k-1}||_*^2.

    It bounds the regret of every single run, not only the mean.
    """
    variation = (t.w**2 * h.space.dual(t.variation()) ** 2).sum(0)
    return h.gap((x - z0)[None]) / t.eta + t.eta / (2 * h.mu) * variation


def expected(t: Trace, f: Problem) -> Trace:
    """Return the trace with g^k replaced by its conditional mean, grad f(y^k)."""
    return t._replace(g=f.grad(t.y.flatten(0, 1)).view_as(t.y))


def online_to_batch(t: Trace, f: Problem) -> Tensor:
    """Return regret/A_{n-1} for x*, an upper bound of f(x^{n-1}) - f* for any lam_bar in [0, 1].

    The paper states the bound in the mean. With the `expected` gradients it holds on every run.
    """
    return regret(expected(t, f), f.x_star) / t.A[t.n - 1]


def online_to_batch_smooth(t: Trace, f: Problem, space: Space) -> Tensor:
    """Return the bound for an L-smooth f and lam_bar <= lam/10.

    It is smaller by 1/(6 L A_{n-1}) sum_k A_{k-1} ||grad f(y^k) - grad f(y^{k-1})||_*^2.
    """
    change = space.dual(expected(t, f).variation()[1:]) ** 2
    total = (t.A[: t.n - 1, None] * change).sum(0)
    return online_to_batch(t, f) - total / (6 * f.constant("L", space) * t.A[t.n - 1])


# -- bounds of a problem --------------------------------------------------------------------------


@dataclass(frozen=True)
class Constants:
    """The constants of a problem in one norm, None if unknown.

    A rate that needs an unknown constant raises an error that names it.

    R: h(x*) - inf h
    mu: h is mu-strongly convex
    L: f is L-smooth
    G: ||g||_* <= G
    rho, sigma: E ||g^k - g^{k-1}||_*^2 <= rho ||grad f(y^k) - grad f(y^{k-1})||_*^2 + sigma^2
    g0: ||grad f(z0)||_*, needed only if grad f(x*) is not 0
    """

    R: float | None = None
    mu: float = 1.0
    L: float | None = None
    G: float | None = None
    rho: float = 1.0
    sigma: float = 0.0
    g0: float | None = None

    def need(self, name: str) -> float:
        """Return the constant of this name. Raise ValueError unless it is positive and finite."""
        c = getattr(self, name)
        if c is None or not 0 < c < math.inf:
            meaning = NAMES.get(name, "h(x*) - inf h (1/2 ||x* - z0||^2 for the Euclidean h)")
            raise ValueError(
                f"this rate needs {name} > 0, {meaning}, got {c}. Set Constants({name}=...)."
            )
        return float(c)

    @property
    def startup(self) -> float:
        """The square of the first gradient's norm: g0^2 if g0 is set, else its bound 2 L^2 R/mu."""
        if self.g0 is not None:
            return self.g0**2
        return 2 * self.need("L") ** 2 * self.need("R") / self.mu


def constants(f: Problem, geometry: Geometry, *names: str) -> Constants:
    """Return the constants of f in the norm of the geometry.

    names: the constants that the rate needs in addition to R, "L" or "G"

    Unbiased noise with E ||noise||_*^2 <= v^2 has (rho, sigma^2) = (3, 6 v^2). In a Hilbert space
    it has (2, 3 v^2), because there the newest noise is orthogonal to all earlier noise.
    """
    h = regulariser(geometry)
    R = float(h.gap((f.x_star - f.z0)[None]))
    if math.isinf(R):
        raise ValueError(
            f"the minimiser of {f.name} is outside the ball of {name(geometry)}. "
            "Use a larger radius."
        )
    known = {c: f.constant(c, h.space) for c in names}
    g0 = None if f.interior else float(h.space.dual(f.grad(f.z0[None])))
    rho, sigma = 1.0, 0.0
    if f.stochastic and "L" in names:
        v = f.constant("v", h.space)
        rho, sigma = (2.0, math.sqrt(3) * v) if h.space.hilbert else (3.0, math.sqrt(6) * v)
    return Constants(R=R, mu=h.mu, rho=rho, sigma=sigma, g0=g0, **known)


def bounded_gradients(eta: float, n: int, c: Constants, a: Weights = equal_weights) -> float:
    """Return R/(eta A) + 2 eta G^2/mu sum a_k^2/A with A = A_{n-1}.

    It follows from ||g^k - g^{k-1}||_* <= 2 G.
    """
    A, A2 = sums(n, a)
    return c.need("R") / (eta * A) + 2 * eta * c.need("G") ** 2 / c.mu * A2 / A


def smooth(eta: float, n: int, c: Constants, a: Weights = equal_weights) -> float:
    """Return R/(eta A) + eta sigma^2/(2 mu) sum a_k^2/A + eta rho/(2 mu A) a_0^2 startup."""
    A, A2 = sums(n, a)
    noise = eta * c.sigma**2 / (2 * c.mu) * A2 / A
    start = eta * c.rho / (2 * c.mu * A) * float(a(0)) ** 2 * c.startup
    return c.need("R") / (eta * A) + noise + start


def sums(n: int, a: Weights) -> tuple[float, float]:
    """Return A_{n-1} = sum a_k and sum a_k^2 over k < n."""
    values = [float(a(k)) for k in range(n)]
    return math.fsum(values), math.fsum(v * v for v in values)
