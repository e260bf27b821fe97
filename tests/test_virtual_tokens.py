"""Prefix and prompt tuning start as the base model with real tokens in front, and are read at the text's positions."""

import json
from dataclasses import replace
from typing import get_args, get_type_hints

import pytest
import torch
from cases import mostly_slow
from folders import (
    bpe_tokenizer,
    label_rows,
    model_folder,
    read_jsonl,
    tezo,
    tokenizer_for,
    write_rows,
)
from folders import tiny_model as model_of_words
from kills import contents
from peft import PeftModel
from short_runs import STEPS, stopped
from tiny import tiny_bert, tiny_deberta, tiny_falcon, tiny_gpt2, tiny_llama, tiny_moe, tiny_opt, tiny_roberta, tokens
from torch import Tensor, nn
from zoo import zoo_model

from tezo.models.kinds import ModelConfig, kind_of
from tezo.models.loading import LoadedModel, load_model
from tezo.models.peft import ADAPTERS, add_adapter, open_adapter, random_tokens
from tezo.system.errors import RequestError
from tezo.tasks.evaluation import predict
from tezo.tasks.examples import Example
from tezo.tasks.objectives.causal import CausalObjective
from tezo.tasks.objectives.encoder import mean_over_tokens, mean_pooled
from tezo.tasks.objectives.evaluators import logits_and_hidden_at, logits_at, whole_rows
from tezo.training.loop import train as training
from tezo.training.settings import parse_config

COUNT, SEED = 3, 7
MAKERS = {
    "opt": tiny_opt, "llama": tiny_llama, "gpt2": tiny_gpt2, "moe": tiny_moe, "falcon": tiny_falcon,
    "roberta": tiny_roberta, "bert": tiny_bert,
}  # fmt: skip
"""llama, moe and falcon share keys and values among heads; moe has heads wider than hidden size / heads."""
VIRTUAL = ("prefix", "prompt")
EACH = [(family, adapter) for family in MAKERS for adapter in VIRTUAL]
FAST = [(family, adapter) for family in ("opt", "llama", "roberta", "bert") for adapter in VIRTUAL]


def loaded_of(family: str, dtype=torch.float32) -> LoadedModel:
    model = MAKERS[family](dtype)
    kind = kind_of([type(model).__name__])
    assert kind is not None
    return LoadedModel(model, tokenizer_for(family), kind)


def config_of(adapter: str, count: int = COUNT) -> ModelConfig:
    return ModelConfig(name="tiny", peft=adapter, prefix_length=count)


def outputs(model: nn.Module, **inputs: Tensor) -> Tensor:
    output = model(**inputs)
    return output.logits if "logits" in output else output.last_hidden_state


@torch.no_grad()
def behind(loaded: LoadedModel, front_1V: Tensor, ids_BL: Tensor, mask_BL: Tensor, adapter: str) -> Tensor:
    """Outputs of a base model at the positions of a text that has these tokens in front of it."""
    rows, count = len(ids_BL), front_1V.shape[1]
    ids = torch.cat([front_1V.expand(rows, -1), ids_BL], 1)
    mask = torch.cat([torch.ones(rows, count, dtype=torch.long), mask_BL], 1)
    if adapter == "prefix" and loaded.kind != "causal":  # keys and values of a prefix depend on no text
        seen = mask[:, None, None, :].bool().repeat(1, 1, ids.shape[1], 1)
        seen[:, :, :count, count:] = False
        mask = seen
    return outputs(loaded.model, input_ids=ids, attention_mask=mask)[:, count:]


def texts() -> tuple[Tensor, Tensor]:
    """(token ids, mask) of a long and a short text."""
    ids, mask = tokens(2, 8), torch.ones(2, 8, dtype=torch.long)
    mask[1, 5:] = 0
    return ids, mask


def text_outputs(loaded: LoadedModel, ids: Tensor, mask: Tensor) -> Tensor:
    """The outputs at the text's positions, as the objectives read them."""
    inputs = {"input_ids": ids, "attention_mask": mask}
    if loaded.kind == "encoder":
        return loaded.model(**inputs).last_hidden_state[:, -ids.shape[1] :]
    return logits_at(loaded.model, inputs, torch.arange(ids.shape[1]).repeat(len(ids), 1))


