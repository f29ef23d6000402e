"""Recipes: a rule for each role, as data. A new recipe is a dict, and `soda` anchors any recipe.

A role without a rule of its own follows the rule of its PARENT, and then the rule for "rest".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

from sodaopt import geometry, zoo
from sodaopt._errors import unknown
from sodaopt._names import UNDECAYED, parse
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
PULLED = {"soda": MATRICES, "soda_all": tuple(ROLES), "soda_tied": ("tied",)}
"""The roles that each pull anchors."""


def soda(
    recipe: str | Recipe, only: tuple[str, ...] = MATRICES, decay: Coef = uniform
) -> dict[str, Rule]:
    """Return the anchored form of a recipe. A recipe given by name loses its weight decay.

    only: the roles to anchor. The default is the paper's, the hidden layers. tuple(ROLES) anchors
    every layer.
    decay: strength of the pull, as in zoo.soda.
    """
    base = rules(UNDECAYED.get(recipe, recipe) if isinstance(recipe, str) else recipe)
    return _changed(base, only, lambda method: zoo.soda(method, decay))


def repulled(recipe: Recipe, decay: Coef) -> dict[str, Rule]:
    """Return a recipe of anchored methods with another strength of the pull."""
    found = rules(recipe)
    return _changed(found, found, lambda method: replace(method, lam=decay))


def decayed(
    recipe: str | Recipe, weight_decay: float, only: tuple[str, ...] = MATRICES
) -> dict[str, Rule]:
    """Return a recipe with decoupled weight decay on some roles, by default the hidden layers."""
    return _changed(rules(recipe), only, lambda method: zoo.decayed(method, weight_decay))


def _changed(
    found: dict[str, Rule], only: Iterable[str], change: Callable[[Method], Method]
) -> dict[str, Rule]:
    """Return the rules with another method for some roles. A role without a rule stays without."""
    own = {role: rule for role in only if (rule := rule_of(found, role)) is not None}
    return found | {role: rule._replace(method=change(rule.method)) for role, rule in own.items()}


def rules(recipe: str | Recipe) -> dict[str, Rule]:
    """Return the checked rules of a recipe: a dict, or a name such as "muon" or "soda(muon)"."""
    if isinstance(recipe, str):
        name = parse(recipe, RECIPES, PULLED, kind="recipe")
        if name.pull:
            return soda(name.base, PULLED[name.pull])
        recipe = RECIPES[name.base]
    if not isinstance(recipe, Mapping):
        raise TypeError(f"a recipe is a name such as 'muon' or a dict of roles, got {recipe!r}")
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
