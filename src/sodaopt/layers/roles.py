"""What each parameter of a model is, by the type and the use of the module that holds it.

Nothing here reads a value: shapes are enough, so meta-device and DTensor models work too. What
cannot be told is left to the caller (None); what is inferred, not read off a type, is noted.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from sodaopt._errors import times
from sodaopt.geometry.views import Shape, View, conv, deconv, grouped, matrix, transposed

ROLES = {
    "embedding": "a table of tokens: a one-hot first layer",
    "position": "any other table: positions, segments, relative biases",
    "tied": "embedding and head in one parameter, treated as the last layer",
    "head": "the last layer",
    "hidden": "the matrix of a linear layer",
    "conv": "a convolution kernel, the first one of an image too",
    "experts": "a 3-D stack of matrices",
    "router": "the scores that choose experts",
    "lora_a": "the first factor of a low-rank adapter, d_in -> r",
    "lora_b": "the second factor of a low-rank adapter, r -> d_out",
    "norm": "the gain of a normalisation",
    "bias": "a bias",
    "scalar": "a single number",
    "vector": "any other vector",
}
MATRICES = ("hidden", "conv", "experts", "router", "lora_a", "lora_b")
"""The paper's hidden layers."""

PARENT = (
    {"tied": "head", "position": "embedding"}
    | dict.fromkeys(MATRICES[1:], "hidden")
    | dict.fromkeys(("norm", "bias", "scalar"), "vector")
)
"""Whose rule a role follows where a recipe has none for it."""

Told: TypeAlias = tuple[str, View | None]  # a role, and how the parameter is a matrix if it is one

# -- where a parameter sits -----------------------------------------------------------------------

# What torch's wrappers put into a parameter's name.
WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


class Place(NamedTuple):
    """One module that holds the parameter: the modules from the model down to it, and the keys."""

    path: tuple[nn.Module, ...]
    keys: tuple[str, ...]

    @property
    def module(self) -> nn.Module:
        return self.path[-1]

    @property
    def attribute(self) -> str:
        return self.keys[-1]

    @property
    def name(self) -> str:
        """As named_parameters() has it, without the wrappers."""
        pairs = zip(self.path, self.keys, strict=True)
        return ".".join(key for module, key in pairs if not _wraps(module, key))


Places: TypeAlias = dict[nn.Parameter, list[Place]]


def _wraps(module: nn.Module, key: str) -> bool:
    parallel = isinstance(module, nn.DataParallel | DistributedDataParallel)
    return key in WRAPPERS or (parallel and key == "module")


def unwrapped(model: nn.Module) -> nn.Module:
    for key, child in model._modules.items():
        if child is not None and _wraps(model, key):
            return unwrapped(child)
    return model


def places(model: nn.Module) -> Places:
    """Every parameter once, with all the places that share it, in order of registration."""
    found: Places = {}
    for name, module in model.named_modules(remove_duplicate=False):
        path, keys = [model], name.split(".") if name else []
        for key in keys:
            path.append(path[-1]._modules[key])  # type: ignore[arg-type]
        for key, p in module._parameters.items():
            if p is None:
                continue
            place = Place(tuple(path), (*keys, key))
            if is_lazy(p):
                raise ValueError(f"{place.name} has no shape yet: run the model once first")
            found.setdefault(p, []).append(place)
    return found


# -- by type --------------------------------------------------------------------------------------


def _types(module: str, name: str) -> tuple[type, ...]:
    """A class of another library, for isinstance; none while nobody has imported that library."""
    found = getattr(sys.modules.get(module), name, None)
    return (found,) if isinstance(found, type) else ()


def _linear(place: Place, shape: Shape) -> View | None:
    """How the weight of a linear layer is stored; None if it is none.

    The layers of other libraries count by the sizes that they declare.
    """
    m = place.module
    if place.attribute != "weight":
        return None
    if isinstance(m, nn.Linear):
        return matrix
    if isinstance(m, _types("transformers.pytorch_utils", "Conv1D")):
        return transposed
    o, i = getattr(m, "out_features", None), getattr(m, "in_features", None)
    if tuple(shape) == (o, i):
        return matrix
    return transposed if tuple(shape) == (i, o) else None


def _table(place: Place, shape: Shape) -> bool:
    m = place.module
    sizes = getattr(m, "num_embeddings", None), getattr(m, "embedding_dim", None)
    known = isinstance(m, nn.Embedding | nn.EmbeddingBag) or tuple(shape) == sizes
    return known and place.attribute == "weight"


