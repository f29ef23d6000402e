"""SODAWrapper under the Hugging Face Trainer: a small GPT-2 learns to spell this project's licence.

    python examples/hf_trainer.py [folder]

With a folder it keeps checkpoints there, and continues from the last one it finds.
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from sodaopt import SODAWrapper, hidden

STEPS, CONTEXT = 60, 64
TEXT = Path(__file__).parents[1].joinpath("LICENSE").read_bytes()


def main(folder: str) -> None:
    set_seed(0)
    windows = torch.tensor(list(TEXT)).unfold(0, CONTEXT, CONTEXT // 4)
    rows = [{"input_ids": w, "labels": w} for w in windows]
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, **sizes, **ids))

    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0)
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
        # Or: optimizer_cls_and_kwargs=(SODAWrapper.of(torch.optim.AdamW), {"lr": 3e-3}), the
        # weight_decay of the TrainingArguments left at 0.
        optimizers=(SODAWrapper(opt, only=hidden(model)), None),
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(temporary)
