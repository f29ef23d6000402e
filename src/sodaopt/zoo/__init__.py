"""Every optimizer of the paper as one expression. A new optimizer is a function with `@row`.

In the formulas g is the gradient at y, t = k+1, EMA_b is the average with rate 1-b, and u points
downhill, as in the paper. Arguments have the names and the defaults of the reference:

betas, beta, momentum: b1, b2, b, the weight of the past in an average EMA_b, in [0, 1).
alpha: the weight of the new gradient in m, 1 - b, in [0, 1].
weight_decay: wd >= 0. It is decoupled: y <- (1 - lr wd) y before the step.
eps: the term that is added to the root of v, at least 0.
norm: the norm of the layer, with its lmo, see `sodaopt.geometry`.
radius: rho >= 0, the radius of the norm's ball.
geometry: the mirror map u.
map: the map that makes a geometry of a norm, `Ball` or `Sharp`.
scale: s, the factor for the shape of a matrix.
polar: the backend of U V^T, see `sodaopt.geometry.polar`.
iterations: how often rows and columns are normalised, at least 1.
base: the method that is averaged, without decay or averaging of its own.
method: a method without decay or averaging of its own.
decay: strength of the pull in place of 1/(k+2), in [0, 1]: a number or a function of (k, lr).
r, weight_lr_power: powers of k+1 and of the learning rate in the weights of the average.
"""

# ruff: isort: skip_file

from sodaopt.core.method import ROWS, decayed, row, soda
from sodaopt.zoo.averages import (
    accelerated, amuse, double_averaging, dual_averaging, gpa, moda, oda, schedule_free,
)  # fmt: skip
from sodaopt.zoo.rows import (
    GD, adam, adamw, frank_wolfe, lion, multinorm, muon, nadam, nesterov, scion, sgd, shampoo,
    signsgd, signum, simplified_ademamix, soda_dagger, ssd, torch_nadam, uscion,
)  # fmt: skip

__all__ = [
    "GD", "ROWS", "accelerated", "adam", "adamw", "amuse", "decayed", "double_averaging",
    "dual_averaging", "frank_wolfe", "gpa", "lion", "moda", "multinorm", "muon", "nadam",
    "nesterov", "oda", "row", "schedule_free", "scion", "sgd", "shampoo", "signsgd", "signum",
    "simplified_ademamix", "soda", "soda_dagger", "ssd", "torch_nadam", "uscion",
]  # fmt: skip
