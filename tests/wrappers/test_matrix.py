"""The matrix: twenty-one ways in which optimizers are used. SODAWrapper goes through all of them.

The other wrappers, the anchors and bf16 parameters go through the uses in which their code differs.

Each check trains a tiny model with the real framework and compares with a plain loop, bit by bit if
one process runs it. `tests/wrappers/test_frameworks.py` has more tests of the frameworks.
"""

import copy
import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

from tests.core.test_checkpoint import DCP, FORMS, SCHEDULERS, install, parts, tick, unlike
from tests.support import hugging
from tests.support.ranks import Check, World, available, spawned  # noqa: F401
from tests.support.training import (
    LR,
    STEPS,
    batch,
    cut,
    equal,
    gap,
    network,
    shard,
    train,
    weights,
    whole,
)
from tests.support.wrapped import (
    ANCHORED,
    HALF,
    WRAPPERS,
    class_form,
    dtype_of,
    fresh,
    initial,
    keys,
    loss_of,
    missing,
    prepared,
    started,
    warmup,
    wrap,
)

LATER = range(HALF, STEPS)


def straight(name: str, dtype: torch.dtype | None = None, schedule: Any = None) -> list[Tensor]:
    """The weights after STEPS steps of a plain loop."""
    model, opt = started(name, dtype)
    scheduler = schedule and schedule(opt)
    for k in range(STEPS):
        train(model, opt, [k])
        if scheduler:
            scheduler.step()
    return weights(model)


# -- one process, torch alone ---------------------------------------------------------------------


def runs(name: str, where: Path) -> None:
    """The wrapper lowers the loss, and does not end where its base optimizer does."""
    (model, opt), bare = started(name), fresh(name)
    X, Y = batch(0, dtype_of(name))
    first = loss_of(model, X, Y)
    train(model, opt, [0] * 40)
    train(bare, AdamW(bare.parameters(), LR, weight_decay=0), [0] * 40)
    assert loss_of(model, X, Y) < first
    assert gap(weights(model), weights(bare)) > 1e-4
    assert keys(opt)


def scheduler(name: str, where: Path) -> None:
    """The base optimizer steps with the rates that a scheduler sets on the wrapper."""
    kinds = ("LambdaLR", "OneCycleLR", "ReduceLROnPlateau", "SequentialLR")
    for kind in kinds:
        (model, opt), (plain, by_hand) = started(name), started(name)
        schedule = SCHEDULERS[kind](opt)
        rates = set()
        for k in range(8):
            rate = opt.param_groups[0]["lr"]
            rates.add(rate)
            by_hand.base.param_groups[0]["lr"] = rate
            train(model, opt, [k]), train(plain, by_hand, [k])
            tick(schedule, k)
        assert len(rates) > 1, kind
        assert equal(weights(model), weights(plain)), kind


def first_step_at_zero(name: str, where: Path) -> None:
    """In a warmup from lr = 0, the first step moves nothing, and the others stay finite."""
    model, opt = started(name)
    schedule = warmup(opt)
    train(model, opt, [0])
    assert equal(weights(model), initial(name))
    schedule.step()
    train(model, opt, range(1, STEPS))
    assert 1e-3 < gap(weights(model), initial(name)) < 1


def resume(name: str, where: Path) -> None:
    """A run that is saved and loaded with weights_only=True continues with the same bits."""
    several = (torch.float64, torch.float32, torch.bfloat16)
    for dtype in (dtype_of(name),) if name in ANCHORED else several:
        (old, opt), (new, new_opt) = started(name, dtype), started(name, dtype)
        train(old, opt, range(HALF))
        FORMS["torch"].save(old, opt, where / "saved")
        with torch.no_grad():
            for p in new.parameters():
                p.add_(1)
        FORMS["torch"].load(new, new_opt, where / "saved")
        assert not unlike(new_opt.state_dict(), opt.state_dict())
        train(new, new_opt, LATER)
        assert equal(weights(new), straight(name, dtype))


