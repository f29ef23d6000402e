"""Write docs/results.md and the claims in other pages from the measurements in results/.

python -m tools.results_doc

A claim compares two columns of a study. Its verdict follows from the 95 % interval of their
difference: the claim holds if the interval is below zero, does not hold if it is above, and is
undecided if it includes zero.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from sodaopt._figures import STYLE
from sodaopt.lab.results import Numbers, differences, markdown, read, table

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGE = DOCS / "results.md"
FIGURE = DOCS / "figures" / "results-claims.svg"


class Claim(NamedTuple):
    """`one` ends below `other` in a study.

    source: who claims it, the paper or this project.
    """

    name: str
    source: str
    text: str
    study: str
    one: str
    other: str


CLAIMS = (
    Claim("muon-wd", "paper", "Muon: the pull beats a tuned weight decay",
          "muon", "SODA(Muon) hidden", "Muon, best wd"),
    Claim("muon-base", "paper", "Muon: the pull beats no weight decay",
          "muon", "SODA(Muon) hidden", "Muon"),
    Claim("muon-coupled-wd", "ours", "Muon: the coupled pull beats a tuned weight decay",
          "muon", "SODA(Muon) hidden, coupled", "Muon, best wd"),
    Claim("muon-coupled", "ours", "Muon: the coupled pull beats the paper's pull",
          "muon", "SODA(Muon) hidden, coupled", "SODA(Muon) hidden"),
    Claim("muon-all-coupled", "ours",
          "Muon: the coupled pull on all layers beats a tuned weight decay", "muon",
          "SODA(Muon) all, coupled", "Muon, best wd"),
    Claim("muon-layers", "paper", "Muon: the pull on hidden layers beats the pull on all layers",
          "table-layers", "SODA(Muon) hidden", "SODA(Muon) all"),
    Claim("muon-all", "paper", "Muon: the pull on all layers beats no weight decay",
          "table-layers", "SODA(Muon) all", "Muon"),
    Claim("adamw-base", "paper", "AdamW: the pull beats no weight decay",
          "adamw", "SODA(AdamW) hidden", "AdamW"),
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
    Claim("uscion-base", "paper", "uScion: the pull beats uScion",
          "table-layers", "SODA(uScion) hidden", "uScion"),
    Claim("uscion-scion", "paper", "uScion: the pull beats Scion",
          "table-layers", "SODA(uScion) hidden", "Scion"),
    Claim("uscion-all", "paper", "uScion: the pull on all layers beats uScion",
          "table-layers", "SODA(uScion) all", "uScion"),
)  # fmt: skip

HEAD = """# Results

This page shows the measurements of `sodaopt reproduce`. `make results` writes it from the files
under `results/`. Losses are compared by a fit of loss = variant + seed, because the same seed gives
the same initial weights and the same batches. Baselines are tuned on seeds that are not tested, and
anchored variants use their baseline's learning rate. The paper's numbers are from a model 18 times
the size on other data: compare the signs, not the losses.

The data of the proxy scale are 538 MB of English Wikipedia, tokenised by

    sodaopt data prepare wiki_train_0{0,1,2}.txt.xz --val wiki_val.txt.xz --vocab 8192 \\
        --out runs/data/proxy

from files in which an `<|endoftext|>` line separates the articles.

## Claims

A claim holds if the 95 % interval of the difference is below zero, does not hold if it is above
zero, and is undecided if it includes zero. Every run has 6.8M parameters and 1x Chinchilla. The
pull is on hidden layers unless a claim says otherwise. The paper's pull is 1/(k+2), and the
coupled pull is that times the learning rate over its largest value so far. A tuned weight decay of
AdamW is tuned with its learning rate. The intervals are not corrected for their number: one in
twenty misses. The primary comparisons, which were named before the runs, are tested below with
Holm's correction.

