"""Every row written out in a few plain lines on plain tensors, from the papers.

Nothing here uses sodaopt. An `Update` is the paper's BaseUpdate: it maps the gradient g of step
k = 0, 1, ... to the change of a point. Its memory is a plain dict for each parameter. A `Step` maps
the point at which g was taken to the next such point. Spectral maps use the exact U V^T of an SVD.
Averaged methods leave their output in `s["x"]`.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

Update = Callable[[dict, Tensor, int, float], Tensor]  # (s, g, k, lr) -> u
Step = Callable[[dict, Tensor, Tensor, int, float], Tensor]  # (s, x, g, k, lr) -> y


def polar(g: Tensor) -> Tensor:
    u, _, vh = torch.linalg.svd(g, full_matrices=False)
    return u @ vh


def nuclear(g: Tensor) -> Tensor:
    return torch.linalg.svdvals(g).sum()


def spectral(g: Tensor) -> Tensor:
    """The paper's hidden-layer factor, sqrt(d_out / d_in) U V^T."""
    return math.sqrt(g.shape[0] / g.shape[1]) * polar(g)


def columns(g: Tensor) -> Tensor:
    """Each column to length sqrt(d_out)/d_in."""
    return math.sqrt(g.shape[0]) / g.shape[1] * g / g.norm(dim=0, keepdim=True)


def rows(g: Tensor) -> Tensor:
    """Each row to length 1/sqrt(d_in)."""
    return g / g.norm(dim=1, keepdim=True) / math.sqrt(g.shape[1])


def root(a: Tensor, power: float) -> Tensor:
    """A symmetric positive definite matrix to a power."""
    w, q = torch.linalg.eigh(a)
    return q @ torch.diag(w**power) @ q.mT


# How an update moves the point.


def descend(u: Update) -> Step:
    """x <- x + u"""
    return lambda s, x, g, k, lr: x + u(s, g, k, lr)


def decayed(u: Update, wd: float) -> Step:
    """x <- (1 - lr wd) x + u, decoupled weight decay. wd = 1 is Frank-Wolfe's (1 - lr) x."""
    return lambda s, x, g, k, lr: (1 - lr * wd) * x + u(s, g, k, lr)


def soda(u: Update) -> Step:
    """Algorithm 1: z <- z0 + (k+2) u;  x <- (1 - 1/(k+2)) x + z/(k+2)."""

    def step(s: dict, x: Tensor, g: Tensor, k: int, lr: float) -> Tensor:
        z0 = s.setdefault("z0", x)
        z = z0 + (k + 2) * u(s, g, k, lr)
        return (1 - 1 / (k + 2)) * x + z / (k + 2)

    return step


def gpa(u: Update, lam: float = 0.003287, lam_bar: float = 0.1) -> Step:
    """z <- z + u;  x <- (1-lam) x + lam z;  y <- (1-lam_bar) x + lam_bar z."""

    def step(s: dict, y: Tensor, g: Tensor, k: int, lr: float) -> Tensor:
        z = s["z"] = s.get("z", y) + u(s, g, k, lr)
        x = s["x"] = (1 - lam) * s.get("x", y) + lam * z
        return (1 - lam_bar) * x + lam_bar * z

    return step


def amuse(u: Update, beta: float = 0.9, warmup: int = 100, rho: float = 1.0) -> Step:
    """z <- z + u;  x <- (1-1/t) x + z/t;  y_t = beta_t x + (1-beta_t) z with t = k+1,

    1 - beta_t = (1-beta) ((warmup-1)/(t-1))^rho for t >= warmup, else 1-beta.
    """

    def step(s: dict, y: Tensor, g: Tensor, k: int, lr: float) -> Tensor:
        z = s["z"] = s.get("z", y) + u(s, g, k, lr)
        t = k + 1
        x = s["x"] = (1 - 1 / t) * s.get("x", y) + z / t
        following = t + 1
        b = beta
        if following >= warmup:
            b = 1 - ((warmup - 1) / (following - 1)) ** rho * (1 - beta)
        return b * x + (1 - b) * z

    return step


# Updates: sign and spectral maps.


def signsgd(sharp: bool = False) -> Update:
    return lambda s, g, k, lr: -lr * g.sign() * (g.abs().sum() if sharp else 1)


def ssd(sharp: bool = True) -> Update:
    return lambda s, g, k, lr: -lr * polar(g) * (nuclear(g) if sharp else 1)


def signum(beta: float = 0.9) -> Update:
    def update(s: dict, g: Tensor, k: int, lr: float) -> Tensor:
        s["m"] = beta * s.get("m", 0) + (1 - beta) * g
        return -lr * s["m"].sign()

    return update


def lion(b1: float = 0.9, b2: float = 0.99) -> Update:
    def update(s: dict, g: Tensor, k: int, lr: float) -> Tensor:
        c = b1 * s.get("m", 0) + (1 - b1) * g
        s["m"] = b2 * s.get("m", 0) + (1 - b2) * g
        return -lr * c.sign()

    return update


def muon(mu: float = 0.95) -> Update:
    """Heavy-ball form, "Nesterov", factor sqrt(max(1, d_out/d_in))."""

    def update(s: dict, g: Tensor, k: int, lr: float) -> Tensor:
        s["b"] = mu * s.get("b", 0) + g
        return -lr * math.sqrt(max(1, g.shape[0] / g.shape[1])) * polar(g + mu * s["b"])

    return update


def uscion(
    radius: float = 50.0, alpha: float = 0.1, ball: Callable[[Tensor], Tensor] = spectral
) -> Update:
    def update(s: dict, g: Tensor, k: int, lr: float) -> Tensor:
        s["m"] = (1 - alpha) * s.get("m", 0) + alpha * g
        return -lr * radius * ball(s["m"])

    return update


