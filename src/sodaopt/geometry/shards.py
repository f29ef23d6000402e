"""The exchange with other ranks that a map of sharded parameters needs."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Shards(Protocol):
    """The exchange of sharded parameters with other ranks, see `sodaopt.parallel`.

    shapes: the shapes of the whole parameters.
    results: this rank's shards of `Geometry.mapped`, or None if the map needs no whole matrices.
    """

    shapes: list[torch.Size]
    results: list[Tensor] | None

    def sum(self, parts: list[Tensor], dims: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return this rank's shards of sums over dims[j] of each parameter j.

        parts: the same sums over this rank's shard alone. The summed dimensions have length 1.
        """
