"""The cost model's counts are those of two and four ranks, and its times follow from them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from sodaopt import SODA, cli, param_groups
from sodaopt.lab import cluster
from sodaopt.lab.decoders import CONFIGS, Config, Decoder, decoder
from sodaopt.lab.placements import cut_by_layers, cut_by_rows
from sodaopt.parallel.layout import Grid, Placement
from sodaopt.parallel.stages import UNDER_WAY
from tests.parallel.test_exchange import counted
from tests.support.ranks import Check, World, available, spawned  # noqa: F401
from tests.support.training import cut

RANKS = 4
MODELS = {
    "dense": Config(12, 8, 30, 2, 40),
    "experts": Config(8, 8, 6, 2, 24, experts=4, active=2),
    "few experts": Config(8, 8, 6, 1, 24, experts=3, active=1),
}
LAYOUTS = {
    "fsdp 2": (1, 2),
    "fsdp 4": (1, 4),
    "hsdp 2 x 2": (2, 2),
    "fsdp 2 x tp 2": (1, 4),
    "ddp 2": (2, 1),
    "ddp 4": (4, 1),
}
MESHES: dict[tuple[int, int], Any] = {}


def mesh_of(R: int, S: int) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    if (R, S) not in MESHES:
        MESHES[R, S] = DeviceMesh("cpu", torch.arange(R * S).view(R, S))
    return MESHES[R, S]


def placements(placement: Placement) -> list[Any]:
    """torch's placements. A dimension of the mesh that cuts after a later one is strided."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    cuts: list[Any] = [Replicate() if c is None else Shard(c) for c in placement.cuts]
    if placement.order == (1, 0):
        cuts[0] = _StridedShard(placement.cuts[0], split_factor=placement.mesh[1])
    return cuts


def as_predicted(model: str, recipe: str, layout: str) -> None:
    """State, bytes and products of a real step."""
    R, S = LAYOUTS[layout]
    is_tp = layout == "fsdp 2 x tp 2"
    mesh = mesh_of(2, 2) if is_tp else mesh_of(R, S)
    place = cut_by_layers(2, 2) if is_tp else cut_by_rows(R, S)
    if dist.get_rank() >= R * S:
        return
    torch.manual_seed(0)
    whole = Decoder(MODELS[model])
    groups = param_groups(whole, recipe)
    if S > 1:
        for group in groups:
            group["params"] = [
                (n, nn.Parameter(cut(p.detach(), mesh, placements(place(n, tuple(p.shape))))))
                for n, p in group["params"]
            ]
    opt = SODA(groups, 0.01, process_group=mesh.get_group(0) if S == 1 else None)
    for group in opt.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    with counted() as log, FlopCounterMode(display=False) as flops:
        opt.step()

    rank = dist.get_rank()
    grid, at = Grid(R, S, *divmod(rank, S)), divmod(rank, mesh.shape[1])
    wanted = cluster.counts(SODA(param_groups(whole, recipe), 0.01), place, grid, at)
    assert log.received == wanted.shards + wanted.replicas
    assert flops.get_total_flops() == wanted.flops
    assert flops.get_total_flops() <= wanted.busiest
    tensors = [t for s in opt.state.values() for t in s.values() if t.ndim]
    local = [t.to_local() if S > 1 else t for t in tensors]
    assert sum(t.nbytes for t in local) == wanted.state


def bind(f: Callable[..., None]) -> Check:
    return lambda where: f()


CHECKS: dict[str, Check] = {
    f"{model}-{recipe}-{layout}": bind(partial(as_predicted, model, recipe, layout))
    for model in MODELS
    for layout in LAYOUTS
    for recipe in ("muon", "soda_dagger")
}


@available
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("check", CHECKS)
def test_four_ranks(check: str, world: World) -> None:
    world.assert_passed(__name__, check)


def test_work_and_memory_fall_with_the_number_of_ranks() -> None:
    model = decoder("llama-7b")

    def predict(method: str, c: str) -> cluster.Prediction:
        return cluster.predict(model, method, cluster.cluster(c), "fsdp", 1 << 22, cluster.H100)

    alone, shared = predict("muon", "1x1"), predict("muon", "8x8")
    assert not alone.counts.shards + alone.counts.replicas
    assert 1 <= shared.counts.busiest * 64 / alone.counts.busiest < 1.05
    assert shared.counts.state * 64 == pytest.approx(alone.counts.state, rel=1e-3)
    assert shared.step < alone.step / 30
    assert predict("adamw", "8x8").hides == "none"


@pytest.mark.parametrize(("model", "R", "S"), [("llama-70b", 8, 32), ("moe-1t", 2, 512)])
def test_the_memory_of_large_models_is_bounded(model: str, R: int, S: int) -> None:
    opt = SODA(param_groups(decoder(model), "muon"), 1.0)
    for r, s in ((0, 0), (R - 1, S - 1), (R // 2, 0)):
        found = cluster.counts(opt, cut_by_rows(R, S), Grid(R, S, r, s), (r, s))
        largest = max(round_.largest for round_ in found.rounds)
        assert found.temporary <= 4 * (max(UNDER_WAY, largest) + largest)


def test_a_trillion_parameters_on_16384_gpus() -> None:
    model = decoder("moe-1t")
    assert sum(p.numel() for p in model.parameters()) > 1e12
    row = cluster.predict(model, "muon", cluster.cluster("8x2048"), "hsdp", 1 << 22, cluster.H100)
    assert row.parallel == "hsdp 32 x 512"
    assert row.counts.busiest > 0


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--model", "nano", "--cluster", "2x2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["method", "parallel"]
    kinds = len(cluster.KINDS) * len(cluster.METHODS)
    assert len(lines) == 1 + kinds
    assert cli.main(["bench", "lion", "--model", "nano", "--cluster", "1x1"]) == 0
    methods = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert methods == ["method", "adamw", "lion"]
    assert cli.main(["bench", "--model", "nano", "--cluster", "8"]) == 2
    assert "8x128" in capsys.readouterr().err
    assert "llama-7b" in CONFIGS
