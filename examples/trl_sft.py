"""SODAWrapper under TRL's SFTTrainer: a small GPT-2 is trained on prompts and completions."""

import string
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

from sodaopt import SODAWrapper, hidden, schedules

STEPS = 40
WORDS = ["<end>", *string.ascii_lowercase, "follows", "what", "?"]


def main(folder: str) -> None:
    set_seed(0)
    vocabulary = {word: n for n, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>", unk_token="<end>"
    )
    pairs = zip(string.ascii_lowercase, string.ascii_lowercase[1:], strict=False)
    rows = [{"prompt": f"what follows {a} ?", "completion": f" {b}"} for a, b in pairs]

    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 16}
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(WORDS), **sizes, **ids))
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0)
    opt = SODAWrapper(adamw, only=hidden(model), decay=schedules.coupled())
    settings = SFTConfig(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=25,
        logging_steps=5,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    trainer = SFTTrainer(
        model,
        settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=words,
        optimizers=(opt, None),
    )
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    print(f"loss {float(losses[0]):.4f} -> {float(losses[-1]):.4f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(temporary)
