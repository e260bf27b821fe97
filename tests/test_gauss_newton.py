"""Steps of Gauss-Newton: the convex model, what is promised, what is taken."""

import math

import pytest
import torch
from label_scores import Scores, Stream40, noise, rows, softmax_model
from torch import Tensor, nn
from torch.nn import functional

from tezo.directions.bases.basis import Predictions
from tezo.directions.outputs import Outputs, change
from tezo.forward.perturbed_parameter import Shift
from tezo.methods.gauss_newton import gauss_newton
from tezo.newton.linear_model import PARTS, LinearModel, without_optimism
from tezo.newton.step import combined
from tezo.system.errors import RequestError


def linear(own: Outputs, slopes: Tensor) -> LinearModel:
    """The model of rows that no direction was found by."""
    return LinearModel(own, slopes, slopes)


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


def test_slopes_lose_what_is_foretold_of_their_own_rows_alone_as_far_as_it_is_real():
    fitted, without = noise(50, 3, 2, seed=43), noise(50, 3, 2, seed=44)
    constant = noise(50, 1, 2, seed=45) + noise(1, 3, 2, seed=46)  # of a row: no meaning; of a class: a bias
    order = torch.randperm(50, generator=torch.Generator().manual_seed(51))  # places are in another order

    def found(slopes: Tensor, *foretold: Tensor, order: Tensor = order) -> Tensor:
        own = Outputs(slopes[..., 0].clone(), torch.zeros(len(slopes)).long(), order, shared=True)
        return without_optimism(slopes, own, Predictions(*foretold))

    optimism = fitted - without
    for real, part in ((1.0, 1.0), (1.5, 1.6), (0.5, 0.5), (0.7, 0.2), (0.7, 0.0), (0.0, 0.4)):
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
            optimizer.perturbation.predictions = lambda _: None
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


def test_where_scores_are_linear_a_step_is_the_minimum_that_it_promises():
    model = softmax_model()
    x, labels = rows(80, 6, 3, seed=10)
    closure = Scores(model, x, labels)
    optimizer = gauss_newton(model, num_directions=24, rank=3, basis="gaussian", rho=1e-3)
    before = closure.outputs().loss()
    optimizer.refresh()
    (direction,) = (own[0] for own in optimizer.draw().directions.values())
    best = lowest_in_the_span(model[0].weight.detach().clone(), direction.u_MR, direction.v_NR, x, labels)
    assert optimizer.step(closure) == pytest.approx(before)
    (candidate, real), *_ = optimizer.estimator.tried
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
        reals = [real for _, real in optimizer.estimator.tried]
        assert 1 <= len(reals) <= 2
    optimizer.close()


def test_a_longer_step_than_the_model_bears_is_shortened():
    x, labels = rows(80, 6, 3, seed=21)
    model = Bent()
    closure = Scores(model, x, labels)
    optimizer = gauss_newton(model, num_directions=24, rank=3, basis="gaussian", rho=1e-3)
    z = closure.outputs().scores_TC.detach()
    optimizer.refresh()
    draw = optimizer.draw()
    optimizer.step(closure)
    (first, real), *more = optimizer.estimator.tried
    reached = []
    for scale in (1e-3, 1.0):  # the slope along the whole step, and its end, from the weights before it
        for name, moving in optimizer.parameters.items():
            taken = [-kappa for kappa in optimizer.last_step.projected_grads]
            back = combined(draw.directions[name], [-own / len(taken) for own in taken])
            whole = combined(draw.directions[name], first.coefficients)
            total = whole.with_coefficient(scale * whole.coefficient + back.coefficient)
            moving.set_perturbations([Shift(total, 1.0)])
        reached.append(closure.outputs().scores_TC.detach() - z)
        for moving in optimizer.parameters.values():
            moving.set_perturbations([])
    along, bend = reached[0] / 1e-3, reached[1] - reached[0] / 1e-3
    assert real > first.promised + 0.01 and more, "the linear model promised too much"
    ((shorter, _),) = more
    part = shorter.coefficients[0] / first.coefficients[0]
    assert part in [pytest.approx(own) for own in PARTS[:-1]]
    assert shorter.coefficients == pytest.approx([part * own for own in first.coefficients])
    bent = [functional.cross_entropy(z + t * along + t**2 * bend, labels) for t in PARTS]
    assert PARTS[int(torch.stack(bent).argmin())] == pytest.approx(part)
    optimizer.close()


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
        told = optimizer.metrics["round"]
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


@pytest.mark.parametrize(
    ("targets", "said"),
    [("all", "layer.bias is no matrix"), ("none", "none of the tuned parameters is the weight of a linear layer")],
)
def test_what_it_cannot_step_along_is_refused_by_its_name(targets, said):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.layer = nn.Embedding(8, 40).double(), nn.Linear(40, 5).double()

        def forward(self, x):
            return self.layer(x + self.table(torch.zeros(x.shape[:-1], dtype=torch.int64)))

    model = Model()
    with pytest.raises(RequestError, match=said):
        optimizer = gauss_newton(model, targets=["all"] if targets == "all" else ["table"])
        optimizer.step(Scores(model, noise(6, 40, seed=90), torch.arange(6) % 5))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_rows_fewer_than_contrasts_are_looked_at(count):
    model, x_NI, labels_N = Stream40(), noise(count, 40, seed=90), torch.arange(count) % 5
    model.head_CM = noise(5, 8, seed=95)
    optimizer, closure = gauss_newton(model, rank=16), Scores(model, x_NI, labels_N)
    before = closure.outputs().loss()
    optimizer.step(closure)
    assert closure.outputs().loss() <= before
