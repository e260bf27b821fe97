"""Gauss-Newton over random directions: the outputs, the convex model, what is looked at, the step, whole runs."""

import math
from dataclasses import replace

import pytest
import torch
from folders import completion_rows, label_rows, model_folder, write_rows
from safetensors.torch import save
from tiny import tiny_llama, tokens
from torch import Tensor, nn
from torch.nn import functional

import tezo
from tezo.directions.bases import errors as looking
from tezo.directions.bases.basis import Foretold
from tezo.directions.bases.errors import ErrorBasis, Layout, common, contrasts, regress
from tezo.directions.bases.looks import Nudges
from tezo.directions.outputs import Outputs, Places, change, errors, fitted_bias, joined, of_tokens
from tezo.directions.targets import select_targets
from tezo.forward.perturbed_parameter import Shift
from tezo.optim.estimators import gauss_newton as estimator
from tezo.optim.estimators.estimate import RowsClosure
from tezo.optim.estimators.gauss_newton import LinearModel, combined, unseen
from tezo.optim.methods.gauss_newton import gauss_newton
from tezo.system.errors import RequestError
from tezo.training.config import parse_config
from tezo.training.job import looked_and_stepped, prepare


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Scores(RowsClosure):
    """Rows of inputs whose scores are those of a module, (rows, classes)."""

    def __init__(self, model: nn.Module, x_NI: Tensor, labels_N: Tensor, held_out: "Scores | None" = None) -> None:
        self.model, self.x_NI, self.labels_N, self._held_out = model, x_NI, labels_N, held_out

    @property
    def held_out(self) -> "Scores | None":
        return self._held_out

    @property
    def tokens(self) -> int:
        return len(self.x_NI)

    @property
    def examples(self) -> int:
        return len(self.x_NI)

    def outputs(self, like: Outputs | None = None) -> Outputs:
        del like
        scores_NC = self.model(self.x_NI.unsqueeze(1)).squeeze(1)
        return Outputs(scores_NC, self.labels_N, torch.arange(len(self.x_NI)), shared=True)

    def places(self) -> list[Places]:
        every = torch.arange(len(self.x_NI))
        return [Places(every, torch.zeros_like(every), torch.zeros_like(every), every, every)]

    def losses(self, copies: int) -> Tensor:
        assert copies == 1
        return self.outputs().losses().mean().view(1)

    def example_passes(self):
        raise NotImplementedError

    def example_losses(self, copies: int):
        raise NotImplementedError


def rows(count: int, inputs: int, classes: int, seed: int) -> tuple[Tensor, Tensor]:
    x_NI = noise(count, inputs, seed=seed)
    labels_N = (x_NI @ noise(inputs, classes, seed=seed + 1) + noise(count, classes, seed=seed + 2)).argmax(1)
    return x_NI, labels_N


def softmax_model(inputs: int = 6, classes: int = 3) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(inputs, classes, bias=False)).double()
    with torch.no_grad():
        model[0].weight.copy_(noise(classes, inputs, seed=5) / 4)
    return model


def linear(own: Outputs, slopes: Tensor) -> LinearModel:
    """The model of rows that no direction was found by."""
    return LinearModel(own, slopes, slopes)


# --- outputs


def objective_closures(tmp_path) -> dict[str, RowsClosure]:
    """A closure of a run for each kind of objective, and tensors with labels."""
    found: dict[str, RowsClosure] = {}
    write_rows(tmp_path / "labels.jsonl", label_rows(12))
    write_rows(tmp_path / "texts.jsonl", completion_rows(12))
    for name, family, file in (("options", "opt", "labels"), ("text", "opt", "texts"), ("masked", "roberta", "labels"),
                               ("encoder", "bert", "labels")):  # fmt: skip
        model_folder(tmp_path / name, family)
        config = parse_config({"model": {"name": str(tmp_path / name / family)},
                               "data": {"train": str(tmp_path / f"{file}.jsonl"), "hold_out": 0.25},
                               "method": {"name": "tezo", "rank": 2},
                               "train": {"steps": 1, "batch_size": 8}})  # fmt: skip
        job = prepare(config)
        job.optimizer.close()
        found[name] = job.objective.closure(job.model, job.batches(range(8)))
    model, ids = tiny_llama(torch.float32), tokens(batch=3, length=9)
    labels = ids.clone()
    labels[:, :4] = -100
    labels[1, 4:6] = -100
    found["tensors"] = tezo.closure(model, {"input_ids": ids, "labels": labels})
    return found


@pytest.fixture(scope="module")
def closures(tmp_path_factory):
    return objective_closures(tmp_path_factory.mktemp("closures"))


