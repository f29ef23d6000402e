"""Tiny models of every kind that the layer plan knows, each with a loss on a fixed batch.

The Hugging Face ones are made from configurations, without weights.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Loss = Callable[[nn.Module], Tensor]

VOCAB, D, T = 48, 16, 12


def tokens(seed: int = 0, n: int = 4) -> Tensor:
    return torch.randint(3, VOCAB, (n, T), generator=torch.Generator().manual_seed(seed))


def images() -> Tensor:
    return torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def classes() -> Tensor:
    return torch.arange(6) % 5


# -- the GPT of the paper's experiments -----------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(D, D, bias=False) for _ in range(4))
        nn.init.zeros_(self.out.weight)

    def forward(self, x: Tensor) -> Tensor:
        def heads(t: Tensor) -> Tensor:
            return t.unflatten(-1, (2, D // 2)).transpose(1, 2)

        q, k = (F.rms_norm(rotary(heads(f(x))), (D // 2,)) for f in (self.q, self.k))
        y = F.scaled_dot_product_attention(q, k, heads(self.v(x)), is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


def rotary(x: Tensor) -> Tensor:
    n, d = x.shape[-2:]
    angle = torch.arange(n)[:, None] * 10000 ** (-torch.arange(0, d, 2) / d)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.up = nn.Linear(D, 4 * D, bias=False)
        self.down = nn.Linear(4 * D, D, bias=False)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(F.rms_norm(x, (D,)))
        return x + self.down(2 * F.relu(self.up(F.rms_norm(x, (D,)))).square())


class GPT(nn.Module):
    """The tied head keeps nn.Linear's initialisation. Output projections are zero. No biases."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, D)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(D, VOCAB, bias=False)
        if tied:
            self.embed.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        x = F.rms_norm(self.embed(x), (D,))
        for block in self.blocks:
            x = block(x)
        return self.head(F.rms_norm(x, (D,)))


def next_token(model: nn.Module) -> Tensor:
    x = tokens()
    return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


# -- torch's own ----------------------------------------------------------------------------------


class Translator(nn.Module):
    """torch's Transformer between two tables and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, D), nn.Embedding(T, D)
        self.body = nn.Transformer(D, 2, 1, 1, 2 * D, dropout=0.0, batch_first=True)
        self.head = nn.Linear(D, VOCAB)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = (self.tokens(t) + self.positions.weight[: t.shape[1]] for t in (x, y))
        return self.head(self.body(a, b))


def translate(model: nn.Module) -> Tensor:
    x, y = tokens(0), tokens(1)
    return F.cross_entropy(model(x, y[:, :-1]).flatten(0, 1), y[:, 1:].flatten())


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 5)
    )


def conv_net() -> nn.Module:
    """Return a network with an image layer, a depthwise and a pointwise convolution, and a head."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 12, 1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(48, 5)),
    )


def classify(model: nn.Module) -> Tensor:
    out = model(images())
    return F.cross_entropy(getattr(out, "logits", out), classes())


# -- Hugging Face ---------------------------------------------------------------------------------


def _sizes(**more: Any) -> dict[str, Any]:
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return {"vocab_size": VOCAB, "num_hidden_layers": 2, "num_attention_heads": 2} | ids | more


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": D, "n_layer": 2, "n_head": 2, "n_positions": T, "pad_token_id": 0}
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, **sizes, **none, **ids))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = _sizes(hidden_size=D, intermediate_size=2 * D, num_key_value_heads=1)
    return LlamaForCausalLM(LlamaConfig(**sizes))


def qwen_moe() -> nn.Module:
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    sizes = _sizes(hidden_size=D, num_key_value_heads=1, num_experts=4, num_experts_per_tok=2)
    inner = {"moe_intermediate_size": 12, "shared_expert_intermediate_size": 20}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**sizes, **inner))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = _sizes(hidden_size=D, intermediate_size=2 * D, max_position_embeddings=T)
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(**sizes, **none))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": D, "d_kv": 8, "d_ff": 2 * D, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(
        T5Config(vocab_size=VOCAB, decoder_start_token_id=0, dropout_rate=0.0, **sizes)
    )


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": D, "intermediate_size": 2 * D, "num_hidden_layers": 2}
    image = {"num_attention_heads": 2, "image_size": 8, "patch_size": 4, "num_labels": 5}
    return ViTForImageClassification(ViTConfig(**sizes, **image))


def language(model: nn.Module) -> Tensor:
    return model(input_ids=tokens(0), labels=tokens(0)).loss


def reconstruct(model: nn.Module) -> Tensor:
    return model(input_ids=tokens(0), labels=tokens(1)).loss


HUGGING_FACE: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "gpt2": (gpt2, language),
    "llama": (llama, language),
    "qwen_moe": (qwen_moe, language),
    "bert": (bert, reconstruct),
    "t5": (t5, reconstruct),
    "vit": (vit, classify),
}
MODELS = HUGGING_FACE | {
    "gpt": (GPT, next_token),
    "gpt_untied": (lambda: GPT(tied=False), next_token),
    "transformer": (Translator, translate),
    "conv_net": (conv_net, classify),
    "mlp": (mlp, classify),
}


def make(name: str) -> tuple[nn.Module, Loss]:
    """Return a model in training mode, the same at each call, and its loss."""
    build, loss = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build().train(), loss
