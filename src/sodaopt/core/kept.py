"""Keep the buckets of a step for the next one, so that the host does not sort again.

Only buckets that kernels step are kept: they hold addresses, which are read again at each step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from sodaopt.core import fused
from sodaopt.core.update import Bucket
from sodaopt.geometry import State


class Kept:
    """The buckets of a group's last step.

    inputs: see `inputs_of`. It contains ids of tensors.
    held: keeps those tensors alive, so that no new tensor gets the same id.
    """

    def __init__(self, inputs: list[Any], buckets: list[Bucket]) -> None:
        self.inputs, self.buckets = inputs, buckets
        self.held = [list(s.values()) for b in buckets for s in b.state]

    def follows(self) -> bool:
        """Whether every parameter has taken the last step, and only that."""
        return all(int(s["step"]) == b.k + 1 for b in self.buckets for s in b.state)


def inputs_of(group: dict[str, Any], states: Mapping[Tensor, State], index: int) -> list[Any]:
    """Return everything that decides how a group is sorted into buckets, except step counts.

    index: the index of the group's first parameter in the optimizer
    """
    options = group["method"], group["foreach"], group["maximize"], group["seed"], index
    inputs: list[Any] = [options]
    for p in group["params"]:
        g, s = p.grad, states.get(p)
        if g is None or not s:
            inputs.append(None)
        else:
            inputs.append((
                id(p), *map(id, s.values()), p.dtype, p.shape, p.is_contiguous(),
                fused.kernels_run_on(p), type(g), g.dtype, g.layout, g.is_contiguous(), g.is_neg(),
            ))  # fmt: skip
    return inputs
