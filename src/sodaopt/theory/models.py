"""Linear models f(x) = mean_i loss(<a_i, x>, b_i): absolute deviations, l1, logistic."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from .problems import Problem
from .spaces import Space, apply


@dataclass(frozen=True)
class Loss:
    """A loss of the prediction r = <a, x> and the target b.

    value: (r, b) -> the loss
    slope: (r, b) -> the derivative of the loss in r
    curvature: an upper bound of the second derivative in r, None if the loss is not smooth
    """

    value: Callable[[Tensor, Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor]
    curvature: float | None


ABSOLUTE = Loss(lambda r, b: (r - b).abs(), lambda r, b: (r - b).sign(), None)
LOGISTIC = Loss(
    lambda r, b: torch.nn.functional.softplus(-b * r), lambda r, b: -b * torch.sigmoid(-b * r), 0.25
)


@dataclass(frozen=True, eq=False)
class LinearModel:
    """mean_i loss(<a_i, x>, b_i) + ridge/2 ||x||_2^2 + l1 ||x||_1 for a loss with |slope| <= 1.

    batch: number of rows that the oracle draws with replacement. None means all rows.
    """

    A: Tensor
    b: Tensor
    loss: Loss
    batch: int | None
    ridge: float = 0.0
    l1: float = 0.0

    def value(self, x: Tensor) -> Tensor:
        fit = self.loss.value(apply(self.A, x), self.b[:, None]).mean((-2, -1))
        return fit + self.ridge / 2 * (x**2).sum((-2, -1)) + self.l1 * x.abs().sum((-2, -1))

    def penalty(self, x: Tensor) -> Tensor:
        return self.ridge * x + self.l1 * x.sign()

    def gradient(self, x: Tensor) -> Tensor:
        slope = self.loss.slope(apply(self.A, x), self.b[:, None])
        return apply(self.A.mT, slope) / len(self.A) + self.penalty(x)

    def sample(self, x: Tensor, generator: Generator) -> Tensor:
        i = torch.randint(len(self.A), (len(x), self.batch or 1), generator=generator)
        rows = self.A[i]
        return rows.mT @ self.loss.slope(rows @ x, self.b[i, None]) / i.shape[1] + self.penalty(x)

    def G(self, space: Space) -> float:
        """Return an upper bound of ||g||_*.

        A gradient of the loss is at most as large as the largest row. Without batches it is also at
        most max ||A^T s||_*/N over |s_i| <= 1. The l1 penalty adds its own bound.
        """
        rows = float(space.dual(self.A[..., None]).max())
        fit = rows if self.batch else min(rows, space.operator(self.A) / math.sqrt(len(self.A)))
        return fit + self.l1 * float(space.dual(torch.ones_like(self.A[0, :, None])))

    def L(self, space: Space) -> float:
        fit = (self.loss.curvature or 0.0) * space.operator(self.A) ** 2 / len(self.A)
        return (
            fit + self.ridge * space.operator(torch.eye(self.A.shape[1], dtype=self.A.dtype)) ** 2
        )

    def v(self, space: Space) -> float:
        """Return a bound of the noise from the second moment of one row's gradient.

        Averaging over a batch reduces this bound in a Hilbert space only.
        """
        size = math.sqrt(float((space.dual(self.A[..., None]) ** 2).mean()))
        return size / math.sqrt(self.batch or 1) if space.hilbert else 2 * size

    def problem(self, name: str, minimiser: Tensor) -> Problem:
        """Return the model as a problem. G is unknown with a ridge, and L if the loss has none."""
        return Problem(
            name,
            (self.A.shape[1], 1),
            self.value,
            self.gradient,
            self.sample if self.batch else None,
            minimiser,
            L=self.L if self.loss.curvature else None,
            G=None if self.ridge else self.G,
            v=self.v,
        )


def least_absolute(N: int = 64, d: int = 8, batch: int | None = 1, seed: int = 3) -> Problem:
    """Return f = mean |<a_i, x> - b_i| with rows of length 1 and ||x*|| = 1.

    Half of the rows fit exactly. The other rows come in pairs: a pair is one row twice, with
    residuals of opposite signs. Their subgradients cancel at x*, so x* is optimal.
    """
    generator = torch.Generator().manual_seed(seed)
    A, x_star, residual = _paired(N, d, generator)
    A = A / torch.linalg.vector_norm(A, dim=1, keepdim=True)
    x_star = x_star / x_star.norm()
    model = LinearModel(A, (A @ x_star)[:, 0] + residual, ABSOLUTE, batch)
    return model.problem("absolute", x_star)


def l1_regression(N: int = 256, d: int = 128, batch: int | None = 1, seed: int = 4) -> Problem:
    """Return f = mean |<a_i, x> - b_i| + w ||x||_1 with entries +-1 and two nonzeros in x*.

    Rows come in pairs as in least_absolute. In addition, N/8 rows equal sign(x*) and have a
    positive residual. Their subgradient at x*, -sign(x*)/8, cancels that of the penalty, w = 1/8.
    """
    generator = torch.Generator().manual_seed(seed)
    A, _, residual = _paired(N, d, generator)
    x_star, m = torch.zeros(d, 1, dtype=torch.float64), N // 8
    x_star[0], x_star[1] = 0.6, -0.4
    A = A.sign()
    A[-m:], residual[-m:] = x_star.sign().mT, 1.0
    model = LinearModel(A, (A @ x_star)[:, 0] + residual, ABSOLUTE, batch, l1=m / N)
    return model.problem("l1 regression", x_star)


def _paired(N: int, d: int, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows, a point and residuals. The first N/2 rows are pairs, the others fit exactly."""
    A = torch.randn(N, d, generator=generator, dtype=torch.float64)
    x = torch.randn(d, 1, generator=generator, dtype=torch.float64)
    residual, m = torch.zeros(N, dtype=torch.float64), N // 4
    size = torch.rand(N, generator=generator, dtype=torch.float64)
    A[m : 2 * m] = A[:m]
    residual[:m], residual[m : 2 * m] = size[:m], -size[m : 2 * m]
    return A, x, residual


