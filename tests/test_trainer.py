"""TezoTrainer takes the steps of the method on the Trainer's batches and loss; what it saves is what was tuned."""

import json

import peft
import pytest
import torch
import transformers
from cases import mostly_slow
from torch import nn
from torch.nn.functional import cross_entropy
from trainers import TOKENIZER, Collator, arguments, llama, same, token_rows, trainer
from transformers import EarlyStoppingCallback, TrainerCallback

import tezo
from tezo.methods import METHODS
from tezo.models.quantization import stay_packed
from tezo.optim.settings import RESOLVED
from tezo.system.digests import digest
from tezo.system.errors import NonFiniteLossError, RequestError
from tezo.trainer.loss import StepLoss
from tezo.training.rows_of_steps import default_counts

PER_EXAMPLE = {"rank": 4, "directions": "per-example"}


def row_losses(model, batch, run):
    """Of each row: the loss of its tokens, so that the mean over rows is what Trainer takes for the mean over all."""
    count = run.get_batch_samples(iter([batch]), 1, torch.device("cpu"))[1]  # early versions count the first token
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    losses = cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100)
    return losses.sum(1) * len(labels) / count


def near(found, expected):
    """Equal up to rounding: of losses in float32, which rho divides."""
    assert found.keys() == expected.keys()
    return all((found[key] - value).double().norm() <= 0.01 * value.double().norm() for key, value in expected.items())


def tuned_logits(model, batch):
    with torch.no_grad():
        return model.eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits


@pytest.mark.parametrize("directions", ["shared", "per-example"])
@pytest.mark.parametrize("method", ["tezo", "lozo"])
def test_its_steps_are_those_of_the_optimizer_on_its_batches(tmp_path, method, directions):
    run = trainer(
        tmp_path, method=method, method_options={"rank": 4, "directions": directions}, lr_scheduler_type="linear",
        weight_decay=0.1,
    )  # fmt: skip
    assert run.train().global_step == 3
    model = llama()
    optimizer = METHODS[method].build(model, rank=4, directions=directions, lr=1e-2, weight_decay=0.1, seed=5)
    for step, batch in enumerate(run.data_collator.batches[-3:]):
        optimizer.param_groups[0]["lr"] = 1e-2 * (3 - step) / 3

        def losses(batch=batch):
            each = row_losses(model, batch, run)
            return each if directions == "per-example" else each.mean()

        optimizer.step(losses)
    assert near(run.tuner.tuned_state(), optimizer.tuned_state())
    assert run.tuner.num_forward_passes == optimizer.num_forward_passes
    first = row_losses(llama(), run.data_collator.batches[-3], run).mean().item()
    assert run.state.log_history[0]["loss"] == pytest.approx(first, rel=1e-4)


@pytest.mark.parametrize("directions", ["shared", "per-example"])
def test_micro_batches_are_rows_of_one_step(tmp_path, directions):
    options = {"rank": 4, "directions": directions}
    whole = trainer(tmp_path / "a", method_options=options, per_device_train_batch_size=6)
    parts = trainer(
        tmp_path / "b", method_options=options, per_device_train_batch_size=2, gradient_accumulation_steps=3
    )
    assert whole.train().global_step == parts.train().global_step == 3
    assert len(parts.data_collator.batches[-1]["input_ids"]) == 2
    assert near(parts.tuner.tuned_state(), whole.tuner.tuned_state())
    logged = [[line["loss"] for line in run.state.log_history if "loss" in line] for run in (whole, parts)]
    assert logged[0] == pytest.approx(logged[1], rel=1e-5)
    assert parts.tuner.last_step.forward_passes == 2


