"""Bases, which give the fixed factors of low-rank directions: their interface, those without data, those with."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from tezo.directions.random import normal
from tezo.directions.targets import Target
from tezo.system.errors import RequestError
from tezo.system.progress import BASIS, current

Role = Literal["u", "v"]
"""Role of a factor: "u" is (M, r) and belongs to the rows of the stored weight, "v" is (N, r) and to its columns."""

ROLES: tuple[Role, Role] = ("u", "v")

KIND = "basis"
"""The kind under which a factor store keeps the factors."""

OUTPUT_SIDE = "/output"
"""The end of the names of output-side factors, in stored tensors."""
PROPOSALS = "coefficients of proposed directions"
"""The name of the proposals, in stored tensors."""

_KEPT_REFRESHES = 2
"""Refresh steps whose factors stay in memory: at a refresh, momentum is carried over from the last factors."""

Passes = Callable[[int], object]
"""Function of the refresh step; it runs forward passes of the model on some training rows."""
RowsOf = Callable[[int, int], Any]
"""Function of the refresh step and of the most rows that are wanted. It returns training rows, as a closure that gives
their outputs (`tezo.optim.closures.RowOutputs`), those of the step first if they may be among them."""


@dataclass(frozen=True)
class Source:
    """A model and training rows, from which a basis may compute its factors.

    Attributes:
        model: the tuned model, in evaluation mode.
        passes: runs forward passes; None: no rows are known.
        rows: returns rows with their outputs; None: no such rows are known.
        varied: whether rows of other steps are other rows.
        answers: the prompts of the step, to which the model writes answers that are scored
            (`tezo.optim.closures.RowAnswers`); None: the step has no such rows.
    """

    model: nn.Module
    passes: Passes | None
    rows: RowsOf | None
    varied: bool = True
    answers: Any = None


@dataclass(frozen=True)
class Predictions:
    """The changes of the scores of E rows of a step, of C classes, that J directions should make.

    Attributes:
        fitted_ECJ: predicted by regressions that had the row.
        without_ECJ: predicted by the same regressions without the row.
    """

    fitted_ECJ: Tensor
    without_ECJ: Tensor


@dataclass(frozen=True, kw_only=True)
class Factors:
    """The factors that were computed from data at one refresh: float64, on the CPU.

    Attributes:
        inputs: parameter name -> factor of the input side, (I, r).
        outputs: parameter name -> factor of the output side, (O, r); those that are not named are random.
        proposals: coefficients of directions, the same for all parameters, (J, r); None: they are random.
        passes: number of model calls that the factors took.
    """

    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    proposals: Tensor | None = None
    passes: int = 0

    def predictions(self) -> Predictions | None:
        """Returns the predicted effect of the proposed directions on the scores of rows; None if it is unknown."""
        return None

    def metrics(self) -> dict[str, Any]:
        """Returns measurements behind the factors, for the log of metrics: JSON."""
        return {}

    def to_tensors(self) -> dict[str, Tensor]:
        """Returns the form in which the factors are stored."""
        proposals = {} if self.proposals is None else {PROPOSALS: self.proposals}
        outputs = {name + OUTPUT_SIDE: factor for name, factor in self.outputs.items()}
        return {**self.inputs, **outputs, **proposals}


@dataclass(frozen=True)
class StoredTensors:
    """Tensors computed from data at one step, as they are stored.

    Attributes:
        tensors: by name.
        passes: number of model calls that they took.
    """

    tensors: Mapping[str, Tensor]
    passes: int


class FactorStore(Protocol):
    """Storage for tensors computed from data, so that steps can be replayed without the data."""

    def load(self, kind: str, step: int) -> StoredTensors | None:
        """Returns the tensors saved for `kind` at `step`; None if there are none."""

    def save(self, kind: str, step: int, stored: StoredTensors) -> None:
        """Saves tensors for `kind` at `step`."""


class Basis(ABC):
    """A source of the fixed factors of low-rank directions; it knows nothing of the perturbation that uses them.

    Factors are float64 on the CPU. The mean square of their entries is 1, so that directions have unit variance with
    every basis.
    """

    data_dependent = False
    """Whether factors are computed from data; such factors are saved with a run."""
    watches = False
    """Whether it looks into layers by a watcher alone, to which an engine may show them where torch computes none."""

    def prepare(self, targets: Sequence[Target], ranks: Mapping[str, int]) -> None:
        """Takes, once, the matrices to be tuned and the rank of each by name."""
        del targets, ranks

    def refresh(self, refresh_step: int, source: Source) -> None:
        """Computes the factors from a step on, unless they are known. Only here a basis runs forward passes.

        Raises:
            RequestError: the source lacks data that the factors are computed from.
            FloatingPointError: the model computes NaN or infinite values.
        """
        del refresh_step, source

    @abstractmethod
    def factor(self, role: Role, target: Target, rank: int, seed: int, refresh_step: int) -> Tensor:
        """Returns the factor of `target` from a step on: (M, rank) for the role "u", (N, rank) for "v"."""

    def collecting_bytes(self, targets: Sequence[Target], ranks: Mapping[str, int]) -> int:
        """Returns the most bytes that the passes of a refresh keep, as far as they do not depend on the rows.

        Args:
            targets: matrices to be tuned.
            ranks: name -> rank.
        """
        del targets, ranks
        return 0

    def proposals(self, refresh_step: int) -> Tensor | None:
        """Returns coefficients of directions, the same for all targets, (J, rank); None: they are random."""
        del refresh_step
        return None

    def predictions(self, refresh_step: int) -> Predictions | None:
        """Returns the predicted effect of proposed directions on the scores of rows; None if it is unknown."""
        del refresh_step
        return None

    def metrics(self) -> dict[str, Any]:
        """Returns measurements behind the newest factors, for the log of metrics: JSON."""
        return {}

    @property
    def cost(self) -> tuple[int, float]:
        """(calls of the model, seconds) spent on computing factors from data so far."""
        return 0, 0.0

    def set_factor_store(self, store: FactorStore) -> None:
        """Sets the store for factors that are computed from data; ignored unless `data_dependent`."""
        del store

    def state(self) -> dict[str, Tensor]:
        """Returns the factors that cannot be redrawn from a key: "REFRESH_STEP/NAME" -> factor."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores the result of `state`."""
        del state


