"""What `tezo train --dry-run` prints.

`tezo train`.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tezo.cli.common import JsonOption, RewardOption, SetOption, print_json, showing_work
from tezo.system.errors import RequestError
from tezo.system.files import reading
from tezo.system.progress import StatusLine, duration_text

if TYPE_CHECKING:
    from tezo.training.listeners import Listener
    from tezo.training.recipe import Config


def print_dry_run(config: "Config", *, json: bool) -> None:
    """Prepares a run, times a pass, and prints what the run would do; nothing is written."""
    from tezo.training.dry_run import dry_run

    found = dry_run(config)
    if json:
        print_json(found)
        return
    for line in _lines(found):
        print(line)


def _lines(found: dict[str, Any]) -> list[str]:
    rows, parameters = found["rows"], found["parameters"]
    memory = {name: _mebibytes(value) for name, value in found["memory"].items()}
    seconds = found["seconds"]
    steps = [f"{count} {kind} ({seconds[f'{kind} step']:.3f} s each)" for kind, count in found["steps"].items()]
    times = {name: duration_text(seconds[name]) for name in ("run", "evaluations", "preparation", "measurements")}
    measured = [
        f"measured     {key} at the start, by up to {count} forward pass{'es' * (count > 1)}"
        for key, count in found["measured"].items()
    ]
    return [
        f"{found['method']} on {found['model']}; nothing is written",
        f"rows         {rows['train']} training, {rows['dev']} dev, {rows['test']} test",
        f"parameters   {parameters['trained']:,} of {parameters['total']:,} are trained",
        *_by_way(found["plan"]),
        f"steps        {', '.join(steps)}; {found['num_forward_passes']} forward passes",
        *measured,
        f"memory       {memory['peak']} at the peak; the model {memory['model']}, fixed factors {memory['factors']}",
        f"time         up to {times['run']}, of it preparation {times['preparation']}, measurements "
        f"{times['measurements']} and evaluations {times['evaluations']}, by one pass of "
        f"{seconds['timed pass']:.3f} s; {found['hardware']}",
        *(f"note: {notice}" for notice in found["notices"]),
    ]


def _by_way(plan: list[dict[str, Any]]) -> list[str]:
    """A line for each way in which parameters are perturbed: how many, and their ranks."""
    ways: dict[str, list[dict[str, Any]]] = {}
    for row in plan:
        if row["trained"]:
            ways.setdefault(row["moved"], []).append(row)
    lines = []
    for way, rows in ways.items():
        ranks = sorted({row["rank"] for row in rows if row["rank"] is not None})
        span = f" of rank {ranks[0]}" + (f" to {ranks[-1]}" if len(ranks) > 1 else "") if ranks else ""
        lines.append(f"perturbed    {len(rows)} parameters{span}: {way}")
    return lines


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


def train(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="Recipe file, or the name of one of tezo's, such as lozo.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model folder, GGUF file, hub name, or embedded:smollm2-135m.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Training rows: file, folder or pattern of files, or hub data set.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="Task instead of --data; see `tezo tasks`.")] = None,
    data_dir: Annotated[str | None, typer.Option(help="Folder with the task's rows; default: the hub.")] = None,
    test: Annotated[str | None, typer.Option(help="Rows for the metrics before and after training.")] = None,
    method: Annotated[str | None, typer.Option(help="Method; see `tezo methods`.")] = None,
    lr: Annotated[
        str | None, typer.Option(metavar="FLOAT|auto", help="Learning rate; default auto: by short trials.")
    ] = None,
    reward: RewardOption = None,
    steps: Annotated[str | None, typer.Option(metavar="INTEGER", help="Number of steps.")] = None,
    quantization: Annotated[str | None, typer.Option(help="Quantization of linear layers: nf4, int8, int8wo.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of directions, data order and sampling.")] = None,
    settings: list[str] = SetOption,
    output: Annotated[Path | None, typer.Option(help="Run folder to create.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --output, if there is one.")] = False,
    report_to: Annotated[
        str | None, typer.Option(help="Trackers, with commas between: tensorboard, wandb, trackio, mlflow, ...")
    ] = None,
    dry: Annotated[bool, typer.Option("--dry-run", help="Say what the run would do and take; write nothing.")] = False,
    json: bool = JsonOption,
) -> None:
    """Fine-tune a model on your rows. Without a recipe, --model and --data (or --task) are enough."""
    if output is None and not dry:
        raise RequestError("output is not set; give --output FOLDER for the run.")
    named: list[tuple[str, Any]] = [
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
    with showing_work() as line:
        config = _configured(recipe, output / "config.yaml" if output and resume else None, named, settings)
        if output is None or dry:
            print_dry_run(config, json=json)
            return
        summary = _trained(config, output, line, resume=resume, report_to=report_to, json=json)
    if line is None:
        return
    if json:
        print_json(summary)
        return
    with reading(
        f"{output}: summary.json is not that of a run", "restore it, or delete manifest.json to go on with the run"
    ):
        _print_end(summary, output)


def _trained(
    config: "Config", output: Path, line: StatusLine | None, *, resume: bool, report_to: str | None, json: bool
) -> dict[str, Any]:
    """The summary of the run; without `json`, evaluations are printed above the status line."""
    from tezo.training.loop import train as run
    from tezo.training.screen import Screen

    listeners: list[Listener] = [] if line is None or json else [Screen(line)]
    if report_to is not None and line is not None:
        from tezo.training.trainer.callbacks import trackers

        listeners.append(trackers(report_to, output))
    return run(config, output, listeners, resume=resume)


_OTHER_ROWS = {"data.train": "data.task", "data.task": "data.train"}
"""Setting of a flag -> what it replaces in the recipe."""


def _configured(
    recipe: Path | None, begun: Path | None, named: Sequence[tuple[str, Any]], settings: Sequence[str]
) -> "Config":
    """Of the recipe, or without one of the run that goes on, with settings over it."""
    from tezo.training.config import find_recipe, parse_setting, read_config, read_run_config

    flags = [(key, value) for key, value in named if value is not None]
    given = [
        *((_OTHER_ROWS[key], None) for key, _ in flags if key in _OTHER_ROWS),
        *flags,
        *map(parse_setting, settings),
    ]
    if recipe is None and begun is not None and os.path.lexists(begun):
        return read_run_config(begun, given)
    has_log = begun is not None and os.path.lexists(begun.with_name("steps.log"))
    if recipe is None and begun is not None and has_log and "model.name" not in dict(flags):
        raise RequestError(
            f"{begun.parent} is a run folder that has lost its {begun.name}; put it back, or give all flags of the run "
            "again."
        )
    return read_config(None if recipe is None else find_recipe(recipe), given)


def _print_end(summary: dict[str, Any], output: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    from tezo.runs.words import change_text, measured_rows_text, metric_text, work_text

    table = Table(title=measured_rows_text(summary), title_justify="left")
    for column in ("metric", "before", "after", "change"):
        table.add_column(column, justify="left" if column == "metric" else "right")
    for metric, value in summary["before"].items():
        end = summary["after"][metric]
        table.add_row(metric, metric_text(metric, value), metric_text(metric, end), change_text(metric, value, end))
    console = Console()
    console.print(table)
    if "verdict" in summary:
        console.print(summary["verdict"], highlight=False, soft_wrap=True)
    result = output / summary["result"]["folder"]
    console.print(f"{work_text(summary)}.", highlight=False, soft_wrap=True)
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