def schedule_after_load(name: str, where: Path) -> None:
    """After load_state_dict, the wrapper's scheduler changes the base optimizer's new groups."""
    model, opt = started(name)
    schedule = warmup(opt)
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    for k in range(STEPS):
        if k == HALF:
            opt.load_state_dict(copy.deepcopy(opt.state_dict()))
        train(model, opt, [k])
        schedule.step()
        assert opt.base.param_groups[0]["lr"] == LR * min((k + 1) / 3, 1)
    assert equal(weights(model), straight(name, schedule=warmup))


def copies(name: str, where: Path) -> None:
    """Copies by deepcopy and pickle, of an instance and of the class form, train on their own."""
    for form in (
        lambda model: wrap(name, model),
        lambda model: class_form(name, model)(model.parameters(), lr=LR),
    ):
        model = fresh(name)
        opt = form(model)
        train(model, opt, range(HALF))
        others = copy.deepcopy((model, opt)), pickle.loads(pickle.dumps((model, opt)))
        for other, other_opt in others:
            assert type(other_opt).__name__ == type(opt).__name__
            assert other_opt.param_groups[0]["params"][0] is other[0].weight
            train(other, other_opt, LATER)
            assert equal(weights(other), straight(name))
        train(model, opt, LATER)
        assert equal(weights(model), straight(name))


def hooks(name: str, where: Path) -> None:
    """In three steps and one checkpoint, step hooks fire 3 times and the others once, on both."""
    model, opt = started(name)
    count: dict[Any, int] = {}

    def tally(*key: Any) -> Callable[..., None]:
        return lambda *args: count.__setitem__(key, count.get(key, 0) + 1)

    kinds = ("step_pre", "step_post", "state_dict_pre", "state_dict_post")
    kinds += ("load_state_dict_pre", "load_state_dict_post")
    for owner in (opt, opt.base):
        for kind in kinds:
            getattr(owner, f"register_{kind}_hook")(tally(owner is opt, kind))
    train(model, opt, range(3))
    opt.load_state_dict(opt.state_dict())
    times = {kind: 3 if "step_" in kind else 1 for kind in kinds}
    assert count == {(side, kind): times[kind] for side in (True, False) for kind in kinds}


def add_param_group(name: str, where: Path) -> None:
    """A late group starts at its own k = 0, as if it had its own wrapper."""
    first, second = both = two(name)
    opt = wrap(name, first.parameters(), model=both)
    for k in range(STEPS):
        if k == HALF:
            opt.add_param_group({"params": list(second.parameters()), "lr": LR / 2})
            vary(name, second)
        opt.zero_grad()
        X, Y = batch(k, dtype_of(name))
        (loss_of(first, X, Y) + loss_of(second, X, Y)).backward()
        opt.step()
    control = two(name)
    train(control[0], wrap(name, control[0].parameters(), model=control))
    idle, alone = pair = two(name)
    opt = wrap(name, idle.parameters(), LR / 2, model=pair)  # rounding depends on the index
    opt.add_param_group({"params": list(alone.parameters())})
    vary(name, alone)
    train(alone, opt, LATER)
    assert equal(weights(first), weights(control[0]))
    assert equal(weights(second), weights(alone))


def two(name: str) -> nn.ModuleList:
    """Two networks that share an anchor."""
    return prepared(name, nn.ModuleList([network(dtype_of(name)) for _ in range(2)]))


def vary(name: str, model: nn.Module) -> None:
    """Change the weights after the optimizer got them. A seed determines them, so they stay."""
    if not name.startswith("seed"):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)


def closure(name: str, where: Path) -> None:
    """step(closure) takes the gradient before anything moves, and returns the loss."""
    model, opt = started(name)
    for k in range(STEPS):

        def evaluate(k: int = k) -> Tensor:
            opt.zero_grad()
            loss = loss_of(model, *batch(k, dtype_of(name)))
            loss.backward()
            return loss

        before = loss_of(model, *batch(k, dtype_of(name))).detach()
        assert torch.equal(opt.step(evaluate).detach(), before)
    assert equal(weights(model), straight(name))


