"""A job: all settings that decide the results of one training run, as a plain record.

Presets supply the settings that a job does not give. Two jobs with the same settings have the same
key. The key names the folder of a run, so a sweep finds the runs that are already done.
"""

import hashlib
import json
import math
import re
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from sodaopt._errors import unknown
from sodaopt._names import Name

from .model import Shape
from .optimizers import BASES, Z0, Decay, Settings, check, decays, parse
from .presets import Preset, preset

TOKENS_PER_PARAMETER = 20
"""Training tokens for each parameter at a horizon of 1, called 1x Chinchilla."""


@dataclass(frozen=True)
class Common:
    """Settings that the runs of a comparison share.

    The preset or the optimizer decides a setting that is None.
    """

    preset: str = "nano"
    """nano, small, proxy, track3, gpt-64m, gpt-124m, gpt-200m, gpt-300m, gpt-420m, gpt-700m or
    gpt-1b."""
    data: str | None = None
    """embedded, a name under runs/data, or a folder of token shards."""
    lr: float | None = None
    """Peak learning rate."""
    wd: float | None = None
    """Weight decay of the hidden matrices, times lr as in torch. Default: the preset's, or 0."""
    horizon: str | None = None
    """Length of the run in units of Chinchilla (20 tokens a parameter), such as 1x."""
    steps: int | None = None
    """Length of the run in steps, instead of a horizon."""
    batch: int | None = None
    """Sequences per step."""
    context: int | None = None
    """Tokens per sequence."""
    width: int | None = None
    """Width of the model."""
    depth: int | None = None
    """Number of blocks."""
    head_dim: int | None = None
    """Width of an attention head."""
    activation: float | None = None
    """Factor of the squared ReLU."""
    warmup: float | None = None
    """Fraction of the run over which the learning rate rises."""
    warmdown: float | None = None
    """Fraction of the run over which the learning rate falls to zero."""
    alpha: float | None = None
    """Weight of a new gradient in the momentum."""
    alpha_bar: float | None = None
    """Weight of the gradient that is added to the momentum again (optimism)."""
    z0: Z0 = "init"
    """Point that anchored optimizers pull to: init (the initial weights) or zero."""
    fade: tuple[float, float] | None = None
    """Fractions of the run between which the pull fades out, such as 0.67 0.9."""
    decay: Decay = "uniform"
    """Strength of the pull: uniform is 1/(k+2), coupled is uniform * (lr / largest lr), and squared
    is uniform * (lr / largest lr)^2."""
    eval_every: int | None = None
    """Steps between validations."""
    eval_tokens: int | None = None
    """Tokens of the validation set to use. 0 uses all of them."""


@dataclass(frozen=True)
class Job(Common):
    """One training run."""

    optimizer: str = "soda_dagger"
    """muon, adamw, scion, uscion, soda_dagger or lion, or wrapped as in soda(muon) and
    gpa(soda(muon))."""
    seed: int = 0
    """Seed of the initial weights and of the order of the data."""

    def __post_init__(self) -> None:
        if self.horizon is not None and self.steps is not None:
            raise ValueError(
                f"steps is {self.steps} and horizon is {self.horizon}: give only one of them"
            )
        for name in ("steps", "batch", "context", "eval_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name in ("warmup", "warmdown"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{name} is a fraction of the run, between 0 and 1, got {value}")
        if self.eval_tokens is not None and self.eval_tokens < 0:
            raise ValueError(f"eval_tokens must be at least 0, got {self.eval_tokens}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be in 0..2^63-1, got {self.seed}")
        resolve(self, 2)  # raises for impossible settings now, before any data is read

    @property
    def dataset(self) -> str:
        return self.data or preset(self.preset).data


