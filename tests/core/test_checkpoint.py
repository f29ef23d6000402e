"""Stop and continue: torch.save, DCP, resharding, and the tools that work with an optimizer."""

import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import lr_scheduler as lrs
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from sodaopt import SODA, Method, zoo
from tests.support.ranks import Check, World, available, spawned  # noqa: F401
from tests.support.training import LR, batch, equal, gap, groups, network, shard, train, weights

STEPS, HALF = 6, 3

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

METHODS = {
    "adamw": zoo.adamw(),
    "torch_nadam": zoo.torch_nadam(),
    "muon": zoo.muon(),
    "soda_dagger": zoo.soda_dagger(),
    "schedule_free": zoo.schedule_free(),
    "shampoo": zoo.shampoo(),
    "lion": zoo.lion(weight_decay=0.1),
}
FEW = ("adamw", "soda_dagger", "schedule_free")
each = pytest.mark.parametrize("name", METHODS)
few = pytest.mark.parametrize("name", FEW)


def unlike(a: Any, b: Any, at: str = "") -> str:
    """Return the first place where two state dicts differ in a bit, or an empty string."""
    if type(a) is not type(b):
        return f"{at}: {type(a).__name__}, {type(b).__name__}"
    if isinstance(a, dict):
        if a.keys() != b.keys():
            return f"{at}: keys {a.keys() ^ b.keys()}"
        return next(filter(None, (unlike(a[k], b[k], f"{at}.{k}") for k in a)), "")
    if isinstance(a, list):
        return unlike(dict(enumerate(a)), dict(enumerate(b)), at)
    if isinstance(a, Tensor):
        return "" if a.dtype == b.dtype and torch.equal(a, b) else f"{at}: {a}, {b}"
    return "" if a == b else f"{at}: {a}, {b}"


# -- ways to write a checkpoint -------------------------------------------------------------------


def options(flat: bool = False, **more: bool) -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(flatten_optimizer_state_dict=flat, **more)


def parts(model: nn.Module, opt: SODA, flat: bool, **more: bool) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import (
        get_model_state_dict,
        get_optimizer_state_dict,
    )

    return {
        "model": get_model_state_dict(model, options=options(**more)),
        "optim": get_optimizer_state_dict(model, opt, options=options(flat, **more)),
    }


def install(model: nn.Module, opt: SODA, found: dict[str, Any], **more: bool) -> None:
    """Load both. torch recognises a flat state, and full_state_dict fails with an option flat."""
    from torch.distributed.checkpoint.state_dict import (
        set_model_state_dict,
        set_optimizer_state_dict,
    )

    set_model_state_dict(model, found["model"], options=options(**more))
    set_optimizer_state_dict(model, opt, found["optim"], options=options(**more))


@dataclass(frozen=True)
class DCP:
    """torch.distributed.checkpoint, with the optimizer's state nested or flat."""

    flat: bool
    group: Any = None

    def save(self, model: nn.Module, opt: SODA, path: Path, alone: bool = True) -> None:
        import torch.distributed.checkpoint as dcp

        found = parts(model, opt, self.flat)
        dcp.save(found, checkpoint_id=path, no_dist=alone, process_group=self.group)

    def load(self, model: nn.Module, opt: SODA, path: Path, alone: bool = True) -> None:
        import torch.distributed.checkpoint as dcp

        found = parts(model, opt, self.flat)
        dcp.load(found, checkpoint_id=path, no_dist=alone, process_group=self.group)
        install(model, opt, found)


class Plain:
    """torch.save, and torch.load with weights_only=True."""

    def save(self, model: nn.Module, opt: SODA, path: Path) -> None:
        torch.save([model.state_dict(), opt.state_dict()], path)

    def load(self, model: nn.Module, opt: SODA, path: Path) -> None:
        for owner, found in zip((model, opt), torch.load(path, weights_only=True), strict=True):
            owner.load_state_dict(found)


FORMS = {"torch": Plain(), "nested": DCP(flat=False), "flat": DCP(flat=True)}

if not dist.is_available():
    del FORMS["nested"], FORMS["flat"]


# -- ways to build an optimizer -------------------------------------------------------------------


