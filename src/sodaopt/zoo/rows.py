"""The rows of the zoo that do not average, by geometry. `zoo/__init__.py` explains the letters."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from sodaopt._errors import number
from sodaopt.core.method import Method, decayed, row, soda
from sodaopt.geometry.kronecker import Kronecker
from sodaopt.geometry.maps import Ball, Diagonal, Geometry, MultiNorm, Sharp
from sodaopt.geometry.norms import Euclidean, Norm, Sign, Spectral
from sodaopt.geometry.polar import EXACT, KELLER, Polar
from sodaopt.geometry.scales import Scale, original, unit
from sodaopt.schedules import Coef, debias, first, lr, over, times, uniform
from sodaopt.zoo.coefficients import mass, nadam_share, nadam_total

Betas: TypeAlias = tuple[float, float]

EUCLIDEAN, SPECTRAL = Euclidean(), Spectral()
GD = Sharp(EUCLIDEAN)
"""The geometry of gradient descent."""


def _beta(name: str, b: float) -> float:
    if not 0 <= b < 1:
        raise ValueError(f"{name} must be in [0, 1), got {b}")
    return b


# -- Euclidean ------------------------------------------------------------------------------------


@row
def sgd(momentum: float = 0.0) -> Method:
    """b <- momentum b + g, y <- y - lr b. (torch.optim.SGD)

    >>> opt = SODA(model.parameters(), lr=0.1, method=zoo.sgd(momentum=0.9))
    """
    alpha = 1 - _beta("momentum", momentum)
    return Method(Sharp(Euclidean()), alpha=alpha, gamma=times(1 / alpha, lr))


@row
def nesterov(momentum: float = 0.9) -> Method:
    """b <- momentum b + g, y <- y - lr (g + momentum b). (torch.optim.SGD with nesterov=True)

    >>> opt = SODA(model.parameters(), lr=0.1, method=zoo.nesterov())
    """
    return replace(sgd(momentum), alpha_bar=1 - momentum)


# -- diagonal metric ------------------------------------------------------------------------------


@row
def adam(betas: Betas = (0.9, 0.999), eps: float = 1e-8) -> Method:
    """y <- y - lr m/(sqrt(v)+eps), m = EMA_b1(g)/(1-b1^t), v = EMA_b2(g^2)/(1-b2^t).

    The bias correction is in the rates of the averages, (1-b)/(1-b^t). (Kingma, Ba 2014)

    >>> opt = SODA(model.parameters(), lr=1e-3, method=zoo.adam(betas=(0.9, 0.95)))
    """
    return Method(Diagonal(debias(betas[1]), eps), alpha=debias(betas[0]))


@row
def adamw(betas: Betas = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.01) -> Method:
    """y <- (1 - lr wd) y - lr m/(sqrt(v)+eps), m and v as in adam. (Loshchilov, Hutter 2017)

    >>> opt = SODA(model.parameters(), lr=1e-3, method=zoo.adamw(weight_decay=0.1))
    """
    return decayed(adam(betas, eps), weight_decay)


@row
def nadam(betas: Betas = (0.9, 0.95), eps: float = 1e-8, weight_decay: float = 0.0) -> Method:
    """y <- y - lr (b1 m + (1-b1) g)/(sqrt(v)+eps), m = EMA_b1(g), v = EMA_b2(g^2), uncorrected.

    This is the paper's NAdam, with constant optimism. (Dozat 2016)

    >>> opt = SODA(model.parameters(), lr=1e-3, method=zoo.nadam())
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
    """y <- y - lr (c_g g + c_m m)/(sqrt(v)+eps), m = EMA_b1(g), v = EMA_b2(g^2)/(1-b2^t).

    mu_t = b1 (1 - 0.96^(t psi)/2), P_t = mu_1...mu_t, c_g = (1-mu_t)/(1-P_t),
    c_m = mu_{t+1}/(1-P_{t+1}), psi = momentum_decay. Decay is decoupled. (torch.optim.NAdam)

    momentum_decay: psi >= 0.

    >>> opt = SODA(model.parameters(), lr=1e-3, method=zoo.torch_nadam())
    """
    b1, psi = _beta("betas[0]", betas[0]), momentum_decay
    method = Method(
        Diagonal(debias(betas[1]), eps),
        alpha=1 - b1,
        alpha_bar=nadam_share(b1, psi),
        gamma=times(lr, nadam_total(b1, psi)),
    )
    return decayed(method, weight_decay)


@row
def simplified_ademamix(
    betas: Betas = (0.99, 0.95), alpha: float = 0.0, eps: float = 1e-8
) -> Method:
    """M <- b1 M + g, y <- y - lr (M + alpha g)/(sqrt(v)+eps), v = EMA_b2(g^2)/(1-b2^t).

    M = N m with N = 1 + b1 + ... + b1^k and m = EMA_b1(g)/(1-b1^t). (Morwani et al. 2025)

    alpha: the extra weight of the newest gradient, at least 0.

    >>> opt = SODA(model.parameters(), lr=1e-5, method=zoo.simplified_ademamix(alpha=100))
    """
    total = mass(betas[0], number("alpha", alpha))
    return Method(
        Diagonal(debias(betas[1]), eps),
        alpha=debias(betas[0]),
        alpha_bar=over(alpha, total),
        gamma=times(lr, total),
    )


# -- l_inf ----------------------------------------------------------------------------------------


