"""The buckets of a step that other ranks take too, after a check that all ranks agree on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from sodaopt._errors import times
from sodaopt.core.update import Bucket
from sodaopt.parallel.agree import agree, partners

if TYPE_CHECKING:
    from sodaopt.core.optimizer import SODA


def agreed(opt: SODA, make: Callable[[], Iterator[Bucket]]) -> Iterable[Bucket]:
    """Make the buckets of a step. If parameters are shared, all ranks make the same, or all raise.

    There is no check while a CUDA graph is captured, because it would wait for the host.
    """
    opt.sharing.loads.clear()
    shared = _shared(opt)
    if not shared or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return make()
    buckets: list[Bucket] = []
    failure: Exception | None = None
    try:
        buckets = list(make())
    except Exception as e:
        failure = e
    steps = {j: b.k for b in buckets for j in b.indices}
    lrs = [float(group["lr"]) for group in opt.param_groups]
    for ranks, indices in shared.items():

        def describe(indices: list[int] = indices) -> list[str]:
            return _descriptions(opt, indices, steps)

        now = lrs, [steps.get(j, -1) for j in indices]
        summary = now if opt.has_agreed else (now, describe())
        agree(ranks, summary, describe, failure, first=not opt.has_agreed)
    if failure is not None:
        raise failure
    opt.has_agreed = True
    return buckets


def _shared(opt: SODA) -> dict[Any, list[int]]:
    """The meshes and process groups that this optimizer communicates with, and the indices of the
    parameters that do."""
    found: dict[Any, list[int]] = {}
    index = 0
    for group in opt.param_groups:
        if not opt.methods[group["method"]].geometry.elementwise:
            for j, p in enumerate(group["params"], index):
                if (key := opt.sharing.key(p)) is not None:
                    found.setdefault(partners(key), []).append(j)
        index += len(group["params"])
    return found


def _descriptions(opt: SODA, indices: list[int], steps: dict[int, int]) -> list[str]:
    """Describe the groups, and the parameters with these indices."""
    groups, params, index = [], [], 0
    for n, group in enumerate(opt.param_groups):
        values = {name: group[name] for name in ("settings", "maximize", "seed")}
        groups.append(f"group {n} with {values} and lr {float(group['lr'])}")
        names = group.get("param_names") or [f"parameter {j}" for j in range(len(group["params"]))]
        for j, (name, p) in enumerate(zip(names, group["params"], strict=True), index):
            if j in indices:
                step = f"at step {steps[j]}" if j in steps else "without a gradient"
                params.append(f"{name} of group {n} ({times(p.shape)}, {p.dtype}) {step}")
        index += len(group["params"])
    return groups + params
