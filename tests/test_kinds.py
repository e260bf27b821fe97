"""What a folder's model is: causal, masked, encoder or classifier, and what is refused."""

import json
from dataclasses import replace

import pytest
import torch
import transformers
from folders import (
    label_rows,
    model_folder,
    read_jsonl,
    refused,
    saved,
    settings,
    tezo,
    tiny_model,
    tokenizer_for,
    train,
    words_tokenizer,
    write_rows,
)
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from tezo import RequestError, head_feedback
from tezo.models.loading import from_objects, load_model

CLASSES = ("bad", "fine", "good", "superb")  # the tokenizer knows neither the second nor the last


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    root = tmp_path_factory.mktemp("kinds")
    write_rows(root / "rows.jsonl", label_rows(8))
    return root


def classification_folder(root, family="roberta"):
    """A tiny model with a head that has been trained: its logits differ from row to row."""
    config = tiny_model(family, len(tokenizer_for(family))).config
    config.id2label = dict(enumerate(CLASSES))
    config.pad_token_id = None if family == "llama" else config.pad_token_id
    config.label2id = {label: index for index, label in config.id2label.items()}
    with torch.random.fork_rng():
        torch.manual_seed(4)
        model = transformers.AutoModelForSequenceClassification.from_config(config)
    return saved(model, tokenizer_for(family), root)


def _goes_on(run):
    """Whether `--resume` takes the run, made one that was killed before its end."""
    (run / "manifest.json").unlink()
    return tezo("train", "--output", run, "--resume").code == 0


@pytest.mark.parametrize("head", ["masked", "classification"])
def test_an_encoder_whose_file_has_no_pooler_is_the_same_at_each_load(home, tmp_path, head):
    base = model_folder(home, "roberta") if head == "masked" else classification_folder(tmp_path / "base")
    rows, run = home / "rows.jsonl", tmp_path / "run"
    done = train(base, rows, run, model__kind="encoder", method__targets="[all]", method__rank=2)
    assert done.code == 0, done.err
    assert tezo("eval", run, "--data", rows).code == 0
    assert tezo("predict", run, "--input", rows, "--output", tmp_path / "answers.jsonl").code == 0
    assert tezo("export", run, "--format", "merged", "--output", tmp_path / "merged").code == 0
    assert _goes_on(run)
    assert done.says(
        "left untrained, since the loss does not depend on them, or reads them past their modules: pooler.dense"
    )
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


@pytest.mark.parametrize("family", ["roberta", pytest.param("bert", marks=pytest.mark.slow), "llama"])
def test_a_classifier_is_tuned_with_its_own_head(home, tmp_path, family):
    base, rows = classification_folder(tmp_path / "base", family), home / "rows.jsonl"
    loaded = load_model(str(base))
    assert (loaded.kind, loaded.classes) == ("classifier", CLASSES)
    assert load_model(str(base)).fingerprint == loaded.fingerprint
    run = tmp_path / "run"
    done = train(base, rows, run, "--test", rows, "--json", train__keep_best=False)
    assert done.code == 0, done.err
    summary = json.loads(done.out)
    assert not any("same tokens" in notice for notice in summary["notices"])
    before = _by_hand(loaded, read_jsonl(rows))
    assert summary["before"]["loss"] == pytest.approx(before["loss"], abs=1e-5)
    assert summary["before"]["accuracy"] == pytest.approx(before["accuracy"])
    assert summary["before"]["loss"] != summary["after"]["loss"]
    merged = tmp_path / "merged"
    assert tezo("export", run, "--format", "merged", "--output", merged).code == 0
    assert summary["after"]["loss"] == pytest.approx(
        _by_hand(load_model(str(merged)), read_jsonl(rows))["loss"], abs=1e-5
    )
    model = transformers.AutoModelForSequenceClassification.from_pretrained(base)
    tuned = PeftModel.from_pretrained(model, run / "adapter")
    assert _by_hand(replace(loaded, model=tuned), read_jsonl(rows))["loss"] == pytest.approx(
        summary["after"]["loss"], abs=1e-5
    )
    assert tezo("predict", run, "--input", rows, "--output", tmp_path / "answers.jsonl").code == 0
    assert {row["prediction"] for row in read_jsonl(tmp_path / "answers.jsonl")} <= set(CLASSES)
    assert _goes_on(run)


@torch.no_grad()
def _by_hand(loaded, rows):
    """Loss and accuracy by the head's logits, one row at a time."""
    losses, hits = [], []
    for row in rows:
        logits = loaded.model(**loaded.tokenizer(row["text"], return_tensors="pt")).logits[0]
        losses.append(-float(logits.log_softmax(0)[CLASSES.index(row["label"])]))
        hits.append(CLASSES[int(logits.argmax())] == row["label"])
    return {"loss": sum(losses) / len(rows), "accuracy": sum(hits) / len(rows)}


