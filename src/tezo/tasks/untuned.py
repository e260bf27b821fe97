"""Fits to the untuned model on labelled rows, to compare a run with: a bias for each label, and a probe.

Both are fitted to training rows, and neither changes the model. Tuning that ends below the probe has taught a model
less than what was in it.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tezo.directions.outputs import Outputs, fitted_bias
from tezo.directions.products import float32_on_emulating_cpu
from tezo.models.loading import LoadedModel
from tezo.system.errors import RequestError
from tezo.system.progress import FITTING, current
from tezo.tasks.evaluation import Metrics, check_finite, choice_metrics
from tezo.tasks.generation import by_length
from tezo.tasks.objectives.objective import Encoded, Objective
from tezo.tasks.row_files import DataConfig
from tezo.tasks.setup import make_format, make_objective
from tezo.tasks.splits import divide, read_splits

BIAS, PROBE = "bias", "probe"
"""Names of the two, where metrics are kept or shown."""
MOST_ROWS = 512
"""Training rows that a run fits them to, at most."""
PENALTIES = (1.0, 10.0, 100.0, 1000.0)
"""Candidates for the penalty of a probe, the first of which is scikit-learn's default."""
FOLDS = 4
EXACTLY, ROUGHLY = 1e-12, 1e-5
"""By how much less a last step lowers the sum of losses: of the probe, and of those that penalties are compared by."""


@torch.no_grad()
def untuned(
    model: Any, objective: Objective, train: Sequence[Encoded], rows: Sequence[Encoded], batch_size: int
) -> dict[str, Metrics]:
    """Returns `BIAS` and `PROBE` -> metrics on `rows`, as `tezo.tasks.evaluation.evaluate` names them.

    Args:
        model: the untuned model.
        objective: of the model, for rows that share their labels.
        train: rows that bias and probe are fitted to.
        rows: rows that they are measured on.
        batch_size: examples per batch.

    Raises:
        RequestError: the input of the model's output head cannot be read.
    """
    objective.adapt(model, [*train, *rows])
    labels_B = torch.tensor([e.example.label for e in train])
    with objective.evaluator.sharing(model), float32_on_emulating_cpu(model), current().phase(FITTING):
        scores_BO, features_BD = read(model, objective, [*train, *rows], batch_size)
        check_finite({"sum of features": float(features_BD.sum())}, model)
        probe_BO = probed(features_BD[: len(train)], labels_B, len(objective.options), features_BD[len(train) :])
    unbiased, biased = scores_BO[: len(train)], scores_BO[len(train) :]
    biased = biased + fitted_bias(Outputs(unbiased, labels_B, torch.arange(len(train)), shared=True))
    scores = {BIAS: biased, PROBE: probe_BO}
    return {
        name: choice_metrics(list(table), table.argmax(1).tolist(), rows, shared=True) for name, table in scores.items()
    }


def measure_untuned(
    data: DataConfig, loaded: LoadedModel, *, batch_size: int, seed: int
) -> tuple[dict[str, Metrics], dict[str, int]]:
    """Fits both to all training rows of a run.

    Returns (`BIAS` and `PROBE` -> metrics on the test rows, or the dev rows if there are none; number of "train" and
    "test" rows). `RequestError`: the rows have no labels in common, or the output head cannot be read.
    """
    splits = read_splits(data)
    form = make_format(data, loaded, splits.train)
    if not form.options:
        raise RequestError("probe is set, but these rows do not share their labels; use it with labelled rows.")
    kept = replace(data, hold_out=0.0) if splits.test else data  # nothing is chosen by dev rows here
    rows = divide(splits, form, kept, seed)
    objective = make_objective(data, loaded, form)
    train, test = (
        [objective.encode(form.example(row)) for row in part] for part in (rows.train, rows.test or rows.dev)
    )
    found = untuned(loaded.model, objective, train, test, batch_size)
    return found, {"train": len(train), "test": len(test)}


def probed(train_BD: Tensor, labels_B: Tensor, options: int, rows_BD: Tensor) -> Tensor:
    """Returns scores of options (B, O) on rows by a linear probe, logistic regression on features of the frozen model.

    The penalty is the one of `PENALTIES` with the least loss by cross-validation over the training rows.
    """
    center_D, scale_D = train_BD.mean(0), train_BD.std(0, correction=min(1, len(train_BD) - 1)).clamp_min(1e-12)
    x_BD = (train_BD - center_D) / scale_D
    weight_OD, bias_O = fit(x_BD, labels_B, options, _penalty(x_BD, labels_B, options))
    return ((rows_BD - center_D) / scale_D) @ weight_OD.T + bias_O


def read(model: Any, objective: Objective, encoded: Sequence[Encoded], batch_size: int) -> tuple[Tensor, Tensor]:
    """Returns (scores (B, O), features (B, D)), float64 on the CPU; see `Evaluator.scores_and_features`."""
    found: dict[int, Tensor] = {}
    for part in by_length(encoded, batch_size):
        batch = objective.collate([encoded[i] for i in part])
        both = [part.double() for part in objective.evaluator.scores_and_features(model, batch)]
        found |= zip(part, torch.cat(both, 1).cpu(), strict=True)
    table, options = torch.stack([found[i] for i in range(len(encoded))]), len(objective.options)
    return table[:, :options], table[:, options:]


def _penalty(x_BD: Tensor, labels_B: Tensor, options: int) -> float:
    if len(x_BD) < FOLDS:
        return PENALTIES[0]
    fold_B = torch.arange(len(x_BD)) % FOLDS

    def loss(penalty: float) -> float:
        total = 0.0
        for fold in range(FOLDS):
            part = fold_B == fold
            weight_OD, bias_O = fit(x_BD[~part], labels_B[~part], options, penalty, ROUGHLY)
            scores = x_BD[part] @ weight_OD.T + bias_O
            total += float(functional.cross_entropy(scores, labels_B[part], reduction="sum"))
        return total

    return min(PENALTIES, key=loss)


def fit(
    x_BD: Tensor, labels_B: Tensor, options: int, penalty: float = PENALTIES[0], tolerance: float = EXACTLY
) -> tuple[Tensor, Tensor]:
    """Returns (weight_OD, bias_O) of the multinomial logistic regression that minimises

        sum_b cross entropy(W x_b + bias, label_b) + penalty |W|^2 / 2,

    which has one minimum, at infinity for a label without a row. Solved by L-BFGS in float64, until a step lowers the
    sum by less than `tolerance`; labels are int64.
    """
    values_OE = torch.zeros(options, x_BD.shape[1] + 1, dtype=torch.float64)  # a row's last is the bias
    x_BE = functional.pad(x_BD, (0, 1), value=1.0)
    is_label_BO = functional.one_hot(labels_B, options).double()
    penalty_E = penalty * functional.pad(torch.ones(x_BD.shape[1], dtype=torch.float64), (0, 1))
    solver = torch.optim.LBFGS(
        [values_OE], max_iter=1000, tolerance_grad=1e-8, tolerance_change=tolerance, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        log_p_BO = (x_BE @ values_OE.T).log_softmax(1)
        values_OE.grad = (log_p_BO.exp() - is_label_BO).T @ x_BE + penalty_E * values_OE
        return (penalty_E * values_OE.square()).sum() / 2 - (is_label_BO * log_p_BO).sum()

    solver.step(closure)  # type: ignore[no-untyped-call]
    return values_OE[:, :-1], values_OE[:, -1]
