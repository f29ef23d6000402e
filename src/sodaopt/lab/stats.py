"""Statistics of losses: one fit of loss = variant + seed for all comparisons of a table.

The same seed gives the same initial weights and the same batches, so a seed moves the losses of all
variants together. The residuals of all variants are pooled: with v variants and s seeds, an
interval has (v-1)(s-1) degrees of freedom instead of s-1. A variant may lack some seeds.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

LEVEL = 0.95
POWER = 0.8
MODEL = "loss = variant + seed"
STARS = ((0.001, "***"), (0.01, "**"), (0.05, "*"))
Cells = Mapping[tuple[Any, Any], float]
"""Losses by variant and seed."""


@dataclass(frozen=True)
class Difference:
    """The loss of a variant minus the loss of another variant.

    low, high: the ends of the 95 % interval. None without degrees of freedom.
    p: the p value of a two-sided t-test. None without degrees of freedom.
    """

    mean: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    freedom: int = 0

    @property
    def clear(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


@dataclass(frozen=True)
class Fit:
    """A least-squares fit of loss = variant + seed.

    effects: the loss of each variant at the average seed
    weights: row j has the weights of all losses in the effect of variant j
    sd: the standard deviation of the residuals, or None without degrees of freedom
    freedom: the degrees of freedom of the residuals
    """

    variants: list[Hashable]
    effects: np.ndarray
    weights: np.ndarray
    by_seed: np.ndarray
    """Indicators of the seeds, one row for each loss."""
    by_variant: np.ndarray
    """Indicators of the variants, one row for each loss."""
    sd: float | None
    freedom: int

    def effect(self, variant: Hashable) -> float:
        return float(self.effects[self.variants.index(variant)])

    def shared(self, one: Hashable, other: Hashable) -> int:
        """Return the number of seeds that both variants have."""
        both = [
            self.by_variant[:, v] @ self.by_seed for v in map(self.variants.index, (one, other))
        ]
        return int((both[0] * both[1]).sum())

    def difference(self, one: Hashable, other: Hashable) -> Difference | None:
        """Return the loss of `one` minus the loss of `other`, or None if no seeds connect them."""
        if one not in self.variants or other not in self.variants:
            return None
        a, b = self.variants.index(one), self.variants.index(other)
        weights = self.weights[a] - self.weights[b]
        if np.abs(weights @ self.by_seed).max() > 1e-9:  # the gap would contain a seed effect
            return None
        gap = float(self.effects[a] - self.effects[b])
        if self.sd is None:
            return Difference(gap)
        return interval(gap, self.sd * float(np.sqrt(weights @ weights)), self.freedom)


def fit(losses: Cells) -> Fit:
    """Fit loss = variant + seed to a table of losses. Not every variant needs every seed."""
    variants = list(dict.fromkeys(v for v, _ in losses))
    seeds = list(dict.fromkeys(s for _, s in losses))
    y = np.array(list(losses.values()), dtype=float)
    by_variant = np.array([[v == name for name in variants] for v, _ in losses], dtype=float)
    by_seed = np.array([[s == name for name in seeds] for _, s in losses], dtype=float)
    means = by_variant.T / by_variant.sum(0)[:, None]
    within = by_seed - by_variant @ (means @ by_seed)  # seeds, relative to their variant's mean
    # The pseudoinverse gives the smallest seed effects that fit. In each connected part of the
    # table they sum to zero.
    seed_weights = np.linalg.pinv(within)
    weights = means - means @ by_seed @ seed_weights
    effects = weights @ y
    rest = y - by_variant @ effects - by_seed @ (seed_weights @ y)
    freedom = len(y) - len(variants) - int(np.linalg.matrix_rank(within))
    sd = math.sqrt(float(rest @ rest) / freedom) if freedom > 0 else None
    return Fit(list(variants), effects, weights, by_seed, by_variant, sd, freedom)


def interval(gap: float, error: float, freedom: int) -> Difference:
    """Return a difference with its interval and the p value of a two-sided t-test.

    error: the standard error of the difference
    """
    from scipy.stats import t  # slow to import

    if error < 1e-12:  # no residuals, up to rounding
        return Difference(gap, gap, gap, 1.0 if abs(gap) < 1e-12 else 0.0, freedom)
    half = float(t.ppf((1 + LEVEL) / 2, freedom)) * error
    p = 2 * float(t.sf(abs(gap) / error, freedom))
    return Difference(gap, gap - half, gap + half, p, freedom)


def paired(gaps: Sequence[float]) -> Difference | None:
    """Return the mean of the differences of two variants, given for each seed, or None."""
    if not gaps:
        return None
    cells = {(v, s): gap * v for s, gap in enumerate(gaps) for v in (0, 1)}
    return fit(cells).difference(1, 0)


def holm(ps: Sequence[float]) -> list[float]:
    """Return the p values after Holm's correction for their number."""
    order = sorted(range(len(ps)), key=ps.__getitem__)
    found, least = [0.0] * len(ps), 0.0
    for place, j in enumerate(order):
        least = max(least, min(1.0, (len(ps) - place) * ps[j]))
        found[j] = least
    return found


def stars(p: float | None) -> str:
    """Return up to three stars for a corrected p value of a primary comparison."""
    return next((s for level, s in STARS if p is not None and p < level), "")


def detectable(sd: float, seeds: int, freedom: int) -> float:
    """Return the difference that a test of two variants finds with a probability of POWER.

    sd: the standard deviation of the residuals
    seeds: number of seeds of each of the two variants
    freedom: the degrees of freedom of the residuals
    """
    from scipy.optimize import brentq
    from scipy.stats import nct, t

    limit = float(t.ppf((1 + LEVEL) / 2, freedom))
    surplus: Any = lambda shift: float(nct.sf(limit, freedom, shift)) - POWER  # noqa: E731
    return float(brentq(surplus, 0.0, 10 * limit + 10)) * sd * math.sqrt(2 / seeds)
