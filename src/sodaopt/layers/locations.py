"""Where each parameter of a model is: the modules from the model down to the one that holds it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from sodaopt._errors import times
from sodaopt.anchors.init import CONVS

# Keys that torch.compile, FSDP and activation checkpointing insert into a parameter's name.
WRAPPER_KEYS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
PARALLEL = (nn.DataParallel, DistributedDataParallel)
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True, eq=False)
class Location:
    """One layer that uses a parameter.

    name: the parameter's name in named_parameters(), without the keys of wrappers.
    modules: the modules from the model down to the layer.
    keys: the attribute of each of these modules that leads down. The last one is the parameter's.
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
        """Whether the pattern is in the layer's and the parameter's own part of the name."""
        return re.search(pattern, ".".join(self.keys[-2:])) is not None

    @property
    def is_repeated(self) -> bool:
        """Whether the layer is in a list of blocks, in three similar blocks, or in an attention."""
        for parent, child in zip(self.modules, self.modules[1:], strict=False):
            if "attention" in type(parent).__name__.lower():
                return True
            if child is self.module or isinstance(child, CONTAINERS):
                continue
            similar = sum(type(m) is type(child) for m in parent.children())
            if isinstance(parent, nn.ModuleList) or similar > 2:
                return True
        return False


Locations: TypeAlias = dict[nn.Parameter, list[Location]]


def locate(model: nn.Module) -> Locations:
    """Map each parameter, in order of registration, to every layer that uses it."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a model, got a {type(model).__name__}: pass the nn.Module")
    found: Locations = {}
    for path, p in model.named_parameters(remove_duplicate=False):
        keys = path.split(".")
        modules = list(accumulate(keys[:-1], getattr, initial=model))
        name = ".".join(key for key in keys if key not in WRAPPER_KEYS)
        # A reparametrised weight belongs to its layer. original0 is the length of weight_norm.
        if isinstance(modules[-1], ParametrizationList):
            own = keys[-2] + "_g" * (keys[-1] == "original0")
            modules, keys = modules[:-2], [*keys[:-3], own]
        elif keys[-1] in ("weight_v", "weight_orig"):
            keys[-1] = "weight"
        location = Location(p, name, tuple(modules), tuple(keys))
        _refuse_unshaped(location)
        found.setdefault(p, []).append(location)
    return found


def _refuse_unshaped(at: Location) -> None:
    """Refuse a parameter that does not have the shape of its layer."""
    if is_lazy(at.parameter):
        raise ValueError(f"{at.name} has no shape yet. Run the model once first.")
    layer = isinstance(at.module, (nn.Linear, nn.Embedding, *CONVS)) and at.attribute == "weight"
    if at.attribute == "_flat_param" or (layer and at.parameter.ndim < 2):
        raise ValueError(
            f"{at.name} ({times(at.shape)}) is flattened, so its layers are unknown. Shard with "
            "fully_shard (FSDP2), which keeps the shapes, not with FullyShardedDataParallel."
        )


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside torch.compile, DataParallel and DistributedDataParallel."""
    inner = getattr(model, "module" if isinstance(model, PARALLEL) else "_orig_mod", None)
    return unwrapped(inner) if isinstance(inner, nn.Module) else model