@dataclass
class Run:
    """A network in training, with everything that a checkpoint must hold."""

    model: nn.Module
    opt: SODA
    scheduler: Any = None

    def train(self, steps: range) -> "Run":
        for k in steps:
            train(self.model, self.opt, [k])
            if self.scheduler:
                self.scheduler.step()
        return self

    def schedule(self, state: Any = None) -> Any:
        """Return the scheduler's state, or load it."""
        if self.scheduler is None:
            return None
        return self.scheduler.load_state_dict(state) if state else self.scheduler.state_dict()


def plain(method: Method, dtype: torch.dtype = torch.float64, **more: Any) -> Run:
    model = network(dtype)
    return Run(model, SODA(groups(model, method), LR, **more))


def named(method: Method) -> Run:
    model = network()
    matrices = [(name, p) for name, p in model.named_parameters() if p.ndim == 2]
    vectors = [(name, p) for name, p in model.named_parameters() if p.ndim != 2]
    opt = SODA([{"params": matrices}, {"params": vectors, "method": "adam"}], LR, method)
    return Run(model, opt)


def several(method: Method) -> Run:
    """Each group has its own method. One method has no name, and two have the same name."""
    model = network()
    first, second, third = (layer for layer in model if isinstance(layer, nn.Linear))
    bare = Method(zoo.adam().geometry, alpha=0.2)
    opt = SODA(
        [
            {"params": [first.weight], "method": method},
            {"params": [second.weight], "method": zoo.muon(momentum=0.8), "lr": LR / 3},
            {"params": [third.weight], "method": zoo.muon(momentum=0.7, weight_decay=0.2)},
            {"params": [first.bias, third.bias], "method": bare, "maximize": True},
            {"params": [second.bias], "method": zoo.schedule_free(zoo.adam())},
        ],
        LR,
    )
    return Run(model, opt)


def scheduled(method: Method) -> Run:
    """The scheduler writes initial_lr, max_lr and min_lr into the groups."""
    run = plain(method)
    return Run(
        run.model, run.opt, lrs.OneCycleLR(run.opt, LR, total_steps=STEPS + 1, cycle_momentum=False)
    )


def frozen(method: Method) -> Run:
    """A parameter that does not train has no state."""
    model = network()
    model[2].weight.requires_grad_(False)
    return Run(model, SODA(groups(model, method), LR))


def tensor_lr(method: Method) -> Run:
    model = network()
    return Run(model, SODA(groups(model, method), torch.tensor(LR, dtype=torch.float64)))


BUILDS: dict[str, Callable[[Method], Run]] = {
    "plain": plain,
    "bfloat16": partial(plain, dtype=torch.bfloat16, seed=3),
    "tensor_lr": tensor_lr,
    "named": named,
    "several": several,
    "scheduled": scheduled,
    "frozen": frozen,
}


# -- resume ---------------------------------------------------------------------------------------


