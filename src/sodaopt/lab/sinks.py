"""Send numbers to TensorBoard, Weights & Biases or trackio: from the lab, or from your own loop.

    sinks = open_sinks("tensorboard,wandb", Path("runs/mine"))
    log_diagnostics(opt, sinks, by=roles, every=50)

`trainer_callback` and `lightning_callback` do the same in a Trainer of transformers or Lightning.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from sodaopt._errors import unknown
from sodaopt.core.diagnostics import Labels, Watched

PROJECT = "sodaopt"


class Sink(Protocol):
    def log(self, step: int, numbers: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Write event files to the folder of the run."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(folder / "tensorboard"))
        self.writer.add_text("config", "\n".join(f"    {k}: {v}" for k, v in config.items()))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class Tracked:
    """Send numbers to wandb, or to trackio, which has the same functions.

    With WANDB_MODE=offline, wandb keeps everything on this machine.
    """

    def __init__(
        self, module: Any, folder: Path, config: Mapping[str, Any], **options: Any
    ) -> None:
        self.module = module
        module.init(project=PROJECT, name=folder.name, config=dict(config), **options)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self.module.log(dict(numbers), step=step)

    def close(self) -> None:
        self.module.finish()


def _wandb(folder: Path, config: Mapping[str, Any]) -> Sink:
    import wandb

    return Tracked(wandb, folder, config, dir=str(folder))


def _trackio(folder: Path, config: Mapping[str, Any]) -> Sink:
    import trackio

    return Tracked(trackio, folder, config)


SINKS: dict[str, Callable[[Path, Mapping[str, Any]], Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": _wandb,
    "trackio": _trackio,
}


def parse_sinks(names: str) -> list[str]:
    """Return the names in a text: 'tensorboard,wandb' -> ['tensorboard', 'wandb']."""
    found = [name.strip() for name in names.split(",") if name.strip()]
    for name in found:
        if name not in SINKS:
            raise ValueError(unknown("log", name, SINKS))
    return found


def open_sinks(names: str, folder: Path, config: Mapping[str, Any] | None = None) -> list[Sink]:
    """Open the sinks of a run.

    names: tensorboard, wandb, trackio, or several with commas between them
    folder: the folder of the run. Its name is the name of the run.
    config: settings of the run, to be shown with it
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for name in parse_sinks(names):
        try:
            found.append(SINKS[name](folder, config or {}))
        except ModuleNotFoundError as e:
            raise ValueError(f"--log {name} needs {e.name}: pip install {name}") from None
    return found


def flat(rows: Mapping[str, Mapping[str, float | None]]) -> dict[str, float]:
    """Return nested numbers by names such as 'hidden/share', without nan and infinity."""
    return {
        f"{part}/{name}": float(x)
        for part, row in rows.items()
        for name, x in row.items()
        if x is not None and math.isfinite(x)
    }


# -- your own loop --------------------------------------------------------------------------------


def log_diagnostics(
    opt: Watched, sinks: Sequence[Sink], by: Labels = "group", every: int = 50
) -> None:
    """Send the optimizer's diagnostics to the sinks every `every` steps, by hooks of its step.

    All ranks must call this.

    sinks: empty on ranks that send nothing
    by: how parameters are grouped, see `opt.diagnostics`
    """
    count = 0

    def send(*_: Any) -> None:
        nonlocal count
        count += 1
        if count % every == 0:
            found = opt.diagnostics(by)
            rows = {f"group{j}": row for j, row in enumerate(found)} if by == "group" else found
            for sink in sinks:
                sink.log(count, flat(rows))
        opt._is_watched = (count + 1) % every == 0  # watch() would drop the sums of this step

    opt.watch(every == 1)  # registers its hooks first, so that a step is measured before it is sent
    opt.register_step_post_hook(send)


def _watched(opt: Any) -> Watched:
    """Return the optimizer inside the wrappers of a framework."""
    while not isinstance(opt, Watched):
        inner = getattr(opt, "optimizer", getattr(opt, "_optimizer", None))
        if inner is None:
            name = type(opt).__name__
            raise TypeError(f"{name} has no diagnostics: use SODA or a wrapper of sodaopt")
        opt = inner
    return opt


def trainer_callback(sinks: Sequence[Sink], by: Labels = "group", every: int = 50) -> Any:
    """Return a callback for `transformers.Trainer` that calls `log_diagnostics`."""
    from transformers import TrainerCallback

    class Diagnostics(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            log_diagnostics(_watched(more["optimizer"]), sinks, by, every)

        def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            _close(sinks)

    return Diagnostics()


def lightning_callback(sinks: Sequence[Sink], by: Labels = "group", every: int = 50) -> Any:
    """Return a callback for `lightning.Trainer` that calls `log_diagnostics`."""
    from lightning import Callback

    class Diagnostics(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            for opt in trainer.optimizers:
                log_diagnostics(_watched(opt), sinks, by, every)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            _close(sinks)

    return Diagnostics()


def _close(sinks: Iterable[Sink]) -> None:
    for sink in sinks:
        sink.close()


def of_record(kind: str, values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a run's record, by the names that the sinks show."""
    if kind == "diagnostics":
        return flat(values["roles"])
    names = {"step": {"loss": "train/loss", "lr": "train/lr", "tokens_per_second": "tokens/s"}}
    shown = names.get(kind, {"loss": "val/loss"} if kind == "val" else {})
    known = {name: values.get(key) for key, name in shown.items()}
    return {name: float(x) for name, x in known.items() if x is not None and math.isfinite(x)}
