"""What an analysis is: numbers from options and data, a figure from the numbers, and a caption that says what it is.

Numbers are plain JSON, so that a figure can be drawn again, or otherwise, from the file beside it.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_type_hints

from tezo.report.charts import COLOURS as COLOURS
from tezo.report.charts import figure_style
from tezo.runs.environment import hardware, versions
from tezo.system.errors import RequestError, nearest
from tezo.system.files import write_file
from tezo.system.values import coerce
from tezo.training.settings import Config

Numbers = dict[str, Any]
"""What was computed: JSON."""
Table = list[list[str]]
"""Rows of cells, the headings first."""


@dataclass(frozen=True)
class Given:
    """What an analysis works on.

    Attributes:
        config: model and rows; None where none were asked for.
        paths: run folders or files.
    """

    config: Config | None = None
    paths: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Analysis:
    """An analysis by name.

    Attributes:
        name: on the command line.
        paper: the figure or section of the paper that it redraws.
        needs: what `Given` must have.
        options: a frozen dataclass whose fields are its settings.
        measure: (options, given) -> numbers; raises `RequestError` for what does not fit.
        draw: (numbers, matplotlib figure) draws.
        caption: numbers -> what was computed on what, in one or two sentences.
        tables: numbers -> tables that the command prints below the caption; None: it prints none.
    """

    name: str
    paper: str
    needs: Literal["nothing", "model", "runs", "benchmarks"]
    options: type[Any]
    measure: Callable[[Any, Given], Numbers]
    draw: Callable[[Numbers, Any], None]
    caption: Callable[[Numbers], str]
    tables: Callable[[Numbers], list[Table]] | None = None

    @property
    def summary(self) -> str:
        """First line of what `measure` says of itself."""
        return (self.measure.__doc__ or "").partition("\n")[0]

    def read_options(self, settings: Sequence[tuple[str, Any]]) -> Any:
        """The options, with (key, value) settings over the defaults."""
        hints = get_type_hints(self.options)
        for key, _ in settings:
            if key not in hints:
                raise RequestError(f"{key}: {self.name} has no such option. {nearest(key, sorted(hints))}")
        return self.options(**{key: coerce(key, value, hints[key]) for key, value in settings})

    def run(self, options: Any, given: Given) -> Numbers:
        """The numbers, with what they were computed by."""
        self._check(given)
        numbers = self.measure(options, given)
        made = {"analysis": self.name, "options": dataclasses.asdict(options), "caption": self.caption(numbers)}
        return made | numbers | {"hardware": hardware(), "versions": versions()}

    def _check(self, given: Given) -> None:
        if self.needs == "model" and given.config is None:
            raise RequestError(
                f"model.name is not set; {self.name} looks at a model: give --model and --task or --data."
            )
        if self.needs in ("runs", "benchmarks") and not given.paths:
            wanted = "run folders" if self.needs == "runs" else "JSON files of tezo bench"
            raise RequestError(f"{self.name} draws {wanted}; give at least one.")


def save(analysis: Analysis, numbers: Mapping[str, Any], folder: Path) -> list[Path]:
    """Writes NAME.json, NAME.png and NAME.svg into `folder`, and returns them.

    Raises:
        RequestError: matplotlib is not installed, or the folder cannot be written.
    """
    figure = drawn(analysis, numbers)
    paths = [folder / f"{analysis.name}.{kind}" for kind in ("json", "png", "svg")]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_file(paths[0], (json.dumps(numbers, indent=1) + "\n").encode())
        with figure_style("tezo analyze"):
            figure.savefig(paths[1], dpi=150, metadata={"Software": None})
            figure.savefig(paths[2], metadata={"Date": None})
    except OSError as error:
        raise RequestError(f"output: {folder} cannot be written ({error.strerror}); give another.") from None
    return paths


def drawn(analysis: Analysis, numbers: Mapping[str, Any]) -> Any:
    """The matplotlib figure of an analysis's numbers."""
    with figure_style("tezo analyze") as figure_type:
        figure = figure_type(figsize=(7.0, 4.2))
        analysis.draw(dict(numbers), figure)
        figure.canvas.draw()  # lays it out while the style holds
    return figure
