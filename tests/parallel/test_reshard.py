"""A job changes its number of ranks and its parallelism between two steps, through DCP."""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from sodaopt import SODA, SODAWrapper, zoo
from tests.core.test_checkpoint import DCP, parts
from tests.support.ranks import Check, World, available, spawned  # noqa: F401
from tests.support.training import LR, cut, equal, gap, whole

pytestmark = [available, pytest.mark.slow, pytest.mark.timeout(600)]

RANKS = 4
SHAPES = ((7, 5), (1, 6), (6, 3), (5, 4))
STEPS = 3  # of each part of a job
MAKE: dict[str, Callable[..., Any]] = {
    name: partial(SODA, lr=LR, method=method)
    for name, method in {
        "adamw": zoo.adamw(),
        "muon": zoo.muon(),
        "soda_dagger": zoo.soda_dagger(),
        "schedule_free": zoo.schedule_free(),
        "shampoo": zoo.shampoo(),
        "fp32 muon": zoo.muon(),
        "fp32 soda_dagger": zoo.soda_dagger(),
    }.items()
} | {
    "SODAWrapper": lambda params: SODAWrapper(
        torch.optim.AdamW(params, LR, weight_decay=0), anchor="auto"
    )
}
SINGLE = ("fp32 muon", "fp32 soda_dagger")
EXACT = ("adamw", "schedule_free", "SODAWrapper")
# The number of ranks and the parallelism of each part of a job.
WAYS: dict[str, tuple[tuple[int, str], ...]] = {
    "4 to 2": ((4, "fsdp"), (2, "fsdp")),
    "4 to 1": ((4, "fsdp"), (1, "fsdp")),
    "4 to 1 to 3": ((4, "fsdp"), (1, "fsdp"), (3, "fsdp")),
    "fsdp to ddp to one": ((4, "fsdp"), (2, "ddp"), (1, "alone")),
    "one to tp to hsdp": ((1, "alone"), (4, "tp"), (4, "hsdp")),
}
MESHES: dict[Any, Any] = {}


def placing(ranks: int, kind: str) -> Callable[[Tensor], Tensor]:
    """Return the function that places a tensor. All ranks must call this, as it makes the mesh."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard

    if kind == "alone":
        return lambda t: t
    numbers = torch.arange(ranks).view(2, -1) if kind == "hsdp" else torch.arange(ranks)
    key = tuple(numbers.shape)
    if key not in MESHES:
        MESHES[key] = DeviceMesh("cpu", numbers)
    if kind == "ddp":
        return lambda t: t
    shards = {"fsdp": [Shard(0)], "tp": [Shard(1)], "hsdp": [Replicate(), Shard(0)]}[kind]
    return lambda t: cut(t, MESHES[key], shards)


def draw(seed: int, name: str) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    dtype = torch.float32 if name in SINGLE else torch.float64
    return [torch.randn(s, generator=rng, dtype=torch.float64).to(dtype) for s in SHAPES]


def built(name: str, place: Callable[[Tensor], Tensor], group: Any = None) -> tuple[Any, Any]:
    model = nn.ParameterList([nn.Parameter(place(t)) for t in draw(0, name)])
    opt = MAKE[name](list(model.parameters()))
    if group is not None and isinstance(opt, SODA):
        opt._sharing.process_group = group
    return model, opt


def advance(
    name: str, model: Any, opt: Any, place: Callable[[Tensor], Tensor], steps: range
) -> None:
    for k in steps:
        for p, g in zip(model, draw(1 + k, name), strict=True):
            p.grad = place(g)
        opt.step()


def continued(where: Path, name: str, way: str) -> None:
    """With the same gradients, the job ends at the parameters of an uninterrupted one."""
    path = None
    for n, (ranks, kind) in enumerate(WAYS[way]):
        place = placing(ranks, kind)
        if dist.get_rank() < ranks:
            mesh = MESHES.get((ranks,)) if kind != "hsdp" else MESHES[2, ranks // 2]
            group = None if kind == "alone" or mesh.ndim > 1 else mesh.get_group()
            model, opt = built(name, place, group if kind == "ddp" else None)
            form = DCP(flat=False, group=group)
            if path is not None:
                form.load(model, opt, path, alone=kind == "alone")
            advance(name, model, opt, place, range(n * STEPS, (n + 1) * STEPS))
            path = where / f"{name}-{way}-{n}"
            form.save(model, opt, path, alone=kind == "alone")
            ours = [whole(p) for p in model]
        path = where / f"{name}-{way}-{n}"
        dist.barrier()
    if dist.get_rank() < ranks:
        model, opt = built(name, lambda t: t)
        advance(name, model, opt, lambda t: t, range(len(WAYS[way]) * STEPS))
        theirs = [p.detach() for p in model]
        assert (
            equal(ours, theirs)
            if name in EXACT
            else gap(ours, theirs) <= (1e-6 if name in SINGLE else 1e-8)
        )


def saved_meanwhile(where: Path, name: str) -> None:
    """A checkpoint that is written while training goes on has the state at which writing began."""
    import torch.distributed.checkpoint as dcp

    place = placing(RANKS, "fsdp")
    model, opt = built(name, place)
    advance(name, model, opt, place, range(STEPS))
    path = where / f"{name}-meanwhile"
    found = parts(model, opt, flat=False)
    # a group of its own, as torch advises: the thread's messages must not meet those of the steps
    group = dist.new_group(timeout=timedelta(seconds=20))
    writing: Any = dcp.async_save(found, checkpoint_id=path, process_group=group)
    advance(name, model, opt, place, range(STEPS, 2 * STEPS))
    writing.result()
    new, new_opt = built(name, place)
    DCP(flat=False).load(new, new_opt, path, alone=False)
    advance(name, new, new_opt, place, range(STEPS, 2 * STEPS))
    assert equal([whole(p) for p in new], [whole(p) for p in model])


CHECKS: dict[str, Check] = {
    f"{name}-meanwhile": partial(saved_meanwhile, name=name) for name in ("muon", "SODAWrapper")
} | {f"{name}-{way}": partial(continued, name=name, way=way) for name in MAKE for way in WAYS}


@pytest.mark.parametrize("check", CHECKS)
def test_four_ranks(check: str, world: World) -> None:
    world.assert_passed(__name__, check)