class GaussianBasis(Basis):
    """u_MR and v_NR with independent N(0, 1) entries, drawn from (seed, refresh step, parameter, role)."""

    def factor(self, role: Role, target: Target, rank: int, seed: int, refresh_step: int) -> Tensor:
        size = target.matrix_shape["uv".index(role)]
        return normal((size, rank), seed=seed, step=refresh_step, name=target.name, role=role)


class OrthonormalBasis(GaussianBasis):
    """Q of the Gaussian factor's QR decomposition, times the square root of its rows: the mean square is 1.

    The diagonal of R is positive, which makes Q unique.
    """

    def factor(self, role: Role, target: Target, rank: int, seed: int, refresh_step: int) -> Tensor:
        q, r = torch.linalg.qr(super().factor(role, target, rank, seed, refresh_step))
        signed: Tensor = q * torch.sign(torch.diagonal(r))
        signed *= len(q) ** 0.5
        return signed


F = TypeVar("F", bound=Factors)


class DataBasis(Basis, Generic[F]):
    """Factors of linear layers are computed from data at each refresh; the others are Gaussian.

    They are kept for the last refreshes, saved with a run, and read again by a replay.
    """

    data_dependent = True

    def __init__(self) -> None:
        self._targets: list[Target] = []
        self._ranks: Mapping[str, int] = {}
        self._store: FactorStore | None = None
        self._kept: dict[int, F] = {}
        self._unsaved: set[int] = set()
        self._counted: set[int] = set()
        self._calls, self._seconds = 0, 0.0
        self._random = GaussianBasis()

    @abstractmethod
    def compute(self, refresh_step: int, source: Source) -> F:
        """Returns the factors of all linear layers from a step on, by forward passes."""

    @abstractmethod
    def read(self, stored: StoredTensors) -> F:
        """Returns the factors that were stored as these tensors."""

    def computes_again(self, source: Source) -> bool:
        """Returns whether factors of the store are computed again, since a step needs what computing them shows."""
        del source
        return False

    def prepare(self, targets: Sequence[Target], ranks: Mapping[str, int]) -> None:
        self._targets = [target for target in targets if target.input_role is not None]
        self._ranks = ranks

    def refresh(self, refresh_step: int, source: Source) -> None:
        if refresh_step not in self._kept:
            self._kept[refresh_step] = factors = self._found(refresh_step, source)
            if refresh_step not in self._counted:  # going back to a better step reads them again
                self._calls += factors.passes
                self._counted.add(refresh_step)
            for old in sorted(self._kept)[:-_KEPT_REFRESHES]:
                del self._kept[old]
        if self._store is not None and refresh_step in self._unsaved:
            factors = self._kept[refresh_step]
            self._store.save(KIND, refresh_step, StoredTensors(factors.to_tensors(), factors.passes))
            self._unsaved.remove(refresh_step)

    def _found(self, refresh_step: int, source: Source) -> F:
        """Returns the factors that the store has, or else new ones."""
        stored = self._store.load(KIND, refresh_step) if self._store is not None else None
        if stored is not None and not self.computes_again(source):
            return self._checked(self.read(stored))
        started = time.perf_counter()
        with current().phase(BASIS):
            factors = self.compute(refresh_step, source)
        self._seconds += time.perf_counter() - started
        # products depend, in their last bit, on how a factor lies in memory: a run that goes on has what it stored
        tensors = {name: tensor.contiguous() for name, tensor in factors.to_tensors().items()}
        if stored is None or any(not torch.equal(tensors[name], stored.tensors[name]) for name in tensors):
            self._unsaved.add(refresh_step)
        return self._checked(self.read(StoredTensors(tensors, factors.passes)))

    def at(self, refresh_step: int) -> F:
        """Returns the factors from a step on, which `refresh` has found.

        Raises:
            RequestError: it was not called for that step.
        """
        if refresh_step not in self._kept:
            raise RequestError(
                f"method.basis: its factors from step {refresh_step} on are not known; call optimizer.refresh() first."
            )
        return self._kept[refresh_step]

    def factor(self, role: Role, target: Target, rank: int, seed: int, refresh_step: int) -> Tensor:
        if target.input_role is not None:
            factors = self.at(refresh_step)
            side = factors.inputs if role == target.input_role else factors.outputs
            if target.name in side:
                return side[target.name]
        return self._random.factor(role, target, rank, seed, refresh_step)

    def proposals(self, refresh_step: int) -> Tensor | None:
        return self.at(refresh_step).proposals

    def predictions(self, refresh_step: int) -> Predictions | None:
        return self.at(refresh_step).predictions()

    def metrics(self) -> dict[str, Any]:
        return self._kept[max(self._kept)].metrics() if self._kept else {}

    @property
    def cost(self) -> tuple[int, float]:
        return self._calls, self._seconds

    def set_factor_store(self, store: FactorStore) -> None:
        self._store = store
        # a scale or rate that was measured before the first step has computed factors already: they are saved by the
        # step that uses them, as those are that a run computes which goes on with what was measured
        for refresh_step in self._kept:
            stored = store.load(KIND, refresh_step)
            if stored is None:
                self._unsaved.add(refresh_step)
            else:
                self._kept[refresh_step] = self._checked(self.read(stored))

    def state(self) -> dict[str, Tensor]:
        if not self._kept:
            return {}
        tensors = {
            f"{refresh_step}/{name}": tensor
            for refresh_step, factors in self._kept.items()
            for name, tensor in factors.to_tensors().items()
        }
        return tensors | {"calls": torch.tensor(self._calls)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        tensors: dict[int, dict[str, Tensor]] = {}
        for key, value in state.items():
            if key == "calls":
                self._calls = max(self._calls, int(value))  # going back to a better step takes no pass back
            else:
                refresh_step, _, name = key.partition("/")
                tensors.setdefault(int(refresh_step), {})[name] = value.to("cpu", torch.float64, copy=True)
        self._kept = {step: self._checked(self.read(StoredTensors(found, 0))) for step, found in tensors.items()}
        self._counted |= self._kept.keys()

    def _checked(self, factors: F) -> F:
        for target in self._targets:
            shape = input_size(target), self._ranks[target.name]
            factor = factors.inputs.get(target.name)
            if factor is None or tuple(factor.shape) != shape:
                raise RequestError(
                    f"method.basis: the saved factor of the inputs of {target.name} is not of the shape {shape}; "
                    "give the folder of this very run, or start it again."
                )
        return factors


def input_size(target: Target) -> int:
    """Returns I, the number of inputs of a linear layer."""
    return target.matrix_shape[0 if target.input_role == "u" else 1]


def output_size(target: Target) -> int:
    """Returns O, the number of outputs of a linear layer."""
    return target.matrix_shape[1 if target.input_role == "u" else 0]