class Classes(nn.Module):
    """Not of transformers; its loss takes no number of items."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        with torch.no_grad():
            self.layer.weight.copy_(torch.linspace(-1, 1, 12).view(3, 4))

    def forward(self, x, labels):
        logits = self.layer(x)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def test_micro_batches_of_a_model_that_takes_means_are_averaged(tmp_path):
    draw = torch.Generator().manual_seed(1)
    rows = [{"x": torch.randn(4, generator=draw), "labels": i % 3} for i in range(8)]
    states = []
    for name, size, parts in (("a", 4, 1), ("b", 2, 2)):
        torch.manual_seed(2)
        run = trainer(
            tmp_path / name, Classes(), rows=rows, method_options=PER_EXAMPLE, data_collator=None,
            per_device_train_batch_size=size, gradient_accumulation_steps=parts, processing_class=None,
        )  # fmt: skip
        run.train()
        states.append(run.tuner.tuned_state())
    assert near(states[1], states[0])


@pytest.mark.parametrize(
    ("family", "head", "labels"),
    [
        ("bert", "BertForSequenceClassification", torch.tensor([0, 2, 1])),
        ("bert", "BertForSequenceClassification", torch.tensor([0.5, 2.0, -1.0])),
        ("bert", "BertForTokenClassification", torch.tensor([[0, 2, -100], [1, -100, -100], [1, 1, 2]])),
        ("roberta", "RobertaForMaskedLM", torch.tensor([[-100, 5, 9], [7, -100, -100], [-100, 8, -100]])),
        ("gpt2", "GPT2LMHeadModel", torch.tensor([[-100, 5, 9], [7, 6, -100], [-100, 8, 5]])),
    ],
)
def test_the_losses_of_rows_have_the_loss_of_trainer_as_their_mean(tmp_path, family, head, labels):
    model = tiny_with_head(family, head, 1 if labels.is_floating_point() else 3)
    run = trainer(tmp_path, model)
    ids = torch.tensor([[5, 6, 7], [8, 9, 10], [11, 12, 13]])
    batches = [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}]
    items = run.get_batch_samples(iter(batches), 1, torch.device("cpu"))[1]
    losses = StepLoss(run, batches, items)
    with torch.no_grad():
        found = losses.row_losses()
        assert found.shape == (3,)
        assert found.mean().item() == pytest.approx(losses.loss().item(), rel=1e-5)
        batches[0]["input_ids"][2] = 20  # a row depends on itself alone
        after = losses.row_losses()
    assert torch.allclose(after[:2], found[:2]) and not torch.allclose(after[2], found[2])


def tiny_with_head(family, head, labels):
    names = {"bert": "BertConfig", "roberta": "RobertaConfig", "gpt2": "GPT2Config"}
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    if family == "gpt2":
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2}
    config = getattr(transformers, names[family])(vocab_size=len(TOKENIZER), num_labels=labels, **sizes)
    return getattr(transformers, head)(config).eval()


def test_no_gradient_is_computed(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("backward")

    monkeypatch.setattr(torch.autograd, "backward", refuse)
    monkeypatch.setattr(torch.Tensor, "backward", refuse)
    model = llama()
    trainer(tmp_path, model, method="head-feedback").train()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_default_directions_are_each_rows_own_where_the_method_has_them(tmp_path):
    run = trainer(tmp_path, method="head-feedback")
    run.train()
    assert len(run.tuner.last_step.probes) == 4


def spread(outputs, labels, num_items_in_batch=None):
    return outputs["logits"].float().square().mean()


@pytest.mark.parametrize(
    "named", [{"compute_loss_func": spread}, {"label_smoothing_factor": 0.3}], ids=["function", "smoothing"]
)
def test_a_loss_of_the_users_own_is_what_a_step_minimises(tmp_path, named):
    run = trainer(tmp_path, method="head-feedback", max_steps=1, rows=token_rows(4), **named)
    run.train()
    assert len(run.tuner.last_step.probes) == 1
    batch, model = run.data_collator.batches[-1], llama()
    with torch.no_grad():
        if "compute_loss_func" in named:
            expected = spread(model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]), None)
        else:
            smoother = transformers.trainer_pt_utils.LabelSmoother(0.3)
            expected = smoother(model(**batch), batch["labels"], shift_labels=True)
    assert run.state.log_history[0]["loss"] == pytest.approx(expected.item(), rel=1e-3)
    with pytest.raises(RequestError, match="directions is per-example, and the loss is of the whole batch"):
        trainer(tmp_path, method_options=PER_EXAMPLE, **named).train()


class Stop(TrainerCallback):
    """Ends the process, as it were, after a step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):  # noqa: ARG002
        if state.global_step == self.step:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    "method", mostly_slow(["head-feedback", "tezo-adam", "lozo", "mezo", "zo-adamu"], "head-feedback", "mezo")
)
def test_an_interrupted_run_goes_on_to_the_bit(tmp_path, method):
    interval = {"lazy_update_interval": 3} if method == "lozo" else {}
    options = {"rank": 4} | interval if method not in ("mezo", "zo-adamu") else {}
    more = {
        "method": method, "method_options": options, "max_steps": 8, "save_strategy": "steps", "save_steps": 2,
        "lr_scheduler_type": "cosine", "lr": 1e-3, "per_device_train_batch_size": 5,
    }  # fmt: skip
    straight = trainer(tmp_path / "a", **more)
    straight.train()
    stopped = trainer(tmp_path / "b", callbacks=[Stop(5)], **more)
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    resumed = trainer(tmp_path / "b", **more)
    assert resumed.train(resume_from_checkpoint=True).global_step == 8
    assert same(resumed.tuner.resumable_state(), straight.tuner.resumable_state())
    assert resumed.tuner.num_forward_passes == straight.tuner.num_forward_passes
    batch = resumed.data_collator.batches[-1]
    assert torch.equal(tuned_logits(resumed.model, batch), tuned_logits(straight.model, batch))


