"""Two ranks train as one process does, under FSDP2, tensor parallelism and DDP, in 16 bits too, and
after a framework has replaced the parameters."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import sodaopt
from sodaopt import SODA, Method, anchors, zoo
from sodaopt.geometry import Ball, Clip, RowNorm, Sharp, Sign, Spectral
from tests.support.ranks import Check, World, available, spawned  # noqa: F401
from tests.support.training import (
    LR,
    STEPS,
    batch,
    cut,
    equal,
    gap,
    groups,
    network,
    shard,
    takes,
    train,
    weights,
    whole,
)
from tests.support.wrapped import DTYPES, POLICIES, fresh, prepared, wrap

pytestmark = [available, pytest.mark.slow, pytest.mark.timeout(600)]

SHAPES = ((7, 5), (1, 6), (4, 3), (3, 3, 2))  # uneven, fewer rows than ranks, even, a stack
EXTRA = {  # rows in other forms, and maps that no row has
    "width": Method(Ball(Sign()), alpha=0.1),
    "clip": Method(Clip(RowNorm(), radius=0.5), alpha=0.1),
    "clip spectral": zoo.soda(Method(Clip(Spectral()), alpha=0.1)),
    "sharp sign": Method(Sharp(Sign())),
    "soda(adam)": zoo.soda(zoo.adam()),
    "soda(muon)": zoo.soda(zoo.muon()),
    "schedule_free(adam)": zoo.schedule_free(zoo.adam()),
    "decayed muon": zoo.muon(weight_decay=0.1),
}
METHODS = {name: row() for name, row in zoo.ROWS.items()} | EXTRA
AVERAGED = [name for name, method in METHODS.items() if method._keeps_x]
BRIEF = ("adamw", "muon", "soda_dagger", "schedule_free", "shampoo")  # one of each kind of state


def alone(name: str, **size: int) -> tuple[nn.Module, SODA]:
    """Return the model and the optimizer after the same training without shards."""
    model = network(**size)
    opt = SODA(groups(model, METHODS[name]), LR)
    train(model, opt)
    return model, opt


def tolerance(name: str) -> float:
    """Shampoo's inverse roots magnify the rounding of null directions by (1/eps)^(1/2) = 1e6."""
    return 1e-8 if "shampoo" in name else 1e-10


@cache
def straight(name: str, **size: int) -> list[Tensor]:
    return weights(alone(name, **size)[0])


# -- FSDP2 ----------------------------------------------------------------------------------------


def fsdp(name: str) -> None:
    model = shard(network())
    opt = SODA(groups(model, METHODS[name]), LR)
    train(model, opt, halves=True)
    assert gap(weights(model), weights(network())) > 1e-3, "the weights did not change"
    assert gap(weights(model), straight(name)) <= tolerance(name)


def fsdp_single_precision(name: str) -> None:
    model, plain = shard(network(torch.float32)), network(torch.float32)
    train(model, SODA(groups(model, METHODS[name]), LR))
    train(plain, SODA(groups(plain, METHODS[name]), LR))
    assert gap(weights(model), weights(plain)) <= 3e-6


def policies() -> dict[str, dict[str, Any]]:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    return {
        "bf16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
        "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        "keep": {"reshard_after_forward": False},
    }


def fsdp_policy(name: str, policy: str) -> None:
    """Under each policy, a step is that of whole parameters along the same gradients."""
    from torch.distributed.fsdp import fully_shard

    model, plain = network(torch.float32), network(torch.float32)
    fully_shard(model[2], **policies()[policy]), fully_shard(model, **policies()[policy])
    opts = [SODA(groups(m, METHODS[name]), LR) for m in (model, plain)]
    for k in range(4):
        X, Y = batch(k, torch.float32)
        opts[0].zero_grad()
        (model(X).float() - Y).square().mean().backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            q.grad = whole(p.grad)
        for opt in opts:
            opt.step()
        assert gap(weights(model), weights(plain)) <= 3e-6


