"""The layer plan: which parameter gets which geometry.

    SODA(param_groups(model, "soda_dagger"), lr=2**-12)
    print(plan(model, "muon"))

`roles` says what each parameter is, a recipe how it is then trained, and an override what the user
knows better.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from sodaopt import geometry
from sodaopt.core.method import Method
from sodaopt.core.optimizer import SODA
from sodaopt.geometry import Ball, Clip, Geometry, MultiNorm, Norm, Sharp
from sodaopt.geometry.views import View, elements, matrix
from sodaopt.layers.overrides import CUSTOM, FROZEN, Found, Override, sort
from sodaopt.layers.recipes import RECIPES, Recipe, Rule, rule_of, rules, soda
from sodaopt.layers.roles import MATRICES, PARENT, unwrapped
from sodaopt.layers.table import geometry_label, render
from sodaopt.parallel import sharded
from sodaopt.schedules import Coef

__all__ = [
    "RECIPES", "Plan", "Recipe", "Row", "Rule", "hidden", "param_groups", "plan", "soda",
]  # fmt: skip

# -- from a rule to the method of one parameter ---------------------------------------------------


def _fitted(method: Method, radius: float | None, view: View | None) -> Method:
    """The method with this radius, seeing the parameter as it is stored."""
    g: Geometry = method.geometry
    if isinstance(g, Ball | Sharp | Clip):
        g = replace(g, norm=_seen(g.norm, view), radius=g.radius if radius is None else radius)
    elif radius is not None:
        raise ValueError(f"{method.name} has no norm, so it cannot have the radius {radius}")
    elif isinstance(g, MultiNorm) and view is not None and g.view is matrix:
        g = replace(g, view=view)
    return replace(method, geometry=g)


def _seen(norm: Norm, view: View | None) -> Norm:
    """The norm with the view of the layer, where the norm has not chosen one and it matters."""
    if view is None or norm.view not in (matrix, elements):
        return norm
    if norm.elementwise and (norm.scale is not geometry.dense or view is not geometry.transposed):
        return norm  # the sign of a kernel has factor 1, and the others need no d_in
    return replace(norm, view=view)


def _method(found: Found, recipe: Mapping[str, Rule]) -> tuple[Method, float]:
    choice, name = found.choice, found.holders[0]
    rule = rule_of(recipe, found.role)
    if choice.method is not None:
        rule = Rule(choice.method)
    if rule is None:
        options = dict.fromkeys((found.role, PARENT.get(found.role, found.role), "rest"))
        raise ValueError(
            f"the recipe has no rule for {name}, whose role is {found.role!r}: add one for "
            + " or ".join(map(repr, options))
        )
    factor = rule.lr_factor if choice.lr_factor is None else choice.lr_factor
    return _fitted(rule.method, rule.radius, found.view), factor


# -- the plan -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Row:
    """One parameter of the plan. A frozen one has no method, and is in no group."""

    name: str
    shape: tuple[int, ...]
    role: str
    method: Method | None = field(repr=False)
    lr_factor: float | None
    state_bytes: int
    parameter: nn.Parameter = field(repr=False)
    aliases: tuple[str, ...] = ()

    @property
    def geometry(self) -> str:
        return geometry_label(self.method.geometry) if self.method else ""

    @property
    def radius(self) -> Coef | None:
        g = self.method.geometry if self.method else None
        return g.radius if isinstance(g, Ball | Sharp | Clip) else None


@dataclass(frozen=True, eq=False)
class Plan:
    """Every parameter of a model exactly once. `print(plan)` shows it."""

    title: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    @cached_property
    def state_bytes(self) -> int:
        """What the optimizer will keep, over all ranks."""
        return sum(row.state_bytes for row in self.rows)

    def groups(self) -> list[dict[str, Any]]:
        """Groups for SODA: one for each method and lr factor, in order of their first parameter."""
        merged: dict[tuple[Method, float], list[Row]] = {}
        for row in self.rows:
            if row.method is not None and row.lr_factor is not None:
                merged.setdefault((row.method, row.lr_factor), []).append(row)
        groups: list[dict[str, Any]] = []
        for (method, factor), rows in merged.items():
            name = "+".join(dict.fromkeys(row.role for row in rows))
            count = sum(g["name"].split("#")[0] == name for g in groups)
            groups.append(
                {
                    "params": [(row.name, row.parameter) for row in rows],
                    "method": method,
                    "lr_factor": factor,
                    "name": f"{name}#{count + 1}" if count else name,
                }
            )
        return groups

    def init_(self, seed: int = 0, radius: float | None = None) -> list[str]:
        """Scion's initialisation: each weight a random point on the sphere of its norm and radius,
        each bias zero. Returns the names of what it filled.

        radius, if given, replaces every row's own. Gains, scalars, other vectors, adapters and
        frozen parameters stay as they are, and so does every row whose scale is not one of the
        paper's width factors (Muon's, Adam's).
        """
        rng = torch.Generator().manual_seed(seed)  # the same numbers on every rank
        rows = [row for row in self.rows if _has_init(row)]
        if not rows:
            raise ValueError(
                f"{self.title}: nothing here has a norm-matched initialisation; plan it with "
                "scion, uscion or soda_dagger, and train it as you like"
            )
        for row in rows:
            _init_(row, rng, radius)
        return [row.name for row in rows]

    def table(self, full: bool = False) -> str:
        """The plan as text: layers that repeat on one line, or each parameter on its own."""
        return render(self.title, self.rows, self.notes, full)

    def __str__(self) -> str:
        return self.table()


def plan(model: nn.Module, recipe: str | Recipe = "soda_dagger", /, **overrides: Override) -> Plan:
    """What `param_groups` would do, as a table of rows.

    recipe: a name in RECIPES, "soda(name)", or a dict role -> Method or (Method, radius,
    lr factor). overrides: pattern = a role, "frozen", a view such as split(3), a Method, an lr
    factor, or a tuple of these; patterns are regular expressions, and the first match wins:

        plan(model, "muon", wpe="hidden", **{r"h\\.\\d+\\.attn\\.c_attn\\.weight": split(3)})
    """
    known = rules(recipe)
    found, notes = sort(model, overrides)
    rows = tuple(_row(f, known) for f in found)
    for row in rows:
        if row.aliases:
            notes.append(f"{row.name} is also {', '.join(row.aliases)}")
    name = recipe if isinstance(recipe, str) else "recipe"
    return Plan(f"{name} for {type(unwrapped(model)).__name__}", rows, tuple(notes))


def param_groups(
    model: nn.Module, recipe: str | Recipe = "soda_dagger", /, **overrides: Override
) -> list[dict[str, Any]]:
    """Groups for `SODA`: every trainable parameter of the model, by its role. See `plan`."""
    return plan(model, recipe, **overrides).groups()


def hidden(model: nn.Module, **overrides: Override) -> list[nn.Parameter]:
    """The paper's hidden layers: every trainable matrix but embeddings and heads."""
    return [f.p for f in sort(model, overrides)[0] if f.role in MATRICES]


