"""Gauss-Newton in the span of a few directions: each row's outputs are kept along every direction, not one loss.

A pass over N rows tells the scores z of C classes at each of T places. Along direction Z_j

    F_j = (z(W + rho Z_j) - z(W)) / rho,   (T, C),

so that z(W + sum_j a_j Z_j) ~ z(W) + sum_j a_j F_j. The loss of these scores is convex in a:

    a = argmin  sum_t cross entropy(z_t + (F a)_t, label_t) + lambda |a|^2 / (2 s^2),   s^-2 = K mean F^2,

with s the size of coefficients that change scores by about 1. This is the generalized Gauss-Newton model of the loss
(Schraudolph 2002) in a random subspace, as derivative-free least squares has it (DFO-GN and DFBGN, Cartis and Roberts
2019 and 2023). Newton's method solves it, and there is no learning rate.

Directions that were found by a regression on these very rows promise too much of them. Where the regression foretells
the changes of scores P, and P' if each row had been left out of it, F is replaced by

    F' = F - r (P - P'),   s, r = argmin |F - s P' - r (P - P')|^2,

with the means over rows and over classes taken off all three, and r kept between 0 and 1. That part of F, its
optimism (Efron 2004), is not what other rows get. Coefficients are fitted to z + F' a, and validated by it.

lambda is chosen by cross-validation over the rows, which takes the scores for linear in a. They are not, so the real
outputs z' at the solution are measured on the same rows. Where they are not nearly what was promised, the part t of the
step is taken after which the scores

    z + t F a + t^2 (z' - z - F a)

have the lowest loss. A step is judged by the loss to expect on other rows,

    real(lambda) + (validated(lambda) - promised(lambda)),

where the linear model promises one loss on the rows that a was fitted to, and validates another on rows that it was
not. If none is expected to lower the loss, no step is taken: all coefficients are zero.

Where there are rows that nothing is fitted to (held-out ones, the dev rows of a run), they have the last word. Of the
step that was chosen the part t is taken after which the mean loss of their scores z + t (z' - z) is lowest, which may
be none.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from tezo.directions.bases.basis import Foretold
from tezo.directions.outputs import Outputs, change
from tezo.directions.products import float32_on_emulating_cpu
from tezo.directions.spaces import Direction, FixedFactors
from tezo.forward.perturbed_parameter import PerturbedParameter, Shift, evaluation_mode, let_interrupt
from tezo.optim.closures import NO_OUTPUTS, Closure, RowOutputs
from tezo.optim.estimators.estimate import GAUSS_NEWTON, Estimate, ParameterEstimate, Probe, StepDraw, average
from tezo.optim.estimators.two_point import TwoPoint
from tezo.system.errors import RequestError
from tezo.system.progress import BETWEEN, current

RIDGES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Candidates for lambda."""
FOLDS = 4
"""Parts of the examples for cross-validation."""
CLOSE = 0.1
"""A step is taken if its real loss is above the promised one by at most this part of the promised decrease."""
PARTS = tuple(part / 20 for part in range(1, 21))
"""Parts of a step that are compared."""
NEWTON_STEPS, NEWTON_TOLERANCE = 30, 1e-7


