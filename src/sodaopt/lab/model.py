"""The paper's nanoGPT: a decoder whose parameters are matrices, of any width and depth.

The model has rotary positions, separate q, k and v, a squared ReLU times a factor, and no biases.
RMSNorm without gains is applied before attention, MLP and head, and to q and k. The embedding and
the head share one matrix, which is initialised as the `nn.Linear` of the head. Output projections
start at zero. A `Design` changes any of these choices.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROTARY_BASE = 10_000.0
HALF_ROTARY_BASE = 1024.0
LOGITS = 2**28
"""The most logits in memory at once. The loss of more logits is computed in pieces."""


@dataclass(frozen=True)
class Design:
    """Choices of the architecture besides its sizes. The defaults are the paper's."""

    tied: bool = True
    """The embedding and the head share a matrix. Otherwise the embedding starts at N(0, 1), and the
    head at 0."""
    biases: bool = False
    """Linear layers have biases, which start at zero."""
    gains: bool = False
    """RMSNorm has learned gains, except for q and k."""
    embedding_norm: bool = False
    """RMSNorm follows the embedding."""
    half_rotary: bool = False
    """Half of the pairs of a head are not rotated. The others have frequencies from 1 to 1/1024."""
    attention_scale: float | None = None
    """Factor of the products of q and k. None: 1 / sqrt(head_dim)."""
    softcap: float | None = None
    """Bound c of the logits. The logit x becomes c x / sqrt(x^2 + c^2)."""
    normal: bool = False
    """Hidden matrices start at N(0, 0.33 / d_in), which is close to the variance of nn.Linear."""
    bf16_embedding: bool = False
    """The embedding is in bf16. Under autocast, the residual stream is in bf16 too."""

    def __post_init__(self) -> None:
        if self.tied and self.bf16_embedding:
            raise ValueError(
                "bf16_embedding is True, but a tied embedding has the dtype of the head: use "
                "tied=False"
            )


PAPER = Design()


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
    design: Design = PAPER

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
        if self.design.half_rotary and self.head_dim % 4:
            raise ValueError(
                f"head_dim must be a multiple of 4 if half of its pairs are not rotated, got "
                f"{self.head_dim}"
            )

    @property
    def matrices(self) -> int:
        """Number of parameters in the matrix products of each token."""
        return self.vocab * self.width + self.depth * 12 * self.width**2

    @property
    def parameters(self) -> int:
        d = self.design
        tables = 0 if d.tied else self.vocab * self.width
        biases = (9 * self.width * self.depth + self.vocab) if d.biases else 0
        gains = (2 * self.depth + 1 + d.embedding_norm) * self.width if d.gains else 0
        return self.matrices + tables + biases + gains

    @property
    def flops_per_token(self) -> int:
        """FLOPs of forward and backward pass. Attention counts in full, as usual for MFU."""
        return 6 * self.matrices + 12 * self.depth * self.width * self.context


class RMSNorm(nn.Module):
    gains: nn.Parameter | None

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        gains = nn.Parameter(torch.ones(shape.width)) if shape.design.gains else None
        self.register_parameter("gains", gains)

    def forward(self, x: Tensor) -> Tensor:
        return norm(x) if self.gains is None else norm(x, self.gains.type_as(x))


def linear(d_in: int, d_out: int, design: Design, zero: bool = False) -> nn.Linear:
    """Return a linear layer, initialised as the design says.

    zero: the weights start at zero in any design
    """
    layer = nn.Linear(d_in, d_out, bias=design.biases)
    if zero:
        nn.init.zeros_(layer.weight)
    elif design.normal:
        nn.init.normal_(layer.weight, std=(0.33 / d_in) ** 0.5)
    if design.biases:
        nn.init.zeros_(layer.bias)
    return layer


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, design = shape.width, shape.design
        self.heads, self.scale = width // shape.head_dim, design.attention_scale
        self.q = linear(width, width, design)
        self.k = linear(width, width, design)
        self.v = linear(width, width, design)
        self.proj = linear(width, width, design, zero=True)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (f(x).view(b, t, self.heads, -1) for f in (self.q, self.k, self.v))
        q, k = rotate(norm(q), cos, sin), rotate(norm(k), cos, sin)
        q, k, v = (z.transpose(1, 2) for z in (q.to(v.dtype), k.to(v.dtype), v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return self.proj(y.transpose(1, 2).reshape(b, t, d))  # type: ignore[no-any-return]


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.factor = shape.activation
        self.fc = linear(shape.width, 4 * shape.width, shape.design)
        self.proj = linear(4 * shape.width, shape.width, shape.design, zero=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.factor * F.relu(self.fc(x)).square())  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(shape), RMSNorm(shape)
        self.attention = Attention(shape)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """A decoder. model(ids, targets) returns the mean loss of all positions, and model(ids) returns
    the logits of the last position."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, design = shape, shape.design
        self.embed = nn.Embedding(shape.vocab, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.depth))
        self.head = linear(shape.width, shape.vocab, design, zero=not design.tied)
        if design.bf16_embedding:
            self.embed.to(torch.bfloat16)
        if design.tied:
            self.embed.weight = self.head.weight  # both have the head's initialisation
        self.norm1 = RMSNorm(shape) if design.embedding_norm else nn.Identity()
        self.norm2 = RMSNorm(shape)
        cos, sin = rotary(shape.context, shape.head_dim, design.half_rotary)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        t, cap = ids.shape[1], self.shape.design.softcap
        x, cos, sin = self.norm1(self._embedded(ids)), self.cos[:t], self.sin[:t]
        for block in self.blocks:
            x = block(x, cos, sin)
        if targets is None:
            return capped(wide(self.head(self.norm2(x[:, -1]))), cap)
        h, head = self.norm2(x).flatten(0, 1), self.head
        return cross_entropy(h, head.weight, targets.flatten(), head.bias, cap)

    def _embedded(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed(ids)
        return x if torch.is_autocast_enabled(x.device.type) else x.to(self.head.weight.dtype)


def norm(x: Tensor, gains: Tensor | None = None) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), gains)


def rotary(context: int, dim: int, half: bool = False) -> tuple[Tensor, Tensor]:
    """Return the cosines and the sines of the rotary angles, each of shape (context, dim / 2).

    half: half of the angles are zero, see `Design.half_rotary`
    """
    frequencies = ROTARY_BASE ** -(torch.arange(0, dim, 2).float() / dim)
    if half:
        turning = HALF_ROTARY_BASE ** -torch.linspace(0, 1, dim // 4)
        frequencies = torch.cat((turning, torch.zeros(dim // 4)))
    angles = torch.outer(torch.arange(context).float(), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x_i, x_{i + dim/2}) of a head by the angle of its position."""
    a, b = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos + b * sin, b * cos - a * sin), -1)