def _kernel(m: _ConvNd) -> View | None:
    if m.transposed:
        return deconv if m.groups == 1 else None
    return conv if m.groups == 1 else grouped(m.groups)


def _vector(place: Place, shape: Shape) -> str:
    m, key = place.module, place.attribute
    if key.endswith("bias") or key.startswith("bias_"):
        return "bias"
    if math.prod(shape) == 1:
        return "scalar"
    leaf = next(m.children(), None) is None and not isinstance(m, nn.PReLU)
    # A layer of nothing but vectors scales what passes: LayerNorm, anyone's RMSNorm, LayerScale.
    only_vectors = all(p is None or p.ndim < 2 for p in m._parameters.values())
    return "norm" if leaf and only_vectors else "vector"


# The attributes of adapted layers (peft's, torchtune's): a role, and the factor beside it.
LORA = {
    "lora_A": ("lora_a", "lora_B"),
    "lora_B": ("lora_b", "lora_A"),
    "lora_a": ("lora_a", "lora_b"),
    "lora_b": ("lora_b", "lora_a"),
    "lora_embedding_A": ("lora_a", "lora_embedding_B"),
    "lora_embedding_B": ("lora_b", "lora_embedding_A"),
}


def _lora(place: Place) -> str | None:
    for module, key in zip(place.path, place.keys, strict=True):
        if key in LORA and hasattr(module, LORA[key][1]):
            return LORA[key][0]
    return None


def _experts(m: nn.Module) -> int:
    """How many experts a module holds, as 3-D stacks or as a list of modules alike; 0: none."""
    if isinstance(m, nn.ModuleList):
        alike = len({type(e) for e in m}) == 1
        return len(m) if alike and sum(isinstance(x, nn.Linear) for x in m[0].modules()) > 1 else 0
    if isinstance(m, _ConvNd):
        return 0
    stacks = {p.shape[0] for p in m._parameters.values() if p is not None and p.ndim == 3}
    return max(stacks) if len(stacks) == 1 and stacks != {1} else 0


def _router(place: Place, shape: Shape) -> View | None:
    """A matrix with an output for each of the experts beside it."""
    m = place.module
    if len(shape) != 2 or place.attribute.endswith("bias") or _experts(m):
        return None
    for block in place.path[-2:]:
        for bank in block.children():
            n, listed = _experts(bank), isinstance(bank, nn.ModuleList)
            if not n or (listed and not _repeated(place)):  # a list may be the model's own layers
                continue
            if shape[0] == n or (shape[0] == 1 and not listed):  # 1: opens a shared expert
                return matrix
            if shape[1] == n and not isinstance(m, nn.Linear):
                return transposed
    return None


# -- by use: which layer is the last, which tables hold tokens ------------------------------------


@dataclass
class Uses:
    heads: set[nn.Parameter]
    tokens: set[nn.Parameter] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)


def uses(model: nn.Module, all_: Places, heads: set[nn.Parameter]) -> Uses:
    """`heads` are those that the user names; then none is looked for."""
    kind = _types("transformers.modeling_utils", "PreTrainedModel")
    theirs: list[Any] = [m for m in model.modules() if isinstance(m, kind)]
    found = Uses(heads or _declared(theirs, "get_output_embeddings", all_))
    if not heads:
        found.heads |= {p for p, at in all_.items() if _tied(p, at)}
    if not found.heads:
        _infer_head(all_, [m.base_model for m in theirs], found)
    _find_tokens(all_, _declared(theirs, "get_input_embeddings", all_), found)
    return found


def _declared(models: list[Any], getter: str, all_: Places) -> set[nn.Parameter]:
    """The weights of the layers that transformers models name as their input or output."""
    found = set()
    for m in models:
        try:
            weight = getattr(getattr(m, getter)(), "weight", None)
        except NotImplementedError:  # a model without tokens
            continue
        if weight in all_ and weight.ndim == 2:
            found.add(weight)
    return found


def _tied(p: nn.Parameter, at: list[Place]) -> bool:
    return any(_table(a, p.shape) for a in at) and any(_linear(a, p.shape) for a in at)


