"""Forecasts of memory for each method, for inference and for training by gradients; nothing is trained.

Passes are run on torch's meta device, where tensors have shapes and no values, and the bytes of live tensors are
counted. Left out are the allocator's rounding and reserve, the memory of libraries, and temporaries of an update.
Attention is counted with its scores, which fused kernels do not store.
"""

import copy
import functools
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.initialization import no_init_weights

from tezo.directions.bases.basis import GaussianBasis
from tezo.directions.random import DrawKey
from tezo.directions.spaces import FixedFactors
from tezo.directions.targets import ALL, device_of, is_packed, select_targets
from tezo.forward.perturbed_parameter import PerturbedParameter
from tezo.methods import METHODS, Method
from tezo.methods.bases import find_basis
from tezo.models.kinds import Kind, ModelConfig
from tezo.models.loading import LoadedModel
from tezo.models.peft import add_adapter
from tezo.models.quantization import stored_bytes
from tezo.optim.estimators.estimate import ParameterEstimate
from tezo.optim.estimators.two_point import fitting_copies
from tezo.optim.first_order import SteppedWeight
from tezo.optim.optimizer import ZerothOrderOptimizer
from tezo.system.errors import RequestError
from tezo.tasks.objectives.evaluators import logits_at, no_cache

META = torch.device("meta")

# The state of a method


@dataclass(frozen=True)
class Forecast:
    """The forecast for one method on one model.

    Attributes:
        method: name of the method.
        trained: number of values in the tuned parameters.
        kept: bytes in addition to the model: factors, coefficients and moments, without the activations of a pass.
        collecting: bytes that the passes before the first step keep for a data-dependent basis, such as inputs.
        written: bytes of the stored weights that every step writes.
        rank: largest rank of the directions; None if they are dense.
        adapter: whether the result is an exact LoRA adapter.
        refusal: the reason why the method cannot tune this model; None if it can.
    """

    method: str
    trained: int = 0
    kept: int = 0
    collecting: int = 0
    written: int = 0
    rank: int | None = None
    adapter: bool = False
    refusal: str | None = None


def forecasts(model: nn.Module) -> list[Forecast]:
    """Returns the forecast of every method on the linear layers; ranks that depend on the weights are at their most."""
    return [forecast(model, method) for method in METHODS.values()]


def forecast(model: nn.Module, method: Method[ZerothOrderOptimizer], **options: Any) -> Forecast:
    """Returns the forecast of one method with these options, and its defaults for all others.

    It depends on the shapes and dtypes of the parameters alone, not on their values, if the ranks do not.
    """
    defaults = method.defaults()
    if "rank" in defaults:
        options.setdefault("rank", method.default_in_python("rank") or defaults["max_rank"])
    basis = find_basis(options.get("basis", defaults.get("basis", "gaussian")))
    if "basis" in defaults:
        options["basis"] = "gaussian"  # a data-dependent basis keeps as much between steps, but there is no data here
    try:
        optimizer = method.build(model, seed=0, **options)
    except RequestError as error:
        return Forecast(method.name, refusal=str(error))
    if optimizer.basis.data_dependent:  # of a method that has this one alone
        basis, optimizer.perturbation.basis = optimizer.basis, GaussianBasis()
    try:
        ranks = {name: rank for name in optimizer.parameters if (rank := optimizer.rank_and_way(name)[0]) is not None}
        matrices = [target for target in optimizer.targets if target.name in ranks]
        return Forecast(
            method.name,
            trained=sum(target.shape.numel() for target in optimizer.targets),
            kept=optimizer.factor_bytes + _kept(optimizer),
            collecting=basis.collecting_bytes(matrices, ranks),
            written=sum(
                perturbed.target.parameter.nbytes
                for perturbed in optimizer.parameters.values()
                if perturbed.writes_weight or optimizer.update.writes_weight
            ),
            rank=max(ranks.values(), default=None),
            adapter=optimizer.why_no_adapter() is None,
        )
    finally:
        optimizer.close()


def _kept(optimizer: ZerothOrderOptimizer) -> int:
    """Returns the bytes of all coefficients and moments; parameters of one shape and kind are measured once."""
    known: dict[Any, int] = {}
    total = 0
    for perturbed in optimizer.parameters.values():
        alike = (perturbed.target.shape, perturbed.target.parameter.dtype, perturbed.target.kind, type(perturbed))
        if alike not in known:
            known[alike] = _kept_for(optimizer, perturbed)
        total += known[alike]
    return total


@torch.no_grad()
def _kept_for(optimizer: ZerothOrderOptimizer, perturbed: PerturbedParameter) -> int:
    direction: Any = optimizer.perturbation.direction(perturbed.target, DrawKey(optimizer.seed, 0), {})
    state = optimizer.update.init(ParameterEstimate([direction], [0.0], 0), perturbed)
    accumulates = not perturbed.writes_weight and isinstance(direction, FixedFactors)
    return sum(value.nbytes for value in state.values()) + (direction.coefficient.nbytes if accumulates else 0)


