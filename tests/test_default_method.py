"""The method of a run that names none: by its rows and its model, whatever else is set; and that a run keeps it."""

import json
from dataclasses import replace

import pytest
import torch
from folders import completion_rows, label_rows, model_folder, projected_opt, write_rows
from kills import contents
from short_runs import stopped

import tezo
from tezo.methods import METHODS
from tezo.newton.labels import Layout, rank_for
from tezo.optim.settings import GIVEN, RESOLVED
from tezo.runs.step_log import read_log
from tezo.tasks.evaluation import evaluate
from tezo.training import stopping
from tezo.training.choices import choose_size
from tezo.training.job import prepare
from tezo.training.listeners import Listener
from tezo.training.loop import train
from tezo.training.resume import replay
from tezo.training.rows_of_steps import HeldOutRows, lr_factor
from tezo.training.settings import TrainConfig, dump_config, parse_config, parse_setting, read_config

COUNTS = ["train.steps=3", "train.epochs=1", "train.batch_size=2", "train.feedback_first=0", "train.seed=5",
          "train.schedule=linear", "train.eval_every=2", "train.guard=false", "train.parallel=directions",
          "method.weight_decay=0.0"]  # fmt: skip
OPTIONS = {"labels": ["method.lr=0.5", "method.rank=2", "method.num_directions=3", "method.rho=0.2"],
           "texts": ["method.lr=0.5", "method.rank=2"]}  # fmt: skip
METHOD_OF = {"labels": "gauss-newton", "texts": "gauss-newton", "reward": "policy-gradient"}


