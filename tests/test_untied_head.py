"""An output head that is tied to the embeddings is tuned alone only where the user asks for it, and then to the end."""

import json

import gguf
import pytest
import torch
from folders import (
    label_rows,
    model_folder,
    refused,
    saved,
    settings,
    tezo,
    tiny_model,
    tokenizer_for,
    train,
    write_rows,
)
from torch import Tensor, nn

from tezo.models.loading import give_head_weights, load_model
from tezo.runs.files import MANIFEST
from tezo.system.errors import RequestError
from tezo.training.api import open_run

HEADS = {"opt": "lm_head.weight", "gpt2": "lm_head.weight", "roberta": "lm_head.decoder.weight"}
EMBEDDINGS = {
    "opt": "model.decoder.embed_tokens.weight",
    "gpt2": "transformer.wte.weight",
    "roberta": "roberta.embeddings.word_embeddings.weight",
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    root = tmp_path_factory.mktemp("home")
    for family in HEADS:
        model_folder(root, family)
    write_rows(root / "rows.jsonl", label_rows(12))
    return root


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(5, 19).view(2, 7)).logits


@pytest.mark.parametrize("family", HEADS)
def test_the_head_gets_weights_of_its_own_and_the_model_stays_as_it_was(home, family, tmp_path):
    tied = load_model(str(home / family))
    untied = load_model(str(home / family), untie_head=True)
    model, head, embeddings = untied.model, HEADS[family], EMBEDDINGS[family]
    assert torch.equal(logits(model), logits(tied.model))
    assert head not in dict(tied.model.named_parameters())
    names = dict(model.named_parameters())
    assert torch.equal(names[head], names[embeddings]) and names[head] is not names[embeddings]
    megabytes = f"{names[head].numel() * 4 / 1e6:.3g} MB"
    assert any(head in notice and embeddings in notice and megabytes in notice for notice in untied.notices)
    assert not tied.notices and untied.fingerprint != tied.fingerprint
    with torch.no_grad():
        for name, weight in names.items():
            if name.startswith("lm_head"):
                weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name))))
    model.save_pretrained(tmp_path / "saved")
    untied.tokenizer.save_pretrained(tmp_path / "saved")
    for again in (load_model(str(tmp_path / "saved")), load_model(str(tmp_path / "saved"), untie_head=True)):
        assert torch.equal(logits(again.model), logits(model)) and not again.notices
        assert torch.equal(again.model.get_parameter(embeddings), tied.model.get_parameter(embeddings))


@pytest.mark.parametrize("placement", ["cpu", "spread"])
def test_a_head_is_untied_before_the_weights_are_placed(home, placement):
    plain = load_model(str(home / "opt"), device="cpu")
    placed = load_model(str(home / "opt"), placement=placement, untie_head=True, device="cpu")
    torch.testing.assert_close(logits(placed.model), logits(plain.model), rtol=0, atol=1e-6)
    assert dict(placed.model.named_parameters())[HEADS["opt"]].requires_grad
    assert not any("tied weights cannot be trained" in notice for notice in placed.notices)


@pytest.mark.parametrize(
    ("family", "method", "result"),
    [("opt", "tezo", "adapter"), ("opt", "mezo", "model"), ("roberta", "mezo", "model"), ("roberta", "adam", "model")],
)
def test_a_run_tunes_the_head_alone_and_is_opened_and_merged_as_it_was_tuned(home, tmp_path, family, method, result):
    rows, run, head = home / "rows.jsonl", tmp_path / "run", HEADS[family]
    named = {"model__untie_head": True, "method__name": method, "method__targets": f"[{head}]",
             "train__keep_best": False}  # fmt: skip
    rank = {} if method == "tezo" else {"method__rank": None}
    done = train(home / family, rows, run, "--json", "--test", rows, **named, **rank)
    assert done.code == 0, done.err
    summary = json.loads(done.out)
    assert summary["result"]["kind"] == result and summary["before"]["loss"] != summary["after"]["loss"]
    assert any("model.untie_head" in notice for notice in summary["notices"])
    assert [row["name"] for row in json.loads((run / "plan.json").read_text()) if row["trained"]] == [head]
    after = pytest.approx(summary["after"]["loss"], abs=1e-5)
    assert json.loads(tezo("eval", run, "--json").out)["loss"] == after
    merged = tmp_path / "merged"
    assert tezo("export", run, "--format", "merged", "--output", merged).code == 0
    asked = settings(data__test=rows)
    assert json.loads(tezo("eval", merged, "--json", *asked).out)["loss"] == after
    base, tuned = load_model(str(home / family)).model, load_model(str(merged)).model
    changed = {n for n, w in tuned.named_parameters() if n != head and not torch.equal(w, base.get_parameter(n))}
    assert changed == set() and not torch.equal(tuned.get_parameter(head), base.get_parameter(head))
    (run / MANIFEST).unlink()
    refused(tezo("train", "--output", run, "--resume", *settings(model__untie_head=False)), "untie_head")
    assert tezo("train", "--output", run, "--resume").code == 0


def test_llama_cpp_gets_no_adapter_for_weights_that_its_file_of_the_base_lacks(home, tmp_path):
    tokenizer = tokenizer_for("llama")
    for tied in (True, False):
        saved(tiny_model("llama", len(tokenizer), tie_word_embeddings=tied), tokenizer, tmp_path / f"{tied}")
    to_gguf = "export", "--format", "gguf-lora"
    for name, base, named in (
        ("head of a tied base", "True", {"method__targets": "[lm_head, up_proj]", "model__untie_head": True}),
        ("layers of a tied base", "True", {"method__targets": "[up_proj]", "model__untie_head": True}),
        ("head of an untied base", "False", {"method__targets": "[lm_head]", "model__untie_head": True}),
    ):
        done = train(tmp_path / base, home / "rows.jsonl", tmp_path / name, "--method", "tezo", steps=1, **named)
        assert done.code == 0, done.err
        done = tezo(*to_gguf, tmp_path / name, "--output", tmp_path / name / "out")
        if name != "head of a tied base":
            written = {tensor.name for tensor in gguf.GGUFReader(tmp_path / name / "out/adapter.gguf").tensors}
            assert done.code == 0 and ("output.weight.lora_a" in written) == ("head" in name), name
            continue
        refused(done, "the adapter changes lm_head, which is tied to the embeddings in the base", "format merged")
        assert not (tmp_path / name / "out").exists()
        with pytest.raises(RequestError, match=r"llama\.cpp refuses it"):
            open_run(tmp_path / name).export(tmp_path / name / "out", "gguf-lora")


@pytest.mark.parametrize(("family", "pattern"), [("opt", "lm_head"), ("roberta", "decoder"), ("gpt2", "*lm_head*")])
def test_naming_a_tied_head_is_an_error_that_says_so(home, tmp_path, family, pattern):
    done = train(home / family, home / "rows.jsonl", tmp_path / "run", method__targets=f'["{pattern}"]')
    refused(done, "method.targets", HEADS[family], f"tied to {EMBEDDINGS[family]}", "model.untie_head=true")
    assert not (tmp_path / "run").exists()
    both = train(home / family, home / "rows.jsonl", tmp_path / "both", method__targets=f"[{EMBEDDINGS[family]}]")
    assert both.code == 0, both.err


def test_there_is_nothing_to_untie(home):
    with pytest.raises(RequestError, match=r"model\.untie_head is true, but this model has no output head"):
        load_model(str(model_folder(home, "bert")), untie_head=True)
    own = tiny_model("llama", 40, tie_word_embeddings=False)
    before = own.lm_head.weight
    assert give_head_weights(own) == [] and own.lm_head.weight is before
