"""Five optimizers learn to spell: a small next-character model, the same start for each.

The text is this project's licence, so that nothing has to be downloaded. Half a minute on a laptop.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import Tensor, nn

from sodaopt import SODA, param_groups, plan

STEPS, BATCH, CONTEXT, WIDTH = 300, 256, 16, 128
TEXT = Path(__file__).parents[1].joinpath("LICENSE").read_text()

# recipe and learning rate, each the best of a grid of powers of two (--tune runs the grid)
RECIPES = {
    "adamw": 2**-7,
    "lion": 2**-9,
    "muon": 2**-9,
    "soda(muon)": 2**-9,
    "soda_dagger": 2**-11,
}


class Speller(nn.Module):
    """The last CONTEXT characters, embedded, through two hidden layers, to the next one."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, 32)
        self.layer1 = nn.Linear(32 * CONTEXT, WIDTH, bias=False)
        self.layer2 = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        h = torch.relu(self.layer1(self.embed(ids).flatten(1)))
        return self.head(torch.relu(self.layer2(h)))


def data() -> tuple[Tensor, int]:
    letters = sorted(set(TEXT))
    ids = torch.tensor([letters.index(c) for c in TEXT])
    return ids.unfold(0, CONTEXT + 1, 1), len(letters)


def train(recipe: str, lr: float) -> tuple[float, float, float]:
    """Mean loss of the last 50 steps, milliseconds a step, state over parameters."""
    windows, vocab = data()
    torch.manual_seed(0)
    model = Speller(vocab)
    opt = SODA(param_groups(model, recipe), lr)
    warmdown = torch.optim.lr_scheduler.LambdaLR(opt, lambda k: min(1.0, 2 * (1 - k / STEPS)))
    losses, seconds = [], 0.0
    for _ in range(STEPS):
        batch = windows[torch.randint(len(windows), (BATCH,))]
        loss = nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, -1])
        opt.zero_grad()
        loss.backward()
        start = time.perf_counter()
        opt.step()
        seconds += time.perf_counter() - start
        warmdown.step()
        losses.append(loss.item())
    state = sum(t.numel() for s in opt.state.values() for t in s.values() if t.dim())
    size = sum(p.numel() for p in model.parameters())
    return sum(losses[-50:]) / 50, 1e3 * seconds / STEPS, state / size


def tune() -> None:
    for recipe in RECIPES:
        row = {e: train(recipe, 2.0**e)[0] for e in range(-13, -4)}
        print(f"{recipe:<12}", {e: round(v, 3) for e, v in row.items()}, flush=True)


def main() -> None:
    model = Speller(data()[1])
    print("What soda_dagger does with the model:\n")
    print(plan(model, "soda_dagger"))
    print(f"\n{STEPS} steps of next-character prediction on {len(TEXT)} characters:\n")
    print(f"{'optimizer':<12} {'lr':>7} {'loss':>7} {'ms/step':>8} {'state/params':>13}")
    for recipe, lr in RECIPES.items():
        loss, ms, state = train(recipe, lr)
        print(f"{recipe:<12} {lr:>7.4f} {loss:>7.3f} {ms:>8.2f} {state:>13.2f}", flush=True)
    print("\nTraining loss, one seed, each at the best of a coarse grid of learning rates.")


if __name__ == "__main__":
    import sys

    tune() if "--tune" in sys.argv else main()
