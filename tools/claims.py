"""The claims of docs/results.md: each compares two columns of a study in one of its rows."""

from __future__ import annotations

from typing import NamedTuple

from sodaopt.lab.scales import SCALES
from sodaopt.lab.studies import SODA_COUPLED, STUDIES


class Claim(NamedTuple):
    """`one` ends below `other` in a row of a study.

    source: who claims it, the paper or this project.
    row: position of the row among the rows of the study.
    """

    name: str
    source: str
    text: str
    study: str
    one: str
    other: str
    row: int = 0

    def label(self, scale: str) -> str | None:
        """Return the label of the row at a scale, or None if the scale has fewer rows."""
        rows = STUDIES[self.study].rows(SCALES[scale])
        return rows[self.row].label if self.row < len(rows) else None


COUPLED, BEST = SODA_COUPLED.column, "Muon, best wd"


def _forms(base: str) -> tuple[Claim, ...]:
    """The claims about other forms of the pull around a base."""
    low, coupled, cautious = base.lower(), f"{base} coupled", f"{base}, cautious wd"
    return tuple(
        Claim(f"{low}-{name}", "ours", f"{base}: {text}", f"candidates-{low}", one, other)
        for name, text, one, other in (
            ("squared", "the squared ratio beats the coupled pull", f"{base} squared", coupled),
            ("faded", "a pull that fades between 67 and 90 % of the run beats the coupled pull",
             f"{base} faded", coupled),
            ("cautious", "a cautious pull beats the coupled pull", f"{base} cautious", coupled),
            ("coupled-cwd", "the coupled pull beats Cautious Weight Decay", coupled, cautious),
            ("cwd-wd", "Cautious Weight Decay beats the same weight decay", cautious,
             f"{base}, best wd"),
        )
    )  # fmt: skip


def _rows(study: str, text: str, other: str, names: dict[int, str]) -> tuple[Claim, ...]:
    """One claim about Muon's coupled pull for each of these rows of a study."""
    return tuple(
        Claim(f"muon-{study}-{row}", "ours", f"Muon, {at}: the coupled pull beats {text}", study,
              COUPLED, other, row)
        for row, at in names.items()
    )  # fmt: skip


