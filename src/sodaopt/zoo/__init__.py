"""Every optimizer of the paper as one expression. A new optimizer is a function with `@row`.

In the formulas g is the gradient at y, t = k+1, EMA_b is the average with rate 1-b, and u points
downhill, as in the paper. Arguments have the names and the defaults of the reference.
"""

# ruff: isort: skip_file

from sodaopt.core.method import ROWS
from sodaopt.zoo.averages import (
    accelerated, amuse, double_averaging, dual_averaging, gpa, moda, oda, schedule_free,
)  # fmt: skip
from sodaopt.zoo.forms import decayed, row, soda
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