def grad_scaler(name: str, where: Path) -> None:
    """A step with an inf gradient changes nothing, also with a base optimizer that can skip it."""
    dtype = dtype_of(name, torch.float32)
    (model, opt), (plain, control) = (started(name, dtype, fused=True) for _ in range(2))
    scaler = torch.amp.GradScaler(device="cpu", init_scale=2.0**10)
    for k in range(6):
        for overflow in (True, False) if k in (0, 3) else (False,):
            opt.zero_grad()
            scaler.scale(loss_of(model, *batch(k, dtype))).backward()
            before = copy.deepcopy([weights(model), opt.state_dict()])
            if overflow:
                model[0].weight.grad[0, 0] = torch.inf
            scaler.step(opt)
            scaler.update()
            if overflow:
                assert not unlike(before, [weights(model), opt.state_dict()])
    train(plain, control, range(6))  # powers of two scale exactly
    assert equal(weights(model), weights(plain))


def compiled(name: str, where: Path) -> None:
    """A compiled step advances k and follows lr, and is not compiled again for each value."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = prepared(name, nn.Linear(6, 1).to(dtype_of(name)))
    plain = copy.deepcopy(model)
    opt, control = wrap(name, model), wrap(name, plain)
    step, graphs = torch.compile(opt.step, backend="eager"), []
    for k in range(14):
        for group in (*opt.param_groups, *control.param_groups):
            group["lr"] = LR / (k + 1)
        train(plain, control, [k])
        opt.zero_grad()
        loss_of(model, *batch(k, dtype_of(name))).backward()
        step()
        graphs.append(counters["stats"]["unique_graphs"])
    tol = 1e-5 if dtype_of(name).itemsize > 2 else 2**-7  # AdamW itself, compiled, is 1e-6 away
    assert gap(weights(model), weights(plain)) <= tol
    assert 0 < graphs[7] == graphs[-1]
    torch._dynamo.reset()


# -- checkpoints of torch.distributed and torchtitan ----------------------------------------------


def dcp(name: str, where: Path) -> None:
    """In the flat and the nested form, saving changes nothing, and resuming is bitwise."""
    for form in (DCP(flat=False), DCP(flat=True)):
        (old, opt), (new, new_opt) = started(name), started(name)
        path = where / f"flat={form.flat}"
        train(old, opt, range(HALF))
        form.save(old, opt, path)
        form.load(new, new_opt, path)
        assert not unlike(new_opt.state_dict()["state"], opt.state_dict()["state"])
        for model, its in ((old, opt), (new, new_opt)):
            train(model, its, LATER)
            assert equal(weights(model), straight(name))


def torchtitan(name: str, where: Path) -> None:
    """torchtitan's container keeps one flat dict by parameter name for several optimizers."""
    flat: dict[str, Any] = {}
    (old, opts), (new, new_opts), (plain, its) = (titan_parts(name) for _ in range(3))
    for k in range(HALF):
        titan_step(old, opts, k)
    for k in range(STEPS):
        titan_step(plain, its, k)
    for opt in opts:
        titan_init(opt)
        flat |= titan_flat(opt)
    torch.save([old.state_dict(), flat], where / "saved")
    found, flat = torch.load(where / "saved", weights_only=True)
    new.load_state_dict(found)
    for opt in new_opts:
        titan_init(opt)
        titan_load(opt, flat)
    for k in LATER:
        titan_step(new, new_opts, k)
    assert equal(weights(new), weights(plain))
    if dtype_of(name).itemsize > 2:  # rounding depends on the index in the optimizer
        assert equal(weights(new), straight(name))


def titan_parts(name: str) -> tuple[nn.Module, list[Any]]:
    """Return a model, and an optimizer for each of its two parts, built from named parameters."""
    model = fresh(name)
    named = list(model.named_parameters())
    return model, [wrap(name, part, model=model) for part in (named[:3], named[3:])]


def titan_step(model: nn.Module, opts: list[Any], k: int) -> None:
    model.zero_grad()
    loss_of(model, *batch(k, next(model.parameters()).dtype)).backward()
    for opt in opts:
        opt.step()