def late(name: str) -> None:
    """The model is sharded on the meta device, and filled after the optimizer was built."""
    with torch.device("meta"):
        model = shard(network())
    opt = SODA(groups(model, METHODS[name]), LR)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p, t in zip(model.parameters(), network().parameters(), strict=True):
            p.copy_(cut(t.detach(), p.device_mesh, p.placements))
    train(model, opt, halves=True)
    assert gap(weights(model), straight(name)) <= tolerance(name)


def tensor_parallel(name: str, shape: tuple[int, ...]) -> None:
    """A pair of layers is cut by columns, then by rows. On a 2-D mesh FSDP2 cuts both once more."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh, styles = meshes(shape), {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(network(width=12), mesh["tp"], styles)  # torch needs even sizes
    if len(shape) == 2:
        fully_shard(model, mesh=mesh["dp"])
    train(model, SODA(groups(model, METHODS[name]), LR), halves=shape == (2, 1))
    assert gap(weights(model), straight(name, width=12)) <= tolerance(name)


def average(name: str) -> None:
    """eval() shows the x of the unsharded run, and train() restores y to the bit."""
    model, (plain, ref) = shard(network()), alone(name)
    opt = SODA(groups(model, METHODS[name]), LR)
    train(model, opt, halves=True)
    y = weights(model)
    opt.eval(), ref.eval()
    assert gap(weights(model), weights(plain)) <= tolerance(name)
    assert gap(weights(model), y) > 1e-6
    opt.train(), ref.train()
    assert equal(weights(model), y)
    later = range(STEPS, STEPS + 3)
    train(model, opt, later, halves=True), train(plain, ref, later)
    assert gap(weights(model), weights(plain)) <= tolerance(name)


def swapped(name: str) -> None:
    """The model is sharded after the optimizer was built, and its lists get the new parameters."""
    model = network()
    opt = SODA(groups(model, METHODS[name]), LR)
    old = {id(p): key for key, p in model.named_parameters()}
    with torch.no_grad():  # z0 is the new parameters, not the old ones
        for p in model.parameters():
            p.mul_(0.5)
    new = dict(shard(model).named_parameters())
    for group in opt.param_groups:
        for j, p in enumerate(group["params"]):
            group["params"][j] = new[old[id(p)]]
    saved = opt.state_dict()["state"]
    assert len(saved) == len(new)
    assert set(opt.state) == set(new.values()), "stale state"
    for group in opt.param_groups:
        for p in group["params"]:
            assert_laid_out_as(p, opt.state[p])
    train(model, opt, halves=True)

    plain = network()
    with torch.no_grad():
        for p in plain.parameters():
            p.mul_(0.5)
    train(plain, SODA(groups(plain, METHODS[name]), LR))
    assert gap(weights(model), weights(plain)) <= tolerance(name)


def swapped_and_stepped(name: str) -> None:
    """Like `swapped`, but each group gets a new list, and the next call is the first step."""
    model = network()
    opt = SODA(groups(model, METHODS[name]), LR)
    old = {id(p): key for key, p in model.named_parameters()}
    new = dict(shard(model).named_parameters())
    for group in opt.param_groups:
        group["params"] = [new[old[id(p)]] for p in group["params"]]
    train(model, opt, halves=True)
    assert set(opt.state) == set(new.values()), "stale state"
    assert gap(weights(model), straight(name)) <= tolerance(name)


def assert_laid_out_as(p: Tensor, state: dict[str, Tensor]) -> None:
    from torch.distributed.tensor import DTensor

    for key, t in state.items():
        if key in ("m", "v", "z0", "x", "y", "z", "L", "R"):
            assert isinstance(t, DTensor), key
            assert t.placements == p.placements, key
            assert t.device_mesh == p.device_mesh, key
            assert key in "LR" or t.to_local().shape == p.to_local().shape, key
        else:  # counters and running sums are whole on every rank
            assert not isinstance(t, DTensor), key


def state(name: str) -> None:
    """All ranks have the same keys before the first step. The state of p is sharded like p."""
    model = shard(network())
    opt = SODA(groups(model, METHODS[name]), LR)
    for _ in range(2):
        mine = [[(k, tuple(t.shape)) for k, t in s.items()] for s in opt.state.values()]
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, mine)
        assert all(theirs == mine for theirs in every)
        assert len(mine) == len(list(model.parameters()))
        for p, s in opt.state.items():
            assert_laid_out_as(p, s)
        train(model, opt, [0], halves=True)


# -- placements -----------------------------------------------------------------------------------


def layouts() -> dict[str, tuple[tuple[int, ...], tuple[object, ...]]]:
    """Mesh shape and placements, as tensor parallelism and its products with FSDP have them."""
    from torch.distributed.tensor import Replicate, Shard

    R, S0, S1 = Replicate(), Shard(0), Shard(1)
    return {
        "S0": ((2,), (S0,)),
        "S1": ((2,), (S1,)),
        "R": ((2,), (R,)),
        "1x2 S0 S1": ((1, 2), (S0, S1)),
        "2x1 S1 S0": ((2, 1), (S1, S0)),
        "1x2 R S1": ((1, 2), (R, S1)),
    }


def meshes(shape: tuple[int, ...]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    if shape not in MESHES:
        names = ("dp", "tp")[-len(shape) :]
        MESHES[shape] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return MESHES[shape]


MESHES: dict[tuple[int, ...], Any] = {}


def laid_out(
    name: str, dtype: torch.dtype = torch.float64, partial: bool = False
) -> Iterator[tuple[str, bool]]:
    """Yield each layout, and whether steps along random gradients end where the whole run does.

    They must agree to the bit, except for products of float64 matrices, whose last bits may depend
    on where in memory the matrices begin.
    """
    from torch.distributed.tensor import DTensor, Partial

    def draw(seed: int) -> list[Tensor]:
        rng = torch.Generator().manual_seed(seed)
        shapes = [s for s in SHAPES if takes(METHODS[name], s)]
        return [torch.randn(s, generator=rng).to(dtype) for s in shapes]

    plain = [nn.Parameter(t) for t in draw(0)]
    ref = SODA(plain, LR, METHODS[name])
    for k in range(5):
        for p, g in zip(plain, draw(1 + k), strict=True):
            p.grad = g
        ref.step()
    for label, (shape, placements) in layouts().items():
        mesh = meshes(shape)
        split = [nn.Parameter(cut(t, mesh, placements)) for t in draw(0)]
        opt = SODA(split, LR, METHODS[name])
        for k in range(5):
            for p, g in zip(split, draw(1 + k), strict=True):
                if partial:  # each rank has half of the sum
                    parts = [Partial()] * mesh.ndim
                    p.grad = DTensor.from_local(g / mesh.size(), mesh, parts)
                else:
                    p.grad = cut(g, mesh, placements)
            opt.step()
        ours, theirs = [whole(p) for p in split], [p.detach() for p in plain]
        exact = METHODS[name].geometry.elementwise or dtype != torch.float64
        yield label, equal(ours, theirs) if exact else gap(ours, theirs) <= 1e-12


def placed(name: str) -> None:
    assert dict(laid_out(name)) == dict.fromkeys(layouts(), True)


def rounded(name: str, dtype: torch.dtype) -> None:
    """The bits of stochastic rounding depend on the element's index, not on the layout."""
    assert dict(laid_out(name, dtype)) == dict.fromkeys(layouts(), True)


