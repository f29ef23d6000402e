"""A step that ranks take together: they compare their buckets, then step them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sodaopt.core.update import Bucket, dual_average, inputs
from sodaopt.core.validation import labels
from sodaopt.parallel.agree import Failure, agree, partners, size
from sodaopt.parallel.exchange import Shards
from sodaopt.parallel.order import ordered
from sodaopt.parallel.stages import Exchange

if TYPE_CHECKING:
    from sodaopt.core.optimizer import SODA

Shared = dict[Any, list[int]]
"""The indices of the parameters that ranks share, by their mesh or process group."""
FIXED = "method", "maximize", "seed"
"""The keys of a group that must be the same on all ranks, besides lr."""


def shared(opt: SODA) -> Shared:
    """Return the indices of the parameters that ranks share, and whose maps are not elementwise."""
    opt._sharing.begin(lambda p: labels(opt.param_groups)[p])
    found: Shared = {}
    index = 0
    for group in opt.param_groups:
        if not opt.methods[group["method"]].geometry.elementwise:
            for j, p in enumerate(group["params"], index):
                if (key := opt._sharing.key(p)) is not None:
                    found.setdefault(partners(key), []).append(j)
        index += len(group["params"])
    return found


def step(opt: SODA, shared: Shared) -> None:
    """Take a step. If the ranks' settings or gradients differ, all ranks raise the same error.

    So they do if a computation fails on one of them, unless it also communicates, see
    `Sharing.attempt`.
    """
    if _is_captured(opt):
        raise RuntimeError(
            "a CUDA graph cannot capture a step in which ranks share matrices, because the ranks "
            "compare their steps on the host: call step() outside the graph"
        )
    sharing, fixed = opt._sharing, _fixed(opt, shared)
    buckets = sharing.attempt(opt._buckets, list[Bucket], doing="prepare")
    steps = {j: b.k for b in buckets for j in b.indices}
    lrs = sharing.attempt(
        lambda: [float(group["lr"]) for group in opt.param_groups], list[float], doing="prepare"
    )

    def numbers(ranks: Any) -> object:
        return fixed[ranks], lrs, [steps.get(j, -1) for j in shared[ranks]]

    _compare(opt, shared, numbers, lambda ranks: _descriptions(opt, shared[ranks], steps))
    for b in buckets:
        if b.ranks is None:
            sharing.attempt(partial(opt._step_bucket, b), lambda: None, b.params)
    _step_shared(opt, [b for b in buckets if b.ranks is not None])
    _compare(opt, shared, lambda ranks: None, lambda ranks: [])


def _is_captured(opt: SODA) -> bool:
    """Whether a CUDA graph captures the step. A CPU step skips this question."""
    params = [p for group in opt.param_groups for p in group["params"]]
    return params[0].is_cuda and torch.cuda.is_current_stream_capturing()


def _compare(
    opt: SODA,
    shared: Shared,
    summary: Callable[[Any], object],
    describe: Callable[[Any], list[str]],
) -> None:
    """Raise on every rank if one of them failed, or if their summaries differ.

    A failure must also reach the ranks of other meshes. The largest mesh compares last, and often
    has all ranks. Smaller ones compare again, so that they learn of failures elsewhere.

    summary, describe: functions of a mesh or process group, see `agree`.
    """
    sharing, every = opt._sharing, sorted(shared, key=size)
    for ranks in [*every, *(ranks for ranks in every if size(ranks) < size(None))]:
        try:
            agree(ranks, summary(ranks), partial(describe, ranks), sharing.failure)
        except Failure as e:
            sharing.failure = e
    if sharing.failure is not None:
        raise sharing.failure


def _step_shared(opt: SODA, buckets: list[Bucket]) -> None:
    """Take shared buckets through their stages. The last stage steps them."""
    by_key: dict[Any, list[Bucket]] = {}
    for b in buckets:
        by_key.setdefault(b.ranks, []).append(b)
    for members in by_key.values():
        parts = _cut(opt, members)
        for stage, j in ordered([exchange.round for _, exchange in parts]):
            b, exchange = parts[j]
            if stage == "send":
                opt._sharing.attempt(partial(dual_average, b), lambda: None, b.params)
            with torch.autocast(b.params[0].device.type, enabled=False):
                getattr(exchange, stage)()
            b.release()


def _cut(opt: SODA, buckets: list[Bucket]) -> list[tuple[Bucket, Exchange]]:
    """Cut buckets of one key into smaller ones, each with its exchange."""
    every = [(n, b, j) for n, b in enumerate(buckets) for j in range(len(b.params))]
    tensors = [b.method.geometry.exchanged(tuple(b.shapes[j])) for _, b, j in every]
    all_shards, found = Shards(opt._sharing, [b.params[j] for _, b, j in every]), []
    for round_ in all_shards.deal([n for n, *_ in every], tensors):
        b, positions = buckets[round_.kind.number], [every[e][2] for e in round_.params]
        names = "params", "shapes", "state", "indices", "z0"
        own: dict[str, Any] = {name: [getattr(b, name)[j] for j in positions] for name in names}
        part, geometry = Shards(opt._sharing, own["params"]), b.method.geometry
        shards = part if geometry.exchanges else None
        b = replace(b, shards=shards, **own)
        steps = partial(_tensors, b), partial(opt._step_bucket, b)
        is_alone = round_.kind.has_tasks and not geometry.reads_m_bar
        found.append((b, Exchange(part, round_, geometry.mapped, *steps, b.dtype, is_alone)))
    return found


def _tensors(b: Bucket) -> list[Tensor]:
    """Return the tensors whose matrices travel. Free copies of gradients before they do."""
    tensors = inputs(b)
    b.release()
    return tensors


def _fixed(opt: SODA, shared: Shared) -> dict[Any, str]:
    """Return, by mesh, the text of everything that the ranks compare besides the numbers of a step.

    It is made again if a group or a parameter has changed.
    """
    key = [
        (*(g[n] for n in FIXED), *((id(p), p.dtype) for p in g["params"])) for g in opt.param_groups
    ]
    if opt._sharing.fixed[0] != (key, shared):
        texts = {ranks: "\n".join(_descriptions(opt, j)) for ranks, j in shared.items()}
        opt._sharing.fixed = (key, shared), texts
    found: dict[Any, str] = opt._sharing.fixed[1]
    return found


def _descriptions(opt: SODA, indices: list[int], steps: dict[int, int] | None = None) -> list[str]:
    """Describe the settings, the groups, and the parameters with these indices.

    steps: the step of each parameter that has a gradient. None: leave out the numbers of a step.
    """
    found = [f"comm_dtype {opt._sharing.dtype}"]
    for n, group in enumerate(opt.param_groups):
        values = {name: group[name] for name in (*FIXED, "settings")}
        lr = "" if steps is None else f" and lr {float(group['lr'])}"
        found.append(f"group {n} with {values}{lr}")
    every = list(labels(opt.param_groups).values())
    if steps is None:
        return found + [every[j] for j in indices]
    at = {j: f"at step {steps[j]}" if j in steps else "without a gradient" for j in indices}
    return found + [f"{every[j]} {step}" for j, step in at.items()]
