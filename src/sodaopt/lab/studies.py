"""The paper's figures and tables as lists of jobs, at the paper's scale or at a small one.

A cell is one point of a figure or one number of a table. It has a label, its settings, and the
baseline whose learning rate it uses. To add a figure, add an entry to STUDIES.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .job import Job

SEEDS = (0, 1, 2, 3, 4)


@dataclass(frozen=True)
class Scale:
    """Model sizes, horizons and seeds of the studies."""

    preset: str
    sizes: tuple[tuple[str, dict[str, Any]], ...]
    """Labels and settings of the models, from small to large."""
    horizons: tuple[str, ...]
    seeds: tuple[int, ...]
    lr: dict[str, float]
    """Learning rates of the baselines. If they are tuned, the middle of the first grid."""
    tuned: bool
    """Whether the learning rates of the baselines are tuned first."""
    about: str


SCALES = {
    "paper": Scale(
        "gpt-124m",
        tuple(
            # A given depth replaces the paper's steps for 124M, which are 21.6 tokens a parameter:
            # all sizes have 20.
            (size, {"preset": f"gpt-{size}", "depth": 12})
            for size in ("64m", "124m", "200m", "300m", "420m", "700m", "1b")
        ),
        ("1x", "4x"),
        SEEDS,
        {},
        False,
        "124M parameters on FineWeb (64M to 1B for the scaling figures), the paper's settings",
    ),
    "proxy": Scale(
        "proxy",
        tuple((f"width {w}", {"width": w}) for w in (128, 256, 384, 512)),
        ("1x",),
        SEEDS,
        {"adamw": 2**-9, "muon": 2**-10, "scion": 2**-11, "uscion": 2**-11},
        True,
        "6.8M parameters, half a minute a run on one H200, with tuned learning rates for baselines",
    ),
}


@dataclass(frozen=True)
class Cell:
    """One number of a study.

    base: the baseline whose learning rate this cell uses
    """

    column: str
    optimizer: str
    base: str
    settings: dict[str, Any] = field(default_factory=dict)
    choices: tuple[dict[str, Any], ...] = ()
    """Settings to choose from by the mean loss over the study's tuning seeds."""
    follows: str = ""
    """The column whose chosen learning rate this cell uses."""

    def chosen(self, settings: dict[str, Any]) -> Cell:
        """Return the cell with one of its choices."""
        return replace(self, settings=self.settings | settings, choices=())

    def job(self, scale: Scale, row: TableRow, seed: int, lr: float | None) -> Job:
        values: dict[str, Any] = {
            "preset": scale.preset,
            "optimizer": self.optimizer,
            "seed": seed,
            "lr": lr,
        }
        chosen = self.choices[0] if self.choices else {}
        return Job(**(values | row.settings | self.settings | chosen))


@dataclass(frozen=True)
class TableRow:
    """A row of a table: a horizon or a model size."""

    label: str
    settings: dict[str, Any]


@dataclass(frozen=True)
class Study:
    """A figure or a table."""

    title: str
    cells: tuple[Cell, ...]
    rows: Callable[[Scale], Sequence[TableRow]]
    kind: str = "table"
    """table, curves (loss against steps), or an axis such as wd."""
    pairs: tuple[tuple[str, str], ...] = ()
    """Pairs of columns to compare: (column, its baseline)."""
    primary: int = 1
    """Number of leading pairs that are primary comparisons, which get a p value."""
    published: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """The numbers in the paper, by row."""
    tuning_seeds: tuple[int, ...] = (100, 101)
    """Seeds on which the settings of a cell are chosen. No number of a study comes from them."""


def horizons(scale: Scale) -> list[TableRow]:
    return [TableRow(h, {"horizon": h}) for h in scale.horizons]


def sizes(scale: Scale) -> list[TableRow]:
    return [TableRow(label, settings | {"horizon": "1x"}) for label, settings in scale.sizes]


def _cell(column: str, optimizer: str, base: str, **settings: Any) -> Cell:
    return Cell(column, optimizer, base, settings)


MUON = _cell("Muon", "muon", "muon")
SODA_MUON = _cell("SODA(Muon)", "soda(muon)", "muon")
SCION = _cell("Scion", "scion", "scion")
USCION = _cell("uScion", "uscion", "uscion")
SODA_USCION = _cell("SODA(uScion)", "soda(uscion)", "uscion")
ADAM = _cell("Adam", "adamw", "adamw")
SODA_ADAM = _cell("SODA(Adam)", "soda(adamw)", "adamw")
DAGGER = _cell("SODA-dagger", "soda_dagger", "uscion")

