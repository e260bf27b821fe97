"""TezoSFTTrainer: the real SFTTrainer of TRL, with the steps of a method."""

import importlib
import json
import sys

import datasets
import pytest
import torch
import transformers
from folders import completion_rows, message_rows, saved, words_tokenizer
from trainers import TOKENIZER, llama, same

import tezo
from tezo.models.quantization import stay_packed
from tezo.system.errors import RequestError
from tezo.trainer.loss import StepLoss

trl = pytest.importorskip("trl", reason="of the extra `trainer`")
peft = pytest.importorskip("peft", reason="of the extra `peft`")


def sft(folder, model=None, *, rows=None, method="head-feedback", **named):
    own = {key: named.pop(key) for key in ("method_options", "eval_dataset", "peft_config", "quantization_config", "processing_class") if key in named}  # fmt: skip # noqa: E501
    lr = named.pop("lr", 1e-2)
    rows = datasets.Dataset.from_list(completion_rows(12) if rows is None else rows)
    settings = {
        "max_steps": 3, "per_device_train_batch_size": 4, "use_cpu": True, "report_to": "none",
        "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1, "max_length": 64, "seed": 5,
    }  # fmt: skip
    args = trl.SFTConfig(str(folder), **(settings | named))
    own = {"method_options": {"rank": 4}, "processing_class": TOKENIZER} | own
    own["method_options"] = {"lr": lr} | own["method_options"]
    return tezo.TezoSFTTrainer(llama() if model is None else model, args, train_dataset=rows, method=method, **own)


def logits(model, ids):
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


IDS = torch.arange(5, 25).view(2, 10)


def test_the_loss_falls_on_rows_that_repeat(tmp_path):
    rows = completion_rows(4)
    run = sft(
        tmp_path, rows=rows, eval_dataset=datasets.Dataset.from_list(rows), max_steps=80, lr=2e-2,
        logging_steps=20,
    )  # fmt: skip
    before = run.evaluate()["eval_loss"]
    run.train()
    assert run.evaluate()["eval_loss"] < 0.9 * before


def test_the_rows_of_the_fused_head_have_the_loss_of_trl_as_their_mean(tmp_path):
    run = sft(tmp_path)
    batches = [run._prepare_inputs(batch) for batch in run.get_test_dataloader(run.train_dataset.select(range(4)))]
    items = run.get_batch_samples(iter(batches), 1, torch.device("cpu"))[1]
    with torch.no_grad():
        losses = StepLoss(run, batches, items)
        found = losses.row_losses()
        output, labels = run.model(**batches[0]), batches[0]["labels"][:, 1:]
    plain, logits = output.loss, output.logits[:, :-1].transpose(1, 2)
    each = torch.nn.functional.cross_entropy(logits, labels, reduction="none").sum(1) * 4 / (labels != -100).sum()
    assert torch.allclose(found, each, rtol=1e-5)
    assert found.mean().item() == pytest.approx(losses.loss().item(), rel=1e-5) == pytest.approx(plain.item(), rel=1e-5)


def test_a_step_measures_as_many_directions_as_rows_and_logs_the_metrics_of_trl(tmp_path):
    run = sft(tmp_path, eval_dataset=datasets.Dataset.from_list(completion_rows(4, seed=1)))
    run.train()
    assert len(run.tuner.last_step.probes) == 4
    lines = [line for line in run.state.log_history if "loss" in line]
    assert all({"entropy", "mean_token_accuracy"} <= line.keys() and "grad_norm" not in line for line in lines)
    assert lines[-1]["num_tokens"] == sum(len(row["input_ids"]) for row in run.train_dataset)
    alone = sft(tmp_path, run.tuner.merge(), eval_dataset=datasets.Dataset.from_list(completion_rows(4, seed=1)))
    here, there = run.evaluate(), alone.evaluate()
    for key in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy"):
        assert here[key] == pytest.approx(there[key], rel=1e-4), "of the evaluation alone"


def test_an_interrupted_run_goes_on_to_the_bit(tmp_path):
    more = {"save_strategy": "steps", "save_steps": 2, "max_steps": 5}
    straight = sft(tmp_path / "a", **more)
    straight.train()
    resumed = sft(tmp_path / "b", **more)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a/checkpoint-2"))
    assert same(resumed.tuner.resumable_state(), straight.tuner.resumable_state())