def test_no_state_of_ours_is_pickled(tmp_path):
    run = trainer(tmp_path, method="head-feedback", save_strategy="steps", save_steps=3)
    run.train()
    saved = torch.load(tmp_path / "checkpoint-3/optimizer.pt", weights_only=True)
    assert saved["state"] == {}, "rates alone"
    inside = {path.suffix for path in (tmp_path / "checkpoint-3/tezo_state").rglob("*") if path.is_file()}
    assert inside == {".safetensors", ".json"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    trainer(folder, max_steps=2, save_strategy="steps", save_steps=2).train()
    return folder / "checkpoint-2"


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path, checkpoint):
    def resume(folder, **named):
        trainer(tmp_path, **named).train(resume_from_checkpoint=str(folder))

    with pytest.raises(RequestError, match="is of method tezo, not lozo"):
        resume(checkpoint, method="lozo")
    with pytest.raises(RequestError, match="was trained with rank 4, not 3"):
        resume(checkpoint, method_options={"rank": 3})
    with pytest.raises(RequestError, match="other weights than the one that the checkpoint was trained on"):
        resume(checkpoint, model=llama(seed=1))
    with pytest.raises(RequestError, match="has no tezo_state"):
        resume(tmp_path)


def test_a_damaged_checkpoint_is_refused(tmp_path):
    trainer(tmp_path, max_steps=2, save_strategy="steps", save_steps=2).train()
    path = tmp_path / "checkpoint-2/tezo_state/checkpoint-2/tensors.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(RequestError, match=r"tensors\.safetensors is not the file that was saved; give an older"):
        trainer(tmp_path).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("save", ["save_model", "checkpoint"])
def test_what_is_saved_is_an_adapter_that_gives_the_same_outputs(tmp_path, save):
    run = trainer(tmp_path, method="head-feedback", save_strategy="steps", save_steps=3)
    run.train()
    folder = tmp_path / "checkpoint-3"
    if save == "save_model":
        folder = tmp_path / "final"
        run.save_model(str(folder))
    batch = run.data_collator.batches[-1]
    loaded = peft.PeftModel.from_pretrained(llama(), folder)
    tuned = tuned_logits(run.model, batch)
    assert (tuned - tuned_logits(llama(), batch)).abs().max() > 1e-2
    assert torch.allclose(tuned_logits(loaded, batch), tuned, atol=1e-5)
    assert transformers.AutoTokenizer.from_pretrained(folder).get_vocab() == TOKENIZER.get_vocab()
    assert not (folder / "model.safetensors").exists()


