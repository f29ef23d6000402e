"""The collectives of a step on one GPU. NCCL needs a GPU for each rank, so one rank sends its
matrices to itself. Over gloo, two ranks broadcast from one GPU."""

import os
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from sodaopt import GPA, SODA, SODAWrapper, zoo
from sodaopt.core import together
from sodaopt.parallel import exchange, layout, stages
from tests.support.ranks import available
from tests.support.training import cut, gap, whole

pytestmark = [available, pytest.mark.slow]

SHAPES = ((64, 48), (48, 64), (64, 48), (3, 32, 16))
# On a GPU the products of the run alone are in fp16.
TOLERANCE = {None: 4e-3, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize(
    ("backend", "device"), [("gloo", "cpu"), pytest.param("nccl", "cuda", marks=pytest.mark.gpu)]
)
def test_matrices_travel(backend: str, device: str) -> None:
    process = get_context("spawn").Process(target=one_rank, args=(backend, device))
    process.start()
    process.join(100)
    process.kill()
    assert process.exitcode == 0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_replicas_share_the_products(device: str, tmp_path: Path) -> None:
    """On a GPU they compute on a stream of their own."""
    spawn = get_context("spawn").Process
    ranks = [spawn(target=replica, args=(rank, device, tmp_path / "store")) for rank in (0, 1)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(100)
        process.kill()
    assert [process.exitcode for process in ranks] == [0, 0]


def test_the_dtype_is_checked() -> None:
    with pytest.raises(ValueError, match=r"comm_dtype must be .*, got torch.float64"):
        SODA([nn.Parameter(torch.ones(2, 2))], 1.0, zoo.muon(), comm_dtype=torch.float64)


def test_a_mesh_is_not_a_process_group() -> None:
    mesh: Any = SimpleNamespace(get_group=None)
    with pytest.raises(TypeError, match=r"pass mesh.get_group\(\)"):
        SODA([nn.Parameter(torch.ones(2, 2))], 1.0, zoo.muon(), process_group=mesh)


def test_state_is_cut_like_fully_shard_cuts() -> None:
    """Of the 7 rows of R, the first of two TP ranks has 4, and the last of three FSDP ranks none.
    `distribute_tensor` would give it the last row."""
    import torch.testing._internal.distributed.fake_pg
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    dist.init_process_group("fake", store=dist.HashStore(), rank=4, world_size=6)
    try:
        placements = _StridedShard(0, split_factor=2), Shard(0)
        mesh = init_device_mesh("cpu", (3, 2))
        p = nn.Parameter(DTensor.from_local(torch.ones(2, 7), mesh, placements))
        s: Any = SODA([p], 1.0, zoo.shampoo()).state[p]
        assert (s["R"].shape, s["R"].to_local().shape) == ((7, 7), (0, 7))
        assert torch.equal(s["L"].to_local(), 1e-12 * torch.eye(12)[4:6])
    finally:
        dist.destroy_process_group()


def test_parameters_that_are_sharded_after_a_step() -> None:
    """A spectral step of a shard alone would return a wrong result without an error."""
    import torch.testing._internal.distributed.fake_pg
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("fake", store=dist.HashStore(), rank=1, world_size=2)
    try:
        p = nn.Parameter(torch.ones(4, 3))
        opt, mesh = SODA([p], 1.0, zoo.muon()), init_device_mesh("cpu", (2,))
        p.grad = torch.ones_like(p)
        opt.step()
        opt.param_groups[0]["params"][0] = nn.Parameter(distribute_tensor(p, mesh, [Shard(0)]))
        assert together.shared(opt) == {mesh: {0: True}}
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", ["SODA", "SODAWrapper", "GPA"])
def test_a_whole_state_is_cut(name: str) -> None:
    """A state that every rank has whole loads into sharded parameters."""
    import torch.testing._internal.distributed.fake_pg
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    def optimizer(p: Tensor) -> Any:
        base = SODA([p], 1.0, "soda(adam)" if name == "SODA" else "adam")
        return {"SODA": lambda b: b, "SODAWrapper": SODAWrapper, "GPA": GPA}[name](base)

    dist.init_process_group("fake", store=dist.HashStore(), rank=1, world_size=2)
    try:
        whole = nn.Parameter(torch.arange(15.0).view(5, 3))
        part = nn.Parameter(DTensor.from_local(
            torch.zeros(2, 3), init_device_mesh("cpu", (2,)), [Shard(0)],
            shape=torch.Size([5, 3]), stride=(3, 1),
        ))  # fmt: skip
        ours, theirs = optimizer(part), optimizer(whole)
        whole.grad = torch.ones_like(whole)
        theirs.step()
        ours.load_state_dict(theirs.state_dict())
        for key, t in theirs.state[whole].items():
            if t.ndim:
                assert torch.equal(ours.state[part][key].to_local(), t[3:]), key
    finally:
        dist.destroy_process_group()


def one_rank(backend: str, device: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    torch.set_num_threads(1)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(device, (1,))
    alone = run(device, None)
    assert gap(run(device, None, process_group=dist.group.WORLD), alone) <= TOLERANCE[None]
    patch, calls = pytest.MonkeyPatch(), list[torch.dtype]()
    send = dist.all_to_all_single

    def count(out: Tensor, x: Tensor, *args: Any, **more: Any) -> Any:
        calls.append(x.dtype)
        return send(out, x, *args, **more)

    patch.setattr(dist, "all_to_all_single", count)
    patch.setattr(stages, "ROUND", 1)
    # a mesh of one rank exchanges nothing by itself
    patch.setattr(exchange, "_group", lambda mesh, dims: mesh.get_group() if dims else None)
    patch.setattr(layout, "_within", lambda inner, outer: False)
    for dtype, tolerance in TOLERANCE.items():
        calls.clear()
        assert gap(run(device, (mesh, [Shard(0)]), comm_dtype=dtype), alone) <= tolerance
        assert calls == [dtype or torch.float32] * 3 * 2 * 4  # steps, ways, parameters
    dist.destroy_process_group()


def replica(rank: int, device: str, store: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2)
    patch = pytest.MonkeyPatch()
    patch.setattr(layout.Round, "is_even", False)  # gloo has broadcasts alone on a GPU
    alone = run(device, None)
    for most in (1, stages.ROUND):  # one matrix at a time, and all of them
        patch.setattr(stages, "ROUND", most)
        assert gap(run(device, None, process_group=dist.group.WORLD), alone) <= TOLERANCE[None]
    dist.monitored_barrier()
    os._exit(0)  # torch may abort if the interpreter ends while a thread of gloo runs


def run(device: str, placed: Any, **options: Any) -> list[Tensor]:
    rng = torch.Generator().manual_seed(0)

    def draw(shape: tuple[int, ...]) -> Tensor:
        t = torch.randn(shape, generator=rng).to(device)
        return t if placed is None else cut(t, *placed)

    params = [nn.Parameter(draw(shape)) for shape in SHAPES]
    opt = SODA(params, 1.0, zoo.muon(), **options)
    for _ in range(3):
        for p in params:
            p.grad = draw(tuple(p.shape))
        opt.step()
    return [whole(p) for p in params]
