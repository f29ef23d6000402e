"""SODAWrapper in frameworks that people train with, in cases that are not in test_matrix.py.

Class forms and factories, injected weight decay, killed runs, mixed precision, manual loops, and
every scheduler of torch on the wrapper and on its base.
"""

import copy
import os
import pickle
import signal
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim import lr_scheduler as lrs
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import DataLoader, TensorDataset

from sodaopt import SODA, ScheduleFree, SODAWrapper, hidden
from sodaopt.wrappers.base import Wrapper
from tests.core.test_checkpoint import DCP, SCHEDULERS, tick, unlike
from tests.support import hugging
from tests.support.training import LR, STEPS, batch, equal, gap, network, train, weights
from tests.support.wrapped import HALF, WRAPPERS, keys, loss_of, missing, started, warmup, wrap

SodaAdamW = SODAWrapper.of(AdamW)


class NamedSodaAdamW(SODAWrapper.of(AdamW)):  # type: ignore[misc]
    """The class form under a name of its own, which a configuration file can point at."""


def soda(model: nn.Module) -> SODAWrapper:
    return SODAWrapper(AdamW(model.parameters(), 0.01, weight_decay=0))


# -- Hugging Face ---------------------------------------------------------------------------------


absent = missing("transformers", "accelerate")
pytestmark = pytest.mark.slow
trainer = pytest.mark.skipif(bool(absent), reason=f"{absent} not installed")


class Hidden:
    """A factory, which Trainer calls with the model. It pulls the paper's hidden layers."""

    def __call__(self, model: nn.Module, lr: float) -> SODAWrapper:
        return SODAWrapper(AdamW(model.parameters(), lr, weight_decay=0), only=hidden(model))


# The matrix resumes from an instance.
FORMS: dict[str, Callable[[], dict[str, Any]]] = {
    "instance": lambda: {"build": soda},
    "class": lambda: {"optimizer_cls_and_kwargs": (SodaAdamW, {"lr": 0.01})},
    "factory": lambda: {"optimizer_cls_and_kwargs": (Hidden, {"lr": 0.01})},
}


@trainer
@pytest.mark.parametrize("form", ["class", "factory"])
def test_trainer_resumes(form: str, tmp_path: Path) -> None:
    """New objects that resume in the middle have the same losses and weights, bit by bit."""
    old, new = (hugging.trainer(tmp_path / "run", **FORMS[form]()) for _ in range(2))
    old.train()
    new.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{hugging.SAVED}"))
    assert hugging.losses(new) == hugging.losses(old)
    assert equal(weights(new.model), weights(old.model))
    pulled = {n for n, p in new.model.named_parameters() if "soda_z0" in new.optimizer.state[p]}
    every = {n for n, _ in new.model.named_parameters()}
    chosen = {id(p) for p in hidden(new.model)}
    inner = {n for n, p in new.model.named_parameters() if id(p) in chosen}
    assert pulled == (inner if form == "factory" else every)
    assert 0 < len(inner) < len(every)


@trainer
def test_trainer_class_form_is_the_instance(tmp_path: Path) -> None:
    runs = [hugging.trainer(tmp_path / f, **FORMS[f]()) for f in ("instance", "class")]
    for run in runs:
        run.train()
    assert [len(run.optimizer.param_groups) for run in runs] == [1, 2]
    assert hugging.losses(runs[0]) == hugging.losses(runs[1])


@trainer
def test_trainer_injects_weight_decay(tmp_path: Path) -> None:
    """Trainer writes the weight decay of its arguments into the groups, which is refused."""
    run = hugging.trainer(tmp_path, arguments={"weight_decay": 0.1}, **FORMS["class"]())
    with pytest.raises(ValueError, match=r"weight_decay=0\.1.*write AdamW"):
        run.train()