@pytest.mark.parametrize("method", ["mezo", "lozo"])
def test_without_an_adapter_the_whole_tuned_model_is_saved(tmp_path, method):
    options = {} if method == "mezo" else {"rank": 4}
    run = trainer(tmp_path, method=method, method_options=options)
    run.train()
    run.save_model()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    batch = run.data_collator.batches[-1]
    assert torch.allclose(tuned_logits(loaded, batch), tuned_logits(run.model, batch), atol=1e-5)
    assert (tuned_logits(loaded, batch) - tuned_logits(llama(), batch)).abs().max() > 1e-3


def test_the_best_model_is_put_back_at_the_end(tmp_path):
    rows = token_rows(12, seed=7)
    run = trainer(
        tmp_path, method="head-feedback", eval_dataset=rows, max_steps=12, lr=1.0, eval_strategy="steps",
        eval_steps=2, save_strategy="steps", save_steps=2, load_best_model_at_end=True,
    )  # fmt: skip
    run.train()
    measured = {line["step"]: line["eval_loss"] for line in run.state.log_history if "eval_loss" in line}
    assert run.state.best_global_step == min(measured, key=measured.get) != 12
    assert run.evaluate()["eval_loss"] == pytest.approx(min(measured.values()), rel=1e-6)
    logits = run.predict(rows).predictions
    batch = Collator()([rows[0]])
    assert torch.allclose(tuned_logits(run.model, batch)[0], torch.from_numpy(logits[0, : batch["input_ids"].shape[1]]), atol=1e-4)  # fmt: skip # noqa: E501


def test_callbacks_and_reports_are_those_of_trainer(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "logs"))
        run = trainer(
            tmp_path, eval_dataset=token_rows(4), max_steps=20, method_options={"rank": 4, "lr": 1e-30},
            lr=1e-30, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
            save_total_limit=2, load_best_model_at_end=True, metric_for_best_model="eval_loss",
            report_to="tensorboard", callbacks=[EarlyStoppingCallback(2)],
        )  # fmt: skip
        assert run.train().global_step == 3, "no evaluation is better than the first"
    events = EventAccumulator(str(tmp_path / "logs"))
    events.Reload()
    logged = [line["loss"] for line in run.state.log_history if "loss" in line]
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx(logged)
    assert [event.value for event in events.Scalars("train/forward_passes")] == [2, 4, 6]
    assert len(list(tmp_path.glob("checkpoint-*"))) == 2


def test_what_is_pushed_is_the_adapter(tmp_path, monkeypatch):
    """The hub alone is a stand-in."""
    import huggingface_hub

    pushed = {}

    def create(self, repo_id, **_):
        return huggingface_hub.RepoUrl(f"https://huggingface.co/{repo_id}")

    def upload(self, *, folder_path, repo_id, **_):
        pushed[repo_id] = {path.name for path in type(tmp_path)(folder_path).iterdir()}

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", create)
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload)
    monkeypatch.setattr("transformers.trainer.create_repo", lambda name, **_: create(None, name), raising=False)
    monkeypatch.setattr("transformers.trainer.upload_folder", lambda **named: upload(None, **named), raising=False)
    run = trainer(tmp_path, hub_model_id="me/tuned", hub_token="hf_none")
    run.train()
    run.push_to_hub()
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "README.md"} <= pushed["me/tuned"]