@row
def signsgd(map: Callable[[Norm], Geometry] = Ball) -> Method:
    """y <- y - lr sign(g), or with map=Sharp y <- y - lr ||g||_1 sign(g). (Carlson et al. 2015)

    >>> opt = SODA(model.parameters(), lr=1e-4, method=zoo.signsgd())
    """
    return Method(map(Sign(unit)))


@row
def signum(beta: float = 0.9, weight_decay: float = 0.0) -> Method:
    """y <- (1 - lr wd) y - lr sign(m), m = EMA_beta(g). (Bernstein et al. 2018)

    >>> opt = SODA(model.parameters(), lr=1e-4, method=zoo.signum())
    """
    return decayed(Method(Ball(Sign(unit)), alpha=1 - _beta("beta", beta)), weight_decay)


@row
def lion(betas: Betas = (0.9, 0.99), weight_decay: float = 0.0) -> Method:
    """y <- (1 - lr wd) y - lr sign(b1 m + (1-b1) g), then m <- b2 m + (1-b2) g.

    Here m moves before y: b1 m_old + (1-b1) g = (b1/b2) m_new + (1 - b1/b2) g. (Chen et al. 2023)

    >>> opt = SODA(model.parameters(), lr=1e-4, method=zoo.lion(weight_decay=0.1))
    """
    b1, b2 = _beta("betas[0]", betas[0]), _beta("betas[1]", betas[1])
    if not b1 <= b2:
        raise ValueError(f"lion needs betas[0] <= betas[1] for its optimism, got {betas}")
    optimism = 1 - b1 / b2 if b2 else 0.0
    return decayed(Method(Ball(Sign(unit)), alpha=1 - b2, alpha_bar=optimism), weight_decay)


# -- spectral -------------------------------------------------------------------------------------


@row
def ssd(map: Callable[[Norm], Geometry] = Sharp, polar: Polar = EXACT) -> Method:
    """y <- y - lr ||g||_nuc U V^T with g = U S V^T, or with map=Ball y <- y - lr U V^T.

    Stochastic spectral descent. (Carlson et al. 2015, 2016)

    >>> opt = SODA(hidden(model), lr=1e-3, method=zoo.ssd())
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

    MomentUm, Orthogonalized by Newton-schulz. (Jordan et al. 2024)

    scale: s, such as geometry.original or geometry.adamw, which torch has, or the paper's
    geometry.rms.

    >>> opt = SODA(hidden(model), lr=0.02, method=zoo.muon())
    """
    a = 1 - _beta("momentum", momentum)
    return decayed(Method(Ball(Spectral(scale, polar=polar)), alpha=a, alpha_bar=a), weight_decay)


@row
def shampoo(eps: float = 1e-12, weight_decay: float = 0.0) -> Method:
    """L <- L + g g^T, R <- R + g^T g, y <- y - lr L^(-1/4) g R^(-1/4). (Gupta et al. 2018)

    eps: L and R start at eps times the identity, eps > 0.

    >>> opt = SODA(hidden(model), lr=0.1, method=zoo.shampoo())
    """
    return decayed(Method(Kronecker(eps)), weight_decay)


@row
def multinorm(iterations: int = 5) -> Method:
    """y <- y - lr X, X = g with rows and columns normalised in turn. (Scetbon et al. 2025)

    >>> opt = SODA(hidden(model), lr=1e-3, method=zoo.multinorm())
    """
    return Method(MultiNorm(iterations))


# -- per-layer norms ------------------------------------------------------------------------------


@row
def scion(norm: Norm = SPECTRAL, radius: float = 50.0, alpha: float = 0.1) -> Method:
    """y <- (1 - lr) y + lr rho lmo(m), m <- (1-alpha) m + alpha g. (Pethick et al. 2025)

    >>> opt = SODA(hidden(model), lr=2**-12, method=zoo.scion())
    """
    return frank_wolfe(norm, radius, alpha)


@row
def uscion(norm: Norm = SPECTRAL, radius: float = 50.0, alpha: float = 0.1) -> Method:
    """y <- y + lr rho lmo(m), m <- (1-alpha) m + alpha g. Scion without its constraint.

    >>> opt = SODA(hidden(model), lr=2**-12, method=zoo.uscion())
    """
    return Method(Ball(norm, radius), alpha=alpha)


@row
def soda_dagger(
    norm: Norm = SPECTRAL, radius: float = 50.0, alpha: float = 0.05, decay: Coef = uniform
) -> Method:
    """y <- (1 - 1/(k+2)) y + 1/(k+2) z0 + lr rho lmo(m_bar), m_bar = (1-alpha) m + alpha g.

    m <- (1-alpha) m + alpha g, which starts at the first gradient. The paper's own optimizer.

    >>> opt = SODA(hidden(model), lr=2**-12, method=zoo.soda_dagger())
    """
    return soda(replace(uscion(norm, radius), alpha=first(alpha), alpha_bar=alpha), decay)


@row
def frank_wolfe(norm: Norm = EUCLIDEAN, radius: float = 1.0, alpha: float = 1.0) -> Method:
    """y <- (1 - lr) y + lr rho lmo(m), m <- (1-alpha) m + alpha g. (Mokhtari et al. 2020)

    >>> opt = SODA(model.parameters(), lr=0.01, method=zoo.frank_wolfe(radius=10.0))
    """
    return Method(Ball(norm, radius), alpha=alpha, lam=lr, gamma=1.0, centre="origin")
