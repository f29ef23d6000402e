"""Write the tables and the chart of steps in docs/performance.md and README.md from the results.

    python -m benchmarks.steps [--steps FILE] [--peers FILE] [--scaling FILE]

FILE is a bench.json of `sodaopt bench`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.records import RESULTS
from sodaopt.lab.bench import draw_scaling
from tools.pages import DOCS, filled, markdown

PAGE, README = DOCS / "performance.md", DOCS.parent / "README.md"
TABLES = {"steps": RESULTS / "steps-h200.json", "peers": RESULTS / "peers-h200.json"}
SCALING, VERSIONS = RESULTS / "scaling-h200.json", RESULTS / "trees-h200.json"
FIGURE = DOCS / "figures" / "performance-scaling.svg"
COLUMNS = {
    "step, ms": "ms",
    "floor, ms": "floor_ms",
    "host, ms": "host_ms",
    "state": "state",
    "peak": "peak",
    "first step, s": "first_step_s",
}


def table(file: Path) -> str:
    result = json.loads(file.read_text())
    lines = [["optimizer", "parameters", *COLUMNS]]
    for row in result["rows"]:
        numbers = ["" if row.get(c) is None else f"{row[c]:.2f}" for c in COLUMNS.values()]
        lines.append([row["optimizer"], row["model"], *numbers])
    head = (
        f"{result['device']}, torch {result['torch']}, {result['date']}; a copy reaches "
        f"{result['copy_tb_per_s']} TB/s and a product {result['product_tflop_per_s']} TFLOP/s:"
    )
    return f"{head}\n\n{markdown(lines)}"


def muons(file: Path) -> str:
    """Return a table of the time of one step of Muon by library, fastest first."""
    times: dict[str, dict[str, float]] = {}
    for row in json.loads(file.read_text())["rows"]:
        library, is_muon, _ = row["optimizer"].partition("Muon")
        if is_muon or row["optimizer"] == "muon":
            name = library.removesuffix("'s ").strip() if is_muon else "**sodaopt**"
            times.setdefault(name, {})[row["model"]] = row["ms"]
    models = list(next(iter(times.values())))
    lines = sorted(times.items(), key=lambda item: item[1][models[-1]])
    head = ["one step of Muon", *(f"{model.upper()} parameters" for model in models)]
    return markdown(
        [head, *([name, *(f"{ms:.1f} ms" for ms in by.values())] for name, by in lines)]
    )


def versions(file: Path) -> str:
    """Return a table of a step of version 0.1 and of this version, measured in one run."""
    result = json.loads(file.read_text())
    lines = [["one step", "0.1, ms", "now, ms", "now / 0.1"]]
    for row, by in result["rows"].items():
        old, now = by["0.1"]["ms"], by["now"]["ms"]
        lines.append([row, f"{old:.2f}", f"{now:.2f}", f"{now / old:.2f}"])
    head = f"{result['device']}, torch {result['torch']}, the best of {result['turns']} turns:"
    return f"{head}\n\n{markdown(lines)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    files = TABLES | {"scaling": SCALING}
    for name in files:
        parser.add_argument(f"--{name}", type=Path)
    for name, file in vars(parser.parse_args()).items():
        if file:
            files[name].write_text(file.read_text())
    for name, file in TABLES.items():
        PAGE.write_text(filled(PAGE, name, table(file)), encoding="utf-8")
    PAGE.write_text(filled(PAGE, "versions", versions(VERSIONS)), encoding="utf-8")
    README.write_text(filled(README, "speed", muons(TABLES["peers"])), encoding="utf-8")
    draw_scaling(json.loads(SCALING.read_text())["rows"], FIGURE)


if __name__ == "__main__":
    main()