def copies_of(said: Forecast, tokens: int) -> int:
    """Returns the number of perturbed models that share a pass, see `tezo.optim.estimators.two_point`."""
    return min(2, max(1, fitting_copies(tokens, dense=said.rank is None)))


def first_order_kept(model: nn.Module) -> tuple[int, int]:
    """Returns (bytes that `FirstOrderOptimizer` keeps between steps, bytes of the gradients in its update).

    It keeps two moments of each tensor that it steps, and that tensor where it is a float32 copy of a weight in half
    precision. In the update, there is a gradient of the copy beside the weight's.
    """
    kept = gradients = 0
    for target in select_targets(model, (ALL,)):
        stepped = SteppedWeight(target, master=True).stepped
        copy = 0 if stepped is target.parameter else stepped.nbytes
        kept += copy + 2 * stepped.nbytes
        gradients += target.parameter.nbytes + copy
    return kept, gradients


# The memory of a pass


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that counts, while open, the bytes of the tensors that operations make, until they are freed.

    Args:
        known: tensors that are not counted, such as parameters.

    Attributes:
        peak: largest number of bytes at a time.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = [tensor.untyped_storage() for tensor in known]
        self._live = {id(storage): 0 for storage in self._known}
        self._now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for storage in (value.untyped_storage() for value in tree_leaves(out) if isinstance(value, Tensor)):
            if id(storage) not in self._live:  # else a view, or an operation in place
                self._live[id(storage)] = storage.nbytes()
                self._now += storage.nbytes()
                self.peak = max(self.peak, self._now)
                weakref.finalize(storage, self._drop, id(storage)).atexit = False
        return out

    def _drop(self, key: int) -> None:
        self._now -= self._live.pop(key)


def meta_twin(model: Any) -> Any:
    """Returns a model of the class, configuration and dtype of `model`, of transformers, on the meta device.

    Its layers are plain ones where those of `model` are packed.
    """
    with META, no_init_weights():
        twin = type(model)(copy.deepcopy(model.config)).to(model.dtype)
    twin.tie_weights()
    return twin.eval()


@contextmanager
def valueless(model: Any) -> Iterator[Any]:
    """Puts one zero on the CPU, repeated, in place of each parameter of a model on the meta device, while open.

    Optimizers refuse parameters that have no values at all; these take no memory either.
    """
    owners = [(module, name) for module in model.modules() for name, _ in module.named_parameters(recurse=False)]
    before = [getattr(module, name) for module, name in owners]
    zeros = {
        each: nn.Parameter(torch.zeros((), dtype=each.dtype).expand(each.shape), requires_grad=each.requires_grad)
        for each in before
    }
    try:
        for (module, name), parameter in zip(owners, before, strict=True):
            setattr(module, name, zeros[parameter])
        yield model
    finally:
        for (module, name), parameter in zip(owners, before, strict=True):
            setattr(module, name, parameter)


def pass_peak(model: Any, rows: int, length: int, *, backward: bool = False) -> int:
    """Returns the most bytes of tensors that exist at a time in one pass over a batch, without the parameters.

    The loss is that of the last position of each row. A model without an output head over a vocabulary has the mean of
    its first output as its loss.

    Args:
        model: model on any device; gradients are those of its parameters that require one.
        rows: rows of the batch.
        length: tokens of a row.
        backward: whether the loss is differentiated, in training mode; the gradients are then part of the peak.
    """
    ids_SL = torch.zeros(rows, length, dtype=torch.int64, device=device_of(model))
    model.train(backward)
    live = LiveBytes(model.parameters())
    with live, torch.set_grad_enabled(backward):
        loss = _loss(model, ids_SL)
        if backward:
            loss.backward()  # type: ignore[no-untyped-call]
    model.zero_grad()
    return live.peak


def _loss(model: Any, ids_SL: Tensor) -> Tensor:
    inputs = {"input_ids": ids_SL} | _mask(model, ids_SL)
    if model.get_output_embeddings() is None:
        first: Tensor = model(**inputs, **no_cache(model))[0]
        return first.float().mean()
    last_S1 = ids_SL.new_full((len(ids_SL), 1), ids_SL.shape[1] - 1)
    return functional.cross_entropy(logits_at(model, inputs, last_S1).flatten(0, 1), ids_SL[:, 0])


def _mask(model: Any, ids_SL: Tensor) -> dict[str, Tensor]:
    """Returns a ready mask and positions: transformers makes them from values, which these tensors do not have."""
    config = getattr(model, "active_peft_config", None)
    if config is not None and config.is_prompt_learning:  # PEFT makes both
        return {}
    rows, length = ids_SL.shape
    base = model.get_base_model() if config is not None else model
    ready = {
        "attention_mask": torch.ones(rows, 1, length, length, dtype=torch.bool, device=ids_SL.device),
        "position_ids": ids_SL,
    }
    return {key: value for key, value in ready.items() if key in inspect.signature(base.forward).parameters}


# The ways to train a model