class DevLosses(Listener):
    def __init__(self):
        self.losses = {}

    def evaluated(self, split, step, metrics):
        if split == "dev":
            self.losses[step] = metrics["loss"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("default")
    for family in ("llama", "roberta"):
        model_folder(folder, family)
    projected_opt(folder / "projected")
    write_rows(folder / "labels.jsonl", label_rows(160, seed=1))
    write_rows(folder / "texts.jsonl", completion_rows(12, seed=1))
    return folder


def request(home, *, model="llama", data="labels", settings=()):
    config = {"model": {"name": str(home / model), "device": "cpu"}, "data": {"train": str(home / f"{data}.jsonl")}}
    given = dict(map(parse_setting, settings))
    for key, value in given.items():
        section, _, name = key.partition(".")
        config.setdefault(section, {})[name] = value
    return parse_config(config)


def chosen(config):
    job = prepare(config, measuring=False)
    job.optimizer.close()
    return job


@pytest.mark.parametrize(("data", "rounds"), [("labels", 6), ("texts", 3)])
def test_rows_of_a_causal_model_and_nothing_set_that_depends_on_it(home, data, rounds):
    job = chosen(request(home, data=data))
    assert job.config.method.name == "gauss-newton"
    assert (job.config.train.steps, job.config.train.guard) == (rounds, True)


@pytest.mark.parametrize(("labels", "rank"), [(2, 16), (6, 16), (8, 21), (22, 63), (23, 45), (32, 63), (40, 64)])
def test_many_labels_have_a_rank_with_a_column_for_each_contrast(home, tmp_path, labels, rank):
    rows = [{"text": f"a row of w{i % labels} and {i}", "label": f"w{i % labels}"} for i in range(4 * labels)]
    data = {"train": str(write_rows(tmp_path / "rows.jsonl", rows)), "allow_fewer": True}
    config = {"model": {"name": str(home / "llama")}, "data": data}
    job = chosen(parse_config(config))
    assert job.config.method.options["rank"] == rank == rank_for(labels)
    assert job.optimizer.settings["rank"].source == RESOLVED
    layout = Layout.of(labels, 2, rank, 1000)
    assert (layout.contrasts == labels - 1) == (labels < 40)
    assert (layout.biases == labels - 1) == (labels <= 22)
    left = chosen(parse_config(config | {"method": {"rank": "auto"}}))
    assert (left.config.method.options["rank"], left.optimizer.settings["rank"].source) == (rank, RESOLVED)
    own = chosen(parse_config(config | {"method": {"name": "gauss-newton", "rank": 5}}))
    assert own.config.method.options["rank"] == 5 and own.optimizer.settings["rank"].source == GIVEN


@pytest.mark.parametrize(
    "case",
    [
        {"model": "projected", "data": "texts"},
        {"model": "roberta"},
        {"settings": ["train.objective=accuracy", "method.lr=1e-3"]},
        {"settings": ["model.peft=lora"]},
        {"settings": ["method.name=head-feedback"]},
    ],
    ids=str,
)
def test_other_requests_have_head_feedback(home, case):
    assert chosen(request(home, **case)).config.method.name == "head-feedback"


def chosen_of(home, data, settings=()):
    if data != "reward":
        return chosen(request(home, data=data, settings=settings))
    settings = [*settings, "train.reward=score.py:f", "train.max_new_tokens=4"]
    job = prepare(request(home, data="texts", settings=settings), measuring=False, score=lambda *_: 1.0)
    job.optimizer.close()
    return job


@pytest.mark.parametrize("data", METHOD_OF)
@pytest.mark.parametrize("setting", [*COUNTS, "method.lr=0.5", "method.rank=2"])
def test_no_setting_changes_the_method(home, data, setting):
    job = chosen_of(home, data, [setting])
    assert job.config.method.name == METHOD_OF[data]
    key, _, value = setting.partition(".")[2].partition("=")
    kept = {**vars(job.config.train), **job.config.method.options}[key]
    assert str(kept).lower() == value or (key, kept) == ("epochs", 1.0)


@pytest.mark.parametrize("setting", ["method.num_directions=3", "method.rho=0.2", "method.basis=errors"])
def test_what_the_default_has_is_taken(home, setting):
    job = chosen(request(home, settings=[setting]))
    key, value = parse_setting(setting)
    assert job.config.method.name == "gauss-newton"
    assert str(job.config.method.options[key.partition(".")[2]]) == value


@pytest.mark.parametrize(
    ("data", "settings", "named"),
    [
        ("labels", ["method.betas=[0.9, 0.99]"], "head-feedback"),
        ("labels", ["method.directions=shared", "train.steps=3"], "head-feedback"),
        ("texts", ["method.rank_rule=energy"], "tezo"),
        ("labels", ["method.eps=1e-5", "method.rank_threshold=0.3"], "tezo-adam"),
        ("labels", ["method.lr=auto"], "head-feedback"),
        ("reward", ["method.directions=shared"], "head-feedback"),
        ("reward", ["method.num_directions=3"], "es"),
    ],
    ids=str,
)
def test_what_the_default_lacks_is_refused_with_the_line_to_write(home, data, settings, named):
    key = parse_setting(settings[0])[0]
    with pytest.raises(tezo.RequestError) as told:
        chosen_of(home, data, settings)
    text = str(told.value)
    assert text.startswith(key) and METHOD_OF[data] in text and f"--method {named} " in text
    if data != "reward":  # the line leads there
        options = {} if named == "head-feedback" else {"data": data}
        assert (
            chosen(request(home, settings=[*settings, f"method.name={named}"], **options)).config.method.name == named
        )


def test_feedback_steps_are_refused_where_the_default_takes_none(home):
    with pytest.raises(
        tezo.RequestError, match=r"train\.feedback_first is 5, and gauss-newton .*--method head-feedback"
    ):
        chosen(request(home, settings=["train.feedback_first=5", "train.steps=200"]))


def test_an_option_that_no_method_has_is_refused_before_anything_is_read(home):
    with pytest.raises(tezo.RequestError, match=r"method\.rnak: no method has such an option.*rank"):
        request(home, settings=["method.rnak=3"])


@pytest.mark.parametrize("name", ["auto", *(name for name, each in METHODS.items() if "basis" in each.options())])
def test_auto_is_no_basis(home, name):
    with pytest.raises(tezo.RequestError, match=r"method\.basis: there is no basis 'auto'.*gaussian"):
        chosen(request(home, settings=[f"method.name={name}", "method.basis=auto"]))


@pytest.mark.parametrize(
    ("data", "words"), [("labels", "part of each step"), ("reward", "part of what a step has learnt")]
)
def test_a_rate_that_is_none_for_the_default_is_said(home, data, words):
    told = [notice for notice in chosen_of(home, data, ["method.lr=1e-4"]).notices if "method.lr" in notice]
    assert len(told) == 1 and words in told[0] and "0.0001" in told[0]
    assert not any("method.lr" in notice for notice in chosen_of(home, data).notices)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["model.peft=lora"], "model.peft is lora"),
        (["train.objective=accuracy", "method.lr=1e-3"], "train.objective is accuracy"),
    ],
)
def test_a_model_or_an_objective_that_the_default_cannot_have_is_said(home, settings, reason):
    (told,) = (notice for notice in chosen(request(home, settings=settings)).notices if "method.name" in notice)
    assert reason in told and "gauss-newton" in told


