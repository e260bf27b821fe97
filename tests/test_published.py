"""The published algorithms, as the benchmark measures them, compute the step that ours computes.

Given the same random numbers, weights agree to rounding after several steps with refreshes among them. Scales are
those of the publications: "raw" for TeZO and LOZO, "unit" for SubZO, whose code has the factor sqrt(m n) / r.
What cannot agree: LOZO-m's first M (ours is (1 - beta) kappa U, the public code's kappa U), compared as such.
"""

import pytest
import torch
from cases import INTERVAL, RANK, effective_weights

from tezo.directions.perturbations import Annealing, DrawKey
from tezo.directions.perturbations.momentum_noise import MomentumNoise
from tezo.directions.spaces import row_tiles
from tezo.directions.targets import select_targets
from tezo.optim.methods import METHODS
from tezo.studies.bench.published import PUBLISHED, TorchDraws
from tezo.studies.bench.settings import Settings
from tezo.studies.bench.workload import Work

STEPS = 2 * INTERVAL + 2
RHO, LR, SEED = 1e-3, 1e-4, 7
SCALES = {"tezo": "raw", "tezo-m": "raw", "tezo-adam": "raw", "lozo": "raw", "lozo-m": "raw", "subzo": "unit"}
LAZY = {name: {"lazy_update_interval": INTERVAL} for name in ("lozo", "lozo-m", "subzo")}
EXTRA = LAZY | {"zo-adamu": {"anneal_start": 2, "anneal_stop": 12}}


class OurDraws:
    """The library's own draws, asked for as the published algorithms ask."""

    def __init__(self, optimizer):
        self.optimizer, self.step = optimizer, 0

    def reset(self, step):
        self.step = step if step >= 0 else -1 - step

    def direction(self, name):
        target = self.optimizer.moving[name].target
        return self.optimizer.perturbation.direction(target, DrawKey(SEED, self.step), {})

    def normal(self, name, role, shape, like):
        point = self.direction(name)
        if isinstance(point, MomentumNoise):  # z1 is N(0, alpha) and z2, without momentum, N(0, 1 - alpha)
            which, variance = {"z": (0, point.alpha), "history": (1, 1 - point.alpha)}[role]
            noise = torch.cat([point.parts(rows)[which] for rows in row_tiles(point.shape)])
            return noise.view(shape).to(like) / max(1e-300, variance) ** 0.5
        if role == "z":
            return torch.cat([values.clone() for _, values in point.tiles()]).view(shape).to(like)
        drawn = {"v": point.v_NR, "u": getattr(point, "u_MR", point.coefficient)} if role in "uv" else {}
        assert drawn.get(role, point.coefficient).shape == tuple(shape)
        return drawn.get(role, point.coefficient).to(like)

    def basis(self, name, role, shape, like):
        point = self.direction(name)
        return {"u": point.u_MR, "v": point.v_NR}[role].to(like) * (RANK / shape[0]) ** 0.5


def both(name, targets="all-linear"):
    """(our optimizer with its closure, the published algorithm with its loss), on equal models of their own."""
    settings = Settings(model="tiny", dtype="float64", batch=4, length="rte", rank=RANK, targets=targets)
    ours, theirs = Work(settings), Work(settings)
    options = settings.options(name) | EXTRA.get(name, {})
    options |= {"scale": SCALES[name]} if name in SCALES else {}
    optimizer = METHODS[name].build(ours.model, lr=LR, rho=RHO, seed=SEED, **options)
    parameters = [(t.name, t.parameter) for t in select_targets(theirs.model, (targets,))]
    algorithm = PUBLISHED[name](parameters, lr=LR, rho=RHO, rank=RANK, interval=INTERVAL, draws=OurDraws(optimizer))
    if name == "zo-adamu":
        algorithm.annealing = Annealing(start=2, stop=12)
    return (optimizer, ours.closure(ours.model)), (algorithm, theirs.stock_loss(theirs.model))


def same(optimizer, algorithm, start):
    weights = effective_weights(optimizer)
    for name, parameter in algorithm.parameters:
        expected = parameter.data.view(weights[name].shape)
        moved = (expected - start[name]).norm()
        assert moved > 1e-9, f"{name} stood still; this shows nothing"
        assert (weights[name] - expected).norm() <= 1e-6 * moved, name


def test_every_method_of_the_paper_has_its_published_form():
    assert PUBLISHED.keys() == {name for name, method in METHODS.items() if method.in_paper}


@pytest.mark.parametrize("targets", ["all-linear", "all"])
@pytest.mark.parametrize("name", [name for name in PUBLISHED if name != "lozo-m"])
def test_the_published_algorithm_takes_our_steps(name, targets):
    (optimizer, closure), (algorithm, loss) = both(name, targets)
    start = effective_weights(optimizer)
    for _ in range(STEPS):
        optimizer.step(closure)
        kappa = algorithm.step(loss)
        assert kappa == pytest.approx(optimizer.last_step.projected_grads[0], rel=1e-6)
    same(optimizer, algorithm, start)


def test_lozo_m_differs_in_its_first_momentum_alone():
    (optimizer, closure), (algorithm, loss) = both("lozo-m")
    start = effective_weights(optimizer)
    optimizer.step(closure)
    algorithm.step(loss)
    ours = effective_weights(optimizer)
    for name, parameter in algorithm.parameters:
        torch.testing.assert_close((parameter.data - start[name]) * (1 - algorithm.beta), ours[name] - start[name])
        parameter.data = ours[name].clone()
        algorithm.state[name]["m"] *= 1 - algorithm.beta
    for _ in range(STEPS):
        optimizer.step(closure)
        algorithm.step(loss)
    same(optimizer, algorithm, start)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_pass_draws_what_the_pass_before_it_drew(name):
    # Only then do +1, -2, +1 cancel; torch's global stream is reset by seed.
    model = Work(Settings(model="tiny", dtype="float64", batch=1, length="8")).model
    parameters = [(t.name, t.parameter) for t in select_targets(model, ("all",))]
    algorithm = PUBLISHED[name](parameters, lr=0.0, rank=RANK, interval=INTERVAL)
    before = [parameter.data.clone() for _, parameter in parameters]
    for _ in range(2):
        algorithm.step(lambda: next(model.parameters()).sum())
    for (key, parameter), old in zip(parameters, before, strict=True):
        assert (parameter.data - old).abs().max() < 1e-12, key


def test_the_default_draws_are_torchs_own():
    draws, like = TorchDraws(), torch.empty(0, dtype=torch.float64)
    draws.reset(3)
    first = draws.normal("a", "z", (2, 5), like)
    torch.manual_seed(3)
    assert torch.equal(first, torch.normal(0, 1, (2, 5), dtype=torch.float64))
    basis = draws.basis("a", "u", (7, 3), like)
    torch.testing.assert_close(basis.T @ basis, torch.eye(3, dtype=torch.float64), atol=1e-5, rtol=0)


def test_lozos_update_at_a_refresh_sees_another_u_as_in_the_public_code():
    parameter = torch.nn.Parameter(torch.zeros(4, 5, dtype=torch.float64))
    algorithm = PUBLISHED["lozo"]([("w", parameter)], lr=1.0, rho=1.0, rank=2, interval=3)
    towards = torch.randn(4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for step in range(4):
        old = parameter.data.clone()
        algorithm.draws.reset(step)
        algorithm.refresh("w", parameter)
        measured = algorithm.direction("w", parameter)
        kappa = algorithm.step(lambda: (towards * parameter.data).sum())
        along = torch.allclose(parameter.data - old, -kappa * measured)
        assert along == (step % 3 != 0)
