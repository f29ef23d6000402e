"""The part of a step that ranks take together: they compare their buckets, then step them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sodaopt.core.update import Bucket, dual_average, finish, inputs
from sodaopt.core.validation import labels
from sodaopt.parallel import stages
from sodaopt.parallel.agree import agree, partners
from sodaopt.parallel.exchange import Shards, Sharing
from sodaopt.parallel.stages import Exchange

if TYPE_CHECKING:
    from sodaopt.core.optimizer import SODA


def agreed(opt: SODA, make: Callable[[], list[Bucket]]) -> Iterator[Bucket]:
    """Make the buckets of a step, and yield each one when it can be stepped.

    If ranks share parameters, they compare their buckets first, and all raise if they differ. At
    the end all raise if a computation failed on one of them.
    """
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
        agree(ranks, (now, describe()) if first else now, describe, failure, "prepare")
    if failure is not None:
        raise failure
    opt._has_agreed = True
    yield from (b for b in buckets if b.ranks is None)
    yield from _stepped_together(opt._sharing, [b for b in buckets if b.ranks is not None])
    failure = opt._sharing.failure
    for ranks in shared:
        agree(ranks, None, list, failure, "compute")
    if failure is not None:
        raise failure


def _made(make: Callable[[], list[Bucket]]) -> tuple[list[Bucket], Exception | None]:
    """Return the buckets, and the error if they cannot be made."""
    try:
        return make(), None
    except Exception as e:
        return [], e


def _stepped_together(sharing: Sharing, buckets: list[Bucket]) -> Iterator[Bucket]:
    """Take shared buckets through their stages, and yield each one when its results arrive."""
    by_key: dict[Any, list[Bucket]] = {}
    for b in buckets:
        by_key.setdefault(b.ranks, []).append(b)
    for members in by_key.values():
        parts = _cut(sharing, members)
        for stage, j in stages.schedule([exchange.plan for _, exchange in parts]):
            b, exchange = parts[j]
            if stage == "send":
                dual_average(b)
            with torch.autocast(b.params[0].device.type, enabled=False):
                getattr(exchange, stage)()
            b.release()
            if stage == "finish":
                yield b
                exchange.shards.results = None  # frees them


def _cut(sharing: Sharing, buckets: list[Bucket]) -> list[tuple[Bucket, Exchange]]:
    """Cut buckets of one key into smaller ones, each with its exchange."""
    every = [(n, b, j) for n, b in enumerate(buckets) for j in range(len(b.params))]
    tensors = [b.method.geometry.exchanged(tuple(b.shapes[j])) for _, b, j in every]
    all_shards, found = Shards(sharing, [b.params[j] for _, b, j in every]), []
    for plan in all_shards.deal([n for n, *_ in every], tensors):
        b, positions = buckets[plan.kind.number], [every[e][2] for e in plan.params]
        names = "params", "shapes", "state", "indices", "z0"
        own: dict[str, Any] = {name: [getattr(b, name)[j] for j in positions] for name in names}
        part, geometry = Shards(sharing, own["params"]), b.method.geometry
        shards = part if geometry.exchanges else None
        b = replace(b, run=finish, shards=shards, **own)
        exchange = Exchange(part, plan, geometry.mapped, partial(_tensors, b), b.dtype)
        found.append((b, exchange))
    return found


def _tensors(b: Bucket) -> list[Tensor]:
    """Return the tensors whose matrices travel. Free copies of gradients before they do."""
    tensors = inputs(b)
    b.release()
    return tensors


def _shared(opt: SODA) -> dict[Any, list[int]]:
    """Return the indices of the parameters that ranks share, by their mesh or process group."""
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