def _row(found: Found, recipe: Mapping[str, Rule]) -> Row:
    name, *aliases = found.holders
    method, factor, kept = None, None, 0
    if found.role != FROZEN:
        method, factor = _method(found, recipe)
        kept = _state_bytes(name, found.p, method)
    shape = tuple(found.p.shape)
    return Row(name, shape, found.role, method, factor, kept, found.p, tuple(aliases))


def _state_bytes(name: str, p: Tensor, method: Method) -> int:
    """What the optimizer itself makes for such a parameter, which also checks that it fits."""
    like = nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"))
    state = SODA([(name, like)], 1e-6, method).state[like]
    return sum(t.numel() * t.element_size() for t in state.values())


KEPT_BY_INIT = ("norm", "scalar", "vector", "lora_a", "lora_b", CUSTOM)


def _has_init(row: Row) -> bool:
    g = row.method.geometry if row.method else None
    if not isinstance(g, Ball | Sharp | Clip) or row.role in KEPT_BY_INIT:
        return False
    return g.norm.scale in (geometry.dense, geometry.one_hot)


@torch.no_grad()
def _init_(row: Row, rng: torch.Generator, radius: float | None) -> None:
    p, local = row.parameter, sharded.local(row.parameter)
    if local.is_meta:
        raise ValueError(f"{row.name} is on the meta device: materialise the model first")
    g = row.method.geometry if row.method else None
    assert isinstance(g, Ball | Sharp | Clip)
    g = g if radius is None else replace(g, radius=radius)
    w = g.init_(torch.empty(p.shape), rng)
    local.copy_(sharded.scatter(w.to(local.device), p))
