"""Recipes: a rule for each role, as data. A new recipe is a dict, and `soda` anchors any recipe.

A role without a rule of its own follows the rule of its PARENT, and then the rule for "rest".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from sodaopt import geometry, zoo
from sodaopt._errors import unknown
from sodaopt.core.method import Method
from sodaopt.geometry import BiasRMS, Norm, Sign, Spectral
from sodaopt.layers.roles import MATRICES, PARENT, ROLES
from sodaopt.schedules import Coef, uniform


class Rule(NamedTuple):
    """The method and the lr factor of a role.

    radius: replaces the radius of the method's geometry, unless it is None.
    """

    method: Method
    radius: float | None = None
    lr_factor: float = 1.0


Recipe: TypeAlias = Mapping[str, Rule | Method | tuple[Any, ...]]


def _layerwise(row: Callable[[Norm], Method]) -> dict[str, Rule]:
    """Sign -> Spectral -> Sign, and BiasRMS for vectors, with the paper's radii.

    The paper ties the embedding to the head, so it has no radius for a separate first layer. The
    radius 1 for that and the hidden layers' radius for vectors are those of Scion's code.
    """
    return {
        "embedding": Rule(row(Sign(geometry.one_hot)), 1.0),
        "hidden": Rule(row(Spectral(geometry.dense)), 50.0),
        "head": Rule(row(Sign(geometry.dense)), 3000.0),
        "depthwise": Rule(row(Sign(geometry.dense)), 50.0),
        "vector": Rule(row(BiasRMS()), 50.0),
    }


BETAS = (0.9, 0.95)
RECIPES: dict[str, Recipe] = {
    "soda_dagger": _layerwise(zoo.soda_dagger),
    "scion": _layerwise(zoo.scion),
    "uscion": _layerwise(zoo.uscion),
    "muon": {
        "hidden": Rule(zoo.muon(scale=geometry.rms)),
        "rest": Rule(zoo.adam(BETAS), lr_factor=10.0),
    },
    "adam": {"rest": Rule(zoo.adam(BETAS))},
    "adamw": {"vector": Rule(zoo.adam(BETAS)), "rest": Rule(zoo.adamw(BETAS))},
    "lion": {"rest": Rule(zoo.lion())},
}
UNDECAYED = {"scion": "uscion", "adamw": "adam"}
"""The same recipe without weight decay: soda() pulls to the initial weights instead."""


def soda(
    recipe: str | Recipe, only: tuple[str, ...] = MATRICES, decay: Coef = uniform
) -> dict[str, Rule]:
    """Return the anchored form of a recipe. A recipe given by name loses its weight decay.

    only: the roles to anchor. The default is the paper's, the hidden layers. tuple(ROLES) anchors
    every layer.
    decay: strength of the pull, as in zoo.soda.
    """
    base = rules(UNDECAYED.get(recipe, recipe) if isinstance(recipe, str) else recipe)
    anchored = {
        role: rule._replace(method=zoo.soda(rule.method, decay))
        for role in only
        if (rule := rule_of(base, role)) is not None
    }
    return base | anchored


def rules(recipe: str | Recipe) -> dict[str, Rule]:
    """Return the checked rules of a recipe: a dict, or a name such as "muon" or "soda(muon)"."""
    if isinstance(recipe, str):
        if anchored := re.fullmatch(r"soda\((.+)\)", recipe):
            return soda(anchored[1])
        if recipe not in RECIPES:
            known = [*RECIPES, *(f"soda({name})" for name in RECIPES if name != "soda_dagger")]
            raise ValueError(unknown("recipe", recipe, known))
        recipe = RECIPES[recipe]
    for role in recipe:
        if role not in (*ROLES, "rest"):
            raise ValueError(unknown("role", role, [*ROLES, "rest"]))
    return {role: _as_rule(role, value) for role, value in recipe.items()}


def _as_rule(role: str, value: Any) -> Rule:
    rule = Rule(*value) if isinstance(value, tuple) else Rule(value)
    if not isinstance(rule.method, Method):
        raise TypeError(
            f"{role!r}: a rule is a Method such as zoo.muon(), or (Method, radius, lr factor), got "
            f"{value!r}. The radius None keeps the method's own."
        )
    return rule


def rule_of(recipe: Mapping[str, Rule], role: str) -> Rule | None:
    """Return the rule of the role, else of its parent, else of "rest", else None."""
    names = (role, PARENT.get(role, role), "rest")
    return next((recipe[name] for name in names if name in recipe), None)