def test_rows_may_name_the_classes_of_a_head_by_index_or_by_words_of_their_own(home, tmp_path):
    base, rows = classification_folder(tmp_path / "base"), read_jsonl(home / "rows.jsonl")
    words = {
        "as they are": {},
        "indices": {},
        "words": {"data__label_words": "{bad: bad, fine: fine, poor: good, superb: superb}"},
    }
    names = {"as they are": {}, "indices": {"good": 2, "bad": 0}, "words": {"good": "poor"}}
    losses = []
    for case, more in words.items():
        given = [row | {"label": names[case].get(row["label"], row["label"])} for row in rows]
        data = write_rows(tmp_path / f"{case}.jsonl", given)
        done = tezo("eval", base, "--data", data, "--json", *settings(**more))
        assert done.code == 0, done.err
        losses.append(json.loads(done.out)["loss"])
    assert losses[0] == losses[1] == losses[2]
    other = write_rows(tmp_path / "other.jsonl", [row | {"label": "awful"} for row in rows])
    refused(tezo("eval", base, "--data", other), "the label 'awful' is unknown", "bad, fine, good, superb")
    refused(
        tezo("eval", base, "--data", other, *settings(data__label_words="{awful: nice, bad: bad}")),
        "data.label_words: 'nice' is not a class of this model's head", "bad, fine, good, superb",
    )  # fmt: skip


@pytest.mark.parametrize("family", ["roberta", pytest.param("bert", marks=pytest.mark.slow)])
def test_a_classifier_takes_feedback_steps_where_its_loss_shows_them(home, tmp_path, family):
    """RoBERTa's head reads the last hidden states; BERT's reads what a pooler inside the encoder made of them."""
    base, rows = classification_folder(tmp_path / "base", family), home / "rows.jsonl"
    done = train(base, rows, tmp_path / "run", "--json", steps=100, train__eval_every=100, method__lr=1e-3)
    assert done.code == 0, done.err
    took = "feedback_first: 5" in (tmp_path / "run/config.yaml").read_text()
    assert took == (family == "roberta")
    assert any("there are no feedback steps" in notice for notice in json.loads(done.out)["notices"]) != took


@pytest.mark.slow
def test_other_methods_and_a_probe_take_a_classifier(home, tmp_path):
    base, rows = classification_folder(tmp_path / "base"), home / "rows.jsonl"
    for number, flags in enumerate(
        (
            {"method__name": "mezo", "method__rank": None, "method__targets": "[all]"},
            {"method__name": "adam", "method__rank": None, "method__lr": 1e-3},
            {"model__peft": "lora", "method__name": "tezo"},
        )
    ):
        run = tmp_path / f"run{number}"
        done = train(base, rows, run, "--test", rows, "--json", **flags)
        assert done.code == 0, done.err
        after = json.loads(done.out)["after"]["loss"]
        assert json.loads(tezo("eval", run, "--json").out)["loss"] == pytest.approx(after, abs=1e-6)
    done = tezo("eval", base, "--probe", *settings(data__train=rows, data__test=rows))
    assert done.code == 0, done.err


COMMON = {"vocab_size": len(words_tokenizer()), "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 1}
BART = {"d_model": 16, "decoder_start_token_id": 2, **{f"{side}_{part}": n for side in ("encoder", "decoder")
        for part, n in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 16))}}  # fmt: skip


def _llava():
    vision = transformers.CLIPVisionConfig(**SMALL, image_size=16, patch_size=8)
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=transformers.LlamaConfig(**SMALL, **COMMON), image_token_index=4
    )
    return transformers.LlavaForConditionalGeneration(config)


def _regression():
    config = tiny_model("roberta", len(words_tokenizer())).config
    config.num_labels = 1
    return transformers.RobertaForSequenceClassification(config)


