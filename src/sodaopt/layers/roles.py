"""The role of each parameter of a model, from its layer, its use, its name and its shape.

The first of RULES that matches gives the role. Only shapes are read, never values, so models on the
meta device and sharded models work too. If no rule matches, the role is unclear, and the caller
decides. `find_usage` finds the layers whose role depends on the whole model: output layers and
tables of tokens.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from torch import nn

from sodaopt.core.method import Method
from sodaopt.geometry.views import Frame, View, heads, matrix, transposed
from sodaopt.layers.locations import Location, Locations, imported, is_projection

MATRICES = ("hidden", "conv", "experts", "router", "lora_a", "lora_b")
"""The roles of the paper's hidden layers. A `depthwise` kernel is a vector for each tap."""

PARENT = (
    {"tied": "head", "position": "embedding"}
    | dict.fromkeys(MATRICES[1:], "hidden")
    | dict.fromkeys(("norm", "bias", "scalar"), "vector")
)
"""The role whose rule another role follows if a recipe has none for it."""


def family(role: str) -> str:
    """Return the role's parent, or the role itself if it has none."""
    return PARENT.get(role, role)


class Treatment(NamedTuple):
    """How to treat a parameter, as the rules or the user have chosen.

    An empty field means that nothing was chosen.

    view: how the parameter is stored as a matrix, if it is one.
    """

    role: str = ""
    view: View | None = None
    method: Method | None = None
    lr_factor: float | None = None


POSITION = (
    r"(^|[._])(pos(ition(al|s)?)?)(\d|[._]|$)|relative_|rel_pos|_rel$|attention_biases$"
    r"|token_type|segment|wpe"
)
"""A pattern of names. A table with such a name is a `position`, and so is a parameter with several
rows in a module of another type."""

# Patterns in the parameter's own part of its name.
BIAS = r"bias$|\b(bias_[^.]*|beta)$"
LEARNED_INPUT = r"(token|latents)[^.]*$"
FACTOR = r"(scale|alpha|gamma|lambda)[^.]*$|_log$|\bD$"
EMBEDDING = r"embed[^.]*$"

Match: TypeAlias = Callable[[Location, "Usage"], View | bool | None]
RULES: tuple[tuple[str, Match], ...] = (
    # The first rule that matches gives the role. A rule returns the view of a matrix, or True.
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
    ("scalar", lambda at, use: at.shape.numel() == 1),
    ("norm", lambda at, use: _is_norm(at.module)),
    ("vector", lambda at, use: not _has_rows(at) or at.named(f"{LEARNED_INPUT}|{FACTOR}")),
    ("position", lambda at, use: (at.shape[0] == 1 or at.named(EMBEDDING)) and _rows(at)),
    ("hidden", lambda at, use: is_projection(at.shape) and heads),
    ("experts", lambda at, use: at.stack()),
)
ROLES = tuple(dict.fromkeys(role for role, _ in RULES))
"""Every role once. `docs/layers.md` has a table of their meanings."""


def classify(at: Location, usage: "Usage") -> Treatment:
    """Return the role and the view of a parameter. The role is empty if no rule matches."""
    for role, match in RULES:
        if found := match(at, usage):
            return Treatment(role, found if callable(found) else None)
    return Treatment()


def _dense(at: Location) -> View:
    return at.linear() or at.kernel() or matrix


def _rows(at: Location) -> View | bool:
    """Return the view of a table (n, d). Other shapes have none and suit elementwise maps only."""
    is_table = len(at.shape) == 2 or (len(at.shape) == 3 and at.shape[0] == 1)
    return transposed if is_table else True


def _has_rows(at: Location) -> bool:
    """Whether the parameter is more than a vector. A class token, 1 x 1 x d, is a vector."""
    return at.shape.numel() != max(at.shape, default=1)


def _is_norm(m: nn.Module) -> bool:
    return any(re.search("norm|grn", c.__name__, re.I) for c in type(m).__mro__)


# -- the use of the layers in the whole model ------------------------------------------------------


@dataclass
class Usage:
    """The layers whose role depends on the whole model.

    tables: the weights of embedding layers, also if another layer uses them too.
    heads: the weights of the output layers.
    tokens: the tables of tokens.
    notes: sentences about heads and tables of tokens that are inferred or unclear.
    """

    tables: Locations
    heads: set[nn.Parameter]
    tokens: set[nn.Parameter] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)


