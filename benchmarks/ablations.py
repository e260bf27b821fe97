"""What each part of gauss-newton is worth: runs of it with one part taken away, on two tasks of `real_tasks.py`.

    python benchmarks/ablations.py --shared FOLDER [--out benchmarks/results] [--workers 1] [--threads 1]
        [--only WORD ...] [--seeds 0] [--seconds 3600]

Parts are taken away by replacing a function or a constant of the library in the process of the run; the rest is
`tezo train` with the embedded language model in float32, as in `real_tasks.py`. Writes ablations.json after each run
and leaves out runs that it has; `--only` names runs by parts of their names. No run begins after `--seconds`.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from real_tasks import make, measured, options

from tezo.directions.outputs import Outputs
from tezo.newton import labels, linear_model, recording, step
from tezo.newton.linear_model import LinearModel
from tezo.newton.step import GaussNewton, Taken

ROUNDS = {"sst2": 2, "issues": 2}
LENGTHS = (1.0, 0.5, 0.25, 0.125)
"""Steps along the gradient that are tried where losses alone are kept, as parts of the one that would end at 0."""


def no_biases() -> None:
    """No direction raises a label everywhere."""
    whole = labels.Layout.of
    labels.Layout.of = lambda *given: labels.Layout(whole(*given).contrasts, given[1], 0)  # type: ignore[method-assign, assignment]


def every_layer() -> None:
    """Layers are changed wherever they write to."""
    recording.KEPT_EFFECT = -1e9


def no_last_word() -> None:
    """Dev rows shorten no step."""
    GaussNewton._shortened = lambda _, taken, *__: taken  # type: ignore[method-assign]


def whole_steps() -> None:
    """The step of the linear model is taken unmeasured."""
    no_last_word()

    def trusted(self: GaussNewton, model: LinearModel, closure: Any, draw: Any) -> Taken:
        del closure, draw
        step = model.best()
        self.tried = ()
        return Taken(step.coefficients if step.validated < model.loss else [0.0] * model.count, {})

    GaussNewton._trusted = trusted  # type: ignore[method-assign]


def one_ridge() -> None:
    """The ridge is 1, not chosen."""
    linear_model.RIDGES = (1.0,)


def optimistic() -> None:
    """Slopes of rows that were looked at are taken as they are."""
    step.without_optimism = lambda slopes_TCK, *_: slopes_TCK


def losses_alone() -> None:
    """Of each pass its mean loss is kept: a gradient along the same directions, and the best of four step lengths."""

    def trusted(self: GaussNewton, model: LinearModel, closure: Any, draw: Any) -> Taken:
        own: Outputs = model.outputs
        slopes = model._slopes_TCK / model._unit
        moved = own.scores_TC.double().cpu().unsqueeze(-1) + self.rho * slopes
        labels_T = own.labels_T.cpu()
        picked_TK = moved.log_softmax(1)[torch.arange(len(labels_T)), labels_T]
        gradient_K = (-picked_TK.mean(0) - model.loss) / self.rho
        whole_K = -gradient_K * model.loss / gradient_K.square().sum().clamp_min(1e-30)
        found = [(model.loss, [0.0] * model.count)]
        for length in LENGTHS:
            coefficients = (length * whole_K).tolist()
            self._move(draw, coefficients)
            found.append((closure.outputs(own).loss(), coefficients))
        self.tried = ()
        return Taken(min(found, key=lambda one: one[0])[1], {"taken": 1.0})

    GaussNewton._trusted = trusted  # type: ignore[method-assign]


def nothing() -> None:
    """The method as it is."""


PARTS: dict[str, tuple[Callable[[], None], Sequence[tuple[str, Any]]]] = {
    "as it is": (nothing, ()),
    "without the look: Gaussian directions": (nothing, [("method.basis", "gaussian")]),
    "without outputs: one loss of each pass": (losses_alone, ()),
    "without biases": (no_biases, ()),
    "without the choice of layers by effect": (every_layer, ()),
    "without leaving rows out of what is foretold": (optimistic, ()),
    "without the choice of the ridge": (one_ridge, ()),
    "without the last word of dev rows": (no_last_word, ()),
    "without trust: no step is measured": (whole_steps, ()),
}


def run(given: tuple[str, str, str, int, argparse.Namespace]) -> tuple[str, dict[str, Any]]:
    """One run, in a process of its own: its name, and what it came to."""
    name, part, task, seed, chosen = given
    take_away, settings = PARTS[part]
    take_away()
    own = [("method.name", "gauss-newton"), ("train.seed", seed), ("train.steps", ROUNDS[task]), *settings]
    return measured((name, task, own, chosen))


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    given = parser.parse_args()
    named = [
        (f"{task}/{part}, seed {seed}", part, task, seed) for seed in given.seeds for part in PARTS for task in ROUNDS
    ]
    make("ablations.json", run, named, given)
