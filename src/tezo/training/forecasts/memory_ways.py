"""Forecast of the memory of inference, of zeroth-order steps, and of training by gradients; nothing is trained.

The model is rebuilt on the meta device, and its passes are counted there (`pass_peak`), with the loss at one position
of each row. Left out: the allocator's rounding and reserve, the libraries' own memory, temporaries of an update.
Attention is counted with its scores, which fused kernels do not store.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from tezo.directions.targets import is_packed, select_targets
from tezo.errors import RequestError
from tezo.models.kinds import Kind
from tezo.models.loading import LoadedModel
from tezo.models.model_config import ModelConfig
from tezo.models.peft_adapters import add_adapter
from tezo.models.quantization import stored_bytes
from tezo.optim.memory_forecast import copies_of, first_order_kept, forecast
from tezo.optim.methods import METHODS
from tezo.training.forecasts.dry_pass import META, meta_twin, pass_peak, valueless

INFERENCE = "inference"
LORA = "LoRA with gradients"
LORA_CHECKPOINTED = "LoRA with gradients, checkpointed"
FULL = "full fine-tuning with Adam"
ZEROTH_ORDER = ("lozo-adam", "tezo-cadam")
"""Methods that are set against gradients: the default, and the one of least memory."""
LENGTH = 128
"""Tokens of a row for which memory is forecast, where no maximum length is set."""
USABLE = 0.8
"""Share of the memory that a forecast may need and still fit, because of what it leaves out."""

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
    """The forecast for a loaded model.

    Args:
        loaded: the model; it is only looked at.
        rows: rows of a batch.
        length: tokens of a row.

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
    """The forecast for a model that is built on the meta device.

    Args:
        build: makes the model on the meta device, with plain layers, in its dtype.
        kind: its kind.
        rows: rows of a batch.
        length: tokens of a row.
        weights: bytes of its parameters as they are stored.
        packed: whether its linear layers are stored packed; a pass then unpacks one of them at a time, and full
            fine-tuning is left out.
    """
    twin = build()
    unpacked = max((target.parameter.nbytes for target in select_targets(twin)), default=0) if packed else 0
    found = [WayMemory(INFERENCE, weights, 0, pass_peak(twin, rows, length) + unpacked)]
    for name in ZEROTH_ORDER:
        with valueless(twin) as allocated:
            said = forecast(allocated, METHODS[name])
        passing = pass_peak(twin, rows * copies_of(said, rows * length), length) + unpacked
        showing = found[0].passing + said.collecting  # the passes that a data-dependent basis looks at
        found.append(WayMemory(name, weights, said.kept, max(passing, showing)))
    for way in (LORA, LORA_CHECKPOINTED):
        adapted = _with_lora(build(), kind, checkpointed=way == LORA_CHECKPOINTED)
        own = sum(parameter.nbytes for parameter in adapted.parameters() if parameter.requires_grad)
        found.append(_by_gradient(way, adapted, weights + own, unpacked, rows, length))
    if not packed:
        found.append(_by_gradient(FULL, build(), weights, 0, rows, length))
    return found


def _by_gradient(way: str, model: nn.Module, weights: int, unpacked: int, rows: int, length: int) -> WayMemory:
    kept, gradients = first_order_kept(model)
    peak = pass_peak(model, rows, length, backward=True)
    return WayMemory(way, weights, kept, max(peak + unpacked, gradients))


def _with_lora(model: Any, kind: Kind, *, checkpointed: bool) -> Any:
    with META, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT and transformers call checkpointing by two names
        adapted = add_adapter(LoadedModel(model, None, kind), ModelConfig(name="", peft="lora"), seed=0).model
        if checkpointed:
            model.gradient_checkpointing_enable(WITHOUT_RANDOM_STATE)
    return adapted


def advice(found: list[WayMemory], memory: int) -> str:
    """What to train with, in a sentence or two, where `memory` bytes are there."""
    total = {one.way: one.total for one in found}
    fitting = [way for way, needed in total.items() if needed <= USABLE * memory]
    default = ZEROTH_ORDER[0]
    for way, how in ((LORA, ""), (LORA_CHECKPOINTED, " by gradient checkpointing")):
        if way in fitting:
            return (
                f"LoRA with gradients fits here{how} and will be faster: {gibibytes(total[way])} of "
                f"{gibibytes(memory)}, beside {gibibytes(total[default])} for {default}."
            )
    lora = f"LoRA with gradients needs {gibibytes(total[LORA_CHECKPOINTED])} by gradient checkpointing"
    for way in ZEROTH_ORDER:
        if way in fitting:
            return f"{lora}, too much for {gibibytes(memory)}; {way} fits, with {gibibytes(total[way])}."
    return f"{lora} and {default} {gibibytes(total[default])}; neither fits into {gibibytes(memory)}."


def gibibytes(count: int) -> str:
    """A number of bytes in GiB."""
    return f"{count / 2**30:,.2f} GiB"