def die_after(step: int, folder: Path) -> None:
    """Train under the Trainer, and be killed."""
    from transformers import TrainerCallback

    class Kill(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step == step:
                os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    hugging.trainer(folder, soda, callbacks=[Kill()]).train()


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
@trainer
def test_trainer_killed(tmp_path: Path) -> None:
    """A process is killed two steps after it saved, and this one continues from its checkpoint."""
    victim = get_context("fork").Process(target=die_after, args=(5, tmp_path / "run"))
    victim.start()
    victim.join()
    assert victim.exitcode == -signal.SIGKILL
    straight, new = (hugging.trainer(tmp_path / f, soda) for f in ("straight", "run"))
    straight.train()
    new.train(resume_from_checkpoint=True)
    assert hugging.losses(new) == hugging.losses(straight)
    assert equal(weights(new.model), weights(straight.model))


@trainer
def test_trainer_accumulates_and_clips(tmp_path: Path) -> None:
    """Two halves of a batch give the step of the whole batch."""
    halves = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    runs = [
        hugging.trainer(tmp_path / "whole", soda),
        hugging.trainer(tmp_path / "halves", soda, arguments=halves),
    ]
    for run in runs:
        run.train()
    assert runs[1].optimizer.param_groups[0]["soda_k"] == hugging.STEPS
    assert gap(weights(runs[0].model), weights(runs[1].model)) <= 1e-5


# -- accelerate -----------------------------------------------------------------------------------


def test_accelerate_mixed_precision(tmp_path: Path) -> None:
    """A run with bf16 autocast around fp32 weights, clipping and safetensors resumes bitwise."""
    accelerate = pytest.importorskip("accelerate")

    def prepared() -> tuple[Any, ...]:
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
        model, opt = started("SODAWrapper", torch.float32)
        return accelerator, *accelerator.prepare(model, opt, warmup(opt))

    def go(run: tuple[Any, ...], steps: range) -> None:
        accelerator, model, opt, schedule = run
        for k in steps:
            opt.zero_grad()
            accelerator.backward(loss_of(model, *batch(k, torch.float32)))
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
            schedule.step()

    accelerate.state.AcceleratorState._reset_state(True)
    try:
        old, new = prepared(), prepared()
        go(old, range(HALF))
        old[0].save_state(tmp_path)
        new[0].load_state(tmp_path)
        go(old, range(HALF, STEPS)), go(new, range(HALF, STEPS))
    finally:
        accelerate.state.AcceleratorState._reset_state(True)
    assert new[2].param_groups[0]["soda_k"] == STEPS
    assert equal(weights(old[1]), weights(new[1]))


def test_accelerate_switches_modes() -> None:
    """accelerate's optimizer passes train() and eval() on."""
    accelerate = pytest.importorskip("accelerate")
    model, inner = started("ScheduleFree")
    opt = accelerate.Accelerator(cpu=True).prepare(inner)
    train(model, opt, range(3))
    y = weights(model)
    opt.eval()
    assert not equal(weights(model), y)
    opt.train()
    assert equal(weights(model), y)
    assert isinstance(inner, ScheduleFree)


# -- Lightning ------------------------------------------------------------------------------------


@pytest.fixture
def lit() -> ModuleType:
    try:
        from tests.support import lit
    except ImportError:
        pytest.skip("neither lightning nor pytorch_lightning is installed")
    return lit


def test_lightning_checkpoint_callback(lit: ModuleType, tmp_path: Path) -> None:
    """A run resumed from a file of ModelCheckpoint has the same losses and weights."""

    def fit(folder: str, epochs: int, ckpt: Any = None) -> Any:
        keep = lit.callbacks.ModelCheckpoint(tmp_path / folder, save_last=True)
        module = lit.Module(network(), soda, warmup)
        trainer = lit.trainer(epochs, enable_checkpointing=True, callbacks=[keep])
        trainer.fit(module, ckpt_path=ckpt)
        return module

    straight, first = fit("straight", 2), fit("run", 1)
    new = fit("run", 2, tmp_path / "run" / "last.ckpt")
    assert first.losses | new.losses == straight.losses
    assert not first.losses.keys() & new.losses.keys()
    assert equal(weights(new.model), weights(straight.model))


def test_lightning_options(lit: ModuleType) -> None:
    """Accumulation, clipping and bf16 weights: k counts steps, and the weights stay bf16."""
    module = lit.Module(network(torch.float32), soda, warmup)
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "precision": "bf16-true"}
    trainer = lit.trainer(4, **options)
    trainer.fit(module)
    opt = trainer.optimizers[0]
    assert opt.param_groups[0]["soda_k"] == trainer.global_step == 4 * 3
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert gap(weights(module.model), weights(network(torch.bfloat16))) > 1e-3


def test_lightning_manual(lit: ModuleType) -> None:
    """Manual optimization equals the plain loop."""

    class Manual(lit.Module):
        automatic_optimization = False

        def training_step(self, number: Tensor, k: int) -> None:
            opt = self.optimizers()
            opt.zero_grad()
            self.manual_backward(loss_of(self.model, *batch(self.global_step)))
            opt.step()
            self.lr_schedulers().step()

    module, plain = Manual(network(), soda, warmup), network()
    lit.trainer().fit(module)
    opt = soda(plain)
    schedule = warmup(opt)
    for k in range(STEPS):
        train(plain, opt, [k])
        schedule.step()
    assert equal(weights(module.model), weights(plain))


