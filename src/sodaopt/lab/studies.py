"""The paper's figures and tables, and this project's own studies.

To add one, add an entry to STUDIES.
"""

from dataclasses import replace
from typing import Any

from .study import (
    Cell,
    Study,
    adamw_grid,
    adamw_rates,
    horizons,
    lengths,
    muon_decays,
    none,
    rates,
    short_and_long,
    sizes,
    standard,
)


def _cell(column: str, optimizer: str, base: str, **settings: Any) -> Cell:
    return Cell(column, optimizer, base, settings)


MUON = _cell("Muon", "muon", "muon")
SODA_MUON = _cell("SODA(Muon)", "soda(muon)", "muon")
SCION = _cell("Scion", "scion", "scion")
USCION = _cell("uScion", "uscion", "uscion")
SODA_USCION = _cell("SODA(uScion)", "soda(uscion)", "uscion")
ADAM = _cell("Adam", "adamw", "adamw")
SODA_ADAM = _cell("SODA(Adam)", "soda(adamw)", "adamw")
DAGGER = _cell("SODA-dagger", "soda_dagger", "soda_dagger")

DECAYS = tuple(2.0**e for e in range(-4, 4))
COUPLED = {"decay": "coupled"}
FADE = (0.67, 0.9)
"""The pull fades out between these fractions of the run, as in a replication at 124M parameters
(modded-nanogpt, track 3)."""
MUON_TUNED = Cell("Muon, best wd", "muon", "muon", choices=muon_decays)
ADAMW_TUNED = Cell("AdamW, best wd", "adamw", "adamw", choices=adamw_grid)
SODA_COUPLED = _cell("SODA(Muon) hidden, coupled", "soda(muon)", "muon", decay="coupled")


def _candidates(name: str, tuned: Cell) -> Study:
    """Return a study that compares a tuned base optimizer with pulls that need no tuning.

    Cautious Weight Decay has the learning rate and the weight decay of the tuned base optimizer.

    name: the name of the base optimizer in columns
    tuned: the column of the base optimizer, which chooses the weight decay
    """
    base, both = tuned.base, ("lr", "wd")
    pulls = (
        ("coupled", "soda", COUPLED),
        ("squared", "soda", {"decay": "squared"}),
        ("faded", "soda", {"fade": FADE}),
        ("cautious", "cautious", COUPLED),
    )
    rival = Cell(f"{name}, cautious wd", f"cautious_wd({base})", base, {}, none, tuned.column, both)
    return Study(
        f"{name}: other forms of the coupled pull, and Cautious Weight Decay",
        (
            tuned,
            rival,
            *(Cell(f"{name} {form}", f"{wrapper}({base})", base, settings, none, tuned.column)
              for form, wrapper, settings in pulls),
        ),
        standard,
        pairs=(
            (f"{name} squared", f"{name} coupled"),
            (f"{name} faded", f"{name} coupled"),
            (f"{name} cautious", f"{name} coupled"),
            (f"{name} coupled", rival.column),
            (rival.column, tuned.column),
        ),
        primary=0,
    )  # fmt: skip


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
        (DAGGER, _cell("z0 = 0", "soda_dagger", "soda_dagger", z0="zero")),
        horizons,
        "curves",
        (("SODA-dagger", "z0 = 0"),),
        seeds=(3,),
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
            _cell(f"({a:g}, {b:g})", "soda_dagger", "soda_dagger", alpha=a, alpha_bar=b)
            for a, b in MOMENTA
        ),
        horizons,
        pairs=(("(0.05, 0.05)", "(0.05, 0)"), ("(0.05, 0.05)", "(0.1, 0)")),
        published={
            "1x": (3.27613, 3.26596, 3.27523, 3.27582, 3.27171, 3.27903),
            "4x": (3.13250, 3.12376, 3.12543, 3.13192, 3.12981, 3.13087),
        },
        seeds=(3,),
    ),
    "muon": Study(
        "Muon: weight decay against the pull",
        (
            MUON,
            MUON_TUNED,
            _cell("SODA(Muon) hidden", "soda(muon)", "muon"),
            SODA_COUPLED,
            _cell("SODA(Muon) all, coupled", "soda_all(muon)", "muon", decay="coupled"),
        ),
        short_and_long,
        pairs=(
            ("SODA(Muon) hidden, coupled", "Muon, best wd"),
            ("SODA(Muon) hidden", "Muon, best wd"),
            ("SODA(Muon) all, coupled", "Muon, best wd"),
            ("Muon", "Muon, best wd"),
            ("SODA(Muon) hidden, coupled", "SODA(Muon) hidden"),
        ),
        seeds=(8, 3),
    ),
    "adamw": Study(
        "AdamW: weight decay against the pull",
        (
            replace(ADAM, column="AdamW", choices=adamw_rates),
            ADAMW_TUNED,
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
    ),
    "scion": Study(
        "SODA-dagger against Scion and uScion, each with its own learning rate",
        (
            SCION,
            USCION,
            Cell("SODA(uScion) hidden, coupled", "soda(uscion)", "uscion", COUPLED),
            DAGGER,
            replace(DAGGER, column="SODA-dagger, coupled", settings=COUPLED),
        ),
        horizons,
        pairs=(
            ("SODA-dagger", "Scion"),
            ("SODA-dagger, coupled", "Scion"),
            ("SODA(uScion) hidden, coupled", "Scion"),
            ("uScion", "Scion"),
            ("SODA-dagger, coupled", "SODA-dagger"),
        ),
    ),
    "candidates-muon": _candidates("Muon", MUON_TUNED),
    "candidates-adamw": _candidates("AdamW", ADAMW_TUNED),
    "sizes": Study(
        "Muon with a weight decay tuned at the standard size, and the coupled pull, as the model "
        "grows",
        (MUON_TUNED, SODA_COUPLED),
        sizes,
        "size",
        ((SODA_COUPLED.column, MUON_TUNED.column),),
        seeds=(3,),
    ),
    "horizons": Study(
        "Muon with a weight decay tuned at the standard length, and the coupled pull, at other "
        "lengths",
        (MUON_TUNED, SODA_COUPLED),
        lengths,
        "curves",
        ((SODA_COUPLED.column, MUON_TUNED.column),),
        seeds=(3,),
    ),
    "learning-rates": Study(
        "Muon and the coupled pull over three octaves of the learning rate",
        (MUON, SODA_COUPLED),
        rates,
        "lr",
        ((SODA_COUPLED.column, "Muon"),),
        seeds=(1,),
    ),
    "table-hyperparameters": Study(
        "Table: the settings of each optimizer, run once",
        (ADAM, MUON, USCION, SCION, DAGGER),
        standard,
    ),
}

DEFINITIONS = {
    "table-instances": "the zoo, compared with other implementations: make parity",
    "table-norms": "the norms and their lmo, checked by tests/geometry/test_geometry.py",
    "theory": "bounds and rates on convex problems: sodaopt theory",
}
"""Parts of the paper without a training run."""
