"""The perturbation scale that a run measures: curvature and rounding within their bounds along its own directions."""

import json
import math
import warnings

import pytest
import torch
from cases import CASES
from folders import completion_rows, model_folder, refused, tezo, train, write_rows
from tiny import Regression, lm_loss, tiny_gpt2, tiny_llama, tiny_opt, tokens
from torch import nn
from trainers import trainer

import tezo as library
from tezo.methods import METHODS
from tezo.methods.lozo import lozo
from tezo.methods.mezo import mezo
from tezo.methods.tezo import tezo as plain_tezo
from tezo.optim.measured_scale import (
    FAR,
    MOST_CURVATURE,
    MOST_RISE,
    MOST_ROUNDING,
    SCALES,
    ScaleError,
    in_words,
    measure_scale,
    most_passes,
    predicted_scale,
)
from tezo.system.errors import NonFiniteLossError, PerturbationWarning
from tezo.training import choices as resolution
from tezo.training.choices import ROUNDED_BITS, first_scale, known_rounding
from tezo.training.job import make_optimizer, prepare
from tezo.training.listeners import Listener
from tezo.training.rows_of_steps import basis_passes
from tezo.training.settings import parse_config, read_config


class Squares:
    """Rows of least squares, as a loss of each: exactly quadratic in the weight."""

    def __init__(self, dtype: torch.dtype = torch.float64, rows: int = 200, size: float = 1.0) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 5, bias=False, dtype=dtype))
        self.x = size * torch.randn(rows, 6, dtype=dtype)
        self.y = torch.randn(rows, 5, dtype=dtype)
        self.calls = 0

    def losses(self) -> torch.Tensor:
        self.calls += 1
        return (self.model(self.x) - self.y).square().sum(1)

    def rounded(self, q: float) -> torch.Tensor:
        """Off by errors of variance q^2 / 12 that look random, as those of long computations do."""
        values = self.losses()
        return values + q * ((values * 1e8).frac().abs() - 0.5)

    def optimizer(self, **options):
        return plain_tezo(self.model, rank=3, seed=1, scale="unit", **options)

    def ratio(self, optimizer) -> float:
        """Even part over odd part at rho = 1."""
        weight = self.model[0].weight
        with torch.no_grad():
            own = self.losses()
            optimizer.refresh()
            (direction,) = optimizer.draw().directions["0.weight"]
            z = direction.u_MR * direction.coefficient @ direction.v_NR.T
            points = []
            for sign in (1, -1):
                weight.add_(sign * z)
                points.append(self.losses())
                weight.sub_(sign * z)
        even, odd = (points[0] + points[1]) / 2 - own, (points[0] - points[1]) / 2
        return float(even.square().mean().sqrt() / odd.square().mean().sqrt())


@pytest.mark.parametrize("size", [0.3, 1.0, 30.0, 1000.0])
def test_of_a_quadratic_it_is_the_largest_scale_whose_curvature_is_within_the_bound(size):
    rows = Squares(size=size)
    optimizer = rows.optimizer()
    ratio = rows.ratio(optimizer)
    rows.calls = 0
    found = measure_scale(optimizer, rows.losses, SCALES[0])
    for at in found.tried:
        assert at.curvature == pytest.approx(at.rho * ratio, rel=1e-6)
    assert found.chosen.rho == max(scale for scale in SCALES if scale * ratio <= MOST_CURVATURE)
    assert found.chosen.excess <= 1 and found.num_forward_passes == rows.calls <= most_passes(1)
    assert optimizer.num_steps == 0 and found.loss == pytest.approx(float(rows.losses().detach().mean()))