def titan_init(opt: Any) -> None:
    """Allocate state with a step at lr = 0 and zero gradients, if there is none yet."""
    if opt.state:
        return
    rates = [g["lr"] for g in opt.param_groups]
    for group in opt.param_groups:
        group["lr"] = 0.0
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    opt.step(closure=None)
    for group, rate in zip(opt.param_groups, rates, strict=True):
        group["lr"] = rate
    opt.zero_grad(set_to_none=True)


def titan_flat(opt: Any) -> dict[str, Any]:
    saved = opt.state_dict()
    flat = {}
    for group in saved["param_groups"]:
        for n, fqn in zip(group["params"], group["param_names"], strict=True):
            flat |= {f"state.{fqn}.{k}": v for k, v in saved["state"][n].items()}
            flat |= {f"param_groups.{fqn}.{k}": v for k, v in group.items() if k[:5] != "param"}
    return flat


def titan_load(opt: Any, flat: dict[str, Any]) -> None:
    """Load the states and the group keys that the live optimizer has."""
    state, groups, n = {}, [], 0
    for group in opt.param_groups:
        names, at = group["param_names"], []
        for fqn, p in zip(names, group["params"], strict=True):
            state[n] = {k: flat[f"state.{fqn}.{k}"] for k in opt.state[p]}
            at.append(n)
            n += 1
        own = {k: flat[f"param_groups.{names[0]}.{k}"] for k in group if k[:5] != "param"}
        groups.append({"params": at, **own})
    opt.load_state_dict({"state": state, "param_groups": groups})


# -- frameworks -----------------------------------------------------------------------------------


def accelerate(name: str, where: Path) -> None:
    """Accumulation and a scheduler, and new objects that continue from save_state."""
    from accelerate import Accelerator, skip_first_batches
    from torch.utils.data import DataLoader, TensorDataset

    def prepared() -> tuple[Any, ...]:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model, opt = started(name)
        loader = DataLoader(TensorDataset(*samples(name)), batch_size=4)
        return accelerator, *accelerator.prepare(model, opt, warmup(opt), loader)

    def go(run: tuple[Any, ...], loader: Any) -> Iterator[None]:
        accelerator, model, opt, schedule, _ = run
        for X, Y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, X, Y))
                opt.step()
                schedule.step()
                opt.zero_grad()
            yield

    run = prepared()
    rest = go(run, run[-1])
    for _ in islice(rest, 2 * HALF):
        pass
    run[0].save_state(where, safe_serialization=False)
    new = prepared()
    new[0].load_state(where)
    for _ in chain(rest, go(new, skip_first_batches(new[-1], 2 * HALF))):
        pass

    plain, opt = started(name)
    schedule = warmup(opt)
    for k in range(STEPS):
        opt.zero_grad()
        for X, Y in zip(*(t.chunk(2) for t in batch(k, dtype_of(name))), strict=True):
            (loss_of(plain, X, Y) / 2).backward()
        opt.step()
        schedule.step()
    for accelerated in (run, new):
        assert equal(weights(accelerated[1]), weights(plain))


def samples(name: str) -> list[Tensor]:
    batches = [batch(k, dtype_of(name)) for k in range(STEPS)]
    return [torch.cat(ts) for ts in zip(*batches, strict=True)]


def hf_trainer(name: str, where: Path) -> None:
    """Trainer(optimizers=) evaluates and saves, and a new Trainer continues from the checkpoint."""

    def build(model: nn.Module) -> Any:
        return wrap(name, prepared(name, model.to(dtype_of(name, torch.float32))))

    made = [hugging.trainer(where / "run", build) for _ in range(2)]
    made[0].train()
    made[1].train(resume_from_checkpoint=str(where / "run" / f"checkpoint-{hugging.SAVED}"))
    assert hugging.losses(made[1]) == hugging.losses(made[0])
    assert equal(weights(made[1].model), weights(made[0].model))
    assert len(set(hugging.losses(made[0]))) == hugging.STEPS


