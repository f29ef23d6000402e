"""Where each parameter of a model is: the modules from the model down to the one that holds it."""

from __future__ import annotations

import re
from dataclasses import dataclass
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
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True, eq=False)
class Location:
    """One module that holds a parameter.

    modules: the modules from the model down to the one that holds the parameter.
    keys: the attribute of each of these modules that leads down. The last one is the parameter's.
    """

    parameter: nn.Parameter
    modules: tuple[nn.Module, ...]
    keys: tuple[str, ...]

    @property
    def module(self) -> nn.Module:
        """The layer that uses the parameter, also if a parametrization of the layer holds it."""
        return self.modules[-self._depth]

    @property
    def attribute(self) -> str:
        """The parameter's name in its layer. Of a reparametrised weight it is the matrix."""
        key = self.keys[-self._depth]
        if self._depth == 1:
            return "weight" if key in ("weight_v", "weight_orig") else key
        name = self.keys[-2]
        return f"{name}_g" if self.keys[-1] == "original0" else name  # weight_norm's lengths

    def named(self, pattern: str) -> bool:
        """Whether the pattern is in the last two parts of the name: the layer's and its own."""
        layer = self.keys[-self._depth - 1 : -self._depth]
        return re.search(pattern, ".".join((*layer, self.attribute))) is not None

    @property
    def _depth(self) -> int:
        return 3 if isinstance(self.modules[-1], ParametrizationList) else 1

    @property
    def shape(self) -> torch.Size:
        return self.parameter.shape

    @property
    def name(self) -> str:
        """The parameter's name in named_parameters(), without the keys of wrappers."""
        pairs = zip(self.modules, self.keys, strict=True)
        return ".".join(key for module, key in pairs if not _is_wrapper(module, key))

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
    """Map each parameter, in order of registration, to every module that holds it."""
    found: Locations = {}
    for name, module in model.named_modules(remove_duplicate=False):
        modules, keys = [model], name.split(".") if name else []
        for key in keys:
            modules.append(modules[-1]._modules[key])  # type: ignore[arg-type]
        for key, p in module._parameters.items():
            if p is None:
                continue
            location = Location(p, tuple(modules), (*keys, key))
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
    """Return the model inside torch's wrappers."""
    for key, child in model._modules.items():
        if child is not None and _is_wrapper(model, key):
            return unwrapped(child)
    return model


def _is_wrapper(module: nn.Module, key: str) -> bool:
    parallel = isinstance(module, nn.DataParallel | DistributedDataParallel)
    return key in WRAPPER_KEYS or (parallel and key == "module")
