"""The base optimizer's step hooks, which the wrapper runs.

Hooks before the step run before the wrapper moves a parameter. Hooks after it see the points that
the base has stepped. torch runs the global step hooks and the wrapper's own hooks around the
wrapper's step, so the global hooks must not run again around the base's.

The tables of hooks are private in torch. If they go, the base runs its own hooks around its step,
and 16-bit parameters are seen by hooks as they were before the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer, optimizer

from sodaopt.parallel import sharded


def _tables(base: Optimizer) -> list[dict[int, Any]]:
    """The base's hooks before and after a step, and the global ones."""
    own = [getattr(base, f"_optimizer_step_{when}_hooks", {}) for when in ("pre", "post")]
    return [*own, optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks]


@contextmanager
def silenced(base: Optimizer) -> Iterator[None]:
    """Let the base step without any hook."""
    held = [(table, dict(table)) for table in _tables(base) if table]
    try:
        for table, _ in held:
            table.clear()
        yield
    finally:
        for table, hooks in held:
            table.update(hooks)


def run_before(base: Optimizer) -> None:
    """Run the base's hooks before the step."""
    for hook in list(_tables(base)[0].values()):
        hook(base, (base,), {})


def run_after(base: Optimizer, params: list[Tensor], points: list[Tensor]) -> None:
    """Run the base's hooks after the step.

    params, points: the 16-bit parameters, and the fp32 points that the base has stepped. The hooks
    see the parameters at the points, and their changes are copied to the points.
    """
    hooks = list(_tables(base)[1].values())
    if not hooks:
        return
    shards = [sharded.local(p.detach()) for p in params]
    for shard, x in zip(shards, points, strict=True):
        shard.copy_(x)
    rounded = [shard.clone() for shard in shards]
    for hook in hooks:
        hook(base, (base,), {})
    for shard, old, x in zip(shards, rounded, points, strict=True):
        x.copy_(torch.where(shard == old, x, shard.float()))
