"""The layers whose role depends on the whole model: output layers and tables of tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from sodaopt.geometry.views import Frame
from sodaopt.layers.locations import Location, Locations, imported

POSITION = (
    r"(^|[._])(pos(ition(al|s)?)?)(\d|[._]|$)|relative_|rel_pos|_rel$|attention_biases$"
    r"|token_type|segment|wpe"
)
"""A table, or a bare parameter with several rows, whose name has this is a `position`."""


@dataclass
class Usage:
    """The layers whose role depends on the whole model.

    locations: all parameters.
    tables: the weights of embedding layers, also if another layer uses them too.
    heads: the weights of the output layers.
    tokens: the tables of tokens.
    notes: a sentence for each of these that had to be inferred.
    """

    locations: Locations
    tables: Locations
    heads: set[nn.Parameter]
    tokens: set[nn.Parameter] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def names(self, parameters: Iterable[nn.Parameter]) -> str:
        return ", ".join(self.locations[p][0].name for p in parameters)


def find_usage(model: nn.Module, locations: Locations, heads: set[nn.Parameter]) -> Usage:
    """Find the heads and the token tables. Heads that the user names are the only ones."""
    pretrained = imported("transformers.modeling_utils", "PreTrainedModel")
    theirs: list[Any] = [m for m in model.modules() if isinstance(m, pretrained)]
    tables = {p: ats for p, ats in locations.items() if any(at.is_table() for at in ats)}
    usage = Usage(locations, tables, heads)
    if not heads:
        usage.heads = _declared(theirs, locations)
        # A model that is its own base model has no head, unless it holds others: CLIP holds two.
        own = [m for m in theirs if sum(isinstance(c, pretrained) for c in m.modules()) == 1]
        bodies = {m.base_model for m in theirs if m.base_model is not m or m in own}
        _infer_heads(usage, bodies)
    _find_tokens(usage)
    return usage


def _declared(models: list[Any], locations: Locations) -> set[nn.Parameter]:
    """Return the weights of the layers that transformers models declare as their output."""
    found: list[Any] = []
    for m in models:
        layer = m.get_output_embeddings()
        found += layer if isinstance(layer, nn.ModuleList) else [layer]
    weights = (getattr(layer, "weight", None) for layer in found)
    return {w for w in weights if w in locations and w.ndim == 2}


def _infer_heads(usage: Usage, bodies: set[nn.Module]) -> None:
    """Add tied layers, the layers that end in the model's output, and those parallel to a head.

    A linear layer with the shape of the largest table computes logits over the vocabulary. Another
    head beside it has as many inputs. If nothing else is found, the last layer in order of
    registration is the head.
    """
    frames = {
        p: view(p.shape)
        for p, ats in usage.locations.items()
        for at in ats
        if (view := at.linear() or at.kernel())
    }
    single = {p: ats for p, ats in usage.locations.items() if _is_single(ats[0], bodies)}
    largest = max((p.numel() for p in usage.tables), default=0)
    vocabulary = {p.shape for p in usage.tables if p.numel() == largest}
    known = usage.heads | usage.tables.keys() & frames.keys()
    heads = known or {p for p in single if p.shape in vocabulary}
    heads = heads | _unread(frames, single, {p.shape[1] for p in heads})
    heads = heads or {p for p in [*frames][-1:] if p in single}
    inferred = [p for p in single if p in heads or _is_parallel(p, heads, usage.locations)]
    usage.heads = heads.union(inferred)
    if inferred := [p for p in inferred if p not in known]:
        usage.notes.append(f"inferred heads: {usage.names(inferred)}")
    elif not heads:
        usage.notes.append("no head: the last layer is not linear, or part of a repeated block")


def _is_single(at: Location, bodies: set[nn.Module]) -> bool:
    """Whether it is a linear layer that may be the last: in no body and no repeated block."""
    linear = at.attribute == "weight" and at.linear() is not None
    inner = at.is_repeated() or not bodies.isdisjoint(at.modules)
    return linear and not (inner or at.is_router())


def _unread(
    frames: dict[nn.Parameter, Frame], single: Locations, widths: set[int]
) -> set[nn.Parameter]:
    """Return the single layers whose outputs no linear layer and no later convolution can read.

    A linear layer can read them whole or cut into at most twelve parts, as gates and adaptive norms
    do. A convolution reads some pixels of each channel.

    widths: the numbers of inputs that such a layer may have. An empty set allows any.
    """
    found = set()
    linear = {frame.i for p, frame in frames.items() if p.ndim == 2}
    channels: set[int] = set()
    for p, (_, d_out, d_in, *_) in reversed(frames.items()):
        parts = {d_out // n for n in range(1, 13) if d_out % n == 0}
        unread = not parts & linear and all(d_out % n for n in channels - {1})
        if unread and p in single and (not widths or d_in in widths):
            found.add(p)
        if p.ndim > 2:
            channels.add(d_in)
    return found


def _is_parallel(p: nn.Parameter, heads: set[nn.Parameter], locations: Locations) -> bool:
    """Whether a head of the same module has as many outputs and the same last word in its name.

    CLIP has a text_projection and a visual_projection.
    """

    def end(p: nn.Parameter) -> object:
        at = locations[p][0]
        return at.modules[-2:-1], p.shape[0], at.keys[-2:][0].split("_")[-1]

    return end(p) in map(end, heads)


def _find_tokens(usage: Usage) -> None:
    """Take the tables with the shape of a head, else all tables that are not positions."""
    tables = [p for p, ats in usage.tables.items() if not ats[0].named(POSITION)]
    heads, shapes = {p.shape for p in usage.heads}, {p.shape for p in tables}
    usage.tokens = {p for p in tables if p.shape in heads} or set(tables)
    if len(shapes) > 1 and shapes.isdisjoint(heads):
        names = usage.names(tables)
        usage.notes.append(f"{names}: it is unclear which one holds tokens, so all of them do")