def unreduced(name: str) -> None:
    """The gradients are not reduced yet: their placements are Partial."""
    assert dict(laid_out(name, partial=True)) == dict.fromkeys(layouts(), True)


def average_16(name: str, dtype: torch.dtype) -> None:
    """eval() and train() keep the 16 bits of y, and agree with whole parameters."""
    from torch.distributed.tensor import Shard

    mesh = meshes((2,))
    t = torch.randn(7, 5).to(dtype)
    pair = [nn.Parameter(t.clone()), nn.Parameter(cut(t, mesh, [Shard(1)]))]
    opts = [SODA([p], LR, METHODS[name]) for p in pair]
    for k in range(5):
        g = torch.randn(7, 5, generator=torch.Generator().manual_seed(k)).to(dtype)
        pair[0].grad, pair[1].grad = g, cut(g, mesh, [Shard(1)])
        for opt in opts:
            opt.step()
    y = whole(pair[1]).clone()
    for mode in ("eval", "train"):
        for opt in opts:
            getattr(opt, mode)()
        assert torch.equal(whole(pair[0]), whole(pair[1])), mode
    assert torch.equal(whole(pair[1]), y)


def wrapped_16(wrapper: str) -> None:
    """A wrapped base steps several 16-bit DTensors as it steps whole parameters."""
    from torch.distributed.tensor import Shard

    mesh, rng = meshes((2,)), torch.Generator().manual_seed(0)
    start = [torch.randn(8, 4, generator=rng).bfloat16() for _ in range(3)]
    plain = [nn.Parameter(t.clone()) for t in start]
    split = [nn.Parameter(cut(t, mesh, [Shard(0)])) for t in start]
    make: Any = getattr(sodaopt, wrapper)
    opts = [make(torch.optim.AdamW(ps, lr=LR, weight_decay=0)) for ps in (plain, split)]
    for _ in range(4):
        for p, q in zip(plain, split, strict=True):
            p.grad = torch.randn(8, 4, generator=rng).bfloat16()
            q.grad = cut(p.grad, mesh, [Shard(0)])
        for opt in opts:
            opt.step()
    assert equal([whole(q) for q in split], [p.detach() for p in plain])


