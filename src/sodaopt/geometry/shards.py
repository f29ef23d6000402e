"""The exchange with other ranks that a map of sharded parameters needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from sodaopt.geometry.views import Shape, View


class Shards(Protocol):
    """The exchange of sharded parameters with other ranks, see `sodaopt.parallel`.

    shapes: the shapes of the whole parameters.
    """

    shapes: list[torch.Size]

    def deal(
        self, compute: Callable[[list[Tensor]], list[Tensor]], ds: list[Tensor], view: View,
        shapes: Sequence[Shape] | None = None,
    ) -> list[Tensor]:  # fmt: skip
        """Apply compute to the list of all matrices, each of them on one rank.

        compute: must not depend on the scale of a matrix, unless there are shapes.
        shapes: the whole shapes, if ds has several matrices for each parameter.
        """

    def sum(self, parts: list[Tensor], dims: Sequence[Sequence[int]]) -> list[Tensor]:
        """Complete sums over dimensions of each parameter from the sums over this rank's shard."""