@pytest.mark.parametrize("by", ["path", "class"])
def test_lightning_cli(lit: ModuleType, by: str) -> None:
    """`--optimizer=` takes the path of the class form, and `add_optimizer_args` a named one."""
    pytest.importorskip("jsonargparse")
    try:
        made = lit.by_command_line(NamedSodaAdamW if by == "class" else f"{__name__}.SodaAdamW")
    except ModuleNotFoundError as e:  # a part of jsonargparse that is optional
        pytest.skip(str(e))
    opt = made.trainer.optimizers[0]
    assert isinstance(opt, SODAWrapper)
    assert isinstance(opt.base, AdamW)
    group = opt.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["soda_k"]) == (0.02, 0.0, STEPS)


def test_named_class_form() -> None:
    """A subclass of the class form stays itself in copies."""
    model = network()
    opt = NamedSodaAdamW(model.parameters(), LR)
    train(model, opt, range(HALF))
    for other, its in (copy.deepcopy((model, opt)), pickle.loads(pickle.dumps((model, opt)))):
        assert type(its) is NamedSodaAdamW
        train(other, its, range(HALF, STEPS))
        plain, control = started("SODAWrapper")
        train(plain, control)
        assert equal(weights(other), weights(plain))


# -- torch ----------------------------------------------------------------------------------------

WITH_MOMENTUM: dict[str, Callable[[Any], Any]] = {
    "OneCycleLR with momentum": lambda o: lrs.OneCycleLR(o, 0.02, total_steps=9),
    "CyclicLR with momentum": lambda o: lrs.CyclicLR(o, 0.001, 0.02, 2),
}


@pytest.mark.parametrize("on", ["wrapper", "base"])
@pytest.mark.parametrize("kind", [*SCHEDULERS, *WITH_MOMENTUM])
def test_scheduler(kind: str, on: str) -> None:
    """A scheduler of either sets the same values as in AdamW, and the step uses them."""
    make = (SCHEDULERS | WITH_MOMENTUM)[kind]
    control = AdamW([nn.Parameter(torch.zeros(1))], LR, weight_decay=0)
    beside = make(control)
    (model, opt), (plain, by_hand) = started("SODAWrapper"), started("SODAWrapper")
    schedule = make(opt if on == "wrapper" else opt.base)
    rates = set()
    for k in range(8):
        now = {key: control.param_groups[0][key] for key in ("lr", "betas")}
        rates.add(now["lr"])
        for mine in (opt, opt.base):
            assert {key: mine.param_groups[0][key] for key in now} == now
        by_hand.param_groups[0] |= now
        train(model, opt, [k]), train(plain, by_hand, [k])
        control.step()
        tick(beside, k), tick(schedule, k)
    assert len(rates) > 1
    assert equal(weights(model), weights(plain))


