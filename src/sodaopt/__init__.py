"""sodaopt: the optimizers of "Optimistic Dual Averaging Unifies Modern Optimizers" for PyTorch."""

from sodaopt import anchors, geometry, schedules, zoo
from sodaopt.anchors import init
from sodaopt.core.method import Method
from sodaopt.core.optimizer import SODA
from sodaopt.factory import names, optimizer
from sodaopt.geometry import views
from sodaopt.layers.plan import RECIPES, Plan, hidden, param_groups, plan
from sodaopt.memory import Memory, memory
from sodaopt.wrappers.averages import GPA, SNOO, Lookahead, ScheduleFree
from sodaopt.wrappers.migrate import continue_from, export
from sodaopt.wrappers.soda import SODAWrapper

__version__ = "0.1.0"

__all__ = [
    "GPA", "RECIPES", "SNOO", "SODA", "Lookahead", "Memory", "Method", "Plan", "SODAWrapper",
    "ScheduleFree", "__version__", "anchors", "continue_from", "export", "geometry", "hidden",
    "init", "memory", "names", "optimizer", "param_groups", "plan", "schedules", "views", "zoo",
]  # fmt: skip
