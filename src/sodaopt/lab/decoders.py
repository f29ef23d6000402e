"""The parameters of well-known decoders, on the meta device.

`sodaopt bench --cluster` predicts the cost of a step from them.
"""

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Config:
    """Sizes of a decoder with gated feed-forward layers.

    keys: the width of keys and values.
    inner: the width inside a feed-forward layer or an expert.
    experts: the number of experts of a layer. None: the layer is dense.
    active: the number of experts that a token visits.
    """

    width: int
    keys: int
    inner: int
    depth: int
    vocab: int
    experts: int | None = None
    active: int = 1


CONFIGS = {
    "llama-7b": Config(4096, 4096, 11008, 32, 32000),
    "llama-70b": Config(8192, 1024, 28672, 80, 128256),
    "llama-405b": Config(16384, 1024, 53248, 126, 128256),
    "moe-30b": Config(2048, 512, 768, 48, 151936, experts=128, active=8),
    "moe-1t": Config(7168, 7168, 2048, 61, 163840, experts=384, active=8),
}


class Experts(nn.Module):
    """The feed-forward weights of all experts of a layer, stacked."""

    def __init__(self, c: Config, experts: int) -> None:
        super().__init__()
        for name, shape in (
            ("gate_proj", (c.inner, c.width)),
            ("up_proj", (c.inner, c.width)),
            ("down_proj", (c.width, c.inner)),
        ):
            setattr(self, name, nn.Parameter(torch.empty(experts, *shape)))


class Layer(nn.Module):
    """The parameters of one layer. It has no forward pass."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        sides = {"q_proj": (c.width, c.width), "k_proj": (c.width, c.keys)}
        sides |= {"v_proj": (c.width, c.keys), "o_proj": (c.width, c.width)}
        if c.experts is None:
            sides |= {"gate_proj": (c.width, c.inner), "up_proj": (c.width, c.inner)}
            sides |= {"down_proj": (c.inner, c.width)}
        else:
            sides |= {"router": (c.width, c.experts)}
            self.experts = Experts(c, c.experts)
        for name, (i, o) in sides.items():
            setattr(self, name, nn.Linear(i, o, bias=False))
        self.attention_norm, self.norm = nn.RMSNorm(c.width), nn.RMSNorm(c.width)


class Decoder(nn.Module):
    """The parameters of a decoder. It has no forward pass.

    active: the share of the experts that a token visits.
    """

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.active = c.active / c.experts if c.experts else 1.0
        self.embed_tokens = nn.Embedding(c.vocab, c.width)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.depth))
        self.norm = nn.RMSNorm(c.width)
        self.lm_head = nn.Linear(c.width, c.vocab, bias=False)


def decoder(name: str) -> Decoder:
    """Return a decoder of CONFIGS on the meta device."""
    with torch.device("meta"):
        return Decoder(CONFIGS[name])
