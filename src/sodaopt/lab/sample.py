"""Generate text with a model."""

import torch

from .data.tokenizer import Tokenizer
from .model import GPT

PROMPTS = ("The people of the United States", "The whale")
SAMPLE_TOKENS = 80
"""Number of tokens of the samples at the end of a run."""


@torch.no_grad()
def generate(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    tokens: int = 100,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
) -> str:
    """Return the prompt and the model's continuation, up to the end of the document.

    The same seed gives the same text on every device, because random numbers come from the CPU.
    """
    rng = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    ids = [tokenizer.eot, *tokenizer.encode(prompt)]
    for _ in range(tokens):
        seen = torch.tensor([ids[-model.shape.context :]], device=device)
        logits = model(seen)[0, : tokenizer.vocab].cpu()  # without the padding of the vocabulary
        ids.append(_draw(logits, temperature, top_k, rng))
        if ids[-1] == tokenizer.eot:
            break
    return tokenizer.decode([i for i in ids if i != tokenizer.eot])


def _draw(logits: torch.Tensor, temperature: float, top_k: int, rng: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    best = logits.topk(min(top_k, logits.numel()))
    chosen = torch.multinomial((best.values / temperature).softmax(-1), 1, generator=rng)
    return int(best.indices[chosen])
