"""The layer plan: which parameter gets which geometry.

    SODA(param_groups(model, "soda_dagger"), lr=2**-12)
    print(plan(model, "muon"))

`roles` finds the role of each parameter, and a recipe has a rule for each role. The user replaces
the role or the rule by an override: a regular expression for names, with a role, a view, a method
or an lr factor.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from sodaopt._errors import times, unknown
from sodaopt.core.method import Method
from sodaopt.geometry.views import conv, matrix, split, transposed
from sodaopt.layers.locations import Location, Locations, locate, unwrapped
from sodaopt.layers.recipes import RECIPES, Recipe, Rule, rules
from sodaopt.layers.roles import MATRICES, ROLES, Treatment, classify, family, find_usage
from sodaopt.layers.table import Plan, PlannedParameter

__all__ = ["RECIPES", "Plan", "PlannedParameter", "hidden", "param_groups", "plan"]

FROZEN, CUSTOM = "frozen", "custom"


def plan(model: nn.Module, recipe: str | Recipe = "soda_dagger", /, **overrides: Any) -> Plan:
    """Show how `param_groups` would treat each parameter.

    model: only its layers and shapes are read, so it may be on the meta device.
    recipe: a name in RECIPES, such a name with a pull as in "soda(muon)", or a dict
    role -> Method or (Method, lr factor).
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
    locations = locate(model)
    users = _match(locations, overrides)
    heads = {p for p, user in users.items() if family(user.role) == "head" and p.ndim > 1}
    usage = find_usage(model, locations, heads)
    found = {p: _chosen(p, classify(ats[0], usage), users[p]) for p, ats in locations.items()}
    if missing := [locations[p][0] for p, treatment in found.items() if not treatment.role]:
        raise ValueError(_unclear(missing))
    rows = tuple(_planned(locations[p], treatment, by_role) for p, treatment in found.items())
    aliases = [f"{row.name} is also {', '.join(row.aliases)}" for row in rows if row.aliases]
    title = f"{recipe} for " * isinstance(recipe, str) + type(model).__name__
    return Plan(title, rows, (*usage.notes, *aliases))


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

    Their roles are hidden, conv, experts, router, lora_a and lora_b.

    model, overrides: as in `plan`. wpe="hidden" adds the parameters with wpe in their name.

    >>> [tuple(p.shape) for p in hidden(model)]
    [(32, 8), (32, 32)]
    """
    rows = plan(model, "adam", **overrides).rows  # every recipe finds the same roles
    return [row.parameter for row in rows if row.role in MATRICES]


def _chosen(p: nn.Parameter, found: Treatment, user: Treatment) -> Treatment:
    """Complete the user's treatment of p by the role and the view that the rules found."""
    if not p.requires_grad or user.role == FROZEN:
        return Treatment(FROZEN)
    role = user.role or found.role or (CUSTOM if user.method else "")
    if p.ndim < 2 and family(role) != "vector":
        role = found.role  # lm_head="head" means the weight, not the bias beside it
    if family(role) == "vector":
        return user._replace(role=role, view=None)
    view = found.view
    if view is None and role != found.role:  # the rules do not know how it is stored
        is_table, is_kernel = family(role) == "embedding", role == "conv" or p.ndim > 3
        view = transposed if is_table else conv if is_kernel else None
    if isinstance(user.view, split) and user.view.of is matrix and view is not None:
        user = user._replace(view=replace(user.view, of=view))  # split the layer's own view
    return user._replace(role=role, view=user.view or view)


