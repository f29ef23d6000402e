"""Write the tables and the chart of steps in docs/performance.md from benchmarks/results.

    python -m benchmarks.steps [--steps FILE ...] [--scaling FILE]

FILE is a bench.json of `sodaopt bench`. The rows of several files become one result.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.pages import DOCS, RESULTS, filled, markdown
from sodaopt.lab.bench import draw_scaling

PAGE = DOCS / "performance.md"
STEPS, SCALING = RESULTS / "steps-h200.json", RESULTS / "scaling-h200.json"
FIGURE = DOCS / "figures" / "performance-scaling.svg"
COLUMNS = {
    "step, ms": "ms",
    "floor, ms": "floor_ms",
    "host, ms": "host_ms",
    "state": "state",
    "peak": "peak",
    "first step, s": "first_step_s",
}


def joined(files: list[Path]) -> dict[str, Any]:
    """The first file's result, with the rows of all files."""
    results = [json.loads(file.read_text()) for file in files]
    return results[0] | {"rows": [row for result in results for row in result["rows"]]}


def page() -> str:
    result = json.loads(STEPS.read_text())
    lines = [["optimizer", "parameters", *COLUMNS]]
    for row in result["rows"]:
        numbers = ["" if row.get(c) is None else f"{row[c]:.2f}" for c in COLUMNS.values()]
        lines.append([row["optimizer"], row["model"], *numbers])
    head = (
        f"{result['device']}, torch {result['torch']}, {result['date']}; a copy reaches "
        f"{result['copy_tb_per_s']} TB/s and a product {result['product_tflop_per_s']} TFLOP/s:"
    )
    return filled(PAGE, "steps", f"{head}\n\n{markdown(lines)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=Path, nargs="*", default=[])
    parser.add_argument("--scaling", type=Path)
    args = parser.parse_args()
    if args.steps:
        STEPS.write_text(json.dumps(joined(args.steps), indent=1) + "\n")
    if args.scaling:
        SCALING.write_text(args.scaling.read_text())
    PAGE.write_text(page(), encoding="utf-8")
    if SCALING.exists():
        draw_scaling(json.loads(SCALING.read_text())["rows"], FIGURE)


if __name__ == "__main__":
    main()
