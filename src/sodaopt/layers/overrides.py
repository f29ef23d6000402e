"""The user's choices. An override is a regular expression for names, with a role, a view, a method
or an lr factor.
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
from sodaopt.layers.locations import Location, Locations
from sodaopt.layers.roles import ROLES, TABLES, VECTORS, Kind

FROZEN, CUSTOM = "frozen", "custom"


class Override(NamedTuple):
    """The parts of an override. None keeps the plan's own choice."""

    role: str | None = None
    view: View | None = None
    method: Method | None = None
    lr_factor: float | None = None

    def applied(self, kind: Kind | None, p: nn.Parameter) -> Kind | None:
        """Return the role and the view that the model suggests, changed by the user's.

        kind: the suggestion, or None if the role is unclear.
        """
        if not p.requires_grad or self.role == FROZEN:
            return Kind(FROZEN)
        if kind is not None and p.ndim < 2 and self.role not in VECTORS:
            return kind  # lm_head="head" means the weight, not the bias beside it
        role = self.role or (CUSTOM if kind is None and self.method else None)
        if role is not None:
            own = kind.view if kind else None
            kind = Kind(role, None if role in VECTORS else own or _usual_view(role, p.shape))
        if kind is None or self.view is None:
            return kind
        view = self.view
        if isinstance(view, split) and view.of is matrix and kind.view is not None:
            view = replace(view, of=kind.view)  # split(3): three blocks of the layer's own view
        return Kind(kind.role, view)


def _usual_view(role: str, shape: Shape) -> View | None:
    if len(shape) < 2:
        return None
    if role in TABLES:
        return transposed
    return conv if role == "conv" or len(shape) > 3 else matrix


def match(locations: Locations, overrides: Mapping[str, Any]) -> dict[nn.Parameter, Override]:
    """Map each parameter to the first override whose pattern is in one of its names.

    A pattern without effect is an error.
    """
    parsed = {pattern: _parse(pattern, value) for pattern, value in overrides.items()}
    found, used = {}, set()
    for p, ats in locations.items():
        first = next((k for k in parsed if any(re.search(k, at.name) for at in ats)), None)
        found[p] = Override() if first is None else parsed[first]
        used.add(first)
    for pattern in (k for k in parsed if k not in used):
        names = [at.name for ats in locations.values() for at in ats]
        if any(re.search(pattern, name) for name in names):
            raise ValueError(
                f"the pattern {pattern!r} has no effect: earlier patterns match all of its "
                "parameters. Put it first."
            )
        parts = {part for name in names for part in name.split(".") if not part.isdigit()}
        raise ValueError(f"no parameter matches: {unknown('argument or pattern', pattern, parts)}")
    return found


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


GUESSES = {2: '"hidden"', 3: '("experts", views.matrix)', 4: '"conv"'}
"""An override for a parameter without a role, by its number of dimensions."""


def unclear(locations: list[Location]) -> str:
    """List the parameters without a role, and overrides that would give them one."""
    examples: dict[str, Location] = {}
    for at in locations:
        parts = (r"\d+" if key.isdigit() else re.escape(key) for key in at.name.split("."))
        examples.setdefault("^" + r"\.".join(parts) + "$", at)
    lines = [f"cannot tell the role of {len(locations)} parameter{'s' * (len(locations) > 1)}:"]
    for pattern, at in examples.items():
        guess = GUESSES[min(len(at.shape), 4)]
        lines += [
            f"  {at.name} ({times(at.shape)}) of {type(at.module).__name__}, which may be",
            f'    **{{r"{pattern}": {guess}}}',
        ]
    return "\n".join(lines) + (
        '\nUse "position" for a table that is added, "vector" for a factor of each entry, '
        "views.transposed for (d_in, d_out), views.heads for (d_in, heads, d_head).\n"
        f"The roles: {', '.join((*ROLES, FROZEN))}"
    )
