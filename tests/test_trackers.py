"""`--report-to`: what a tracker has is what the run folder has."""

import importlib.util
import json

import pytest
from folders import label_rows, model_folder, refused, train, write_rows

REPORTED = {"loss": "train/loss", "lr": "train/learning_rate"}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    root = tmp_path_factory.mktemp("home")
    model_folder(root, "opt")
    write_rows(root / "rows.jsonl", label_rows(20))
    return root


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="needs tensorboard")
def test_tensorboard_has_the_curves_of_the_run(home, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags = ("--report-to", "tensorboard")
    done = train(
        home / "opt", home / "rows.jsonl", tmp_path / "run", *flags, steps=6, train__log_every=2, train__eval_every=3
    )
    assert done.code == 0, done.err
    (events,) = (tmp_path / "run/runs").rglob("events.out.*")
    found = EventAccumulator(str(events.parent)).Reload()
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    for name, tag in REPORTED.items():
        written = [(line["step"], pytest.approx(line[name])) for line in lines if "split" not in line]
        assert [(event.step, event.value) for event in found.Scalars(tag)] == written
        assert len(written) == 3
    # without test rows those of before the first step are the dev rows
    own = [line for line in lines if line.get("split") == "dev" or (line.get("split"), line["step"]) == ("test", 0)]
    dev = [(line["step"], pytest.approx(line["loss"])) for line in own]
    assert [(event.step, event.value) for event in found.Scalars("eval/loss")] == dev
    assert "num_hidden_layers" in found.Tensors("model_config/text_summary")[0].tensor_proto.string_val[0].decode()


@pytest.mark.parametrize("name", ["wandb", "trackio", "azure_ml"])
def test_a_tracker_that_is_not_installed_is_refused_before_the_run(home, tmp_path, name):
    module = {"azure_ml": "azureml"}.get(name, name)
    if importlib.util.find_spec(module) is not None:
        pytest.skip(f"{module} is installed")
    done = train(home / "opt", home / "rows.jsonl", tmp_path / "run", "--report-to", f"tensorboard,{name}")
    refused(done, "report_to", name, "pip install")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("names", "part"), [("tensorbord", "'tensorbord'"), (" ,", "no tracker")])
def test_an_unknown_tracker_is_refused(home, tmp_path, names, part):
    refused(train(home / "opt", home / "rows.jsonl", tmp_path / "run", "--report-to", names), "report_to", part)
    assert not (tmp_path / "run").exists()