# -- anchors --------------------------------------------------------------------------------------


def rounded_weights(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16())


def anchored(policy: str, dtype: str) -> None:
    """Under FSDP2 an anchor gives the weights of the unsharded clone."""
    model, plain = shard(fresh(f"{policy}, {dtype}")), fresh(f"clone, {dtype}")
    if policy == "bf16":
        rounded_weights(model), rounded_weights(plain)
    z0 = weights(plain)
    opt, control = wrap(f"{policy}, {dtype}", model), wrap(f"clone, {dtype}", plain)
    opt.watch(), control.watch()
    train(model, opt), train(plain, control)
    assert equal(weights(model), weights(plain))
    (row,), (wanted,) = opt.diagnostics(), control.diagnostics()
    assert row == pytest.approx(wanted, rel=1e-4)  # of whole parameters
    for p, z in zip(model.parameters(), z0, strict=True):
        mine = anchors.value(opt.anchor.source(p, opt.state[p]["soda_z0"]), p.to_local())
        assert torch.equal(mine.to(z.dtype).expand_as(p.to_local()), cut_like(z, p))


def cut_like(t: Tensor, p: Any) -> Tensor:
    return cut(t, p.device_mesh, p.placements).to_local()


def anchored_layouts(policy: str) -> None:
    """In every layout, each rank has its part of z0, and does not communicate to get it."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.debug import CommDebugMode

    for label, (shape, placements) in layouts().items():
        mesh, whole_, parts = meshes(shape), nn.ParameterList(), nn.ParameterList()
        for s in (*SHAPES, (5,)):  # the last one is a constant
            fits = [q if getattr(q, "dim", 0) < len(s) else Replicate() for q in placements]
            whole_.append(nn.Parameter(torch.zeros(s)))
            parts.append(nn.Parameter(cut(torch.zeros(s), mesh, fits)))
        prepared("clone, fp32", whole_)
        opt = wrap(f"{policy}, fp32", prepared(f"{policy}, fp32", parts))
        if policy == "bf16":
            rounded_weights(whole_)
        for _ in range(2):
            for p in parts:
                p.grad = torch.ones_like(p)
            with CommDebugMode() as talk:
                opt.step()
            assert talk.get_total_counts() == 0
        for p, q in zip(parts, whole_, strict=True):
            mine = anchors.value(opt.anchor.source(p, opt.state[p]["soda_z0"]), p.to_local())
            assert torch.equal(mine.float().expand_as(p.to_local()), cut_like(q.detach(), p)), label


# -- replicas -------------------------------------------------------------------------------------


def replicas(name: str, dtype: torch.dtype) -> None:
    from torch.nn.parallel import DistributedDataParallel

    model = network(dtype)
    ddp = DistributedDataParallel(model)
    opt = SODA(groups(model, METHODS[name]), LR)
    train(ddp, opt, halves=True)
    mine = weights(model)
    for t in mine:
        theirs = [torch.empty_like(t) for _ in range(dist.get_world_size())]
        dist.all_gather(theirs, t)
        assert all(torch.equal(t, other) for other in theirs)
    assert gap(mine, weights(network(dtype))) > 1e-3, "the weights did not change"
    if dtype == torch.float64:
        assert gap(mine, straight(name)) <= tolerance(name)


def zero_redundancy(name: str) -> None:
    """ZeroRedundancyOptimizer builds a SODA on each rank, which steps some of the parameters."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model, plain, method = network(), network(), METHODS[name]
    opt = ZeroRedundancyOptimizer(model.parameters(), SODA, lr=LR, method=method)
    train(DistributedDataParallel(model), opt, halves=True)
    train(plain, SODA(plain.parameters(), LR, method))
    assert gap(weights(model), weights(plain)) <= tolerance(name)


