"""The part of Trainer's checkpoints besides the model: the state of the method, verified when it is read.

It is a checkpoint of a run (`tezo.runs.checkpoints`) in the folder `tezo_state`: tensors in safetensors, values in
JSON, and their SHA-256 digests.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from weakref import WeakKeyDictionary

from torch import Tensor

from tezo.optim.optimizer import ZerothOrderOptimizer
from tezo.runs.checkpoints import Checkpoint, checkpoints, load_checkpoint, save_checkpoint
from tezo.system.digests import digest
from tezo.system.errors import RequestError
from tezo.system.files import UntrustedError, storing
from tezo.training.rows_of_steps import KEYS
from tezo.training.settings import Config, MethodConfig

FOLDER = "tezo_state"
_bases: WeakKeyDictionary[ZerothOrderOptimizer, str] = WeakKeyDictionary()
"""Optimizer -> digest of the weights that it does not write, made at its first checkpoint."""
_COUNTS = ("rule", "num_steps", "num_forward_passes", "num_idle_steps", "counts", "seed", "rho", "parameters")


def save_state(folder: Path, tuner: ZerothOrderOptimizer, config: Config) -> None:
    """Writes the state of an optimizer into a checkpoint folder.

    Args:
        folder: checkpoint-<step> of Trainer.
        tuner: the optimizer.
        config: of its method and feedback steps, resolved.
    """
    tensors, described = tuner.resumable_state(), tuner.state_dict()
    if tuner not in _bases:
        _bases[tuner] = _base_digest(tuner, tensors)
    state = {
        "method": {"name": config.method.name, "options": config.method.options},
        "train": {key: getattr(config.train, key) for key in ("steps", *KEYS)},
        "optimizer": {key: described[key] for key in _COUNTS},
        "base": _bases[tuner],
    }
    with storing(folder):
        save_checkpoint(folder / FOLDER, Checkpoint(tuner.num_steps, tensors, state), keep=1)


def read_state(folder: Path) -> Checkpoint:
    """The state that `save_state` wrote.

    Raises:
        RequestError: there is none, or it is damaged.
    """
    found = checkpoints(folder / FOLDER)
    if not found:
        raise RequestError(
            f"{folder} has no {FOLDER}, so nothing of the method can be restored; give a checkpoint that a TezoTrainer "
            "saved with save_only_model=False."
        )
    try:
        return load_checkpoint(found[0])
    except UntrustedError as error:
        raise RequestError(f"{folder} cannot be restored: {error}; give an older checkpoint.") from None


def config_of(state: Checkpoint, given: Config) -> Config:
    """The configuration of a state: its method and feedback steps, and all else as given."""
    saved = state.state["method"]
    method = MethodConfig(name=saved["name"], options=saved["options"])
    return replace(given, method=method, train=replace(given.train, **state.state["train"]))


def restore(tuner: ZerothOrderOptimizer, state: Checkpoint) -> None:
    """Puts an optimizer into the state of a checkpoint: the next step is the one that followed.

    Raises:
        RequestError: the model is another one than when the state was saved.
    """
    if _base_digest(tuner, state.tensors) != state.state["base"]:
        raise RequestError(
            "the model has other weights than the one that the checkpoint was trained on; load the same base model."
        )
    rates: list[dict[str, object]] = [{} for _ in tuner.param_groups]  # Trainer restores them
    replaced = {"param_groups": rates, "options": {}, "tensors": state.tensors}  # those of `config_of`
    tuner.load_state_dict({**state.state["optimizer"], **replaced})


def _base_digest(tuner: ZerothOrderOptimizer, tensors: Mapping[str, Tensor]) -> str:
    """Of the weights that the method does not write."""
    return digest({name: p for name, p in tuner.model.named_parameters() if f"weight/{name}" not in tensors})