@pytest.mark.parametrize("share", ["rows", "directions"])
def test_several_processes_have_head_feedback_however_they_share_a_step(home, monkeypatch, share):
    monkeypatch.setenv("WORLD_SIZE", "2")
    job = chosen(request(home, settings=[f"train.parallel={share}"]))
    assert job.config.method.name == "head-feedback"
    assert any("because gauss-newton does not share rows among processes" in notice for notice in job.notices)


def test_an_unresolved_configuration_is_read_back_as_it_was(home, tmp_path):
    config = request(home)
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert read_config(tmp_path / "config.yaml", []) == config


def test_a_run_keeps_the_method_that_it_chose(home, tmp_path):
    config = request(home)
    train(config, tmp_path / "whole")
    stopped(config, tmp_path / "stopped", 1)
    train(config, tmp_path / "stopped", resume=True)
    assert contents(tmp_path / "stopped") == contents(tmp_path / "whole")
    assert train(config, tmp_path / "whole", resume=True)["method"] == "gauss-newton"  # it has ended: nothing to do
    with pytest.raises(tezo.RequestError, match=r"method\.name"):
        train(request(home, settings=["method.name=head-feedback"]), tmp_path / "whole", resume=True)
    with pytest.raises(tezo.RequestError, match=r"method\.betas: gauss-newton, the default here, has no such option"):
        train(request(home, settings=["method.betas=[0.9, 0.9]"]), tmp_path / "whole", resume=True)
    replay(tmp_path / "whole", output=tmp_path / "again")


@pytest.mark.parametrize(
    ("name", "given", "expected"), [("es", None, "linear"), ("tezo", None, "constant"), ("es", "constant", "constant")]
)
def test_a_method_has_its_schedule_unless_one_is_given(name, given, expected):
    train_settings = TrainConfig(steps=8, schedule=given)
    found = {choice.key: choice.value for choice in choose_size(train_settings, 4, METHODS[name])}
    assert found["train.schedule"] == expected
    assert lr_factor(6, replace(train_settings, schedule=expected)) == (0.25 if expected == "linear" else 1.0)


def test_runs_on_free_text_have_sizes_of_their_own(home):
    write_rows(home / "many.jsonl", completion_rows(60, seed=2))
    write_rows(home / "fewer.jsonl", label_rows(120, seed=2))
    for data, size, settings in (("many", (32, 3), ()), ("fewer", (88, 6), ()),  # all that no dev row is
                                 ("many", (5, 9), ("train.batch_size=5", "train.steps=9"))):  # fmt: skip
        job = prepare(request(home, data=data, settings=("method.name=gauss-newton", *settings)), measuring=False)
        job.optimizer.close()
        assert (job.config.train.batch_size, job.config.train.steps) == size, data


