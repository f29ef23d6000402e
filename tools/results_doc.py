"""Write docs/results.md from the measurements of `sodaopt reproduce` in results/.

python -m tools.results_doc
"""

from __future__ import annotations

from pathlib import Path

from sodaopt.lab.results import page, read

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results.md"

HEAD = """# Results

This page shows the measurements of `sodaopt reproduce`. `make results` writes it from the files
under `results/`. Losses are compared by a fit of loss = variant + seed, because the same seed gives
the same initial weights and the same batches. Anchored rows use their baseline's learning rate, and
only baselines are tuned. The paper's numbers are from a model 18 times the size on other data:
compare the signs, not the losses.

The data of the proxy scale are 538 MB of English Wikipedia, tokenised by

    sodaopt data prepare wiki_train_0{0,1,2}.txt.xz --val wiki_val.txt.xz --vocab 8192 \\
        --out runs/data/proxy

from files in which an `<|endoftext|>` line separates the articles.

## Findings so far

- A pull on hidden layers that falls with the learning rate ends below Muon with a tuned weight
  decay, in the mean of six seeds, and both intervals exclude zero. The paper's pull, which goes on
  to the end, is between the two: its paired interval includes zero. On all layers, the pull that
  falls with the learning rate ends above Muon with a tuned weight decay.
- The wrapper around Muon, on hidden layers, ends below Muon without weight decay, as in the paper.
  Hidden layers alone are better than all layers, as in the paper. Both intervals exclude zero.
- On all layers the wrapper around Muon ends above Muon at this size. In the paper it helped.
- Around uScion, on hidden or on all layers, three seeds show no difference to uScion: the intervals
  include zero. On hidden layers there is none to Scion, which decays, either.
"""


def text() -> str:
    files = sorted((ROOT / "results").glob("*.json"))
    return page([read(file) for file in files], HEAD)


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
    print(f"{PAGE} is up to date")
