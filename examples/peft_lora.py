"""LoRA adapters of PEFT under SODAWrapper, which pulls them toward their initial weights."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

from sodaopt import SODAWrapper, hidden, schedules

STEPS = 60

torch.manual_seed(0)
sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 64}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
model = get_peft_model(model, LoraConfig(r=8, lora_alpha=64, target_modules=["c_attn", "c_proj"]))
model.print_trainable_parameters()

adapters = [p for p in model.parameters() if p.requires_grad]
adamw = torch.optim.AdamW(adapters, lr=1e-2, weight_decay=0)
# hidden() leaves out frozen weights
opt = SODAWrapper(adamw, only=hidden(model), decay=schedules.coupled())

tokens = torch.arange(32).repeat(8, 1)
losses = []
for _ in range(STEPS):
    loss = model(input_ids=tokens, labels=tokens).loss
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
(row,) = opt.diagnostics()
print(f"distance of the adapters from their initial weights {row['distance']:.3f}")
print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