def lightning(name: str, where: Path) -> None:
    """fit with a scheduler equals the plain loop, also if it is resumed."""
    from tests.support import lit

    def module() -> Any:
        return lit.Module(fresh(name), lambda m: wrap(name, m), warmup)

    first, new, both = module(), module(), module()
    trainer = lit.trainer(epochs=1)
    trainer.fit(first)
    trainer.save_checkpoint(where / "saved.ckpt")
    lit.trainer().fit(new, ckpt_path=where / "saved.ckpt")
    lit.trainer().fit(both)
    for each in (new, both):
        assert equal(weights(each.model), straight(name, schedule=warmup))
    assert first.losses | new.losses == both.losses


def fabric(name: str, where: Path) -> None:
    """Fabric.setup puts the wrapper into a subclass of its class. A saved run continues."""
    from tests.support.lit import L

    def setup() -> tuple[Any, Any, Any]:
        made = L.Fabric(accelerator="cpu", devices=1)
        return made, *made.setup(*started(name))

    def go(run: tuple[Any, Any, Any], steps: range) -> None:
        made, model, opt = run
        for k in steps:
            opt.zero_grad()
            made.backward(loss_of(model, *batch(k, dtype_of(name))))
            opt.step()

    old, new = setup(), setup()
    go(old, range(HALF))
    old[0].save(where / "saved", {"model": old[1], "opt": old[2]})
    new[0].load(where / "saved", {"model": new[1], "opt": new[2]})
    for run in (old, new):
        go(run, LATER)
        assert equal(weights(run[1]), straight(name))


# -- two ranks ------------------------------------------------------------------------------------


def sharded(name: str) -> tuple[nn.Module, Any]:
    model = shard(fresh(name))
    return model, wrap(name, model)


def go_on(name: str, model: nn.Module, opt: Any, steps: Any = range(STEPS)) -> None:
    """Train each rank on its half of the batch.

    Below float64, each rank trains on the whole batch, because the mean of two equal gradients is
    exact.
    """
    train(model, opt, steps, halves=dtype_of(name) == torch.float64)


def close(name: str, model: nn.Module) -> bool:
    """Return whether the weights equal those of one process, up to the order of a sum."""
    tol = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 0.0}[dtype_of(name)]
    return gap(weights(model), straight(name)) <= tol


def fsdp2(name: str, where: Path) -> None:
    """Parity with one process, a checkpoint of two ranks, and one that the first rank sends."""
    (model, opt), (new, new_opt), (third, third_opt) = (sharded(name) for _ in range(3))
    go_on(name, model, opt, range(HALF))
    for flat in (False, True):
        DCP(flat).save(model, opt, where / f"fsdp2-{name}-{flat}", alone=False)
    full = parts(model, opt, False, full_state_dict=True, cpu_offload=True)
    DCP(True).load(new, new_opt, where / f"fsdp2-{name}-True", alone=False)
    full = copy.deepcopy(full)  # on a CPU, some tensors are those of the live state
    install(third, third_opt, full, full_state_dict=True, broadcast_from_rank0=True)
    for its, its_opt in ((model, opt), (new, new_opt), (third, third_opt)):
        go_on(name, its, its_opt, LATER)
        assert equal(weights(its), weights(model))
    assert close(name, model)
    sixteen(name)