class GaussNewton(TwoPoint):
    """The step to the minimum of the Gauss-Newton model in the span of a step's directions; see the module.

    The projected gradient of direction j is -K a_j, of K directions, so that a plain step with a rate of 1 is the
    solution. The losses of its probe are those at W + rho Z_j and at W.

    Args:
        rho: perturbation scale.

    Attributes:
        tried: the steps whose real loss the last step measured, each with that loss: the whole one, and a part of it,
            whose other figures are those of the whole.
    """

    rule = GAUSS_NEWTON
    idle_steps = 2  # our choice: one round without a gain may be chance
    tried: Sequence[tuple["Candidate", float]] = ()

    def prepare(self, model: nn.Module, moving: Mapping[str, PerturbedParameter], seed: int) -> None:
        for name, parameter in moving.items():
            if not parameter.target.is_matrix:
                raise RequestError(
                    f"method.targets: {name} is no matrix, and gauss-newton combines low-rank directions; leave it out."
                )
        super().prepare(model, moving, seed)

    def estimate(self, closure: Closure, draw: StepDraw) -> Estimate:
        if not isinstance(closure, RowOutputs):
            raise RequestError(NO_OUTPUTS)
        count = len(next(iter(draw.directions.values())))
        try:
            with evaluation_mode(self._model), float32_on_emulating_cpu(self._model):
                own = closure.outputs()
                slopes_TCK, losses = self._slopes(closure, own, draw, count)
                model = LinearModel(own, slopes_TCK, unseen(slopes_TCK, own, draw.foretold))
                a_K = self._trusted(model, closure, draw)
                if closure.held_out is not None and any(a_K):
                    a_K = self._shortened(a_K, closure.held_out, draw)
        finally:
            self._set_perturbations(draw.directions, [])
        loss = own.loss()
        probes = tuple(Probe(plus, loss, -count * a) for plus, a in zip(losses, a_K, strict=True))
        return average(loss, self._checked(probes), 1 + count + len(self.tried), draw)

    def _slopes(self, closure: RowOutputs, own: Outputs, draw: StepDraw, count: int) -> tuple[Tensor, list[float]]:
        """Returns (F of all directions (T, C, K), the losses there); each rank evaluates its part of the directions."""
        found: list[float] = []
        rank, size = self._processes.rank, self._processes.size
        points = [(index % count, self.rho) for index in range(rank, size * math.ceil(count / size), size)]
        copies = closure.most_copies or 1  # in torch a pass of many rows gains nothing from others
        for start in range(0, len(points), copies):
            let_interrupt()
            together = points[start : start + copies]
            self._set_perturbations(draw.directions, together)
            for moved in closure.outputs_of(len(together), own):
                found += [moved.loss(), *(change(moved, own) / self.rho).flatten().tolist()]
        ranks = [torch.tensor(values, dtype=torch.float64) for values in self._processes.gather(found)]
        # the first direction of each rank, then the second of each
        table_KX = torch.stack([values.view(math.ceil(count / size), -1) for values in ranks], 1).flatten(0, 1)[:count]
        return table_KX[:, 1:].T.reshape(*own.scores_TC.shape, count), table_KX[:, 0].tolist()

    def _trusted(self, model: "LinearModel", closure: RowOutputs, draw: StepDraw) -> list[float]:
        """Returns the coefficients after which the loss of other rows should be lowest."""
        step = model.best()
        lowest, chosen, taken = model.loss, [0.0] * model.count, 0.0
        tried: list[tuple[Candidate, float]] = []
        part = 1.0
        while True:
            let_interrupt()
            there = replace(step, coefficients=[part * own for own in step.coefficients])
            self._move(draw, there.coefficients)
            moved = closure.outputs(model.own)
            real, shorter = self._processes.first([moved.loss(), model.best_part(step, moved)])
            tried.append((there, real))
            expected = real + step.validated - step.promised
            if expected < lowest:
                lowest, chosen, taken = expected, there.coefficients, part
            missed = real - step.promised > CLOSE * (model.loss - step.promised)
            if part < 1.0 or shorter == 1.0 or not missed:
                break
            part = shorter
        self.tried = tried
        self.told = {"round": {"own": model.loss, "promised": step.promised, "validated": step.validated,
                               "real": tried[0][1], "taken": taken}}  # fmt: skip
        return self._processes.first(chosen)

    def _shortened(self, a_K: list[float], held_out: RowOutputs, draw: StepDraw) -> list[float]:
        """Returns the part of a step after which the loss of held-out rows should be lowest."""
        with current().phase(BETWEEN):
            self._set_perturbations(draw.directions, [])
            own = held_out.outputs()
            self._move(draw, a_K)
            moved = held_out.outputs(own)
        change_TC = change(moved, own)
        scores_TC, labels_T = own.scores_TC.double().cpu(), own.labels_T.cpu()

        def loss(part: float) -> float:
            return float(functional.cross_entropy(scores_TC + part * change_TC, labels_T))

        part = min((0.0, *PARTS), key=loss)
        found = self.told["round"]
        judged = {"held_out": own.loss(), "held_out_real": moved.loss(), "taken": part * found["taken"]}
        self.told = {"round": found | judged}
        return self._processes.first([part * own for own in a_K])

    def _move(self, draw: StepDraw, a_K: Sequence[float]) -> None:
        for name, parameter in self._moving.items():
            parameter.set_perturbations([Shift(combined(draw.directions[name], a_K), 1.0)])

    def accepts(self, probes: int, num_directions: int) -> bool:
        return 0 < probes <= num_directions

    def passes(self, directions: int, *, first: bool) -> int:
        del first
        return directions + 2


