"""Facts about other optimizers, and the checks that use them.

`python -m tools.known_bases` writes non_readers.txt. It runs each installed optimizer from two
points with the same gradients.
"""

import inspect
from importlib import resources
from typing import Any

from torch.optim import Optimizer

from sodaopt.core.optimizer import SODA
from sodaopt.wrappers import refusals

TABLE = resources.files("sodaopt.wrappers") / "non_readers.txt"
NON_READERS = {"sodaopt.core.optimizer.SODA", *TABLE.read_text(encoding="utf-8").split()}
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


def check_base(base: Any, wrapper: str) -> None:
    """Raise if the optimizer cannot be wrapped."""
    name = type(base).__name__
    if not isinstance(base, Optimizer):
        raise TypeError(
            f"{wrapper} wraps a torch.optim.Optimizer, got {name}. Around a class such as AdamW, "
            f"write {wrapper}.of(AdamW)(params)"
        )
    refusals.check_kind(base, wrapper)
    closure = list(inspect.signature(type(base).step).parameters.values())[1:2]
    if any(argument.default is argument.empty for argument in closure):
        raise TypeError(
            f"{wrapper} cannot wrap {name}: it evaluates the loss at several points in each step. "
            "Wrap an optimizer that computes its update from one gradient"
        )
    methods = base.methods.values() if isinstance(base, SODA) else ()
    has_output = hasattr(base, "eval") and not isinstance(base, SODA)  # wrappers too
    if has_output or any(m._keeps_x or m._keeps_z for m in methods):
        raise TypeError(
            f"{name} averages its iterates or is a wrapper itself: wrap the optimizer inside it. "
            "To average and pull, write GPA(SODA(params, lr, zoo.soda(zoo.adam())))"
        )
