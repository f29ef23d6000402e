"""Checks that raise if a wrapper would otherwise give wrong results without an error.

`check_base` in known_bases.py refuses the optimizers that cannot be wrapped at all.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam

from sodaopt._errors import check_shape

WRAPPERS: WeakValueDictionary[int, Optimizer] = WeakValueDictionary()
"""The wrapper of each wrapped optimizer, by the optimizer's id, until the wrapper is deleted."""

PREFIXES: dict[str, str] = {}
"""The name of each class of wrappers, by the prefix of its keys."""

NEEDED = {"betas", "momentum", "method"}
"""Group keys of a base. If a checkpoint lacks them, the next step would end in a KeyError."""

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "sum")
"""State tensors of torch's optimizers that have the shape of their parameter."""


# -- constructing ---------------------------------------------------------------------------------


def check_kind(base: Optimizer, wrapper: str) -> None:
    """Raise if the steps of a wrapper around this base would be wrong."""
    name = type(base).__name__
    if id(base) in WRAPPERS:
        raise ValueError(
            f"this {name} is already in a {type(WRAPPERS[id(base)]).__name__}, and two wrappers "
            f"would both move its parameters: build one {name} for each, or delete the other"
        )
    if isinstance(base, SparseAdam):
        raise TypeError(
            f"{wrapper} cannot wrap SparseAdam: it moves only the rows with a gradient, and the "
            "wrapper moves all of them. Use Adam with dense gradients"
        )
    if any(group.get("differentiable") for group in base.param_groups):
        raise ValueError(
            f"{wrapper} cannot wrap {name} with differentiable=True: the derivatives would lack "
            "the wrapper's part of the step. Use differentiable=False"
        )


def check_only(only: Any) -> None:
    """Raise if only= is a module. A module is callable, as a predicate is."""
    if isinstance(only, nn.Module):
        raise TypeError(
            f"only= is a {type(only).__name__}: write only=hidden(model) for its hidden "
            "layers, or only=model.parameters() for all parameters"
        )


@contextmanager
def unchanged(base: Optimizer) -> Iterator[None]:
    """Leave the groups and the defaults of a base as they were if it is refused.

    Another wrapper can then wrap the base, also while the error keeps the refused wrapper alive.
    """
    written = [base.defaults, *base.param_groups]
    before = [dict(keys) for keys in written]
    try:
        yield
    except BaseException:
        for keys, old in zip(written, before, strict=True):
            keys.clear()
            keys.update(old)
        WRAPPERS.pop(id(base), None)
        raise


# -- loading --------------------------------------------------------------------------------------


def check_writer(wrapper: Any, groups: list[dict[str, Any]]) -> None:
    """Raise if another wrapper, or a wrapper of another optimizer or model, wrote these groups."""
    name, prefix, base = type(wrapper).__name__, wrapper._prefix, wrapper.base
    for group in groups:
        others = [w for w in PREFIXES if f"{w}k" in group and w != prefix]
        if others and prefix + "k" not in group:
            raise ValueError(
                f"the state to load was written by {PREFIXES[others[0]]}, and this is {name}: "
                f"build the optimizer with {PREFIXES[others[0]]}"
            )
        if missing := sorted(NEEDED & set(base.defaults) - set(group)):
            raise ValueError(
                f"the state to load has no {', '.join(missing)}, which {type(base).__name__} "
                "needs: it was written by another optimizer"
            )
    theirs, ours = ([len(g["params"]) for g in gs] for gs in (groups, base.param_groups))
    if theirs != ours:
        raise ValueError(
            f"the state to load has groups of {theirs} parameters, and the optimizer has {ours}: "
            "build the optimizer with the parameters of the checkpoint"
        )


def check_moments(saved: Any, p: Tensor) -> None:
    """Raise if a moment to load has another shape than its parameter."""
    for name in MOMENTS if isinstance(saved, dict) else ():
        t = saved.get(name)
        if isinstance(t, Tensor) and t.dim() == p.dim():
            check_shape(name, t.shape, p.shape)


def check_shapes(own: dict[str, Tensor], p: Tensor) -> None:
    """Raise if a tensor of a wrapper to load has another shape than its parameter."""
    for name, t in own.items():
        check_shape(name, t.shape, p.shape)
