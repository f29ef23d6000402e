"""Build an optimizer for a model by its name, such as "soda(muon)"."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
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
from sodaopt.schedules import Coef, after, uniform
from sodaopt.wrappers.averages import GPA, SNOO, Lookahead, ScheduleFree
from sodaopt.wrappers.base import Wrapper
from sodaopt.wrappers.soda import SODAWrapper

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
"""The paper's learning rates of its GPTs by base, and one for Lion."""


def names() -> list[str]:
    """Return every name that `optimizer` knows.

    A name is a base, a pull around a base, or an average around either of them:

        bases      soda_dagger scion uscion muon adam adamw lion
        pulls      soda (hidden layers), soda_all (every layer), soda_tied (a tied embedding)
        averages   schedule_free gpa lookahead snoo

    >>> {"muon", "soda(muon)", "gpa(soda(muon))"} <= set(sodaopt.names())
    True
    """
    return every_name(RECIPES, PULLED, AVERAGED)


def parse_name(text: str) -> Name:
    """Parse a name of `names()`."""
    return parse(text, RECIPES, PULLED, AVERAGED)


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
    """Build the optimizer with this name for a model: plan, groups, optimizer and wrapper.

    >>> opt = sodaopt.optimizer(model, "soda(muon)", lr=2**-11, start=100)
    >>> type(opt).__name__, type(opt.base).__name__
    ('SODAWrapper', 'SODA')

    name: one of `names()`. A pull is a `SODAWrapper`, and an average its own wrapper. Inside an
    average the pull is part of the methods, as in `param_groups(model, "soda(muon)")`.
    lr: None is the paper's for the base, found for its GPTs. A group with an lr factor has a tensor
    of its own: to change a tensor in place, change every group["lr"].
    decay: strength of the pull. None is the paper's 1/(k+2), `schedules.uniform`.
    start: steps before the pull begins (a warmup).
    anchor: where z0 lives, see `sodaopt.anchors`.
    weight_decay: replaces that of adam, adamw, muon or lion, and acts on hidden layers.
    process_group: the ranks that share the work under DDP, as in `SODA`.
    show: print the layer plan.
    overrides: patterns for parameters, as in `plan`.
    """
    parsed = parse_name(name)
    count("start", start, 0)
    check_pull(parsed, decay=decay, start=start or None, anchor=anchor)
    rules = base_rules(parsed, weight_decay)
    roles = PULLED.get(parsed.pull or "", ())
    lr = LR[parsed.base] if lr is None else lr
    check_lr(lr, str(parsed))
    if show:
        shown = recipes.soda(rules, roles)
        print(f"{parsed} with lr {float(lr):g} for {plan(model, shown, **overrides)}")
    return assemble(
        model,
        parsed,
        rules,
        lr,
        roles,
        decay=uniform if decay is None else decay,
        start=start,
        anchor=anchor,
        process_group=process_group,
        overrides=overrides,
    )


def check_pull(name: Name, **settings: Any) -> None:
    """Raise if the name has no pull, and a setting of the pull is not None."""
    for key, value in settings.items():
        if value is not None and not name.is_anchored:
            raise ValueError(
                f"{key} is {value}: only soda_dagger and soda(...) have it, not {name}"
            )


def base_rules(name: Name, weight_decay: float | None) -> dict[str, Rule]:
    """Return the rules of the base, without the pull and with this weight decay."""
    if weight_decay is None:
        return recipes.rules(name.undecayed)
    return recipes.decayed("adam" if name.base == "adamw" else name.undecayed, weight_decay)


def assemble(
    model: nn.Module,
    name: Name,
    rules: Recipe,
    lr: float | Tensor,
    roles: Collection[str] = (),
    *,
    decay: Coef = uniform,
    start: int = 0,
    anchor: AnchorName | Anchor | None = None,
    process_group: Any = None,
    overrides: Mapping[str, Any] = MappingProxyType({}),
    wrapper: Callable[..., Wrapper] = SODAWrapper,
) -> SODA | Wrapper:
    """Build the optimizer of a parsed name from the rules of its base.

    roles: the roles to pull.
    wrapper: the class that pulls them.
    """
    delayed = after(decay, start) if start else decay
    if name.base in ANCHORED:
        rules = recipes.repulled(rules, delayed)
    elif name.average:  # wrappers do not nest, so the methods pull
        rules = recipes.soda(rules, tuple(roles), delayed)
    planned = plan(model, rules, **overrides)
    pulled = [row.parameter for row in planned.rows if row.role in roles]
    if roles and not pulled:
        raise ValueError(f"{name} has no parameter to pull: no role of the model is in {roles}")
    for row in planned.rows if name.average else ():
        if row.role in roles and row.method is not None and row.method.centre != "init":
            raise ValueError(
                f"{row.name} is to be pulled in {name}, and {row.method.name} does not pull: "
                f"override it with zoo.soda({row.method.name})"
            )
    anchors: dict[str, Any] = {} if anchor is None else {"anchor": anchor}
    wraps = roles and not name.average
    opt = SODA(planned.groups(), lr, process_group=process_group, **({} if wraps else anchors))
    if wraps:
        return wrapper(opt, only=pulled, decay=decay, start=start, **anchors)
    return AVERAGED[name.average](opt) if name.average else opt
