"""The layers whose role depends on the whole model: output layers and tables of tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from sodaopt.layers.locations import Location, Locations
from sodaopt.layers.stored import (
    conv_view,
    imported,
    is_table,
    linear_view,
    lora_role,
    router_view,
)

POSITION = (
    r"(^|[._])(pos(ition(al|s)?)?)(\d|[._]|$)|relative_|rel_pos|_rel$|attention_biases$"
    r"|token_type|segment|wpe"
)
"""A table, or a bare parameter with several rows, whose name has this is a `position`."""


@dataclass
class Usage:
    """The layers whose role depends on the whole model.

    heads: the weights of the output layers.
    tokens: the tables of tokens.
    notes: a sentence for each of these that had to be inferred.
    """

    locations: Locations
    heads: set[nn.Parameter]
    tokens: set[nn.Parameter] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def is_tied(self, at: Location) -> bool:
        """Whether a head is also a table, in this or in another layer."""
        return any(map(is_table, self.locations[at.parameter]))

    def names(self, parameters: list[nn.Parameter]) -> str:
        return ", ".join(self.locations[p][0].name for p in parameters)


def find_usage(model: nn.Module, locations: Locations, heads: set[nn.Parameter]) -> Usage:
    """Find the heads and the token tables. Heads that the user names are the only ones."""
    pretrained = imported("transformers.modeling_utils", "PreTrainedModel")
    theirs: list[Any] = [m for m in model.modules() if isinstance(m, pretrained)]
    usage = Usage(locations, heads)
    if not heads:
        tied = {p for p in _tables(locations) if any(map(linear_view, locations[p]))}
        usage.heads = tied | _declared(theirs, "get_output_embeddings", locations)
        _infer_heads(usage, _bodies(theirs))
    _find_tokens(usage, _declared(theirs, "get_input_embeddings", locations))
    return usage


def _declared(models: list[Any], getter: str, locations: Locations) -> set[nn.Parameter]:
    """Return the weights of the layers that transformers models declare as input or output."""
    found = set()
    for m in models:
        try:
            layer = getattr(m, getter)()
        except NotImplementedError:  # a model without tokens
            continue
        for each in layer if isinstance(layer, nn.ModuleList) else (layer,):
            weight = getattr(each, "weight", None)
            if weight in locations and weight.ndim == 2:
                found.add(weight)
    return found


def _bodies(models: list[Any]) -> list[nn.Module]:
    """Return the transformers models that have no head.

    A model that is its own base model is one, unless it holds others: CLIP holds two.
    """
    inside = {m: any(other in models for other in m.modules() if other is not m) for m in models}
    return [m.base_model for m in models if m.base_model is not m or not inside[m]]


def _infer_heads(usage: Usage, bodies: list[nn.Module]) -> None:
    """Add the layers that end in the model's output, and the layers parallel to a head.

    A linear layer with the shape of the largest table computes logits over the vocabulary. If
    nothing else is found, the last layer in order of registration is the head.
    """
    locations = usage.locations
    sizes = {p: size for p, ats in locations.items() if (size := _sizes(ats))}
    single = {p: at for p in sizes if _is_single(at := locations[p][0], bodies)}
    largest = max((p.numel() for p in _tables(locations)), default=0)
    vocabulary = {p.shape for p in _tables(locations) if p.numel() == largest}
    heads = usage.heads or {p for p in single if p.shape in vocabulary}
    heads = heads | _unread(sizes, single)
    last = next(reversed(sizes), None)
    if not heads and last in single:
        heads = {last}
    inferred = [p for p in single if p not in usage.heads and _is_head(p, heads, locations)]
    usage.heads = usage.heads.union(inferred)
    if inferred:
        usage.notes.append(f"inferred heads: {usage.names(inferred)}")
    elif not usage.heads:
        usage.notes.append("no head: the last layer is not linear, or part of a repeated block")


def _sizes(locations: list[Location]) -> tuple[int, int] | None:
    """Return d_out and d_in of a linear layer or a convolution."""
    for at in locations:
        if (view := linear_view(at) or conv_view(at)) and not lora_role(at):
            frame = view(at.shape)
            return frame.o, frame.i
    return None


def _is_single(at: Location, bodies: list[nn.Module]) -> bool:
    """Whether it is a linear layer that may be the last: in no body and no repeated block."""
    linear = at.attribute == "weight" and linear_view(at) is not None
    inner = at.is_repeated or any(body in at.modules for body in bodies)
    return linear and not (inner or router_view(at) or re.search(POSITION, at.name))


def _unread(
    sizes: dict[nn.Parameter, tuple[int, int]], single: dict[nn.Parameter, Location]
) -> set[nn.Parameter]:
    """Return the single layers whose outputs no linear layer and no later convolution can read.

    A linear layer can read them whole or cut into at most twelve parts, as gates and adaptive norms
    do. A convolution reads some pixels of each channel.
    """
    found = set()
    linear = {d_in for p, (_, d_in) in sizes.items() if p.ndim == 2}
    channels: set[int] = set()
    for p, (d_out, d_in) in reversed(sizes.items()):
        parts = {d_out // n for n in range(1, 13) if d_out % n == 0}
        if p in single and not parts & linear and all(d_out % n for n in channels - {1}):
            found.add(p)
        if p.ndim > 2:
            channels.add(d_in)
    return found


def _is_head(p: nn.Parameter, heads: set[nn.Parameter], locations: Locations) -> bool:
    """Whether p is a head, or in one module with a head and parallel to it.

    Two layers with one number of outputs are parallel if their shape is the same and not square,
    or if their names have the same last word, as CLIP's text_projection and visual_projection.
    """
    at = locations[p][0]
    for head in (locations[h][0] for h in heads):
        together = at.modules[-2:-1] == head.modules[-2:-1] and at.shape[0] == head.shape[0]
        alike = at.shape == head.shape and at.shape[0] != at.shape[1]
        if together and (alike or at.keys[-2].split("_")[-1] == head.keys[-2].split("_")[-1]):
            return True
    return p in heads


def _find_tokens(usage: Usage, declared: set[nn.Parameter]) -> None:
    """Take the tables with the shape of a declared input, else of a head, else all tables."""
    tables = [p for p in _tables(usage.locations) if not usage.locations[p][0].named(POSITION)]
    shapes = {p.shape for p in tables if p in declared} or {p.shape for p in usage.heads}
    usage.tokens = {p for p in tables if p.shape in shapes} or set(tables)
    if len(tables) > 1 and not any(p.shape in shapes for p in tables):
        names = usage.names(tables)
        usage.notes.append(f"{names}: it is unclear which one holds tokens, so all of them do")


def _tables(locations: Locations) -> list[nn.Parameter]:
    return [p for p, ats in locations.items() if any(map(is_table, ats))]
