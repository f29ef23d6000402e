"""The layer plan: which parameter gets which geometry.

    SODA(param_groups(model, "soda_dagger"), lr=2**-12)
    print(plan(model, "muon"))

`roles` finds the role of each parameter, a recipe has a rule for each role, and an override of the
user replaces either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from sodaopt.core.method import Method
from sodaopt.core.optimizer import SODA
from sodaopt.geometry import Ball, Clip, Sharp
from sodaopt.geometry.views import View
from sodaopt.layers.locations import unwrapped
from sodaopt.layers.overrides import FROZEN, ClassifiedParameter, classify_all
from sodaopt.layers.recipes import RECIPES, Recipe, Rule, rule_of, rules
from sodaopt.layers.roles import MATRICES, PARENT
from sodaopt.layers.table import geometry_label, render
from sodaopt.schedules import Coef

__all__ = ["RECIPES", "Plan", "PlannedParameter", "hidden", "param_groups", "plan"]


@dataclass(frozen=True, eq=False)
class PlannedParameter:
    """One parameter of the plan. A frozen one has no method and is in no group."""

    name: str
    shape: tuple[int, ...]
    role: str
    method: Method | None = field(repr=False)
    lr_factor: float | None
    state_bytes: int
    parameter: nn.Parameter = field(repr=False)
    aliases: tuple[str, ...] = ()

    @property
    def norm_map(self) -> Ball | Sharp | Clip | None:
        """The geometry if it is the map of a norm, else None."""
        g = self.method.geometry if self.method else None
        return g if isinstance(g, Ball | Sharp | Clip) else None

    @property
    def geometry(self) -> str:
        return geometry_label(self.method.geometry) if self.method else ""

    @property
    def radius(self) -> Coef | None:
        return self.norm_map.radius if self.norm_map else None


@dataclass(frozen=True, eq=False)
class Plan:
    """Every parameter of a model exactly once. `print(plan)` shows it.

    >>> found = plan(model, "muon")
    >>> [row.role for row in found.rows]
    ['hidden', 'bias', 'hidden', 'bias', 'head', 'bias']
    """

    title: str
    rows: tuple[PlannedParameter, ...]
    notes: tuple[str, ...] = ()

    @cached_property
    def state_bytes(self) -> int:
        """The size of the optimizer's state, over all ranks."""
        return sum(row.state_bytes for row in self.rows)

    def groups(self) -> list[dict[str, Any]]:
        """Return groups for SODA: one for each method and lr factor, in order of appearance."""
        merged: dict[tuple[Method, float], list[PlannedParameter]] = {}
        for row in self.rows:
            if row.method is not None and row.lr_factor is not None:
                merged.setdefault((row.method, row.lr_factor), []).append(row)
        groups: list[dict[str, Any]] = []
        for (method, factor), rows in merged.items():
            name = "+".join(dict.fromkeys(row.role for row in rows))
            count = sum(g["name"].split("#")[0] == name for g in groups)
            name += f"#{count + 1}" if count else ""
            params = [(row.name, row.parameter) for row in rows]
            groups.append({"params": params, "method": method, "lr_factor": factor, "name": name})
        return groups

    def table(self, full: bool = False) -> str:
        """Return the plan as text, with repeated layers on one line unless `full`."""
        return render(self.title, self.rows, self.notes, full)

    def __str__(self) -> str:
        return self.table()


def plan(model: nn.Module, recipe: str | Recipe = "soda_dagger", /, **overrides: Any) -> Plan:
    """Show how `param_groups` would treat each parameter.

    recipe: a name in RECIPES, "soda(name)", or a dict role -> Method or (Method, radius,
    lr factor).
    overrides: pattern = a role, "frozen", a view such as split(3), a Method, an lr factor, or a
    tuple of these. Patterns are regular expressions, and the first match wins:

        plan(model, "muon", wpe="hidden", **{r"h\\.\\d+\\.attn\\.c_attn\\.weight": split(3)})

    >>> print(plan(nn.Linear(8, 4), "muon"))
    muon for Linear
    parameter    shape  role  method  geometry  radius  lr factor  state
    --------------------------------------------------------------------
    weight       4x8    head  adam    Diagonal                 10  264 B
    bias         4      bias  adam    Diagonal                 10   40 B
    --------------------------------------------------------------------
    2 parameters, 36 numbers, 304 B of state
    inferred heads: weight
    """
    known = rules(recipe)
    found, notes = classify_all(model, overrides)
    rows = tuple(_planned(f, known) for f in found)
    notes += [f"{row.name} is also {', '.join(row.aliases)}" for row in rows if row.aliases]
    title = type(unwrapped(model)).__name__
    return Plan(f"{recipe} for {title}" if isinstance(recipe, str) else title, rows, tuple(notes))


def param_groups(
    model: nn.Module, recipe: str | Recipe = "soda_dagger", /, **overrides: Any
) -> list[dict[str, Any]]:
    """Return groups for `SODA`: every trainable parameter of the model, by its role. See `plan`.

    >>> [group["name"] for group in param_groups(model, "soda(muon)")]
    ['hidden', 'bias+head']
    """
    return plan(model, recipe, **overrides).groups()


def hidden(model: nn.Module, **overrides: Any) -> list[nn.Parameter]:
    """Return the paper's hidden layers: trainable matrices that are neither tables nor heads.

    >>> [tuple(p.shape) for p in hidden(model)]
    [(32, 8), (32, 32)]
    """
    return [f.parameter for f in classify_all(model, overrides)[0] if f.kind.role in MATRICES]


# -- from a rule to the method of one parameter ---------------------------------------------------


def _planned(found: ClassifiedParameter, recipe: Mapping[str, Rule]) -> PlannedParameter:
    p, (role, view), (name, *aliases) = found.parameter, found.kind, found.names
    method, factor, size = None, None, 0
    if role != FROZEN:
        rule = _rule(found, recipe)
        method, factor = _fitted(rule.method, rule.radius, view), rule.lr_factor
        size = _state_bytes(name, p, method)
    return PlannedParameter(name, tuple(p.shape), role, method, factor, size, p, tuple(aliases))


def _rule(found: ClassifiedParameter, recipe: Mapping[str, Rule]) -> Rule:
    """Return the recipe's rule for the parameter, changed by its override."""
    role, override = found.kind.role, found.override
    rule = Rule(override.method) if override.method else rule_of(recipe, role)
    if rule is None:
        options = dict.fromkeys((role, PARENT.get(role, role), "rest"))
        raise ValueError(
            f"the recipe has no rule for {found.names[0]}, whose role is {role!r}. Add one for "
            + " or ".join(map(repr, options))
        )
    return rule if override.lr_factor is None else rule._replace(lr_factor=override.lr_factor)


def _fitted(method: Method, radius: float | None, view: View | None) -> Method:
    """Return the method with this radius and with the view of the layer."""
    g = method.geometry if view is None else method.geometry.with_view(view)
    if radius is not None:
        if not isinstance(g, Ball | Sharp | Clip):
            raise ValueError(f"{method.name} has no norm, so it cannot have the radius {radius}")
        g = replace(g, radius=radius)
    return replace(method, geometry=g)


def _state_bytes(name: str, p: Tensor, method: Method) -> int:
    """Measure the state on the meta device, which also checks that the method fits the shape."""
    like = nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"))
    state = SODA([(name, like)], 1e-6, method).state[like]
    return sum(t.numel() * t.element_size() for t in state.values())