def test_rows_that_move_together_are_measured_along_the_directions_of_each():
    # along one direction the slopes of all rows are one number, which may be near zero; along 64 the mean square is not
    rows = Squares()
    rows.x, rows.y = rows.x[:1].expand(64, -1), rows.y[:1].expand(64, -1)
    chosen = []
    for seed in range(8):
        optimizer = lozo(rows.model, rank=6, seed=seed, directions="per-example", lazy_update_interval=None)
        rows.calls = 0
        found = measure_scale(optimizer, rows.losses, 1e-1)
        assert found.num_forward_passes == rows.calls <= most_passes(1), "no more passes than along one direction"
        kappas = [probe.projected_grad for probe in optimizer.measure(rows.losses, found.chosen.rho)]
        assert found.kappa_sq == pytest.approx(sum(kappa**2 for kappa in kappas) / 64**2)
        chosen.append(SCALES.index(found.chosen.rho))
        optimizer.close()
    assert max(chosen) - min(chosen) <= 1


def test_its_figures_are_those_of_the_mean_loss_along_the_directions():
    rows = Squares()
    optimizer = rows.optimizer()
    found = measure_scale(optimizer, rows.losses, 1e-3)
    (probe,) = optimizer.measure(lambda: rows.losses().mean(), 1e-3)
    assert found.kappa_sq == pytest.approx(probe.projected_grad**2)
    own = float(rows.losses().detach().mean())
    second = (probe.loss_plus + probe.loss_minus - 2 * own) / 1e-6
    assert found.second_derivative == pytest.approx(second, rel=1e-5)


@pytest.mark.parametrize("q", [1e-4, 1e-3, 1e-2])
def test_rounding_is_told_by_one_pass_where_the_even_part_does_not_bound_it(q):
    # of the odd part the variance is half of a loss's
    rows = Squares(rows=2000)
    optimizer = rows.optimizer()
    rounded = measure_scale(optimizer, lambda: rows.rounded(q), 1e-3)
    at = next(at for at in rounded.tried if at.rho == 1e-3)
    plus, minus = [], []
    optimizer.measure(
        lambda: (plus if len(plus) <= len(minus) else minus).append(rows.losses()) or plus[0].mean(), 1e-3
    )
    odd = float(((plus[0] - minus[0]) / 2).square().mean().sqrt())
    true = q / 24**0.5 / odd
    if len(rounded.tried) == 1 and rounded.num_forward_passes == 3:
        assert 0.9 * true <= at.rounding <= MOST_ROUNDING
    else:
        assert at.rounding == pytest.approx(true, rel=0.1)  # 2000 rows: 1.6 % of a standard deviation


@pytest.mark.parametrize("q", [1e-3, 1e-2, 1e-1])
def test_where_rounding_is_too_large_and_curvature_leaves_room_the_scale_is_larger(q):
    rows = Squares(size=0.3)
    optimizer = rows.optimizer()
    found = measure_scale(optimizer, lambda: rows.rounded(q), 1e-3)
    first = found.tried[0]
    assert first.rho == 1e-3 and first.rounding > MOST_ROUNDING and found.chosen.rho > 1e-3
    assert found.chosen.excess < first.excess


@pytest.mark.parametrize("kind", [tiny_opt, tiny_llama, tiny_gpt2])
def test_a_loss_in_float32_is_rounded_by_less_than_its_bound(kind):
    ids, worst = tokens(batch=8, length=20), 0.0
    for seed in range(5):
        exact, model = (kind(dtype) for dtype in (torch.float64, torch.float32))
        draw = torch.Generator().manual_seed(seed)
        for wide, own in zip(exact.parameters(), model.parameters(), strict=True):
            wide.data += 1e-2 * torch.randn(wide.shape, generator=draw, dtype=torch.float64)
            wide.data = wide.data.float().double()  # the same weights
            own.data = wide.data.float()
        losses = [float(lm_loss(each, ids)().detach()) for each in (model, exact)]
        worst = max(worst, abs(losses[0] - losses[1]) / losses[1])
    assert known_rounding(model) == ROUNDED_BITS * torch.finfo(torch.float32).eps > worst
    assert known_rounding(model.bfloat16()) is None