def sixteen(name: str) -> None:
    """The rounding of an element does not depend on the rank that holds it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh("cpu", (2,))
    for placement in (Shard(0), Shard(1)):
        start = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
        pair = [nn.Parameter(start.clone()), nn.Parameter(cut(start, mesh, [placement]))]
        opts = [wrap(name, prepared(name, nn.ParameterList([p]))) for p in pair]
        for k in range(7):
            g = torch.randn(7, 5, generator=torch.Generator().manual_seed(k)).bfloat16()
            pair[0].grad, pair[1].grad = g, cut(g, mesh, [placement])
            for opt in opts:
                opt.step()
        assert torch.equal(whole(pair[0]), whole(pair[1]))


def fsdp2_alone(name: str, where: Path) -> None:
    """A checkpoint of two ranks, loaded by one."""
    for flat in (False, True):
        model, opt = started(name)
        DCP(flat).load(model, opt, where / f"fsdp2-{name}-{flat}")
        train(model, opt, LATER)
        assert close(name, model)


def swap(name: str, where: Path) -> None:
    """accelerate shards the model after the optimizer was built, and replaces its parameters."""
    from accelerate.utils.fsdp_utils import fsdp2_switch_optimizer_parameters

    model, opt = started(name)
    opt.load_state_dict(opt.state_dict())
    old = {key: p.data_ptr() for key, p in model.named_parameters()}
    for group in opt.param_groups:
        for j, p in enumerate(group["params"]):
            group["params"][j] = torch.empty(1, dtype=p.dtype)
            group["params"][j].data_ptr = p.data_ptr()
    new = dict(shard(model).named_parameters())
    fsdp2_switch_optimizer_parameters(opt, {at: new[key] for key, at in old.items()})
    go_on(name, model, opt)
    assert set(opt.state) == set(new.values())
    assert close(name, model)


def ddp(name: str, where: Path) -> None:
    """DDP, and ZeroRedundancyOptimizer, which builds the class form for each rank's parameters."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    def zero(model: nn.Module) -> Any:
        return ZeroRedundancyOptimizer(model.parameters(), class_form(name, model), lr=LR)

    for make in (lambda model: wrap(name, model), zero):
        model = fresh(name)
        opt = make(model)
        go_on(name, DistributedDataParallel(model), opt, range(HALF))
        if make is zero:
            opt.consolidate_state_dict(to=0)
        saved = [opt.state_dict() if make is not zero or dist.get_rank() == 0 else None]
        dist.broadcast_object_list(saved, 0)
        other = copy.deepcopy(model)
        other_opt = make(other)
        other_opt.load_state_dict(copy.deepcopy(saved[0]))
        for its, its_opt in ((model, opt), (other, other_opt)):
            go_on(name, DistributedDataParallel(its), its_opt, LATER)
            assert equal(weights(its), weights(model))
        # each rank counts its parameters from 0, and rounding depends on the index
        others = make is zero and dtype_of(name).itemsize == 2
        assert gap(weights(model), straight(name)) <= 2**-6 if others else close(name, model)