KINDS = ("options", "text", "masked", "encoder", "tensors")


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_mean_loss_of_the_outputs_is_the_objective(closures, kind):
    own = closures[kind].outputs()
    assert own.loss() == pytest.approx(float(closures[kind]()), rel=2e-6)
    again = closures[kind].outputs(own)
    assert torch.equal(again.scores_TC, own.scores_TC) and len(own.example_T.unique()) == closures[kind].examples


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_every_place_of_the_outputs_is_found_once_in_the_passes(closures, kind):
    places = closures[kind].places()
    calls = []
    model = closures[kind].model if hasattr(closures[kind], "model") else closures[kind]._model
    handle = model.register_forward_pre_hook(
        lambda _, __, kwargs: calls.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    own = closures[kind].outputs()
    handle.remove()
    assert [None if p is None else len(p.example_R) for p in places] == [
        None if p is None else calls[i] for i, p in enumerate(places)
    ]
    assert len(places) == len(calls)
    numbers = torch.cat([p.place_P for p in places if p is not None])
    assert sorted(numbers.tolist()) == list(range(len(own.labels_T)))


def test_scores_of_tokens_keep_the_right_one_and_sum_to_one():
    log_probs = noise(5, 30, seed=0).log_softmax(1)
    right = torch.tensor([0, 3, 29, 7, 7])
    scores, named = of_tokens(log_probs, right, None)
    assert torch.equal(named[:, 0], right) and bool((named[:, -1] == -1).all())
    assert all(len(set(row)) == len(row) for row in named.tolist())
    assert torch.allclose(scores.exp().sum(1), torch.ones(5, dtype=torch.float64))
    assert torch.equal(functional.cross_entropy(scores, torch.zeros(5, dtype=torch.long), reduction="none").argsort(),
                       (-log_probs.gather(1, right[:, None])[:, 0]).argsort())  # fmt: skip
    likely = log_probs.scatter(1, right[:, None], -math.inf).topk(8).indices
    assert torch.equal(named[:, 1:-1], likely)


def test_a_fitted_bias_gives_each_class_its_frequency():
    labels = torch.tensor([0] * 20 + [1] * 7 + [2] * 3)
    own = Outputs(noise(30, 3, seed=1) * 2 + torch.tensor([0.0, 3.0, -2.0]), labels, torch.arange(30), shared=True)
    said = (own.scores_TC + fitted_bias(own)).softmax(1).mean(0)
    assert torch.allclose(said, torch.tensor([20, 7, 3]).double() / 30, atol=1e-7)
    assert torch.allclose(errors(own).mean(0), torch.zeros(3, dtype=torch.float64), atol=1e-7)
    assert not bool(fitted_bias(Outputs(own.scores_TC, labels, own.example_T)).any()), "classes of their own have none"


# --- the convex model


def reference(z_TC: Tensor, f_TCK: Tensor, labels_T: Tensor, ridge: float) -> Tensor:
    """The minimum by L-BFGS, of the function as it is written."""
    unit = 1 / (f_TCK.square().mean().sqrt() * math.sqrt(f_TCK.shape[-1]))
    a_K = torch.zeros(f_TCK.shape[-1], dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS(
        [a_K], max_iter=500, tolerance_grad=1e-12, tolerance_change=0.0, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        solver.zero_grad()
        loss = functional.cross_entropy(z_TC + f_TCK @ a_K, labels_T, reduction="sum")
        loss = loss + ridge * (a_K / unit).square().sum() / 2
        loss.backward()
        return loss

    solver.step(closure)
    return a_K.detach()


@pytest.mark.parametrize("classes", [2, 5])
def test_a_candidate_is_the_minimum_of_the_function_as_it_is_written(classes):
    z, f = noise(40, classes, seed=2), noise(40, classes, 6, seed=3) * 0.3
    labels = torch.arange(40) % classes
    model = linear(Outputs(z, labels, torch.arange(40)), f)
    for candidate in model.candidates():
        expected = reference(z, f, labels, candidate.ridge)
        assert torch.allclose(torch.tensor(candidate.coefficients, dtype=torch.float64), expected, atol=1e-5, rtol=1e-4)
        promised = functional.cross_entropy(z + f @ expected, labels)
        assert candidate.promised == pytest.approx(float(promised), rel=1e-6)


def test_classes_that_a_place_lacks_have_no_part_in_it():
    z, f = noise(20, 3, seed=4), noise(20, 3, 4, seed=5)
    z[:, 2] = -torch.inf
    labels, every = torch.arange(20) % 2, torch.arange(20)
    own, moved = Outputs(z, labels, every), Outputs(z + f[..., 0], labels, every)
    assert not bool(change(moved, own)[:, 2].any())
    f[:, 2] = 0
    wide, narrow = linear(own, f), linear(Outputs(z[:, :2], labels, every), f[:, :2])
    narrow._unit = wide._unit  # lambda is in units of the mean slope
    narrow._slopes_TCK = narrow._unseen_TCK = f[:, :2] * wide._unit
    for a, b in zip(wide.candidates(), narrow.candidates(), strict=True):
        assert a.promised == pytest.approx(b.promised, rel=1e-9)
        assert a.coefficients == pytest.approx(b.coefficients, rel=1e-6, abs=1e-9)


def test_cross_validation_never_fits_to_the_places_of_an_example_that_it_judges():
    # every example has four places; labels are noise, so what is learnt of other examples does not help
    z, f = torch.zeros(240, 2, dtype=torch.float64), noise(240, 2, 40, seed=6)
    labels = torch.randint(2, (60,), generator=torch.Generator().manual_seed(0)).repeat_interleave(4)
    f = f[::4].repeat_interleave(4, 0)
    own = Outputs(z, labels, torch.arange(60).repeat_interleave(4))
    loosest = linear(own, f).candidates()[0]
    assert loosest.promised < math.log(2) < loosest.validated


# --- the step


def test_where_scores_are_linear_a_step_is_the_minimum_that_it_promises():
    model = softmax_model()
    x, labels = rows(80, 6, 3, seed=10)
    closure = Scores(model, x, labels)
    optimizer = gauss_newton(model, num_directions=24, rank=3, basis="gaussian", rho=1e-3)
    before = closure.outputs().loss()
    (direction,) = (own[0] for own in optimizer.draw().directions.values())
    best = lowest_in_the_span(model[0].weight.detach().clone(), direction.u_MR, direction.v_NR, x, labels)
    assert optimizer.step(closure) == pytest.approx(before)
    (candidate, real), *_ = optimizer._two_point.tried
    after = closure.outputs().loss()
    assert real == pytest.approx(candidate.promised, abs=1e-7) and after == pytest.approx(real, abs=1e-12)
    assert optimizer.last_step.forward_passes == 24 + 2
    # 24 directions span the 3 numbers of tau, so that a small lambda leaves the minimum over them
    assert best <= after < best + 0.05 * (before - best)
    assert before - best > 0.05
    optimizer.close()


def lowest_in_the_span(w_CI: Tensor, u_CR: Tensor, v_IR: Tensor, x: Tensor, labels: Tensor) -> float:
    """The lowest loss of W + U diag(c) V^T over c."""
    c_R = torch.zeros(u_CR.shape[1], dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS([c_R], max_iter=300, tolerance_grad=1e-10, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        solver.zero_grad()
        loss = functional.cross_entropy(x @ (w_CI + (u_CR * c_R) @ v_IR.T).T, labels)
        loss.backward()
        return loss

    solver.step(closure)
    return float(closure().detach())


class Bent(nn.Module):
    """Scores that turn back: linear in the weight near 0, falling where they are large."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = softmax_model()
        with torch.no_grad():
            self.inner[0].weight.mul_(0.02)

    def forward(self, x: Tensor) -> Tensor:
        return 0.2 * torch.sin(5 * self.inner(x))


def test_a_step_never_raises_the_loss_of_its_rows():
    x, labels = rows(80, 6, 3, seed=20)
    model = Bent()
    closure = Scores(model, x, labels)
    optimizer = gauss_newton(model, num_directions=24, rank=3, basis="gaussian", rho=1e-3)
    for _ in range(4):
        before = closure.outputs().loss()
        optimizer.step(closure)
        assert closure.outputs().loss() <= before
        reals = [real for _, real in optimizer._two_point.tried]
        assert 1 <= len(reals) <= 2
    optimizer.close()


def test_a_longer_step_than_the_model_bears_is_shortened():
    x, labels = rows(80, 6, 3, seed=21)
    model = Bent()
    closure = Scores(model, x, labels)
    optimizer = gauss_newton(model, num_directions=24, rank=3, basis="gaussian", rho=1e-3)
    z = closure.outputs().scores_TC.detach()
    draw = optimizer.draw()
    optimizer.step(closure)
    (first, real), *more = optimizer._two_point.tried
    reached = []
    for scale in (1e-3, 1.0):  # the slope along the whole step, and its end, from the weights before it
        for name, moving in optimizer.moving.items():
            taken = [-kappa for kappa in optimizer.last_step.projected_grads]
            back = combined(draw.directions[name], [-own / len(taken) for own in taken])
            whole = combined(draw.directions[name], first.coefficients)
            total = whole.with_coefficient(scale * whole.coefficient + back.coefficient)
            moving.set_perturbations([Shift(total, 1.0)])
        reached.append(closure.outputs().scores_TC.detach() - z)
        for moving in optimizer.moving.values():
            moving.set_perturbations([])
    along, bend = reached[0] / 1e-3, reached[1] - reached[0] / 1e-3
    assert real > first.promised + 0.01 and more, "the linear model promised too much"
    ((shorter, _),) = more
    part = shorter.coefficients[0] / first.coefficients[0]
    assert part in [pytest.approx(own) for own in estimator.PARTS[:-1]]
    assert shorter.coefficients == pytest.approx([part * own for own in first.coefficients])
    bent = [functional.cross_entropy(z + t * along + t**2 * bend, labels) for t in estimator.PARTS]
    assert estimator.PARTS[int(torch.stack(bent).argmin())] == pytest.approx(part)
    optimizer.close()


def test_a_closure_that_returns_a_loss_is_refused():
    model = softmax_model()
    optimizer = gauss_newton(model, basis="gaussian", rank=2)
    with pytest.raises(RequestError, match=r"needs the outputs of each row.*tezo\.closure"):
        optimizer.step(lambda: model(torch.ones(1, 6, dtype=torch.float64)).sum())
    optimizer.close()


def test_a_replay_of_the_records_is_the_run_to_the_bit():
    x, labels = rows(40, 6, 3, seed=30)
    model, other = softmax_model(), softmax_model()
    first, second = (gauss_newton(m, num_directions=6, rank=2, basis="gaussian") for m in (model, other))
    for _ in range(3):
        first.step(Scores(model, x, labels))
        second.replay(first.last_step)
    for key, value in first.tuned_state().items():
        assert torch.equal(value, second.tuned_state()[key]), key
    first.close()
    second.close()


# --- the look


def ridge_regression(x: Tensor, e: Tensor, ridge: float) -> Tensor:
    """W, in the primal form."""
    scaled = ridge * float((x @ x.T).diagonal().mean())
    return torch.linalg.solve(x.T @ x + scaled * torch.eye(x.shape[1], dtype=torch.float64), x.T @ e)


def test_a_regression_is_of_the_lambda_with_the_best_signal_of_unseen_places():
    x, e = noise(30, 12, seed=40), noise(30, 2, seed=41)
    x, e = x - x.mean(0), e + x @ noise(12, 2, seed=42)
    e = e - e.mean(0)
    signals = {}
    for ridge in looking.RIDGES:
        scaled = ridge * float((x @ x.T).diagonal().mean())
        unseen = torch.empty_like(e)
        for i in range(30):  # each place by the regression of all others, with this lambda
            kept = torch.arange(30) != i
            gram = x[kept].T @ x[kept] + scaled * torch.eye(12, dtype=torch.float64)
            unseen[i] = x[i] @ torch.linalg.solve(gram, x[kept].T @ e[kept])
        signals[ridge] = float((unseen * e).sum() / unseen.norm() / e.norm()), unseen
    (found,) = regress([x.float()], e)
    ridge = max(signals, key=lambda own: signals[own][0])
    assert found.signal == pytest.approx(signals[ridge][0], abs=1e-4)
    assert torch.allclose(found.unseen_PE, signals[ridge][1], atol=1e-4)
    assert torch.allclose(found.w_IE.double(), ridge_regression(x, e, ridge), atol=1e-4)
    turns = contrasts(3)[:2]
    v = found.along(turns)
    assert torch.allclose((x @ v).square().mean(0), torch.ones(2, dtype=torch.float64), rtol=1e-4)
    for own, expected in zip(v.T, (found.w_IE.double() @ turns).T, strict=True):
        assert torch.cosine_similarity(own, expected, 0) > 1 - 1e-5


def test_noise_carries_no_signal():
    x, e = noise(200, 300, seed=50).float(), noise(200, 1, seed=51)
    (found,) = regress([x], e)
    # the best of five lambdas, each within 99.98 % of a correlation of independent numbers
    assert abs(found.signal) < 3.7 / math.sqrt(200)


def test_what_layers_say_together_is_nearer_the_truth_than_what_any_says():
    truth = noise(300, 1, seed=52) @ torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    layers = [regress([(truth @ noise(2, 20, seed=s) + 3 * noise(300, 20, seed=s + 1)).float()],
                      truth + noise(300, 2, seed=53))[0] for s in (54, 56, 58, 60)]  # fmt: skip
    turns, weights = common(layers, 1)
    assert torch.allclose(turns[:, 0].abs(), torch.full((2,), 0.5**0.5, dtype=torch.float64), atol=0.1)
    assert weights.tolist() == [1.0]

    def correlation(values: Tensor) -> float:
        return abs(float(torch.corrcoef(torch.stack([values, truth[:, 0]]))[0, 1]))

    single = [correlation(own.unseen_PE @ turns[:, 0]) for own in layers]
    together = sum(own.unseen_PE / own.unseen_PE.norm() for own in layers)
    assert correlation(together @ turns[:, 0]) > max(single)


class Stream(nn.Module):
    """Layers that write to a stream, one that only reads it, and scores of the stream's end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inside, self.last = (nn.Linear(5, 5, bias=False).double() for _ in range(3))
        self.head_CM = noise(3, 5, seed=60)
        with torch.no_grad():
            for i, layer in enumerate((self.first, self.inside, self.last)):
                layer.weight.copy_(noise(5, 5, seed=61 + i) / 4)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.first(x)
        h = h + self.last(torch.tanh(0.02 * self.inside(h)))
        return h @ self.head_CM.T


@torch.no_grad()
def test_vectors_that_raise_a_class_are_measured_and_the_layers_that_write_the_stream_found():
    model = Stream()
    x, labels = rows(60, 5, 3, seed=70)
    closure = Scores(model, x, labels)
    targets = {t.name: t for t in select_targets(model, ("all",))}
    nudges = Nudges(model, closure, closure.places(), closure.outputs(), 0)
    stream = nudges.stream(targets["last.weight"], 1.0)
    names, stream = nudges.writers(list(targets.values()), stream)
    assert names == ["first.weight", "last.weight"]
    raised = model.head_CM @ stream  # (C, C): what each vector does
    raised = raised - raised.mean(0)
    assert torch.allclose(raised.diagonal(), torch.full((3,), 2 / 3, dtype=torch.float64), atol=0.2)
    assert bool((raised.argmax(0) == torch.arange(3)).all())


@torch.no_grad()
@pytest.mark.parametrize("count", [1, 2, 4])
def test_fewer_places_than_layers_are_given_to_the_last_layers(count):
    model = Stream()
    closure = Scores(model, *rows(count, 5, 3, seed=71))
    targets = {t.name: t for t in select_targets(model, ("all",))}
    nudges = Nudges(model, closure, closure.places(), closure.outputs(), 0)
    names, stream = nudges.writers([*targets.values()], nudges.stream(targets["last.weight"], 1.0))
    assert bool(stream.isfinite().all()) and "last.weight" in names and len(names) <= count


@pytest.mark.parametrize(("classes", "kinds", "rank"), [(2, 2, 16), (6, 2, 16), (8, 2, 16), (8, 1, 6), (2, 2, 3)])
def test_columns_have_one_meaning_and_directions_are_proposed_along_all_of_them(classes, kinds, rank):
    layout = Layout.of(classes, kinds, rank)
    used = [column for kind in range(kinds) for column in range(rank)[layout.columns(kind)]]
    biases = list(range(rank)[layout.bias])
    assert sorted([*used, *biases]) == list(range(len(used) + len(biases))) and len(used) + len(biases) <= rank
    assert layout.biases == min(classes - 1, rank // 3) and 1 <= layout.contrasts <= classes - 1
    proposed = layout.proposed(torch.linspace(1, 0.5, layout.contrasts, dtype=torch.float64), rank)
    assert proposed.shape == (layout.biases + kinds + layout.contrasts * (layout.contrasts > 1), rank)
    assert bool(proposed[:, used + biases].any(0).all()), "a column that no direction moves"
    assert not bool(proposed[: layout.biases][:, used].any()) and not bool(proposed[layout.biases :][:, biases].any())
    assert torch.allclose(contrasts(classes).sum(0), torch.zeros(classes - 1, dtype=torch.float64), atol=1e-12)


def test_a_look_that_sees_what_is_wrong_mends_it_with_few_directions():
    # 40 inputs, of which two tell the labels: random factors of rank 6 hardly meet them
    ends = {}
    for basis in ("errors", "gaussian"):
        model = Stream40()
        x = noise(400, 40, seed=90)
        labels = (x[:, 3] - x[:, 17] > 0).long()
        step, other = Scores(model, x[:160], labels[:160]), Scores(model, x[160:320], labels[160:320])
        unseen = Scores(model, x[320:], labels[320:])
        optimizer = gauss_newton(model, num_directions=6, rank=6, basis=basis, rho=0.02, targets=("all",))
        optimizer.set_rows(lambda *_, other=other: other)
        optimizer.step(step)
        assert len(optimizer.last_step.probes) == (2 if basis == "errors" else 6)  # a bias, and what is foretold
        ends[basis] = unseen.outputs().loss()
        optimizer.close()
    assert ends["errors"] < 0.45 < 0.6 < ends["gaussian"]


def test_what_is_foretold_without_a_row_is_what_the_regression_of_the_others_says():
    x, e = noise(30, 12, seed=40), noise(30, 3, seed=41)
    x, e = x - x.mean(0), e + x @ noise(12, 3, seed=42)
    e = e - e.mean(0)
    (found,) = regress([x.float()], e)
    turns = contrasts(3)
    fitted, without = found.foretold(turns)
    assert torch.allclose(fitted, x @ found.along(turns), atol=1e-4)
    assert torch.allclose(fitted.square().mean(0), torch.ones(2, dtype=torch.float64), rtol=1e-4)
    assert torch.allclose(without * (x @ found.w_IE.double() @ turns).square().mean(0).sqrt(), found.unseen_PE @ turns)


def test_slopes_lose_what_is_foretold_of_their_own_rows_alone_as_far_as_it_is_real():
    fitted, without = noise(50, 3, 2, seed=43), noise(50, 3, 2, seed=44)
    constant = noise(50, 1, 2, seed=45) + noise(1, 3, 2, seed=46)  # of a row: no meaning; of a class: a bias
    order = torch.randperm(50, generator=torch.Generator().manual_seed(51))  # places are in another order

    def found(slopes: Tensor, *foretold: Tensor, order: Tensor = order) -> Tensor:
        own = Outputs(slopes[..., 0].clone(), torch.zeros(len(slopes)).long(), order, shared=True)
        return unseen(slopes, own, Foretold(*foretold))

    optimism = fitted - without
    for real, part in ((1.0, 1.0), (0.5, 0.5), (0.7, 0.2), (0.7, 0.0), (0.0, 0.4)):
        kept = (real * without + constant)[order]
        assert torch.allclose(found(kept + part * optimism[order], fitted, without), kept)
    nothing = torch.zeros_like(fitted)  # of a bias nothing is foretold
    slopes, new = noise(50, 3, 2, seed=47), order >= 20
    assert torch.equal(found(slopes, nothing, nothing), slopes)
    assert torch.equal(found(slopes, fitted[:20], without[:20])[new], slopes[new])
    many, every = noise(4000, 3, 2, seed=48), torch.arange(4000)
    other = found(many, noise(4000, 3, 2, seed=49), noise(4000, 3, 2, seed=50), order=every)
    assert float((other - many).norm() / many.norm()) < 0.05  # of other rows next to nothing is taken off


def fresh_losses(labels_of, *, honest: bool = True) -> tuple[float, float]:
    """Mean loss over eight models of rows that no look or step had, (before, after) a round on 48 rows."""
    before, after = [], []
    for seed in range(8):
        model, x = Stream40(), noise(448, 40, seed=200 + seed)
        labels = labels_of(x, seed)
        optimizer = gauss_newton(model, rank=6, rho=0.02, targets=("all",))
        if not honest:
            optimizer.perturbation.foretold = lambda _: None
        fresh = Scores(model, x[48:], labels[48:])
        before.append(fresh.outputs().loss())
        optimizer.step(Scores(model, x[:48], labels[:48]))
        after.append(fresh.outputs().loss())
        optimizer.close()
    return sum(before) / 8, sum(after) / 8


def signal(x, seed):
    return (x[:, 3] - x[:, 17] + noise(len(x), 1, seed=seed)[:, 0] > 0).long()


def chance(x, seed):
    return torch.randint(2, (len(x),), generator=torch.Generator().manual_seed(seed))


def test_rows_that_are_looked_at_and_stepped_on_do_not_promise_more_than_others_keep():
    before, after = fresh_losses(signal)
    assert after < before - 0.05 and after < fresh_losses(signal, honest=False)[1] - 0.05
    before, after = fresh_losses(chance)
    assert after < before + 0.03 < fresh_losses(chance, honest=False)[1]


def job_of(folder, file: str, hold_out: float):
    return prepare(parse_config({"model": {"name": str(folder / file / "opt")},
                                 "data": {"train": str(folder / f"{file}.jsonl"), "hold_out": hold_out,
                                          "test": str(folder / f"{file}.jsonl")},
                                 "method": {"name": "gauss-newton"}, "train": {"batch_size": 8}}))  # fmt: skip


def test_a_look_has_the_rows_of_its_step_first_where_dev_rows_judge_and_others_elsewhere(tmp_path):
    write_rows(tmp_path / "labels.jsonl", label_rows(40))
    write_rows(tmp_path / "texts.jsonl", completion_rows(40))
    for file, hold_out in (("labels", 0.25), ("labels", 0), ("texts", 0.25)):
        model_folder(tmp_path / file, "opt")
        job, both = job_of(tmp_path, file, hold_out), (file, hold_out) == ("labels", 0.25)
        assert len(job.train) == 40 * (1 - hold_out)
        looked, stepped = looked_and_stepped(job.config, job.format, len(job.train), judged=bool(job.dev))
        assert looked == stepped == range(30) if both else not {*looked} & {*stepped}
        _, rows_of = job.optimizer.perturbation.basis._source
        for step in (0, 3):
            own = job.objective.closure(job.model, job.batches(job.sampler().rows(step))).outputs()
            rows = rows_of(step, 20)
            with torch.no_grad():
                seen, told = rows.outputs(), job.optimizer.perturbation.basis.foretold(step)
            assert len(seen.example_T.unique()) == min(20, len(looked))
            assert rows.stepped == (8 if both else 0)
            if both:
                first = seen.scores_TC[seen.example_T.argsort()][:8]
                assert torch.allclose(first, own.scores_TC[own.example_T.argsort()], atol=1e-5)
            assert (told is None) == (file == "texts") and (told is None or len(told.fitted_ECJ) == rows.stepped)
        job.optimizer.close()


def test_rows_without_a_signal_are_looked_at_all_the_same():
    # of labels that nothing foretells the best signal is often negative, as one left out has the others against it
    signals = []
    for seed in range(6):
        model, x = Stream40(), noise(48, 40, seed=seed)
        labels = torch.randint(2, (48,), generator=torch.Generator().manual_seed(seed))
        optimizer = gauss_newton(model, rank=6, rho=0.02, targets=("all",))
        optimizer.step(Scores(model, x, labels))
        signals += optimizer.perturbation.basis.signal.values()
        optimizer.close()
    assert len(signals) == 6 and min(signals) < 0


@pytest.mark.parametrize(("kind", "kept"), [("same", (0.5, 1.0)), ("noisy", (0.05, 0.7)), ("opposite", (0.0, 0.0))])
def test_a_step_is_shortened_to_where_the_loss_of_held_out_rows_is_lowest(kind, kept):
    x, labels = rows(200, 6, 3, seed=60)
    sign, wrong = -1 if kind == "opposite" else 1, torch.randint(3, (60,), generator=torch.Generator().manual_seed(2))
    others = sign * x[100:], torch.cat([labels[100:140], wrong]) if kind == "noisy" else labels[100:]
    start = softmax_model()[0].weight.detach().clone()

    def weight(held_out: tuple[Tensor, Tensor] | None) -> tuple[Tensor, dict]:
        model = softmax_model()
        optimizer = gauss_newton(model, num_directions=8, rank=2, basis="gaussian", rho=0.1, targets=("all",))
        other = Scores(model, *held_out) if held_out is not None else None
        optimizer.step(Scores(model, x[:100], labels[:100], other))
        optimizer.merge()
        told = optimizer.told["round"]
        optimizer.close()
        return model[0].weight.detach().clone(), told

    whole, told = weight(None)
    assert "held_out" not in told and not torch.equal(whole, start)
    found, told = weight(others)

    def loss(part: float) -> float:
        return float(functional.cross_entropy(others[0] @ (start + part * (whole - start)).T, others[1]))

    best = min((part / 20 for part in range(21)), key=loss)
    assert told["taken"] == best and kept[0] <= best <= kept[1]
    assert torch.allclose(found, start + best * (whole - start), atol=1e-9)
    assert told["held_out"] == pytest.approx(loss(0)) and told["held_out_real"] == pytest.approx(loss(1))


def test_what_raises_labels_is_measured_once_and_inputs_at_each_step():
    model, x = Stream40(), noise(400, 40, seed=90)
    labels = (x[:, 3] - x[:, 17] > 0).long()
    optimizer = gauss_newton(model, rank=6, rho=0.02, targets=("all",))
    basis, found = optimizer.perturbation.basis, []
    optimizer.set_rows(lambda step, count: Scores(model, x[step * 10 : step * 10 + count], labels[step * 10 :][:count]))
    for step in range(3):
        optimizer.step(Scores(model, x[300:], labels[300:]))
        found.append((basis.cost[0], basis.collected(step).factors))
    assert [calls for calls, _ in found] == [4, 5, 6]  # outputs, two passes with added vectors, more rows
    first, second, third = (factors for _, factors in found)
    for name in (looking.STREAM, looking.WRITERS):
        assert torch.equal(first[name], second[name]) and torch.equal(first[name], third[name])
    assert not torch.equal(first["layer.weight"], second["layer.weight"])
    save({key: own for key, own in optimizer.resumable_state().items() if isinstance(own, Tensor)})  # none is shared
    optimizer.close()


@torch.no_grad()
@pytest.mark.parametrize("shift", [0.0, 4.0])
def test_what_raises_labels_is_measured_anew_where_they_need_a_bias_still(shift):
    model, x = Stream40(), noise(400, 40, seed=90)
    labels = (x[:, 3] - x[:, 17] > 0).long()
    optimizer = gauss_newton(model, rank=6, rho=0.02, targets=("all",))
    basis, found, calls = optimizer.perturbation.basis, [], []
    optimizer.set_rows(lambda _, count: Scores(model, x[:count], labels[:count]))
    for step in range(3):
        if step == 2:  # something else makes one label likelier everywhere
            model.register_forward_hook(lambda _, __, scores: scores + torch.tensor([shift, 0.0]))
        optimizer.step(Scores(model, x[300:], labels[300:]))
        found.append(basis.collected(step).factors[looking.STREAM])
        calls.append(basis.cost[0])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[1], found[2]) == (not shift) and calls == [4, 5, 10 if shift else 6]
    optimizer.close()


@pytest.mark.parametrize(("shift", "expected"), [(0.0, False), (0.5, False), (3.0, True)])
def test_labels_need_a_bias_where_it_lowers_the_loss_by_a_tenth(shift, expected):
    x, labels = rows(400, 6, 2, seed=70)
    scores = x @ noise(6, 2, seed=71) / 4 + torch.tensor([shift, 0.0])
    own = Outputs(scores - fitted_bias(Outputs(scores - torch.tensor([shift, 0.0]), labels, labels, shared=True)),
                  labels, torch.arange(400), shared=True)  # fmt: skip
    assert looking.is_biased(own) == expected


def test_rows_that_are_all_seen_by_the_first_look_are_not_looked_at_again(monkeypatch):
    model, x = Stream40(), noise(200, 40, seed=90)
    labels = (x[:, 3] - x[:, 17] > 0).long()
    factors = []
    for count, calls in ((256, 3), (200, 4)):  # 200: as if there were more than the first look wants
        monkeypatch.setattr(looking, "LEAST_ROWS", count)
        optimizer = gauss_newton(model, rank=6, rho=0.02, targets=("all",))
        basis = optimizer.perturbation.basis
        optimizer.set_rows(lambda *_: Scores(model, x, labels))
        optimizer.draw()
        factors.append(basis.collected(0).factors)
        assert basis.cost[0] == calls
        optimizer.close()
    for name, value in factors[0].items():
        assert torch.equal(value, factors[1][name]), name


class Stream40(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(40, 8, bias=False).double()
        self.head_CM = noise(2, 8, seed=95)
        with torch.no_grad():
            self.layer.weight.copy_(noise(8, 40, seed=96) / 40)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) @ self.head_CM.T


def test_a_basis_without_rows_says_what_to_do():
    optimizer = gauss_newton(softmax_model(), rank=2)
    with pytest.raises(RequestError, match=r"optimizer\.set_rows"):
        optimizer.draw()
    assert isinstance(optimizer.perturbation.basis, ErrorBasis)
    optimizer.close()


def test_rows_with_options_of_their_own_are_refused_in_a_sentence():
    class OwnOptions(Scores):
        def outputs(self, like: Outputs | None = None) -> Outputs:
            return replace(super().outputs(like), shared=False)

    model, (x, labels) = Stream40(), rows(32, 40, 2, seed=0)
    optimizer = gauss_newton(model, rank=6, targets=("all",))
    with pytest.raises(
        RequestError, match=r"options of their own.*method\.name=head-feedback, or method\.basis=gaussian"
    ):
        optimizer.step(OwnOptions(model, x, labels))
    optimizer.close()


def test_outputs_are_joined_in_order():
    first = Outputs(noise(2, 3, seed=0), torch.tensor([0, 1]), torch.tensor([5, 6]), shared=True)
    second = Outputs(noise(1, 2, seed=1), torch.tensor([1]), torch.tensor([2]), shared=True)
    both = joined([first, second])
    assert both.scores_TC.shape == (3, 3) and both.scores_TC[2, 2] == -math.inf
    assert both.example_T.tolist() == [5, 6, 2] and both.shared