def combined(directions: Sequence[Direction], factors: Sequence[float]) -> Direction:
    """Returns sum_j factors[j] Z_j of low-rank directions with the same fixed factors: what a step adds."""
    first = directions[0]
    assert isinstance(first, FixedFactors)
    ((_, coefficient),) = ParameterEstimate(directions, [len(factors) * factor for factor in factors], 0).tiles()
    return first.with_coefficient(coefficient)


@dataclass(frozen=True)
class Candidate:
    """The step for one lambda.

    Attributes:
        ridge: lambda.
        coefficients: of the directions.
        promised: loss by the linear model, of the rows that they were fitted to.
        validated: by F', of rows that coefficients were not fitted to; of all where there is one example.
    """

    ridge: float
    coefficients: list[float]
    promised: float
    validated: float


def unseen(slopes_TCK: Tensor, own: Outputs, foretold: Foretold | None) -> Tensor:
    """Returns F' (T, C, K), as if directions had been found without each row; see the module.

    Args:
        slopes_TCK: F.
        own: outputs at W.
        foretold: of the first E examples; directions were not found by the others.
    """
    if foretold is None or not len(foretold.fitted_ECJ):
        return slopes_TCK
    example_T, count = own.example_T.cpu(), slopes_TCK.shape[-1]
    known_T = example_T < len(foretold.fitted_ECJ)
    fitted_TCK, without_TCK = (
        part[example_T[known_T], :, :count] for part in (foretold.fitted_ECJ, foretold.without_ECJ)
    )
    found_TCK, optimism_TCK = slopes_TCK.clone(), fitted_TCK - without_TCK
    compared = (found_TCK[known_T], without_TCK, optimism_TCK)
    change, *terms = (f - f.mean(0) - f.mean(1, keepdim=True) + f.mean((0, 1)) for f in compared)
    y_KX1 = change.movedim(2, 0).flatten(1).unsqueeze(-1)
    x_KX2 = torch.stack(terms, -1).movedim(2, 0).flatten(1, 2)
    parts_K2 = (torch.linalg.pinv(x_KX2.mT @ x_KX2, hermitian=True) @ (x_KX2.mT @ y_KX1)).squeeze(-1)
    found_TCK[known_T] -= parts_K2[:, 1].clamp(0, 1) * optimism_TCK
    return found_TCK


