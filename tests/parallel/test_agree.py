"""Ranks that disagree raise the same error, with the parameter's name, and do not hang."""

import re
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from sodaopt import SODA, SODAWrapper, zoo
from sodaopt.core import together
from sodaopt.geometry import Ball, Spectral
from sodaopt.parallel import agree, exchange, stages
from tests.parallel.test_exchange import everybody, mesh_of, placed
from tests.support.ranks import Check, World, available, spawned  # noqa: F401

pytestmark = [available, pytest.mark.slow, pytest.mark.timeout(600)]

RANKS = 4
SHAPES = {"first": (7, 5), "second": (4, 6), "third": (8, 3), "fourth": (3, 2)}


def optimizer(parallelism: str, change: Any = None, **options: Any) -> SODA:
    """Return an optimizer of four matrices, one for each rank. The last rank has the change."""
    names = list(SHAPES)
    if _last(change, "order"):
        names.reverse()
    method = zoo.muon(momentum=0.5 if _last(change, "settings") else 0.95)
    method = zoo.lion() if _last(change, "elementwise") else method
    params = placed(parallelism, [torch.ones(SHAPES[n]) for n in names])
    options |= {"process_group": dist.group.WORLD} if parallelism == "ddp" else {}
    options |= {"comm_dtype": torch.float16} if _last(change, "comm_dtype") else {}
    named = [(n, nn.Parameter(p)) for n, p in zip(names, params, strict=True)]
    opt = SODA(named, 0.1 if _last(change, "lr") else 0.02, method, **options)
    for _, p in named:
        p.grad = torch.ones_like(p)
    return opt


def _last(change: Any, kind: str) -> bool:
    return bool(change == kind and dist.get_rank() == RANKS - 1)


def second(opt: SODA) -> Any:
    return opt.param_groups[0]["params"][1]


def wrap(opt: SODA) -> None:
    SODAWrapper(opt, decay=0.5)


def lose_gradient(opt: SODA) -> None:
    second(opt).grad = None


def sparse_gradient(opt: SODA) -> None:
    p = second(opt)
    if hasattr(p, "to_local"):
        raise_at_preparation(opt)
    else:
        p.grad = torch.ones_like(p).to_sparse()


def raise_at_preparation(opt: SODA) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise ValueError("second has a sparse gradient")

    opt._current = fail  # type: ignore[method-assign]


def break_the_map(opt: SODA) -> None:
    opt.methods["muon"] = replace(zoo.muon(), geometry=Ball(Spectral(polar=broken)))


def broken(*args: Any) -> Any:
    raise RuntimeError("broken")


def add_to_step_count(opt: SODA) -> None:
    opt.state[second(opt)]["step"] += 1


def nothing(opt: SODA) -> None:
    pass


def change_method(opt: SODA) -> None:
    opt.methods["multinorm"] = zoo.multinorm()
    opt.param_groups[0]["method"] = "multinorm"


def maximize(opt: SODA) -> None:
    opt.param_groups[0]["maximize"] = True


def unknown_method(opt: SODA) -> None:
    opt.param_groups[0]["method"] = "unheard"


def foreign_key(opt: SODA) -> None:
    opt.param_groups[0]["weight_decay"] = 0.1


def lose_lr(opt: SODA) -> None:
    del opt.param_groups[0]["lr"]


def change_last_digits_of_lr(opt: SODA) -> None:
    opt.param_groups[0]["lr"] = torch.tensor([0.02])


def leave_training(opt: SODA) -> None:
    opt.param_groups[0]["train_mode"] = False


def fail_to_average(opt: SODA) -> None:
    make = opt._buckets

    def wrong_shapes() -> Any:
        buckets = make()
        for s in [s for b in buckets for s in b.state]:
            s["m"] = torch.ones(3, 3, 3)
        return buckets

    opt._buckets = wrong_shapes  # type: ignore[method-assign]


