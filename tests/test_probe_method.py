"""The method probe: its factors are a regression in closed form, and the model's scores change as it predicts."""

import json

import peft
import pytest
import torch
from folders import completion_rows, label_rows, model_folder, write_rows
from label_scores import Scores, noise
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import tezo
from tezo.directions.bases.basis import Predictions
from tezo.directions.outputs import Outputs, errors
from tezo.directions.targets import select_targets
from tezo.methods.probe import probe
from tezo.newton import labels as regressions
from tezo.newton.probe import LAST_BLOCKS, last_of_blocks, last_writers, length_of, probe_of
from tezo.newton.recording import ClassVectors, InputRecorder, raising
from tezo.system.errors import RequestError
from tezo.training.job import prepare
from tezo.training.settings import parse_config

CLASSES = 3


class Apart(nn.Module):
    """Two layers that write to one stream, each from inputs of its own, and scores of the stream's end."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Linear(12, 8, bias=False).double() for _ in range(2))
        self.head_CM = noise(CLASSES, 8, seed=3)
        with torch.no_grad():
            for layer, seed in ((self.left, 1), (self.right, 2)):
                layer.weight.copy_(noise(8, 12, seed=seed) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return (self.left(x[..., :12]) + self.right(x[..., 12:])) @ self.head_CM.T


def rows_of(model: nn.Module, count: int, seed: int) -> Scores:
    """Rows whose labels are a noisy function of their inputs, which have a mean."""
    x_NI = noise(count, 24, seed=seed) + noise(1, 24, seed=7)
    labels_N = (x_NI @ noise(24, CLASSES, seed=8) + noise(count, CLASSES, seed=seed + 50)).argmax(1)
    return Scores(model, x_NI, labels_N)


def exact(model: Apart) -> ClassVectors:
    """The vectors that raise each score by 1."""
    vectors_1MC = raising((model.head_CM - model.head_CM.mean(0)).T).unsqueeze(0)
    return ClassVectors(dict.fromkeys(["left.weight", "right.weight"], vectors_1MC))


@torch.no_grad()
def look_of(model: Apart, rows: Scores, rank: int = 4):
    targets = select_targets(model, ("all",))
    recorded = InputRecorder(targets)
    with rows.watching(model, recorded):
        outputs = rows.outputs()
    ranks = {target.name: rank for target in targets}
    return probe_of(recorded.found, outputs, exact(model), targets, ranks)


def predicted(look, x_NI: Tensor) -> Tensor:
    """F (N, C) = sum_l V_l^T x_l."""
    along_NR = x_NI[:, :12] @ look.inputs["left.weight"] + x_NI[:, 12:] @ look.inputs["right.weight"]
    return along_NR @ look.columns.classes_CR.T


def centred(scores_NC: Tensor) -> Tensor:
    return scores_NC - scores_NC.mean(1, keepdim=True)


@torch.no_grad()
def test_scores_of_any_row_change_by_what_the_regression_predicts_for_it():
    model = Apart()
    rows, others = rows_of(model, 60, seed=20), rows_of(model, 30, seed=21)
    look = look_of(model, rows)
    before = others.outputs().scores_TC
    for name, parameter in model.named_parameters():
        parameter += look.outputs[name] @ look.inputs[name].T
    change = centred(others.outputs().scores_TC - before)
    assert float(change.abs().max()) > 0.5
    assert torch.allclose(change, predicted(look, others.x_NI), atol=1e-9)


@torch.no_grad()
def test_the_prediction_is_a_ridge_regression_of_the_errors_and_a_bias_for_each_label():
    model = Apart()
    rows = rows_of(model, 60, seed=20)
    look, error_NC, parts = look_of(model, rows), errors(rows.outputs()), []
    for x in rows.x_NI.split(12, 1):
        m = x.mean(0)
        q = x @ m / (m @ m)
        p = x - torch.outer(q, m)
        parts.append(p / p.square().sum(1).mean().sqrt())
    p, e = torch.cat(parts, 1), error_NC - error_NC.mean(0)
    unseen, fits = {}, {}
    for ridge in regressions.RIDGES:
        scaled = ridge * float(p.square().sum(1).mean())
        fits[ridge] = p @ torch.linalg.solve(p.T @ p + scaled * torch.eye(24, dtype=torch.float64), p.T @ e)
        kept = ~torch.eye(60, dtype=torch.bool)
        alone = torch.stack([p[i] @ torch.linalg.solve(p[k].T @ p[k] + scaled * torch.eye(24, dtype=torch.float64),
                                                       p[k].T @ e[k]) for i, k in enumerate(kept)])  # fmt: skip
        unseen[ridge] = float((alone * e).sum() / alone.norm() / e.norm())
    f = fits[max(unseen, key=unseen.get)]
    terms = torch.cat([f.reshape(-1, 1), torch.kron(q.unsqueeze(1), torch.eye(CLASSES)).double()], 1)
    change = predicted(look, rows.x_NI)
    solved = torch.linalg.lstsq(terms, change.reshape(-1, 1)).solution
    assert torch.allclose(terms @ solved, change.reshape(-1, 1), atol=2e-3 * float(change.abs().max()))
    assert float(solved[0]) > 1.0
    fitted, without = look.columns.changes_2ER
    assert torch.allclose(fitted @ look.columns.classes_CR.T, change, atol=2e-3 * float(change.abs().max()))
    assert torch.equal(fitted, without)


def test_a_lower_rank_keeps_the_leading_contrasts_of_labels():
    model = Apart()
    rows = rows_of(model, 60, seed=20)
    whole, one = (predicted(look_of(model, rows, rank), rows.x_NI) for rank in (4, 1))
    u, s, vh = torch.linalg.svd(whole, full_matrices=False)
    assert float(s[1]) > 0.05 * float(s[0])
    assert torch.allclose(one, s[0] * torch.outer(u[:, 0], vh[0]), atol=2e-2 * float(s[0]))


@torch.no_grad()
def test_a_step_lowers_the_loss_of_other_rows_and_a_replay_takes_the_same():
    model, again = Apart(), Apart()
    rows, others = rows_of(model, 120, seed=20), rows_of(model, 200, seed=21)
    start = others.outputs().loss()
    optimizer = probe(model, rank=4)
    optimizer.step(rows)
    assert others.outputs().loss() < 0.6 * start
    assert optimizer.last_step.forward_passes == 2 and len(optimizer.last_step.probes) == 1
    second = probe(again, rank=4)
    second.basis.load_state(optimizer.basis.state())
    second.replay(optimizer.last_step)
    assert torch.equal(again(others.x_NI), model(others.x_NI))
    optimizer.close()
    second.close()


@pytest.mark.parametrize(
    ("acts", "length"), [(1.0, 1.0), (0.8, 1.25), (1.6, 0.625), (0.1, 2.0), (3.0, 0.5), (-1.0, 0.0)]
)
def test_the_length_of_a_step_is_that_after_which_scores_have_changed_as_predicted(acts, length):
    wanted = centred(noise(40, 3, seed=30))
    before = Outputs(noise(40, 3, seed=31), torch.arange(40) % 3, torch.arange(40), shared=True)
    moved = Outputs(before.scores_TC + acts * wanted + 5.0, before.labels_T, before.example_T, shared=True)
    told = Predictions(wanted.unsqueeze(-1), wanted.unsqueeze(-1))
    assert length_of(before, moved, told) == pytest.approx(length)


def test_rows_that_the_regression_has_not_had_choose_the_length_by_their_loss():
    labels = torch.arange(40) % 2
    right = torch.nn.functional.one_hot(labels).double()
    zero = torch.zeros(40, 2, dtype=torch.float64)
    before = Outputs(zero, labels, torch.arange(40), shared=True)
    for change, length in ((right, 1.0), (-right, 0.0)):
        moved = Outputs(change, labels, before.example_T, shared=True)
        assert length_of(before, moved, None) == length
        assert length_of(before, moved, Predictions(zero[:0].unsqueeze(-1), zero[:0].unsqueeze(-1))) == length


def test_the_last_writer_of_each_of_the_last_blocks_is_changed():
    model = nn.Sequential(*(nn.ModuleDict({"a": nn.Linear(4, 4), "up": nn.Linear(4, 6), "down": nn.Linear(6, 4)})
                            for _ in range(LAST_BLOCKS + 2)))  # fmt: skip
    tuned, blocks = last_writers(select_targets(model)), range(2, LAST_BLOCKS + 2)
    assert [t.name for t in tuned] == [f"{block}.{name}.weight" for block in blocks for name in ("a", "down")]
    assert [t.name for t in last_of_blocks(tuned)] == [f"{block}.down.weight" for block in blocks]
    without = [t for t in tuned if t.name != "3.down.weight"]  # whose inputs are not known for each token, as in OPT
    assert [t.name for t in last_of_blocks(without)][1] == "3.a.weight"


def job_of(folder, rows, **data):
    write_rows(folder / "rows.jsonl", rows)
    model_folder(folder, "llama")
    return prepare(parse_config({"model": {"name": str(folder / "llama"), "device": "cpu"},
                                 "data": {"train": str(folder / "rows.jsonl"), **data},
                                 "method": {"name": "probe", "rank": 4}}))  # fmt: skip


def test_the_adapter_has_the_scores_of_the_tuned_model(tmp_path):
    job = job_of(tmp_path, label_rows(60), num_dev=12)
    rows = job.batches(job.sampler().rows(0))
    closure = job.objective.closure(job.model, rows)
    with torch.no_grad():
        before = closure.outputs()
        job.optimizer.step(closure)
        tuned = closure.outputs()
        tezo.export_adapter(job.optimizer, tmp_path / "adapter")
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "llama").eval()
        loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
        again = job.objective.closure(loaded, rows).outputs()
    assert float((tuned.scores_TC - before.scores_TC).abs().max()) > 0.05
    assert tuned.loss() < before.loss()
    assert torch.allclose(again.scores_TC, tuned.scores_TC, atol=1e-4)
    weights = json.loads((tmp_path / "adapter/adapter_config.json").read_text())["target_modules"]
    assert "down_proj" in str(weights) and "up_proj" not in str(weights)
    job.optimizer.close()


def test_a_run_is_one_step_and_is_compared_with_the_probe_of_the_verdict(tmp_path):
    model = model_folder(tmp_path, "llama")
    run = tezo.train(str(model), label_rows(120), method="probe", output=tmp_path / "run", progress=False)
    assert run.summary["steps"] == 1 and run.summary["dev_loss"] < run.summary["dev_loss_before"]
    assert {"bias", "probe"} == {*run.summary["untuned"]}
    run.close()


def test_rows_without_common_labels_are_refused_with_the_line_to_write(tmp_path):
    with pytest.raises(RequestError, match=r"method\.name is probe.* labels .*--method head-feedback"):
        job_of(tmp_path, completion_rows(20))
    optimizer = probe(Apart(), rank=4)
    with pytest.raises(RequestError, match="the closure returns only a loss"):
        optimizer.step(lambda: optimizer.model(torch.ones(1, 24, dtype=torch.float64)).sum())
    optimizer.close()
