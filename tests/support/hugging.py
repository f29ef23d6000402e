"""A tiny language model under the Hugging Face Trainer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from tests.support.models import make, tokens

STEPS, SAVED = 6, 3


def trainer(folder: Path, build: Callable[[nn.Module], Any] | None = None, **more: Any) -> Any:
    """Return a Trainer of STEPS steps with warmup and decay. It saves and evaluates after SAVED."""
    from transformers import Trainer, TrainingArguments

    model = make("gpt2")[0]
    if build is not None:
        more["optimizers"] = (build(model), None)
    arguments = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.01,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "logging_steps": 1,
        "save_steps": SAVED,
        "eval_strategy": "steps",
        "eval_steps": SAVED,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
    }
    arguments |= more.pop("arguments", {})
    rows = [{"input_ids": t, "labels": t} for t in tokens(n=4 * STEPS)]
    return Trainer(
        model, TrainingArguments(**arguments), train_dataset=rows, eval_dataset=rows[:4], **more
    )


def losses(run: Any) -> list[float]:
    return [row["loss"] for row in run.state.log_history if "loss" in row]
