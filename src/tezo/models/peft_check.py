"""Whether PEFT adds an adapter to its base model as it was trained: to the same layers, the same matrices, at scale 1.

When PEFT loads an adapter it renames layers and targets of some families, refuses layers of others by their names, and
only warns of layers that it leaves out. So it is asked: it loads the adapter into a model of the same configuration
whose weights take no memory.
"""

import copy
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tezo.errors import RequestError
from tezo.files import storing
from tezo.models.lora import Adapter, for_file, save_adapter
from tezo.progress.meter import ASKING_PEFT, current


def check_in_peft(adapter: Adapter, model: nn.Module, disk: Path) -> None:
    """Raises a `RequestError` if PEFT would not add exactly this adapter to the model; see `why_not_in_peft_yet`."""
    reason = why_not_in_peft_yet(adapter, model, disk)
    if reason is not None:
        raise RequestError(
            f"there is no exact adapter, because {reason}; export the merged model, or leave such layers out of "
            "method.targets."
        )


def why_not_in_peft(adapter: Adapter, model: nn.Module, folder: Path) -> str | None:
    """None if PEFT adds exactly this adapter to the model; else the reason, in words.

    None, too, where there is nothing to ask: PEFT is not installed, or the model is not one of transformers, whose
    layers PEFT takes by the names that it finds.

    Args:
        adapter: the adapter.
        model: the model that it was trained for.
        folder: the adapter as `save_adapter` wrote it.
    """
    if find_spec("peft") is None or not isinstance(model, PreTrainedModel):
        return None
    with current().phase(ASKING_PEFT):
        return _why_not(for_file(adapter), model, folder)


def _why_not(adapter: Adapter, model: PreTrainedModel, folder: Path) -> str | None:
    import peft

    by = f"PEFT {peft.__version__}"
    with _unwarned():
        try:
            loaded: Any = peft.PeftModel.from_pretrained(
                _without_memory(model), str(folder), low_cpu_mem_usage=True, torch_device="cpu"
            )
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, NotImplementedError) as error:
            return f"{by} refuses it ({' '.join(str(error).split())[:200]})"
    added = {name: layer for name, layer in loaded.get_base_model().named_modules() if hasattr(layer, "lora_A")}
    wrong = [name for name in sorted(adapter.pairs.keys() | added.keys()) if not _is_added(adapter, added, name)]
    if not wrong:
        return None
    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return f"{by} does not add to {wrong[0]}{more} what was trained"


def why_not_in_peft_yet(adapter: Adapter, model: nn.Module, disk: Path) -> str | None:
    """The same of an adapter that is not saved: it is written for the time being into a folder of `disk`.

    A temporary folder of the system may be on another disk, without room.
    """
    with storing(disk), TemporaryDirectory(dir=disk, prefix=".adapter-", suffix=".partial") as folder:
        save_adapter(adapter, Path(folder), model=model, base="")
        return why_not_in_peft(adapter, model, Path(folder))


@contextmanager
def _unwarned() -> Iterator[None]:
    """Without warnings: what PEFT leaves out is found by comparison."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _without_memory(model: PreTrainedModel) -> PreTrainedModel:
    """A model of the same class and configuration; each weight is one number, seen as often as the weight has any."""
    with torch.device("meta"):
        bare: PreTrainedModel = type(model)(copy.deepcopy(model.config))
    for module in bare.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            # on the CPU, since PEFT moves an adapter to the device of its layer
            value = torch.zeros((), dtype=weight.dtype).expand(weight.shape)
            setattr(module, name, nn.Parameter(value, requires_grad=False))
    return bare


def _is_added(adapter: Adapter, added: dict[str, Any], name: str) -> bool:
    if name not in adapter.pairs or name not in added:
        return False
    layer = added[name]
    (key,) = layer.lora_A  # the name that PEFT gives to the adapter
    loaded = layer.lora_A[key].weight, layer.lora_B[key].weight
    same = all(
        not own.is_meta and torch.equal(own, ours) for own, ours in zip(loaded, adapter.pairs[name], strict=True)
    )
    return same and layer.scaling[key] == 1