def test_the_adapter_gives_the_same_outputs_and_a_card_stands_beside(tmp_path):
    run = sft(tmp_path, save_strategy="steps", save_steps=3)
    run.train()
    run.save_model()
    run.create_model_card()
    tuned = logits(run.model, IDS)
    assert (tuned - logits(llama(), IDS)).abs().max() > 1e-2
    for folder in (tmp_path, tmp_path / "checkpoint-3"):
        loaded = peft.PeftModel.from_pretrained(llama(), folder)
        assert torch.allclose(logits(loaded, IDS), tuned, atol=1e-5)
    assert "trl" in (tmp_path / "README.md").read_text()


def test_an_adapter_of_peft_is_what_is_tuned_and_saved(tmp_path):
    config = peft.LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])
    run = sft(tmp_path, peft_config=config)
    assert run.train().global_step == 3
    assert all(".lora_" in target.name for target in run.tuner.targets)
    run.save_model()
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path)
    assert torch.allclose(logits(loaded, IDS), logits(run.model, IDS), atol=1e-5)
    assert (logits(llama(), IDS) - logits(run.model, IDS)).abs().max() > 1e-3


def test_conversations_are_tuned_too(tmp_path):
    tokenizer = words_tokenizer(chat=True)
    run = sft(tmp_path, rows=message_rows(8), processing_class=tokenizer)
    assert run.train().global_step == 3


def test_a_head_that_trl_reads_past_its_module_is_refused(tmp_path):
    with pytest.raises(RequestError, match=r"lm_head\.weight are read past their modules"):
        sft(tmp_path, method="tezo", method_options={"rank": 4, "targets": ["all"]}).train()


def test_a_base_that_trl_packs_is_tuned(tmp_path):
    pytest.importorskip("bitsandbytes", reason="of the extra `quantization`")
    # TRL puts what is not packed into bfloat16
    base = saved(llama(hidden_size=64, intermediate_size=128).bfloat16(), TOKENIZER, tmp_path / "base")
    packing = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    run = sft(tmp_path / "run", str(base), quantization_config=packing, model_init_kwargs={"dtype": "bfloat16"})
    run.train()
    run.save_model()
    other = transformers.AutoModelForCausalLM.from_pretrained(base, quantization_config=packing, dtype=torch.bfloat16)
    stay_packed(other)
    tuned, base_alone = logits(run.model, IDS), logits(other, IDS)
    loaded = peft.PeftModel.from_pretrained(other, tmp_path / "run")
    assert run.model.is_quantized
    assert (logits(loaded, IDS) - tuned).abs().max() < 0.1 * (base_alone - tuned).abs().max()


@pytest.mark.parametrize("method", ["head-feedback", "mezo"])
def test_nothing_is_warned_that_nobody_asked_for_and_arguments_are_saved_as_json(tmp_path, caplog, method):
    options = {"rank": 4, "rho": 1e-3} if method == "head-feedback" else {"rho": 1e-3}
    assert trl.SFTConfig(str(tmp_path), use_cpu=True).bf16, "on by itself"
    run = sft(tmp_path, method=method, method_options=options, save_strategy="steps", save_steps=3, hub_token="secret")
    assert not [record for record in caplog.records if "autocast" in record.message]
    run.train()
    run.save_model()
    for folder in (tmp_path, tmp_path / "checkpoint-3"):
        text = (folder / "training_args.json").read_text()
        assert json.loads(text)["learning_rate"] == 1e-2 and "secret" not in text
        assert (folder / "adapter_model.safetensors").is_file() == (method == "head-feedback")
    assert not list(tmp_path.rglob("*.bin"))
    sft(tmp_path / "other", fp16=True)
    assert [r for r in caplog.records if r.message.startswith("fp16: autocast is off")], "one that was asked for is"


def test_without_trl_the_extra_is_named(monkeypatch):
    module = importlib.import_module("tezo.trainer.sft")
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.delitem(sys.modules, module.__name__)
    with pytest.raises(RequestError, match=r"pip install 'tezo\[trainer\]'"):
        importlib.import_module(module.__name__)
