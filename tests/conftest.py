"""What every test runs under: one thread, no cache of the user's, generated examples that repeat."""

import os

import hypothesis
import pytest
import torch

torch.set_num_threads(1)
# of processes that tests start too: on some CPUs the last bits of a product depend on the number of threads
os.environ["OMP_NUM_THREADS"] = "1"

hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, database=None, max_examples=40)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """Layer-wise ranks are kept in a cache folder; tests have one of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEZO_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
