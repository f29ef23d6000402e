"""Rows of the zoo that average: the paper's own method, and averages of other rows."""

from dataclasses import replace

from sodaopt import schedules
from sodaopt._errors import count, number
from sodaopt.core.method import Method, check_plain, row
from sodaopt.geometry.maps import Geometry
from sodaopt.schedules import over, times, uniform
from sodaopt.zoo.coefficients import falling
from sodaopt.zoo.rows import GD, muon, sgd


@row
def dual_averaging(geometry: Geometry = GD) -> Method:
    """z = z0 + u(lr (k+1) m), m the mean of the gradients at z, x the mean of z. (Nesterov 2009)

    >>> opt = SODA(model.parameters(), lr=0.1, method=zoo.dual_averaging())
    """
    return replace(double_averaging(geometry), lam_bar=1.0)


@row
def double_averaging(geometry: Geometry = GD) -> Method:
    """dual_averaging with gradients at x, the mean of the z. (Nesterov, Shikhman 2015)

    >>> opt = SODA(model.parameters(), lr=0.1, method=zoo.double_averaging())
    """
    gamma = over(schedules.lr, schedules.mean)
    return Method(geometry, schedules.mean, 0.0, uniform, 0.0, gamma, "init")


@row
def oda(geometry: Geometry = GD) -> Method:
    """moda with gradients at z: optimistic dual averaging. (Rakhlin, Sridharan 2013)

    >>> opt = SODA(model.parameters(), lr=0.1, method=zoo.oda())
    """
    return replace(moda(geometry), lam_bar=1.0)


@row
def moda(geometry: Geometry = GD) -> Method:
    """z = z0 + u(lr A_{k+1} m_bar), x <- (1 - a_{k+1}/A_{k+1}) x + a_{k+1}/A_{k+1} z. (the paper)

    m <- (1 - a_k/A_k) m + (a_k/A_k) g, and m_bar likewise with k+1 for k. Here a_k = 1, A_k = k+1:
    alpha = 1/(k+1), alpha_bar = lam = 1/(k+2), gamma = lr (k+2).

    >>> opt = SODA(model.parameters(), lr=0.1, method=zoo.moda())
    """
    gamma = over(schedules.lr, uniform)
    return Method(geometry, schedules.mean, uniform, uniform, 0.0, gamma, "init")


@row
def accelerated(geometry: Geometry = GD) -> Method:
    """moda with weights a_k = k+1: the paper's accelerated rate.

    alpha = 2/(k+2), alpha_bar = lam = 2/(k+3), gamma = lr (k+2)(k+3)/2.

    >>> opt = SODA(model.parameters(), lr=0.1, method=zoo.accelerated())
    """
    lam = schedules.accelerated
    gamma = over(schedules.lr, times(uniform, lam))  # lr A_{k+1}, as lam = a_{k+1}/A_{k+1}
    return Method(geometry, times(2, uniform), lam, lam, 0.0, gamma, "init")


@row
def schedule_free(
    base: Method | None = None, beta: float = 0.9, r: float = 0.0, weight_lr_power: float = 2.0
) -> Method:
    """z <- z + u, x <- (1 - c) x + c z, y = beta x + (1-beta) z. (Defazio et al. 2024)

    u is the step of base (or sgd). c = w_k/(w_0+...+w_k), w_k = (k+1)^r (largest lr so
    far)^weight_lr_power. If lr never rises and r = 0, c = 1/(k+1). k counts the steps of the group.

    beta: the weight of x in y, in [0, 1].

    >>> opt = SODA(model.parameters(), lr=1e-3, method=zoo.schedule_free(zoo.adam()))
    """
    lam, lam_bar = schedules.lr_weighted(r, weight_lr_power), 1 - number("beta", beta, 1)
    return replace(check_plain(base or sgd(), "schedule_free"), lam=lam, lam_bar=lam_bar)


@row
def amuse(
    base: Method | None = None,
    warmup: int = 100,
    beta: float = 0.9,
    rho: float = 1.0,
    r: float = 0.0,
    weight_lr_power: float = 2.0,
) -> Method:
    """schedule_free around base (or muon), with gradients ever closer to the average x.

    beta_t is the weight of x in the y of gradient t: beta if t < warmup, and from then on
    1 - beta_t = (1 - beta) ((warmup-1)/(t-1))^rho. (AMUSE, Kim et al. 2026)

    warmup: steps with a constant beta, at least 2.
    beta: beta of the first steps, in [0, 1].
    rho: how fast 1 - beta_t falls, at least 0.

    >>> opt = SODA(hidden(model), lr=1e-3, method=zoo.amuse(warmup=10))
    """
    lam_bar = falling(1 - number("beta", beta, 1), count("warmup", warmup, 2) - 1, rho)
    return replace(schedule_free(base or muon(), beta, r, weight_lr_power), lam_bar=lam_bar)


@row
def gpa(base: Method | None = None, lam: float = 0.003287, lam_bar: float = 0.1) -> Method:
    """z <- z + u, x <- (1 - lam) x + lam z, y = (1 - lam_bar) x + lam_bar z. (Defazio et al. 2025)

    Generalized primal averaging. u is the step of base (or sgd), which may not decay.

    lam: the weight of z in x, in [0, 1].
    lam_bar: the weight of z in y, in [0, 1].

    >>> opt = SODA(model.parameters(), lr=1e-3, method=zoo.gpa(zoo.adam()))
    """
    return replace(check_plain(base or sgd(), "gpa"), lam=lam, lam_bar=lam_bar)
