"""Names of no setting get a suggestion; numbers and epochs are taken as people write them."""

import json

import pytest
from folders import label_rows, model_folder, refused, tezo, train, write_rows

import tezo as library
from tezo.system.errors import RequestError


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    root = tmp_path_factory.mktemp("home")
    model_folder(root, "opt")
    write_rows(root / "rows.jsonl", label_rows(20))
    return root


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--set", "lr=1e-4"], ["lr: there is no such key. Did you mean method.lr?"]),
        (["--set", "train.lr=1"], ["train.lr", "Did you mean method.lr?"]),
        (["--set", "train.batchsize=1"], ["train.batchsize", "Did you mean 'batch_size'?"]),
        (["--set", "epochs=3"], ["Did you mean train.epochs?"]),
        (["--set", "train.num_train_epochs=3"], ["Did you mean train.epochs?"]),
        (["--set", "train.learning_rate=1"], ["Did you mean method.lr?"]),
        (["--set", "seed=3"], ["Did you mean data.seed or train.seed?"]),
        (["--steps", "many"], ["train.steps is 'many'", "a whole number"]),
        (["--steps", "1e-3"], ["train.steps is 0.001", "a whole number"]),
        (["--set", "train.epochs=0"], ["train.epochs is 0", "positive"]),
        (["--set", "train.epochs=7", "--steps", "5"], ["train.steps is 5", "train.epochs 7", "leave one out"]),
    ],
)
def test_an_unknown_name_gets_a_suggestion(home, tmp_path, flags, parts):
    base = ("--model", home / "opt", "--data", home / "rows.jsonl", "--output", tmp_path / "out")
    refused(tezo("train", *base, *flags), *parts)
    assert not (tmp_path / "out").exists()


OF_TRANSFORMERS = {
    "num_train_epochs": "epochs", "max_steps": "steps", "learning_rate": "lr", "eval_steps": "eval_every",
    "per_device_train_batch_size": "batch_size", "per_device_eval_batch_size": "eval_batch_size",
}  # fmt: skip


def test_python_suggests_its_own_names():
    misspelt = {"stepps": "steps", "batchsize": "batch_size", "dat": "data"}
    for name, own in (misspelt | OF_TRANSFORMERS).items():
        with pytest.raises(RequestError, match=f"{name}: there is no such setting. Did you mean '{own}'"):
            library.train("folder", "rows.jsonl", **{name: 1})


def test_whole_numbers_may_be_written_with_an_exponent(home, tmp_path):
    done = train(home / "opt", home / "rows.jsonl", tmp_path / "run", "--json", steps="3e0", train__batch_size="4e0")
    assert json.loads(done.out)["steps"] == 3, done.err


def test_epochs_are_passes_over_the_training_rows_and_a_run_of_them_goes_on(home, tmp_path):
    flags = ("--model", home / "opt", "--data", home / "rows.jsonl", "--output", tmp_path / "run", "--json")
    settings = ("method.name=tezo", "train.epochs=1.5", "train.batch_size=4", "method.lr=0.01", "data.hold_out=0.1")
    flags = (*flags, *(part for setting in settings for part in ("--set", setting)))
    done = tezo("train", *flags)
    assert json.loads(done.out)["steps"] == 7, "1.5 x 18 rows, by 4, rounded up"
    assert json.loads(tezo("train", *flags, "--resume").out)["steps"] == 7
    again = tezo("train", tmp_path / "run/config.yaml", "--output", tmp_path / "again", "--json")
    assert json.loads(again.out)["after"] == json.loads(done.out)["after"], again.err
