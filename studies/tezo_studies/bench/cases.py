"""Cases of the benchmark: plain passes, the library's methods and the published algorithms, with one interface."""

import os
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from tezo.directions.targets import select_targets
from tezo.methods import METHODS, method
from tezo.optim.closures import Closure
from tezo.system.errors import RequestError
from tezo_studies.bench.labelled_rows import labelled_rows
from tezo_studies.bench.published import PUBLISHED, Published
from tezo_studies.bench.settings import CAPTURED, GRADIENTS, GRAPHS, KERNEL, ONE_PASS, PREFIX, WHOLE, name_of
from tezo_studies.bench.trainable_model import trainable
from tezo_studies.bench.workload import Work


class Case(ABC):
    """One row of the table.

    Attributes:
        label: F, F2, N, N2, J2, a key of `GRADIENTS`, or a method's name, after one of the prefixes or nothing.
        interval: steps between refreshes of lazy factors; None if there are none.
        trained: number of trained parameter entries.
        batches: how many times the rows of the batch a run has.
    """

    batches = 1

    def __init__(self, label: str, *, interval: int | None = None, trained: int = 0) -> None:
        self.label, self.interval, self.trained = label, interval, trained

    @abstractmethod
    def run(self) -> None:
        """Runs the plain passes, or one step without refresh."""

    def run_refresh(self) -> None:
        """Runs a step that draws new lazy factors and folds what was trained with the old ones into the weights."""
        raise NotImplementedError(f"{self.label} has no interval")

    def state_bytes(self) -> int:
        """Bytes kept between steps in addition to the model: factors, coefficients, moments."""
        return 0

    def facts(self) -> dict[str, Any]:
        """Further measurements of the runs so far; here there are none."""
        return {}

    def close(self) -> None:  # noqa: B027 - plain passes have nothing to undo
        """Removes what it attached to the model."""


class PlainPasses(Case):
    """Plain forward passes of the stock model without perturbation."""

    def __init__(self, label: str, loss: Callable[[], Tensor], count: int = 2) -> None:
        super().__init__(label)
        self._loss, self._count = loss, count

    @torch.no_grad()
    def run(self) -> None:
        for _ in range(self._count):
            float(self._loss())


class LibraryCase(Case):
    """A method of the library."""

    def __init__(self, label: str, work: Work) -> None:
        self._model = work.twin()
        name = name_of(label)
        if name not in METHODS:
            raise RequestError(f"methods: {name} needs gradients; bench measures zeroth-order methods only.")
        optimizer = METHODS[name].build(self._model, **work.settings.options(label))
        self._optimizer = optimizer
        interval = optimizer.perturbation.interval
        trained = sum(target.shape.numel() for target in self._optimizer.targets)
        super().__init__(label, interval=interval, trained=trained)
        self._closure = _closure_of(label, work)(self._model)

    def run(self) -> None:
        past_refresh(self._optimizer, self.interval)
        self._optimizer.step(self._closure)

    def run_refresh(self) -> None:
        to_refresh(self._optimizer, self.interval)
        self._optimizer.step(self._closure)

    def state_bytes(self) -> int:
        optimizer, model = self._optimizer, self._model
        roots = (optimizer.perturbation, optimizer.parameters, optimizer.moments)
        return stored_bytes(roots, (*model.parameters(), *model.buffers()))

    def close(self) -> None:
        self._optimizer.close()


class PublishedCase(Case):
    """A published algorithm as its authors wrote it, with full logits; `KERNEL` is MeZO with noise from a kernel."""

    def __init__(self, label: str, work: Work) -> None:
        name, settings = name_of(label), work.settings
        algorithm = _kernel_mezo(work) if label == KERNEL else PUBLISHED[name]
        self._model = work.twin()
        targets = select_targets(self._model, (settings.targets,))
        default = method(name).default_in_python
        shared = {key: default(key) for key in ("lr", "rho")}
        shared |= {"interval": default("lazy_update_interval")} if algorithm.lazy else {}
        named = [(target.name, target.parameter) for target in targets]
        self._algorithm = algorithm(named, rank=settings.rank, **shared)
        interval = self._algorithm.interval if self._algorithm.lazy else None
        super().__init__(label, interval=interval, trained=sum(t.parameter.numel() for t in targets))
        self._loss = work.stock_loss(self._model)

    def run(self) -> None:
        past_refresh(self._algorithm, self.interval)
        self._algorithm.step(self._loss)

    def run_refresh(self) -> None:
        to_refresh(self._algorithm, self.interval)
        self._algorithm.step(self._loss)

    def state_bytes(self) -> int:
        return stored_bytes(self._algorithm.state)