def fail_to_pack(opt: SODA) -> None:
    patch = opt._sharing.patched = pytest.MonkeyPatch()  # type: ignore[attr-defined]
    pack = stages.Exchange._packed

    def fail_once(*args: Any) -> Tensor:
        patch.setattr(stages.Exchange, "_packed", pack)
        raise MemoryError("out of memory")

    patch.setattr(stages.Exchange, "_packed", fail_once)


def fail_to_finish(opt: SODA) -> None:
    opt._advance = broken  # type: ignore[method-assign]


FAULTS: dict[str, tuple[str | None, Callable[[SODA], None], str]] = {
    "gradient": (None, lose_gradient, "second of group 0 .* without a gradient"),
    "raises": (None, sparse_gradient, "rank 3 could not prepare the step: .*sparse gradient"),
    "computes": (
        None,
        break_the_map,
        r"rank 3 could not compute the step: fourth of group 0 .*broken",
    ),
    "averages": (None, fail_to_average, "rank 3 could not compute.*: .*fourth of group 0 .*: The "),
    "packs": (None, fail_to_pack, "rank 3 could not compute.*of group 0.*: out of memory"),
    "finishes": (None, fail_to_finish, "rank 3 could not compute the step: .*of group 0.*broken"),
    "step": (None, add_to_step_count, "second of group 0"),
    "unknown method": (None, unknown_method, "rank 3 could not prepare the step: .*unheard"),
    "key": (None, foreign_key, "rank 3 could not prepare the step: .*weight_decay=0.1"),
    "no lr": (None, lose_lr, "rank 3 could not prepare the step: KeyError\\('lr'\\)"),
    "eval": (None, leave_training, "rank 3 could not prepare the step: .*eval mode"),
    "method": (None, change_method, "'method': 'muon'.* but rank 3 .*'method': 'multinorm'"),
    "maximize": (None, maximize, "'maximize': False.* but rank 3 .*'maximize': True"),
    "comm_dtype": ("comm_dtype", nothing, "comm_dtype None, but rank 3 has .*float16"),
    "settings": ("settings", nothing, "rank 0 has group 0 with .*but rank 3"),
    "wrapper": (
        None,
        wrap,
        "rank 0 has no wrapper, but rank 3 has SODAWrapper with .*'decay': 0.5",
    ),
    "elementwise": ("elementwise", nothing, "'method': 'muon'.* but rank 3 .*'method': 'lion'"),
    "lr": ("lr", nothing, "lr 0.02, but rank 3 has group 0 .* lr 0.1"),
    "lr tensor": (None, change_last_digits_of_lr, "lr 0.02, but rank 3 has .* lr 0.01999999955"),
    "order": ("order", nothing, "first of group 0 .* but rank 3 has fourth"),
}


def faulty(parallelism: str, fault: str, after: int) -> None:
    change, act, message = FAULTS[fault]
    opt = optimizer(parallelism, change if after == 0 else None)
    for _ in range(after):
        opt.step()
    if dist.get_rank() == RANKS - 1:
        act(opt)
        if after and change == "lr":
            opt.param_groups[0]["lr"] = 0.1
    with pytest.raises(RuntimeError) as e:
        opt.step()
    getattr(opt._sharing, "patched", pytest.MonkeyPatch()).undo()
    assert re.search(message, str(e.value)), str(e.value)
    assert len(set(everybody(str(e.value)))) == 1, "the ranks raised different errors"


def added(parallelism: str, method: str) -> None:
    """Groups that are added during a run are compared too, once if all maps are elementwise."""

    def group(*names: str) -> dict[str, Any]:
        tensors = placed(parallelism, [torch.ones(4, 4) for _ in names])
        return {"params": [(n, nn.Parameter(t)) for n, t in zip(names, tensors, strict=True)]}

    opt = SODA([group("first")], 0.1, method, process_group=dist.group.WORLD)
    opt.step()
    opt.add_param_group(group("a", "b") if dist.get_rank() else group("b", "a"))
    with pytest.raises(RuntimeError, match=r"rank 0 has b of group 1 .*, but rank 1 has a"):
        opt.step()


