"""Methods of other distributions: known by their names once they are added, and named where they are not."""

import subprocess
import sys

import pytest
from cases import CASES
from folders import label_rows, model_folder, refused, settings, tezo, write_rows
from tiny import lm_loss, tiny_opt, tokens
from torch import nn

import tezo as library
from tezo.methods import BASELINES, BUILT_IN, METHODS, MOVED, add_method, method
from tezo.optim.method import Method
from tezo.system.errors import RequestError


def doubled(model: nn.Module, *, lr: float = 1e-6, seed: int = 0):
    """Doubled: MeZO with twice the rate."""
    return library.mezo(model, lr=2 * lr, seed=seed)


@pytest.fixture
def added(monkeypatch):
    monkeypatch.setattr("tezo.methods.METHODS", dict(METHODS))
    return Method("doubled", doubled, in_paper=False)


def test_the_distribution_beside_the_library_adds_what_has_moved():
    assert set(MOVED) == {*METHODS, *BASELINES} - set(BUILT_IN)
    assert {name for name in MOVED if name not in BASELINES} <= set(CASES) | {"grzo"}, "the laws of methods enrol them"


def test_an_added_method_has_a_name_and_another_of_that_name_is_refused(added):
    add_method(added)
    add_method(added)  # the same once more
    assert method("doubled") is added
    model, twin = tiny_opt(), tiny_opt()
    for one, optimizer in ((model, method("doubled").build(model, lr=1e-3)), (twin, library.mezo(twin, lr=2e-3))):
        optimizer.step(lm_loss(one, tokens(seed=0)))
    assert all(left.equal(right) for left, right in zip(model.parameters(), twin.parameters(), strict=True))
    with pytest.raises(RequestError, match="'doubled': there is one of this name already"):
        add_method(Method("doubled", library.mezo))
    with pytest.raises(RequestError, match="'tezo': there is one"):
        add_method(Method("tezo", library.mezo))


def test_a_method_that_has_moved_is_named_with_the_way_to_it(tmp_path, monkeypatch):
    monkeypatch.delitem(METHODS, "grzo")
    rows = write_rows(tmp_path / "rows.jsonl", label_rows(8))
    done = tezo("train", "--model", model_folder(tmp_path, "opt"), "--data", rows, "--output", tmp_path / "run",
                *settings(method__name="grzo"))  # fmt: skip
    refused(done, "method.name is grzo", "pip install ./examples/methods")


def test_one_that_cannot_be_loaded_is_a_notice_and_the_others_are_there(tmp_path):
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[tezo.methods]\nbroken = not_there:METHOD\n")
    code = "import tezo; print(len(tezo.METHODS))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={"PYTHONPATH": ":".join([str(tmp_path), *filter(None, sys.path)])},
    )  # fmt: skip
    assert int(done.stdout) == len(METHODS)
    assert "notice: the method broken cannot be loaded (No module named 'not_there')" in done.stderr
