"""Public architectures, built from their configurations without weights.

CHECKED has the architectures whose roles were compared by hand with the source of the model.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from hashlib import blake2b
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn

from sodaopt import plan

MEANINGS = {
    "embedding": "a table of tokens: a one-hot first layer",
    "position": "any other table: positions, segments, relative biases",
    "tied": "embedding and head in one parameter, treated as the last layer",
    "head": "an output layer",
    "hidden": "the matrix of a linear layer",
    "conv": "a convolution kernel, also the first one of an image",
    "depthwise": "a convolution kernel with one input channel for each group",
    "experts": "a 3-D stack of matrices",
    "router": "the scores that choose experts",
    "lora_a": "the first factor of a low-rank adapter, d_in -> r",
    "lora_b": "the second factor of a low-rank adapter, r -> d_out",
    "norm": "the gain of a normalisation",
    "bias": "a bias",
    "scalar": "a single number",
    "vector": "any other vector",
}
"""The meaning of each role, in the order of the tables of docs/layers.md."""

NAMES = {
    "transformers": """
        GPT2LMHeadModel LlamaForCausalLM MixtralForCausalLM Qwen3MoeForCausalLM
        DeepseekV2ForCausalLM GptOssForCausalLM Llama4ForCausalLM JetMoeForCausalLM
        Gemma3ForCausalLM Phi3ForCausalLM FalconForCausalLM BloomForCausalLM OPTForCausalLM
        GPTNeoXForCausalLM MambaForCausalLM Mamba2ForCausalLM RwkvForCausalLM
        RecurrentGemmaForCausalLM BertForPreTraining RobertaForSequenceClassification
        DebertaV2ForSequenceClassification XLNetLMHeadModel T5ForConditionalGeneration
        BartForConditionalGeneration WhisperForConditionalGeneration Wav2Vec2ForCTC HubertForCTC
        MusicgenForCausalLM ViTForImageClassification SwinForImageClassification
        ConvNextForImageClassification Dinov2ForImageClassification DetrForObjectDetection SamModel
        CLIPModel PerceiverForMaskedLM
    """,
    "timm": """
        resnet50 efficientnet_b0 convnext_tiny vit_small_patch14_reg4_dinov2 deit3_base_patch16_224
        beit_base_patch16_224 swin_tiny_patch4_window7_224 maxvit_tiny_tf_224 coatnet_0_rw_224
        cait_s24_224 mixer_b16_224 levit_128
    """,
    "torchvision": """
        resnet50 convnext_tiny vit_b_16 swin_t maxvit_t mvit_v2_s fasterrcnn_resnet50_fpn
        maskrcnn_resnet50_fpn
    """,
    "diffusers": """
        UNet2DConditionModel AutoencoderKL DiTTransformer2DModel PixArtTransformer2DModel
        SD3Transformer2DModel FluxTransformer2DModel
    """,
}
CHECKED = {
    "transformers": """
        GPT2LMHeadModel LlamaForCausalLM MixtralForCausalLM GptOssForCausalLM Llama4ForCausalLM
        JetMoeForCausalLM MambaForCausalLM RwkvForCausalLM RecurrentGemmaForCausalLM
        BertForPreTraining XLNetLMHeadModel T5ForConditionalGeneration Wav2Vec2ForCTC
        MusicgenForCausalLM ViTForImageClassification SwinForImageClassification
        ConvNextForImageClassification DetrForObjectDetection CLIPModel
    """,
    "timm": """
        efficientnet_b0 convnext_tiny vit_small_patch14_reg4_dinov2 beit_base_patch16_224
        swin_tiny_patch4_window7_224 maxvit_tiny_tf_224 coatnet_0_rw_224
    """,
    "torchvision": "fasterrcnn_resnet50_fpn swin_t",
    "diffusers": "PixArtTransformer2DModel FluxTransformer2DModel",
}
# DETR's default backbone is timm's.
RESNET = {"backbone": None, "use_timm_backbone": False, "backbone_config": {"model_type": "resnet"}}
OPTIONS: dict[str, dict[str, Any]] = {"DetrForObjectDetection": RESNET}


def installed(package: str) -> str | None:
    """Return the version of a package without its build, or None if it is not installed."""
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return None


def rows(package: str) -> Iterator[str]:
    """Yield a line of the table for each architecture of an installed package."""
    for name in NAMES[package].split():
        with torch.device("meta"):
            model = BUILD[package](name, OPTIONS.get(name, {}))
        found = [(row.name, row.role) for row in plan(model, "adam").rows]
        count = Counter(role for _, role in found)
        roles = ", ".join(
            f"{count[role]} {role}" for role in (*MEANINGS, "frozen") if role in count
        )
        digest = blake2b(repr(found).encode(), digest_size=4).hexdigest()
        mark = "yes" if name in CHECKED[package].split() else ""
        yield f"| {name} | {roles} | `{digest}` | {mark} |"


def table(package: str) -> str:
    """Return the table of a package."""
    head = ("| architecture | parameters of each role | hash | by hand |", "|---|---|---|---|")
    return "\n".join((*head, *rows(package)))


def _transformers(name: str, options: dict[str, Any]) -> nn.Module:
    cls = getattr(import_module("transformers"), name)
    model: nn.Module = cls(cls.config_class(**options))
    return model


def _timm(name: str, options: dict[str, Any]) -> nn.Module:
    model: nn.Module = import_module("timm").create_model(name, **options)
    return model


def _torchvision(name: str, options: dict[str, Any]) -> nn.Module:
    options = {"weights_backbone": None} if "rcnn" in name else {}
    model: nn.Module = import_module("torchvision.models").get_model(name, weights=None, **options)
    return model


def _diffusers(name: str, options: dict[str, Any]) -> nn.Module:
    model: nn.Module = getattr(import_module("diffusers"), name)(**options)
    return model


BUILD: dict[str, Callable[[str, dict[str, Any]], nn.Module]] = {
    "transformers": _transformers,
    "timm": _timm,
    "torchvision": _torchvision,
    "diffusers": _diffusers,
}