RESUMED = [(name, "plain") for name in METHODS]
RESUMED += [(name, build) for name in FEW for build in BUILDS if build != "plain"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "build"), RESUMED)
@pytest.mark.parametrize("form", FORMS)
def test_resume(name: str, build: str, form: str, tmp_path: Path) -> None:
    """A process that loads the checkpoint continues like the one that wrote it, bit by bit."""
    make, how, path = partial(BUILDS[build], METHODS[name]), FORMS[form], tmp_path / "saved"
    old, straight = make().train(range(HALF)), make().train(range(STEPS))
    how.save(old.model, old.opt, path)
    written, schedule = copy.deepcopy(old.opt.state_dict()), copy.deepcopy(old.schedule())
    new = make()
    with torch.no_grad():  # it has other weights before it loads
        for p in new.model.parameters():
            p.add_(1)
    how.load(new.model, new.opt, path)
    assert not unlike(new.opt.state_dict()["state"], written["state"])
    new.schedule(schedule)
    for run in (old, new):  # writing a checkpoint changes nothing either
        run.train(range(HALF, STEPS))
        assert equal(weights(run.model), weights(straight.model))
        assert not unlike(run.opt.state_dict()["state"], straight.opt.state_dict()["state"])
    assert gap(weights(straight.model), weights(network())) > 1e-3


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("form", FORMS)
def test_roll_back(build: str, form: str, tmp_path: Path) -> None:
    """Loading restores the optimizer of the checkpoint, also a second time."""
    run, how = BUILDS[build](METHODS["soda_dagger"]), FORMS[form]
    run.train(range(HALF))
    how.save(run.model, run.opt, tmp_path / "saved")
    written, x = copy.deepcopy(run.opt.state_dict()), weights(run.model)
    for _ in range(2):
        train(run.model, run.opt, [HALF])
        how.load(run.model, run.opt, tmp_path / "saved")
        assert equal(weights(run.model), x)
        assert not unlike(run.opt.state_dict(), written)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_resume_from_eval_mode(form: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """The weights in the file are x, for evaluation. The optimizer keeps y and the mode."""
    method, how = zoo.schedule_free(zoo.adam()), FORMS[form]
    old = plain(method, dtype).train(range(HALF))
    y = weights(old.model)
    old.opt.eval()
    x = weights(old.model)
    assert not equal(x, y)
    how.save(old.model, old.opt, tmp_path / "saved")

    new = plain(method, dtype)
    how.load(new.model, new.opt, tmp_path / "saved")
    assert equal(weights(new.model), x)
    with pytest.raises(RuntimeError, match="train"):
        new.opt.step()
    new.opt.train()
    assert equal(weights(new.model), y)
    new.train(range(HALF, STEPS))
    assert equal(weights(new.model), weights(plain(method, dtype).train(range(STEPS)).model))


@each
@pytest.mark.parametrize("form", FORMS)
def test_checkpoint_before_the_first_step(name: str, form: str, tmp_path: Path) -> None:
    """It has all keys of the later state, and neither writing nor loading it is a step."""
    method, how = METHODS[name], FORMS[form]
    straight = plain(method).train(range(STEPS))
    old = plain(method)
    how.save(old.model, old.opt, tmp_path / "saved")
    assert equal(weights(old.model), weights(network()))
    new = plain(method)
    how.load(new.model, new.opt, tmp_path / "saved")
    for run in (old, new):
        assert all(s["step"] == 0 for s in run.opt.state.values())
        before = [s.keys() for s in run.opt.state.values()]
        run.train(range(STEPS))
        assert [s.keys() for s in run.opt.state.values()] == before
        assert equal(weights(run.model), weights(straight.model))


@pytest.mark.parametrize("form", FORMS)
def test_another_method_is_refused(form: str, tmp_path: Path) -> None:
    how, old, new = FORMS[form], plain(zoo.adamw()).train(range(2)), plain(zoo.nadam())
    how.save(old.model, old.opt, tmp_path / "saved")
    with pytest.raises(ValueError, match=r"'nadam'.*'adamw'"):
        how.load(new.model, new.opt, tmp_path / "saved")


# -- on two ranks ---------------------------------------------------------------------------------

# The nested and the flat form hold the same tensors, so one method is enough for the nested form.
RESHARDED = {"soda_dagger": (False, True), "schedule_free": (True,), "shampoo": (True,)}


def sharded_run(name: str) -> tuple[nn.Module, SODA]:
    model = shard(network())
    return model, SODA(groups(model, METHODS[name]), LR)


def finish(model: nn.Module, opt: SODA, name: str) -> None:
    train(model, opt, range(HALF, STEPS), halves=True)
    assert gap(weights(model), straight(name)) <= 1e-10


@cache
def straight(name: str) -> list[Tensor]:
    return weights(plain(METHODS[name]).train(range(STEPS)).model)


def narrowed(where: Path, name: str, flat: bool) -> None:
    """Two ranks write a checkpoint and continue from it bitwise. The test loads it on one."""
    model, opt = sharded_run(name)
    train(model, opt, range(HALF), halves=True)
    form, path = DCP(flat), where / f"narrowed-{name}-{flat}"
    form.save(model, opt, path, alone=False)
    new, new_opt = sharded_run(name)
    form.load(new, new_opt, path, alone=False)
    finish(model, opt, name)
    finish(new, new_opt, name)
    assert equal(weights(new), weights(model))


def widened(where: Path, name: str, flat: bool) -> None:
    """One rank writes a checkpoint, and two ranks continue from it."""
    form, path = DCP(flat), where / f"widened-{name}-{flat}"
    if dist.get_rank() == 0:
        run = plain(METHODS[name]).train(range(HALF))
        form.save(run.model, run.opt, path)
    dist.barrier()
    model, opt = sharded_run(name)
    form.load(model, opt, path, alone=False)
    finish(model, opt, name)


def gathered(where: Path, name: str, flat: bool, broadcast: bool) -> None:
    """full_state_dict has whole tensors, on every rank or on the first rank only."""
    model, opt = sharded_run(name)
    train(model, opt, range(HALF), halves=True)
    found = parts(model, opt, flat, full_state_dict=True, cpu_offload=broadcast)
    if broadcast and dist.get_rank() == 0:
        torch.save(found, where / f"gathered-{name}-{flat}")
    new, new_opt = sharded_run(name)
    install(new, new_opt, found, full_state_dict=True, broadcast_from_rank0=broadcast)
    for p, p_new in zip(model.parameters(), new.parameters(), strict=True):
        for key, t in opt.state[p].items():
            t_new = new_opt.state[p_new][key]
            assert type(t_new) is type(t), key
            assert (t_new.dtype, t_new.shape) == (t.dtype, t.shape), key
    finish(new, new_opt, name)


def untouched(where: Path, name: str, flat: bool) -> None:
    """Asking for the state before the first step is not a step."""
    model, opt = sharded_run(name)
    parts(model, opt, flat)
    train(model, opt, range(HALF), halves=True)
    finish(model, opt, name)


def swapped(where: Path, name: str, flat: bool) -> None:
    """State is loaded into an optimizer whose parameters have just been replaced."""
    model, opt = sharded_run(name)
    train(model, opt, range(HALF), halves=True)
    found = parts(model, opt, flat)

    fresh = network()
    late = SODA(groups(fresh, METHODS[name]), LR)
    names = {id(p): key for key, p in fresh.named_parameters()}
    new = dict(model.named_parameters())
    for group in late.param_groups:
        for j, p in enumerate(group["params"]):
            group["params"][j] = new[names[id(p)]]
    try:
        install(model, late, found)
    except ValueError as e:  # torch reads the keys of a flat state from the optimizer's own
        assert "state_dict" in str(e)  # noqa: PT017
        late.state_dict()
        install(model, late, found)
    finish(model, late, name)


def table() -> Iterator[tuple[Callable[..., None], tuple[Any, ...]]]:
    for name in RESHARDED:
        for flat in RESHARDED[name]:
            for f in (narrowed, widened, untouched, swapped):
                yield f, (name, flat)
            for broadcast in (False, True):
                yield gathered, (name, flat, broadcast)


def bind(f: Callable[..., None], args: tuple[Any, ...]) -> Check:
    return lambda where: f(where, *args)


CHECKS: dict[str, Check] = {
    "-".join((f.__name__, *map(str, args))): bind(f, args) for f, args in table()
}


@available
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("check", CHECKS)
def test_two_ranks(check: str, world: World) -> None:
    world.assert_passed(__name__, check)
    kind, name, flat, *_ = check.split("-")
    file = world.where / f"{kind}-{name}-{flat}"
    run = plain(METHODS[name])
    if kind == "narrowed":
        DCP(flat == "True").load(run.model, run.opt, file)
    elif check == f"gathered-{name}-{flat}-True":
        install(run.model, run.opt, torch.load(file, weights_only=True))
    else:  # the others write no file for one process
        return
    run.train(range(HALF, STEPS))
    assert gap(weights(run.model), straight(name)) <= 1e-10


# -- schedulers -----------------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lrs.LambdaLR(o, lambda k: 1 / (k + 1)),
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, lambda k: 0.9),
    "StepLR": lambda o: lrs.StepLR(o, 2),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [2, 5]),
    "ConstantLR": lambda o: lrs.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: lrs.LinearLR(o, 0.01, total_iters=4),
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.8),
    "SequentialLR": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o, 0.1, total_iters=3), lrs.CosineAnnealingLR(o, 5)], [3]
    ),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 6),
    "ChainedScheduler": lambda o: lrs.ChainedScheduler(
        [lrs.ConstantLR(o, 0.1, 2), lrs.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: lrs.ReduceLROnPlateau(o, patience=0, threshold=10.0),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 0.001, 0.02, 2, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.02, total_steps=9, cycle_momentum=False),
    "PolynomialLR": lambda o: lrs.PolynomialLR(o, 6),
    "SWALR": lambda o: SWALR(o, 0.005, 4),
}