REFUSED = {
    "t5": (lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5, **COMMON)), "encoder-decoder"),
    "bart-classifier": (
        lambda: transformers.BartForSequenceClassification(transformers.BartConfig(**BART, **COMMON)),
        "encoder-decoder",
    ),
    "llava": (_llava, "takes images or sound"),
    "regression": (_regression, "is for regression"),
    "tokens": (
        lambda: transformers.RobertaForTokenClassification(tiny_model("roberta", len(words_tokenizer())).config),
        "set model.kind",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_of_no_kind_is_refused_in_a_sentence(home, tmp_path, name):
    build, said = REFUSED[name]
    base = saved(build(), words_tokenizer(closing=True), tmp_path / "base")
    refused(train(base, home / "rows.jsonl", tmp_path / "run"), "model.name", said)
    with pytest.raises(RequestError, match=said):
        from_objects(build(), words_tokenizer(closing=True))
    if name in ("t5", "llava"):
        refused(train(base, home / "rows.jsonl", tmp_path / "run", model__kind="encoder"), "model.name", said)


def test_a_head_that_the_file_lacks_is_not_drawn(home, tmp_path):
    base = model_folder(home, "roberta")
    refused(train(base, home / "rows.jsonl", tmp_path / "run", model__kind="classifier"), "lacks", "set model.kind")


def test_a_model_of_images_and_text_may_be_tuned_on_text(home, tmp_path):
    vision = transformers.SiglipVisionConfig(**SMALL, image_size=16, patch_size=8)
    text = transformers.Gemma3TextConfig(**SMALL, **COMMON, num_key_value_heads=1, head_dim=8)
    config = transformers.Gemma3Config(vision_config=vision, text_config=text, mm_tokens_per_image=4)
    base = saved(transformers.Gemma3ForConditionalGeneration(config), words_tokenizer(), tmp_path / "base")
    refused(train(base, home / "rows.jsonl", tmp_path / "run"), "takes images", "model.kind=causal")
    done = train(base, home / "rows.jsonl", tmp_path / "run", model__kind="causal")
    assert done.code == 0, done.err
    assert tezo("eval", tmp_path / "run", "--data", home / "rows.jsonl").code == 0


@pytest.mark.parametrize("whole", [True, False])
def test_a_folder_with_an_adapter_in_it_is_refused(home, tmp_path, whole):
    model, tokenizer = tiny_model("llama", len(words_tokenizer())), words_tokenizer()
    if whole:
        saved(model, tokenizer, tmp_path / "base")
    get_peft_model(model, LoraConfig(r=2)).save_pretrained(tmp_path / "base")
    refused(
        train(tmp_path / "base", home / "rows.jsonl", tmp_path / "run"), "adapter_config.json", "merge_and_unload()"
    )


def test_a_frozen_model_is_refused_in_a_sentence():
    adapted = get_peft_model(tiny_model("llama", 40), LoraConfig(r=2)).requires_grad_(False)
    with pytest.raises(RequestError, match="all parameters of this model and of its adapter are frozen"):
        head_feedback(adapted, basis="gaussian")
    model = tiny_model("llama", 40).requires_grad_(False)
    head_feedback(model, basis="gaussian").close()  # no part is told from another
    model.model.norm.weight.requires_grad_(True)
    with pytest.raises(RequestError, match=r"no linear layer is trainable; .* 'all', or to some of: model, norm"):
        head_feedback(model, basis="gaussian")


def test_a_run_on_a_mixture_of_experts_says_what_is_not_trained(home, tmp_path):
    mixture = {"moe_intermediate_size": 12, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2}
    config = transformers.Qwen3MoeConfig(**SMALL, **COMMON, **mixture, num_key_value_heads=1)
    base = saved(transformers.Qwen3MoeForCausalLM(config), words_tokenizer(), tmp_path / "base")
    done = train(base, home / "rows.jsonl", tmp_path / "run")
    assert done.code == 0, done.err
    assert done.says("not trained, since they are no linear layers' weights: model.layers.0.mlp.experts.gate_up_proj")
    every = train(base, home / "rows.jsonl", tmp_path / "all", method__targets="[all]")
    assert every.code == 0, every.err
    assert not every.says("not trained")


def test_a_run_leaves_untrained_what_the_model_reads_past_its_module(home, tmp_path):
    positions = {"position_buckets": 8, "pos_att_type": ["p2c", "c2p"], "relative_attention": True}
    config = transformers.DebertaV2Config(**SMALL, **COMMON, **positions, max_position_embeddings=160, legacy=False)
    model = transformers.DebertaV2ForMaskedLM(config)
    base = saved(model, words_tokenizer(closing=True), tmp_path / "base")
    run, more = tmp_path / "run", {"method__targets": "[all]", "method__name": "tezo-cadam", "method__rank": 2}
    done = train(base, home / "rows.jsonl", run, "--test", home / "rows.jsonl", "--json", **more)
    assert done.code == 0, done.err
    summary = json.loads(done.out)
    (notice,) = [notice for notice in summary["notices"] if "left untrained" in notice]
    assert "deberta.embeddings.word_embeddings.weight" in notice
    assert "deberta.encoder.rel_embeddings.weight" in notice
    assert json.loads(tezo("eval", run, "--json").out)["loss"] == pytest.approx(summary["after"]["loss"], abs=1e-6)


def test_a_tokenizer_without_words_is_refused(tmp_path):
    folder = saved(tiny_model("llama", 8), words_tokenizer(), tmp_path / "model")
    (folder / "tokenizer.json").unlink()  # transformers makes a tokenizer of special tokens alone
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    with pytest.raises(RequestError, match="tokenizer of this model has no vocabulary"):
        load_model(str(folder))
