"""What a labelled run leaves beside the weights of its merged model: its labels, its prompt, its pooling."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tezo.errors import RequestError
from tezo.files import UntrustedError, read_object, write_file

LABELS_FILE = "tezo_labels.json"

MEAN = "mean"
"""The one pooling: an embedding is the mean of the last hidden states over the tokens of a text."""


@dataclass(frozen=True)
class CarriedLabels:
    """How a model was tuned to be asked.

    Attributes:
        label_words: label -> word, description or class, as data.label_words has them.
        template: as data.template has it; None: the default of the kind of model.
        pooling: of an encoder, how token states become an embedding; None for other kinds.
    """

    label_words: Mapping[str, str]
    template: str | None = None
    pooling: str | None = None

    def write(self, folder: Path) -> None:
        """Writes them into the folder of a model."""
        write_file(folder / LABELS_FILE, (json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n").encode())


def read_labels(folder: Path) -> CarriedLabels | None:
    """The labels in the folder of a model; None if it has none.

    Raises:
        RequestError: the file is damaged, or names a pooling that is not known.
    """
    path = folder / LABELS_FILE
    if not path.exists():
        return None
    try:
        found = read_object(path.resolve())
    except UntrustedError as error:
        raise _damaged(path, str(error)) from None
    words, template, pooling = found.get("label_words"), found.get("template"), found.get("pooling")
    if not isinstance(words, dict) or not all(isinstance(word, str) for word in words.values()):
        raise _damaged(path, "label_words is no object of strings")
    if not isinstance(template, str | None):
        raise _damaged(path, "template is no string")
    if pooling not in (None, MEAN):
        raise _damaged(path, f"pooling is {pooling!r}, and {MEAN} is known")
    return CarriedLabels(words, template, pooling)


def _damaged(path: Path, fault: str) -> RequestError:
    return RequestError(f"model.name: {path} is not the file of a merged run ({fault}); export the run again.")
