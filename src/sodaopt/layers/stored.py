"""How a layer stores its matrix, from its type and its sizes."""

from __future__ import annotations

import sys

import torch
from torch import nn

from sodaopt.anchors.init import CONVS
from sodaopt.geometry.views import View, conv, deconv, grouped, matrix, transposed
from sodaopt.layers.locations import Location


def imported(module: str, name: str) -> tuple[type, ...]:
    """Return a class of another library for isinstance, or () if nobody has imported it."""
    found = getattr(sys.modules.get(module), name, None)
    return (found,) if isinstance(found, type) else ()


def linear(at: Location) -> View | None:
    """Return how the weight of a linear layer is stored, or None for any other parameter.

    A layer of another library counts as linear if it declares in_features and out_features.
    """
    m, shape = at.module, tuple(at.shape)
    if isinstance(m, nn.MultiheadAttention | nn.RNNBase | nn.RNNCellBase) and len(shape) == 2:
        return matrix
    if at.attribute != "weight":
        return None
    sizes = getattr(m, "out_features", None), getattr(m, "in_features", None)
    if isinstance(m, nn.Linear) or shape == sizes:
        return matrix
    flipped = isinstance(m, imported("transformers.pytorch_utils", "Conv1D"))
    return transposed if flipped or shape == sizes[::-1] else None


def kernel(at: Location) -> View | None:
    """Return how the kernel of a convolution is stored, or None for any other parameter."""
    m = at.module
    if not isinstance(m, CONVS) or at.attribute != "weight":
        return None
    of = deconv if m.transposed else conv
    return of if m.groups == 1 else grouped(m.groups, of)


def is_depthwise(m: nn.Module) -> bool:
    return isinstance(m, CONVS) and 1 < m.groups == m.in_channels


def is_table(at: Location) -> bool:
    return isinstance(at.module, nn.Embedding | nn.EmbeddingBag) and at.attribute == "weight"


def is_projection(shape: torch.Size) -> bool:
    """Whether the shape is (d, heads, d_head). Both directions of such a matrix are the same."""
    return len(shape) == 3 and shape[0] == shape[1] * shape[2]


def stack(at: Location) -> View | None:
    """Return how a 3-D stack of matrices is stored, or None if neither module nor sizes tell."""
    if len(at.shape) != 3:
        return None
    flipped = getattr(at.module, "is_transposed", None)  # transformers declares it
    if not isinstance(flipped, bool):
        return _stack_by_sizes(at)
    return transposed if flipped else matrix


def _stack_by_sizes(at: Location) -> View | None:
    """Return how a 3-D stack is stored, by the size of the router's input.

    All experts of a block are stored alike, so its first stack decides.
    """
    n, o, i = at.shape
    if o == i:
        return matrix  # the polar factor of a transposed matrix is the transposed factor
    block = at.modules[-2:][0].named_parameters()
    shapes = [p.shape for name, p in block if not name.endswith("bias") and p.shape[:1] == (n,)]
    first = next(shape for shape in shapes if len(shape) == 3)
    read = {shape[1] for shape in shapes if len(shape) == 2}
    if (first[1] in read) == (first[2] in read):
        return None
    return transposed if first[1] in read else matrix


def expert_count(m: nn.Module) -> int:
    """Count the experts in a module: the length of its 3-D stacks, or 0 if it has none."""
    if isinstance(m, CONVS):
        return 0
    shapes = [p.shape for p in m._parameters.values() if p is not None and p.ndim == 3]
    counts = {shape[0] for shape in shapes if not is_projection(shape)}
    return max(counts) if len(counts) == 1 and counts != {1} else 0


def is_router(at: Location) -> bool:
    """Whether a matrix has one output for each expert beside it, or one for a shared expert."""
    if len(at.shape) != 2 or at.attribute.endswith("bias") or expert_count(at.module):
        return False
    banks = (bank for block in at.modules[-3:] for bank in block.children())
    counts = {n for bank in banks if (n := expert_count(bank))}
    return bool(counts) and at.shape[0] in counts | {1}


# The two factors of an adapted layer, by attribute: peft's, torchtune's, peft's for embeddings.
LORA = (("lora_A", "lora_B"), ("lora_a", "lora_b"), ("lora_embedding_A", "lora_embedding_B"))


def lora(at: Location) -> str | None:
    """Return "a" or "b" for a factor of a low-rank adapter, else None."""
    for module, key in zip(at.modules, at.keys, strict=True):
        both = any(key in pair and all(hasattr(module, name) for name in pair) for pair in LORA)
        if both and at.parameter.ndim > 1:
            return key[-1].lower()
    return None
