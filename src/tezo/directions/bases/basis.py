"""Bases, which give the fixed factors of low-rank directions: their interface, those without data, those with."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from tezo.directions.outputs import Rows
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
"""What names of factors of the output side end with."""

_KEPT_REFRESHES = 2
"""Refresh steps whose factors stay in memory: at a refresh, momentum is carried over from the last factors."""

Passes = Callable[[int], object]
"""Function of the refresh step; it runs the forward passes that a data-dependent basis is computed from."""


RowsOf = Callable[[int, int], Rows]
"""Function of the refresh step and of the most rows that are wanted; it returns training rows, those of the step first
if they may be among them."""


@dataclass(frozen=True)
class Foretold:
    """What J directions should change the scores of the rows of a step by, of C classes.

    Attributes:
        fitted_ECJ: of each of E rows, by regressions that had it.
        without_ECJ: the same if each row had been left out of them.
    """

    fitted_ECJ: Tensor
    without_ECJ: Tensor


@dataclass(frozen=True)
class CollectedFactors:
    """Tensors computed from data at one step, by parameter name; those of a basis are float64 on the CPU."""

    factors: Mapping[str, Tensor]
    calls: int
    """Number of model calls they took."""


class FactorStore(Protocol):
    """Storage for tensors computed from data, so that steps can be replayed without the data."""

    def load(self, kind: str, step: int) -> CollectedFactors | None:
        """Returns the tensors saved for `kind` at `step`; None if there are none."""

    def save(self, kind: str, step: int, collected: CollectedFactors) -> None:
        """Saves tensors for `kind` at `step`."""


class Basis(ABC):
    """Source of the fixed factors of low-rank directions; it knows nothing of the perturbation that asks it.

    Factors are float64 on the CPU. The mean square of their entries is 1, so that directions have unit variance with
    every basis.
    """

    data_dependent = False
    """Whether factors are computed from data; such factors are saved with a run."""

    version = 0
    """Number of times that factors may have been replaced by others of the same step."""

    def prepare(self, targets: Sequence[Target], ranks: Mapping[str, int]) -> None:
        """Takes, once, the matrices to be tuned and the rank of each by name."""
        del targets, ranks

    def set_calibration_passes(self, model: nn.Module, passes: Passes) -> None:
        """Sets the forward passes that factors are computed from; ignored unless `data_dependent`."""
        del model, passes

    def set_rows(self, model: nn.Module, rows: RowsOf) -> None:
        """Sets the rows whose outputs factors are computed from; ignored by bases that need none."""
        del model, rows

    def set_factor_store(self, store: FactorStore) -> None:
        """Sets the store for factors that are computed from data; ignored unless `data_dependent`."""
        del store

    @abstractmethod
    def factor(self, role: Role, target: Target, rank: int, seed: int, refresh_step: int) -> Tensor:
        """Returns the factor of `target` from a step on: (M, rank) for the role "u", (N, rank) for "v"."""

    def proposed(self, refresh_step: int) -> Tensor | None:
        """Returns coefficients of directions, the same for all targets, (J, rank); None: they are random."""
        del refresh_step
        return None

    def foretold(self, refresh_step: int) -> Foretold | None:
        """Returns what proposed directions should change the scores of their rows by; None: it is not known."""
        del refresh_step
        return None

    @property
    def told(self) -> dict[str, Any]:
        """What the newest factors were found by, a function of them: JSON, for the log of metrics."""
        return {}

    @property
    def cost(self) -> tuple[int, float]:
        """(calls of the model, seconds) spent on computing factors from data so far."""
        return 0, 0.0

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


class CollectedBasis(Basis):
    """Factors of the input side are computed from data at each refresh; others that are not are Gaussian.

    They are kept for the last refreshes, saved with a run, and read again by a replay.
    """

    data_dependent = True
    both_sides = False
    """Whether factors of the output side may be computed too, by the names of parameters and `OUTPUT_SIDE`."""

    def __init__(self) -> None:
        self._calls = 0
        self._counted: set[int] = set()
        self._seconds = 0.0
        self._targets: list[Target] = []
        self._ranks: Mapping[str, int] = {}
        self._store: FactorStore | None = None
        self._unsaved: set[int] = set()
        self._collected: dict[int, CollectedFactors] = {}
        self._random = GaussianBasis()

    def prepare(self, targets: Sequence[Target], ranks: Mapping[str, int]) -> None:
        self._targets = [target for target in targets if target.input_role is not None]
        self._ranks = ranks

    def set_factor_store(self, store: FactorStore) -> None:
        self._store = store
        self.version += 1
        # a scale or rate that was measured before the first step has computed factors already: they are saved by the
        # step that uses them, as those are that a run computes which goes on with what was measured
        stored = {refresh_step: store.load(KIND, refresh_step) for refresh_step in self._collected}
        self._unsaved = {refresh_step for refresh_step, found in stored.items() if found is None}
        self._collected |= {refresh_step: found for refresh_step, found in stored.items() if found is not None}

    def factor(self, role: Role, target: Target, rank: int, seed: int, refresh_step: int) -> Tensor:
        if target.input_role is None or (role != target.input_role and not self.both_sides):
            return self._random.factor(role, target, rank, seed, refresh_step)
        factors = self.collected(refresh_step).factors
        if role == target.input_role:
            return factors[target.name]
        own = factors.get(target.name + OUTPUT_SIDE)
        return own if own is not None else self._random.factor(role, target, rank, seed, refresh_step)

    def collected(self, refresh_step: int) -> CollectedFactors:
        """Returns the factors from a step on: those in memory, those of the store, or else new ones."""
        if refresh_step not in self._collected:
            collected = self._store.load(KIND, refresh_step) if self._store is not None else None
            if collected is None:
                started = time.perf_counter()
                with current().phase(BASIS):
                    collected = self.collect(refresh_step)
                self._seconds += time.perf_counter() - started
                self._unsaved.add(refresh_step)
            self._check(collected.factors)
            self._collected[refresh_step] = collected
            if refresh_step not in self._counted:  # going back to a better step reads them again
                self._calls += collected.calls
                self._counted.add(refresh_step)
            for old in sorted(self._collected)[:-_KEPT_REFRESHES]:
                del self._collected[old]
        if self._store is not None and refresh_step in self._unsaved:
            self._store.save(KIND, refresh_step, self._collected[refresh_step])
            self._unsaved.remove(refresh_step)
        return self._collected[refresh_step]

    @abstractmethod
    def collect(self, refresh_step: int) -> CollectedFactors:
        """Computes the factors of all targets with inputs from a step on."""

    def _check(self, factors: Mapping[str, Tensor]) -> None:
        for target in self._targets:
            shape = input_size(target), self._ranks[target.name]
            factor = factors.get(target.name)
            if factor is None or tuple(factor.shape) != shape:
                raise RequestError(
                    f"method.basis: the saved factor of the inputs of {target.name} is not of the shape {shape}; "
                    "give the folder of this very run, or start it again."
                )

    @property
    def cost(self) -> tuple[int, float]:
        return self._calls, self._seconds

    def state(self) -> dict[str, Tensor]:
        if not self._collected:
            return {}
        factors = {
            f"{refresh_step}/{name}": factor
            for refresh_step, collected in self._collected.items()
            for name, factor in collected.factors.items()
        }
        return factors | {"calls": torch.tensor(self._calls)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.version += 1
        loaded: dict[int, dict[str, Tensor]] = {}
        for key, factor in state.items():
            if key == "calls":
                self._calls = max(self._calls, int(factor))  # going back to a better step takes no pass back
                continue
            refresh_step, _, name = key.partition("/")
            loaded.setdefault(int(refresh_step), {})[name] = factor.to("cpu", torch.float64, copy=True)
        for factors in loaded.values():
            self._check(factors)
        self._collected = {refresh_step: CollectedFactors(factors, 0) for refresh_step, factors in loaded.items()}
        self._counted |= self._collected.keys()


def input_size(target: Target) -> int:
    """Returns I, the number of inputs of a linear layer."""
    return target.matrix_shape[0 if target.input_role == "u" else 1]
