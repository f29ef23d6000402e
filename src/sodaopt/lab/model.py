"""The paper's nanoGPT: a decoder of plain matrices, sized by width and depth.

The model has rotary positions, separate q, k and v, a squared ReLU times a factor, and no biases.
RMSNorm without gains is applied before attention, MLP and head, and to q and k. Embedding and head
share one matrix, with the `nn.Linear` initialisation of the head. Output projections start at zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROTARY_BASE = 10_000.0
LOGITS = 2**28
"""Most logits in memory at once. The loss of more logits is computed in pieces."""


@dataclass(frozen=True)
class Shape:
    """Sizes of the model. They decide the number of parameters and the cost of a token."""

    vocab: int = 50304
    width: int = 768
    depth: int = 12
    head_dim: int = 128
    context: int = 1024
    activation: float = 1.0
    """Factor of the squared ReLU: 1 for Adam and Muon, 2 for Scion and SODA-dagger."""

    def __post_init__(self) -> None:
        for name in ("vocab", "width", "depth", "head_dim", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.width % self.head_dim:
            raise ValueError(
                f"width is {self.width} and head_dim is {self.head_dim}: use a width that is a "
                f"multiple of {self.head_dim}, or another head_dim"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {self.head_dim}")

    @property
    def parameters(self) -> int:
        return self.vocab * self.width + self.depth * 12 * self.width**2

    @property
    def flops_per_token(self) -> int:
        """FLOPs of forward and backward pass. Attention counts in full, as usual for MFU."""
        return 6 * self.parameters + 12 * self.depth * self.width * self.context


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.width // shape.head_dim
        self.q = nn.Linear(shape.width, shape.width, bias=False)
        self.k = nn.Linear(shape.width, shape.width, bias=False)
        self.v = nn.Linear(shape.width, shape.width, bias=False)
        self.proj = nn.Linear(shape.width, shape.width, bias=False)
        nn.init.zeros_(self.proj.weight)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (f(x).view(b, t, self.heads, -1) for f in (self.q, self.k, self.v))
        q, k = rotate(norm(q), cos, sin), rotate(norm(k), cos, sin)
        q, k, v = (z.transpose(1, 2) for z in (q.to(v.dtype), k.to(v.dtype), v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, t, d))  # type: ignore[no-any-return]


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.factor = shape.activation
        self.fc = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.proj = nn.Linear(4 * shape.width, shape.width, bias=False)
        nn.init.zeros_(self.proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.factor * F.relu(self.fc(x)).square())  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention = Attention(shape)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(norm(x), cos, sin)
        return x + self.mlp(norm(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Decoder. model(ids, targets) is the loss, model(ids) the logits of the last position."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.depth))
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)
        self.embed.weight = self.head.weight  # both have the head's initialisation
        cos, sin = rotary(shape.context, shape.head_dim)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        t = ids.shape[1]
        x, cos, sin = self.embed(ids), self.cos[:t], self.sin[:t]
        for block in self.blocks:
            x = block(x, cos, sin)
        if targets is None:
            return wide(self.head(norm(x[:, -1])))
        return cross_entropy(norm(x).flatten(0, 1), self.head.weight, targets.flatten())


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))


def rotary(context: int, dim: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the angles, each of shape (context, dim / 2)."""
    frequencies = ROTARY_BASE ** -(torch.arange(0, dim, 2).float() / dim)
    angles = torch.outer(torch.arange(context).float(), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x_i, x_{i + dim/2}) of a head by the angle of its position."""
    a, b = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos + b * sin, b * cos - a * sin), -1)


# -- the loss, without all logits at once ---------------------------------------------------------


def cross_entropy(h: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of h @ weight.T, in pieces of at most LOGITS logits."""
    device = h.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        h, weight = h.to(dtype), weight.to(dtype)
    with torch.autocast(device, enabled=False):
        pieces = max(1, -(-h.shape[0] * weight.shape[0] // LOGITS))
        # A GPU compiles _Pieces to one kernel. On a CPU it is slower than the plain form.
        fused = pieces > 1 or device == "cuda"
        if not (fused and torch.is_grad_enabled()):
            return _plain(h, weight, targets, pieces)
        return _Pieces.apply(h, weight, targets, pieces)  # type: ignore[no-any-return,no-untyped-call]


def wide(x: Tensor) -> Tensor:
    """Cast 16-bit tensors to fp32."""
    return x.float() if x.dtype.itemsize < 4 else x


def _plain(h: Tensor, weight: Tensor, targets: Tensor, pieces: int) -> Tensor:
    losses = [
        F.cross_entropy(wide(F.linear(a, weight)), b, reduction="sum")
        for a, b in zip(h.chunk(pieces), targets.chunk(pieces), strict=True)
    ]
    return torch.stack(losses).sum() / targets.numel()


class _Pieces(torch.autograd.Function):
    """Cross-entropy with gradients in the forward pass, piece by piece, to keep no logits."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, targets: Tensor, pieces: int) -> Tensor:
        n, loss = targets.numel(), wide(h.new_zeros(()))
        grad_h, grad_weight = [], wide(torch.zeros_like(weight))
        for a, b in zip(h.chunk(pieces), targets.chunk(pieces), strict=True):
            logits = wide(F.linear(a, weight))
            log_p = logits.log_softmax(-1)
            loss = loss - log_p.gather(1, b[:, None]).sum()
            hit = torch.arange(logits.shape[1], device=b.device) == b[:, None]
            grad = ((log_p.exp() - hit.to(log_p.dtype)) / n).to(h.dtype)
            grad_h.append(grad @ weight)
            grad_weight += grad.T @ a
        ctx.save_for_backward(torch.cat(grad_h), grad_weight.to(weight.dtype))
        return loss / n

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        grad_h, grad_weight = ctx.saved_tensors
        return (
            grad_h * upstream.to(grad_h.dtype),
            grad_weight * upstream.to(grad_h.dtype),
            None,
            None,
        )
