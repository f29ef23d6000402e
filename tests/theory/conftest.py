import pytest
import torch

from sodaopt.theory import study


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    """Run on one thread: the variables are small, and more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def anchor_study():
    """The anchor experiments, run once in this process."""
    *_, (_, done) = study.run(["anchor"], jobs=1)
    return done
