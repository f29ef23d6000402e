"""The role of each parameter, from the model and from the user's overrides.

An override is a regular expression for names, with a role, a view, a method or an lr factor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from sodaopt._errors import times, unknown
from sodaopt.core.method import Method
from sodaopt.geometry.views import Shape, View, conv, matrix, split, transposed
from sodaopt.layers.locations import Location, Locations, locate
from sodaopt.layers.roles import HEADS, ROLES, TABLES, VECTORS, Kind, classify
from sodaopt.layers.usage import Usage, find_usage

FROZEN, CUSTOM = "frozen", "custom"


class Override(NamedTuple):
    """The parts of an override. None keeps the plan's own choice."""

    role: str | None = None
    view: View | None = None
    method: Method | None = None
    lr_factor: float | None = None


class ClassifiedParameter(NamedTuple):
    """A parameter, its name in each module that holds it, and its role and view."""

    parameter: nn.Parameter
    names: list[str]
    kind: Kind
    override: Override


def classify_all(
    model: nn.Module, overrides: Mapping[str, Any]
) -> tuple[list[ClassifiedParameter], list[str]]:
    """Return every parameter of the model exactly once, and a note on each inferred role.

    The keys of `overrides` are searched in a parameter's names, and the first that matches wins. A
    parameter whose role is unclear is an error, and so is a pattern without effect.
    """
    locations = locate(model)
    chosen = _match(locations, overrides)
    heads = {p for p, override in chosen.items() if override.role in HEADS and p.ndim > 1}
    usage = find_usage(model, locations, heads)
    found, unclear = [], []
    for p, ats in locations.items():
        if kind := _kind(ats[0], usage, chosen[p]):
            found.append(ClassifiedParameter(p, _distinct_names(ats), kind, chosen[p]))
        else:
            unclear.append(ats[0])
    if unclear:
        raise ValueError(_unclear_message(unclear))
    return found, usage.notes


def _match(locations: Locations, overrides: Mapping[str, Any]) -> dict[nn.Parameter, Override]:
    """Map each parameter to the first override whose pattern is in one of its names."""
    parsed = {pattern: _parse(pattern, value) for pattern, value in overrides.items()}
    names = {p: [at.name for at in ats] for p, ats in locations.items()}
    first = {p: next((k for k in parsed if _found(k, ns)), None) for p, ns in names.items()}
    all_names = [name for ns in names.values() for name in ns]
    for pattern in (k for k in parsed if k not in first.values()):
        if _found(pattern, all_names):
            raise ValueError(
                f"the pattern {pattern!r} has no effect: earlier patterns match all of its "
                "parameters. Put it first."
            )
        parts = {part for name in all_names for part in name.split(".") if not part.isdigit()}
        raise ValueError(f"no parameter matches: {unknown('argument or pattern', pattern, parts)}")
    return {p: Override() if k is None else parsed[k] for p, k in first.items()}


def _found(pattern: str, names: list[str]) -> bool:
    return any(re.search(pattern, name) for name in names)


def _distinct_names(locations: list[Location]) -> list[str]:
    """Return one name for each module: a block that is used twelve times has one name."""
    modules = [at.module for at in locations]
    return [at.name for i, at in enumerate(locations) if at.module not in modules[:i]]


def _kind(at: Location, usage: Usage, override: Override) -> Kind | None:
    """Return the role and the view that the model suggests, changed by the override."""
    p, role = at.parameter, override.role
    if not p.requires_grad or role == FROZEN:
        return Kind(FROZEN)
    kind = classify(at, usage)
    if kind is not None and p.ndim < 2 and role not in VECTORS:
        return kind  # lm_head="head" means the weight, not the bias beside it
    if kind is None and override.method is not None:
        role = role or CUSTOM
    if role is not None:
        kind = Kind(role, _view(role, kind, p.shape))
    if kind is None or override.view is None:
        return kind
    view = override.view
    if isinstance(view, split) and view.of is matrix and kind.view is not None:
        view = replace(view, of=kind.view)  # split(3) is a number of blocks of the layer's own view
    return Kind(kind.role, view)


def _view(role: str, kind: Kind | None, shape: Shape) -> View | None:
    """Return the layer's own view if it fits the role that the user wants, else the usual view."""
    if role in VECTORS or len(shape) < 2:
        return None
    if kind is not None and kind.view is not None:
        rows_are_outputs = role in HEADS and kind.role in TABLES
        return matrix if rows_are_outputs else kind.view
    if role in TABLES:
        return transposed
    return conv if role == "conv" or len(shape) > 3 else matrix


PARTS: dict[str, Any] = {"role": str, "method": Method, "lr_factor": int | float, "view": Callable}
"""The parts of an override by their types."""


def _parse(pattern: str, value: Any) -> Override:
    """Read the value of an override. The type of each part tells its meaning."""
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
    return Override(**parts)


def _unclear_message(unclear: list[Location]) -> str:
    """List the parameters without a role, and overrides that would give them one."""
    examples: dict[str, Location] = {}
    for at in unclear:
        parts = (r"\d+" if key.isdigit() else re.escape(key) for key in at.name.split("."))
        examples.setdefault("^" + r"\.".join(parts) + "$", at)
    guesses = {2: '"hidden"', 3: '("experts", views.matrix)', 4: '"conv"'}
    return "\n".join(
        [
            f"cannot tell the role of {len(unclear)} parameter{'s' if len(unclear) > 1 else ''}:",
            *(
                f"  {a.name} ({times(a.shape)}) of {type(a.module).__name__}"
                for a in examples.values()
            ),
            "Name their roles, for example with",
            *(f'  **{{r"{k}": {guesses[min(len(a.shape), 4)]}}}' for k, a in examples.items()),
            'Use "position" for a table that is added, "vector" for a factor of each entry,',
            "views.transposed for (d_in, d_out), views.heads for (d_in, heads, d_head). The roles:",
            "  " + ", ".join((*ROLES, FROZEN)),
        ]
    )