def test_the_setting_names_every_kind_of_adapter():
    assert {"none", *ADAPTERS} == set(get_args(get_type_hints(ModelConfig)["peft"]))


@pytest.mark.parametrize("case", mostly_slow(EACH, *FAST), ids="-".join)
def test_a_new_adapter_is_real_tokens_in_front_of_every_text(case):
    family, adapter = case
    loaded, (ids, mask) = loaded_of(family), texts()
    front = random_tokens(loaded, COUNT, SEED)
    expected = behind(loaded, front, ids, mask, adapter)
    other = behind(loaded, (front + 1) % 96, ids, mask, adapter)
    tuned = add_adapter(loaded, config_of(adapter), SEED)
    with torch.no_grad():
        found = text_outputs(tuned, ids, mask)
    valid = mask.bool()
    torch.testing.assert_close(found[valid], expected[valid], rtol=0, atol=1e-5)
    assert (found - other)[valid].abs().max() > 1e-3, "the tokens in front count"
    trained = {name for name, parameter in tuned.model.named_parameters() if parameter.requires_grad}
    assert trained == {"prompt_encoder.default.embedding.weight"}


@pytest.mark.parametrize("adapter", VIRTUAL)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_half_precision_the_start_is_float32_and_differs_by_rounding(dtype, adapter):
    loaded, (ids, mask) = loaded_of("llama", dtype), texts()
    expected = behind(loaded, random_tokens(loaded, COUNT, SEED), ids, mask, adapter).float()
    tuned = add_adapter(loaded, config_of(adapter), SEED)
    (start,) = (p for p in tuned.model.parameters() if p.requires_grad)
    assert start.dtype == torch.float32 and torch.equal(start, start.to(dtype).float())
    with torch.no_grad():
        found = text_outputs(tuned, ids, mask)
    assert (found - expected)[mask.bool()].abs().max() < 32 * torch.finfo(dtype).eps * expected.abs().max()


def test_the_tokens_are_those_of_the_seed_and_cover_the_vocabulary():
    loaded = loaded_of("opt")
    draws = [random_tokens(loaded, 20, seed) for seed in range(100)]
    assert torch.equal(draws[0], random_tokens(loaded, 20, 0)) and not torch.equal(draws[0], draws[1])
    counts = torch.cat(draws, 1).flatten().bincount(minlength=96)
    assert len(counts) == 96 and counts.min() > 0, "2000 draws leave out one of 96 rows once in ten million"


@pytest.mark.parametrize("adapter", VIRTUAL)
@torch.no_grad()
def test_what_is_read_of_a_model_is_at_the_positions_of_the_text(adapter):
    loaded, (ids, mask) = loaded_of("roberta"), texts()
    front = random_tokens(loaded, COUNT, SEED)
    expected = behind(loaded, front, ids, mask, adapter)
    tuned, inputs = add_adapter(loaded, config_of(adapter), SEED), {"input_ids": ids, "attention_mask": mask}
    reads = torch.tensor([[1, 6], [4, 2]])
    rows = torch.arange(2)[:, None]
    torch.testing.assert_close(logits_at(tuned.model, inputs, reads), expected[rows, reads], rtol=0, atol=1e-5)
    _, hidden = logits_and_hidden_at(tuned.model, inputs, reads)
    head = tuned.model.get_output_embeddings()
    torch.testing.assert_close(head(hidden), expected[rows, reads], rtol=0, atol=1e-5)
    encoder = loaded_of("bert")
    states = behind(encoder, front, ids, mask, adapter)
    tuned = add_adapter(encoder, config_of(adapter), SEED)
    torch.testing.assert_close(mean_pooled(tuned.model, **inputs), mean_over_tokens(states, mask), rtol=0, atol=1e-5)