def logistic(
    data: str = "breast_cancer",
    ridge: float = 0.01,
    batch: int | None = 8,
    rows: slice = slice(None),
) -> Problem:
    """Return logistic regression with ridge/2 ||x||_2^2 on a data set of scikit-learn.

    The columns are standardised, and a constant column is added. The label is the first class
    against all others.
    """
    A, b = (t[rows] for t in _table(data))
    model = LinearModel(A, b, LOGISTIC, batch, ridge=ridge)
    return model.problem("logistic", _newton(A, b, ridge))


def _table(data: str) -> tuple[Tensor, Tensor]:
    try:
        from sklearn import datasets
    except ImportError as e:
        fix = "the data needs scikit-learn: pip install 'sodaopt[lab]'"
        raise ModuleNotFoundError(fix, name="scikit-learn") from e
    load = getattr(datasets, f"load_{data}", None)
    if load is None:
        raise ValueError(f"scikit-learn has no data set {data!r}. Try 'breast_cancer' or 'wine'.")
    X, target = load(return_X_y=True)
    A = torch.tensor(X, dtype=torch.float64)
    A = (A - A.mean(0)) / A.std(0)
    b = torch.where(torch.tensor(target) == 0, 1.0, -1.0).double()
    return torch.cat([A, torch.ones(len(A), 1, dtype=torch.float64)], 1), b


def _newton(A: Tensor, b: Tensor, ridge: float) -> Tensor:
    """Return the minimiser up to rounding. Newton's method needs only a few steps."""
    x = torch.zeros(A.shape[1], 1, dtype=torch.float64)
    eye = torch.eye(A.shape[1], dtype=torch.float64)
    for _ in range(50):
        s = torch.sigmoid(-b[:, None] * (A @ x))
        g = -A.mT @ (b[:, None] * s) / len(A) + ridge * x
        H = A.mT @ (s * (1 - s) * A) / len(A) + ridge * eye
        x = x - torch.linalg.solve(H, g)
        if g.norm() < 1e-14:
            break
    return x
