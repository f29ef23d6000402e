"""Write docs/results.md, docs/results-nano.md and the claims in other pages from results/.

python -m tools.results_doc

The verdict of a claim follows from the 95 % interval of its difference: the claim holds if the
interval is below zero, does not hold if it is above, and is undecided if it includes zero or if
there are fewer than three seeds.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from sodaopt.lab.results import Numbers, differences, markdown, read, table
from sodaopt.lab.scales import SCALES
from sodaopt.lab.studies import STUDIES
from tools.claims import CLAIMS, Claim
from tools.gpu_time import flops, missing, seconds_per_flop

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGE = DOCS / "results.md"
NANO_PAGE = DOCS / "results-nano.md"
FIGURES = DOCS / "figures"
ROWS = FIGURES / "results-rows.svg"
AXES = {"horizons": "length (Chinchilla)", "sizes": "width", "learning-rates": "learning rate"}
"""Studies over an axis."""
SHARED: dict[tuple[str, str | None], str] = {
    ("horizons", "1x"): "1x",
    ("horizons", "4x"): "4x",
    ("sizes", "width 256"): "1x",
    ("learning-rates", "lr 2^-10"): "1x",
}
"""Rows at the proxy scale whose runs are those of a row of the study `muon`."""
TABLES = {"paper": "The paper's claims", "ours": "Our claims"}
"""Headings of the tables by the source of the claims."""
PRIMARY = ("muon-coupled-wd", "muon-coupled-wd-long", "adamw-coupled-wd")
"""Primary comparisons of the coupled pull."""
AGAINST_UNIFORM = ("muon-coupled", "muon-coupled-long", "adamw-coupled", "dagger-coupled")
TOLERANCE = 0.002
HEADLINE = (
    "muon-wd", "muon-coupled-wd", "muon-coupled-wd-long", "muon-coupled", "muon-layers",
    "adamw-base", "adamw-coupled-base", "adamw-coupled-wd", "adamw-coupled", "dagger-scion",
    "anchor", "optimism",
)  # fmt: skip
"""Claims in the figure of the README."""
SHOWN = {"proxy": "6.8M parameters, 1x Chinchilla, GPU", "nano": "262k, 0.03x, CPU"}
"""The scales of the page."""
Measured: TypeAlias = dict[str, dict[str, Numbers]]
"""Numbers by scale and study."""
LEAST = 3
"""Seeds that a verdict needs."""
HOLDS, FAILS, UNDECIDED = "**holds**", "does not hold", "undecided"

HEAD = """# Results

This page shows the measurements of `sodaopt reproduce`. `make results` writes it from the files
under `results/`. There are two sizes: the proxy (6.8M parameters, Wikipedia, one H200, half a
minute a run) and nano (262k parameters, the embedded text, ten seconds a run on one CPU core),
which anybody can repeat on a laptop. Losses are compared by a fit of loss = variant + seed, because
the same seed gives the same initial weights and the same batches. Baselines are tuned on seeds that
are not tested, except in the study `table-layers` of the proxy, which tuned on seed 0. Wrapped
variants use their baseline's learning rate. The paper's numbers are from a model 18 times the size
of the proxy on other data: compare the signs, not the losses.

## Claims

A claim holds if the 95 % interval of the difference is below zero, does not hold if it is above
zero, and is undecided if it includes zero. A verdict needs three seeds: with fewer, a claim is
undecided even if its interval excludes zero. n is the number of seeds that both variants have. The
intervals are not corrected for their number: about one in twenty misses the true difference. The
primary comparisons, which were named before the runs, are tested below with Holm's correction.

