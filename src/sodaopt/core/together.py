"""A step that ranks take together: they compare their buckets, then step them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from sodaopt.core.update import Bucket, dual_average, inputs
from sodaopt.core.validation import labels
from sodaopt.parallel.agree import Failure, Refusal, agree, order, passes, publish
from sodaopt.parallel.exchange import Shards, is_on_mesh
from sodaopt.parallel.order import ordered
from sodaopt.parallel.stages import Exchange

if TYPE_CHECKING:
    from sodaopt.core.optimizer import SODA

Shared = dict[Any, dict[int, bool]]
"""By mesh or process group: the indices of its parameters, and whether its ranks compare the step
count and the missing gradient of the parameter. They do if any map there is not elementwise."""
FIXED = "method", "maximize", "seed", "train_mode"
"""The keys of a group that must be the same on all ranks, besides lr."""


def shared(opt: SODA) -> Shared:
    """Return the parameters whose ranks compare this step.

    A mesh or process group where all maps are elementwise is left out once its ranks have compared
    all of its parameters.
    """
    sharing = opt._sharing
    sharing.begin(lambda p: labels(opt.param_groups)[p])
    groups = [(group["method"], len(group["params"])) for group in opt.param_groups]
    if sharing.silent == groups:
        return {}
    found, with_work = _found(opt)
    verified = {ranks for ranks, js in found.items() if sharing.verified.get(ranks) == len(js)}
    compared = sorted(with_work | (found.keys() - verified), key=order)
    if not compared:
        if sharing.failure is not None:  # this rank is in no mesh, so no other rank waits for it
            raise sharing.failure
        if not any(_has_work(opt, group) for group in opt.param_groups):
            sharing.silent = groups
    return {ranks: dict.fromkeys(found[ranks], ranks in with_work) for ranks in compared}


def _found(opt: SODA) -> tuple[dict[Any, list[int]], set[Any]]:
    """Return the indices of all shared parameters by mesh or process group, and the meshes and
    process groups whose ranks share work, because a map is not elementwise."""
    found: dict[Any, list[int]] = {}
    with_work, index = set[Any](), 0
    for group in opt.param_groups:
        has_work = _has_work(opt, group)
        for j, p in enumerate(group["params"], index):
            if has_work or is_on_mesh(p):
                find = partial(opt._sharing.key, p, has_work)
                key = opt._sharing.attempt(find, lambda: None, doing="prepare")
                if key is not None:
                    found.setdefault(key[0], []).append(j)
                    with_work.update(key[:1] if has_work else ())
        index += len(group["params"])
    return found, with_work


def _has_work(opt: SODA, group: dict[str, Any]) -> bool:
    """Whether ranks share the work on sharded parameters of the group."""
    method = opt.methods.get(group["method"])
    return method is None or not method.geometry.elementwise


def step(opt: SODA, shared: Shared) -> None:
    """Take a step. All ranks raise the same error if they differ, or if one of them fails."""
    if _is_captured(opt):
        raise RuntimeError(
            "a CUDA graph cannot capture a step in which ranks share matrices, because the ranks "
            "compare their steps on the host: call step() outside the graph"
        )
    sharing = opt._sharing
    sharing.every = list(shared)
    prepare = partial(_prepare, opt, shared)
    fixed, buckets, lrs = sharing.attempt(prepare, lambda: ({}, [], []), doing="prepare")
    steps = {j: b.k for b in buckets for j in b.indices}

    def numbers(ranks: Any) -> object:
        at = [steps.get(j, -1) for j, compares in shared[ranks].items() if compares]
        return fixed.get(ranks), lrs, at

    try:
        _compare(opt, numbers, lambda ranks: _descriptions(opt, shared[ranks], steps, lrs))
    except Failure as e:
        raise Refusal(str(e)) from e.__cause__
    try:
        _step_buckets(opt, buckets)
    except BaseException as e:
        failure = sharing.explained(e)
        publish(sharing.every, str(failure))  # the other ranks wait for this one
        if failure is e or not isinstance(e, Exception):
            raise
        raise failure from e
    _compare(opt, lambda ranks: None, lambda ranks: [])
    sharing.done = sharing.every
    sharing.verified |= {ranks: len(indices) for ranks, indices in shared.items()}


def _is_captured(opt: SODA) -> bool:
    """Whether a CUDA graph captures the step. A CPU step skips this question."""
    params = [p for group in opt.param_groups for p in group["params"]]
    return params[0].is_cuda and torch.cuda.is_current_stream_capturing()


def _prepare(opt: SODA, shared: Shared) -> tuple[dict[Any, str], list[Bucket], list[float]]:
    """Return the texts that the ranks compare, by mesh, the buckets and the learning rates."""
    opt._check()
    fixed = _fixed(opt, shared)
    return fixed, opt._buckets(), [float(group["lr"]) for group in opt.param_groups]


def _compare(
    opt: SODA, summary: Callable[[Any], object], describe: Callable[[Any], list[str]]
) -> None:
    """Raise on every rank if one of them failed, or if their summaries differ.

    summary, describe: functions of a mesh or process group, see `agree`.
    """
    sharing = opt._sharing
    for ranks in passes(sharing.every):
        try:
            agree(ranks, summary(ranks), partial(describe, ranks), sharing.failure)
        except Failure as e:
            sharing.failure = e
    if sharing.failure is not None:
        raise sharing.failure


def _step_buckets(opt: SODA, buckets: list[Bucket]) -> None:
    """Step the buckets. A shared bucket goes through the stages of its exchange. The last stage
    steps it."""
    by_key: dict[Any, list[Bucket]] = {}
    for b in buckets:
        if b.ranks is None:
            opt._sharing.attempt(partial(opt._step_bucket, b), lambda: None, b.params)
        else:
            by_key.setdefault(b.ranks, []).append(b)
    for key in sorted(by_key, key=lambda key: order(*key)):
        parts = _cut(opt, by_key[key])
        for stage, j in ordered([exchange.round for _, exchange in parts]):
            b, exchange = parts[j]
            if stage == "send":
                opt._sharing.attempt(partial(dual_average, b), lambda: None, b.params)
            with torch.autocast(b.params[0].device.type, enabled=False):
                try:
                    getattr(exchange, stage)()
                except Exception as e:
                    raise opt._sharing.explained(e, b.params) from e
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
        steps = partial(inputs, b), partial(opt._step_bucket, b)
        is_alone = round_.kind.has_tasks and not geometry.reads_m_bar
        found.append((b, Exchange(part, round_, geometry.mapped, *steps, b.dtype, is_alone)))
    return found


def _fixed(opt: SODA, shared: Shared) -> dict[Any, str]:
    """Return, by mesh, the text of everything that the ranks compare besides the numbers of a step.

    It is made again if a group or a parameter has changed.
    """
    key = [
        (*(g[n] for n in FIXED), *((id(p), p.dtype) for p in g["params"])) for g in opt.param_groups
    ]
    if opt._sharing.fixed[0] != (key, opt._sharing.wrapper, shared):
        texts = {ranks: "\n".join(_descriptions(opt, j)) for ranks, j in shared.items()}
        opt._sharing.fixed = (key, opt._sharing.wrapper, shared), texts
    return opt._sharing.fixed[1]


def _descriptions(
    opt: SODA,
    indices: dict[int, bool],
    steps: dict[int, int] | None = None,
    lrs: Sequence[float] = (),
) -> list[str]:
    """Describe the settings, the groups, and the parameters with these indices.

    steps: the step of each parameter that has a gradient. None: leave out the numbers of a step.
    lrs: the learning rate of each group. It is empty if this rank failed to prepare its step.
    """
    found = [f"comm_dtype {opt._sharing.dtype}", opt._sharing.wrapper]
    for n, group in enumerate(opt.param_groups):
        values = {name: group[name] for name in (*FIXED, "settings")}
        lr = f" and lr {lrs[n]}" if lrs else ""
        found.append(f"group {n} with {values}{lr}")
    every = list(labels(opt.param_groups).values())
    if steps is None:
        return found + [every[j] for j in indices]
    for j, compares in indices.items():
        step = f" at step {steps[j]}" if j in steps else " without a gradient"
        found.append(every[j] + step * compares)
    return found