def test_a_packed_base_is_tuned_and_keeps_its_bits(tmp_path):
    pytest.importorskip("bitsandbytes", reason="of the extra `quantization`")
    plain = llama(hidden_size=64, intermediate_size=128)
    plain.save_pretrained(tmp_path / "base")
    packing = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )

    def packed():
        return transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "base", quantization_config=packing, dtype=torch.float32
        )

    model = packed()
    before = digest(dict(model.named_parameters()))
    more = {"method": "head-feedback", "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    run = trainer(tmp_path / "run", model, **more)
    assert model.is_quantized, "as it was"
    run.train()
    assert digest(dict(model.named_parameters())) == before
    resumed = trainer(tmp_path / "again", packed(), **more)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-2"))
    assert same(resumed.tuner.resumable_state(), run.tuner.resumable_state())
    run.save_model()
    other = packed()
    stay_packed(other)  # bitsandbytes would pack it anew at the first pass, for some CPUs
    loaded = peft.PeftModel.from_pretrained(other, tmp_path / "run")
    batch = run.data_collator.batches[-1]
    assert torch.allclose(tuned_logits(loaded, batch), tuned_logits(run.model, batch), atol=1e-4)
    assert (tuned_logits(packed(), batch) - tuned_logits(run.model, batch)).abs().max() > 1e-2
    with pytest.raises(RequestError, match="cannot be written in place"):
        trainer(tmp_path, packed(), method="mezo", method_options={}).train()


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ({"max_grad_norm": 0.5}, "max_grad_norm is 0.5: there is no gradient to clip"),
        ({"optim": "sgd"}, "the method takes the place of a gradient optimizer"),
        ({"bf16_full_eval": True}, "load the model with dtype=torch.bfloat16"),
        ({"neftune_noise_alpha": 5.0}, "steps run in evaluation mode"),
        ({"auto_find_batch_size": True}, "set the batch size"),
        ({"torch_compile": True}, "a compiled model is not supported"),
        ({"method": "adam"}, "'adam', which needs more than the loss of a batch; use tezo.train for it"),
        ({"method": "forward-gradient"}, "use tezo.train for it"),
        ({"method": "es"}, "'es', which needs more .*; use tezo.train or tezo.prepare for it"),
        ({"method": "gauss-newton"}, "use tezo.train or tezo.prepare for it"),
        ({"method": "unlike"}, "no such method. Known: head-feedback, mezo, "),
        ({"method": "tezzo"}, "Did you mean 'tezo'"),
        ({"method_options": {"rnak": 4}}, "Did you mean 'rank'"),
        ({"learning_rate": 6e-5}, r"give method_options=\{'lr': 6e-05\}, and leave learning_rate out"),
        (
            {"load_best_model_at_end": True, "save_only_model": True, "eval_strategy": "steps",
             "save_strategy": "steps", "eval_dataset": [1]},
            "save_only_model leaves out the state",
        ),
        ({"optimizers": (torch.optim.SGD(nn.Linear(1, 1).parameters()), None)}, "optimizers and"),
    ],
)  # fmt: skip
def test_what_is_of_gradients_is_refused_in_a_sentence(tmp_path, named, words):
    with pytest.raises(RequestError, match=words):
        trainer(tmp_path, **named)


def test_several_processes_are_refused(tmp_path):
    class Two(transformers.TrainingArguments):
        world_size = 2

    with pytest.raises(RequestError, match="2 processes, which do not exchange losses here"):
        tezo.TezoTrainer(llama(), Two(str(tmp_path), use_cpu=True), train_dataset=token_rows(2))
    with pytest.raises(RequestError, match="args is missing"):
        tezo.TezoTrainer(llama(), train_dataset=token_rows(2))


def test_the_rate_is_the_methods_and_is_resolved_as_in_a_run(tmp_path):
    published = trainer(tmp_path, lr=None, method="mezo", method_options={})
    published.train()
    assert (published.args.learning_rate, published.tuner.rho) == (1e-6, 1e-3), "the paper's settings"
    ours = trainer(tmp_path, lr=None, method="head-feedback", max_steps=40, rows=token_rows(40))
    ours.train()
    settings = ours.tuner.settings
    assert {name for name, setting in settings.items() if setting.source == RESOLVED} == {
        "lr", "rho", "directions", "feedback_first", "feedback_last"
    }  # fmt: skip
    assert ours.args.learning_rate == settings["lr"].value and settings["directions"].value == "per-example"


