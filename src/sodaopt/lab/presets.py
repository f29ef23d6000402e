"""Presets: model sizes, and the default settings of runs at each size."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sodaopt import geometry, zoo
from sodaopt._errors import unknown
from sodaopt.geometry.polar import Newton
from sodaopt.layers.recipes import Recipe, Rule

from .model import PAPER, Design

WARMDOWN = 0.285


@dataclass(frozen=True)
class Preset:
    """A model size, and the default settings of runs at this size."""

    width: int
    depth: int
    head_dim: int
    context: int
    batch: int
    """Sequences per step."""
    horizon: float = 1.0
    """Length of the run in units of Chinchilla."""
    data: str = "embedded"
    eval_every: int = 125
    eval_tokens: int = 10 * 2**20
    vocab: int | None = None
    """Size of the vocabulary that the preset is meant for. The data set decides the actual size."""
    published: tuple[int, int] | None = None
    """Steps and warmdown at 1x, if the paper gives them."""
    lr: Mapping[str, float] = field(default_factory=dict)
    """Learning rates that differ from the paper's, by base optimizer."""
    threads: int | None = None
    """Number of CPU threads, for presets that more threads make slower."""
    design: Design = PAPER
    steps: int | None = None
    """Number of steps of a job without a horizon, instead of the preset's horizon."""
    warmdown: float = WARMDOWN
    """Fraction of the run over which the learning rate falls to zero."""
    wd: Mapping[str, float] = field(default_factory=dict)
    """Weight decay by base optimizer. The others have none."""
    recipes: Mapping[str, Recipe] = field(default_factory=dict)
    """Recipes of the layer plan that differ from the paper's, by base optimizer."""
    eval_late: int | None = None
    """Steps between validations in the last tenth of the run."""
    shuffled: bool = True
    """Whether the seed decides the order of the data. Otherwise it is the order of the files."""


def _paper(width: int, **more: Any) -> Preset:
    shape: Any = {"depth": 12, "head_dim": 128, "context": 1024, "batch": 512}
    return Preset(width, **shape, data="fineweb100B", vocab=50304, **more)


NANO_LR = {"adamw": 2**-7, "muon": 2**-9, "soda_dagger": 2**-11}
"""The best powers of two of `sodaopt sweep NAME --over lr=...`. Scion keeps the paper's rate."""

# -- modded-nanogpt's track 3 ---------------------------------------------------------------------

TRACK3_DESIGN = Design(
    tied=False,
    biases=True,
    gains=True,
    embedding_norm=True,
    half_rotary=True,
    attention_scale=0.12,
    softcap=15.0,
    normal=True,
    bf16_embedding=True,
)
TRACK3_POLAR = Newton("track3", ((2.0, -1.5, 0.5),) * 12)
"""Muon's iteration in modded-nanogpt, records/track_3_optimization/train_gpt_simple.py."""
TRACK3_LR, TRACK3_BATCH = 0.025, 512
TRACK3_EPS = 1e-10 / (TRACK3_BATCH * 1024)
"""Adam's eps. The script has 1e-10, and its loss is the sum over the tokens of a batch. The lab's
loss is the mean."""


def _track3_adam(lr: float) -> Rule:
    method = zoo.adamw((0.8, 0.95), TRACK3_EPS, weight_decay=0.001)
    return Rule(method, lr_factor=lr / TRACK3_LR)


TRACK3_MUON: Recipe = {
    "hidden": Rule(zoo.muon(scale=geometry.original, polar=TRACK3_POLAR)),
    "embedding": _track3_adam(0.7),
    "head": _track3_adam(0.004),
    "vector": _track3_adam(0.015),
}
"""The baseline of June 2026, result 36: 3250 steps to a validation loss of 3.28."""

PRESETS = {
    "nano": Preset(
        width=64,
        depth=4,
        head_dim=32,
        context=128,
        batch=8,
        horizon=0.03,
        vocab=1024,
        eval_every=20,
        eval_tokens=2**13,
        lr=NANO_LR,
        threads=1,
    ),
    "small": Preset(
        width=256,
        depth=6,
        head_dim=64,
        context=256,
        batch=16,
        horizon=0.02,
        vocab=1024,
        eval_every=50,
        eval_tokens=2**15,
    ),
    "proxy": Preset(
        width=256,
        depth=6,
        head_dim=128,
        context=512,
        batch=128,
        data="proxy",
        vocab=8192,
        eval_every=260,
        eval_tokens=14 * 2**16,
    ),
    "gpt-64m": _paper(512),
    "gpt-124m": _paper(768, published=(5100, 1450)),
    "gpt-200m": _paper(1024),
    "gpt-300m": _paper(1280),
    "gpt-420m": _paper(1536),
    "gpt-700m": _paper(2048),
    "gpt-1b": _paper(2560),
    "track3": Preset(
        width=768,
        depth=12,
        head_dim=128,
        context=1024,
        batch=TRACK3_BATCH,
        data="fineweb10B",
        vocab=50304,
        lr={"muon": TRACK3_LR},
        wd={"muon": 0.05},
        recipes={"muon": TRACK3_MUON},
        design=TRACK3_DESIGN,
        steps=3250,
        warmdown=0.7,
        eval_late=25,
        shuffled=False,
    ),
}


def preset(name: str) -> Preset:
    if name not in PRESETS:
        raise ValueError(unknown("preset", name, PRESETS))
    return PRESETS[name]
