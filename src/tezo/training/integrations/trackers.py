"""Trackers of experiments, such as TensorBoard, told of a run through transformers' own callbacks."""

from pathlib import Path

from transformers.integrations import get_reporting_integration_callbacks

from tezo.errors import RequestError
from tezo.training.integrations.trainer_callbacks import TrainerCallbacks

_PACKAGES = {"azure_ml": "azureml-mlflow", "comet_ml": "comet-ml", "flyte": "flytekit"}
"""Name of a tracker -> the package that it needs, where that has another name."""


def trackers(names: str, output: Path) -> TrainerCallbacks:
    """A listener that reports to the trackers.

    Args:
        names: tracker names of transformers with commas between, such as "tensorboard,wandb".
        output: the run folder; files of trackers, such as TensorBoard's `runs/`, are written there.

    Raises:
        RequestError: there is no such tracker, or its package is not installed.
    """
    asked = [name.strip() for name in names.split(",") if name.strip()]
    if not asked:
        raise RequestError("report_to names no tracker; give some, such as tensorboard.")
    for path in output.iterdir() if output.is_dir() else ():
        if path.is_symlink():  # trackers write under names of their own, and follow links
            raise RequestError(f"report_to: {path} is a link, which a tracker could write through; remove it.")
    return TrainerCallbacks([_callback(name) for name in dict.fromkeys(asked)], str(output))


def _callback(name: str) -> object:
    try:
        (kind,) = get_reporting_integration_callbacks([name])
    except ValueError as error:
        known = str(error).partition("only ")[2].partition(" are")[0]
        raise RequestError(f"report_to: there is no tracker {name!r}; give one of {known}.") from None
    try:
        return kind()
    except (ImportError, RuntimeError):
        package = _PACKAGES.get(name, name)
        raise RequestError(f"report_to: {name} is not installed; pip install {package}, or leave it out.") from None
