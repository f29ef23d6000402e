"""Measure the diagnostics of a run by role, at the last update before each check of the losses."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from sodaopt.core.diagnostics import SUMS, Measured, Watched, measured
from sodaopt.layers.plan import plan
from sodaopt.parallel import sharded

TOTAL = "total"


class RoleDiagnostics:
    """Measure some steps of an optimizer. The sums stay on the device until the losses are checked.

    Distances are to the initial weights, even if the optimizer does not pull to them. So this class
    keeps a copy of each initial weight that the optimizer does not keep as z0.

    model: must still have its initial weights
    """

    def __init__(self, model: nn.Module, opt: Watched) -> None:
        self.opt = opt
        self.roles: dict[Tensor, str] = {row.parameter: row.role for row in plan(model).rows}
        self.found: dict[str, Measured] = {}
        self.away: dict[str, Tensor] = {}
        """Squared distances to the initial weights by role."""
        self.initial = {p: sharded.local(p).detach().clone() for p in self.roles}
        opt.watch(False)

    def arm(self, on: bool) -> None:
        """Set whether the next step is measured."""
        self.opt.watch(on)

    def collect(self) -> None:
        """Keep the sums of the last step, if it was measured."""
        if self.opt._is_watched:
            self.away = self._distances()
            self.found = measured(self.opt, self.roles)
            parts = self.found.values()
            self.found[TOTAL] = Measured(
                [t for part in parts for t in part.sums], [n for part in parts for n in part.params]
            )

    @torch.no_grad()
    def _distances(self) -> dict[str, Tensor]:
        """Return the squared distances by role. Drop copies of weights that the optimizer keeps."""
        pulls, squares = self.opt._pulls(), dict[str, list[Tensor]]()
        for p, role in self.roles.items():
            x, pull = sharded.local(p).detach().float(), pulls.get(p)
            if pull and isinstance(pull.z0, Tensor):
                self.initial.pop(p, None)
                start = pull.z0
            else:  # no pull, or the optimizer keeps no tensor for z0
                start = self.initial[p]
            square = (x - start.float()).square().sum().reshape(1)
            squares.setdefault(role, []).append(sharded.total(square, p))
        return {role: torch.stack(some).sum(0) for role, some in squares.items()}

    def sums(self) -> Tensor:
        """Return all sums as one tensor, to be read together with the losses."""
        if not self.found:
            return torch.empty(0)
        return torch.cat([part.total() for part in self.found.values()] + [*self.away.values()])

    def rows(self, values: list[float]) -> dict[str, dict[str, float | None]]:
        """Return the diagnostics by role, and drop the sums.

        values: the elements of `sums()`, on the host
        """
        size = len(SUMS)
        parts = [values[j * size : (j + 1) * size] for j in range(len(self.found))]
        rows = zip(self.found, self.found.values(), parts, strict=True)
        out = {role: part.numbers(some) for role, part, some in rows}
        for role, square in zip(self.away, values[len(parts) * size :], strict=True):
            out[role]["distance"] = math.sqrt(square)
        if out:
            out[TOTAL]["distance"] = math.hypot(*(out[role]["distance"] for role in self.away))
        self.found, self.away = {}, {}
        return {role: _plain(row) for role, row in out.items()}


def _plain(row: dict[str, Any]) -> dict[str, float | None]:
    """Round to six digits. nan and infinity become None, because JSON has neither."""
    return {name: float(f"{x:.6g}") if math.isfinite(x) else None for name, x in row.items()}