class LinearModel:
    """The scores of rows as a linear function of the coefficients of K directions.

    Args:
        own: outputs at W.
        slopes_TCK: their derivatives along each direction, float64 on the CPU.
        unseen_TCK: the same if no direction had been found by these rows, by which coefficients are chosen.

    Attributes:
        loss: at W.
        count: K.
    """

    def __init__(self, own: Outputs, slopes_TCK: Tensor, unseen_TCK: Tensor) -> None:
        self.own, self.loss, self.count = own, own.loss(), slopes_TCK.shape[-1]
        self._z_TC = own.scores_TC.double().cpu()
        self._labels_T, self._example_T = own.labels_T.cpu(), own.example_T.cpu()
        size = float(slopes_TCK.square().mean().sqrt()) * math.sqrt(self.count)
        self._unit = 1 / max(size, 1e-300)
        self._slopes_TCK, self._unseen_TCK = slopes_TCK * self._unit, unseen_TCK * self._unit

    def best_part(self, step: Candidate, moved: Outputs) -> float:
        """Returns the part of a step after which the loss is lowest, by scores that are quadratic along it."""
        along_TC = self._slopes_TCK @ (torch.tensor(step.coefficients, dtype=torch.float64) / self._unit)
        bend_TC = change(moved, self.own) - along_TC

        def loss(part: float) -> float:
            scores_TC = self._z_TC + part * along_TC + part**2 * bend_TC
            return float(functional.cross_entropy(scores_TC, self._labels_T))

        return min(PARTS, key=loss)

    def best(self) -> Candidate:
        """Returns the step with the lowest validated loss."""
        return min(self.candidates(), key=lambda own: own.validated)

    def candidates(self) -> list[Candidate]:
        """Returns the steps for all `RIDGES`."""
        _, example_T = torch.unique(self._example_T, return_inverse=True)
        everything, folds = torch.ones_like(example_T, dtype=torch.bool), example_T % FOLDS
        parts = [folds == fold for fold in range(FOLDS) if bool((folds == fold).any())]
        start: list[Tensor] = [torch.zeros(self.count, dtype=torch.float64)] * (1 + len(parts))
        found = []
        for ridge in sorted(RIDGES, reverse=True):  # each starts from the shorter step before
            start[0] = self._solve(everything, ridge, start[0])
            promised, validated = self._loss(self._slopes_TCK, everything, start[0]), 0.0
            for i, part in enumerate(parts if len(parts) > 1 else [], start=1):
                share = float(part.double().mean())
                start[i] = self._solve(~part, ridge * (1 - share), start[i])
                validated += share * self._loss(self._unseen_TCK, part, start[i])
            if len(parts) == 1:
                validated = self._loss(self._unseen_TCK, everything, start[0])
            found.append(Candidate(ridge, (start[0] * self._unit).tolist(), promised, validated))
        return found[::-1]

    def _loss(self, slopes_TCK: Tensor, places_T: Tensor, a_K: Tensor) -> float:
        scores_TC = self._z_TC[places_T] + slopes_TCK[places_T] @ a_K
        return float(functional.cross_entropy(scores_TC, self._labels_T[places_T]))

    def _solve(self, places_T: Tensor, ridge: float, a_K: Tensor) -> Tensor:
        """Returns the minimum over these places, in units of `_unit`: Newton's method, with steps halved as needed."""
        z_TC, f_TCK, labels_T = self._z_TC[places_T], self._unseen_TCK[places_T], self._labels_T[places_T]

        def value(a_K: Tensor) -> float:
            loss = functional.cross_entropy(z_TC + f_TCK @ a_K, labels_T, reduction="sum")
            return float(loss + ridge * a_K.square().sum() / 2)

        now = value(a_K)
        for _ in range(NEWTON_STEPS):
            p_TC = (z_TC + f_TCK @ a_K).softmax(1)
            error_TC = p_TC - functional.one_hot(labels_T, p_TC.shape[1])
            gradient_K = torch.einsum("tc,tck->k", error_TC, f_TCK) + ridge * a_K
            # sum_t F_t^T (diag(p_t) - p_t p_t^T) F_t
            weighted_XK = (p_TC.sqrt().unsqueeze(-1) * f_TCK).flatten(0, 1)
            mean_TK = torch.einsum("tc,tck->tk", p_TC, f_TCK)
            hessian_KK = weighted_XK.T @ weighted_XK - mean_TK.T @ mean_TK
            hessian_KK.diagonal().add_(ridge)
            step_K = torch.linalg.solve(hessian_KK, gradient_K)
            length = 1.0
            while (after := value(a_K - length * step_K)) > now and length > 1e-4:
                length /= 2
            if after >= now:
                break
            a_K, now = a_K - length * step_K, after
            if float(step_K.abs().max()) < NEWTON_TOLERANCE:
                break
        return a_K
