"""A search with Optuna over the optimizer and its learning rate, without a weight decay."""

import optuna
import torch
from torch import nn

import sodaopt

STEPS, TRIALS = 60, 8
x = torch.randn(512, 8, generator=torch.Generator().manual_seed(1))
y = x[:, :1] * x[:, 1:2]


def train(name: str, lr: float) -> float:
    """Return the last loss of a short run."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )
    opt = sodaopt.optimizer(model, name, lr)
    for _ in range(STEPS):
        loss = (model(x) - y).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    return loss.item()


def objective(trial: optuna.Trial) -> float:
    name = trial.suggest_categorical("optimizer", ["soda(adamw)", "soda(lion)"])
    return train(name, trial.suggest_float("lr", 1e-5, 1e-1, log=True))


optuna.logging.set_verbosity(optuna.logging.WARNING)
study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
study.optimize(objective, n_trials=TRIALS)
worst = max(trial.value for trial in study.trials if trial.value is not None)
print(f"best {study.best_params}")
print(f"loss {worst:.4f} -> {study.best_value:.4f}")
