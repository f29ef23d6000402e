"""Training data: tokenised text in shards, and batches of it."""

from .corpus import open_data
from .dataset import Dataset
from .loader import Loader, Windows, val_batches
from .shards import DataError

__all__ = ["DataError", "Dataset", "Loader", "Windows", "open_data", "val_batches"]
