"""Five rows of the zoo learn to spell: a small next-character model, the same start for each.

The text is this project's licence, so that nothing has to be downloaded. Half a minute on a laptop.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import Tensor, nn

from sodaopt import SODA, Method, zoo
from sodaopt.geometry import Sign, Spectral, rms

STEPS, BATCH, CONTEXT, WIDTH = 400, 256, 16, 128
TEXT = Path(__file__).parents[1].joinpath("LICENSE").read_text()

# (row for the hidden matrices, row for the rest, lr): a matrix method needs matrices
ADAM = zoo.adam((0.9, 0.95))
ROWS: dict[str, tuple[Method, Method, float]] = {
    "adamw": (zoo.adamw(), zoo.adamw(), 2**-8),
    "lion": (zoo.lion(), zoo.lion(), 2**-10),
    "muon": (zoo.muon(scale=rms), ADAM, 2**-9),
    "soda(muon)": (zoo.soda(zoo.muon(scale=rms)), ADAM, 2**-9),
    "soda_dagger": (zoo.soda_dagger(Spectral(), 4.0), zoo.soda_dagger(Sign(), 16.0), 2**-7),
}


class Speller(nn.Module):
    """The last CONTEXT characters, embedded, through two hidden layers, to the next one."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, 32)
        self.hidden = nn.ModuleList(
            [nn.Linear(32 * CONTEXT, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)]
        )
        self.head = nn.Linear(WIDTH, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids).flatten(1)
        for layer in self.hidden:
            h = torch.relu(layer(h))
        return self.head(h)


def train(hidden: Method, rest: Method, lr: float) -> tuple[float, float, float]:
    """Validation loss, milliseconds a step of the optimizer, state over parameters."""
    torch.manual_seed(0)
    letters = sorted(set(TEXT))
    ids = torch.tensor([letters.index(c) for c in TEXT])
    windows = ids.unfold(0, CONTEXT + 1, 1)
    held_out, seen = windows[::10], windows[torch.arange(len(windows)) % 10 != 0]
    model = Speller(len(letters))
    groups = [
        {"params": list(model.hidden.parameters()), "method": hidden},
        {"params": [model.embed.weight, model.head.weight], "method": rest},
    ]
    opt = SODA(groups, lr)
    warmdown = torch.optim.lr_scheduler.LambdaLR(opt, lambda k: min(1.0, 2 * (1 - k / STEPS)))
    seconds = 0.0
    for _ in range(STEPS):
        batch = seen[torch.randint(len(seen), (BATCH,))]
        loss = nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, -1])
        opt.zero_grad()
        loss.backward()
        start = time.perf_counter()
        opt.step()
        seconds += time.perf_counter() - start
        warmdown.step()
    with torch.no_grad():
        value = nn.functional.cross_entropy(model(held_out[:, :-1]), held_out[:, -1])
    state = sum(t.numel() for s in opt.state.values() for t in s.values() if t.dim())
    return float(value), 1e3 * seconds / STEPS, state / sum(p.numel() for p in model.parameters())


def main() -> None:
    print(f"{STEPS} steps of next-character prediction on {len(TEXT)} characters\n")
    print(f"{'optimizer':<12} {'lr':>7} {'held-out loss':>14} {'ms/step':>8} {'state/params':>13}")
    for name, (hidden, rest, lr) in ROWS.items():
        loss, ms, state = train(hidden, rest, lr)
        print(f"{name:<12} {lr:>7.4f} {loss:>14.4f} {ms:>8.2f} {state:>13.2f}", flush=True)
    print("\nOne seed, learning rates picked from powers of two: a look, not a benchmark.")


if __name__ == "__main__":
    main()