The pull is on hidden layers unless a claim says otherwise. The paper's pull is 1/(k+2), and the
coupled pull multiplies it by the learning rate over its largest value so far. The weight decay of
AdamW is tuned together with its learning rate. Weight decays are tuned at the standard length, that
is in the short runs, and used at four times the length too. Claims that are not measured show the
minutes of one H200 that their study [still needs](#still-to-measure).
"""

DATA = """## Studies of the proxy

The data are 538 MB of English Wikipedia, tokenised by

    sodaopt data prepare wiki_train_0{0,1,2}.txt.xz --val wiki_val.txt.xz --vocab 8192 \\
        --out runs/data/proxy

from files in which an `<|endoftext|>` line separates the articles. They are not in the repository.
`sodaopt data wikipedia` builds text from the same sources, but with other bytes, so losses on it
differ from those below. The studies of nano are on [a page of their own](results-nano.md).
"""

NANO_HEAD = """# Results at nano

These are the studies at nano: 262k parameters, the text that is part of the package, and one CPU
core for each run. `sodaopt reproduce NAME --scale nano` runs them, and `make results` writes this
page. The verdicts are on [the page of results](results.md#claims), beside those of a larger model.
"""


def measured() -> Measured:
    found: Measured = {scale: {} for scale in SHOWN}
    for numbers in map(read, sorted((ROOT / "results").glob("*.json"))):
        found[numbers["scale"]][numbers["study"]] = numbers
    for (study, row), same in SHARED.items():
        _share(found["proxy"][study], row, same)
    return found


def _share(numbers: Numbers, row: str | None, same: str) -> None:
    """Say that the runs of a row are those of the study `muon`, so that they are not missing."""
    del numbers["planned"][row]
    note = f"The runs of {row} are the {same} runs of the study `muon`."
    numbers["notes"] = [*numbers.get("notes", []), note]


def compared(claim: Claim, scale: str, studies: Measured) -> dict[str, Any] | None:
    """The difference of the claim's columns, or None if it is not measured."""
    return difference(claim.study, claim.label(scale), (claim.one, claim.other), scale, studies)


def difference(
    study: str, row: str | None, pair: tuple[str, str], scale: str, studies: Measured
) -> dict[str, Any] | None:
    """The difference of two columns in a row of a study, or None if it is not measured."""
    if scale == "proxy" and (same := SHARED.get((study, row))):
        study, row = "muon", same
    numbers = studies[scale].get(study)
    cells = [c for c in numbers["cells"] if c["row"] == row] if numbers else []
    return next(iter(differences(cells, [pair], primary=0)), None)


def verdict(d: dict[str, Any]) -> str:
    if d["n"] < LEAST or d["low"] <= 0 <= d["high"]:
        return UNDECIDED
    return HOLDS if d["high"] < 0 else FAILS


def number(d: dict[str, Any]) -> str:
    """'-0.0060 (-0.0081 to -0.0039)'"""
    ends = "" if d["low"] is None else f" ({d['low']:+.4f} to {d['high']:+.4f})"
    return f"{d['mean']:+.4f}{ends}"


def with_seeds(d: dict[str, Any]) -> str:
    """'-0.0060 (-0.0081 to -0.0039), n = 6'"""
    return f"{number(d)}, n = {d['n']}"


def claims(found: Sequence[Claim], studies: Measured) -> str:
    """The table of some claims. Other pages link to a row by the claim's name."""
    needed, lines = minutes(studies), []
    for claim in found:
        line = [f'<a id="{claim.name}"></a>{claim.text}']
        for scale in SHOWN:
            d = compared(claim, scale, studies)
            time = f"{needed[claim.study]:.0f} min" if scale == "proxy" else ""
            line += [verdict(d), with_seeds(d)] if d else ["not measured", time]
        lines.append(line)
    return table(["claim", *(w for scale in SHOWN for w in (scale, "difference"))], lines)


def section(source: str, studies: Measured) -> str:
    """A table and a figure of the claims of one source."""
    figure = f"![Differences with 95 % intervals](figures/claims-{source}.svg)"
    text = claims([claim for claim in CLAIMS if claim.source == source], studies)
    return f"### {TABLES[source]}\n\n{text}\n\n{figure}"


def disagreements(studies: Measured) -> str:
    """Name the claims that hold at one size and fail at the other."""
    found = []
    for claim in CLAIMS:
        known = [d for scale in SHOWN if (d := compared(claim, scale, studies))]
        if {HOLDS, FAILS} <= {verdict(d) for d in known}:
            found.append(f"- [{claim.text}](#{claim.name})")
    if not found:
        return "No claim holds at one size and fails at the other."
    text = "These claims hold at one size and fail at the other:"
    return "\n".join(["### Where the sizes disagree", "", text, "", *found])


def default_rule(studies: Measured) -> str:
    """Apply the rule that was set for the default of `decay`."""
    named = {claim.name: claim for claim in CLAIMS}
    lines = [
        [f"[{claim.text}](#{claim.name})", verdict(d) if d else "not measured"]
        for claim in (named[name] for name in PRIMARY)
        for d in [compared(claim, "proxy", studies)]
    ]
    against = [(named[name], scale) for name in AGAINST_UNIFORM for scale in SHOWN]
    gaps = {(claim, scale): d["mean"] for claim, scale in against
            if (d := compared(claim, scale, studies))}  # fmt: skip
    (claim, scale), gap = max(gaps.items(), key=lambda item: item[1])
    worst = f"[{claim.text}](#{claim.name}), {scale}: {gap:+.4f}"
    wins = all(line[1] == HOLDS for line in lines) and gap <= TOLERANCE
    winner = "the coupled pull" if wins else "the paper's pull"
    outcome = f"By this rule, the default is {winner}."
    text = (
        "## The default of `decay`\n\nThe rule was set before the runs. The coupled pull becomes "
        "the default if it wins every primary comparison below at the proxy scale, and if it is "
        f"nowhere worse than the paper's pull by more than {TOLERANCE}."
    )
    return f"{text} {outcome}\n\n{table(['primary comparison', 'verdict'], lines)}\n\n" + (
        "The largest difference of the coupled pull to the paper's pull in "
        f"{len(gaps)} comparisons is that of {worst}."
    )


def minutes(studies: Measured) -> dict[str, float]:
    """The GPU minutes that each study of the proxy scale still needs."""
    speed = seconds_per_flop(studies["proxy"].values())
    todo = missing(studies["proxy"])
    return {study: sum(map(flops, runs)) * speed / 60 for study, runs in todo.items()}


def gpu_time(studies: Measured) -> str:
    """The table of the GPU time that is still needed at the proxy scale."""
    needed, runs = minutes(studies), missing(studies["proxy"])
    lines = [
        [f"`{study}`", STUDIES[study].title, str(len(runs[study])), f"{time:.0f}"]
        for study, time in needed.items()
        if runs[study]
    ]
    total = ["all", "", str(sum(map(len, runs.values()))), f"{sum(needed.values()):.0f}"]
    text = (
        "## Still to measure\n\nThe table counts the runs that the studies plan at the proxy scale "
        "and that are not done. A run that two studies share counts once. The minutes are those of "
        "one H200, at the median speed of the measured runs."
    )
    return f"{text}\n\n{table(['study', '', 'runs', 'GPU minutes'], [*lines, total])}"


def figures() -> dict[Path, list[Claim]]:
    """The claims of each figure."""
    named = {claim.name: claim for claim in CLAIMS}
    found = {FIGURES / "results-claims.svg": [named[name] for name in HEADLINE]}
    by_source = {s: [claim for claim in CLAIMS if claim.source == s] for s in TABLES}
    return found | {FIGURES / f"claims-{s}.svg": some for s, some in by_source.items()}


def draw(path: Path, found: Sequence[Claim], studies: Measured) -> None:
    """Draw the intervals of claims. The metadata holds their table, which a test compares."""
    import matplotlib.pyplot as plt
    from matplotlib import style

    colors = {HOLDS: "tab:green", UNDECIDED: "tab:gray", FAILS: "tab:red"}
    with style.context("sodaopt.figures"):
        figure, panels = plt.subplots(
            1, len(SHOWN), figsize=(10, 0.26 * len(found) + 1), sharey=True, layout="constrained"
        )
        for axes, (scale, about) in zip(panels, SHOWN.items(), strict=True):
            for y, claim in enumerate(found):
                if d := compared(claim, scale, studies):
                    color = colors[verdict(d)]
                    if d["low"] is not None:
                        axes.plot([d["low"], d["high"]], [y, y], color=color)
                    axes.plot(d["mean"], y, "o", color=color, markersize=4)
            axes.axvline(0, color="black", linewidth=0.8)
            axes.set_title(f"{scale}: {about}", fontsize="small")
            axes.set_xlabel("difference of losses")
        panels[0].set_yticks(range(len(found)), [claim.text for claim in found])
        panels[0].set_ylim(len(found) - 0.5, -0.5)
        figure.suptitle("left of zero: the claim's first variant is better", fontsize="medium")
        figure.savefig(path, metadata={"Description": claims(found, studies), "Date": None})
        plt.close(figure)


def along_rows(studies: Measured) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The first pair of each study over lengths, sizes or learning rates, by study and scale."""
    return {
        (study, scale): [
            d | {"row": row.label}
            for row in STUDIES[study].rows(SCALES[scale])
            if (d := difference(study, row.label, STUDIES[study].pairs[0], scale, studies))
        ]
        for study in AXES
        for scale in SHOWN
    }


def draw_rows(studies: Measured) -> None:
    """Draw how a difference changes over lengths, sizes and learning rates."""
    import matplotlib.pyplot as plt
    from matplotlib import style

    found = along_rows(studies)
    with style.context("sodaopt.figures"):
        figure, panels = plt.subplots(
            len(SHOWN), len(AXES), figsize=(9, 2.6 * len(SHOWN)), layout="constrained"
        )
        for axes, ((study, scale), gaps) in zip(panels.T.flat, found.items(), strict=True):
            for x, d in enumerate(gaps):
                if d["low"] is not None:
                    axes.plot([x, x], [d["low"], d["high"]], color="tab:blue")
                axes.plot(x, d["mean"], "o", color="tab:blue", markersize=4)
            axes.axhline(0, color="black", linewidth=0.8)
            labels = [re.sub("^(width|lr) ", "", d["row"]) for d in gaps]
            axes.set_xticks(range(len(gaps)), labels)
            axes.set_xmargin(0.15)
            axes.set_title(f"{scale}: {AXES[study]}", fontsize="small")
        for axes in panels[:, 0]:
            axes.set_ylabel("difference of losses")
        figure.savefig(ROWS, metadata={"Description": str(_rounded(found)), "Date": None})
        plt.close(figure)


def _rounded(found: dict[tuple[str, str], list[dict[str, Any]]]) -> list[str]:
    return [f"{at} {d['row']} {number(d)}" for at, gaps in found.items() for d in gaps]


def rows_section() -> str:
    return (
        "### Other lengths, sizes and learning rates\n\nThe panels show the coupled pull around "
        "Muon, with 95 % intervals. Over lengths and widths it is compared with the weight decay "
        "that was tuned at the standard length and width, and over learning rates with no weight "
        "decay. Below zero the pull is better.\n\n"
        f"![Differences by length, width and learning rate](figures/{ROWS.name})"
    )


def pages() -> dict[Path, str]:
    """The text of the pages that this program writes."""
    studies = measured()
    tables = [section(source, studies) for source in TABLES]
    parts = [HEAD, *tables, rows_section(), disagreements(studies), default_rule(studies)]
    parts += [gpu_time(studies), DATA]
    own = {PAGE: [*parts, *map(markdown, studies["proxy"].values())],
           NANO_PAGE: [NANO_HEAD, *map(markdown, studies["nano"].values())]}  # fmt: skip
    return {page: "\n\n".join(text.rstrip() for text in own[page]) + "\n" for page in own}


def citing() -> list[Path]:
    """The pages that may cite claims."""
    return [ROOT / "README.md", *DOCS.rglob("*.md")]


def with_claims(page: Path) -> str:
    """The text of a page with its claims filled in, each as a link to its row.

    `<!-- NAME -->...<!-- end -->` becomes the difference of the claim NAME with its interval,
    `<!-- NAME n -->...<!-- end -->` the same with the number of seeds, and
    `<!-- NAME verdict -->...<!-- end -->` the verdict of the claim. NAME@nano stands for the claim
    at nano.
    """
    studies, known = measured(), {claim.name: claim for claim in CLAIMS}
    kinds = {"": number, " n": with_seeds, " verdict": lambda d: verdict(d).strip("*")}
    results = Path(os.path.relpath(PAGE, page.parent)).as_posix()

    def fill(match: re.Match[str]) -> str:
        name, scale, kind = match[1], match[2] or "", match[3] or ""
        d = compared(known[name], scale.lstrip("@") or "proxy", studies)
        text = "not measured" if d is None else kinds[kind](d)
        return f"<!-- {name}{scale}{kind} -->[{text}]({results}#{name})<!-- end -->"

    old = page.read_text(encoding="utf-8")
    return re.sub(
        r"<!-- (?!end )([\w-]+)(@\w+)?( n| verdict)? -->.*?<!-- end -->", fill, old, flags=re.DOTALL
    )


if __name__ == "__main__":
    for path, found in figures().items():
        draw(path, found, measured())
    draw_rows(measured())
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")
    for page in citing():
        page.write_text(with_claims(page), encoding="utf-8")
    print(f"{PAGE} and the claims of the other pages are up to date")
