"""Record the diagnostics of a run by role: of the last update before each check of the losses."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from sodaopt.core.diagnostics import SUMS, Measured, Watch, Watched, joined
from sodaopt.layers.plan import plan

TOTAL = "total"


class RoleDiagnostics:
    """Measure the armed steps of an optimizer. The sums stay on the device until a check."""

    def __init__(self, model: nn.Module, opt: Watched) -> None:
        self.opt = opt
        self.roles: dict[Tensor, str] = {row.parameter: row.role for row in plan(model).rows}
        opt.watch()
        assert opt._watch is not None
        self.watch: Watch = opt._watch
        self.found: dict[str, Measured] = {}
        self.watch.on = False

    def arm(self, on: bool) -> None:
        """Say whether the coming step is measured."""
        self.watch.on = on

    def take(self) -> None:
        """Keep the sums of the step, if it was measured."""
        if self.watch.on:
            self.found = self.opt.measured(lambda j, p: self.roles[p])
            self.found[TOTAL] = joined(list(self.found.values()))

    def sums(self) -> Tensor:
        """Return all sums as one tensor, to be read together with the losses."""
        return (
            torch.cat([part.sums for part in self.found.values()]) if self.found else torch.empty(0)
        )

    def rows(self, values: list[float]) -> dict[str, dict[str, float | None]]:
        """Return the diagnostics by role, and forget them.

        values: those of `sums` on the host
        """
        size = len(SUMS)
        parts = [values[j * size : (j + 1) * size] for j in range(len(self.found))]
        rows = zip(self.found, self.found.values(), parts, strict=True)
        out = {role: _plain(part.numbers(some)) for role, part, some in rows}
        self.found = {}
        return out


def _plain(row: dict[str, Any]) -> dict[str, float | None]:
    """Round to six digits. JSON has neither nan nor infinity."""
    return {name: float(f"{x:.6g}") if math.isfinite(x) else None for name, x in row.items()}