def elementwise_too(parallelism: str) -> None:
    """If ranks compare a step, they find a missing gradient of any parameter that they share."""
    opt = optimizer(parallelism)
    p = nn.Parameter(placed(parallelism, [torch.ones(4, 4)])[0])
    opt.add_param_group({"params": [("fifth", p)], "method": zoo.adamw()})
    opt.step()
    p.grad = torch.ones_like(p) if dist.get_rank() else None
    raises_without_a_gradient(opt, "rank 0 has fifth of group 1 .* without a gradient, but rank 1")


def on_meshes(*meshes: DeviceMesh, order: int = 1) -> SODA:
    """Return an optimizer with a parameter on each mesh, in this order or in the opposite one."""
    wholes = [distribute_tensor(torch.ones(4, 4), m, [Shard(0)] * m.ndim) for m in meshes]
    named = [
        (f"{m.ndim}-D {m.mesh_dim_names}", nn.Parameter(t))
        for m, t in zip(meshes, wholes, strict=True)
    ]
    opt = SODA(named[::order], 0.1, zoo.muon())
    for p in opt.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    return opt


def axes() -> list[DeviceMesh]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    return [mesh["b"], mesh["a"]]


def raises_without_a_gradient(opt: SODA, match: str = "without a gradient") -> None:
    with pytest.raises(RuntimeError, match=match) as e:
        opt.step()
    assert len(set(everybody(str(e.value)))) == 1


def two_meshes() -> None:
    """A failure on one mesh reaches the ranks of another mesh. Then all can step again."""
    opt = on_meshes(*axes())
    params = opt.param_groups[0]["params"]
    lost = params[0].grad
    if dist.get_rank() == 3:
        params[0].grad = None
    with pytest.raises(RuntimeError, match=r"rank 3 has .* without a gradient"):
        opt.step()
    params[0].grad = lost
    opt.step()


MESHES: dict[str, Callable[[], list[DeviceMesh]]] = {
    "axes": axes,
    "sizes": lambda: [mesh_of((4,)), mesh_of((2, 2))],
}


def another_order_of_meshes(kind: str) -> None:
    """Ranks compare and exchange mesh by mesh in one order, whatever the order of parameters is."""
    meshes = MESHES[kind]()
    opt = on_meshes(*meshes, order=-1 if dist.get_rank() == 3 else 1)
    for _ in range(2):
        opt.step()


def fewer_meshes(lost: bool) -> None:
    """Some ranks have a parameter on a mesh of their own. The others do not wait for it."""
    world, pair = mesh_of((4,)), DeviceMesh("cpu", [0, 1])
    opt = on_meshes(*([world, pair] if dist.get_rank() < 2 else [world]))
    if lost and dist.get_rank() == 1:
        opt.param_groups[0]["params"][1].grad = None
    if lost:
        raises_without_a_gradient(opt)
    else:
        opt.step()


def chain_of_meshes() -> None:
    """A failure at the end of a chain of meshes reaches its other end."""
    pairs = [(0, 1), (1, 2), (2, 3)]
    rank = dist.get_rank()
    opt = on_meshes(*(m for p in pairs for m in [DeviceMesh("cpu", p)] if rank in p))
    opt.step()
    if rank == 3:
        opt.param_groups[0]["params"][0].grad = None
    raises_without_a_gradient(opt)


def more_groups() -> None:
    """Ranks that are in fewer groups than others join groups of their own."""
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)
    exchange._join_as_many_groups(mesh_of((2, 2)))
    counts = everybody(len(dist.distributed_c10d._world.pg_names))
    assert len(set(counts)) == 1


def undone() -> None:
    """If the ranks disagree, a wrapper's pull is undone, and no rank counts the step."""
    p = nn.Parameter(placed("fsdp", [torch.randn(8, 4)])[0])
    opt = SODAWrapper(SODA([p], 0.1, zoo.muon()))
    for k in range(3):
        p.grad = torch.ones_like(p) if k < 2 or dist.get_rank() != 3 else None
        before = p.to_local().clone()
        if k < 2:
            opt.step()
    raises_without_a_gradient(opt)  # type: ignore[arg-type]
    assert torch.allclose(p.to_local(), before, rtol=1e-6, atol=1e-6)
    assert opt.param_groups[0]["soda_k"] == 2


