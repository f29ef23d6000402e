"""A tiny module under Lightning, which is installed under one of two names."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.support.training import STEPS, batch, network
from tests.support.wrapped import loss_of

try:
    import lightning as L
    from lightning.pytorch import callbacks, cli
except ImportError:
    import pytorch_lightning as L
    from pytorch_lightning import callbacks, cli

__all__ = ["EPOCHS", "L", "Module", "by_command_line", "callbacks", "trainer"]

EPOCHS = 2
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class Module(L.LightningModule):
    """STEPS steps are EPOCHS epochs. The batch is chosen by the step."""

    def __init__(
        self, model: nn.Module, build: Callable[[nn.Module], Any], schedule: Callable[[Any], Any]
    ) -> None:
        super().__init__()
        self.model, self.build, self.schedule = model, build, schedule
        self.losses: dict[int, float] = {}

    def training_step(self, number: Tensor, k: int) -> Tensor:
        dtype = next(self.model.parameters()).dtype
        loss = loss_of(self.model, *batch(self.global_step, dtype))
        self.losses[self.global_step] = loss.item()
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        opt = self.build(self.model)
        schedule = {"scheduler": self.schedule(opt), "interval": "step"}
        return {"optimizer": opt, "lr_scheduler": schedule}

    def train_dataloader(self) -> Any:
        return DataLoader(range(STEPS // EPOCHS))


def trainer(epochs: int = EPOCHS, **more: Any) -> Any:
    options = {"accelerator": "cpu", "enable_checkpointing": False} | QUIET | more
    return L.Trainer(max_epochs=epochs, **options)


class Bare(Module):
    """A module without an optimizer. The command line adds one."""

    def __init__(self) -> None:
        super().__init__(network(), lambda m: None, lambda opt: None)

    configure_optimizers = L.LightningModule.configure_optimizers


def by_command_line(optimizer: Any) -> Any:
    """Return the LightningCLI after a fit. The optimizer is an import path or a class."""
    arguments = ["--optimizer.lr=0.02"]
    if isinstance(optimizer, str):
        arguments.insert(0, f"--optimizer={optimizer}")

    class Line(cli.LightningCLI):
        def add_arguments_to_parser(self, parser: Any) -> None:
            if not isinstance(optimizer, str):
                parser.add_optimizer_args(optimizer)

    quiet = {"accelerator": "cpu", "max_epochs": EPOCHS, "enable_checkpointing": False} | QUIET
    made = Line(Bare, args=arguments, run=False, save_config_callback=None, trainer_defaults=quiet)
    made.trainer.fit(made.model)
    return made
