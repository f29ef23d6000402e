"""SODAWrapper under the Hugging Face Trainer: a small GPT-2 learns to spell this project's licence.

    python examples/hf_trainer.py [folder]

With a folder, the script keeps checkpoints there and continues from the last one. A callback adds
the pull to the Trainer's log. Without a folder, a second run passes the Trainer a class instead of
an optimizer.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from sodaopt import SODAWrapper, hidden

STEPS, CONTEXT = 60, 64
TEXT = Path(__file__).parents[1].joinpath("LICENSE").read_bytes()


class LogPull(TrainerCallback):
    """Log the strength of the pull and the distance from the initial weights."""

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        optimizer = kwargs["optimizer"]
        optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it
        rows = [row for row in optimizer.diagnostics() if row["distance"] > 0]
        state.log_history[-1] |= {"pull": rows[0]["lam"], "distance": rows[0]["distance"]}


def main(folder: str, by_class: bool = False) -> None:
    set_seed(0)
    windows = torch.tensor(list(TEXT)).unfold(0, CONTEXT, CONTEXT // 4)
    rows = [{"input_ids": w, "labels": w} for w in windows]
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, **sizes, **ids))

    if by_class:  # the Trainer builds the optimizer, with its own parameter groups
        wrapped = SODAWrapper.of(torch.optim.AdamW, only=tuple(hidden(model)))
        how = {"optimizer_cls_and_kwargs": (wrapped, {"lr": 3e-3})}
    else:
        adamw = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0)
        how = {"optimizers": (SODAWrapper(adamw, only=hidden(model)), None)}
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=16,
            lr_scheduler_type="cosine",
            warmup_steps=5,
            logging_steps=10,
            save_steps=STEPS // 2,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=rows,
        callbacks=[LogPull()],
        **how,
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
    rows = [row for row in trainer.state.log_history if "loss" in row]
    print(f"pull {rows[-1]['pull']:.4f}, distance {rows[-1]['distance']:.3f}")
    print(f"loss {rows[0]['loss']:.4f} -> {rows[-1]['loss']:.4f}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
        main(sys.argv[1])
    else:
        for by_class in (False, True):
            with tempfile.TemporaryDirectory() as temporary:
                main(temporary, by_class)
