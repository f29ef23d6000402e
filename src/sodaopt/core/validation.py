"""What SODA refuses at construction: each error names the parameter or group, and the fix."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from sodaopt._errors import times
from sodaopt.core.method import ROWS, Method

# Hyperparameters of other optimizers: in a group they would be ignored in silence.
IGNORED = {
    "weight_decay", "momentum", "betas", "beta", "beta1", "beta2", "eps", "nesterov", "dampening",
    "amsgrad", "momentum_decay", "rho", "alpha", "alpha_bar", "lam", "lam_bar", "gamma", "centre",
    "geometry", "radius", "scale", "norm",
}  # fmt: skip


def as_list(params: Any, where: str) -> list[Any]:
    if params is None:
        raise ValueError(f"{where} has no 'params'")
    if isinstance(params, Tensor):
        return [params]
    if isinstance(params, set):
        raise TypeError(f"{where} is a set, whose order changes between runs: pass a list")
    return list(params)


def check_lr(lr: Any, where: str) -> None:
    if not isinstance(lr, Real | Tensor) or (isinstance(lr, Tensor) and lr.numel() != 1):
        raise TypeError(f"{where}: lr must be a number, got {lr!r}; SODA(params, lr, method)")
    if not 0 <= float(lr) < float("inf"):
        raise ValueError(f"{where}: lr must not be negative or infinite, got {lr}")


# What a group may say; a near miss of one of these is a slip of the pen.
KNOWN = {"params", "lr", "lr_factor", "method", "foreach", "maximize", "seed", "train_mode"}


class Defaults(dict[str, Any]):
    """The optimizer's defaults, which answer OneCycleLR and CyclicLR with the fix.

    torch's own error does not say what to write, and their look-up here is the only place where
    they touch the optimizer before they raise it.
    """

    def __contains__(self, key: object) -> bool:
        asker = sys._getframe(1).f_globals.get("__name__")
        if key == "momentum" and asker == "torch.optim.lr_scheduler":
            raise ValueError("SODA has no momentum to cycle: pass cycle_momentum=False")
        return super().__contains__(key)


def check_keys(group: dict[str, Any], method: Method, where: str) -> None:
    for key in set(group) - KNOWN - IGNORED:
        if near := get_close_matches(str(key), [*KNOWN, *IGNORED], n=1, cutoff=0.8):
            raise ValueError(f"{where} carries {key!r}; did you mean {near[0]!r}?")
    for key in sorted(IGNORED & set(group)):
        if key == "weight_decay" and group[key] == 0 and method.centre != "origin":
            continue  # what the method does anyway; frameworks add it to every group
        takers = [n for n in (method.name, *ROWS) if n in ROWS and key in _arguments(ROWS[n])]
        example = f", e.g. zoo.{takers[0]}({key}={group[key]!r})" if takers else ""
        raise ValueError(
            f"{where} carries {key}={group[key]!r}, which would be ignored: it belongs to the "
            f"method{example}; drop it from the group"
        )


def _arguments(f: Callable[..., Any]) -> Iterable[str]:
    return inspect.signature(f).parameters


def check_parameter(name: str, p: Tensor, method: Method) -> None:
    what = f"{name} ({times(p.shape)}, {str(p.dtype).removeprefix('torch.')})"
    if p.is_complex():
        raise ValueError(f"{what} is complex: optimise torch.view_as_real of it instead")
    if p.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{what}: only float64, float32, bfloat16 and float16 can be trained")
    if getattr(p, "_fsdp_flattened", False) and not method.geometry.shapeless:
        raise ValueError(
            f"{what} is a flattened piece of a parameter, whose shape {method.name} needs: shard "
            "with fully_shard (FSDP2), which keeps shapes"
        )
    try:
        method.geometry.check(p.shape)
    except ValueError as e:
        raise ValueError(f"{what} cannot have the geometry of {method.name}: {e}") from None
