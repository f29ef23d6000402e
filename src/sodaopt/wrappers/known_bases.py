"""Facts about other optimizers, and the checks that use them.

`python -m tools.known_bases` writes non_readers.txt. It runs each installed optimizer from two
points with the same gradients.
"""

from __future__ import annotations

import inspect
from importlib import resources
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor
from torch.optim import Optimizer, SparseAdam

from sodaopt._errors import check_shape
from sodaopt.core.optimizer import SODA

NON_READERS = frozenset(
    (resources.files("sodaopt.wrappers") / "non_readers.txt").read_text(encoding="utf-8").split()
) | {"sodaopt.core.optimizer.SODA"}
"""Optimizers whose update does not depend on the weights.

For any other base the wrapper computes the pull before the step and adds it afterwards. That is
exact for every base, and costs one temporary copy.
"""

# Group keys of a weight decay, and the value that turns it off.
DECAYS: dict[str, object] = {
    "weight_decay": 0,
    "wd": 0,
    "weight_decay_1d": 0,
    "constraint": False,
    "unconstrained": True,
}


WRAPPERS: WeakValueDictionary[int, Optimizer] = WeakValueDictionary()
"""The wrapper of each wrapped optimizer, by the optimizer's id. A deleted wrapper is gone."""


def check_base(base: Any, wrapper: str) -> None:
    """Raise if the optimizer cannot be wrapped."""
    name = type(base).__name__
    if isinstance(base, type):
        raise TypeError(
            f"{wrapper} wraps an optimizer, not a class: {wrapper}.of({base.__name__})(params)"
        )
    if isinstance(getattr(base, "base", None), Optimizer):
        raise TypeError(
            f"{wrapper} cannot wrap a {name}, which is a wrapper itself: wrap the optimizer inside "
            "it, or use a row such as SODA(params, lr, zoo.soda(zoo.adam())) as the base"
        )
    if not isinstance(base, Optimizer):
        raise TypeError(f"{wrapper} wraps a torch.optim.Optimizer, got {name}")
    if id(base) in WRAPPERS:
        raise ValueError(
            f"this {name} is already in a {type(WRAPPERS[id(base)]).__name__}, and two wrappers "
            f"would both move its parameters: build one {name} for each, or delete the other"
        )
    if isinstance(base, SparseAdam):
        raise TypeError(
            f"{wrapper} cannot wrap SparseAdam: it moves only the rows with a gradient, and the "
            "pull moves all of them. Use Adam with dense gradients"
        )
    if any(group.get("differentiable") for group in base.param_groups):
        raise ValueError(
            f"{wrapper} cannot wrap {name} with differentiable=True: the pull would be missing in "
            "the derivatives"
        )
    closure = list(inspect.signature(type(base).step).parameters.values())[1:2]
    if any(argument.default is argument.empty for argument in closure):
        raise TypeError(
            f"{name} evaluates the loss several times a step, at points of its own: there is no "
            "one update to add the pull to"
        )
    if isinstance(base, SODA):
        averages = any(m._keeps_x or m._keeps_z for m in base.methods.values())
    else:
        averages = hasattr(base, "eval")
    if averages:
        raise TypeError(f"{name} averages its iterates itself: wrap the optimizer inside it")


MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "sum")
"""State tensors of torch's optimizers that have the shape of their parameter."""


def check_moments(saved: Any, p: Tensor) -> None:
    """Raise if a moment to load has another shape than its parameter."""
    for name in MOMENTS if isinstance(saved, dict) else ():
        t = saved.get(name)
        if isinstance(t, Tensor) and t.dim() == p.dim():
            check_shape(name, t.shape, p.shape)
