"""The checks of SODA's arguments and groups. Each error names the cause and the fix."""

import inspect
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor

from sodaopt._errors import number, times
from sodaopt.core.method import ROWS, Method

KNOWN = {"params", "lr", "lr_factor", "method", "settings", "maximize", "seed", "train_mode"}
"""The keys of a group. Another key that is similar to one of these is taken for a typo."""

FOREIGN = {
    "weight_decay", "momentum", "betas", "beta", "beta1", "beta2", "eps", "nesterov", "dampening",
    "amsgrad", "momentum_decay", "rho", "alpha", "alpha_bar", "lam", "lam_bar", "gamma", "centre",
    "geometry", "radius", "scale", "norm",
}  # fmt: skip
"""Hyperparameters of other optimizers and of methods. In a group they would have no effect."""


def as_list(params: Any, where: str) -> list[Any]:
    """Return the parameters of a group as a list."""
    if params is None:
        raise ValueError(f"{where} has no 'params'")
    if isinstance(params, Tensor):
        return [params]
    if isinstance(params, set):
        raise TypeError(f"params of {where} is a set, which has no order: pass a list")
    return list(params)


def labels(groups: list[dict[str, Any]]) -> dict[Tensor, str]:
    """Describe each parameter for an error."""
    found = {}
    for n, group in enumerate(groups):
        names = group.get("param_names") or [f"parameter {j}" for j in range(len(group["params"]))]
        for name, p in zip(names, group["params"], strict=True):
            found[p] = f"{name} of group {n} ({times(p.shape)}, {p.dtype})"
    return found


def check_seed(seed: Any) -> None:
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"seed must be an integer, got {seed!r}")


def check_lr(lr: Any, where: str) -> float:
    """Return the learning rate as a number, or raise if it is out of range."""
    is_one = isinstance(lr, Tensor) and lr.numel() == 1
    return number(f"{where}: lr", lr.item() if is_one else lr)


def check_keys(group: dict[str, Any], method: Method, where: str) -> None:
    """Raise if a key of the group is misspelt, or is a hyperparameter that has no effect there."""
    for key in set(group) - KNOWN - FOREIGN:
        if near := get_close_matches(str(key), [*KNOWN, *FOREIGN], n=1, cutoff=0.8):
            raise ValueError(f"{where} has the unknown key {key!r}: did you mean {near[0]!r}?")
    for key in sorted(FOREIGN & set(group)):
        if key == "weight_decay" and group[key] == 0 and method.centre != "origin":
            continue  # frameworks add it to every group, and here it changes nothing
        names = [n for n in (method.name, *ROWS) if n in ROWS]
        takers = [n for n in names if key in inspect.signature(ROWS[n]).parameters]
        example = f", e.g. zoo.{takers[0]}({key}={group[key]!r})" if takers else ""
        raise ValueError(
            f"{where} has {key}={group[key]!r}, which would be ignored. Remove it from the group, "
            f"and give it to the method{example}"
        )


def check_parameter(name: str, p: Any, method: Method, known: set[Tensor]) -> None:
    """Raise if the method cannot step p, or if p is in the optimizer already.

    known: the parameters in the optimizer.
    """
    if not isinstance(p, Tensor):
        raise TypeError(f"{name}: expected a tensor, got a {type(p).__name__}")
    label = f"{name} ({times(p.shape)}, {str(p.dtype).removeprefix('torch.')})"
    if p in known:
        raise ValueError(f"{label} is in the optimizer twice: remove one of them")
    if p.is_complex():
        raise ValueError(f"{label} is complex: optimise torch.view_as_real of it instead")
    if p.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{label}: only float64, float32, bfloat16 and float16 can be trained")
    # FullyShardedDataParallel sets this private attribute. If torch renames it, a flattened piece
    # is stepped as a vector, without an error.
    if getattr(p, "_fsdp_flattened", False):
        raise ValueError(
            f"{label} is a flattened piece of a parameter: shard with fully_shard (FSDP2), which "
            "keeps shapes"
        )
    try:
        method.geometry.check(p.shape)
    except ValueError as e:
        raise ValueError(f"{label} cannot have the geometry of {method.name}: {e}") from None


def check_capturable(method: Method, where: str) -> None:
    """Raise if kernels cannot take the step with k and lr on the device."""
    if method._kernel is None:
        raise ValueError(
            f"{where}: capturable=True needs a method that kernels step, and {method.name} has no "
            "kernel: leave capturable out"
        )
    k = torch.ones((), dtype=torch.float64, device="meta")  # it has no value to read
    try:
        method.coefs(k, k, method.advance(dict.fromkeys(method.memory, k), k, k))
        method.geometry.kernel_numbers(k, k)
    except (RuntimeError, NotImplementedError, TypeError) as e:
        raise ValueError(
            f"{where}: a coefficient of {method.name} reads k or lr on the host, and "
            f"capturable=True keeps both on the device: write it with torch operations ({e})"
        ) from e


def unreadable(label: str) -> RuntimeError:
    """The error for a parameter that kernels cannot step, although capturable=True needs them."""
    return RuntimeError(
        f"capturable=True steps by kernels, which cannot step {label}: the parameter, its gradient "
        "and its z0 must be contiguous fp32, bf16 or fp16 tensors on one GPU (z0 may be a number, "
        "but not a seed), and ranks must not share its matrices"
    )


def check_sharing(group: Any, dtype: torch.dtype | None) -> None:
    """Raise if these cannot be the process_group and the comm_dtype of SODA."""
    if group is not None and not hasattr(group, "rank"):
        raise TypeError(
            f"process_group must be a ProcessGroup such as dist.group.WORLD, got {group!r}. For "
            "a DeviceMesh, pass mesh.get_group()"
        )
    if dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"comm_dtype must be torch.float16, torch.bfloat16 or torch.float32, got {dtype}"
        )
