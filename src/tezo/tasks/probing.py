"""Linear probing: logistic regression on the features of a frozen model, a baseline for fine-tuning."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tezo.errors import RequestError
from tezo.models.loading import LoadedModel
from tezo.numerics.emulation import float32_on_emulating_cpu
from tezo.progress.meter import EVALUATING, current
from tezo.tasks.data_config import DataConfig
from tezo.tasks.evaluation import Metrics, check_finite, choice_metrics
from tezo.tasks.generation import by_length
from tezo.tasks.objectives import Encoded, Objective
from tezo.tasks.setup import make_format, make_objective
from tezo.tasks.splits import divide, read_splits


@torch.no_grad()
def probe(data: DataConfig, loaded: LoadedModel, *, batch_size: int, seed: int) -> tuple[Metrics, dict[str, int]]:
    """Fits a linear probe to the training rows.

    Returns (metrics on the test rows, or the dev rows if there are none; number of "train" and "test" rows).

    Args:
        data: the rows; they must share their options.
        loaded: the model; it is only read.
        batch_size: examples per forward pass.
        seed: seed of the choice of rows.

    Raises:
        RequestError: the rows have no labels in common.
    """
    splits = read_splits(data)
    form = make_format(data, loaded, splits.train)
    if not form.options:
        raise RequestError("probe is set, but these rows do not share their labels; use it with labelled rows.")
    kept = replace(data, hold_out=0.0) if splits.test else data  # nothing is chosen by dev rows here
    rows = divide(splits, form, kept, seed)
    objective = make_objective(data, loaded, form)
    parts = [[objective.encode(form.example(row)) for row in part] for part in (rows.train, rows.test or rows.dev)]
    with current().phase(EVALUATING):
        train_BD, test_BD = (features(loaded.model, objective, part, batch_size) for part in parts)
    check_finite({"sum of features": float(train_BD.sum() + test_BD.sum())}, loaded.model)
    labels_B = torch.tensor([e.example.label for e in parts[0]])
    center_D, scale_D = train_BD.mean(0), train_BD.std(0).clamp_min(1e-12)
    weight_OD, bias_O = fit((train_BD - center_D) / scale_D, labels_B, len(form.options))
    scores = list(((test_BD - center_D) / scale_D) @ weight_OD.T + bias_O)
    best = [int(row.argmax()) for row in scores]
    return choice_metrics(scores, best, parts[1], shared=True), {"train": len(parts[0]), "test": len(parts[1])}


def features(model: Any, objective: Objective, encoded: Sequence[Encoded], batch_size: int) -> Tensor:
    """Features of the examples in order, (B, D) in float64 on the CPU; see `Objective.features`."""
    by_index: dict[int, Tensor] = {}
    with float32_on_emulating_cpu(model):
        for part in by_length(encoded, batch_size):
            rows = objective.features(model, [encoded[i] for i in part]).double().cpu()
            by_index |= dict(zip(part, rows, strict=True))
    return torch.stack([by_index[i] for i in range(len(encoded))])


@torch.enable_grad()
def fit(x_BD: Tensor, labels_B: Tensor, options: int) -> tuple[Tensor, Tensor]:
    """(weight_OD, bias_O) of the multinomial logistic regression that minimises

        sum_b cross entropy(W x_b + bias, label_b) + |W|^2 / 2,

    which has one minimum (the penalty is scikit-learn's default). Solved by L-BFGS in float64.

    Args:
        x_BD: features, float64.
        labels_B: int64, from 0 to `options` - 1.
        options: number of options O.
    """
    weight_OD = torch.zeros(options, x_BD.shape[1], dtype=torch.float64, requires_grad=True)
    bias_O = torch.zeros(options, dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS(
        [weight_OD, bias_O], max_iter=1000, tolerance_grad=1e-8, tolerance_change=0.0, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        solver.zero_grad()
        loss = functional.cross_entropy(x_BD @ weight_OD.T + bias_O, labels_B, reduction="sum")
        loss = loss + weight_OD.square().sum() / 2
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    solver.step(closure)  # type: ignore[no-untyped-call]
    return weight_OD.detach(), bias_O.detach()