# -- the table ------------------------------------------------------------------------------------


def table() -> Iterator[tuple[str, Callable[..., None], tuple[object, ...]]]:
    for name in METHODS:  # test_exchange.py compares their steps
        yield "state", state, (name,)
    for name in AVERAGED:
        yield "average", average, (name,)
        yield "average", average_16, (name, torch.bfloat16)
    for name in BRIEF:
        yield "fsdp", fsdp, (name,)
        yield "placed", placed, (name,)
        yield "fsdp_single_precision", fsdp_single_precision, (name,)
        yield "late", late, (name,)
        yield "swapped", swapped, (name,)
        yield "swapped_and_stepped", swapped_and_stepped, (name,)
        for shape in ((2,), (1, 2), (2, 1)):
            yield "tensor_parallel", tensor_parallel, (name, shape)
        yield "replicas", replicas, (name, torch.float64)
        yield "replicas", replicas, (name, torch.bfloat16)
    for name in ("adamw", "muon", "soda_dagger"):
        for policy in ("bf16", "offload", "keep"):
            yield "fsdp_policy", fsdp_policy, (name, policy)
    for wrapper in ("SODAWrapper", "GPA", "Lookahead"):
        yield "wrapped_16", wrapped_16, (wrapper,)
    for name in ("adamw", "muon"):
        yield "unreduced", unreduced, (name,)
    for name in ("adamw", "soda(adam)", "schedule_free"):
        yield "zero_redundancy", zero_redundancy, (name,)
    for name in (*BRIEF, "lion", "width", "clip", "soda(adam)"):
        yield "rounded", rounded, (name, torch.bfloat16)
    for name in ("adamw", "width", "muon"):
        yield "rounded", rounded, (name, torch.float16)
    for policy in POLICIES:
        yield "anchored_layouts", anchored_layouts, (policy,)
        for dtype in DTYPES:
            yield "anchored", anchored, (policy, dtype)


def bind(f: Callable[..., None], args: tuple[object, ...]) -> Check:
    return lambda where: f(*args)


CHECKS: dict[str, Check] = {
    "-".join((kind, *(str(a).removeprefix("torch.") for a in args))): bind(f, args)
    for kind, f, args in table()
}


@pytest.mark.parametrize("check", CHECKS)
def test_two_ranks(check: str, world: World) -> None:
    world.assert_passed(__name__, check)
