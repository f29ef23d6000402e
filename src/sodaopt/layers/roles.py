"""The role of each parameter of a model, from its layer, its use, its name and its shape.

The first of RULES that matches gives the role. Only shapes are read, never values, so models on the
meta device and sharded models work too. If no rule matches, the role is unclear, and the caller
decides.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from torch import nn

from sodaopt.core.method import Method
from sodaopt.geometry.views import View, heads, matrix, transposed
from sodaopt.layers.locations import Location, is_projection
from sodaopt.layers.usage import POSITION, Usage

ROLES = {
    "embedding": "a table of tokens: a one-hot first layer",
    "position": "any other table: positions, segments, relative biases",
    "tied": "embedding and head in one parameter, treated as the last layer",
    "head": "an output layer",
    "hidden": "the matrix of a linear layer",
    "conv": "a convolution kernel, also the first one of an image",
    "depthwise": "a convolution kernel with one input channel for each group",
    "experts": "a 3-D stack of matrices",
    "router": "the scores that choose experts",
    "lora_a": "the first factor of a low-rank adapter, d_in -> r",
    "lora_b": "the second factor of a low-rank adapter, r -> d_out",
    "norm": "the gain of a normalisation",
    "bias": "a bias",
    "scalar": "a single number",
    "vector": "any other vector",
}
TABLES = ("embedding", "position")
HEADS = ("head", "tied")
MATRICES = ("hidden", "conv", "experts", "router", "lora_a", "lora_b")
"""The paper's hidden layers. A depthwise kernel is not a matrix: each tap is diagonal."""
VECTORS = ("vector", "norm", "bias", "scalar")

PARENT = (
    {"tied": "head", "position": "embedding"}
    | dict.fromkeys(MATRICES[1:], "hidden")
    | dict.fromkeys(VECTORS[1:], "vector")
)
"""The role whose rule another role follows if a recipe has none for it."""


class Choice(NamedTuple):
    """How a parameter is treated, by the rules or by the user.

    An empty field means that nothing was chosen.

    view: how the parameter is a matrix, if it is one.
    """

    role: str = ""
    view: View | None = None
    method: Method | None = None
    lr_factor: float | None = None


# Patterns in the parameter's own part of its name.
BIAS = r"bias$|\b(bias_[^.]*|beta)$"
LEARNED_INPUT = r"(token|latents)[^.]*$"
FACTOR = r"(scale|alpha|gamma|lambda)[^.]*$|_log$|\bD$"
EMBEDDING = r"embed[^.]*$"

Match: TypeAlias = Callable[[Location, Usage], View | bool | None]
RULES: tuple[tuple[str, Match], ...] = (
    # The first rule that matches gives the role. It returns the view of a matrix, else True.
    ("lora_a", lambda at, use: at.is_lora("a") and _dense(at)),
    ("lora_b", lambda at, use: at.is_lora("b") and _dense(at)),
    # The use of the layer:
    ("tied", lambda at, use: at.parameter in use.heads & use.tables.keys() and _dense(at)),
    ("head", lambda at, use: at.parameter in use.heads and _dense(at)),
    # The type of the layer:
    ("embedding", lambda at, use: at.parameter in use.tokens and transposed),
    ("position", lambda at, use: at.is_table() and transposed),
    ("router", lambda at, use: at.is_router() and matrix),
    ("hidden", lambda at, use: at.linear()),
    ("depthwise", lambda at, use: at.is_depthwise() and at.kernel()),
    ("conv", lambda at, use: at.kernel()),
    # The name and the shape of a parameter in any other module:
    ("position", lambda at, use: _has_rows(at) and at.named(POSITION) and _rows(at)),
    ("bias", lambda at, use: at.named(BIAS)),
    ("scalar", lambda at, use: math.prod(at.shape) == 1),
    ("norm", lambda at, use: _is_norm(at.module)),
    ("vector", lambda at, use: not _has_rows(at) or at.named(f"{LEARNED_INPUT}|{FACTOR}")),
    ("position", lambda at, use: (at.shape[0] == 1 or at.named(EMBEDDING)) and _rows(at)),
    ("hidden", lambda at, use: is_projection(at.shape) and heads),
    ("experts", lambda at, use: at.stack()),
)


def classify(at: Location, usage: Usage) -> Choice:
    """Return the role and the view of a parameter. The role is empty if no rule matches."""
    for role, match in RULES:
        if found := match(at, usage):
            return Choice(role, found if callable(found) else None)
    return Choice()


def _dense(at: Location) -> View:
    return at.linear() or matrix


def _rows(at: Location) -> View | bool:
    """Return the view of a table (n, d). Others have none: they suit maps of each entry only."""
    is_table = len(at.shape) == 2 or (len(at.shape) == 3 and at.shape[0] == 1)
    return transposed if is_table else True


def _has_rows(at: Location) -> bool:
    """Whether the parameter is more than a vector: a class token is 1 x 1 x d."""
    return math.prod(at.shape) != max(at.shape, default=1)


def _is_norm(m: nn.Module) -> bool:
    return any(re.search("norm|grn", c.__name__, re.I) for c in type(m).__mro__)