@pytest.mark.parametrize("adapter", VIRTUAL)
@pytest.mark.parametrize("family", ["opt", "llama", "roberta", "bert"])
def test_rows_of_several_copies_have_virtual_tokens_of_their_own(family, adapter):
    """Steps evaluate several perturbations in one pass, by hooks on the rows of modules."""
    loaded, (ids, mask) = loaded_of(family), texts()
    tuned = add_adapter(loaded, config_of(adapter), SEED)
    (encoder,) = tuned.model.prompt_encoder.values()
    with torch.no_grad():
        plain = text_outputs(tuned, ids, mask)
        encoder.embedding.weight.mul_(1.5)
        changed = text_outputs(tuned, ids, mask)
        encoder.embedding.weight.div_(1.5)
        factors = torch.tensor([1.0, 1.5]).repeat_interleave(2).view(4, 1, 1)
        hook = encoder.embedding.register_forward_hook(lambda _module, _args, rows: rows * factors)
        with whole_rows(tuned.model):
            both = text_outputs(tuned, ids.repeat(2, 1), mask.repeat(2, 1))
        hook.remove()
    torch.testing.assert_close(both, torch.cat([plain, changed]), rtol=0, atol=1e-5)
    assert (plain - changed).abs().max() > 1e-3


@pytest.mark.parametrize("adapter", VIRTUAL)
def test_positions_are_left_for_the_virtual_tokens(adapter):
    loaded = loaded_of("roberta")
    assert add_adapter(loaded_of("roberta"), config_of(adapter), SEED).max_length == loaded.max_length - COUNT
    whole = loaded.positions
    with pytest.raises(RequestError, match=rf"model\.prefix_length is {whole}, .*{whole} positions.*lower it"):
        add_adapter(loaded, config_of(adapter, whole), SEED)


def test_models_that_take_no_prefix_are_refused():
    loaded = LoadedModel(tiny_deberta(torch.float32), tokenizer_for("roberta"), "masked")
    with pytest.raises(RequestError, match=r"model\.peft is prefix, .*keys and values of one shape.*lora or prompt"):
        add_adapter(loaded, config_of("prefix"), SEED)


@pytest.mark.parametrize(
    ("name", "adapter", "reason"),
    [
        ("causal-deepseek_v3", "prefix", "PEFT cannot add"),  # PEFT makes it of another size
        ("causal-mamba", "prefix", "needs a model that keeps keys and values"),
        ("causal-qwen3_next", "prefix", "PEFT cannot add"),
        ("causal-deepseek_v4", "prompt", "PEFT cannot add"),  # it reads the token ids in its layers
    ],
)
def test_a_family_that_does_not_take_an_adapter_is_refused_before_a_run(name, adapter, reason):
    with pytest.raises(RequestError, match=rf"model\.peft is {adapter}, which {reason}.*; use lora"):
        add_adapter(LoadedModel(zoo_model(name), tokenizer_for("llama"), "causal"), config_of(adapter), SEED)


@torch.no_grad()
def test_a_model_without_attention_takes_a_prompt():
    loaded, ids = LoadedModel(zoo_model("causal-mamba"), tokenizer_for("llama"), "causal"), tokens(2, 6) % 90
    mask = torch.ones_like(ids)
    expected = behind(loaded, random_tokens(loaded, COUNT, SEED), ids, mask, "prompt")
    found = text_outputs(add_adapter(loaded, config_of("prompt"), SEED), ids, mask)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("adapter", VIRTUAL)
def test_a_classifier_is_refused(adapter):
    with pytest.raises(RequestError, match=rf"model\.peft is {adapter}, .*causal, masked or encoder, .*use lora"):
        add_adapter(replace(loaded_of("roberta"), kind="classifier"), config_of(adapter), SEED)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    root = tmp_path_factory.mktemp("home")
    for family in ("llama", "roberta"):
        model_folder(root, family)
    for number, name in enumerate(("train", "dev", "test")):
        write_rows(root / f"{name}.jsonl", label_rows(10, seed=number))
    return root


