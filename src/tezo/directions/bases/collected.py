"""Bases whose factors are computed from data: kept for the last refreshes, saved with a run, read again by a replay."""

import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tezo.directions.bases.basis import Basis, CollectedFactors, FactorStore, GaussianBasis, Role
from tezo.directions.targets import Target
from tezo.system.errors import RequestError
from tezo.system.progress import BASIS, current

KIND = "basis"
"""The kind under which a factor store keeps the factors."""

OUTPUT_SIDE = "/output"
"""What names of factors of the output side end with."""

_KEPT_REFRESHES = 2
"""Refresh steps whose factors stay in memory: at a refresh, momentum is carried over from the last factors."""


class CollectedBasis(Basis):
    """Factors of the input side are computed from data at each refresh; others that are not are Gaussian."""

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
        self._collected: dict[int, CollectedFactors] = {}
        self._random = GaussianBasis()

    def prepare(self, targets: Sequence[Target], ranks: Mapping[str, int]) -> None:
        self._targets = [target for target in targets if target.input_role is not None]
        self._ranks = ranks

    def set_factor_store(self, store: FactorStore) -> None:
        self._store = store
        self.version += 1
        # a learning rate that is chosen before the first step has computed factors already
        for refresh_step, collected in self._collected.items():
            stored = store.load(KIND, refresh_step)
            if stored is None:
                store.save(KIND, refresh_step, collected)
            self._collected[refresh_step] = stored or collected

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
                if self._store is not None:
                    self._store.save(KIND, refresh_step, collected)
            self._check(collected.factors)
            self._collected[refresh_step] = collected
            if refresh_step not in self._counted:  # going back to a better step reads them again
                self._calls += collected.calls
                self._counted.add(refresh_step)
            for old in sorted(self._collected)[:-_KEPT_REFRESHES]:
                del self._collected[old]
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