def test_a_run_ends_after_two_rounds_that_took_no_step(home, tmp_path):
    # labels that a text does not tell: after its bias there is nothing to learn
    same = [{"text": "what it says", "label": label} for label in ["a", "b"] * 60]
    write_rows(home / "same.jsonl", same)
    settings = ["train.steps=9", "method.name=gauss-newton", "data.hold_out=0", f"data.test={home / 'same.jsonl'}"]
    found = train(request(home, data="same", settings=settings), tmp_path / "run")
    kappas = [any(step.projected_grads) for step in read_log(tmp_path / "run/steps.log").steps]
    assert found["stopped"] == "idle" and len(kappas) == found["steps"] < 9
    assert kappas[-2:] == [False, False]
    assert "hardly lowered the loss of rows that they were not fitted to" in found["verdict"]
    to_the_end = train(request(home, data="same", settings=[*settings, "train.guard=false"]), tmp_path / "all")
    assert to_the_end["steps"] == 9 and to_the_end["stopped"] is None
    stopped(request(home, data="same", settings=settings), tmp_path / "killed", found["steps"] - 1)
    resumed = train(request(home, data="same", settings=settings), tmp_path / "killed", resume=True)
    assert (resumed["steps"], resumed["stopped"]) == (found["steps"], "idle")
    assert contents(tmp_path / "killed/adapter") == contents(tmp_path / "run/adapter")
    (tmp_path / "run/manifest.json").unlink()  # its last files are written again
    again = train(request(home, data="same", settings=settings), tmp_path / "run", resume=True)
    assert again["stopped"] == "idle" and again["verdict"] == found["verdict"]


def test_a_run_that_ends_between_two_evaluations_has_measured_its_last_state(home, tmp_path, monkeypatch):
    monkeypatch.setattr(stopping, "_is_idle", lambda history: history.steps == 4)
    made = request(home, settings=["train.steps=60", "method.name=gauss-newton", "train.eval_every=7",
                                   "data.hold_out=0.3", f"data.test={home / 'labels.jsonl'}"])  # fmt: skip
    found = train(made, tmp_path / "run")
    log = read_log(tmp_path / "run/steps.log")
    assert found["steps"] == 4 and ("dev", 4) in log.evaluations and log.size == log.valid
    before = contents(tmp_path / "run/adapter")
    (tmp_path / "run/manifest.json").unlink()
    again = train(made, tmp_path / "run", resume=True)
    assert all(again[key] == found[key] for key in ("kept_step", "dev_loss", "after", "verdict"))
    log = read_log(tmp_path / "run/steps.log")
    assert contents(tmp_path / "run/adapter") == before and log.size == log.valid


@pytest.mark.parametrize("least", [0.0, 0.01, 0.2])
def test_a_run_ends_where_two_rounds_in_a_row_gained_too_little_on_dev_rows(home, tmp_path, monkeypatch, least):
    monkeypatch.setattr(stopping, "IDLE_GAIN", least)
    settings = ["train.steps=7", "method.name=gauss-newton", "data.hold_out=0.3", f"data.test={home / 'labels.jsonl'}"]
    dev = DevLosses()
    found = train(request(home, settings=settings), tmp_path / "run", [dev])
    losses = dev.losses
    end, (gained, lowest) = 7, (0, losses[0])
    for step in range(1, len(losses)):
        if losses[step] < (1 - max(least, 1e-6)) * lowest:  # a round that takes no step moves it by rounding alone
            gained, lowest = step, losses[step]
        if step - gained >= 2:
            end = step
            break
    assert found["steps"] == end == len(losses) - 1
    assert least != 0.2 or (found["stopped"] == "idle" and found["kept_step"] > gained)