def tick(scheduler: Any, k: int) -> None:
    plateau = isinstance(scheduler, lrs.ReduceLROnPlateau)
    scheduler.step(*([1.0 + k] if plateau else []))


@few
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_scheduler(scheduler: str, name: str) -> None:
    """A scheduler sets the same rates as in torch's SGD, and the step uses them."""
    control = torch.optim.SGD([nn.Parameter(torch.zeros(1))], LR)
    beside = SCHEDULERS[scheduler](control)
    ours, by_hand = plain(METHODS[name]), plain(METHODS[name])
    ours.scheduler = SCHEDULERS[scheduler](ours.opt)
    rates = set()
    for k in range(8):
        rate = control.param_groups[0]["lr"]
        rates.add(rate)
        for group, other in zip(ours.opt.param_groups, by_hand.opt.param_groups, strict=True):
            assert group["lr"] == rate
            other["lr"] = rate
        train(ours.model, ours.opt, [k])
        train(by_hand.model, by_hand.opt, [k])
        control.step()
        tick(beside, k), tick(ours.scheduler, k)
    assert len(rates) > 1
    assert equal(weights(ours.model), weights(by_hand.model))


def test_every_scheduler_is_here() -> None:
    abstract = {"LRScheduler", "_LRScheduler"}
    kinds = {n for n, c in vars(lrs).items() if inspect.isclass(c) and hasattr(c, "get_last_lr")}
    assert kinds & set(lrs.__all__) - abstract <= set(SCHEDULERS)


