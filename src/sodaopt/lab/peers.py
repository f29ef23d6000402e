"""Build other libraries' optimizers for `sodaopt bench --against`, if they are installed."""

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import AdamW

from sodaopt import hidden

Build: TypeAlias = Callable[[nn.Module], Any]

DION = "DION_PATH"
"""The environment variable with the path of a checkout of Dion, which is not on PyPI."""


class Together:
    """Muon for the hidden matrices and AdamW for all other parameters."""

    def __init__(self, model: nn.Module, muon: Callable[[list[nn.Parameter]], Any]) -> None:
        matrices, rest = split(model)
        self.parts = [muon(matrices), AdamW(rest, weight_decay=0, fused=_fuses(rest))]

    @property
    def state(self) -> dict[Any, Any]:
        return {key: value for part in self.parts for key, value in part.state.items()}

    def step(self) -> None:
        for part in self.parts:
            part.step()


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the hidden matrices, and the other parameters."""
    matrices = hidden(model)
    chosen = set(matrices)
    return matrices, [p for p in model.parameters() if p not in chosen]


def adamw(model: nn.Module) -> AdamW:
    params = list(model.parameters())
    return AdamW(params, weight_decay=0, fused=_fuses(params))


def _fuses(params: list[nn.Parameter]) -> bool | None:
    return True if params and params[0].is_cuda else None


def _muon_with_adamw(module: str, name: str) -> Build:
    """Return a builder for a Muon that runs AdamW in groups with use_muon=False."""

    def build(model: nn.Module) -> Any:
        matrices, rest = split(model)
        groups = [{"params": matrices, "use_muon": True}, {"params": rest, "use_muon": False}]
        return getattr(import_module(module), name)(groups)

    return build


def _scion(model: nn.Module) -> Any:
    return import_module("pytorch_optimizer").SCION(model.parameters())


def _schedulefree(model: nn.Module) -> Any:
    opt = import_module("schedulefree").AdamWScheduleFree(model.parameters())
    opt.train()
    return opt


def _dion(model: nn.Module) -> Any:
    if path := os.environ.get(DION):
        sys.path.insert(0, path)
    matrices, rest = split(model)
    groups = [{"params": matrices}, {"params": rest, "algorithm": "adamw"}]
    return import_module("dion").Muon(groups, use_triton=matrices[0].is_cuda)


def _heavyball(name: str, params: Any) -> Any:
    # heavyball's step clears the gradients by default, but bench uses them again
    return getattr(import_module("heavyball"), name)(params, consume_grad=False)


PEERS: dict[str, dict[str, Build]] = {
    "torch": {
        "torch AdamW": adamw,
        "torch Muon": lambda model: Together(model, torch.optim.Muon),
    },
    "muon": {"Keller Jordan's Muon": _muon_with_adamw("muon", "SingleDeviceMuonWithAuxAdam")},
    "pytorch_optimizer": {
        "pytorch_optimizer Muon": _muon_with_adamw("pytorch_optimizer", "Muon"),
        "pytorch_optimizer SCION": _scion,
    },
    "schedulefree": {"schedulefree AdamW": _schedulefree},
    "lion-pytorch": {
        "lion-pytorch": lambda model: import_module("lion_pytorch").Lion(model.parameters())
    },
    "gram-newton-schulz": {
        "gram-newton-schulz Muon": lambda model: Together(
            model, lambda params: import_module("gram_newton_schulz").Muon(params)
        )
    },
    "heavyball": {
        "heavyball AdamW": lambda model: _heavyball("AdamW", model.parameters()),
        "heavyball Muon": lambda model: Together(model, lambda params: _heavyball("Muon", params)),
    },
    "dion": {"Dion's Muon": _dion},
}
