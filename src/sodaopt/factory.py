"""Build an optimizer for a model by its name, such as "soda(muon)"."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from sodaopt._errors import count
from sodaopt._names import ANCHORED, Name, every_name, parse
from sodaopt.anchors import Anchor, AnchorName
from sodaopt.core.optimizer import SODA
from sodaopt.core.validation import check_lr
from sodaopt.layers import recipes
from sodaopt.layers.plan import plan
from sodaopt.layers.recipes import PULLED, RECIPES, Recipe, Rule
from sodaopt.layers.roles import ROLES
from sodaopt.schedules import Coef, after, uniform
from sodaopt.wrappers.averages import GPA, SNOO, Lookahead, ScheduleFree
from sodaopt.wrappers.base import Wrapper

AVERAGED: dict[str, Callable[[Optimizer], Wrapper]] = {
    "schedule_free": ScheduleFree,
    "gpa": GPA,
    "lookahead": Lookahead,
    "snoo": SNOO,
}
LR = {
    "soda_dagger": 2**-12,
    "scion": 2**-12,
    "uscion": 2**-12,
    "muon": 2**-11,
    "adam": 2**-9,
    "adamw": 2**-9,
    "lion": 2**-12,
}
"""The learning rate of each base in the paper's runs of GPTs. Lion's is ours."""


def names() -> list[str]:
    """Return every name that `optimizer` knows.

    A name is a base, a pull around a base, or an average around either of them:

        bases      soda_dagger scion uscion muon adam adamw lion
        pulls      soda (hidden layers), soda_all (every layer), soda_tied (a tied embedding)
        averages   schedule_free gpa lookahead snoo

    >>> {"muon", "soda(muon)", "gpa(soda(muon))"} <= set(sodaopt.names())
    True
    """
    known = every_name(RECIPES, PULLED, AVERAGED)
    return [text for text, name in known.items() if not name.is_anchored_twice]


def parse_name(text: str) -> Name:
    """Parse a name of `names()`."""
    if not isinstance(text, str):
        raise TypeError(f"the name of an optimizer must be text such as 'muon', got {text!r}")
    return parse(text, every_name(RECIPES, PULLED, AVERAGED))


def optimizer(
    model: nn.Module,
    name: str,
    /,
    lr: float | Tensor | None = None,
    *,
    decay: Coef | None = None,
    start: int = 0,
    anchor: AnchorName | Anchor | None = None,
    weight_decay: float | None = None,
    process_group: Any = None,
    show: bool = False,
    **overrides: Any,
) -> SODA | Wrapper:
    """Build the optimizer with this name for a model, with a method for each layer.

    >>> opt = sodaopt.optimizer(model, "soda(muon)", lr=2**-11, start=100)
    >>> [group["method"] for group in opt.param_groups]
    ['soda(muon)', 'adam']

    model: the model to train. Its trainable parameters are in the optimizer, except parameters that
    an override freezes.
    name: one of `names()`. A pull is part of the methods, as in `param_groups`. An average is a
    wrapper around `SODA`.
    lr: the learning rate. None: the paper's for this base, which was tuned for its GPTs. Lion's is
    ours. If lr is a tensor, every group with an lr factor has a tensor of its own. To change lr in
    place, change the tensor of every group.
    decay: strength of the pull, in [0, 1]: a number or a function of (k, lr). None: the paper's
    1/(k+2), `schedules.uniform`.
    start: steps before the pull begins (a warmup).
    anchor: where z0 is kept, see `sodaopt.anchors`. None: a clone.
    weight_decay: replaces the weight decay of adam, adamw, muon or lion. It acts on hidden layers.
    process_group: the ranks that share the work under DDP, as in `SODA`.
    show: print the layer plan.
    overrides: patterns for parameters, as in `plan`. The method of an override is used as it is:
    zoo.soda(zoo.adam()) pulls, and zoo.adam() does not.
    """
    parsed = parse_name(name)
    count("start", start, 0)
    check_pull(parsed, decay=decay, start=start or None, anchor=anchor)
    lr = LR[parsed.base] if lr is None else lr
    check_lr(lr, str(parsed))
    lam = uniform if decay is None else decay
    rules = pulled_rules(parsed, base_rules(parsed, weight_decay), lam, start)
    planned = plan(model, rules, **overrides)
    roles = PULLED.get(parsed.pull or "", ())
    if roles and not any(row.role in roles for row in planned.rows):
        raise ValueError(f"{parsed} has no parameter to pull: no role of the model is in {roles}")
    if show:
        print(f"{parsed} with lr {float(lr):g} for {planned}")
    where = "clone" if anchor is None else anchor
    opt = SODA(planned.groups(), lr, anchor=where, process_group=process_group)
    return AVERAGED[parsed.average](opt) if parsed.average else opt


def check_pull(name: Name, **settings: Any) -> None:
    """Raise if a setting of the pull is given for a name without a pull.

    settings: the settings by name. A setting that is None is not given.
    """
    for key, value in settings.items():
        if value is not None and not name.is_anchored:
            raise ValueError(
                f"{name} has no pull, so {key}={value!r} would be ignored: leave it out, or use a "
                "name with a pull, such as soda_dagger or soda(...)"
            )


def base_rules(name: Name, weight_decay: float | None) -> dict[str, Rule]:
    """Return the rules of the base with this weight decay, before `pulled_rules` adds the pull.

    weight_decay: if it is None, the base keeps its own, or has none if the name has a pull.
    """
    if weight_decay is None:
        return recipes.rules(name.undecayed)
    return recipes.decayed("adam" if name.base == "adamw" else name.undecayed, weight_decay)


def pulled_rules(name: Name, base: Recipe, decay: Coef, start: int) -> dict[str, Rule]:
    """Return the rules of the base with the pull of the name, which begins at step `start`."""
    lam = after(decay, start) if start else decay
    if name.base in ANCHORED and not name.pull:  # the base has a pull of its own
        return recipes.changed(base, ROLES, lambda method: replace(method, lam=lam))
    return recipes.soda(base, PULLED.get(name.pull or "", ()), lam)