def _infer_head(all_: Places, bodies: list[nn.Module], found: Uses) -> None:
    """The last layer in order of registration, if it is linear and in no repeated block.

    A linear layer of the size of the largest table comes first: it makes logits over the
    vocabulary. (A smaller table, of positions say, may have a hidden layer's size by chance.)
    """
    found_tables = [p for p, at in all_.items() if _table(at[0], p.shape)]
    largest = max((p.numel() for p in found_tables), default=0)
    tables = {tuple(p.shape) for p in found_tables if p.numel() == largest}
    last = logits = None
    for p, (place, *_) in all_.items():
        if p.ndim < 2 or _table(place, p.shape) or _lora(place):
            continue
        inner = _repeated(place) or any(body in place.path for body in bodies)
        last = p if _linear(place, p.shape) and not inner else None
        logits = p if last is p and tuple(p.shape) in tables else logits
    head, why = logits, "which has the size of the largest table"
    if head is None:
        head, why = last, "the last layer in order of registration"
    if head is None:
        found.notes.append("no head: the last layer is not linear, or part of a repeated block")
        return
    found.heads = {head}
    found.notes.append(f"head: {all_[head][0].name}, {why}")


def _repeated(place: Place) -> bool:
    """Inside a block of a stack, or part of a larger layer."""
    for parent, child in zip(place.path, place.path[1:], strict=False):
        if isinstance(parent, nn.MultiheadAttention):
            return True
        if child is place.module or isinstance(
            child, nn.Sequential | nn.ModuleList | nn.ModuleDict
        ):
            continue
        alike = sum(type(m) is type(child) for m in parent.children())
        if isinstance(parent, nn.ModuleList) or alike > 1:
            return True
    return False


def _find_tokens(all_: Places, declared: set[nn.Parameter], found: Uses) -> None:
    """Tables of the size of one that a transformers model names, else of a head, else all."""
    tables = [p for p, at in all_.items() if _table(at[0], p.shape)]
    named = {tuple(p.shape) for p in tables if p in declared}
    sizes = named or {tuple(p.shape) for p in found.heads}
    found.tokens = {p for p in tables if tuple(p.shape) in sizes}
    if found.tokens:
        return
    found.tokens = set(tables)
    if len(tables) > 1:
        names = ", ".join(all_[p][0].name for p in tables)
        found.notes.append(f"{names}: which one holds tokens cannot be told, so all of them do")


# -- one parameter --------------------------------------------------------------------------------


def role(p: nn.Parameter, at: list[Place], known: Uses) -> Told | None:
    """Role and view; None where they cannot be told."""
    place, shape = at[0], p.shape
    _refuse_flat(p, place)
    if p in known.heads:
        stored = [view for a in at if (view := _linear(a, shape))]
        return "tied" if any(_table(a, shape) for a in at) else "head", (stored or [matrix])[0]
    told = _by_type(p, place, known)
    if (lora := _lora(place)) and p.ndim > 1:
        return lora, told[1] if told else matrix
    return told


def _by_type(p: nn.Parameter, place: Place, known: Uses) -> Told | None:
    m, shape = place.module, p.shape
    if p.ndim < 2:
        return _vector(place, shape), None
    if _table(place, shape):
        return "embedding" if p in known.tokens else "position", transposed
    if view := _router(place, shape):
        return "router", view
    if view := _linear(place, shape):
        return "hidden", view
    if isinstance(m, _ConvNd):
        view = _kernel(m)
        return ("conv", view) if view else None
    if isinstance(m, nn.MultiheadAttention | nn.RNNBase | nn.RNNCellBase) and p.ndim == 2:
        return "hidden", matrix
    return _bare(p, place)


def _bare(p: nn.Parameter, place: Place) -> Told | None:
    """A parameter with two dimensions or more that no known layer holds."""
    m, shape = place.module, p.shape
    if p.numel() == max(shape):  # a class token is 1 x 1 x d
        return _vector(place, shape), None
    if p.ndim == 3 and shape[0] == 1:
        return "position", transposed  # 1 x n x d, added to a batch of sequences
    if p.ndim == 2 and shape[0] == _experts(m) and place.attribute.endswith("bias"):
        return "bias", None
    flipped = getattr(m, "is_transposed", None)  # transformers says how its experts are stored
    if p.ndim == 3 and isinstance(flipped, bool):
        return "experts", transposed if flipped else matrix
    return None


def _refuse_flat(p: nn.Parameter, place: Place) -> None:
    layer = isinstance(place.module, nn.Linear | nn.Embedding | _ConvNd)
    if place.attribute == "_flat_param" or (layer and place.attribute == "weight" and p.ndim < 2):
        raise ValueError(
            f"{place.name} ({times(p.shape)}) is flattened, so no layer can be seen in it: shard "
            "with fully_shard (FSDP2), which keeps the shapes, not with FullyShardedDataParallel"
        )