INFERENCE = "inference"
LORA = "LoRA with gradients"
LORA_CHECKPOINTED = "LoRA with gradients, checkpointed"
FULL = "full fine-tuning with Adam"
ZEROTH_ORDER = ("head-feedback", "tezo-cadam")
"""Methods that are set against gradients: the default, and the one of least memory."""
USABLE = 0.8
"""Share of the memory that a forecast may need and still fit, because of the parts that it leaves out."""
WITHOUT_RANDOM_STATE = {"use_reentrant": False, "preserve_rng_state": False}
"""Options of gradient checkpointing with which it runs on the meta device."""


@dataclass(frozen=True)
class WayMemory:
    """The memory of one way to use or to train a model.

    Attributes:
        way: `INFERENCE`, a method of `ZEROTH_ORDER`, `LORA`, `LORA_CHECKPOINTED` or `FULL`.
        weights: bytes of the parameters, those of an adapter included.
        kept: bytes kept beside them from step to step: factors, coefficients, moments, float32 copies.
        passing: bytes at the peak of a pass or of the update after it: activations and gradients, and the sketches of
            a data-dependent basis before the first step.
    """

    way: str
    weights: int
    kept: int
    passing: int

    @property
    def total(self) -> int:
        """Bytes in total."""
        return self.weights + self.kept + self.passing


def memory_of_model(loaded: LoadedModel, rows: int, length: int) -> list[WayMemory]:
    """Returns the forecast for a loaded model and a batch of so many rows and tokens a row.

    Raises:
        RequestError: the model cannot be rebuilt without values, or PEFT has no default layers for it.
    """
    model = loaded.model
    packed = any(is_packed(parameter) for parameter in model.parameters())
    try:
        return memory_of_ways(lambda: meta_twin(model), loaded.kind, rows, length, stored_bytes(model), packed=packed)
    except RequestError:
        raise
    except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError, LookupError) as error:
        reason = " ".join(str(error).split())[:160]
        raise RequestError(f"{type(model).__name__} does not run without values ({reason}).") from None


def memory_of_ways(
    build: Callable[[], Any], kind: Kind, rows: int, length: int, weights: int, *, packed: bool
) -> list[WayMemory]:
    """Returns the forecast for a model that is built on the meta device.

    Args:
        build: makes the model on the meta device, with plain layers, in its dtype.
        kind: kind of the model.
        rows: rows of a batch.
        length: tokens of a row.
        weights: bytes of its parameters as they are stored.
        packed: whether its linear layers are stored packed; a pass then unpacks one of them at a time, and full
            fine-tuning is left out.
    """
    twin = build()
    unpacked = max((target.parameter.nbytes for target in select_targets(twin)), default=0) if packed else 0
    peak_of = functools.cache(lambda rows: pass_peak(twin, rows, length) + unpacked)
    found = [WayMemory(INFERENCE, weights, 0, peak_of(rows))]
    for name in ZEROTH_ORDER:
        with valueless(twin) as allocated:
            said = forecast(allocated, METHODS[name])
        passing = peak_of(rows * copies_of(said, rows * length))
        showing = found[0].passing + said.collecting  # the passes that a data-dependent basis looks at
        found.append(WayMemory(name, weights, said.kept, max(passing, showing)))
    for way in (LORA, LORA_CHECKPOINTED) if packed else (LORA, LORA_CHECKPOINTED, FULL):
        model, added = build(), 0
        if way != FULL:
            model = _with_lora(model, kind, checkpointed=way == LORA_CHECKPOINTED)
            added = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
        kept, gradients = first_order_kept(model)
        peak = pass_peak(model, rows, length, backward=True) + unpacked
        found.append(WayMemory(way, weights + added, kept, max(peak, gradients)))
    return found


def _with_lora(model: Any, kind: Kind, *, checkpointed: bool) -> Any:
    with META, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT and transformers call checkpointing by two names
        adapted = add_adapter(LoadedModel(model, None, kind), ModelConfig(name="", peft="lora"), seed=0).model
        if checkpointed:
            model.gradient_checkpointing_enable(WITHOUT_RANDOM_STATE)
    return adapted


def advice(ways: Sequence[WayMemory], memory: int) -> str:
    """Returns advice on the way to train with `memory` bytes, in a sentence or two."""
    needs = {one.way: f"{one.total / 2**30:,.2f} GiB" for one in ways}
    fitting = {one.way for one in ways if one.total <= USABLE * memory}
    default, there = ZEROTH_ORDER[0], f"{memory / 2**30:,.2f} GiB"
    for way, how in ((LORA, ""), (LORA_CHECKPOINTED, " by gradient checkpointing")):
        if way in fitting:
            return (
                f"LoRA with gradients fits here{how} and will be faster: {needs[way]} of {there}, beside "
                f"{needs[default]} for {default}."
            )
    lora = f"LoRA with gradients needs {needs[LORA_CHECKPOINTED]} by gradient checkpointing"
    for way in ZEROTH_ORDER:
        if way in fitting:
            return f"{lora}, too much for {there}; {way} fits, with {needs[way]}."
    return f"{lora} and {default} {needs[default]}; neither fits into {there}."