def _planned(
    locations: list[Location], treatment: Treatment, by_role: Mapping[str, Rule]
) -> PlannedParameter:
    """Return the row of a parameter, with the user's method or else the rule of its role.

    locations: every layer that uses the parameter.
    by_role: the rules of the recipe.
    """
    p, role = locations[0].parameter, treatment.role
    names: dict[nn.Module, str] = {}
    for at in locations:
        names.setdefault(at.module, at.name)  # a layer that is used twelve times has one name
    name, *aliases = names.values()
    if role == FROZEN:
        return PlannedParameter(name, role, p, tuple(aliases))
    rule = Rule(treatment.method) if treatment.method else by_role.get(role)
    if rule is None:
        options = dict.fromkeys((role, family(role), "rest"))
        raise ValueError(
            f"the recipe has no rule for {name}, whose role is {role!r}. Add one for "
            + " or ".join(map(repr, options))
        )
    method = rule.method
    if treatment.view is not None:
        method = replace(method, geometry=method.geometry.with_view(treatment.view))
    factor = rule.lr_factor if treatment.lr_factor is None else treatment.lr_factor
    return PlannedParameter(name, role, p, tuple(aliases), method, factor)


# -- overrides ------------------------------------------------------------------------------------


def _match(locations: Locations, overrides: Mapping[str, Any]) -> dict[nn.Parameter, Treatment]:
    """Map each parameter to the first override whose pattern is in one of its names.

    Raise ValueError if a pattern has no effect.
    """
    found: dict[nn.Parameter, Treatment] = {}
    names = [(at.name, p) for p, ats in locations.items() for at in ats]
    for pattern, value in overrides.items():
        treatment = _parse(pattern, value)
        matched = {p: treatment for name, p in names if re.search(pattern, name)}
        if not matched:
            parts = {part for name, _ in names for part in name.split(".") if not part.isdigit()}
            near = unknown("argument or pattern", pattern, parts)
            raise ValueError(f"no parameter matches: {near}")
        if found.keys() >= matched.keys():
            raise ValueError(
                f"the pattern {pattern!r} has no effect: earlier patterns match all of its "
                "parameters. Put it first."
            )
        found = matched | found
    return dict.fromkeys(locations, Treatment()) | found


PARTS: dict[str, Any] = {"role": str, "method": Method, "lr_factor": int | float, "view": Callable}
"""The parts of an override by their types."""


def _parse(pattern: str, value: Any) -> Treatment:
    """Return the value of an override as a Treatment. The type of each part tells its meaning."""
    try:
        re.compile(pattern)
    except re.error as e:
        raise ValueError(f"{pattern!r} is not a regular expression: {e}") from None
    parts: dict[str, Any] = {}
    for part in value if isinstance(value, tuple) else (value,):
        name = next((name for name, types in PARTS.items() if isinstance(part, types)), None)
        if name is None or isinstance(part, type) or (name == "lr_factor" and not part >= 0):
            raise TypeError(
                f"{pattern!r}: an override is a role, a view such as views.split(3), a Method, an "
                f"lr factor, or a tuple of these, got {part!r}"
            )
        if name == "role" and part not in (*ROLES, FROZEN):
            raise ValueError(f"{pattern!r}: {unknown('role', part, [*ROLES, FROZEN])}")
        parts[name] = part
    return Treatment(**parts)


GUESSES = {2: '"hidden"', 3: '("experts", views.matrix)', 4: '"conv"'}
"""An override for a parameter without a role, by its number of dimensions."""


def _unclear(locations: list[Location]) -> str:
    """Return an error message with the parameters that have no role, and overrides that add one."""
    examples: dict[str, str] = {}
    for at in locations:
        pattern = re.sub(r"\b\d+\b", r"\\d+", re.escape(at.name))
        which = f"{at.name} ({times(at.shape)}) of {type(at.module).__name__}"
        guess = f'**{{r"^{pattern}$": {GUESSES[min(len(at.shape), 4)]}}}'
        examples.setdefault(pattern, f"  {which}, which may be\n    {guess}\n")
    return (
        f"cannot tell the role of {len(locations)} parameter{'s' * (len(locations) > 1)}:\n"
        + "".join(examples.values())
        + 'Use "position" for a table that is added, "vector" for a factor of each entry, '
        "views.transposed for (d_in, d_out), views.heads for (d_in, heads, d_head).\n"
        f"The roles: {', '.join((*ROLES, FROZEN))}"
    )