def normalized(radius: float = 1.0, alpha: float = 1.0) -> Update:
    """The Euclidean ball: -lr rho m/||m||_F."""

    def update(s: dict, g: Tensor, k: int, lr: float) -> Tensor:
        s["m"] = (1 - alpha) * s.get("m", 0) + alpha * g
        return -lr * radius * s["m"] / s["m"].norm()

    return update


# Updates: metrics.


def sgd() -> Update:
    return lambda s, g, k, lr: -lr * g


def clipped() -> Update:
    """The Euclidean clip: -min(lr, 1/||g||) g."""
    return lambda s, g, k, lr: -min(lr, 1 / float(g.norm())) * g


def adam(b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> Update:
    def update(s: dict, g: Tensor, k: int, lr: float) -> Tensor:
        s["m"] = b1 * s.get("m", 0) + (1 - b1) * g
        s["v"] = b2 * s.get("v", 0) + (1 - b2) * g**2
        m, v = s["m"] / (1 - b1 ** (k + 1)), s["v"] / (1 - b2 ** (k + 1))
        return -lr * m / (v.sqrt() + eps)

    return update


def nadam(b1: float = 0.9, b2: float = 0.95, eps: float = 1e-8) -> Update:
    """The paper's: alpha_bar = alpha = 1 - b1 at every step, no bias correction."""

    def update(s: dict, g: Tensor, k: int, lr: float) -> Tensor:
        s["m"] = b1 * s.get("m", 0) + (1 - b1) * g
        s["v"] = b2 * s.get("v", 0) + (1 - b2) * g**2
        return -lr * (b1 * s["m"] + (1 - b1) * g) / (s["v"].sqrt() + eps)

    return update


def simplified_ademamix(b1: float, b2: float, alpha: float, eps: float = 1e-8) -> Update:
    """m <- b m + g;  u = -lr (m + alpha g)/(sqrt(v_hat) + eps)."""

    def update(s: dict, g: Tensor, k: int, lr: float) -> Tensor:
        s["m"] = b1 * s.get("m", 0) + g
        s["v"] = b2 * s.get("v", 0) + (1 - b2) * g**2
        v = s["v"] / (1 - b2 ** (k + 1))
        return -lr * (s["m"] + alpha * g) / (v.sqrt() + eps)

    return update


def shampoo(eps: float = 1e-12) -> Update:
    """L <- L + g g^T, R <- R + g^T g from eps I;  u = -lr L^(-1/4) g R^(-1/4)."""

    def update(s: dict, g: Tensor, k: int, lr: float) -> Tensor:
        s["L"] = s.get("L", eps * torch.eye(g.shape[0], dtype=g.dtype)) + g @ g.mT
        s["R"] = s.get("R", eps * torch.eye(g.shape[1], dtype=g.dtype)) + g.mT @ g
        return -lr * root(s["L"], -1 / 4) @ g @ root(s["R"], -1 / 4)

    return update


def multinorm(iterations: int = 5) -> Update:
    """Rows to norm sqrt(n), then columns to norm sqrt(m), `iterations` times."""

    def update(s: dict, g: Tensor, k: int, lr: float) -> Tensor:
        m, n = g.shape
        for _ in range(iterations):
            g = math.sqrt(n) * g / g.norm(dim=1, keepdim=True)
            g = math.sqrt(m) * g / g.norm(dim=0, keepdim=True)
        return -lr * g

    return update


# Dual averaging in closed form: sums of gradients and means of points, no m, no lerp.

Mirror = Callable[[Tensor, float], Tensor]  # (gamma m_bar, gamma) -> u


def sharp(d: Tensor, gamma: float) -> Tensor:
    return -d


def clip(d: Tensor, gamma: float) -> Tensor:
    return -d * min(1, 1 / float(d.norm()))


def sign_ball(d: Tensor, gamma: float) -> Tensor:
    return -gamma * d.sign()


def averaging(
    mirror: Mirror,
    optimism: bool,
    at_z: bool,
    a: Callable[[int], float] = lambda k: 1,
    lam_bar: Callable[[int], float] = lambda k: 0,
) -> Step:
    """z^{k+1} = z0 + mirror(lr (sum_{i<=k} a_i g_i + a_{k+1} g_k)), the last term if optimistic.

    x^{k+1} is the a-weighted mean of z^0 ... z^{k+1}. The next gradient is taken at z, at x, or
    between them.
    """

    def step(s: dict, y: Tensor, g: Tensor, k: int, lr: float) -> Tensor:
        z0 = s.setdefault("z0", y)
        A = sum(a(i) for i in range(k + 1))
        s["G"] = s.get("G", 0) + a(k) * g
        d = s["G"] + a(k + 1) * g if optimism else s["G"]
        z = z0 + mirror(lr * d, lr * (A + a(k + 1) if optimism else A))
        s["Z"] = s.get("Z", a(0) * z0) + a(k + 1) * z
        s["x"] = s["Z"] / (A + a(k + 1))
        return z if at_z else (1 - lam_bar(k)) * s["x"] + lam_bar(k) * z

    return step


def soda_dagger(radius: float = 50.0, alpha: float = 0.05) -> Step:
    """x^{k+1} = z0 + sum_{j<=k} (j+2) u_j/(k+2), u = -lr rho sqrt(o/i) msign(m_bar), m^1 = g^0."""

    def step(s: dict, x: Tensor, g: Tensor, k: int, lr: float) -> Tensor:
        z0 = s.setdefault("z0", x)
        s["m"] = (1 - alpha) * s.get("m", g) + alpha * g
        u = -lr * radius * spectral((1 - alpha) * s["m"] + alpha * g)
        s["S"] = s.get("S", 0) + (k + 2) * u
        return z0 + s["S"] / (k + 2)

    return step