def test_where_rounding_is_known_to_be_small_no_pass_is_made_for_it():
    rows = Squares()
    first = 0.08 / rows.ratio(rows.optimizer())  # the even part is too large to say that rounding is small
    measured, known = (measure_scale(rows.optimizer(), rows.losses, first, rounding=r) for r in (None, 1e-14))
    assert (known.chosen.rho, known.num_forward_passes, measured.num_forward_passes) == (measured.chosen.rho, 3, 4)
    assert known.chosen.curvature == pytest.approx(measured.chosen.curvature, rel=1e-6)
    large = measure_scale(rows.optimizer(), rows.losses, first, rounding=1.0)
    assert large.num_forward_passes == 4, "a bound that tells nothing"


@pytest.mark.parametrize("ratio", [0.01, 0.08, 0.5, 0.99, 5.0, 50.0])
@pytest.mark.parametrize("q", [0.0, 1e-3, 1e-1])
def test_it_takes_three_to_six_passes_where_the_first_or_second_scale_does_not_destroy_the_model(ratio, q):
    rows = Squares()
    optimizer = rows.optimizer()
    found = measure_scale(optimizer, lambda: rows.rounded(q), ratio / rows.ratio(optimizer))
    destroyed = sum(at.curvature > FAR for at in found.tried)
    assert 3 <= found.num_forward_passes <= 6 + 2 * max(0, destroyed - 1) <= most_passes(1)
    assert found.num_forward_passes <= 6 or ratio > 5


def test_where_no_scale_does_both_the_least_bad_one_is_taken_and_a_dtype_named():
    rows, q = Squares(size=30.0), 50.0
    found = measure_scale(rows.optimizer(), lambda: rows.rounded(q), 1e-2)
    assert found.chosen.excess > 1 and found.chosen.rise <= MOST_RISE
    sound = [at for at in found.tried if at.rise <= MOST_RISE]
    assert found.chosen.excess == min(at.excess for at in sound)
    said = in_words(found, "bfloat16")
    assert "no scale keeps" in said and "model.dtype=float32 has one" in said and f"{found.chosen.rho:g}" in said
    assert "model.dtype=float32" not in in_words(found, "float32")


@pytest.mark.parametrize("lost", [0.0, 0.1])
def test_the_next_scale_is_between_those_tried_though_rounding_hides_the_curvature_of_one(lost):
    def scale(*tried: ScaleError) -> float | None:
        found = predicted_scale(tried)
        return None if found is None else found.rho

    tried = [ScaleError(3e-3, 2.4, 0.067, 3.0), ScaleError(3e-4, lost, 0.67, 0.1)]
    assert scale(*tried) == 1e-3
    assert scale(*tried, ScaleError(1e-3, 0.4, 0.2, 0.1)) is None, "nothing is left between"
    assert scale(ScaleError(1e-3, 0.05, 0.01)) is None, "it is sound"
    assert scale(ScaleError(1e-3, lost / 100, 0.1)) == 3e-3, "as far up as rounding asks for"
    assert scale(ScaleError(1e-2, 0.4, 0.033)) == scale(ScaleError(1e-2, 0.9, 0.033)) == 3e-3
    assert scale(ScaleError(1e-1, 50.0), ScaleError(1e-2, 0.3)) == 3e-3, "by the trial where the model is not destroyed"
    assert scale(ScaleError(1e-2, math.inf), ScaleError(1e-3, lost / 100, 0.5)) == 3e-3, "below where it is"
    found = predicted_scale([ScaleError(1e-2, 0.4, 0.001)])
    assert (found.curvature, found.rounding) == pytest.approx((0.04, 0.01))


def test_it_steps_down_from_where_losses_are_not_finite_and_says_where_they_never_are():
    rows = Squares()
    start = rows.model[0].weight.detach().clone()

    def near(radius: float):
        def losses() -> torch.Tensor:
            moved = float((rows.model[0].weight - start).norm()) if rows.model[0]._forward_hooks == {} else 0.0
            values = rows.losses()
            return torch.where((values - own).abs().max() > radius, math.nan, values) + 0 * moved

        return losses

    with torch.no_grad():
        own = rows.losses()
    found = measure_scale(rows.optimizer(), near(0.5), SCALES[0])
    assert found.tried[0].curvature == math.inf and math.isfinite(found.chosen.curvature)
    with pytest.raises(NonFiniteLossError):
        measure_scale(rows.optimizer(), near(-1.0), SCALES[0])


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    root = tmp_path_factory.mktemp("home")
    for dtype in (torch.float32, torch.bfloat16):
        model_folder(root, "opt", dtype=dtype)
    write_rows(root / "rows.jsonl", completion_rows(24))
    return root


