"""Gradients of a first-order run, layer by layer; no full gradient is kept.

A run of `adam` takes its steps, and the gradient of every chosen layer is passed to a `Watcher` as soon as it is
computed.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tezo.directions.ranks import squared_singular_values
from tezo.directions.targets import ALL_LINEAR, Target, select_targets
from tezo.system.errors import RequestError
from tezo.training.job import Job, prepare
from tezo.training.settings import MethodConfig
from tezo_studies.analysis.figure import Given, Numbers


@dataclass(frozen=True, kw_only=True)
class GradientOptions:
    """Options of the run whose gradients are analysed."""

    layers: Sequence[str] = ()
    """Name patterns of the parameters to analyse. Default: four linear layers, spread over the depth."""
    steps: int = 50
    """Steps of first-order training. The paper uses 500."""
    lr: float = 5e-5
    """Learning rate of Adam."""
    batch_size: int = 16
    """Rows per step. The paper uses 16."""


class Watcher(ABC):
    """Receives one layer's gradient at each step."""

    @abstractmethod
    def see(self, gradient_MN: Tensor) -> None:
        """Processes the gradient of the next step."""


def watched_run(
    options: GradientOptions, given: Given, make: Any, least_steps: int = 2
) -> tuple[dict[str, Any], list[float], Job]:
    """Makes a short first-order run; returns (watcher by layer name, loss of each step, job).

    Args:
        options: options of the run.
        given: model and rows.
        make: target -> its `Watcher`.
        least_steps: minimum number of steps that the figure needs.

    Raises:
        RequestError: too few steps, or a pattern that no matrix matches.
    """
    if options.steps < least_steps:
        raise RequestError(f"steps is {options.steps}, but the figure needs at least {least_steps}; raise it.")
    assert given.config is not None
    train = replace(given.config.train, batch_size=options.batch_size, steps=options.steps)
    job = prepare(replace(given.config, method=MethodConfig(name="adam", options={"lr": options.lr}), train=train))
    targets = chosen_layers(job, options.layers)
    watchers = {target.name: make(target) for target in targets}
    handles = [
        target.parameter.register_hook(partial(_see, watchers[target.name]))  # type: ignore[no-untyped-call]
        for target in targets
    ]
    losses, sampler = [], job.sampler()
    try:
        for step in range(options.steps):
            job.optimizer.step(job.objective.closure(job.model, job.batches(sampler.rows(step))))
            assert job.optimizer.last_step is not None
            losses.append(job.optimizer.last_step.loss)
    finally:
        for handle in handles:
            handle.remove()
    return watchers, losses, job


def _see(watcher: Watcher, gradient: Tensor) -> None:
    watcher.see(gradient.detach().flatten(0, -2))


def chosen_layers(job: Job, patterns: Sequence[str]) -> list[Target]:
    """The matrices with a gradient that `patterns` select; default: four linear layers, spread over the depth."""
    matrices = [target for target in select_targets(job.model, patterns or (ALL_LINEAR,)) if target.is_matrix]
    with torch.enable_grad():
        loss = job.objective.closure(job.model, job.batches([0]))()
        gradients = torch.autograd.grad(loss, [target.parameter for target in matrices], allow_unused=True)
    matrices = [target for target, gradient in zip(matrices, gradients, strict=True) if gradient is not None]
    if not matrices:
        raise RequestError(
            f"layers is {list(patterns)}, which selects no matrix that the loss depends on; set another pattern."
        )
    places = {round(i * (len(matrices) - 1) / 3) for i in range(4)}
    return matrices if patterns else [matrices[place] for place in sorted(places)]


def described(options: GradientOptions, losses: Sequence[float], job: Job) -> Numbers:
    """The numbers that every figure of a run has: model, rows, losses, steps and batch size."""
    config = job.config
    return {
        "model": config.model.name,
        "rows": config.data.task or config.data.train,
        "losses": [round(loss, 5) for loss in losses],
        "steps": options.steps,
        "batch_size": options.batch_size,
    }


def on_what(numbers: Numbers) -> str:
    """The end of a caption: a description of the run."""
    first, last = numbers["losses"][0], numbers["losses"][-1]
    return (
        f"{numbers['model']}, {numbers['steps']} steps of Adam on {numbers['batch_size']} rows each of "
        f"{numbers['rows']}; the batch loss went from {first:.2f} to {last:.2f}"
    )


def singular_values(matrix_MN: Tensor) -> Tensor:
    """All singular values of a matrix, descending, in float64."""
    return squared_singular_values(matrix_MN).clamp(min=0).sqrt().flip(0)


def rounded(values: Any, digits: int = 5) -> list[float]:
    """Numbers for JSON, rounded to `digits` significant digits."""
    return [float(f"{float(value):.{digits}g}") for value in values]


class Sketch:
    """A random projection S of long vectors to k numbers that preserves inner products on average.

    With random signs s, S(x)_j = sum of s_i x_i over i = j mod k; E <S x, S y> = <x, y>, with a standard error of at
    most about sqrt(2 / k) for unit vectors. Vectors of at most k entries are kept unchanged. For a 4096 x 4096 matrix
    over 500 steps, k = 65521 takes 131 MB for the sketches and 17 MB for the signs; the gradients would take 33 GB.

    Args:
        length: length of the vectors.
        size: k; with a prime, the entries of one column do not fall on the same number.
    """

    def __init__(self, length: int, size: int = 65521) -> None:
        self.exact = length <= size
        self._size = size
        signs = torch.randint(0, 2, (0 if self.exact else length,), generator=torch.Generator().manual_seed(0))
        self._signs = signs.to(torch.int8).mul_(2).sub_(1)

    @property
    def standard_error(self) -> float:
        """Standard error of the inner product of two unit vectors; 0 if vectors are kept unchanged."""
        return 0.0 if self.exact else math.sqrt(2 / self._size)

    def of(self, vector: Tensor) -> Tensor:
        """S(x) of a vector x, float32 on the CPU."""
        vector = vector.float().cpu()
        if self.exact:
            return vector
        signed = vector * self._signs
        padded = torch.nn.functional.pad(signed, (0, -len(signed) % self._size))
        short: Tensor = padded.view(-1, self._size).sum(0)
        return short