@pytest.mark.parametrize("name", ["SODAWrapper", "ScheduleFree"])
def test_swa(name: str) -> None:
    """An averaged model, an EMA, SWALR and update_bn beside it disturb nothing."""
    (model, opt), (plain, control) = started(name), started(name)
    averaged = AveragedModel(nn.Sequential(model, nn.BatchNorm1d(1).double()))
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    schedules = SWALR(opt, LR / 2, 4), SWALR(control, LR / 2, 4)
    seen = []
    for k in range(HALF):
        train(model, opt, [k]), train(plain, control, [k])
        averaged.update_parameters(nn.Sequential(model, nn.BatchNorm1d(1).double()))
        ema.update_parameters(model)
        seen.append(weights(model))
        for s in schedules:
            s.step()
    assert equal(weights(model), weights(plain))
    mean = [torch.stack(ts).mean(0) for ts in zip(*seen, strict=True)]
    assert gap(weights(averaged.module[0]), mean) <= 1e-14
    update_bn(DataLoader(TensorDataset(batch(0)[0]), batch_size=4), averaged)
    assert averaged.module[1].num_batches_tracked == 2
    assert opt.param_groups[0]["params"][0] is model[0].weight


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_dcp_with_part_of_the_model(flat: bool, tmp_path: Path) -> None:
    """A run with only= and a scheduler resumes bitwise, and pulls the same parameters."""

    def run() -> tuple[nn.Module, SODAWrapper, Any]:
        model = network()
        base = AdamW(model.named_parameters(), LR, weight_decay=0)
        opt = SODAWrapper(base, only=[model[0].weight, model[2].bias])
        return model, opt, warmup(opt)

    def go(model: nn.Module, opt: Any, schedule: Any, steps: range) -> None:
        for k in steps:
            train(model, opt, [k])
            schedule.step()

    old, new = run(), run()
    go(*old, range(HALF))
    DCP(flat).save(*old[:2], tmp_path)
    DCP(flat).load(*new[:2], tmp_path)
    new[2].load_state_dict(old[2].state_dict())
    assert not unlike(new[1].state_dict()["state"], old[1].state_dict()["state"])
    go(*old, range(HALF, STEPS)), go(*new, range(HALF, STEPS))
    assert equal(weights(new[0]), weights(old[0]))
    assert sum("soda_z0" in s for s in new[1].state.values()) == 2


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("name", ["SODAWrapper", "ScheduleFree", "SNOO"])
def test_dcp_before_the_first_step(name: str, flat: bool, tmp_path: Path) -> None:
    """torch then takes a step at lr = 0. It is counted, as by Adam, and moves no weights."""
    (model, opt), (new, new_opt) = started(name), started(name)
    DCP(flat).save(model, opt, tmp_path)
    assert equal(weights(model), weights(network()))
    DCP(flat).load(new, new_opt, tmp_path)
    train(model, opt), train(new, new_opt)
    assert equal(weights(model), weights(new))
    steps = {int(s["step"]) for s in opt.state.values()}
    assert steps == {opt.param_groups[0][opt._prefix + "k"]} == {STEPS + 1}


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("name", WRAPPERS)
def test_dcp_around_soda(name: str, flat: bool, tmp_path: Path) -> None:
    """SODA has its state before the first step, so torch takes no step at lr = 0."""
    cls, more = WRAPPERS[name]

    def run() -> tuple[nn.Module, Wrapper]:
        model = network()
        only = {"only": [model[0].weight]} if cls is SODAWrapper else {}
        return model, cls(SODA(model.parameters(), LR, "adam"), **more, **only)

    (old, opt), (new, new_opt), (straight, its) = run(), run(), run()
    train(old, opt, range(HALF)), train(straight, its)
    DCP(flat).save(old, opt, tmp_path)
    DCP(flat).load(new, new_opt, tmp_path)
    train(new, new_opt, range(HALF, STEPS))
    assert equal(weights(new), weights(straight))
    assert keys(new_opt) == keys(its)


@pytest.mark.parametrize("name", WRAPPERS)
def test_tensors_before_a_first_gradient_are_provisional(name: str) -> None:
    """A parameter without a gradient may still be filled anew, also after a state dict was made."""
    cls, more = WRAPPERS[name]
    runs = []
    for filled_at in (0, HALF):
        late, always = nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.ones(4))
        late.data.fill_(2.0 if filled_at == 0 else 1.0)
        opt = cls(SODA([late, always], LR, "adam"), **more)
        for k in range(STEPS):
            if k == filled_at == HALF:
                opt.state_dict()
                late.data.fill_(2.0)
                opt.eval(), opt.train()
            late.grad = torch.ones_like(late) if k >= HALF else None
            always.grad = torch.ones_like(always)
            opt.step()
        runs.append([late.detach(), always.detach()])
    assert equal(*runs)


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_state_from_before_the_first_step(name: str) -> None:
    """The wrapper's tensors are made from the weights at the first step, not loaded."""
    cls, more = WRAPPERS[name]
    runs = []
    for loads in (True, False):
        model = network()
        opt = cls(SODA(model.parameters(), LR, "adam"), **more)
        saved = opt.state_dict()
        with torch.no_grad():
            model[0].weight.add_(1.0)
        if loads:
            opt.load_state_dict(saved)
        train(model, opt)
        runs.append(weights(model))
    assert equal(*runs)


def test_step_in_backward() -> None:
    """One optimizer for each parameter, stepping as soon as its gradient is there."""
    model, plain = network(), network()
    opts = {p: wrap("SODAWrapper", [p]) for p in model.parameters()}

    def step(p: Tensor) -> None:
        opts[p].step()
        opts[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for k in range(STEPS):
        loss_of(model, *batch(k)).backward()
    train(plain, wrap("SODAWrapper", plain.parameters()))
    assert equal(weights(model), weights(plain))