def find_usage(model: nn.Module, locations: Locations, heads: set[nn.Parameter]) -> Usage:
    """Find the heads and the tables of tokens.

    heads: the heads that the user names. If there are any, no other heads are found.
    """
    pretrained = imported("transformers.modeling_utils", "PreTrainedModel")
    models: list[Any] = [m for m in model.modules() if isinstance(m, pretrained)]
    tables = {p: ats for p, ats in locations.items() if any(at.is_table() for at in ats)}
    usage = Usage(tables, heads or _declared(models, locations))
    if not heads:
        # A model that is its own base model has no head, unless it holds others: CLIP holds two.
        own = [m for m in models if sum(isinstance(c, pretrained) for c in m.modules()) == 1]
        bodies = {m.base_model for m in models if m.base_model is not m or m in own}
        _infer_heads(usage, locations, bodies)
    _find_tokens(usage)
    return usage


def _declared(models: list[Any], locations: Locations) -> set[nn.Parameter]:
    """Return the weights of the layers that transformers models declare as their output."""
    layers = [m.get_output_embeddings() for m in models]
    several = [head for layer in layers if isinstance(layer, nn.ModuleList) for head in layer]
    weights = (getattr(layer, "weight", None) for layer in (*layers, *several))
    return {w for w in weights if w in locations and w.ndim == 2}


def _infer_heads(usage: Usage, locations: Locations, bodies: set[nn.Module]) -> None:
    """Add tied layers, layers that end in the model's output, and layers parallel to a head.

    A linear layer with the shape of the largest table computes logits over the vocabulary. Another
    head beside it has the same number of inputs. If no head is found, the last layer in order of
    registration is the head.

    bodies: models without a head, whose layers are not heads.
    """
    frames = {
        p: view(p.shape)
        for p, ats in locations.items()
        for at in ats
        if (view := at.linear() or at.kernel())
    }
    single = {p: ats for p, ats in locations.items() if _is_single(ats[0], bodies)}
    vocabulary = max((p.shape for p in usage.tables), key=lambda s: s.numel(), default=None)
    known = usage.heads | usage.tables.keys() & frames.keys()
    heads = known or {p for p in single if p.shape == vocabulary}
    heads = heads | _unread(frames, single, {p.shape[1] for p in heads})
    heads = heads or {p for p in [*frames][-1:] if p in single}
    inferred = [p for p in single if p in heads or _is_parallel(p, heads, locations)]
    usage.heads = heads.union(inferred)
    if names := [single[p][0].name for p in inferred if p not in known]:
        usage.notes.append(f"inferred heads: {', '.join(names)}")
    elif not heads:
        usage.notes.append("no head: the last layer is not linear, or part of a repeated block")


def _is_single(at: Location, bodies: set[nn.Module]) -> bool:
    """Whether this is a linear layer that may be the last: in no body and no repeated block."""
    if at.attribute != "weight" or at.linear() is None or at.is_router():
        return False
    return bodies.isdisjoint(at.modules) and not at.is_repeated()


def _unread(
    frames: dict[nn.Parameter, Frame], single: Locations, widths: set[int]
) -> set[nn.Parameter]:
    """Return the single layers whose outputs no linear layer and no later convolution can read.

    A linear layer can read the outputs whole, or cut into at most twelve parts, as gates and
    adaptive norms do. A convolution reads some pixels of each channel.

    frames: the frame of every linear layer and convolution, in order of registration.
    single: the layers to choose from, for which `_is_single` is true.
    widths: the numbers of inputs that a returned layer may have. An empty set allows any.
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
    """Set the tables of tokens: all tables with the shape of a head, else all but positions."""
    tables = [p for p, ats in usage.tables.items() if not ats[0].named(POSITION)]
    heads, shapes = {p.shape for p in usage.heads}, {p.shape for p in tables}
    usage.tokens = {p for p in tables if p.shape in heads} or set(tables)
    if len(shapes) > 1 and shapes.isdisjoint(heads):
        names = ", ".join(usage.tables[p][0].name for p in tables)
        usage.notes.append(f"{names}: unclear which one holds tokens, so all are embeddings")
