"""Recipes: a rule for each role, as data. A new recipe is a dict, and `soda` anchors any recipe.

If a recipe has no rule for a role, the rule of the role's PARENT applies, or else the rule "rest".
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, TypeAlias

from sodaopt import geometry, zoo
from sodaopt._errors import unknown
from sodaopt._names import every_name, parse
from sodaopt.core.method import Method
from sodaopt.layers.roles import MATRICES, ROLES, family
from sodaopt.schedules import Coef, uniform


class Rule(NamedTuple):
    """The method and the lr factor of a role."""

    method: Method
    lr_factor: float = 1.0


Recipe: TypeAlias = Mapping[str, Rule | Method | tuple[Method, float]]


def _layerwise(row: Callable[..., Method]) -> dict[str, Method]:
    """Return the recipe Sign -> Spectral -> Sign, and BiasRMS for vectors, with the paper's radii.

    The paper ties the embedding to the head, so it has no radius for a separate embedding. Scion's
    code uses the radius 1 for it, and the hidden layers' radius for vectors.

    row: a function (norm, radius) -> Method, such as zoo.scion.
    """
    return {
        "embedding": row(geometry.Sign(geometry.one_hot), radius=1.0),
        "hidden": row(geometry.Spectral(geometry.dense), radius=50.0),
        "head": row(geometry.Sign(geometry.dense), radius=3000.0),
        "depthwise": row(geometry.Sign(geometry.dense), radius=50.0),
        "vector": row(geometry.BiasRMS(), radius=50.0),
    }


BETAS = (0.9, 0.95)
RECIPES: dict[str, Recipe] = {
    "soda_dagger": _layerwise(zoo.soda_dagger),
    "scion": _layerwise(zoo.scion),
    "uscion": _layerwise(zoo.uscion),
    "muon": {"hidden": zoo.muon(scale=geometry.rms), "rest": (zoo.adam(BETAS), 10.0)},
    "adam": {"rest": zoo.adam(BETAS)},
    "adamw": {"vector": zoo.adam(BETAS), "rest": zoo.adamw(BETAS)},
    "lion": {"rest": zoo.lion()},
}
PULLED = {"soda": MATRICES, "soda_all": tuple(ROLES), "soda_tied": ("tied",)}
"""The roles that each pull anchors."""


def rules(recipe: str | Recipe) -> dict[str, Rule]:
    """Return the rule of each role that has one.

    recipe: a dict, or a name such as "muon" or "soda(muon)".
    """
    if isinstance(recipe, str):
        name = parse(recipe, every_name(RECIPES, PULLED), "recipe")
        return soda(RECIPES[name.undecayed], PULLED.get(name.pull or "", ()))
    if not isinstance(recipe, Mapping):
        raise TypeError(f"a recipe is a name such as 'muon' or a dict of roles, got {recipe!r}")
    own = {role: _as_rule(role, value) for role, value in recipe.items()}
    found = {r: own.get(r) or own.get(family(r)) or own.get("rest") for r in ROLES}
    return {role: rule for role, rule in found.items() if rule}


def _as_rule(role: str, value: Any) -> Rule:
    if role not in (*ROLES, "rest"):
        raise ValueError(unknown("role", role, [*ROLES, "rest"]))
    match value if isinstance(value, tuple) else (value,):
        case [Method()] | [Method(), int() | float()] as parts:
            return Rule(*parts)
    raise TypeError(
        f"{role!r}: a rule is a Method such as zoo.muon(), or (Method, lr factor), got {value!r}"
    )


def soda(
    recipe: str | Recipe, only: Collection[str] = MATRICES, decay: Coef = uniform
) -> dict[str, Rule]:
    """Return a recipe with the pull toward the initial weights added.

    recipe: a name, or a dict role -> Method or (Method, lr factor), without weight decay.
    only: the roles to anchor. The default is the paper's, the hidden layers. tuple(ROLES) anchors
    every layer.
    decay: strength of the pull, as in zoo.soda.
    """
    return changed(recipe, only, lambda method: zoo.soda(method, decay))


def decayed(recipe: str | Recipe, weight_decay: float) -> dict[str, Rule]:
    """Return a recipe with decoupled weight decay on the hidden layers."""
    return changed(recipe, MATRICES, lambda method: zoo.decayed(method, weight_decay))


def changed(
    recipe: str | Recipe, only: Collection[str], change: Callable[[Method], Method]
) -> dict[str, Rule]:
    """Return a recipe with other methods for some roles.

    only: the roles to change.
    change: a function from the old method to the new one.
    """
    return {
        role: rule._replace(method=change(rule.method)) if role in only else rule
        for role, rule in rules(recipe).items()
    }
