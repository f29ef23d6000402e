"""The paper's convex theory as code: problems, regularisers, bounds, rates and their checks.

    from sodaopt import SODA
    from sodaopt.theory import Constants, rates

    rule = rates.smooth(1000, Constants(R=0.5, L=4.0))
    optimizer = SODA(params, lr=rule.eta, method=rule.method)
    # after rule.n - 1 steps: f(x) - f* <= rule.bound

`sodaopt theory` runs every check and shows that the bounds hold.
"""

from . import bounds, checks, models, problems, rates, runs
from .bounds import Constants, constants
from .problems import Problem, measured_noise
from .rates import Rule
from .regularisers import FixedMetric, PNorm, Smoothed, clip, regulariser

__all__ = [
    "Constants", "FixedMetric", "PNorm", "Problem", "Rule", "Smoothed", "bounds", "checks", "clip",
    "constants", "measured_noise", "models", "problems", "rates", "regulariser", "runs",
]  # fmt: skip