def prepared(home, model, method="tezo", **options):
    options = {"name": method, "lr": 1e-3, "rho": "auto", **({"rank": 4} if CASES[method].low_rank else {}), **options}
    return prepare(parse_config({"model": {"name": str(home / model)}, "data": {"train": str(home / "rows.jsonl")},
                                 "method": options, "train": {"batch_size": 8}}))  # fmt: skip


@pytest.mark.parametrize("model", ["opt", "optbfloat16"])
@pytest.mark.parametrize("method", ["tezo", "head-feedback", "mezo"])
def test_a_run_measures_it_along_its_own_directions_in_every_precision(home, model, method):
    job = prepared(home, model, method)
    rho = job.config.method.options["rho"]
    assert rho in SCALES and job.optimizer.rho == rho
    (said,) = [notice for notice in job.notices if notice.startswith("method.rho: ")]
    assert f"{rho:g}" in said
    job.optimizer.refresh()
    first = {name: job.optimizer.draw().directions[name][0] for name in job.optimizer.parameters}
    job.optimizer.close()
    fresh = make_optimizer(job.config.with_options(rho=1.0), job.loaded, job.untrained)
    fresh.set_passes(basis_passes(job.loaded, job.objective, job.train, job.config.train.seed))
    fresh.refresh()
    drawn = fresh.draw().directions
    for name, direction in first.items():
        if METHODS[method].name != "mezo":
            assert torch.equal(direction.v_NR, drawn[name][0].v_NR), "of the basis that the run has"
    rows = [job.train[i] for i in job.sampler().rows(0)]
    closure = job.objective.closure(job.model, job.objective.batches(rows))
    found = measure_scale(fresh, closure if fresh.per_example else closure.row_losses, first_scale(job.model))
    fresh.close()
    assert found.chosen.rho == rho


def test_a_number_is_taken_as_it_is(home):
    job = prepared(home, "optbfloat16", rho=0.02)
    assert job.optimizer.rho == 0.02 and not any("method.rho" in notice for notice in job.notices)


def test_a_metric_has_no_scale_to_measure(home, tmp_path):
    named = {"method__rho": "auto", "train__objective": "token_accuracy"}
    refused(train(home / "optbfloat16", home / "rows.jsonl", tmp_path / "run", **named), "method.rho is auto")


def test_a_run_records_it_and_goes_on_with_it(home, tmp_path, monkeypatch):
    done = train(home / "optbfloat16", home / "rows.jsonl", tmp_path / "run", "--json")
    assert done.code == 0, done.err
    rho = read_config(tmp_path / "run/config.yaml", []).method.options["rho"]
    assert rho in SCALES
    (tmp_path / "run/manifest.json").unlink()
    monkeypatch.setattr(resolution, "measure_scale", lambda *_, **__: pytest.fail("it is measured once"))
    again = train(home / "optbfloat16", home / "rows.jsonl", tmp_path / "run", "--json", "--resume")
    assert again.code == 0, again.err
    said = [[text for text in json.loads(run.out)["notices"] if "method.rho" in text] for run in (done, again)]
    assert said[0] == said[1] and len(said[0]) == 1


def test_the_doctor_recommends_what_a_run_on_its_rows_would_take(home):
    from tezo.forecast import doctor as diagnosis

    done = tezo("doctor", "--model", home / "opt", "--set", "method.name=tezo", "--set", "method.rank=4", "--json")
    assert done.code == 0, done.err
    config = diagnosis.run_config(str(home / "opt"), [("method.name", "tezo"), ("method.rank", "4")])
    loaded = diagnosis.load(config)
    assert diagnosis.model_scale(config, loaded).chosen.rho == json.loads(done.out)["model"]["recommended_rho"]


