"""Fixtures for the tests of the layer plan."""

import logging
from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Silence transformers, which warns about token ids beyond the tiny vocabularies."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def one_rank(tmp_path) -> Iterator[None]:
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("torch without gloo")
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
