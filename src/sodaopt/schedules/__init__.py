"""Coefficients: a number, or a function of the step k = 0, 1, 2, ... and the learning rate lr.

Every function here is branch-free arithmetic, so k and lr may be Python numbers or 0-D tensors.
Schedules with parameters are frozen dataclasses: they print, compare, copy and pickle. Their names
are in lower case because they are used as functions: `schedules.debias(0.9)`.

A schedule that depends on the past, such as a running sum, declares a memory: `start()` names its
numbers, `advance()` moves them by one step, and the optimizer keeps them in its state.

k: the number of steps before this one.
lr: the learning rate of this step.
a, b, c: coefficients with the values a_k, b_k, c_k at step k, unless a line below says otherwise.
past: the memory by name, for schedules that have one.
"""
# ruff: isort: skip_file

from sodaopt.schedules.coefficients import (
    NO_PAST, Coef, Number, Past, Schedule, accelerated, advance, after, check_memory, debias,
    fade, falling, first, log_time, lr, mass, mean, over, start, times, uniform, value,
)  # fmt: skip
from sodaopt.schedules.history import (
    coupled, lr_weighted, nadam_alpha_bar, nadam_gamma,
)  # fmt: skip

__all__ = [
    "NO_PAST", "Coef", "Number", "Past", "Schedule", "accelerated", "advance", "after",
    "check_memory", "coupled", "debias", "fade", "falling", "first",
    "log_time", "lr", "lr_weighted", "mass", "mean",
    "nadam_alpha_bar", "nadam_gamma", "over", "start", "times", "uniform", "value",
]  # fmt: skip