def outside_the_mesh() -> None:
    """A rank that is not in the mesh of a parameter has no part of it."""
    mesh = DeviceMesh("cpu", [0, 1])
    for method in (zoo.muon(), zoo.shampoo()):
        p = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
        p.grad = torch.ones_like(p)
        opt = SODA([p], 0.1, method)
        if dist.get_rank() < 2:
            opt.step()
        else:
            message = "parameter 0 of group 0 .* is on a mesh without this rank"
            with pytest.raises(RuntimeError, match=message):
                opt.step()


def order_of_a_mesh() -> None:
    """If the ranks of a group are not sorted, all ranks of the mesh refuse to share work, at once.
    The mesh as a whole need not be sorted, and elementwise methods need no order."""
    refused = rf"rank {dist.get_rank()} could not prepare .*: parameter 0 of .* the ranks \[3, 2\]"
    unsorted, shuffled = DeviceMesh("cpu", [[0, 1], [3, 2]]), DeviceMesh("cpu", [[0, 2], [1, 3]])
    for mesh, method in ((unsorted, "adamw"), (shuffled, "muon"), (unsorted, "muon")):
        p = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Replicate(), Shard(0)]))
        p.grad = torch.ones_like(p)
        opt = SODA([p], 0.1, method)
        if (mesh, method) == (unsorted, "muon"):
            with pytest.raises(RuntimeError, match=refused):
                opt.step()
        else:
            opt.step()


def other_default_device(parallelism: str) -> None:
    """The comparison is on the host, whatever torch's default device is."""
    opt = optimizer(parallelism)
    with torch.device("meta"):
        opt.step()