@dataclass(frozen=True)
class ResolvedJob:
    """A job with a value for every setting."""

    job: Job
    name: Name
    shape: Shape
    settings: Settings
    batch: int
    steps: int
    warmup: int
    warmdown: int
    eval_every: int
    eval_late: int
    """Steps between validations in the last tenth of the run."""
    eval_tokens: int

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.shape.context

    @property
    def tokens(self) -> int:
        return self.steps * self.tokens_per_step

    @property
    def horizon(self) -> float:
        return self.tokens / (TOKENS_PER_PARAMETER * self.shape.parameters)

    def lr_factor(self, k: int) -> float:
        """Return the factor of the learning rate at step k.

        It rises linearly during the warmup, then is 1, and falls linearly to zero during the
        warmdown.
        """
        rise = min(1.0, (k + 1) / self.warmup) if self.warmup else 1.0
        fall = min(1.0, (self.steps - k) / self.warmdown) if self.warmdown else 1.0
        return max(0.0, rise * fall)

    def validates(self, k: int) -> bool:
        """Whether step k begins with a validation."""
        late = k >= 0.9 * self.steps
        return k % (self.eval_late if late else self.eval_every) == 0

    def lr(self, k: int) -> float:
        """Return the learning rate at step k."""
        return self.settings.lr * self.lr_factor(k)

    def record(self) -> dict[str, Any]:
        """Return all settings as a flat dict, for run files and tables."""
        shape = asdict(self.shape)
        del shape["design"]  # the preset decides it
        # records from before this setting do not have it, and their runs must keep their keys
        decay = {} if self.settings.decay == "uniform" else {"decay": self.settings.decay}
        return {
            "optimizer": str(self.name), "preset": self.job.preset, "data": self.job.dataset,
            "seed": self.job.seed, "lr": self.settings.lr, "wd": self.settings.wd,
            "steps": self.steps, "horizon": round(self.horizon, 4), "batch": self.batch,
            **shape, "warmup": self.warmup, "warmdown": self.warmdown,
            **{k: getattr(self.settings, k) for k in ("alpha", "alpha_bar", "z0", "fade")},
            **decay,
            "eval_every": self.eval_every, "eval_tokens": self.eval_tokens,
        }  # fmt: skip

    @property
    def key(self) -> str:
        """Readable name that is unique to these settings."""
        text = json.dumps(self.record(), sort_keys=True)
        words = re.sub(r"[^a-z0-9_]+", "-", str(self.name)).strip("-")
        return f"{words}-s{self.job.seed}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"


def resolve(job: Job, vocab: int) -> ResolvedJob:
    """Return the job with a value for every setting, from the job, its preset or its optimizer.

    vocab: vocabulary of the data set. The model pads it to a multiple of 128.
    """
    p, name = preset(job.preset), parse(job.optimizer)
    base = BASES[name.base]
    shape = Shape(
        vocab=-(-vocab // 128) * 128,
        width=_or(job.width, p.width),
        depth=_or(job.depth, p.depth),
        head_dim=_or(job.head_dim, p.head_dim),
        context=_or(job.context, p.context),
        activation=_or(job.activation, base.activation),
        design=p.design,
    )
    batch = _or(job.batch, p.batch)
    steps, warmdown = _length(job, p, shape, batch)
    warmup = round(_or(job.warmup, base.warmup) * steps)
    lr = _or(job.lr, p.lr.get(str(name), p.lr.get(name.base, base.lr)))
    wd = _or(job.wd, p.wd.get(name.base, 0.0) if decays(name) else 0.0)
    settings = Settings(
        lr, wd, warmup, steps, job.alpha, job.alpha_bar, job.z0, job.fade, job.decay,
        p.recipes.get(name.base),
    )  # fmt: skip
    check(name, settings)
    every, tokens = _or(job.eval_every, p.eval_every), _or(job.eval_tokens, p.eval_tokens)
    late = every if job.eval_every else p.eval_late or every
    return ResolvedJob(
        job, name, shape, settings, batch, steps, warmup, warmdown, every, late, tokens
    )


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _length(job: Job, p: Preset, shape: Shape, batch: int) -> tuple[int, int]:
    """Return the number of steps and of warmdown steps."""
    horizon = p.horizon if job.horizon is None else chinchilla(job.horizon)
    as_published = (job.width, job.depth, job.batch, job.context) == (None,) * 4
    if job.steps is None and p.published and as_published:
        n, m = (round(horizon * v) for v in p.published)
    else:
        tokens = TOKENS_PER_PARAMETER * shape.parameters * horizon
        given = job.steps or (p.steps if job.horizon is None else None)
        n = given or max(1, round(tokens / (batch * shape.context)))
        m = round(p.warmdown * n)
    return n, m if job.warmdown is None else round(job.warmdown * n)


def chinchilla(text: str) -> float:
    """Parse a horizon: '4x' -> 4.0"""
    found = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)x?", text.strip().lower())
    value = float(found[1]) if found else math.nan
    if not value > 0:
        raise ValueError(
            f"horizon must be a positive multiple of Chinchilla such as 1x, got {text!r}"
        )
    return value


def vary(job: Job, **changes: Any) -> Job:
    """Return the job with some settings changed."""
    known = [f.name for f in fields(Job)]
    for name in changes:
        if name not in known:
            raise ValueError(unknown("setting", name, known))
    return replace(job, **changes)
