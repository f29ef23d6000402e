"""The buckets of a step that other ranks take too, after a check that all ranks agree on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from sodaopt.core.update import Bucket
from sodaopt.core.validation import labels
from sodaopt.parallel.agree import agree, partners

if TYPE_CHECKING:
    from sodaopt.core.optimizer import SODA


def agreed(opt: SODA, make: Callable[[], list[Bucket]]) -> Iterator[Bucket]:
    """Make the buckets of a step. If parameters are shared, all ranks make the same, or all raise.
    After the step, all ranks raise if a computation failed on one of them."""
    shared = _shared(opt)
    if not shared:
        yield from make()
        return
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a CUDA graph cannot capture a step in which ranks share matrices, because the ranks "
            "compare their steps on the host: call step() outside the graph"
        )
    opt._sharing.begin(lambda p: labels(opt.param_groups)[p])
    buckets, failure = _made(make)
    steps = {j: b.k for b in buckets for j in b.indices}
    lrs = [float(group["lr"]) for group in opt.param_groups]
    first = not opt._has_agreed
    for ranks, indices in shared.items():
        describe = partial(_descriptions, opt, indices, steps)
        now = lrs, [steps.get(j, -1) for j in indices]
        agree(ranks, (now, describe()) if first else now, describe, failure, "prepare", first)
    if failure is not None:
        raise failure
    opt._has_agreed = True
    for b in buckets:
        yield from _cut(b)
    failure = opt._sharing.failure
    for ranks in shared:
        agree(ranks, None, list, failure, "compute", first)
    if failure is not None:
        raise failure


def _made(make: Callable[[], list[Bucket]]) -> tuple[list[Bucket], Exception | None]:
    try:
        return make(), None
    except Exception as e:
        return [], e


def _cut(b: Bucket) -> Iterator[Bucket]:
    """Cut a bucket that ranks share, to bound the temporary memory of its step."""
    if b.sharing is None:
        yield b
        return
    names = ["params", "shapes", "state", "indices", *(["z0"] if b.z0 else [])]
    matrices = [b.method.geometry.matrices(shape) for shape in b.shapes]
    for part in b.sharing.shards(b.params).buckets(matrices):
        lists: dict[str, Any] = {name: [getattr(b, name)[j] for j in part] for name in names}
        yield replace(b, **lists)


def _shared(opt: SODA) -> dict[Any, list[int]]:
    """The meshes and process groups that this optimizer communicates with, and the indices of the
    parameters that do."""
    found: dict[Any, list[int]] = {}
    index = 0
    for group in opt.param_groups:
        if not opt.methods[group["method"]].geometry.elementwise:
            for j, p in enumerate(group["params"], index):
                if (key := opt._sharing.key(p)) is not None:
                    found.setdefault(partners(key), []).append(j)
        index += len(group["params"])
    return found


def _descriptions(opt: SODA, indices: list[int], steps: dict[int, int]) -> list[str]:
    """Describe the groups, and the parameters with these indices."""
    found = []
    for n, group in enumerate(opt.param_groups):
        values = {name: group[name] for name in ("settings", "maximize", "seed")}
        found.append(f"group {n} with {values} and lr {float(group['lr'])}")
    every = list(labels(opt.param_groups).values())
    at = {j: f"at step {steps[j]}" if j in steps else "without a gradient" for j in indices}
    return found + [f"{every[j]} {step}" for j, step in at.items()]