def tree_of(home, family, adapter, method):
    options = {"rank": 2} if method == "tezo" else {}
    return parse_config(
        {
            "model": {"name": str(home / family), "device": "cpu", "peft": adapter, "prefix_length": COUNT},
            "data": {name: str(home / f"{name}.jsonl") for name in ("train", "dev", "test")},
            "method": {"name": method, "lr": 0.05, **options},
            "train": {"steps": STEPS, "batch_size": 4, "eval_every": 3, "checkpoint_every": 3},
        }
    )


@pytest.mark.thinned
@pytest.mark.parametrize("adapter", VIRTUAL)
@pytest.mark.parametrize(("family", "method"), [("llama", "tezo"), ("roberta", "mezo"), ("llama", "adam")])
def test_a_run_goes_on_to_the_bit_and_opens_with_its_scores_and_predictions(home, tmp_path, family, method, adapter):
    made, run = tree_of(home, family, adapter, method), tmp_path / "run"
    training(made, tmp_path / "whole")
    stopped(made, run, 4)
    training(made, run, resume=True)
    assert contents(run) == contents(tmp_path / "whole")
    after = json.loads((run / "summary.json").read_text())["after"]
    assert json.loads(tezo("eval", run, "--json").out)["loss"] == pytest.approx(after["loss"], abs=1e-6)
    rows = home / "test.jsonl"
    assert tezo("predict", run, "--input", rows, "--output", tmp_path / "answers.jsonl").code == 0
    answers = [row["prediction"] for row in read_jsonl(tmp_path / "answers.jsonl")]
    right = [answer == row["label"] for answer, row in zip(answers, read_jsonl(rows), strict=True)]
    assert sum(right) / len(right) == pytest.approx(after["accuracy"])
    assert tezo("export", run, "--output", tmp_path / "export").code == 0
    base, words = load_model(str(home / family)), torch.arange(5, 14).view(1, 9)
    opened = open_adapter(load_model(str(home / family)), made.model, run / "adapter").model
    by_peft = PeftModel.from_pretrained(base.model, tmp_path / "export").eval()
    inputs = {"input_ids": words, "attention_mask": torch.ones_like(words)}
    torch.testing.assert_close(outputs(by_peft, **inputs), outputs(opened, **inputs), rtol=0, atol=1e-5)


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("family", "adapter"),
    [(family, adapter) for family in ("opt", "llama") for adapter in ("none", *VIRTUAL)]
    + [("gemma2", "none"), ("gemma2", "prompt")],  # a prefix stands before the padding, which its window counts
)
@pytest.mark.parametrize("ends", [True, False])
def test_a_text_is_continued_alike_alone_and_beside_longer_ones(family, adapter, ends):
    tokenizer = bpe_tokenizer()
    window = {"sliding_window": 12} if family == "gemma2" else {}
    base = LoadedModel(model_of_words(family, len(tokenizer), **window), tokenizer, "causal")
    front = random_tokens(base, COUNT, SEED)
    loaded = add_adapter(base, config_of(adapter), SEED)
    objective = CausalObjective(tokenizer, torch.device("cpu"), 120, ())
    encoded = [
        objective.encode(Example("the song was very " * (1 + 3 * i), " good", (), None, f"row {i}", ends=ends))
        for i in range(3)
    ]
    alone = [predict(loaded.model, objective, [one], 1, 8)[0] for one in encoded]
    assert predict(loaded.model, objective, encoded, 3, 8) == alone
    if adapter == "none":
        return
    for one, said in zip(encoded, alone, strict=True):
        prompt = list(one.sequences[0][: len(one.sequences[0]) - one.answers[0]])
        text = greedy(base.model, [*front[0].tolist(), *prompt], tokenizer, 8)
        assert said == (text if ends else text.partition("\n")[0].strip())


@torch.no_grad()
def greedy(model, ids, tokenizer, count) -> str:
    start = len(ids)
    for _ in range(count):
        ids = [*ids, int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())]
        if ids[-1] == tokenizer.eos_token_id:
            break
    return tokenizer.decode(ids[start:], skip_special_tokens=True)
