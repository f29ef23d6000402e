"""How the kinds of parallelism cut the parameters of a model, for predictions."""

import re
from collections.abc import Callable
from typing import TypeAlias

from sodaopt.parallel.layout import Placement, Shape

PlacementRule: TypeAlias = Callable[[str, Shape], Placement]
"""A function from the name and the shape of a parameter to its placement."""

ROW_PARALLEL = r"(^|\.)(o_proj|out_proj|c_proj|proj|down_proj)(\.weight)?$"
"""A pattern of names. Tensor parallelism cuts such a layer along its input, and others
along their output."""


def cut_by_rows(R: int, S: int) -> PlacementRule:
    """Return the rule of DDP (S = 1), FSDP (R = 1) or HSDP."""
    return lambda name, shape: Placement((R, S), (None, 0), (0, 1))


def cut_by_layers(F: int, T: int) -> PlacementRule:
    """Return the rule of FSDP over F ranks with tensor parallelism over T ranks.

    Experts are sharded over experts by FSDP.
    """

    def rule(name: str, shape: Shape) -> Placement:
        if len(shape) < 2:
            return Placement((F, T), (0, None), (0, 1))
        along = len(shape) - (1 if re.search(ROW_PARALLEL, name) else 2)
        # if both cut one dimension, FSDP cuts last
        return Placement((F, T), (0, along), (0, 1) if along else (1, 0))

    return rule
