"""What a folder's model is: causal, masked, encoder or classifier, and what is refused."""

import pytest
import torch
import transformers
from folders import (
    label_rows,
    model_folder,
    saved,
    tezo,
    tiny_model,
    tokenizer_for,
    train,
    words_tokenizer,
    write_rows,
)
from torch import nn

from tezo.models.in_memory import from_objects
from tezo.models.loading import load_model


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    root = tmp_path_factory.mktemp("kinds")
    write_rows(root / "rows.jsonl", label_rows(8))
    return root


def classification_folder(root, family="roberta", *, labels=("bad", "fine", "good")):
    """A tiny model with a head that has been trained: its logits differ from row to row."""
    config = tiny_model(family, len(tokenizer_for(family))).config
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: index for index, label in config.id2label.items()}
    with torch.random.fork_rng():
        torch.manual_seed(4)
        model = transformers.AutoModelForSequenceClassification.from_config(config)
    return saved(model, tokenizer_for(family), root)


@pytest.mark.parametrize("head", ["masked", "classification"])
def test_an_encoder_whose_file_has_no_pooler_is_the_same_at_each_load(home, tmp_path, head):
    base = model_folder(home, "roberta") if head == "masked" else classification_folder(tmp_path / "base")
    rows, run = home / "rows.jsonl", tmp_path / "run"
    done = train(base, rows, run, model__kind="encoder", method__targets="[all]", method__rank=2)
    assert done.code == 0, done.err
    assert tezo("eval", run, "--data", rows).code == 0
    assert tezo("predict", run, "--input", rows, "--output", tmp_path / "answers.jsonl").code == 0
    assert tezo("export", run, "--format", "merged", "--output", tmp_path / "merged").code == 0
    (run / "summary.json").unlink()
    assert tezo("train", "--output", run, "--resume").code == 0
    assert done.says("left untrained, since the loss does not depend on them: pooler.dense.weight")
    assert not load_model(str(base), kind="encoder").model.pooler.dense.weight.any()


def test_a_pooler_that_was_drawn_at_random_makes_no_other_model_of_it():
    models = [tiny_model("bert", 100) for _ in range(2)]
    with torch.no_grad():
        models[1].pooler.dense.weight.normal_()
    first, second = (from_objects(model, words_tokenizer(closing=True)).fingerprint for model in models)
    assert first == second
    with torch.no_grad():
        nn.init.normal_(models[1].embeddings.word_embeddings.weight)
    assert from_objects(models[1], words_tokenizer(closing=True)).fingerprint != first
