"""Helpers for the tests of the layer plan."""

import pytest
from torch import nn

from sodaopt import Plan
from tests.support import models
from tests.support.models import MODELS, make

CONV1D = "Spectral(dense, transposed)"
each_model = pytest.mark.parametrize("name", MODELS)


def model(name: str) -> nn.Module:
    if name in models.HUGGING_FACE:
        pytest.importorskip("transformers")
    return make(name)[0]


def roles(p: Plan) -> dict[str, str]:
    return {row.name: row.role for row in p.rows}
