"""Coefficients that depend on the history of the run, and so have a memory.

`start` names the numbers that a coefficient remembers, and `advance` updates them once a step. The
optimizer keeps them in its state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sodaopt.schedules.coefficients import (
    NO_PAST,
    Coef,
    Number,
    Past,
    Schedule,
    maximum,
    times,
    uniform,
)


@dataclass(frozen=True)
class lr_weighted(Schedule):
    """w_k / (w_0 + ... + w_k), w = (k+1)^r (largest lr so far)^power: Schedule-Free's averaging.

    For a constant or falling lr and r = 0 this is exactly 1/(k+1).

    r: the power of k+1, at least 0. Later points count more.
    power: the power of the learning rate. Points of a warmup count less.

    >>> zoo.schedule_free().lam == schedules.lr_weighted()
    True
    """

    by_group: ClassVar[bool] = True
    """k and the memory are the group's, as in the authors' code."""

    r: float = 0.0
    power: float = 2.0

    def start(self) -> dict[str, float]:
        return {"lr_max": 0.0, "weight_sum": 0.0}

    def _weight(self, k: Number, lr_max: Number) -> Number:
        return (k + 1) ** self.r * lr_max**self.power

    def advance(self, past: Past, k: Number, lr: Number) -> dict[str, Number]:
        lr_max = maximum(past["lr_max"], lr)
        return {"lr_max": lr_max, "weight_sum": past["weight_sum"] + self._weight(k, lr_max)}

    def __call__(self, k: Number, lr: Number, past: Past = NO_PAST) -> Number:
        # A warmup that starts at lr = 0 has no weight yet. The average is then 0, not 0/0.
        total = past["weight_sum"]
        return self._weight(k, past["lr_max"]) / (total + (total == 0))


@dataclass(frozen=True)
class _RelativeLr(Schedule):
    """lr_k / (largest lr so far), and 0 before the first lr > 0."""

    def start(self) -> dict[str, float]:
        return {"lr_max": 0.0}

    def advance(self, past: Past, k: Number, lr: Number) -> dict[str, Number]:
        return {"lr_max": maximum(past["lr_max"], lr)}

    def __call__(self, k: Number, lr: Number, past: Past = NO_PAST) -> Number:
        lr_max = past["lr_max"]
        return lr / (lr_max + (lr_max == 0))


def coupled(c: Coef = uniform) -> Schedule:
    """c_k lr_k / (largest lr so far): the pull falls with the learning rate, to 0 if lr does.

    c: the strength while lr is the largest so far. The default is 1/(k+2).

    While lr is constant or rises, this is c_k. Before the first lr > 0 it is 0.

    >>> adamw = torch.optim.AdamW(model.parameters(), weight_decay=0)
    >>> opt = SODAWrapper(adamw, only=hidden(model), decay=schedules.coupled())
    """
    return times(c, _RelativeLr())


@dataclass(frozen=True)
class _NadamMomentum(Schedule):
    """mu_t = b (1 - 0.96^(t psi)/2) with t = k+1, and P_t = mu_1 ... mu_t."""

    b: float
    psi: float

    def mu(self, t: Number) -> Number:
        return self.b * (1 - 0.5 * 0.96 ** (t * self.psi))

    def start(self) -> dict[str, float]:
        return {"mu_product": 1.0}

    def advance(self, past: Past, k: Number, lr: Number) -> dict[str, Number]:
        return {"mu_product": past["mu_product"] * self.mu(k + 1)}

    def weights_of_g_and_m(self, k: Number, past: Past) -> tuple[Number, Number]:
        """Return c_g and c_m of the step c_g g + c_m m."""
        P, mu, mu_next = past["mu_product"], self.mu(k + 1), self.mu(k + 2)
        return (1 - mu) / (1 - P), mu_next / (1 - P * mu_next)


class nadam_alpha_bar(_NadamMomentum):
    """c_g / (c_g + c_m), torch's NAdam.

    mu_t = b (1 - 0.96^(t psi)/2), P_t = mu_1...mu_t, t = k+1, c_g = (1-mu_t)/(1-P_t), and
    c_m = mu_{t+1}/(1-P_{t+1}).

    b: beta1, in [0, 1).
    psi: momentum_decay, at least 0.

    >>> zoo.torch_nadam().alpha_bar == schedules.nadam_alpha_bar(0.9, 0.004)
    True
    """

    def __call__(self, k: Number, lr: Number, past: Past = NO_PAST) -> Number:
        c_g, c_m = self.weights_of_g_and_m(k, past)
        return c_g / (c_g + c_m)


class nadam_gamma(_NadamMomentum):
    """lr (c_g + c_m), torch's NAdam, with c_g and c_m of `nadam_alpha_bar`.

    b, psi: as there.

    >>> zoo.torch_nadam().gamma == schedules.nadam_gamma(0.9, 0.004)
    True
    """

    def __call__(self, k: Number, lr: Number, past: Past = NO_PAST) -> Number:
        c_g, c_m = self.weights_of_g_and_m(k, past)
        return lr * (c_g + c_m)