def deepspeed(name: str, where: Path) -> None:
    """ZeRO 0, 1 and 2 flatten the parameters into one piece a rank before the first step."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(dist.get_rank())}
    import deepspeed as ds

    for stage in (0, 1, 2):

        def engine(stage: int = stage) -> Any:
            model = fresh(name, torch.float32)
            config = {
                "train_micro_batch_size_per_gpu": 4,
                "gradient_clipping": 0.0,  # the default is 1
                "zero_allow_untested_optimizer": True,
                "zero_optimization": {"stage": stage},
            }
            opt = wrap(name, model)
            return ds.initialize(model=model, optimizer=opt, config=config)[0]

        def go(its: Any, steps: range) -> None:
            for k in steps:
                X, Y = (t[dist.get_rank() :: 2] for t in batch(k, torch.float32))
                its.backward(loss_of(its, X, Y))
                its.step()

        old, new = engine(), engine()
        go(old, range(HALF))
        old.save_checkpoint(str(where / f"deepspeed-{name}"), tag=str(stage))
        new.load_checkpoint(str(where / f"deepspeed-{name}"), tag=str(stage))
        for its in (old, new):
            go(its, LATER)
            assert gap(weights(its.module), straight(name, torch.float32)) <= 1e-5


# -- the table ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Use:
    """A way in which an optimizer is used, with the packages and the ranks that it needs."""

    check: Callable[[str, Path], None]
    needs: tuple[str, ...] = ()
    ranks: bool = False
    then: Callable[[str, Path], None] | None = None
    """A check in one process of the files that the ranks wrote."""


LIGHTNING = ("lightning or pytorch_lightning",)
USES = {
    "base = AdamW": Use(runs),
    "scheduler": Use(scheduler),
    "first step at lr 0": Use(first_step_at_zero),
    "save and resume": Use(resume),
    "schedule after load": Use(schedule_after_load),
    "deepcopy and pickle": Use(copies),
    "hooks": Use(hooks),
    "add_param_group": Use(add_param_group),
    "closure": Use(closure),
    "GradScaler": Use(grad_scaler),
    "accelerate": Use(accelerate, ("accelerate",)),
    "HF Trainer": Use(hf_trainer, ("transformers", "accelerate")),
    "Lightning": Use(lightning, LIGHTNING),
    "DCP": Use(dcp),
    "FSDP2": Use(fsdp2, ranks=True, then=fsdp2_alone),
    "accelerate FSDP2 swap": Use(swap, ("accelerate",), ranks=True),
    "torchtitan": Use(torchtitan),
    "DDP and ZeroRedundancyOptimizer": Use(ddp, ranks=True),
    "DeepSpeed ZeRO": Use(deepspeed, ("deepspeed",), ranks=True),
    "Fabric": Use(fabric, LIGHTNING),
    "torch.compile": Use(compiled),
}


OTHERS = tuple(name for name in WRAPPERS if name != "SODAWrapper")

# Each anchor in some of the dtypes. A copy has its own dtype, or the parameter's.
SHARDED = ("clone, bf16", "clone fp32, bf16", "bf16, fp32", "cpu, bf16", "auto, fp32",
           "file, bf16", "seed, fp32", "seed, bf16")  # fmt: skip

# The uses in which the code for a name differs from SODAWrapper with float64 and a clone.
MORE: dict[str, tuple[str, ...]] = {
    # each wrapper restarts or averages in its own way, and keeps its own tensors
    "base = AdamW": OTHERS,
    "first step at lr 0": OTHERS,
    "deepcopy and pickle": (*OTHERS, "file, fp32", "seed, fp32"),
    "save and resume": ("clone, bf16",),
    # a late group starts with an empty memory, finds its z0 by name, and rounds by its index
    "add_param_group": ("ScheduleFree", "file, fp32", "seed, fp32", "clone, bf16"),
    # a skipped step must not change the state, nor the fp32 copies
    "GradScaler": (*OTHERS, "clone, bf16"),
    "HF Trainer": ("clone, bf16",),
    # state is allocated by a step at lr = 0, so the first z0 is provisional
    "DCP": ("ScheduleFree", "auto, fp32", "seed, fp32", "clone, bf16"),
    "torchtitan": ("ScheduleFree", "bf16, fp32", "file, fp32", "seed, bf16"),
    # shards of every kind of state. In 16 bits the rounding depends on the element
    "FSDP2": (*OTHERS, *SHARDED),
    "accelerate FSDP2 swap": ("file, fp32", "seed, fp32", "clone, bf16"),
    "DDP and ZeroRedundancyOptimizer": ("ScheduleFree", "clone, bf16"),
    "torch.compile": ("ScheduleFree", "Lookahead", "clone, bf16"),
}


def names(title: str) -> tuple[str, ...]:
    return ("SODAWrapper", *MORE.get(title, ()))


def bind(use: Use, name: str) -> Check:
    return lambda where: use.check(name, where)


CHECKS: dict[str, Check] = {
    f"{title}-{name}": bind(use, name)
    for title, use in USES.items()
    if use.ranks
    for name in names(title)
}


def cells() -> Iterator[Any]:
    for title, use in USES.items():
        for name in names(title):
            needs = (*use.needs, *(["safetensors"] if name.startswith("file") else []))
            absent = missing(*needs)
            marks = [pytest.mark.skipif(bool(absent), reason=f"{absent} not installed")]
            if use.ranks:
                marks += [available, pytest.mark.timeout(600)]
            yield pytest.param(f"{title}-{name}", marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize("check", list(cells()))
def test_matrix(check: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    title, name = check.rsplit("-", 1)
    use = USES[title]
    if not use.ranks:
        use.check(name, tmp_path)
        return
    world: World = request.getfixturevalue("world")
    world.assert_passed(__name__, check)
    if use.then:
        use.then(name, world.where)