DECAYS = tuple(2.0**e for e in range(-4, 4))
ADAMW_GRID = tuple({"lr": 2.0**e, "wd": w} for e in range(-10, -6) for w in (0.5, 0.25, 0.1, 0.0))
SCION_GRID = tuple({"lr": 2.0**e} for e in range(-13, -9))
COUPLED = {"decay": "coupled"}
MUON_TUNED = _cell("Muon, wd 1", "muon", "muon", wd=1.0)
SODA_COUPLED = _cell("SODA(Muon) hidden, coupled", "soda(muon)", "muon", decay="coupled")
MOMENTA = ((0.05, 0.0), (0.05, 0.05), (0.05, 0.1), (0.1, 0.0), (0.1, 0.05), (0.1, 0.1))

STUDIES = {
    "fig-wd-sweep": Study(
        "Figure 1: Muon with swept weight decay, and SODA(Muon)",
        (MUON, *(_cell(f"wd {w:g}", "muon", "muon", wd=w) for w in DECAYS), SODA_MUON),
        horizons,
        "wd",
        (("SODA(Muon)", "Muon"),),
    ),
    "fig-wrappers": Study(
        "Figure 2: the wrapper around Adam, Muon and Scion",
        (ADAM, SODA_ADAM, MUON, SODA_MUON, SCION, USCION, SODA_USCION),
        horizons,
        "curves",
        (("SODA(Adam)", "Adam"), ("SODA(Muon)", "Muon"), ("SODA(uScion)", "uScion")),
    ),
    "fig-trajectories": Study(
        "Figure 3: SODA-dagger against the best wrapped optimizers",
        (DAGGER, SODA_MUON, SODA_USCION),
        horizons,
        "curves",
        (("SODA-dagger", "SODA(Muon)"), ("SODA-dagger", "SODA(uScion)")),
    ),
    "fig-scale": Study(
        "Figure 4: SODA-dagger against Scion and uScion as the model grows",
        (SCION, USCION, DAGGER),
        sizes,
        "size",
        (("SODA-dagger", "Scion"), ("SODA-dagger", "uScion")),
    ),
    "fig-scale-wrapper": Study(
        "Figure 5: as figure 4, with SODA(uScion)",
        (SCION, USCION, DAGGER, SODA_USCION),
        sizes,
        "size",
        (("SODA(uScion)", "uScion"), ("SODA-dagger", "uScion")),
    ),
    "fig-anchor": Study(
        "Figure 6: the anchor at the initial weights, and at zero",
        (DAGGER, _cell("z0 = 0", "soda_dagger", "uscion", z0="zero")),
        horizons,
        "curves",
        (("SODA-dagger", "z0 = 0"),),
    ),
    "table-layers": Study(
        "Table: wrapping the hidden layers, or all of them",
        (
            MUON,
            _cell("SODA(Muon) hidden", "soda(muon)", "muon"),
            _cell("SODA(Muon) all", "soda_all(muon)", "muon"),
            SCION,
            USCION,
            _cell("SODA(uScion) hidden", "soda(uscion)", "uscion"),
            _cell("SODA(uScion) all", "soda_all(uscion)", "uscion"),
        ),
        horizons,
        pairs=(
            ("SODA(Muon) hidden", "Muon"),
            ("SODA(Muon) all", "Muon"),
            ("SODA(Muon) hidden", "SODA(Muon) all"),
            ("SODA(uScion) hidden", "uScion"),
            ("SODA(uScion) all", "uScion"),
            ("SODA(uScion) hidden", "Scion"),
            ("SODA(uScion) all", "Scion"),
        ),
        published={
            "1x": (3.28146, 3.26654, 3.27493, 3.28035, 3.28508, 3.27534, 3.27582),
            "4x": (3.14140, 3.12621, 3.12933, 3.14776, 3.14746, 3.13622, 3.13196),
        },
    ),
    "table-optimism": Study(
        "Table: dual averaging alpha and optimism alpha_bar in SODA-dagger",
        tuple(
            _cell(f"({a:g}, {b:g})", "soda_dagger", "uscion", alpha=a, alpha_bar=b)
            for a, b in MOMENTA
        ),
        horizons,
        pairs=(("(0.05, 0.05)", "(0.05, 0)"), ("(0.05, 0.05)", "(0.1, 0)")),
        published={
            "1x": (3.27613, 3.26596, 3.27523, 3.27582, 3.27171, 3.27903),
            "4x": (3.13250, 3.12376, 3.12543, 3.13192, 3.12981, 3.13087),
        },
    ),
    "muon": Study(
        "Muon: weight decay against the pull",
        (
            MUON,
            Cell(
                "Muon, best wd", "muon", "muon", choices=tuple({"wd": w} for w in (0.5, 1.0, 2.0))
            ),
            _cell("SODA(Muon) hidden", "soda(muon)", "muon"),
            SODA_COUPLED,
            _cell("SODA(Muon) all, coupled", "soda_all(muon)", "muon", decay="coupled"),
        ),
        horizons,
        pairs=(
            ("SODA(Muon) hidden, coupled", "Muon, best wd"),
            ("SODA(Muon) hidden", "Muon, best wd"),
            ("SODA(Muon) all, coupled", "Muon, best wd"),
            ("Muon", "Muon, best wd"),
            ("SODA(Muon) hidden, coupled", "SODA(Muon) hidden"),
        ),
    ),
    "adamw": Study(
        "AdamW: weight decay against the pull",
        (
            replace(ADAM, column="AdamW", choices=tuple(c for c in ADAMW_GRID if not c["wd"])),
            replace(ADAM, column="AdamW, best wd", choices=ADAMW_GRID),
            *(
                Cell(column, optimizer, "adamw", settings, follows="AdamW, best wd")
                for column, optimizer, settings in (
                    ("SODA(AdamW) hidden", "soda(adamw)", {}),
                    ("SODA(AdamW) hidden, coupled", "soda(adamw)", COUPLED),
                    ("SODA(AdamW) tied, coupled", "soda_tied(adamw)", COUPLED),
                )
            ),
        ),
        horizons,
        pairs=(
            ("SODA(AdamW) hidden, coupled", "AdamW, best wd"),
            ("SODA(AdamW) hidden", "AdamW, best wd"),
            ("SODA(AdamW) tied, coupled", "AdamW, best wd"),
            ("AdamW", "AdamW, best wd"),
            ("SODA(AdamW) hidden, coupled", "SODA(AdamW) hidden"),
        ),
        tuning_seeds=(100,),
    ),
    "scion": Study(
        "SODA-dagger against Scion and uScion, each with its own learning rate",
        (
            replace(SCION, choices=SCION_GRID),
            replace(USCION, choices=SCION_GRID),
            Cell(
                "SODA(uScion) hidden, coupled", "soda(uscion)", "uscion", COUPLED, follows="uScion"
            ),
            replace(DAGGER, choices=SCION_GRID),
            replace(DAGGER, column="SODA-dagger, coupled", settings=COUPLED, follows="SODA-dagger"),
        ),
        horizons,
        pairs=(
            ("SODA-dagger", "Scion"),
            ("SODA-dagger, coupled", "Scion"),
            ("SODA(uScion) hidden, coupled", "Scion"),
            ("uScion", "Scion"),
            ("SODA-dagger, coupled", "SODA-dagger"),
        ),
        tuning_seeds=(100,),
    ),
    "sizes": Study(
        "Muon with a weight decay tuned at width 256, and the coupled pull, as the model grows",
        (MUON_TUNED, SODA_COUPLED),
        sizes,
        "size",
        ((SODA_COUPLED.column, MUON_TUNED.column),),
    ),
    "horizons": Study(
        "Muon with a weight decay tuned at 1x, and the coupled pull, at other horizons",
        (MUON_TUNED, SODA_COUPLED),
        lambda scale: [TableRow(h, {"horizon": h}) for h in ("0.5x", "1x", "2x", "4x")],
        "curves",
        ((SODA_COUPLED.column, MUON_TUNED.column),),
    ),
    "learning-rates": Study(
        "Muon and the coupled pull over three octaves of the learning rate",
        (MUON, SODA_COUPLED),
        lambda scale: [TableRow(f"lr 2^{e}", {"lr": 2.0**e}) for e in range(-12, -8)],
        "lr",
        ((SODA_COUPLED.column, "Muon"),),
    ),
    "table-hyperparameters": Study(
        "Table: the settings of each optimizer, run once",
        (ADAM, MUON, USCION, SCION, DAGGER),
        lambda scale: [TableRow("1x", {"horizon": "1x"})],
    ),
}

DEFINITIONS = {
    "table-instances": "the zoo, compared with other implementations: make parity",
    "table-norms": "the norms and their lmo, checked by tests/geometry/test_geometry.py",
    "theory": "bounds and rates on convex problems: sodaopt theory",
}
"""Parts of the paper without a training run."""
