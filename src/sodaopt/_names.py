"""The grammar of optimizer names, which the library and the command line share.

    name    := average(pulled) | pulled             gpa(soda(muon))
    pulled  := pull(base) | base                    soda(muon), muon

The known bases depend on the caller: they are the rows of the zoo for `SODA(params, lr, name)`, and
the recipes of the layer plan for `sodaopt.optimizer(model, name)`.
"""

import re
from collections.abc import Iterable, Mapping
from itertools import product
from typing import NamedTuple

from sodaopt._errors import unknown

UNDECAYED = {"scion": "uscion", "adamw": "adam"}
"""For a base with weight decay, the same base without it. A pull replaces weight decay."""
ANCHORED = ("soda_dagger",)
"""Bases that have a pull of their own."""


class Name(NamedTuple):
    """A parsed name. gpa(soda(muon)) is Name("muon", "soda", "gpa")."""

    base: str
    pull: str | None = None
    average: str | None = None

    def __str__(self) -> str:
        outer = [part for part in (self.average, self.pull) if part]
        return "(".join([*outer, self.base]) + ")" * len(outer)

    @property
    def is_anchored(self) -> bool:
        """Whether parameters are pulled toward their initial weights."""
        return self.pull is not None or self.base in ANCHORED

    @property
    def is_anchored_twice(self) -> bool:
        """Whether there is a pull around a base with a pull of its own."""
        return self.pull is not None and self.base in ANCHORED

    @property
    def undecayed(self) -> str:
        """The base, without its weight decay if there is a pull."""
        return UNDECAYED.get(self.base, self.base) if self.pull else self.base


def every_name(
    bases: Iterable[str], pulls: Iterable[str], averages: Iterable[str] = ()
) -> dict[str, Name]:
    """Return every name with its parts: each base alone and with each pull, averaged or not."""
    parts = product((None, *averages), (None, *pulls), bases)
    names = (Name(base, pull, average) for average, pull, base in parts)
    return {str(name): name for name in names}


def parse(text: str, known: Mapping[str, Name], kind: str = "optimizer") -> Name:
    """Parse one of the known names. SODA(Muon) and soda(muon) are equal.

    known: every name with its parts.
    kind: the kind of thing that the name should be, such as "recipe". The error says it.
    """
    plain = re.sub(r"\s+", "", text.lower()).replace("-", "_")
    if plain not in known:
        raise ValueError(unknown(kind, text, known))
    return known[plain]