class GradientCase(Case):
    """LoRA of PEFT with its default layers and rank, and AdamW: a forward and a backward pass, and an update."""

    def __init__(self, label: str, work: Work) -> None:
        self._base = [parameter for parameter in work.model.parameters() if parameter.requires_grad]
        try:
            model = trainable(work.twin(), "lora", checkpointed=GRADIENTS[label])
            self._optimizer, self._closure = method("adam").build(model), work.closure(model)
        except BaseException:
            self.close()
            raise
        super().__init__(label, trained=sum(target.parameter.numel() for target in self._optimizer.targets))

    def run(self) -> None:
        self._optimizer.step(self._closure)

    def state_bytes(self) -> int:
        return stored_bytes(self._optimizer.resumable_state())

    def close(self) -> None:
        for parameter in self._base:  # shared with the other cases, and frozen beneath an adapter
            parameter.requires_grad_(True)


ROUND = "gauss-newton"
BATCHES, LOOKS = 8, 8
"""Rows of a round as a multiple of the batch, and rows that its look may see as a multiple of these: with a batch of 16
128 and 1,024, the method's defaults."""


class RoundCase(Case):
    """A round of `gauss-newton` on labelled rows, with the look before it."""

    batches = BATCHES

    def __init__(self, work: Work) -> None:
        model, self._rows = work.twin(), work.settings.batch * BATCHES
        rows = labelled_rows(work, model, self._rows * LOOKS)
        self._optimizer = METHODS[ROUND].build(model, targets=(work.settings.targets,))
        self._optimizer.set_rows(lambda _, most: rows(most))
        self._closure, self._rounds = rows(self._rows), list[dict[str, float]]()
        super().__init__(ROUND, trained=sum(target.shape.numel() for target in self._optimizer.targets))

    def run(self) -> None:
        optimizer, begun = self._optimizer, time.perf_counter()
        passes, (looks, looked) = optimizer.num_forward_passes, optimizer.cost_of_basis
        optimizer.step(self._closure)
        all_looks, all_looked = optimizer.cost_of_basis
        self._rounds.append({
            "passes": optimizer.num_forward_passes - passes, "look_passes": all_looks - looks,
            "look_seconds": all_looked - looked, "round_seconds": time.perf_counter() - begun,
        })  # fmt: skip

    def state_bytes(self) -> int:
        return stored_bytes(self._optimizer.resumable_state())

    def facts(self) -> dict[str, Any]:
        """The rows, and medians over the rounds: seconds, passes over the rows, and the look's passes and seconds."""
        return {"rows": self._rows} | {
            key: round(statistics.median(own[key] for own in self._rounds), 4) for key in self._rounds[0]
        }

    def close(self) -> None:
        self._optimizer.close()


def _kernel_mezo(work: Work) -> type[Published]:
    if find_spec("triton") is None or (work.device.type != "cuda" and "TRITON_INTERPRET" not in os.environ):
        raise RequestError(f"{KERNEL} needs a GPU and the package triton.")
    from tezo_studies.bench.kernel_mezo import KernelMeZO

    return KernelMeZO


def _closure_of(label: str, work: Work) -> Callable[[Any], Closure]:
    if label.startswith(GRAPHS):
        return work.graphed_loss
    if label.startswith(CAPTURED):
        return work.captured_closure
    if label.startswith(ONE_PASS):
        return work.one_pass_closure
    return work.stock_loss if label.startswith(WHOLE) else work.closure


def make_case(label: str, work: Work) -> Case:
    """The case with this label, on the model and batch of `work`."""
    plain = {"F": (work.stock_loss, 1), "N": (work.needed_loss, 1)}
    plain |= {"F2": (work.stock_loss, 2), "N2": (work.needed_loss, 2), "J2": (work.joint_loss, 1)}
    plain |= {GRAPHS + "F2": (work.graphed_loss, 2)}
    if label in plain:
        make, count = plain[label]
        return PlainPasses(label, make(work.twin()), count)
    if label in GRADIENTS:
        return GradientCase(label, work)
    if label == ROUND:
        return RoundCase(work)
    return PublishedCase(label, work) if label.startswith((PREFIX, KERNEL)) else LibraryCase(label, work)


def to_refresh(counted: Any, interval: int | None) -> None:
    """Advances `counted.num_steps` to the next refresh step."""
    assert interval is not None
    counted.num_steps += -counted.num_steps % interval


def past_refresh(counted: Any, interval: int | None) -> None:
    """Changes `counted.num_steps` if the next step would be a refresh; the very first step is left as it is."""
    if interval is not None and interval > 1 and counted.num_steps and counted.num_steps % interval == 0:
        counted.num_steps -= interval - 1


def stored_bytes(root: Any, known: Iterable[Tensor] = ()) -> int:
    """Bytes of the distinct tensor storages reachable from `root`, without the storages of `known` tensors."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in _tensors(root, set())}
    for tensor in known:
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(storage.nbytes() for storage in storages.values())


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    # Follows containers and the library's own objects, but not modules, so the model is left out.
    if id(value) in seen or isinstance(value, torch.nn.Module):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
        return
    inner: Iterable[Any] = ()
    if isinstance(value, dict):
        inner = list(value.values())
    elif isinstance(value, list | tuple):
        inner = value
    elif type(value).__module__.startswith("tezo."):
        inner = list(getattr(value, "__dict__", {}).values())
    for item in inner:
        yield from _tensors(item, seen)
