"""The configuration of a run that was read from its folder."""

from pathlib import Path

from tezo.errors import RequestError
from tezo.runs.reader import Run
from tezo.training.configuration.config import parse_config
from tezo.training.configuration.recipe import Config


def shown_path(name: str) -> str:
    """A name; of a whole path the last part, for what is shown to others."""
    path = Path(name)
    return path.name if path.is_absolute() else name


def run_config(run: Run) -> Config:
    """The configuration in a run's config.yaml.

    Raises:
        RequestError: it has an unknown key or a value that does not fit; folder, file and key are named.
    """
    try:
        return parse_config(run.config)
    except (ValueError, RecursionError) as error:
        reason = str(error).partition(";")[0].rstrip(".")[:200]
        raise RequestError(
            f"{run.folder}: config.yaml is no configuration ({reason}); "
            "put a sound copy in its place, or leave this run out."
        ) from None
