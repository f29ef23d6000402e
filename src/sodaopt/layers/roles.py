"""The role of each parameter of a model, from the type and the use of the module that holds it.

Only shapes are read, never values, so models on the meta device and sharded models work too. A
parameter whose role is unclear has none (None), and the caller decides. A role that is inferred and
not read off a type is noted.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.conv import _ConvNd

from sodaopt._errors import times
from sodaopt.geometry.views import View, conv, deconv, grouped, matrix, transposed
from sodaopt.layers.locations import Location, Locations

ROLES = {
    "embedding": "a table of tokens: a one-hot first layer",
    "position": "any other table: positions, segments, relative biases",
    "tied": "embedding and head in one parameter, treated as the last layer",
    "head": "the last layer",
    "hidden": "the matrix of a linear layer",
    "conv": "a convolution kernel, also the first one of an image",
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


def classify(locations: list[Location], usage: Usage) -> Kind | None:
    """Return the role and the view of a parameter, or None if they are unclear."""
    location = locations[0]
    _refuse_flat(location)
    if location.parameter in usage.heads:
        stored = [view for at in locations if (view := _linear_view(at))]
        return Kind("tied" if any(map(_is_table, locations)) else "head", [*stored, matrix][0])
    kind = _by_type(location, usage)
    if (lora := _lora_role(location)) and location.parameter.ndim > 1:
        return Kind(lora, kind.view if kind else matrix)
    return kind


# -- by the type of the module --------------------------------------------------------------------


def _by_type(at: Location, usage: Usage) -> Kind | None:
    m, p = at.module, at.parameter
    if p.ndim < 2:
        return Kind(_vector_role(at))
    if _is_table(at):
        return Kind("embedding" if p in usage.tokens else "position", transposed)
    if view := _router_view(at):
        return Kind("router", view)
    if view := _linear_view(at):
        return Kind("hidden", view)
    if isinstance(m, _ConvNd):
        if m.transposed:
            return Kind("conv", deconv) if m.groups == 1 else None
        return Kind("conv", conv if m.groups == 1 else grouped(m.groups))
    if isinstance(m, nn.MultiheadAttention | nn.RNNBase | nn.RNNCellBase) and p.ndim == 2:
        return Kind("hidden", matrix)
    return _by_shape(at)


def _by_shape(at: Location) -> Kind | None:
    """Classify a parameter with two dimensions or more in a module of unknown type."""
    m, shape = at.module, at.shape
    if math.prod(shape) == max(shape):  # a class token is 1 x 1 x d
        return Kind(_vector_role(at))
    if len(shape) == 3 and shape[0] == 1:
        return Kind("position", transposed)  # 1 x n x d, added to a batch of sequences
    if len(shape) == 2 and shape[0] == _expert_count(m) and at.attribute.endswith("bias"):
        return Kind("bias")
    flipped = getattr(m, "is_transposed", None)  # transformers declares how experts are stored
    if len(shape) == 3 and isinstance(flipped, bool):
        return Kind("experts", transposed if flipped else matrix)
    return None


def _refuse_flat(at: Location) -> None:
    layer = isinstance(at.module, nn.Linear | nn.Embedding | _ConvNd) and at.attribute == "weight"
    if at.attribute == "_flat_param" or (layer and at.parameter.ndim < 2):
        raise ValueError(
            f"{at.name} ({times(at.shape)}) is flattened, so its layers are unknown. Shard with "
            "fully_shard (FSDP2), which keeps the shapes, not with FullyShardedDataParallel."
        )


def _imported(module: str, name: str) -> tuple[type, ...]:
    """Return a class of another library for isinstance, or () if nobody has imported it."""
    found = getattr(sys.modules.get(module), name, None)
    return (found,) if isinstance(found, type) else ()


def _linear_view(at: Location) -> View | None:
    """Return how the weight of a linear layer is stored, or None for any other parameter.

    A layer of another library counts as linear if it declares in_features and out_features.
    """
    m, shape = at.module, tuple(at.shape)
    if at.attribute != "weight":
        return None
    sizes = getattr(m, "out_features", None), getattr(m, "in_features", None)
    if isinstance(m, nn.Linear) or shape == sizes:
        return matrix
    flipped = isinstance(m, _imported("transformers.pytorch_utils", "Conv1D"))
    return transposed if flipped or shape == sizes[::-1] else None


def _is_table(at: Location) -> bool:
    m = at.module
    sizes = getattr(m, "num_embeddings", None), getattr(m, "embedding_dim", None)
    known = isinstance(m, nn.Embedding | nn.EmbeddingBag) or tuple(at.shape) == sizes
    return known and at.attribute == "weight"


def _is_tied(locations: list[Location]) -> bool:
    return any(map(_is_table, locations)) and any(map(_linear_view, locations))


def _vector_role(at: Location) -> str:
    m = at.module
    if at.attribute.endswith("bias") or at.attribute.startswith("bias_"):
        return "bias"
    if math.prod(at.shape) == 1:
        return "scalar"
    # A module that holds only vectors scales its input: LayerNorm, any RMSNorm, LayerScale.
    only_vectors = all(p is None or p.ndim < 2 for p in m._parameters.values())
    has_children = next(m.children(), None) is not None
    return "vector" if has_children or isinstance(m, nn.PReLU) or not only_vectors else "norm"


# The two factors of an adapted layer, by attribute: peft's, torchtune's, peft's for embeddings.
LORA = (("lora_A", "lora_B"), ("lora_a", "lora_b"), ("lora_embedding_A", "lora_embedding_B"))


def _lora_role(at: Location) -> str | None:
    for module, key in zip(at.modules, at.keys, strict=True):
        if any(key in pair and all(hasattr(module, name) for name in pair) for pair in LORA):
            return f"lora_{key[-1].lower()}"
    return None


def _expert_count(m: nn.Module) -> int:
    """Count the experts in a module: a list of similar modules, or 3-D stacks. 0 if it has none."""
    if isinstance(m, nn.ModuleList):
        similar = len({type(e) for e in m}) == 1
        return (
            len(m) if similar and sum(isinstance(x, nn.Linear) for x in m[0].modules()) > 1 else 0
        )
    if isinstance(m, _ConvNd):
        return 0
    stacks = {p.shape[0] for p in m._parameters.values() if p is not None and p.ndim == 3}
    return max(stacks) if len(stacks) == 1 and stacks != {1} else 0


def _router_view(at: Location) -> View | None:
    """Return the view of a matrix with one output for each expert beside it, else None."""
    m, shape = at.module, at.shape
    if len(shape) != 2 or at.attribute.endswith("bias") or _expert_count(m):
        return None
    for block in at.modules[-2:]:
        for bank in block.children():
            n, listed = _expert_count(bank), isinstance(bank, nn.ModuleList)
            if not n or (listed and not at.is_repeated):  # a list may be the model's own layers
                continue
            if shape[0] == n or (shape[0] == 1 and not listed):  # 1: the gate of a shared expert
                return matrix
            if shape[1] == n and not isinstance(m, nn.Linear):
                return transposed
    return None


# -- by use: which layer is the last, which tables hold tokens ------------------------------------


@dataclass
class Usage:
    """The layers whose role depends on the whole model.

    tables: the parameters of all embedding layers.
    heads: the weights of the output layers.
    tokens: the tables of tokens.
    notes: a sentence for each of these that had to be inferred.
    """

    locations: Locations
    tables: list[nn.Parameter]
    heads: set[nn.Parameter]
    tokens: set[nn.Parameter] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)


def find_usage(model: nn.Module, locations: Locations, heads: set[nn.Parameter]) -> Usage:
    """Find the heads and the token tables. Heads that the user names are the only ones."""
    pretrained = _imported("transformers.modeling_utils", "PreTrainedModel")
    theirs: list[Any] = [m for m in model.modules() if isinstance(m, pretrained)]
    tables = [p for p, at in locations.items() if _is_table(at[0])]
    if not heads:
        tied = {p for p, at in locations.items() if _is_tied(at)}
        heads = tied | _declared(theirs, "get_output_embeddings", locations)
    usage = Usage(locations, tables, heads)
    if not heads:
        _infer_head(usage, [m.base_model for m in theirs])
    _find_tokens(usage, _declared(theirs, "get_input_embeddings", locations))
    return usage


def _declared(models: list[Any], getter: str, locations: Locations) -> set[nn.Parameter]:
    """Return the weights of the layers that transformers models declare as input or output."""
    found = set()
    for m in models:
        try:
            weight = getattr(getattr(m, getter)(), "weight", None)
        except NotImplementedError:  # a model without tokens
            continue
        if weight in locations and weight.ndim == 2:
            found.add(weight)
    return found


def _infer_head(usage: Usage, bodies: list[nn.Module]) -> None:
    """Take the last layer in order of registration, if it is linear and in no repeated block.

    A linear layer with the shape of the largest table takes precedence: it computes logits over the
    vocabulary. A smaller table, for example of positions, may match a hidden layer by chance.
    """
    largest = max((p.numel() for p in usage.tables), default=0)
    logit_shapes = {p.shape for p in usage.tables if p.numel() == largest}
    last = logits = None
    for p, (at, *_) in usage.locations.items():
        if p.ndim < 2 or _is_table(at) or _lora_role(at):
            continue
        inner = at.is_repeated or any(body in at.modules for body in bodies)
        last = p if _linear_view(at) and not inner else None
        logits = p if last is p and p.shape in logit_shapes else logits
    head, reason = logits, "which has the size of the largest table"
    if head is None:
        head, reason = last, "the last layer in order of registration"
    if head is None:
        usage.notes.append("no head: the last layer is not linear, or part of a repeated block")
        return
    usage.heads = {head}
    usage.notes.append(f"head: {usage.locations[head][0].name}, {reason}")


def _find_tokens(usage: Usage, declared: set[nn.Parameter]) -> None:
    """Take the tables with the shape of a declared input, else of a head, else all tables."""
    tables = usage.tables
    shapes = {p.shape for p in tables if p in declared} or {p.shape for p in usage.heads}
    usage.tokens = {p for p in tables if p.shape in shapes} or set(tables)
    if len(tables) > 1 and not any(p.shape in shapes for p in tables):
        names = ", ".join(usage.locations[p][0].name for p in tables)
        usage.notes.append(f"{names}: it is unclear which one holds tokens, so all of them do")
