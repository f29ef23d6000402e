"""The role of each parameter of a model, from its layer, its use, its name and its shape.

The first of RULES that holds gives the role. Only shapes are read, never values, so models on the
meta device and sharded models work too. If no rule holds, the role is unclear (None), and the
caller decides.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from sodaopt.geometry.views import View, heads, matrix, transposed
from sodaopt.layers import stored
from sodaopt.layers.locations import Location
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
"""The paper's hidden layers."""
VECTORS = ("vector", "norm", "bias", "scalar")

PARENT = (
    {"tied": "head", "position": "embedding"}
    | dict.fromkeys(MATRICES[1:], "hidden")
    | dict.fromkeys(VECTORS[1:], "vector")
)
"""The role whose rule another role follows if a recipe has none for it."""


class Kind(NamedTuple):
    """A parameter's role, and its view if it is a matrix."""

    role: str
    view: View | None = None


class Rule(NamedTuple):
    """The role of the parameters for which a rule holds, and how they are matrices."""

    role: str
    holds: Callable[[Location, Usage], object]
    view: Callable[[Location], View | None] = lambda at: None


def _dense_view(at: Location) -> View:
    return stored.linear(at) or matrix


def _table_view(at: Location) -> View | None:
    """Return the view of n rows, one a position. Other tables suit only maps of each entry."""
    rows = len(at.shape) == 2 or (len(at.shape) == 3 and at.shape[0] == 1)
    return transposed if rows else None


BIAS = r"bias$|(^|\.)(bias_|beta$)"
FACTOR = r"token|latents|_log$|scale"
"""The name of a bare parameter with rows that is a learned input, or that scales each entry."""

RULES = (  # the first that holds
    # the use of the layer
    Rule(
        "tied",
        lambda at, use: at.parameter in use.heads and at.parameter in use.tables,
        _dense_view,
    ),
    Rule("head", lambda at, use: at.parameter in use.heads, _dense_view),
    # the type of the layer
    Rule("lora_a", lambda at, use: stored.lora(at) == "lora_a", _dense_view),
    Rule("lora_b", lambda at, use: stored.lora(at) == "lora_b", _dense_view),
    Rule("embedding", lambda at, use: at.parameter in use.tokens, _table_view),
    Rule("position", lambda at, use: stored.is_table(at), _table_view),
    Rule("router", lambda at, use: stored.router(at), stored.router),
    Rule("hidden", lambda at, use: stored.linear(at), stored.linear),
    Rule("depthwise", lambda at, use: stored.is_depthwise(at), stored.kernel),
    Rule("conv", lambda at, use: stored.kernel(at), stored.kernel),
    # the name and the shape of a parameter in any other module
    Rule("position", lambda at, use: _has_rows(at) and at.named(POSITION), _table_view),
    Rule("bias", lambda at, use: at.named(BIAS)),
    Rule("scalar", lambda at, use: math.prod(at.shape) == 1),
    Rule("norm", lambda at, use: _is_norm(at.module)),
    Rule("vector", lambda at, use: not _has_rows(at) or at.named(FACTOR)),
    Rule("position", lambda at, use: at.shape[0] == 1 or at.named("embed"), _table_view),
    Rule("hidden", lambda at, use: stored.is_projection(at.shape), lambda at: heads),
    Rule("experts", lambda at, use: stored.stack(at), stored.stack),
)


def classify(at: Location, usage: Usage) -> Kind | None:
    """Return the role and the view of a parameter, or None if no rule holds."""
    rule = next((rule for rule in RULES if rule.holds(at, usage)), None)
    return Kind(rule.role, rule.view(at)) if rule else None


def _has_rows(at: Location) -> bool:
    """Whether the parameter is more than a vector: a class token is 1 x 1 x d."""
    return math.prod(at.shape) != max(at.shape, default=1)


def _is_norm(m: nn.Module) -> bool:
    """Whether a class of the module is called a norm. A block may be, but its children learn."""
    learns = any(True for child in m.children() for _ in child.parameters())
    return not learns and any(re.search("norm|grn", c.__name__, re.I) for c in type(m).__mro__)
