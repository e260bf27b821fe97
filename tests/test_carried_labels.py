"""A merged model carries its label words, its prompt and its pooling: nobody has to be told them again."""

import json

import pytest
import yaml
from folders import label_rows, model_folder, read_jsonl, refused, tezo, train, write_rows

import tezo as library

WORDS = "{good: fine film, bad: awful meal}"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    root = tmp_path_factory.mktemp("home")
    write_rows(root / "rows.jsonl", label_rows(24))
    write_rows(root / "new.jsonl", [{"text": row["text"]} for row in label_rows(30, seed=5)])
    for family, words in (("bert", WORDS), ("opt", "{good: fresh, bad: stale}")):
        settings = {"data__label_words": words, "data__template": "{text} was" if family == "opt" else None}
        done = train(model_folder(root, family), root / "rows.jsonl", root / f"run-{family}", **settings)
        assert done.code == 0, done.err
        done = tezo("export", root / f"run-{family}", "--format", "merged", "--output", root / f"merged-{family}")
        assert done.code == 0, done.err
    return root


@pytest.mark.parametrize("family", ["bert", "opt"])
def test_a_merged_model_is_measured_and_asked_as_its_run(home, tmp_path, family):
    found = [json.loads(tezo("eval", home / f"{name}-{family}", "--data", home / "rows.jsonl", "--json").out)
             for name in ("run", "merged")]  # fmt: skip
    assert found[1] == {key: pytest.approx(value, rel=1e-4) for key, value in found[0].items()}
    for name in ("run", "merged"):
        flags = ("--input", home / "new.jsonl", "--output", tmp_path / f"{name}.jsonl")
        assert tezo("predict", home / f"{name}-{family}", *flags).code == 0
    for row, other in zip(read_jsonl(tmp_path / "run.jsonl"), read_jsonl(tmp_path / "merged.jsonl"), strict=True):
        assert row.pop("probability") == pytest.approx(other.pop("probability"), rel=1e-3)
        assert row.pop("probabilities") == pytest.approx(other.pop("probabilities"), rel=1e-3)
        assert row == other


@pytest.mark.parametrize("family", ["bert", "opt"])
def test_a_new_run_begins_with_the_labels_and_where_the_old_one_ended(home, tmp_path, family):
    assert train(home / f"merged-{family}", home / "rows.jsonl", tmp_path / "run").code == 0
    before, now = (yaml.safe_load((folder / "config.yaml").read_text())["data"]
                   for folder in (home / f"run-{family}", tmp_path / "run"))  # fmt: skip
    assert (now["label_words"], now["template"]) == (before["label_words"], before["template"])
    old, new = (json.loads((folder / "summary.json").read_text())
                for folder in (home / f"run-{family}", tmp_path / "run"))  # fmt: skip
    assert new["before"] == {key: pytest.approx(value, rel=1e-4) for key, value in old["after"].items()}


def test_labels_that_are_given_count(home, tmp_path):
    flags = {"data__label_words": "{good: warm, bad: cold}", "data__template": "{text} :"}
    assert train(home / "merged-opt", home / "rows.jsonl", tmp_path / "run", **flags).code == 0
    data = yaml.safe_load((tmp_path / "run/config.yaml").read_text())["data"]
    assert (data["label_words"], data["template"]) == ({"good": "warm", "bad": "cold"}, "{text} :")
    rows = write_rows(tmp_path / "rows.jsonl", [*label_rows(12), {"text": "a film", "label": "middling"}])
    refused(train(home / "merged-opt", rows, tmp_path / "x"), "'middling'", "data.label_words")


def test_the_python_export_carries_them_too(home, tmp_path):
    run = library.open_run(home / "run-bert")
    run.model  # noqa: B018 - loaded, so that the export is from memory
    run.export(tmp_path / "merged", "merged")
    names = ("tezo_labels.json", "model.safetensors")
    for name in names:
        assert (tmp_path / "merged" / name).read_bytes() == (home / "merged-bert" / name).read_bytes()
    assert json.loads((tmp_path / "merged/tezo_labels.json").read_text()) == {
        "label_words": {"good": "fine film", "bad": "awful meal"}, "template": None, "pooling": "mean",
        "temperature": run.summary["calibration"]["temperature"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "cannot be read"),
        ('{"label_words": [1]}', "label_words"),
        ('{"label_words": {"a": 1}}', "label_words"),
        ('{"label_words": {"a": "b"}, "template": 3}', "template"),
        ('{"label_words": {"a": "b"}, "pooling": "cls"}', "pooling is 'cls'"),
        ('{"label_words": {"a": "b"}, "temperature": 0.0}', "temperature is not a positive number"),
        ('{"label_words": {"a": "b"}, "temperature": "1"}', "temperature is not a positive number"),
    ],
)
def test_a_damaged_file_of_labels_is_refused(home, tmp_path, text, fault):
    for path in (home / "merged-bert").iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "tezo_labels.json").unlink()
    (tmp_path / "tezo_labels.json").write_text(text)
    refused(tezo("eval", tmp_path, "--data", home / "rows.jsonl"), "tezo_labels.json", fault, "export the run again")


def test_a_field_of_another_name_is_carried_too(tmp_path):
    rows = write_rows(
        tmp_path / "rows.jsonl", [{"sentence": row["text"], "label": row["label"]} for row in label_rows(24)]
    )
    done = train(
        model_folder(tmp_path, "opt"), rows, tmp_path / "run", steps=1, data__text="sentence", data__label_words=WORDS
    )
    assert done.code == 0, done.err
    assert tezo("export", tmp_path / "run", "--format", "merged", "--output", tmp_path / "merged").code == 0
    one, other = (json.loads(tezo("eval", tmp_path / name, "--data", rows, "--json").out) for name in ("run", "merged"))
    assert other == {key: pytest.approx(value, rel=1e-4) for key, value in one.items()}