def test_a_trainer_measures_it_too(tmp_path):
    run = trainer(tmp_path, method="head-feedback", method_options={"rank": 4})
    run.train()
    assert run.tuner.rho in SCALES
    assert trainer(tmp_path / "b", method="head-feedback", method_options={"rank": 4, "rho": 0.02}).train()


# a step on a destroyed model


def test_a_step_on_a_destroyed_model_is_a_warning_the_first_time_that_it_happens():
    model = Regression()
    optimizer = mezo(model, rho=100.0, lr=0.0)
    optimizer.unperturbed_loss = float(model.loss().detach())
    with pytest.warns(
        PerturbationWarning, match=r"with method\.rho 100 the loss at a perturbed point is .* unperturbed"
    ) as told:
        optimizer.step(model.loss)
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step(model.loss)


def test_a_closure_of_the_library_tells_the_models_own_loss_in_the_first_step():
    model = tiny_opt(torch.float32)
    batch = {"input_ids": tokens(), "labels": tokens()}
    optimizer = plain_tezo(model, rank=2, rho=1e-3, lr=0.0)
    optimizer.step(library.closure(model, batch))
    assert optimizer.unperturbed_loss == pytest.approx(float(library.closure(model, batch)().detach()))
    wild = mezo(tiny_opt(torch.float32), rho=3.0, lr=0.0, targets=("all",))
    with pytest.warns(PerturbationWarning):
        wild.step(library.closure(wild.model, batch))


@pytest.mark.parametrize("own", [1.0, math.inf, None])
def test_a_step_that_the_model_survives_says_nothing_and_takes_no_pass_more(own):
    model, calls = Regression(), []

    def loss():
        calls.append(1)
        return model.loss()

    optimizer = mezo(model, rho=1e-3, lr=1e-3)
    optimizer.unperturbed_loss = None if own is None else own * float(model.loss().detach())
    for _ in range(5):
        optimizer.step(loss)
    assert len(calls) == 2 * 5


def test_rows_that_are_harder_than_the_others_are_no_destroyed_model():
    model = Regression()
    optimizer = mezo(model, rho=1e-3, lr=0.0)
    optimizer.unperturbed_loss = float(model.loss().detach()) / 10  # of easier rows
    optimizer.step(model.loss)
    assert optimizer.unperturbed_loss == pytest.approx(float(model.loss().detach()))


class Told(Listener):
    def __init__(self):
        self.texts = []
        self.losses = []

    def started(self, job):
        self.optimizer = job.optimizer

    def evaluated(self, *what):
        self.losses.append(what[-1]["loss"])

    def warned(self, text):
        self.texts.append(text)


def test_of_a_model_that_has_learnt_the_steps_are_compared_with_what_it_is_now(home):
    told = Told()
    run = library.train(str(home / "opt"), str(home / "rows.jsonl"), method="head-feedback", rank=4, lr=1e-2, steps=8,
                        eval_every=2, listeners=[told])  # fmt: skip
    assert told.optimizer.unperturbed_loss == min(told.losses) < run.summary["before"]["loss"] - 0.05


def test_runs_and_trainers_say_it_too(home, tmp_path):
    wild = {"method__rho": 3.0, "method__lr": 1e-9, "method__targets": "all", "steps": 3}
    done = train(home / "opt", home / "rows.jsonl", tmp_path / "run", **wild)
    assert done.code == 0, done.err
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    (said,) = [notice for notice in summary["notices"] if "perturbed point" in notice]
    assert said in done.err
    told = Told()
    wild = {"method": "head-feedback", "rank": 4, "rho": 3.0, "lr": 1e-9, "targets": ("all",), "steps": 3}
    run = library.train(str(home / "opt"), str(home / "rows.jsonl"), listeners=[told], **wild)
    assert len(told.texts) == 1 and told.texts[0] in run.summary["notices"]


def test_a_trainer_logs_it(tmp_path, caplog):
    run = trainer(tmp_path, method="mezo", method_options={"rho": 3.0, "targets": ("all",)}, lr=1e-9)
    run.train()
    assert sum("perturbed point" in record.message for record in caplog.records) == 1
