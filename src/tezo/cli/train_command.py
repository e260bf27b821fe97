"""`tezo train`."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tezo.cli.common import JsonOption, RewardOption, SetOption, print_json, readable
from tezo.errors import RequestError
from tezo.files import reading
from tezo.models.quiet import quiet_libraries

if TYPE_CHECKING:
    from tezo.training.recipe import Config


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("train")(train)


def train(
    recipe: Annotated[Path | None, typer.Argument(metavar="[CONFIG.yaml]", help="Recipe file.")] = None,
    model: Annotated[str | None, typer.Option(help="Model folder, hub name, or embedded:all-minilm-l6-v2.")] = None,
    data: Annotated[
        str | None, typer.Option(help="Training rows: JSONL, CSV, TSV or Parquet file, or hub data set.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="Task instead of --data; see `tezo tasks`.")] = None,
    data_dir: Annotated[str | None, typer.Option(help="Folder with the task's rows; default: the hub.")] = None,
    test: Annotated[str | None, typer.Option(help="Rows for the metrics before and after training.")] = None,
    method: Annotated[str | None, typer.Option(help="Method; see `tezo methods`.")] = None,
    lr: Annotated[
        str | None, typer.Option(metavar="FLOAT|auto", help="Learning rate; default auto: by short trials.")
    ] = None,
    reward: RewardOption = None,
    steps: Annotated[int | None, typer.Option(help="Number of steps.")] = None,
    quantization: Annotated[str | None, typer.Option(help="Quantization of linear layers: nf4, int8, int8wo.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of directions, data order and sampling.")] = None,
    settings: list[str] = SetOption,
    output: Annotated[Path | None, typer.Option(help="Run folder to create.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --output, if there is one.")] = False,
    json: bool = JsonOption,
) -> None:
    """Fine-tune a model on your rows. Without a recipe, --model and --data (or --task) are enough."""
    if output is None:
        raise RequestError("output is not set; give --output FOLDER for the run.")
    named = [
        ("model.name", model),
        ("data.train", data),
        ("data.task", task),
        ("data.dir", data_dir),
        ("data.test", test),
        ("method.name", method),
        ("method.lr", lr),
        ("model.quantization", quantization),
        ("train.reward", reward),
        ("train.steps", steps),
        ("train.seed", seed),
    ]
    config = _configured(recipe, output / "config.yaml" if resume else None, named, settings)
    quiet_libraries()
    from tezo.cli.progress import Screen
    from tezo.training.loop import train as run

    is_first = int(os.environ.get("RANK", "0")) == 0  # of the processes that torchrun starts, one prints
    summary = run(config, output, [] if json or not is_first else [Screen()], resume=resume)
    if not is_first:
        return
    if json:
        print_json(summary)
        return
    with reading(f"{output}: summary.json is not that of a run", "restore it, or delete it to go on with the run"):
        _print_end(summary, output)


def _configured(
    recipe: Path | None, begun: Path | None, named: Sequence[tuple[str, Any]], settings: Sequence[str]
) -> "Config":
    """Of the recipe, or without one of the run that goes on, with settings over it."""
    from tezo.training.config import parse_setting, read_config, read_run_config

    given = [(key, value) for key, value in named if value is not None] + [*map(parse_setting, settings)]
    if recipe is None and begun is not None and begun.is_file():
        return read_run_config(begun, given)
    return read_config(recipe, given)


def _print_end(summary: dict[str, Any], output: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    of = "dev rows, which also chose the step" if summary.get("test_rows_chose") else "test rows"
    table = Table(title=f"{summary['rows']['test']} {of}", title_justify="left")
    for column in ("", "before", "after"):
        table.add_column(column, justify="left" if not column else "right")
    for metric, value in summary["before"].items():
        table.add_row(metric, readable(metric, value), readable(metric, summary["after"][metric]))
    console = Console()
    console.print(table)
    if "verdict" in summary:
        console.print(summary["verdict"], highlight=False, soft_wrap=True)
    result = output / summary["result"]["folder"]
    console.print(
        f"{summary['steps']} steps, {summary['num_forward_passes']} forward passes, "
        f"{summary['seconds_stepping']:.0f} s; step {summary['kept_step']} kept.",
        highlight=False,
    )
    if summary["result"]["kind"] == "adapter":
        print(f"LoRA adapter of rank {summary['result']['rank']}: {result}")
        alone = summary["result"].get("why_not_in_peft")
        print(
            f"  for tezo alone: {alone}"
            if alone
            else f"  PEFT:  PeftModel.from_pretrained(base_model, {str(result)!r})"
        )
    elif summary["result"]["kind"] == "peft":
        print(f"{summary['result']['adapter']} adapter: {result}")
        print(f"  PEFT:  PeftModel.from_pretrained(base_model, {str(result)!r})")
    else:
        print(f"model: {result}  (no adapter: {summary['result']['why_no_adapter']})")
    print(f"  new rows:  tezo predict {output} --input ROWS.jsonl --output ANSWERS.jsonl")