def test_a_run_takes_no_step_that_raises_the_dev_loss_and_ends_after_two_such_rounds(home, tmp_path):
    labels = {"train": ("a", "b"), "dev": ("b", "a")}  # what training rows tell is wrong of the dev rows
    for name, (first, second) in labels.items():
        pairs = [(f"good day {i}", first) for i in range(20)] + [(f"bad night {i}", second) for i in range(20)]
        write_rows(home / f"{name}.jsonl", [{"text": text, "label": label} for text, label in pairs])
    settings = ["train.steps=9", "method.name=gauss-newton", f"data.dev={home / 'dev.jsonl'}"]
    found = train(request(home, data="train", settings=settings), tmp_path / "run")
    assert not any(any(step.projected_grads) for step in read_log(tmp_path / "run/steps.log").steps)
    told = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    rounds = [own["round"] for own in told if "round" in own]
    assert all(
        own["taken"] == 0 < own["held_out_real"] - own["held_out"] and own["real"] < own["own"] for own in rounds
    )
    assert (found["stopped"], found["steps"], found["kept_step"]) == ("idle", 2, 0)
    stopped(request(home, data="train", settings=settings), tmp_path / "killed", 1)
    resumed = train(request(home, data="train", settings=settings), tmp_path / "killed", resume=True)
    assert (resumed["steps"], resumed["stopped"]) == (2, "idle")


@pytest.mark.parametrize("data", ["labels", pytest.param("texts", marks=pytest.mark.slow)])
def test_dev_rows_are_passed_once_for_an_evaluation_and_the_step_after_it(home, tmp_path, monkeypatch, data):
    passed, asked = [], []

    def outputs_of(self, copies, like=None):
        passed.append(like)
        return of_rows(self, copies, like)

    def outputs(self, like=None):
        found = of_held_out(self, like)
        if like is None:
            asked.append(torch.allclose(found.scores_TC, of_rows(self, 1)[0].scores_TC, rtol=0, atol=1e-5))
        return found

    def reason(history):
        return stopping.DEV_ROSE if history.steps == 2 and not history.rollbacks else None

    of_rows, of_held_out = HeldOutRows.outputs_of, HeldOutRows.outputs
    monkeypatch.setattr(HeldOutRows, "outputs_of", outputs_of)
    monkeypatch.setattr(HeldOutRows, "outputs", outputs)
    monkeypatch.setattr(stopping, "_reason", reason)
    monkeypatch.setattr(stopping, "_is_idle", lambda _: False)

    class Evaluates(Listener):
        def started(self, job):
            self.job, self.losses = job, []

        def evaluated(self, split, step, metrics):
            del step
            if split == "dev":
                self.losses.append(metrics["loss"])
                assert metrics == pytest.approx(evaluate(self.job.model, self.job.objective, self.job.dev, 4)[0])

    days = [("a good day", "a") if i % 2 else ("a bad night", "b") for i in range(30)]
    texts = [{"prompt": text, "completion": f" it was {answer}"} for text, answer in days]
    write_rows(home / "days.jsonl", texts if data == "texts" else [{"text": t, "label": label} for t, label in days])
    settings = ["train.steps=4", "method.name=gauss-newton", "method.rank=4", "data.hold_out=0.3", "train.guard=true",
                f"data.test={home / 'days.jsonl'}"]  # fmt: skip
    listener = Evaluates()
    found = train(request(home, data="days", settings=settings), tmp_path / "run", [listener])
    told = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    rounds = [own["round"] for own in told if "round" in own]
    judged = sum("held_out" in own for own in rounds)
    assert judged == len(asked) >= (3 if data == "labels" else 1)
    assert all(asked)  # they are of the parameters of the step, after a return to earlier ones too
    assert [rollback["step"] for rollback in found["rollbacks"]] == [2]
    again = 1 + 1  # what the return made false, and a last evaluation
    assert passed.count(None) == len(rounds) + again
    assert len(passed) - passed.count(None) == judged
    assert rounds[0]["held_out"] == pytest.approx(listener.losses[0])
    monkeypatch.setattr(HeldOutRows, "outputs", of_held_out)
    stopped(request(home, data="days", settings=settings), tmp_path / "killed", 3)
    train(request(home, data="days", settings=settings), tmp_path / "killed", resume=True)
    assert contents(tmp_path / "killed") == contents(tmp_path / "run")