def test_a_rate_is_searched_where_each_row_has_directions_and_parts_of_batches_are_dropped(tmp_path):
    rows = token_rows(10)
    named = {"method": "head-feedback", "lr": None, "max_steps": 80, "dataloader_drop_last": True}
    made = trainer(tmp_path, rows=rows, eval_dataset=rows, **named)
    made.train()
    assert made.tuner.per_example and made.tuner.num_steps == 80 and made.args.dataloader_drop_last
    assert made.tuner.settings["lr"].source == "resolved" and isinstance(made.tuner.settings["lr"].value, float)


def test_feedback_steps_are_taken_where_a_run_takes_them(tmp_path):
    run = trainer(tmp_path, method="head-feedback", max_steps=100, rows=token_rows(16), lr=1e-3)
    kinds = []

    class Watch(transformers.TrainerCallback):
        def on_step_end(self, *_, **__):
            kinds.append(run.tuner.last_step.rule)

    run.add_callback(Watch())
    run.train()
    first, last = default_counts(100)
    assert kinds == ["feedback"] * first + ["two-point"] * (100 - first - last) + ["feedback"] * last


@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_mixed_precision_is_off_and_says_so(tmp_path, caplog, half):
    args = arguments(tmp_path, **{half: True})
    run = tezo.TezoTrainer(llama(), args, train_dataset=token_rows(4), data_collator=Collator(), method="tezo")
    assert f"{half}: autocast is off, and the model computes in torch.float32" in caplog.text
    run.train()
    assert run.accelerator.mixed_precision == "no" and run.accelerator.scaler is None
    assert getattr(args, half) is True, "the user's own are not changed"


def test_a_model_in_half_precision_gets_a_scale_that_its_rounding_allows(tmp_path):
    run = trainer(tmp_path, llama().to(torch.bfloat16), method="head-feedback", seed=1)
    run.train()
    assert run.tuner.rho > 1e-3


def test_a_model_that_is_tuned_already_is_refused(tmp_path):
    model = llama()
    first = trainer(tmp_path, model)
    first.train()
    with pytest.raises(RequestError, match="has been tuned by another trainer"):
        trainer(tmp_path, model).train()
    first.tuner.merge()
    trainer(tmp_path, model).train()


def test_a_loss_that_is_not_finite_ends_the_run_with_the_parameters_before(tmp_path):
    def spoilt(outputs, labels, num_items_in_batch=None):
        return outputs["logits"].float().mean() / 0

    with pytest.raises(NonFiniteLossError, match="at step 0"):
        trainer(tmp_path, compute_loss_func=spoilt).train()


def test_rows_that_stream_have_a_shared_direction(tmp_path):
    rows = token_rows(12).to_iterable_dataset()
    run = trainer(tmp_path, rows=rows, method="head-feedback")
    run.train()
    assert len(run.tuner.last_step.probes) == 1


def test_a_stock_trainer_names_the_trainer_to_use(tmp_path):
    model = llama()
    optimizer = tezo.tezo(model, rank=4)
    stock = transformers.Trainer(
        model, arguments(tmp_path), train_dataset=token_rows(4), data_collator=Collator(),
        optimizers=(optimizer, None),
    )  # fmt: skip
    with pytest.raises(RequestError, match=r"tezo\.TezoTrainer"):
        stock.train()


def test_the_arguments_in_a_checkpoint_say_what_ran(tmp_path):
    run = trainer(tmp_path, method="head-feedback", save_strategy="steps", save_steps=3)
    run.train()
    state = json.loads((tmp_path / "checkpoint-3/tezo_state/checkpoint-3/state.json").read_text())
    assert state["method"]["name"] == "head-feedback"
    assert state["method"]["options"] | {"rank": 4, "directions": "per-example"} == state["method"]["options"]