![Differences with 95 % intervals](figures/results-claims.svg)
"""

TAIL = """Not measured yet: SODA-dagger against Scion (`sodaopt reproduce scion`), z0 at the initial
weights against z0 = 0 (`fig-anchor`), the table of optimism (`table-optimism`), other sizes
(`sizes`), other horizons (`horizons`) and other learning rates (`learning-rates`).
"""


def measured() -> dict[str, Numbers]:
    """The studies by name."""
    files = sorted((ROOT / "results").glob("*.json"))
    return {numbers["study"]: numbers for numbers in map(read, files)}


def compared(claim: Claim, studies: dict[str, Numbers]) -> dict[str, Any]:
    """The difference of the claim's columns in the first row of its study."""
    cells = studies[claim.study]["cells"]
    return differences(cells, [(claim.one, claim.other)], primary=0)[0]


def verdict(d: dict[str, Any]) -> str:
    if d["high"] < 0:
        return "**holds**"
    return "does not hold" if d["low"] > 0 else "undecided"


def claims(studies: dict[str, Numbers]) -> str:
    """The table of claims. Other pages link to a row by the claim's name."""
    lines = []
    for claim in CLAIMS:
        d = compared(claim, studies)
        ends = f"{d['low']:+.4f} to {d['high']:+.4f}"
        gap = f"{d['mean']:+.4f}"
        text = f'<a id="{claim.name}"></a>{claim.text}'
        lines.append([text, claim.source, gap, ends, str(d["n"]), verdict(d)])
    return table(["claim", "source", "difference", "95 % interval", "seeds", "verdict"], lines)


def draw(studies: dict[str, Numbers]) -> None:
    """Draw the intervals of all claims. The metadata holds the table, which a test compares."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    colors = {"**holds**": "tab:green", "undecided": "tab:gray", "does not hold": "tab:red"}
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(8, 0.32 * len(CLAIMS) + 0.9), layout="constrained")
        for y, claim in enumerate(CLAIMS):
            d = compared(claim, studies)
            color = colors[verdict(d)]
            axes.plot([d["low"], d["high"]], [y, y], color=color)
            axes.plot(d["mean"], y, "o", color=color)
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set_yticks(range(len(CLAIMS)), [claim.text for claim in CLAIMS])
        axes.invert_yaxis()
        axes.set_xlabel("difference of losses, 95 % interval (left is better)")
        figure.savefig(FIGURE, metadata={"Description": claims(studies), "Date": None})
        plt.close(figure)


def results_page() -> str:
    studies = measured()
    parts = [HEAD.rstrip(), claims(studies), TAIL.rstrip()]
    return "\n\n".join([*parts, *(markdown(numbers) for numbers in studies.values())]) + "\n"


def with_claims(page: Path) -> str:
    """The text of a page with its claims filled in, each as a link to its row.

    `<!-- NAME -->...<!-- end -->` becomes the difference of the claim NAME with its interval, and
    `<!-- NAME verdict -->...<!-- end -->` its verdict.
    """
    studies, known = measured(), {claim.name: claim for claim in CLAIMS}
    up = "../" * (len(page.relative_to(DOCS).parts) - 1)

    def fill(match: re.Match[str]) -> str:
        name, kind = match[1], match[2] or ""
        d = compared(known[name], studies)
        number = f"{d['mean']:+.4f} ({d['low']:+.4f} to {d['high']:+.4f})"
        text = verdict(d).strip("*") if kind else number
        return f"<!-- {name}{kind} -->[{text}]({up}results.md#{name})<!-- end -->"

    old = page.read_text(encoding="utf-8")
    return re.sub(
        r"<!-- (?!end )([\w-]+)( verdict)? -->.*?<!-- end -->", fill, old, flags=re.DOTALL
    )


if __name__ == "__main__":
    draw(measured())
    PAGE.write_text(results_page(), encoding="utf-8")
    for page in DOCS.rglob("*.md"):
        page.write_text(with_claims(page), encoding="utf-8")
    print(f"{PAGE} and the claims of the other pages are up to date")
