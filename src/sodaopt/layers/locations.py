"""Where each parameter of a model is, and how its layer stores it.

A `Location` answers the questions of the rules in `roles.py`, from the type and the sizes of the
layer. Only shapes are read, never values.
"""

import re
import sys
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TypeAlias

import torch
from torch import nn

from sodaopt._errors import times
from sodaopt.anchors.init import CONVS
from sodaopt.geometry.views import View, conv, deconv, grouped, matrix, transposed

# Keys that torch.compile, FSDP and activation checkpointing insert into a name. They are private in
# torch. If torch renames one, it stays in the names of a plan.
WRAPPER_KEYS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


@dataclass(frozen=True, eq=False)
class Location:
    """One layer that uses a parameter.

    name: the parameter's name in named_parameters(), without the keys of wrappers.
    modules: the modules from the model down to the layer.
    keys: the attribute names on the way down, one for each module. The last one is the parameter's.
    """

    parameter: nn.Parameter
    name: str
    modules: tuple[nn.Module, ...]
    keys: tuple[str, ...]

    @property
    def module(self) -> nn.Module:
        return self.modules[-1]

    @property
    def attribute(self) -> str:
        return self.keys[-1]

    @property
    def shape(self) -> torch.Size:
        return self.parameter.shape

    def named(self, pattern: str) -> bool:
        """Whether the pattern is in the last two keys, which name the layer and the parameter."""
        return re.search(pattern, ".".join(self.keys[-2:])) is not None

    def is_repeated(self) -> bool:
        """Whether the layer is in an attention, a list of blocks, or one of many similar blocks."""
        parents = self.modules[:-1]
        if any("attention" in type(m).__name__.lower() for m in parents):
            return True
        for parent, child in pairwise(parents):
            container = isinstance(child, nn.Sequential | nn.ModuleList | nn.ModuleDict)
            similar = sum(type(m) is type(child) for m in parent.children())
            if not container and (isinstance(parent, nn.ModuleList) or similar > 2):
                return True
        return False

    def linear(self) -> View | None:
        """Return how the weight of a linear layer is stored, or None for any other parameter.

        A layer of another library counts as linear if it declares in_features and out_features.
        """
        m, shape = self.module, tuple(self.shape)
        if isinstance(m, nn.MultiheadAttention | nn.RNNBase | nn.RNNCellBase) and len(shape) == 2:
            return matrix
        if self.attribute != "weight":
            return None
        sizes = getattr(m, "out_features", None), getattr(m, "in_features", None)
        if isinstance(m, nn.Linear) or shape == sizes:
            return matrix
        flipped = isinstance(m, imported("transformers.pytorch_utils", "Conv1D"))
        return transposed if flipped or shape == sizes[::-1] else None

    def kernel(self) -> View | None:
        """Return how the kernel of a convolution is stored, or None for any other parameter."""
        m = self.module
        if not isinstance(m, CONVS) or self.attribute != "weight":
            return None
        of = deconv if m.transposed else conv
        return of if m.groups == 1 else grouped(m.groups, of)

    def is_depthwise(self) -> bool:
        return isinstance(self.module, CONVS) and 1 < self.module.groups == self.module.in_channels

    def is_table(self) -> bool:
        is_embedding = isinstance(self.module, nn.Embedding | nn.EmbeddingBag)
        return is_embedding and self.attribute == "weight"

    def stack(self) -> View | None:
        """Return how a 3-D stack of matrices is stored, or None if this is unclear."""
        if len(self.shape) != 3:
            return None
        flipped = getattr(self.module, "is_transposed", None)  # transformers declares it
        if not isinstance(flipped, bool):
            return self._stack_by_sizes()
        return transposed if flipped else matrix

    def _stack_by_sizes(self) -> View | None:
        """Return how a 3-D stack is stored, or None if the sizes in its block do not tell.

        The block's router (n, d_in) has the same input as the block's first stack. This stack is
        transposed if d_in is its second size. All stacks of a block are stored alike.
        """
        n, o, i = self.shape
        if o == i:
            return matrix  # the polar factor of a transposed matrix is the transposed factor
        block = self.modules[-2:][0].named_parameters()
        shapes = [p.shape for name, p in block if not name.endswith("bias") and p.shape[:1] == (n,)]
        first = next(shape for shape in shapes if len(shape) == 3)
        read = {shape[1] for shape in shapes if len(shape) == 2}
        if (first[1] in read) == (first[2] in read):
            return None
        return transposed if first[1] in read else matrix

    def is_router(self) -> bool:
        """Whether this is a matrix with one output for each expert beside it, or a single output.

        The router of a shared expert has a single output.
        """
        if len(self.shape) != 2 or self.attribute.endswith("bias") or expert_counts(self.module):
            return False
        banks = (bank for block in self.modules[-3:] for bank in block.children())
        counts = set().union(*map(expert_counts, banks))
        return bool(counts) and self.shape[0] in counts | {1}

    def is_lora(self, factor: str) -> bool:
        """Whether this is the factor "a" or "b" of a low-rank adapter of peft or torchtune."""
        named = any(re.fullmatch(rf"lora_(embedding_)?{factor}", key, re.I) for key in self.keys)
        return named and self.parameter.ndim > 1


