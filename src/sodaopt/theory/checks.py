"""Each result as a check: a measured number, its limit, and whether the limit holds.

E1, E2 and E3 are equalities, so a wrong coefficient violates them. The inequalities also hold for
many wrong methods.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from . import bounds
from .problems import Problem
from .regularisers import Regulariser
from .runs import Trace
from .spaces import Space, dot

EXACT = 1e-12  # relative to the magnitudes that are added up
ROUNDING = 1e-9  # an inequality may be an equality in exact arithmetic
CONFIDENCE = 0.99


@dataclass(frozen=True)
class Check:
    """A check holds if measured <= limit. A NaN does not hold."""

    name: str
    measured: float
    limit: float

    @property
    def holds(self) -> bool:
        return self.measured <= self.limit

    @property
    def ratio(self) -> float:
        return self.measured / self.limit


def _error(name: str, got: Tensor, want: Tensor, scale: Tensor) -> Check:
    """Check got = want up to rounding.

    scale: the magnitudes that were added up. The error is relative to them.
    """
    error = (got - want).abs() / scale.clamp(min=1e-300)
    return Check(name, float(error.max()) if error.numel() else 0.0, EXACT)


def e1(t: Trace) -> Check:
    """Check gamma_k m_bar^{k+1} = eta (sum_{i<=k} a_i g^i + a_{k+1} g^k)."""
    a, g = t.a[:, None, None, None], t.g[:-1]
    now, ahead = a[: t.n - 1] * g, a[1 : t.n] * g
    want = t.eta * (now.cumsum(0) + ahead)
    scale = t.eta * (now.abs().cumsum(0) + ahead.abs()).amax((-2, -1), keepdim=True)
    return _error("E1", t.dual, want, scale)


def e2(t: Trace) -> Check:
    """Check x^k = (1/A_k) sum_{i<=k} a_i z^i."""
    a, A = (s[: t.n, None, None, None] for s in (t.a, t.A))
    scale = ((a * t.z.abs()).cumsum(0) / A).amax((-2, -1), keepdim=True)
    return _error("E2", t.x, (a * t.z).cumsum(0) / A, scale)


def e3(t: Trace, x: Tensor) -> Check:
    """Check every term of the regret. It needs the Euclidean h and holds for any x.

    sum a_k <g^k, z^k - x> = ||x-z0||^2/(2 eta) + (eta/2) sum a_k^2 ||g^k - g^{k-1}||^2
                             - (eta/2) sum a_k^2 ||g^{k-1}||^2
                             - ||x - z0 + eta sum a_k g^k||^2/(2 eta)
    """

    def square(u: Tensor) -> Tensor:
        return dot(u, u)

    z0 = t.z[0]
    before = torch.cat([torch.zeros_like(t.g[:1]), t.g[:-1]])
    last = x - z0 + t.eta * (t.w[..., None, None] * t.g).sum(0)
    parts = [
        square(x - z0) / (2 * t.eta),
        t.eta / 2 * (t.w**2 * square(t.variation())).sum(0),
        -t.eta / 2 * (t.w**2 * square(before)).sum(0),
        -square(last) / (2 * t.eta),
    ]
    losses = (t.w * (t.g * (t.z - x)).abs().sum((-2, -1))).sum(0)
    scale = losses + torch.stack(parts).abs().sum(0)
    return _error("E3", bounds.regret(t, x), torch.stack(parts).sum(0), scale)


def regret(t: Trace, h: Regulariser, x: Tensor) -> Check:
    """Check the ODA regret bound: the largest ratio of regret to bound among the replicas."""
    rhs = bounds.regret_bound(t, h, x, t.z[0, 0])
    share = torch.where(rhs == 0, 0.0, bounds.regret(t, x) / rhs)
    return Check("ODA regret", float(share.max()), 1 + ROUNDING)


def online_to_batch(t: Trace, f: Problem) -> Check:
    """Check f(x^{n-1}) - f* <= regret/A_{n-1} on every replica."""
    return _below("online-to-batch", f.gap(t.x[-1]), bounds.online_to_batch(t, f))


def online_to_batch_smooth(t: Trace, f: Problem, space: Space) -> Check:
    """Check the smaller bound of a smooth f on every replica."""
    rhs = bounds.online_to_batch_smooth(t, f, space)
    return _below("online-to-batch, smooth", f.gap(t.x[-1]), rhs)


def _below(name: str, lhs: Tensor, rhs: Tensor) -> Check:
    """Check lhs <= rhs on the replica with the largest difference."""
    worst = int((lhs - rhs).argmax())
    left, right = float(lhs[worst]), float(rhs[worst])
    return Check(name, left, right + ROUNDING * (abs(left) + abs(right)))


def counting(t: Trace, c: bounds.Constants) -> Check:
    """Check that eta is the one for n gradients, one more than the number of steps.

    Only this eta minimises the bound R/(eta n) + 2 eta G^2/mu. The minimum is
    2 sqrt(2) G sqrt(R)/sqrt(mu n).
    """
    least = 2 * math.sqrt(2) * c.need("G") * math.sqrt(c.need("R") / (c.mu * t.n))
    return Check("counting", abs(bounds.bounded_gradients(t.eta, t.n, c) / least - 1), EXACT)


# -- in the mean ----------------------------------------------------------------------------------


def upper(sample: Tensor, confidence: float = CONFIDENCE) -> float:
    """Return the upper end of Student's one-sided confidence interval for the mean.

    A single number is returned unchanged.
    """
    S = len(sample)
    if S == 1:
        return float(sample[0])
    return float(sample.mean() + quantile(confidence, S - 1) * sample.std() / math.sqrt(S))


def quantile(confidence: float, freedom: int) -> float:
    """Return a quantile of Student's t by the Cornish-Fisher expansion.

    The error is below 0.02 for 5 or more degrees of freedom.
    """
    z = NormalDist().inv_cdf(confidence)
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return t + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)


def corollary(gap: Tensor, bound: float) -> Check:
    """Check E f(x^{n-1}) - f* <= bound with 99% confidence, from independent replicas."""
    return Check("corollary", upper(gap), bound * (1 + ROUNDING))


def gradient_variation(t: Trace, f: Problem, c: bounds.Constants, space: Space) -> Check:
    """Check the noise constants rho and sigma in the mean over replicas and k.

    E ||g^k - g^{k-1}||_*^2 - rho ||grad f(y^k) - grad f(y^{k-1})||_*^2 <= sigma^2.
    """
    seen, exact = (space.dual(s.variation()[1:]) ** 2 for s in (t, bounds.expected(t, f)))
    return Check("gradient variation", upper((seen - c.rho * exact).mean(0)), c.sigma**2)


# -- rates ----------------------------------------------------------------------------------------


def slope(ns: Sequence[float], values: Sequence[float]) -> float:
    """Return the least-squares slope of log value against log n."""
    x = torch.tensor([math.log(n) for n in ns], dtype=torch.float64)
    y = torch.tensor([math.log(v) if v > 0 else -torch.inf for v in values], dtype=torch.float64)
    x = x - x.mean()
    return float((x * y).sum() / (x * x).sum())
