"""The torch.optim face: `loss = optimizer.step(closure)`, with no backward pass."""

import math
from collections.abc import Sequence
from typing import overload

import torch
from torch import nn

from tezo.directions.bases import FactorStore, Passes
from tezo.directions.perturbations import DrawKey, Perturbation
from tezo.directions.spaces import Direction
from tezo.directions.targets import ALL_LINEAR, Target, select_targets
from tezo.distributed import Ranks
from tezo.errors import NonFiniteLossError, RequestError
from tezo.estimators.estimate import Closure, Estimate, Probe, StepRecord
from tezo.estimators.two_point import copies_of_a_pass, gather_probes, two_point
from tezo.forward import Blocks, InForward, MovingParameter, NotInBlocksError, Shift, moving_parameter, require_writable
from tezo.forward.evaluation_mode import evaluation_mode
from tezo.numerics.products import float32_on_emulating_cpu
from tezo.optim.limits import check_settings
from tezo.optim.saved_state import SavedState
from tezo.optim.updates import State, Update


class ZerothOrderOptimizer(SavedState):
    """A perturbation and an update rule, put together over the parameters of a model.

    `step(closure)` draws `num_directions` directions, evaluates the closure at W + rho Z and W - rho Z
    along each, and steps along the average of kappa Z. The closure runs forward passes only and returns
    any scalar; the model is in evaluation mode during the step, so that both evaluations see one function.
    Learning-rate schedulers of torch work on it. Between steps the model computes with the tuned
    parameters, by forward hooks where nothing is written; `merge()` writes them into the weights.

    Args:
        model: to be tuned, already on its device and in its dtype.
        perturbation: draws directions.
        update: steps along estimates; must take the perturbation's type of direction.
        lr: learning rate.
        rho: perturbation scale (the paper's perturbation rate).
        weight_decay: decoupled: what the method trains is multiplied by 1 - lr * weight_decay each step.
            That is the weight where the method writes weights, and the change (c, A or S) where it keeps
            factors beside them. 1-D parameters are not decayed.
        num_directions: directions averaged in a step, at two evaluations each.
        targets: patterns that choose the parameters, see `tezo.directions.targets.select_targets`.
        seed: of every draw.
        in_forward: False moves low-rank directions in place too, as published code does (for comparison).
        frozen_rank: where factors change during a run, what was trained with the old ones is kept beside the base, by
            factors of at most this rank, compressed to it; None: it is folded into the weights, and beside a base that
            cannot be written kept at rank 64.

    Raises:
        RequestError: a setting is out of range, or the targets cannot be moved this way.
        NonFiniteLossError: from `step`; the parameters are as before the step.
    """

    def __init__(
        self,
        model: nn.Module,
        perturbation: Perturbation,
        update: Update,
        *,
        lr: float,
        rho: float = 1e-3,
        weight_decay: float = 0.0,
        num_directions: int = 1,
        targets: Sequence[str] = (ALL_LINEAR,),
        seed: int = 0,
        in_forward: bool = True,
        frozen_rank: int | None = None,
    ) -> None:
        check_settings(lr, rho, weight_decay, num_directions, frozen_rank, perturbation)
        self.model = model
        self.perturbation = perturbation
        self.update = update
        self.rho = rho
        self.num_directions = num_directions
        self.seed, self.num_steps = seed, 0
        self.last_step: StepRecord | None = None
        self.targets = select_targets(model, targets)
        self._update_state: dict[str, State] = {}
        self._ranks = Ranks()
        self._watching = self._closed = False
        self.merged = False
        perturbation.prepare(self.targets)
        self._blocks = Blocks(model)
        self.moving: dict[str, MovingParameter] = {}
        try:
            for target in self.targets:
                self.moving[target.name] = self._moving(target, in_forward, frozen_rank)
        except RequestError:
            self.close()
            raise
        self._in_blocks = all(moving.in_blocks for moving in self.moving.values())
        super().__init__([t.parameter for t in self.targets], {"lr": lr, "weight_decay": weight_decay})

    def _moving(self, target: Target, in_forward: bool, frozen_rank: int | None) -> MovingParameter:
        kind = self.perturbation.direction_type(target)
        if not issubclass(kind, self.update.takes):
            taken = ", ".join(kind.__name__ for kind in self.update.takes)
            raise RequestError(
                f"{type(self.update).__name__} takes directions of type {taken}; "
                f"{type(self.perturbation).__name__} draws {kind.__name__} for {target.name}."
            )
        if self.update.writes_weight:
            require_writable(target, "this method")
        return moving_parameter(target, kind, self._blocks, in_forward=in_forward, frozen_rank=frozen_rank)

    @overload
    def step(self, closure: None = ...) -> None: ...
    @overload
    def step(self, closure: Closure) -> float: ...
    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> float | None:
        """One step; returns the mean of its losses.

        Args:
            closure: evaluates the objective on this step's batch. It is called twice for every direction, unless
                it is a `tezo.estimators.estimate.BlockClosure` and several evaluations are faster in one forward pass.
        """
        if closure is None:
            raise RequestError("step() needs a closure that returns the loss: optimizer.step(lambda: loss_of(batch)).")
        if not self._watching:
            self._look_at(lambda _: closure())
        drawn = self._draw()
        with evaluation_mode(self.model), float32_on_emulating_cpu(self.model):
            probes = self._probes(closure, drawn, self.rho)
        loss = sum(p.loss_plus + p.loss_minus for p in probes) / (2 * len(probes))
        self._take(drawn, StepRecord(self.num_steps, loss, float(self.param_groups[0]["lr"]), probes))
        return loss

    @torch.no_grad()
    def measure(self, closure: Closure, rho: float, *, others: int = 0) -> tuple[Probe, ...]:
        """What the next step would measure at another perturbation scale; no step is taken.

        Args:
            closure: as for `step`.
            rho: the scale.
            others: measures along so many directions that no step draws, in place of the next step's.
        """
        drawn = self._draw(others)
        with evaluation_mode(self.model), float32_on_emulating_cpu(self.model):
            return self._probes(closure, drawn, rho)

    @torch.no_grad()
    def replay(self, record: StepRecord) -> None:
        """Takes a finished step again from what was recorded of it, without an evaluation.

        Args:
            record: of step `num_steps` of a run with the same seed and settings.
        """
        if record.step != self.num_steps or len(record.probes) != self.num_directions:
            raise RequestError(
                f"record is of step {record.step} with {len(record.probes)} directions; the next step is "
                f"{self.num_steps}, with {self.num_directions}."
            )
        self._take(self._draw(), record)

    def set_calibration_passes(self, passes: Passes) -> None:
        """Says what a basis that sees the data is to look at; without it, that is the batch of the step at hand.

        Args:
            passes: step -> anything: runs the model on some training rows, whose inputs to each layer are looked at.
                It is called when factors are first needed, and at every refresh with the step it is at.
        """
        self._watching = True
        self._look_at(passes)

    def _look_at(self, passes: Passes) -> None:
        def as_in_a_step(refresh_step: int) -> object:
            with evaluation_mode(self.model), float32_on_emulating_cpu(self.model):
                return passes(refresh_step)

        self.perturbation.set_calibration_passes(self.model, as_in_a_step)

    def set_factor_store(self, store: FactorStore) -> None:
        """Says where such a basis is to keep what it saw, so that steps can be replayed without the data."""
        self.perturbation.set_factor_store(store)

    def _draw(self, others: int = 0) -> dict[str, list[Direction]]:
        """The step's directions, by parameter; what is trained in the forward pass moves over to their factors."""
        if self._closed:
            raise RequestError("this optimizer was closed, or merged into the weights; make a new one to go on.")
        indices = range(self.num_directions, self.num_directions + others) if others else range(self.num_directions)
        keys = [DrawKey(self.seed, self.num_steps, index) for index in indices]
        drawn: dict[str, list[Direction]] = {}
        try:
            for name, moving in self.moving.items():  # old factors are folded and dropped before the next are drawn
                state = self._update_state.get(name, {})
                drawn[name] = [self.perturbation.direction(moving.target, key, state) for key in keys]
                moving.begin(drawn[name][0], keys[0])
        except FloatingPointError:  # of what a basis looked at
            raise self._not_finite(math.nan) from None
        return drawn

    def _take(self, drawn: dict[str, list[Direction]], record: StepRecord) -> None:
        for name, moving in self.moving.items():
            estimate = Estimate(drawn[name], record.projected_grads, self._num_estimates)
            self._apply(moving, estimate, record.lr)
        self.last_step = record
        self.num_steps += 1

    @property
    def _num_estimates(self) -> int:
        """How many were stepped along so far, which moments are corrected for."""
        return self.num_steps

    def _probes(self, closure: Closure, drawn: dict[str, list[Direction]], rho: float) -> tuple[Probe, ...]:
        def show(points: Sequence[tuple[int, float]]) -> None:
            for name, moving in self.moving.items():
                moving.set_perturbations([Shift(drawn[name][index], scale) for index, scale in points])

        own = range(self._ranks.rank, len(next(iter(drawn.values()))), self._ranks.size)
        try:
            probes = two_point(closure, show, rho, own, self._copies(closure, len(own)))
        except NotInBlocksError:  # found out once, by the first step
            self._in_blocks = False
            probes = two_point(closure, show, rho, own, 1)
        probes = gather_probes(probes, self._ranks)
        for probe in probes:
            if not probe.is_finite:
                raise self._not_finite(probe.loss_minus if math.isfinite(probe.loss_plus) else probe.loss_plus)
        if not any(moving.was_called for moving in self.moving.values()):
            raise RequestError(
                f"the closure runs none of the modules that are tuned, {self.targets[0].name} for one; it is to call "
                "the optimizer's model, and a compiled one only after the optimizer was made."
            )
        return probes

    def _not_finite(self, loss: float) -> NonFiniteLossError:
        return NonFiniteLossError(self.num_steps, loss, self.last_step.loss if self.last_step is not None else None)

    def share_directions(self, ranks: Ranks) -> None:
        """From now on each rank evaluates directions of its own, and all step along all of them.

        Raises:
            RequestError: the directions cannot be shared out evenly.
        """
        if self.num_directions % ranks.size:
            raise RequestError(
                f"method.num_directions is {self.num_directions}, which {ranks.size} ranks cannot share evenly; "
                "give a multiple, or set train.parallel=rows."
            )
        self._ranks = ranks

    def _copies(self, closure: Closure, directions: int) -> int:
        dense = any(moving.draws_for_all_blocks for moving in self.moving.values())
        return copies_of_a_pass(closure, directions, dense=dense) if self._in_blocks else 1

    def _apply(self, moving: MovingParameter, estimate: Estimate, lr: float) -> None:
        name = moving.target.name
        if name not in self._update_state:
            self._update_state[name] = self.update.init(estimate, moving)
        self._decay(moving, lr)
        self.update.step(moving, estimate, self._update_state[name], lr)

    def _decay(self, moving: MovingParameter, lr: float) -> None:
        weight_decay = float(self.param_groups[0]["weight_decay"])
        if weight_decay and moving.target.is_matrix:
            decay = moving.decay_weight_ if self.update.writes_weight else moving.decay_
            decay(1 - lr * weight_decay)

    @property
    def cost_of_basis(self) -> tuple[int, float]:
        """(calls of the model, seconds) that a basis which sees the data has spent on looking so far."""
        return self.perturbation.cost_of_basis

    @property
    def factor_bytes(self) -> int:
        """Bytes of what is kept for drawing directions."""
        return self.perturbation.factor_bytes

    def application(self, name: str) -> tuple[int | None, str]:
        """(rank of a parameter's directions or None, how it is moved, in words)."""
        return self.perturbation.rank_of(name), self.moving[name].application

    @property
    def num_forward_passes(self) -> int:
        """Evaluations of the closure so far."""
        return 2 * self.num_directions * self.num_steps

    @torch.no_grad()
    def merge(self) -> nn.Module:
        """Writes what was trained in the forward pass into the weights, removes the hooks, returns the model."""
        for moving in self.moving.values():
            if isinstance(moving, InForward):
                moving.fold()
        self.merged = True
        self.close()
        return self.model

    def close(self) -> None:
        """Removes the hooks: parameters moved in the forward pass are the base's again."""
        self._closed = True
        for moving in self.moving.values():
            moving.close()
        self._blocks.close()
