"""The layer plan: which parameter gets which geometry.

    SODA(param_groups(model, "soda_dagger"), lr=2**-12)
    print(plan(model, "muon"))

`roles` finds the role of each parameter, a recipe has a rule for each role, and an override of the
user replaces either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from sodaopt.core.method import Method
from sodaopt.core.validation import check_parameter
from sodaopt.layers.locations import Location, locate, unwrapped
from sodaopt.layers.overrides import FROZEN, Override, match, unclear
from sodaopt.layers.recipes import RECIPES, Recipe, Rule, rules
from sodaopt.layers.roles import HEADS, MATRICES, PARENT, Kind, classify
from sodaopt.layers.table import geometry_label, render
from sodaopt.layers.usage import find_usage
from sodaopt.schedules import Coef

__all__ = ["RECIPES", "Plan", "PlannedParameter", "hidden", "param_groups", "plan"]


@dataclass(frozen=True, eq=False)
class PlannedParameter:
    """One parameter of the plan. A frozen one has no method and is in no group.

    name, aliases: its first name in the model, and the names of its other owners.
    role: the role that the plan found, or that an override gave.
    parameter: the parameter itself.
    method, lr_factor: the rule of the role.
    """

    name: str
    role: str
    parameter: nn.Parameter = field(repr=False)
    aliases: tuple[str, ...] = ()
    method: Method | None = field(default=None, repr=False)
    lr_factor: float | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parameter.shape)

    @property
    def geometry(self) -> str:
        return geometry_label(self.method.geometry) if self.method else ""

    @property
    def radius(self) -> Coef | None:
        """The radius of the norm's ball. Maps without a norm have none."""
        return getattr(self.method.geometry, "radius", None) if self.method else None


@dataclass(frozen=True, eq=False)
class Plan:
    """Every parameter of a model exactly once. `print(plan)` shows it.

    title: the first line of the table.
    rows: a `PlannedParameter` for each parameter.
    notes: the lines below the table, such as inferred heads.

    >>> found = plan(model, "muon")
    >>> [row.role for row in found.rows]
    ['hidden', 'bias', 'hidden', 'bias', 'head', 'bias']
    """

    title: str
    rows: tuple[PlannedParameter, ...]
    notes: tuple[str, ...] = ()

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

    model: only its layers and shapes are read, so it may be on the meta device.
    recipe: a name in RECIPES, "soda(name)", or a dict role -> Method or (Method, lr factor).
    overrides: pattern = a role, "frozen", a view such as split(3), a Method, an lr factor, or a
    tuple of these. Patterns are regular expressions, and the first match wins:

        plan(model, "muon", wpe="hidden", **{r"h\\.\\d+\\.attn\\.c_attn\\.weight": split(3)})

    >>> print(plan(nn.Linear(8, 4), "muon"))
    muon for Linear
    parameter    shape  role  method  geometry  radius  lr factor
    -------------------------------------------------------------
    weight       4x8    head  adam    Diagonal                 10
    bias         4      bias  adam    Diagonal                 10
    -------------------------------------------------------------
    2 parameters, 36 numbers
    inferred heads: weight
    """
    by_role, model = rules(recipe), unwrapped(model)
    found, notes = _classified(model, overrides)
    rows = tuple(_planned(*parts, by_role) for parts in found)
    notes += [f"{row.name} is also {', '.join(row.aliases)}" for row in rows if row.aliases]
    title = f"{recipe} for " * isinstance(recipe, str) + type(model).__name__
    return Plan(title, rows, tuple(notes))


def param_groups(
    model: nn.Module, recipe: str | Recipe = "soda_dagger", /, **overrides: Any
) -> list[dict[str, Any]]:
    """Return groups for `SODA`: every trainable parameter of the model, by its role.

    model, recipe, overrides: as in `plan`.

    >>> [group["name"] for group in param_groups(model, "soda(muon)")]
    ['hidden', 'bias+head']
    """
    return plan(model, recipe, **overrides).groups()


def hidden(model: nn.Module, **overrides: Any) -> list[nn.Parameter]:
    """Return the paper's hidden layers: trainable matrices that are neither tables nor heads.

    model, overrides: as in `plan`. wpe="hidden" adds the parameters with wpe in their name.

    >>> [tuple(p.shape) for p in hidden(model)]
    [(32, 8), (32, 32)]
    """
    found, _ = _classified(unwrapped(model), overrides)
    return [ats[0].parameter for ats, kind, _ in found if kind.role in MATRICES]


def _classified(
    model: nn.Module, overrides: Mapping[str, Any]
) -> tuple[list[tuple[list[Location], Kind, Override]], list[str]]:
    """Return every parameter once, with its role and its override, and a note on inferred roles."""
    locations = locate(model)
    chosen = match(locations, overrides)
    heads = {p for p, override in chosen.items() if override.role in HEADS and p.ndim > 1}
    usage = find_usage(model, locations, heads)
    found, missing = [], []
    for p, ats in locations.items():
        if kind := chosen[p].applied(classify(ats[0], usage), p):
            found.append((ats, kind, chosen[p]))
        else:
            missing.append(ats[0])
    if missing:
        raise ValueError(unclear(missing))
    return found, usage.notes


def _planned(
    locations: list[Location], kind: Kind, override: Override, by_role: Mapping[str, Rule]
) -> PlannedParameter:
    """Give a parameter the rule of its role, changed by its override."""
    p, (role, view) = locations[0].parameter, kind
    names: dict[nn.Module, str] = {}
    for at in locations:
        names.setdefault(at.module, at.name)  # a block that is used twelve times has one name
    name, *aliases = names.values()
    if role == FROZEN:
        return PlannedParameter(name, role, p, tuple(aliases))
    rule = Rule(override.method) if override.method else by_role.get(role)
    if rule is None:
        options = dict.fromkeys((role, PARENT.get(role, role), "rest"))
        raise ValueError(
            f"the recipe has no rule for {name}, whose role is {role!r}. Add one for "
            + " or ".join(map(repr, options))
        )
    method, factor = rule
    if view is not None:
        method = replace(method, geometry=method.geometry.with_view(view))
    if override.lr_factor is not None:
        factor = override.lr_factor
    check_parameter(name, p, method, set())
    return PlannedParameter(name, role, p, tuple(aliases), method, factor)
