"""sodaopt: the optimizers of "Optimistic Dual Averaging Unifies Modern Optimizers" for PyTorch."""

from . import anchors, geometry, init, schedules, views, zoo
from .averages import GPA, SNOO, Lookahead, ScheduleFree
from .checkpoints import continue_from, export
from .groups import RECIPES, Plan, hidden, param_groups, plan
from .memory import Memory, memory
from .method import Method
from .template import SODA
from .wrapper import SODAWrapper

__version__ = "0.1.0"

__all__ = [
    "GPA", "RECIPES", "SNOO", "SODA", "Lookahead", "Memory", "Method", "Plan", "SODAWrapper",
    "ScheduleFree", "__version__", "anchors", "continue_from", "export", "geometry", "hidden",
    "init", "memory", "param_groups", "plan", "schedules", "views", "zoo",
]  # fmt: skip