# -- other tools that work with an optimizer ------------------------------------------------------


@each
def test_grad_scaler_skips_a_step(name: str) -> None:
    """A step with an inf gradient changes neither k nor the state nor the weights."""
    run, straight = plain(METHODS[name], torch.float32), plain(METHODS[name], torch.float32)
    scaler = torch.amp.GradScaler(device="cpu", init_scale=2.0**10)
    for k in range(6):
        for overflow in (True, False) if k in (0, 3) else (False,):
            X, Y = batch(k, torch.float32)
            run.opt.zero_grad()
            scaler.scale((run.model(X) - Y).square().mean()).backward()
            before = copy.deepcopy([weights(run.model), run.opt.state_dict()])
            if overflow:
                run.model[0].weight.grad[0, 0] = torch.inf
            scaler.step(run.opt)
            scaler.update()
            if overflow:
                assert not unlike(before, [weights(run.model), run.opt.state_dict()])
    assert {int(s["step"]) for s in run.opt.state.values()} == {6}
    straight.train(range(6))  # powers of two scale exactly
    assert equal(weights(run.model), weights(straight.model))


@each
def test_gradient_accumulation(name: str) -> None:
    run, straight = plain(METHODS[name]), plain(METHODS[name]).train(range(5))
    for k in range(5):
        X, Y = batch(k)
        run.opt.zero_grad()
        for X_, Y_ in zip(X.chunk(4), Y.chunk(4), strict=True):
            ((run.model(X_) - Y_).square().mean() / 4).backward()
        run.opt.step()
    # Roots of Shampoo's nearly singular factors magnify rounding, which differs between CPUs.
    assert gap(weights(run.model), weights(straight.model)) <= 1e-8


@few
def test_averaged_models_beside(name: str) -> None:
    """They average y in train mode and x in eval mode, and change neither."""
    run, straight = plain(METHODS[name]), plain(METHODS[name]).train(range(5))
    mean = AveragedModel(run.model)
    ema = AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    seen = []
    for k in range(5):
        train(run.model, run.opt, [k])
        mean.update_parameters(run.model), ema.update_parameters(run.model)
        seen.append(weights(run.model))
    assert equal(weights(run.model), weights(straight.model))
    means = [torch.stack(ts).mean(0) for ts in zip(*seen, strict=True)]
    assert gap(weights(mean), means) <= 1e-14
    run.opt.eval()
    ema.update_parameters(run.model)
    run.opt.train()
    assert equal(weights(run.model), weights(straight.model))
    assert run.opt.param_groups[0]["params"][0] is run.model[0].weight


def test_loading_copies_the_users_state() -> None:
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    one, two = SODA([a], 0.1, zoo.adam()), SODA([b], 0.1, zoo.adam())
    one.state[a] |= {"history": [1], "mask": torch.ones(2)}
    two.load_state_dict(one.state_dict())
    two.state[b]["history"].append(2)
    two.state[b]["mask"].zero_()
    assert one.state[a]["history"] == [1]
    assert one.state[a]["mask"].all()