# -- the loss, without all logits at once ---------------------------------------------------------


def cross_entropy(
    h: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return the mean cross-entropy of h @ weight.T + bias, in pieces of at most LOGITS logits."""
    device = h.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        h, weight = h.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    with torch.autocast(device, enabled=False):
        pieces = max(1, -(-h.shape[0] * weight.shape[0] // LOGITS))
        # On a GPU, torch.compile makes one kernel of _Pieces. On a CPU, _plain is faster.
        fused = pieces > 1 or device == "cuda"
        if not (fused and torch.is_grad_enabled()):
            return _plain(h, weight, targets, bias, softcap, pieces)
        return _Pieces.apply(h, weight, targets, bias, softcap, pieces)  # type: ignore[no-any-return,no-untyped-call]


def wide(x: Tensor) -> Tensor:
    """Cast 16-bit tensors to fp32."""
    return x.float() if x.dtype.itemsize < 4 else x


def capped(x: Tensor, bound: float | None) -> Tensor:
    """Return bound x / sqrt(x^2 + bound^2), or x without a bound."""
    return x if bound is None else bound * x * (x.square() + bound**2).rsqrt()


def _plain(
    h: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    softcap: float | None,
    pieces: int,
) -> Tensor:
    losses = [
        F.cross_entropy(capped(wide(F.linear(a, weight, bias)), softcap), b, reduction="sum")
        for a, b in zip(h.chunk(pieces), targets.chunk(pieces), strict=True)
    ]
    return torch.stack(losses).sum() / targets.numel()


class _Pieces(torch.autograd.Function):
    """Cross-entropy whose forward pass computes the gradients too, piece by piece.

    So the logits of a piece are freed before the next piece.
    """

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        weight: Tensor,
        targets: Tensor,
        bias: Tensor | None,
        softcap: float | None,
        pieces: int,
    ) -> Tensor:
        n, loss = targets.numel(), wide(h.new_zeros(()))
        grad_h, grad_weight = [], wide(torch.zeros_like(weight))
        grad_bias: Any = None if bias is None else wide(torch.zeros_like(bias))
        for a, b in zip(h.chunk(pieces), targets.chunk(pieces), strict=True):
            logits = wide(F.linear(a, weight, bias))
            log_p = capped(logits, softcap).log_softmax(-1)
            loss = loss - log_p.gather(1, b[:, None]).sum()
            hit = torch.arange(logits.shape[1], device=b.device) == b[:, None]
            grad = (log_p.exp() - hit.to(log_p.dtype)) / n
            if softcap is not None:  # the derivative of the cap
                grad = grad * (softcap * (logits.square() + softcap**2).rsqrt()) ** 3
            grad = grad.to(h.dtype)
            grad_h.append(grad @ weight)
            grad_weight += grad.T @ a
            if bias is not None:
                grad_bias += grad.sum(0)
        if bias is not None:
            grad_bias = grad_bias.to(bias.dtype)
        ctx.save_for_backward(torch.cat(grad_h), grad_weight.to(weight.dtype), grad_bias)
        return loss / n

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        grad_h, grad_weight, grad_bias = ctx.saved_tensors
        factor = upstream.to(grad_h.dtype)
        bias = None if grad_bias is None else grad_bias * factor
        return grad_h * factor, grad_weight * factor, None, bias, None, None