def in_pairs(check: Callable[..., None], *args: Any) -> None:
    """Compare two ranks in each reduction. Many ranks compare `FEW` of them in each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agree, "FEW", 2)
        assert [group.size() for group in agree.host(dist.group.WORLD).groups] == [2, 2]
        check(*args)


def stopped(where: str, message: str) -> None:
    """If a rank stops before or within a step, the others stop at the time-out of their group.

    where: "before" the second step or "at first", or the part of it in which rank 0 raises an
    error: a stage, the "closure", or the preparation of a "wrapper".
    """
    group = dist.new_group(timeout=timedelta(seconds=2))
    opt = optimizer("ddp")
    opt._sharing.process_group = group
    if where != "at first":
        opt.step()
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            if where in ("before", "at first"):
                return
            if where in ALONE:
                with pytest.raises(RuntimeError, match=r"^broken$"):
                    ALONE[where](opt)
                return
            patch.setattr(stages.Exchange, where, broken)
        with pytest.raises(RuntimeError, match=message):
            opt.step()


def wrap_and_fail(opt: SODA) -> None:
    wrapper = SODAWrapper(opt)
    wrapper._lam = broken  # type: ignore[method-assign]
    wrapper.step()


ALONE: dict[str, Callable[[SODA], Any]] = {
    "closure": lambda opt: opt.step(broken),
    "wrapper": wrap_and_fail,
}


def captured(parallelism: str) -> None:
    """A graph would repeat one step count, and does not contain the comparison on the host."""
    opt = optimizer(parallelism)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(together, "_is_captured", lambda opt: True)
        with pytest.raises(RuntimeError, match="cannot capture a step in which ranks share"):
            opt.step()
    opt.step()


def automatic_anchor(make: Callable[[Any], Any]) -> None:
    """Each rank checks its own shard for constant weights, and waits for no other rank."""
    params = [nn.Parameter(p) for p in placed("fsdp", [torch.ones(7, 5), torch.randn(8, 4)])]
    opt, first = make(params), dist.get_rank() % 2  # odd ranks have no gradient of the constant
    for p in params[first:]:
        p.grad = torch.ones_like(p)
    opt.step()
    key = "z0" if isinstance(opt, SODA) else "soda_z0"
    assert [opt.state[p][key].dim() for p in params[first:]] == [0, 2][first:]
    assert set(opt.state_dict()["state"]) >= set(range(first, 2))


def soda(params: Any) -> SODA:
    return SODA(params, 0.1, zoo.soda(zoo.adam()), anchor="auto")


def wrapped(params: Any) -> SODAWrapper:
    return SODAWrapper(torch.optim.AdamW(params, weight_decay=0), anchor="auto")


def bind(f: Callable[..., None]) -> Check:
    return lambda where: f()


@pytest.mark.parametrize(
    ("ranks", "factors"),
    [(1, []), (2, [2]), (6, [6]), (24, [8, 3]), (22, [2, 11]), (16384, [8, 8, 8, 8, 4])],
)
def test_many_ranks_form_a_grid(ranks: int, factors: list[int]) -> None:
    assert agree._factors(ranks) == factors


WITHIN = r"^rank 0 could not compute the step: first of group 0.*: broken$"
AHEAD = r"^rank 0 could not prepare the step: broken$"

CHECKS: dict[str, Check] = (
    {
        f"{fault}-{parallelism}-{after}": bind(partial(faulty, parallelism, fault, after))
        for fault in FAULTS
        for parallelism in ("fsdp", "hsdp", "ddp")
        for after in (0, 2)
        if after == 0 or FAULTS[fault][0] in (None, "lr")
    }
    | {
        f"in pairs-{fault}-{parallelism}": bind(partial(in_pairs, faulty, parallelism, fault, 0))
        for fault in FAULTS
        for parallelism in ("fsdp", "ddp")
    }
    | {
        f"stopped-{stage}": bind(partial(stopped, stage, WITHIN))
        for stage in ("send", "compute", "spread", "finish")
    }
    | {f"stopped-{where}": bind(partial(stopped, where, AHEAD)) for where in ALONE}
    | {
        "stopped-before": bind(partial(stopped, "before", "did not call step")),
        "in pairs-stopped": bind(partial(in_pairs, stopped, "before", "did not call step")),
        "in pairs-stopped at first": bind(
            partial(in_pairs, stopped, "at first", "did not call step")
        ),
        "two meshes": bind(two_meshes),
        "fewer meshes": bind(partial(fewer_meshes, False)),
        "fewer meshes, without a gradient": bind(partial(fewer_meshes, True)),
        "in pairs-fewer meshes": bind(partial(in_pairs, fewer_meshes, False)),
        "in pairs-fewer meshes, without a gradient": bind(partial(in_pairs, fewer_meshes, True)),
        "another order-axes": bind(partial(another_order_of_meshes, "axes")),
        "another order-sizes": bind(partial(another_order_of_meshes, "sizes")),
        "chain of meshes": bind(chain_of_meshes),
        "more groups": bind(more_groups),
        "undone": bind(undone),
        "outside the mesh": bind(outside_the_mesh),
        "order of a mesh": bind(order_of_a_mesh),
        "captured-fsdp": bind(partial(captured, "fsdp")),
        "captured-ddp": bind(partial(captured, "ddp")),
        "added-fsdp": bind(partial(added, "fsdp", "muon")),
        "added-ddp": bind(partial(added, "ddp", "muon")),
        "added-elementwise": bind(partial(added, "fsdp", "adamw")),
        "elementwise too-fsdp": bind(partial(elementwise_too, "fsdp")),
        "elementwise too-ddp": bind(partial(elementwise_too, "ddp")),
        "default device-fsdp": bind(partial(other_default_device, "fsdp")),
        "default device-ddp": bind(partial(other_default_device, "ddp")),
        "automatic anchor-SODA": bind(partial(automatic_anchor, soda)),
        "automatic anchor-SODAWrapper": bind(partial(automatic_anchor, wrapped)),
    }
)


@pytest.mark.parametrize("check", CHECKS)
def test_four_ranks(check: str, world: World) -> None:
    world.assert_passed(__name__, check)
