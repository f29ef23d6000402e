"""Every optimizer of the paper as one expression. A new optimizer is a function with `@row`.

In the formulas g is the gradient at y, t = k+1, EMA_b is the average with rate 1-b, and u points
downhill, as in the paper. Arguments have the names and the defaults of the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import ParamSpec, TypeAlias

from sodaopt import schedules
from sodaopt._errors import number
from sodaopt.core.method import FORMS, ROWS, Method
from sodaopt.geometry.maps import Ball, Diagonal, Geometry, Kronecker, MultiNorm, Sharp
from sodaopt.geometry.norms import Euclidean, Norm, Sign, Spectral
from sodaopt.geometry.polar import EXACT, KELLER, Polar
from sodaopt.geometry.scales import Scale, original, unit
from sodaopt.schedules import Coef, debias, first, times, uniform

P = ParamSpec("P")
Betas: TypeAlias = tuple[float, float]

EUCLIDEAN, SPECTRAL = Euclidean(), Spectral()
GD = Sharp(EUCLIDEAN)  # gradient descent


def row(f: Callable[P, Method]) -> Callable[P, Method]:
    """Register a function that returns a method as a row of the zoo, under its own name."""

    @wraps(f)
    def named(*args: P.args, **kwargs: P.kwargs) -> Method:
        return replace(f(*args, **kwargs), name=f.__name__)

    ROWS[f.__name__] = named
    return named


def soda(method: Method, decay: Coef = uniform) -> Method:
    """Return the anchored form of a method, with u the method's own step:

        y <- (1 - 1/(k+2)) y + 1/(k+2) z0 + u          (paper, Algorithm 1)

    SODAWrapper around the method does the same if no gradient is missing: a row counts the steps k
    of each parameter, and the wrapper those of a group.

    decay: strength of the pull in place of 1/(k+2), such as schedules.coupled(uniform),
    schedules.fade(uniform, 900, 1000) or schedules.after(uniform, 100).
    """
    name = f"soda({_check_plain(method, 'soda').name})"
    return replace(method, lam=decay, centre="init", full_step=True, name=name)


FORMS["soda"] = soda


def decayed(method: Method, weight_decay: float) -> Method:
    """Add decoupled weight decay to a method: y <- (1 - lr wd) y + u."""
    if number("weight_decay", weight_decay) == 0:
        return method
    lam = times(weight_decay, schedules.lr)
    return replace(_check_plain(method, "decayed"), lam=lam, centre="origin", full_step=True)


WAYS_OUT = {  # by the centre of a method that is not plain
    "origin": "Pass weight_decay=0, or use uscion for scion.",
    "init": "It is anchored already: use it as it is.",
    "last": "It averages: pass the method inside it.",
}


def _check_plain(method: Method, who: str) -> Method:
    """Return the method if its step is y <- y + u, else raise: `who` adds its own centre or x."""
    if not isinstance(method, Method):
        raise TypeError(f"{who} takes a Method such as zoo.adam(), got {method!r}")
    if (method.centre, method.lam, method.lam_bar) != ("last", 1, 0):
        raise ValueError(
            f"{who} takes a method without decay or averaging of its own, and {method.name} has "
            f"centre {method.centre!r}. {WAYS_OUT[method.centre]}"
        )
    return method


def _beta(name: str, b: float) -> float:
    if not 0 <= b < 1:
        raise ValueError(f"{name} must be in [0, 1), got {b}")
    return b


# -- Euclidean ------------------------------------------------------------------------------------


@row
def sgd(momentum: float = 0.0) -> Method:
    """b <- momentum b + g, y <- y - lr b. (torch.optim.SGD)"""
    alpha = 1 - _beta("momentum", momentum)
    return Method(Sharp(Euclidean()), alpha=alpha, gamma=times(1 / alpha, schedules.lr))


@row
def nesterov(momentum: float = 0.9) -> Method:
    """b <- momentum b + g, y <- y - lr (g + momentum b). (torch.optim.SGD with nesterov=True)"""
    return replace(sgd(momentum), alpha_bar=1 - momentum)


# -- diagonal metric ------------------------------------------------------------------------------


@row
def adam(betas: Betas = (0.9, 0.999), eps: float = 1e-8) -> Method:
    """y <- y - lr m/(sqrt(v)+eps), m = EMA_b1(g)/(1-b1^t), v = EMA_b2(g^2)/(1-b2^t).

    The bias correction is in the rates of the averages, (1-b)/(1-b^t). (Kingma, Ba 2014)
    """
    return Method(Diagonal(debias(betas[1]), eps), alpha=debias(betas[0]))


@row
def adamw(betas: Betas = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.01) -> Method:
    """y <- (1 - lr wd) y - lr m/(sqrt(v)+eps), m and v as in adam. (Loshchilov, Hutter 2017)"""
    return decayed(adam(betas, eps), weight_decay)


@row
def nadam(betas: Betas = (0.9, 0.95), eps: float = 1e-8, weight_decay: float = 0.0) -> Method:
    """y <- y - lr (b1 m + (1-b1) g)/(sqrt(v)+eps), m = EMA_b1(g), v = EMA_b2(g^2), uncorrected.

    This is the paper's NAdam, with constant optimism. (Dozat 2016)
    """
    a, rate = 1 - _beta("betas[0]", betas[0]), 1 - _beta("betas[1]", betas[1])
    return decayed(Method(Diagonal(rate, eps), alpha=a, alpha_bar=a), weight_decay)


@row
def torch_nadam(
    betas: Betas = (0.9, 0.999),
    eps: float = 1e-8,
    momentum_decay: float = 0.004,
    weight_decay: float = 0.0,
) -> Method:
    """y <- y - lr (c_g g + c_m m)/(sqrt(v)+eps), m = EMA_b1(g), v = EMA_b2(g^2)/(1-b2^t),

    mu_t = b1 (1 - 0.96^(t psi)/2), P_t = mu_1...mu_t, c_g = (1-mu_t)/(1-P_t),
    c_m = mu_{t+1}/(1-P_{t+1}), psi = momentum_decay. Decay is decoupled. (torch.optim.NAdam)
    """
    b1, psi = _beta("betas[0]", betas[0]), momentum_decay
    method = Method(
        Diagonal(debias(betas[1]), eps),
        alpha=1 - b1,
        alpha_bar=schedules.nadam_alpha_bar(b1, psi),
        gamma=schedules.nadam_gamma(b1, psi),
    )
    return decayed(method, weight_decay)


@row
def simplified_ademamix(
    betas: Betas = (0.99, 0.95), alpha: float = 0.0, eps: float = 1e-8, beta1_warmup: int = 0
) -> Method:
    """M <- b1 M + g, y <- y - lr (M + alpha g)/(sqrt(v)+eps), v = EMA_b2(g^2)/(1-b2^t).

    With beta1_warmup, b1 rises from 0.9, its half-life linearly. (Morwani et al. 2025)
    """
    number("alpha", alpha)
    if beta1_warmup and not betas[0] > 0:
        raise ValueError(f"a warmup needs betas[0] > 0, got {betas[0]}")
    heavy = (_beta("betas[0]", betas[0]), alpha, beta1_warmup)
    return Method(
        Diagonal(debias(betas[1]), eps),
        alpha=schedules.heavy_alpha(*heavy),
        alpha_bar=schedules.heavy_alpha_bar(*heavy),
        gamma=schedules.heavy_gamma(*heavy),
    )


# -- l_inf ----------------------------------------------------------------------------------------


@row
def signsgd(map: Callable[[Norm], Geometry] = Ball) -> Method:
    """y <- y - lr sign(g), or with map=Sharp y <- y - lr ||g||_1 sign(g). (Carlson et al. 2015)"""
    return Method(map(Sign(unit)))


@row
def signum(beta: float = 0.9, weight_decay: float = 0.0) -> Method:
    """y <- (1 - lr wd) y - lr sign(m), m = EMA_beta(g). (Bernstein et al. 2018)"""
    return decayed(Method(Ball(Sign(unit)), alpha=1 - _beta("beta", beta)), weight_decay)


@row
def lion(betas: Betas = (0.9, 0.99), weight_decay: float = 0.0) -> Method:
    """y <- (1 - lr wd) y - lr sign(b1 m + (1-b1) g), then m <- b2 m + (1-b2) g.

    m moves first here: b1 m_old + (1-b1) g = (b1/b2) m_new + (1 - b1/b2) g. (Chen et al. 2023)
    """
    b1, b2 = _beta("betas[0]", betas[0]), _beta("betas[1]", betas[1])
    if not b1 <= b2:
        raise ValueError(f"lion is optimistic only for betas[0] <= betas[1], got {betas}")
    optimism = 1 - b1 / b2 if b2 else 0.0
    return decayed(Method(Ball(Sign(unit)), alpha=1 - b2, alpha_bar=optimism), weight_decay)


# -- spectral -------------------------------------------------------------------------------------


@row
def ssd(map: Callable[[Norm], Geometry] = Sharp, polar: Polar = EXACT) -> Method:
    """y <- y - lr ||g||_nuc U V^T with g = U S V^T, or with map=Ball y <- y - lr U V^T.

    Stochastic spectral descent. (Carlson et al. 2015, 2016)
    """
    return Method(map(Spectral(unit, polar=polar)))


@row
def muon(
    momentum: float = 0.95,
    weight_decay: float = 0.0,
    scale: Scale = original,
    polar: Polar = KELLER,
) -> Method:
    """y <- (1 - lr wd) y - lr s U V^T with U S V^T = b m + (1-b) g, m = EMA_b(g), b = momentum.

    scale: s, one of geometry.original, adamw (torch has both), rms (paper). (Jordan et al. 2024)
    """
    a = 1 - _beta("momentum", momentum)
    return decayed(Method(Ball(Spectral(scale, polar=polar)), alpha=a, alpha_bar=a), weight_decay)


@row
def shampoo(eps: float = 1e-12, weight_decay: float = 0.0) -> Method:
    """L <- L + g g^T, R <- R + g^T g, y <- y - lr L^(-1/4) g R^(-1/4). (Gupta et al. 2018)"""
    return decayed(Method(Kronecker(eps)), weight_decay)


@row
def multinorm(iterations: int = 5) -> Method:
    """y <- y - lr X, X = g with rows and columns normalised in turn. (Scetbon et al. 2025)"""
    return Method(MultiNorm(iterations))


# -- per-layer norms ------------------------------------------------------------------------------


@row
def scion(norm: Norm = SPECTRAL, radius: float = 50.0, alpha: float = 0.1) -> Method:
    """y <- (1 - lr) y + lr rho lmo(m), m <- (1-alpha) m + alpha g. (Pethick et al. 2025)"""
    return frank_wolfe(norm, radius, alpha)


@row
def uscion(norm: Norm = SPECTRAL, radius: float = 50.0, alpha: float = 0.1) -> Method:
    """y <- y + lr rho lmo(m), m <- (1-alpha) m + alpha g. Scion without its constraint."""
    return Method(Ball(norm, radius), alpha=alpha)


@row
def soda_dagger(
    norm: Norm = SPECTRAL, radius: float = 50.0, alpha: float = 0.05, decay: Coef = uniform
) -> Method:
    """y <- (1 - 1/(k+2)) y + 1/(k+2) z0 + lr rho lmo(m_bar), m_bar = (1-alpha) m + alpha g,

    m <- (1-alpha) m + alpha g, which starts at the first gradient. The paper's own optimizer.
    """
    return soda(replace(uscion(norm, radius), alpha=first(alpha), alpha_bar=alpha), decay)


@row
def frank_wolfe(norm: Norm = EUCLIDEAN, radius: float = 1.0, alpha: float = 1.0) -> Method:
    """y <- (1 - lr) y + lr rho lmo(m), m <- (1-alpha) m + alpha g. (Mokhtari et al. 2020)"""
    return Method(Ball(norm, radius), alpha=alpha, lam=schedules.lr, gamma=1.0, centre="origin")


# -- averaging ------------------------------------------------------------------------------------


@row
def dual_averaging(geometry: Geometry = GD) -> Method:
    """z = z0 + u(lr (k+1) m), m the mean of the gradients at z, x the mean of z. (Nesterov 2009)"""
    return replace(double_averaging(geometry), lam_bar=1.0)


@row
def double_averaging(geometry: Geometry = GD) -> Method:
    """dual_averaging with gradients at x, the mean of the z. (Nesterov, Shikhman 2015)"""
    gamma = times(schedules.lr, schedules.over(1, schedules.mean))
    return Method(geometry, schedules.mean, 0.0, uniform, 0.0, gamma, "init")


@row
def oda(geometry: Geometry = GD, weights: schedules.weights | None = None) -> Method:
    """moda with gradients at z: optimistic dual averaging. (Rakhlin, Sridharan 2013)"""
    return replace(moda(geometry, weights), lam_bar=1.0)


@row
def moda(geometry: Geometry = GD, weights: schedules.weights | None = None) -> Method:
    """z = z0 + u(lr A_{k+1} m_bar), x <- (1 - a_{k+1}/A_{k+1}) x + a_{k+1}/A_{k+1} z,

    m <- (1 - a_k/A_k) m + (a_k/A_k) g, and m_bar likewise with k+1 for k. Without weights, a_k = 1:
    alpha = 1/(k+1), alpha_bar = lam = 1/(k+2), gamma = lr (k+2). (the paper)
    """
    if weights is not None:
        w = weights
        return Method(geometry, w.now, w.next, w.next, 0.0, w.total, "init")
    gamma = times(schedules.lr, schedules.grow)
    return Method(geometry, schedules.mean, uniform, uniform, 0.0, gamma, "init")


@row
def accelerated(geometry: Geometry = GD) -> Method:
    """moda with weights a_k = k+1: alpha = 2/(k+2), alpha_bar = lam = 2/(k+3),

    gamma = lr (k+2)(k+3)/2. (the paper's accelerated rate)
    """
    rate = schedules.accelerated
    gamma = times(schedules.lr, schedules.triangular)
    return Method(geometry, schedules.linear, rate, rate, 0.0, gamma, "init")


@row
def schedule_free(
    base: Method | None = None, beta: float = 0.9, r: float = 0.0, weight_lr_power: float = 2.0
) -> Method:
    """z <- z + u, x <- (1 - c) x + c z, y = beta x + (1-beta) z, with the step u of base (or sgd),

    c = w_k/(w_0+...+w_k) and w_k = (k+1)^r (largest lr so far)^weight_lr_power. If lr never rises
    and r = 0, c = 1/(k+1). k counts the steps of the group. (Defazio et al. 2024)
    """
    lam, lam_bar = schedules.lr_weighted(r, weight_lr_power), 1 - number("beta", beta, 1)
    return replace(_check_plain(base or sgd(), "schedule_free"), lam=lam, lam_bar=lam_bar)


@row
def gpa(base: Method | None = None, lam: float = 0.003287, lam_bar: float = 0.1) -> Method:
    """z <- z + u, x <- (1 - lam) x + lam z, y = (1 - lam_bar) x + lam_bar z, u as in schedule_free.

    Generalized primal averaging of any method without decay. (Defazio et al. 2025)
    """
    return replace(_check_plain(base or sgd(), "gpa"), lam=lam, lam_bar=lam_bar)