CLAIMS = (
    Claim("muon-wd", "paper", "Muon: the pull beats a tuned weight decay",
          "muon", "SODA(Muon) hidden", BEST),
    Claim("muon-wd-long", "paper",
          "Muon, 4 times the length: the pull beats the short run's weight decay",
          "muon", "SODA(Muon) hidden", BEST, 1),
    Claim("muon-base", "paper", "Muon: the pull beats no weight decay",
          "muon", "SODA(Muon) hidden", "Muon"),
    Claim("muon-base-long", "paper", "Muon, 4 times the length: the pull beats no weight decay",
          "muon", "SODA(Muon) hidden", "Muon", 1),
    Claim("muon-layers", "paper", "Muon: the pull on hidden layers beats the pull on all layers",
          "table-layers", "SODA(Muon) hidden", "SODA(Muon) all"),
    Claim("muon-all", "paper", "Muon: the pull on all layers beats no weight decay",
          "table-layers", "SODA(Muon) all", "Muon"),
    Claim("adamw-base", "paper", "AdamW: the pull beats no weight decay",
          "adamw", "SODA(AdamW) hidden", "AdamW"),
    Claim("uscion-base", "paper", "uScion: the pull beats uScion",
          "table-layers", "SODA(uScion) hidden", "uScion"),
    Claim("uscion-scion", "paper", "uScion: the pull beats Scion",
          "table-layers", "SODA(uScion) hidden", "Scion"),
    Claim("uscion-all", "paper", "uScion: the pull on all layers beats uScion",
          "table-layers", "SODA(uScion) all", "uScion"),
    Claim("dagger-scion", "paper", "SODA-dagger beats Scion", "scion", "SODA-dagger", "Scion"),
    Claim("dagger-uscion", "paper", "SODA-dagger beats uScion", "scion", "SODA-dagger", "uScion"),
    Claim("anchor", "paper", "SODA-dagger: z0 at the initial weights beats z0 = 0",
          "fig-anchor", "SODA-dagger", "z0 = 0"),
    Claim("optimism", "paper", "SODA-dagger: alpha_bar = 0.05 beats alpha_bar = 0",
          "table-optimism", "(0.05, 0.05)", "(0.05, 0)"),
    Claim("optimism-alpha", "paper",
          "SODA-dagger: alpha = alpha_bar = 0.05 beats alpha = 0.1, alpha_bar = 0",
          "table-optimism", "(0.05, 0.05)", "(0.1, 0)"),
    Claim("muon-coupled-wd", "ours", "Muon: the coupled pull beats a tuned weight decay",
          "muon", COUPLED, BEST),
    Claim("muon-coupled-wd-long", "ours",
          "Muon, 4 times the length: the coupled pull beats the short run's weight decay",
          "muon", COUPLED, BEST, 1),
    Claim("muon-coupled-base-long", "ours",
          "Muon, 4 times the length: the coupled pull beats no weight decay",
          "muon", COUPLED, "Muon", 1),
    Claim("muon-coupled-base", "ours", "Muon: the coupled pull beats no weight decay",
          "muon", COUPLED, "Muon"),
    Claim("muon-coupled", "ours", "Muon: the coupled pull beats the paper's pull",
          "muon", COUPLED, "SODA(Muon) hidden"),
    Claim("muon-coupled-long", "ours",
          "Muon, 4 times the length: the coupled pull beats the paper's pull",
          "muon", COUPLED, "SODA(Muon) hidden", 1),
    Claim("muon-all-coupled", "ours",
          "Muon: the coupled pull on all layers beats a tuned weight decay", "muon",
          "SODA(Muon) all, coupled", BEST),
    Claim("adamw-wd", "ours", "AdamW: the pull beats a tuned weight decay",
          "adamw", "SODA(AdamW) hidden", "AdamW, best wd"),
    Claim("adamw-coupled-base", "ours", "AdamW: the coupled pull beats no weight decay",
          "adamw", "SODA(AdamW) hidden, coupled", "AdamW"),
    Claim("adamw-coupled-wd", "ours", "AdamW: the coupled pull beats a tuned weight decay",
          "adamw", "SODA(AdamW) hidden, coupled", "AdamW, best wd"),
    Claim("adamw-coupled", "ours", "AdamW: the coupled pull beats the paper's pull",
          "adamw", "SODA(AdamW) hidden, coupled", "SODA(AdamW) hidden"),
    Claim("adamw-tied", "ours", "AdamW: the coupled pull on the tied matrix beats no weight decay",
          "adamw", "SODA(AdamW) tied, coupled", "AdamW"),
    Claim("uscion-coupled-scion", "ours", "uScion: the coupled pull beats Scion",
          "scion", "SODA(uScion) hidden, coupled", "Scion"),
    Claim("dagger-coupled-scion", "ours", "SODA-dagger with the coupled pull beats Scion",
          "scion", "SODA-dagger, coupled", "Scion"),
    Claim("dagger-coupled", "ours", "SODA-dagger: the coupled pull beats the paper's pull",
          "scion", "SODA-dagger, coupled", "SODA-dagger"),
    *_rows("sizes", "a weight decay tuned at the standard width", BEST,
           {0: "half the width", 2: "1.5 times the width", 3: "twice the width"}),
    *_rows("horizons", "a weight decay tuned at the standard length", BEST,
           {0: "half the length", 2: "twice the length"}),
    *_rows("learning-rates", "no weight decay", "Muon",
           {0: "a quarter of the lr", 1: "half the lr", 2: "the tuned lr", 3: "twice the lr"}),
    *_forms("Muon"),
    *_forms("AdamW"),
)  # fmt: skip
