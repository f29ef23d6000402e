"""Coefficients that only one row of the zoo uses."""

from dataclasses import dataclass

from sodaopt.schedules import NO_PAST, Number, Past, Schedule, maximum


@dataclass(frozen=True)
class mass(Schedule):
    """1 + b + ... + b^k + a: the sum of the weights of all gradients in M + a g, M <- b M + g.

    b: the weight of the past in M, in [0, 1).
    a: the extra weight of the newest gradient, at least 0.
    """

    b: float
    a: float = 0.0

    def __call__(self, k: Number, lr: Number, past: Past = NO_PAST) -> Number:
        return (1 - self.b ** (k + 1)) / (1 - self.b) + self.a


@dataclass(frozen=True)
class falling(Schedule):
    """c (n/max(k+1, n))^rho: c for n steps, then a power of 1/(k+1).

    c: the number of the first n steps.
    n: steps before it falls, at least 1.
    rho: how fast it falls, at least 0.
    """

    c: float
    n: int
    rho: float = 1.0

    def __call__(self, k: Number, lr: Number, past: Past = NO_PAST) -> Number:
        return self.c * (self.n / maximum(k + 1, self.n)) ** self.rho


@dataclass(frozen=True)
class nadam_total(Schedule):
    """c_g + c_m of torch's NAdam, whose step is c_g g + c_m m.

    mu_t = b (1 - 0.96^(t psi)/2), P_t = mu_1...mu_t, t = k+1, c_g = (1-mu_t)/(1-P_t), and
    c_m = mu_{t+1}/(1-P_{t+1}).

    b: beta1, in [0, 1).
    psi: momentum_decay, at least 0.
    """

    b: float
    psi: float

    def mu(self, t: Number) -> Number:
        return self.b * (1 - 0.5 * 0.96 ** (t * self.psi))

    def start(self) -> dict[str, float]:
        return {"mu_product": 1.0}

    def advance(self, past: Past, k: Number, lr: Number) -> dict[str, Number]:
        return {"mu_product": past["mu_product"] * self.mu(k + 1)}

    def c_g(self, k: Number, past: Past) -> Number:
        return (1 - self.mu(k + 1)) / (1 - past["mu_product"])

    def __call__(self, k: Number, lr: Number, past: Past = NO_PAST) -> Number:
        ahead = self.mu(k + 2)
        return self.c_g(k, past) + ahead / (1 - past["mu_product"] * ahead)


class nadam_share(nadam_total):
    """c_g / (c_g + c_m)."""

    def __call__(self, k: Number, lr: Number, past: Past = NO_PAST) -> Number:
        return self.c_g(k, past) / super().__call__(k, lr, past)
