"""sodaopt: the optimizers of "Optimistic Dual Averaging Unifies Modern Optimizers" for PyTorch."""

from . import geometry, schedules, zoo
from .method import Method
from .template import SODA

__version__ = "0.1.0"

__all__ = ["SODA", "Method", "__version__", "geometry", "schedules", "zoo"]
