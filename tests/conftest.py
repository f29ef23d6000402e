import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _on_the_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frameworks use a GPU if they find one, and tests of equal bits hold on a CPU only."""
    if not request.node.get_closest_marker("gpu"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # for processes that a test starts
        monkeypatch.setenv("JAX_PLATFORMS", "cpu")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
