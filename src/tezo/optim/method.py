"""Named methods: the function that builds an optimizer, and what runs, tables and commands have to know of it."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar

from tezo.optim.base_optimizer import BaseOptimizer
from tezo.optim.options import options_of

T = TypeVar("T", bound=BaseOptimizer, covariant=True)

AUTO = "auto"
"""The value of an option that a run chooses: of lr, a rate found by trials before the first step
(`tezo.optim.learning_rate`); of rho, a scale that is measured (`tezo.optim.measured_scale`); of directions, those of
each example where the rows allow it; of rank, one by the number of labels."""
Rate = float | Literal["auto"]
"""Type of lr and rho in a recipe; methods are built with numbers."""
Count = int | Literal["auto"]
"""Type of a rank in a recipe that a run may choose."""
FORWARD_PASSES = "forward passes"


@dataclass(frozen=True)
class Method(Generic[T]):
    """A named method.

    Attributes:
        name: name on the command line and in recipes.
        build: function that creates its optimizer.
        in_paper: whether the method is in the paper.
        exports_adapter: whether a run on linear layers results in an exact LoRA adapter.
        needs: what it takes of the model.
        chosen: options that a run chooses for itself unless they are given; the others have their defaults.
        takes_rows: whether its closures must give a loss or outputs for each row, not one loss.
        takes_outputs: whether they must give the outputs of each row.
        takes_answers: whether they must be prompts, whose answers by the model are scored.
        takes_labels: whether they must be of labels that all rows share.
        guarded: whether a run returns to its best state when the loss has risen, unless `train.guard` says otherwise.
        batch_size: default of `train.batch_size`.
        least_rows: its least value.
        steps: default of `train.steps`; None: by the number of rows.
        of_texts: (batch_size, steps) of runs on free text; None: as of other rows.
        schedule: default of `train.schedule`.
        rate: the meaning of `lr` where it is not a learning rate, in words.
    """

    name: str
    build: Callable[..., T]
    in_paper: bool = True
    exports_adapter: bool = False
    needs: str = FORWARD_PASSES
    chosen: tuple[str, ...] = ()
    takes_rows: bool = False
    takes_outputs: bool = False
    takes_answers: bool = False
    takes_labels: bool = False
    guarded: bool = False
    batch_size: int = 16
    least_rows: int = 1
    steps: int | None = None
    of_texts: tuple[int, int] | None = None
    schedule: Literal["constant", "linear"] = "constant"
    rate: str = ""

    @property
    def summary(self) -> str:
        """First line of the docstring."""
        return inspect.getdoc(self.build).partition("\n")[0]  # type: ignore[union-attr]

    def for_texts(self) -> "Method[T]":
        """Returns the method with the sizes that it has on free text."""
        size, steps = self.of_texts or (self.batch_size, self.steps)
        return replace(self, batch_size=size, steps=steps)

    def options(self) -> dict[str, Any]:
        """Option -> annotated type, for all options that a recipe may set."""
        kinds = {name: kind for name, (kind, _) in options_of(self.build).items()}
        if "directions" in kinds:
            kinds |= {"lr": Rate, "rho": Rate, "directions": Literal["auto", "shared", "per-example"]}
        kinds |= {name: {float: Rate, int: Count}.get(kinds[name], kinds[name]) for name in self.chosen}
        return {name: kind for name, kind in kinds.items() if name != "seed"}

    def defaults(self) -> dict[str, Any]:
        """Option -> default of a recipe, in the order of `options`."""
        return {name: self.default_in_python(name) for name in self.options()} | dict.fromkeys(self.chosen, AUTO)

    def default_in_python(self, option: str) -> Any:
        """Default of an option of `build`."""
        return options_of(self.build)[option][1]
