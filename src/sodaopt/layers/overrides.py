"""What the user says about parameters, by regular expression, over what the model tells."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

from torch import nn

from sodaopt._errors import times, unknown
from sodaopt.core.method import Method
from sodaopt.geometry.views import Shape, View, conv, matrix, split, transposed
from sodaopt.layers.roles import PARENT, ROLES, Place, Told, Uses, places, role, uses

FROZEN, CUSTOM = "frozen", "custom"

Override: TypeAlias = Any  # a role, a View, a Method, an lr factor, or a tuple of these


class Choice(NamedTuple):
    """What an override says; None leaves the plan's own choice."""

    role: str | None = None
    view: View | None = None
    method: Method | None = None
    lr_factor: float | None = None


class Found(NamedTuple):
    """A parameter, its name in each module that holds it, what it is and how it is a matrix."""

    p: nn.Parameter
    holders: list[str]
    role: str
    view: View | None
    choice: Choice


def sort(model: nn.Module, overrides: Mapping[str, Override]) -> tuple[list[Found], list[str]]:
    """Every parameter of the model exactly once, and what had to be inferred.

    The keys of `overrides` are searched in a parameter's names, and the first that matches wins. A
    parameter whose role cannot be told is an error, and so is a pattern without effect.
    """
    choices = {pattern: _choice(pattern, value) for pattern, value in overrides.items()}
    all_ = places(model)
    names = {p: [place.name for place in at] for p, at in all_.items()}
    matched = {p: _first(choices, names[p]) for p in all_}
    _check_patterns(choices, set(matched.values()), [n for ns in names.values() for n in ns])
    chosen = {p: choices[k] if k is not None else Choice() for p, k in matched.items()}
    heads = {p for p, c in chosen.items() if c.role in ("head", "tied") and p.ndim > 1}
    known = uses(model, all_, heads)
    told = {p: _decide(p, at, known, chosen[p]) for p, at in all_.items()}
    if lost := [(p, all_[p][0]) for p, t in told.items() if t is None]:
        raise ValueError(_unassigned(lost))
    found = [Found(p, _holders(all_[p]), *t, chosen[p]) for p, t in told.items() if t is not None]
    return found, known.notes


def _first(patterns: Mapping[str, Choice], names: list[str]) -> str | None:
    return next((k for k in patterns if any(re.search(k, name) for name in names)), None)


def _holders(at: list[Place]) -> list[str]:
    """A block that is used twelve times holds its parameter once."""
    first: dict[nn.Module, str] = {}
    for place in at:
        first.setdefault(place.module, place.name)
    return list(first.values())


def _decide(p: nn.Parameter, at: list[Place], known: Uses, choice: Choice) -> Told | None:
    if not p.requires_grad or choice.role == FROZEN:
        return FROZEN, None
    told = role(p, at, known)
    if told is None and choice.role is None and choice.method is not None:
        told = CUSTOM, _usual_view("hidden", p.shape)
    if told is not None and p.ndim < 2 and _family(choice.role) != "vector":
        return told  # lm_head="head" is about the weight, not about the bias beside it
    if choice.role is not None:
        told = _as(choice.role, told, p.shape)
    if told is None or choice.view is None:
        return told
    cut, view = choice.view, told[1]
    if isinstance(cut, split) and cut.of is matrix and view is not None:
        cut = replace(cut, of=view)  # split(3) says into how many, the layer how it is stored
    return told[0], cut


def _family(wanted: str | None) -> str | None:
    return PARENT.get(wanted, wanted) if wanted else None


def _as(wanted: str, told: Told | None, shape: Shape) -> Told:
    """The role that the user wants, seen as the layer is stored as far as that still fits."""
    if told is None or told[1] is None or _family(wanted) == "vector":
        return wanted, _usual_view(wanted, shape)
    if wanted in ("head", "tied") and told[0] in ("embedding", "position"):
        return wanted, matrix  # the rows of a table are then outputs
    return wanted, told[1]


def _usual_view(wanted: str, shape: Shape) -> View | None:
    if _family(wanted) == "vector" or len(shape) < 2:
        return None
    if _family(wanted) == "embedding":
        return transposed
    return conv if wanted == "conv" or len(shape) > 3 else matrix


def _choice(pattern: str, value: Override) -> Choice:
    """An override's value, its parts told apart by type."""
    try:
        re.compile(pattern)
    except re.error as e:
        raise ValueError(f"{pattern!r} is no regular expression: {e}") from None
    choice = Choice()
    for part in value if isinstance(value, tuple) else (value,):
        if isinstance(part, str):
            if part not in (*ROLES, FROZEN):
                raise ValueError(f"{pattern!r}: {unknown('role', part, [*ROLES, FROZEN])}")
            choice = choice._replace(role=part)
        elif isinstance(part, Method):
            choice = choice._replace(method=part)
        elif isinstance(part, int | float) and part >= 0:
            choice = choice._replace(lr_factor=float(part))
        elif callable(part) and not isinstance(part, type):
            choice = choice._replace(view=part)
        else:
            raise TypeError(
                f"{pattern!r}: an override is a role, a view such as views.split(3), a Method, an "
                f"lr factor, or a tuple of these, got {part!r}"
            )
    return choice


def _check_patterns(choices: Mapping[str, Choice], used: set[str | None], names: list[str]) -> None:
    for pattern in choices:
        if pattern in used:
            continue
        if any(re.search(pattern, name) for name in names):
            raise ValueError(
                f"the pattern {pattern!r} has no effect: an earlier one takes every parameter "
                "that it matches; put it first"
            )
        parts = {part for name in names for part in name.split(".") if not part.isdigit()}
        raise ValueError(f"no parameter matches: {unknown('pattern', pattern, parts)}")


def _unassigned(lost: list[tuple[nn.Parameter, Place]]) -> str:
    """The names, and the overrides to write."""
    kinds: dict[str, tuple[nn.Parameter, Place]] = {}
    for p, at in lost:
        parts = (r"\d+" if k.isdigit() else re.escape(k) for k in at.name.split("."))
        kinds.setdefault("^" + r"\.".join(parts) + "$", (p, at))
    lines = [f"cannot tell the role of {len(lost)} parameter{'s' if len(lost) > 1 else ''}:"]
    for p, at in kinds.values():
        lines.append(f"  {at.name} ({times(p.shape)}) of {type(at.module).__name__}")
    lines.append("say what they are, for example with")
    for pattern, (p, _) in kinds.items():
        guess = {2: '"hidden"', 3: '("experts", views.matrix)'}.get(p.ndim, '"conv"')
        lines.append(f'  **{{r"{pattern}": {guess}}}')
    lines.append("with views.transposed if it is stored as (d_in, d_out), or another role:")
    lines.append("  " + ", ".join((*ROLES, FROZEN)))
    return "\n".join(lines)