def is_projection(shape: torch.Size) -> bool:
    """Whether the shape is (d, heads, d_head) with d = heads d_head.

    Such a matrix is square, so its polar factor is the same whichever side is the input.
    """
    return len(shape) == 3 and shape[0] == shape[1] * shape[2]


def expert_counts(m: nn.Module) -> set[int]:
    """Return the numbers of experts in a module: the lengths of its 3-D stacks."""
    if isinstance(m, CONVS):
        return set()
    shapes = [p.shape for p in m.parameters(recurse=False) if p.ndim == 3]
    return {shape[0] for shape in shapes if not is_projection(shape)} - {1}


def imported(module: str, name: str) -> tuple[type, ...]:
    """Return a class of another library for isinstance, or () if the library is not imported."""
    found = getattr(sys.modules.get(module), name, None)
    return (found,) if isinstance(found, type) else ()


Locations: TypeAlias = dict[nn.Parameter, list[Location]]


def locate(model: nn.Module) -> Locations:
    """Map each parameter, in order of registration, to every layer that uses it."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a model, got a {type(model).__name__}: pass the nn.Module")
    found: Locations = {}
    for path, p in model.named_parameters(remove_duplicate=False):
        keys = path.split(".")
        modules = accumulate(keys[:-1], getattr, initial=model)
        name = ".".join(key for key in keys if key not in WRAPPER_KEYS)
        location = _at_layer(Location(p, name, tuple(modules), tuple(keys)))
        _refuse_unshaped(location)
        found.setdefault(p, []).append(location)
    return found


def _at_layer(at: Location) -> Location:
    """Return the location of a reparametrised weight in its layer, and any other one unchanged.

    The length in weight_norm gets a name of its own, because it is not the weight.
    """
    if isinstance(at.module, nn.utils.parametrize.ParametrizationList):
        own = at.keys[-2] + "_g" * (at.attribute == "original0")
        return replace(at, modules=at.modules[:-2], keys=(*at.keys[:-3], own))
    if at.attribute in ("weight_v", "weight_orig"):
        return replace(at, keys=(*at.keys[:-1], "weight"))
    return at


def _refuse_unshaped(at: Location) -> None:
    """Refuse a parameter that does not have the shape of its layer."""
    if nn.parameter.is_lazy(at.parameter):
        raise ValueError(f"{at.name} has no shape yet. Run the model once first.")
    layer = at.linear() or at.kernel() or at.is_table()
    # FullyShardedDataParallel gives its parameters this private name. If torch renames it, they are
    # refused only if they belong to a layer whose parameters have more dimensions.
    if at.attribute == "_flat_param" or (layer and at.parameter.ndim < 2):
        raise ValueError(
            f"{at.name} ({times(at.shape)}) is flattened, so its layers are unknown. Shard with "
            "fully_shard (FSDP2), which keeps the shapes, not with FullyShardedDataParallel."
        )


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside torch.compile, DataParallel and DistributedDataParallel.

    If torch renames the private `_orig_mod`, a compiled model is planned as it is.
    """
    inner = getattr(model, "module" if isinstance(model, PARALLEL) else "_orig_mod", None)
    return unwrapped(inner) if isinstance(inner, nn.Module) else model
