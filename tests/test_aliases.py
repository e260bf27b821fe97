"""Names that settings have elsewhere get a suggestion; numbers and epochs are taken as people write them."""

import dataclasses
import inspect
import json

import pytest
import transformers
from folders import label_rows, model_folder, refused, tezo, train, write_rows
from typer.main import get_command

import tezo as library
from tezo.cli.main import app
from tezo.errors import RequestError
from tezo.training.api import train as train_in_python
from tezo.training.configuration.aliases import ALIASES, OPTIONS, keys_by_name

KEYS = {key for keys in keys_by_name().values() for key in keys}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    root = tmp_path_factory.mktemp("home")
    model_folder(root, "opt")
    write_rows(root / "rows.jsonl", label_rows(20))
    return root


def options_of(command: str) -> set[str]:
    return {option for parameter in get_command(app).commands[command].params for option in parameter.opts}


def test_every_alias_stands_for_something_that_is_there():
    for name, meant in ALIASES.items():
        key = meant.partition("=")[0]
        assert key in KEYS or key in options_of("train"), name
        assert name not in keys_by_name(), f"{name} is a setting itself"
        option = f"--{name.replace('_', '-')}"
        assert meant == option or option not in options_of("train"), f"{name} is an option itself"
    assert set(OPTIONS) <= KEYS and set(OPTIONS.values()) <= options_of("train")


def test_names_of_transformers_are_its_own():
    names = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    listed = list(ALIASES)
    own = listed[: listed.index("resume_from_checkpoint") + 1]
    assert set(own) - names == {"early_stopping_patience"}  # of its callback
    assert "early_stopping_patience" in inspect.signature(transformers.EarlyStoppingCallback).parameters


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--set", "lr=1e-4"], ["lr: there is no such key. Did you mean method.lr (or --lr)?"]),
        (["--set", "method.learning_rate=1"], ["method.learning_rate", "Did you mean method.lr (or --lr)?"]),
        (["--set", "train.lr=1"], ["train.lr", "Did you mean method.lr (or --lr)?"]),
        (["--set", "epochs=3"], ["Did you mean train.epochs?"]),
        (["--set", "seed=3"], ["Did you mean data.seed or train.seed?"]),
        (["--set", "train.bf16=true"], ["Did you mean model.dtype=bfloat16?"]),
        (["--set", "method.zo_eps=1"], ["Did you mean method.rho?"]),
        (["--learning-rate", "1e-4"], ["--learning-rate", "Did you mean --lr?"]),
        (["--learning_rate=1e-4"], ["--learning_rate", "Did you mean --lr?"]),
        (["--batch-size", "8"], ["--batch-size", "Did you mean --set train.batch_size=VALUE?"]),
        (["--num-steps", "8"], ["--num-steps", "Did you mean --steps?"]),
        (["--epochs", "8"], ["--epochs", "Did you mean --set train.epochs=VALUE?"]),
        (["--output-dir", "x"], ["--output-dir", "Did you mean --output?"]),
        (["--load-in-4bit"], ["Did you mean --quantization nf4?"]),
        (["--steps", "many"], ["train.steps is 'many'", "a whole number"]),
        (["--steps", "1e-3"], ["train.steps is 0.001", "a whole number"]),
        (["--set", "train.epochs=0"], ["train.epochs is 0", "positive"]),
        (["--set", "train.epochs=7", "--steps", "5"], ["train.steps is 5", "train.epochs 7", "leave one out"]),
    ],
)
def test_a_foreign_name_gets_a_suggestion(home, tmp_path, flags, parts):
    base = ("--model", home / "opt", "--data", home / "rows.jsonl", "--output", tmp_path / "out")
    refused(tezo("train", *base, *flags), *parts)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["predict", "eval"])
def test_other_commands_with_settings_suggest_too(home, tmp_path, command):
    refused(tezo(command, home / "opt", "--max-seq-length", 8), "--set data.max_length=VALUE")


def test_python_suggests_its_own_names():
    for name, own in (("learning_rate", "'lr'"), ("num_train_epochs", "'epochs'"), ("model_name_or_path", "'model'")):
        with pytest.raises(RequestError, match=f"{name}: there is no such setting. Did you mean {own}"):
            library.train("folder", "rows.jsonl", **{name: 1})
    with pytest.raises(RequestError, match=r"stepps: there is no such setting. Did you mean 'steps'"):
        train_in_python("folder", "rows.jsonl", stepps=1)


def test_whole_numbers_may_be_written_with_an_exponent(home, tmp_path):
    done = train(home / "opt", home / "rows.jsonl", tmp_path / "run", "--json", steps="3e0", train__batch_size="4e0")
    assert json.loads(done.out)["steps"] == 3, done.err


def test_epochs_are_passes_over_the_training_rows_and_a_run_of_them_goes_on(home, tmp_path):
    flags = ("--model", home / "opt", "--data", home / "rows.jsonl", "--output", tmp_path / "run", "--json")
    settings = ("train.epochs=1.5", "train.batch_size=4", "method.lr=0.01", "data.hold_out=0.1")
    flags = (*flags, *(part for setting in settings for part in ("--set", setting)))
    done = tezo("train", *flags)
    assert json.loads(done.out)["steps"] == 7, "1.5 x 18 rows, by 4, rounded up"
    assert json.loads(tezo("train", *flags, "--resume").out)["steps"] == 7
    again = tezo("train", tmp_path / "run/config.yaml", "--output", tmp_path / "again", "--json")
    assert json.loads(again.out)["after"] == json.loads(done.out)["after"], again.err
