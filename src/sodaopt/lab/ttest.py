"""The paired t-test, without scipy: a p value is one incomplete beta function."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev


def t_test(gaps: Sequence[float]) -> float | None:
    """The p value of a mean of zero, from both sides."""
    if len(gaps) < 2:
        return None
    mean, spread = fmean(gaps), stdev(gaps)
    if spread == 0:  # as exact as it gets
        return 0.0 if mean else 1.0
    t, df = mean / (spread / math.sqrt(len(gaps))), len(gaps) - 1
    return incomplete_beta(df / 2, 0.5, df / (df + t * t))


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function I_x(a, b), to about 1e-14."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast on the other side only
        return 1 - incomplete_beta(b, a, 1 - x)
    log = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    return math.exp(log + a * math.log(x) + b * math.log1p(-x)) / (a * _fraction(a, b, x))


def _fraction(a: float, b: float, x: float) -> float:
    """The continued fraction 1 + d1/(1 + d2/(1 + ...)), from the inside out."""
    value = 1.0
    for m in range(200, 0, -1):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m - 1) * (a + b + m - 1) * x / ((a + 2 * m - 2) * (a + 2 * m - 1))
        value = 1 + odd / (1 + even / value)
    return value
