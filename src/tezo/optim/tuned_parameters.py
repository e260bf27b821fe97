"""The parameters that an optimizer tunes, and their trained changes."""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tezo.directions.perturbation import Perturbation
from tezo.directions.spaces import Dense, LowRank
from tezo.directions.targets import Target
from tezo.forward import perturbed_parameter
from tezo.forward.blocks import Blocks
from tezo.forward.interception import DirectReads
from tezo.forward.perturbed_parameter import PerturbedParameter, require_writable
from tezo.optim.updates import Update
from tezo.system.errors import RequestError


@dataclass(frozen=True)
class LowRankChange:
    """The trained change of one matrix W (M x N): the sum of left @ right^T over its parts.

    Attributes:
        target: the matrix.
        rank: rank of its directions.
        parts: pairs of left (M, K) and right (N, K); empty before the first change.
    """

    target: Target
    rank: int
    parts: Sequence[tuple[Tensor, Tensor]]


class TunedParameters(dict[str, PerturbedParameter]):
    """Parameter name -> the object that perturbs and updates it, for all tuned parameters of a model.

    Args:
        model: the model.
        targets: the parameters to be tuned.
        perturbation: draws their directions.
        update: steps along estimates; must accept the perturbation's type of direction.
        in_forward: see `ZerothOrderOptimizer`.
        frozen_rank: see `ZerothOrderOptimizer`.

    Attributes:
        blocks: of the model's forward passes.
        merged: whether the trained changes were added to the weights.
        closed: whether the hooks are removed.
        reads_checked: whether `refusing_direct_reads` has been open without an error.

    Raises:
        RequestError: a parameter cannot be tuned this way; the model is unchanged.
    """

    def __init__(
        self,
        model: nn.Module,
        targets: list[Target],
        perturbation: Perturbation,
        update: Update,
        *,
        in_forward: bool,
        frozen_rank: int | None,
    ) -> None:
        super().__init__()
        self.model, self.perturbation, self._update = model, perturbation, update
        self.merged = self.closed = self.reads_checked = False
        self.blocks = Blocks(model)
        weakref.finalize(self, self.blocks.close).atexit = False  # at exit nothing needs them
        try:
            for target in targets:
                kind = perturbation.direction_type(target)
                if not issubclass(kind, update.takes):
                    accepted = ", ".join(kind.__name__ for kind in update.takes)
                    raise RequestError(
                        f"{type(update).__name__} takes directions of type {accepted}; "
                        f"{type(perturbation).__name__} draws {kind.__name__} for {target.name}."
                    )
                if update.writes_weight:
                    require_writable(target, "this method")
                made = perturbed_parameter(target, kind, self.blocks, in_forward=in_forward, frozen_rank=frozen_rank)
                self[target.name] = made
                made.owner = weakref.ref(self)
        except BaseException:
            self.close()
            raise

    @contextmanager
    def refusing_direct_reads(self) -> Iterator[None]:
        """Context that notes reads of parameters past their modules, where no perturbation is.

        Raises:
            RequestError: at the end, if there were any.
        """
        by_hooks = [parameter for parameter in self.values() if not parameter.in_storage]
        # without it a compiled model would be compiled twice
        with torch.compiler.set_stance("force_eager"), DirectReads([each.target for each in by_hooks]) as reads:
            yield
        if reads.names:
            raise RequestError(
                f"method.targets: {', '.join(sorted(reads.names))} are read past their modules, where no perturbation "
                f"reaches them; leave them out ('!{min(reads.names)}'), or set method.in_forward=false."
            )
        for parameter in by_hooks:
            parameter.was_called = False  # a graph compiled before there were hooks does not call them
        self.reads_checked = True

    def writes(self, parameter: PerturbedParameter) -> bool:
        """Whether this method changes the stored tensor of a parameter at any time."""
        folds = self.perturbation.interval is not None and parameter.folds_into_weight
        return parameter.writes_weight or self._update.writes_weight or folds

    def drawn_on_the_device(self) -> str | None:
        """Returns the name of a parameter whose noise or rounding depends on the device type, if there is one."""
        for name, parameter in self.items():
            target = parameter.target
            kind = self.perturbation.direction_type(target)
            rounded = self.writes(parameter) and target.parameter.dtype in (torch.bfloat16, torch.float16)
            if issubclass(kind, (Dense, LowRank)) or rounded:
                return name
        return None

    def why_no_adapter(self) -> str | None:
        """Returns why, in words, the trained change is not an exact LoRA adapter; None if it is one."""
        if self.merged:
            return "the trained change is in the weights since merge()"
        if getattr(self.model, "peft_config", None):
            return "the trained change is in the PEFT adapter; call merge(), then its save_pretrained()"
        for parameter in self.values():
            target = parameter.target
            if self.writes(parameter):
                return f"{target.name} was written to"
            if not target.is_linear or len(target.sites) > 1:
                return f"{target.name} is not the weight of one linear layer"
        return None

    def low_rank_changes(self) -> list[LowRankChange]:
        """Returns the trained change of each matrix that is perturbed in the forward pass."""
        return [
            LowRankChange(parameter.target, self.perturbation.rank_of(name) or 1, parameter.trained())
            for name, parameter in self.items()
            if not parameter.writes_weight
        ]

    def largest_rank(self, steps: int) -> int:
        """Returns the largest rank of a change of a weight in a run of so many steps, with its perturbation."""
        interval = self.perturbation.interval
        refreshes = 0 if interval is None else (steps - 1) // interval
        ranks = {name: self.perturbation.rank_of(name) or 0 for name in self}
        return max(rank + min(self[name].most_kept, refreshes * rank) for name, rank in ranks.items())

    def weights_below(self) -> dict[str, Tensor]:
        """Returns "weight/NAME" -> the stored tensor, where it can be written and has a change beside it; no copies."""
        return {f"weight/{name}": p.weight for name, p in self.items() if p.target.is_writable and p.state()}

    def fold(self) -> None:
        """Adds the changes stored beside the weights to them, and removes the hooks; done already, it does nothing.

        Raises:
            RequestError: `close` has dropped the changes.
        """
        if self.closed and not self.merged:
            raise RequestError("this optimizer was closed, and its change dropped; call merge() in place of close().")
        for parameter in self.values():
            parameter.fold()
        self.merged = True
        self.close()

    def close(self) -> None:
        """Removes the hooks; changes stored beside the weights no longer take effect."""
        self.closed = True
        for parameter in self.values():
            parameter.close()
        self.blocks.close()
