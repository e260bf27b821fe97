"""`tezo train`, and its output with --dry-run."""

import os
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tezo.cli.common import (
    JsonOption,
    RewardOption,
    ServeOption,
    SetOption,
    mebibytes,
    print_json,
    print_table,
    showing_work,
)
from tezo.runs.resuming import in_folder
from tezo.runs.words import change_text, measured_rows_text, metric_text, work_text
from tezo.system.errors import RequestError
from tezo.system.files import reading
from tezo.system.progress import duration_text

if TYPE_CHECKING:
    from tezo.training.listeners import Listener
    from tezo.training.settings import Config


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
    dev: Annotated[
        str | None, typer.Option(help="Rows that choose which state to keep; default: held out of the training rows.")
    ] = None,
    test: Annotated[str | None, typer.Option(help="Rows for the metrics before and after training.")] = None,
    method: Annotated[
        str | None, typer.Option(help="Method; see `tezo methods`. Default: by the model and the rows.")
    ] = None,
    lr: Annotated[
        str | None,
        typer.Option(metavar="FLOAT|auto", help="Learning rate of the method; auto: by trials, for head-feedback."),
    ] = None,
    reward: RewardOption = None,
    serve: ServeOption = False,
    steps: Annotated[
        str | None, typer.Option(metavar="INTEGER", help="Number of steps; a run that goes on may have another.")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="What runs the passes: torch, llama.cpp, or http://HOST:PORT of a vLLM server."),
    ] = None,
    quantization: Annotated[str | None, typer.Option(help="Quantization of linear layers: nf4, int8, int8wo.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of directions, data order and sampling.")] = None,
    settings: list[str] = SetOption,
    output: Annotated[Path | None, typer.Option(help="Run folder to create.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --output, if there is one.")] = False,
    accept_scorer: Annotated[
        bool, typer.Option("--accept-scorer", help="With --resume: go on with another --reward than before.")
    ] = False,
    report_to: Annotated[
        str | None, typer.Option(help="Trackers, with commas between: tensorboard, wandb, trackio, mlflow, ...")
    ] = None,
    dry: Annotated[bool, typer.Option("--dry-run", help="Say what the run would do and take; write nothing.")] = False,
    json: bool = JsonOption,
) -> None:
    """Fine-tune a model on your rows. Without a recipe, --model and --data (or --task) are enough."""
    if output is None and not dry:
        raise RequestError("output is not set; give --output FOLDER for the run.")
    named = {
        "model.name": model, "data.train": data, "data.task": task, "data.dir": data_dir, "data.dev": dev,
        "data.test": test, "method.name": method, "method.lr": lr, "model.engine": engine,
        "model.quantization": quantization, "train.reward": reward, "train.serve": serve or None,
        "train.steps": steps, "train.seed": seed,
    }  # fmt: skip
    flags = [(key, value) for key, value in named.items() if value is not None]
    with showing_work() as line:
        from tezo.forecast.dry_run import dry_run
        from tezo.runs.folder import RunFolder, read_summary
        from tezo.training.loop import train as run
        from tezo.training.resume import with_choices_of
        from tezo.training.screen import Screen

        config = _configured(recipe, output / "config.yaml" if output and resume else None, flags, settings)
        if output is None or dry:
            if output is not None:
                folder = RunFolder(output)
                folder.check_free(resume=resume)
                if resume and read_summary(output) is not None:
                    raise RequestError(f"{output} is of a run that has ended; give another --output.")
                if resume and (begun := folder.log()) is not None:
                    config = with_choices_of(begun, config)
            forecast = dry_run(config)
            print_json(forecast) if json else _print_dry_run(forecast)
            return
        listeners: list[Listener] = [] if line is None or json else [Screen(line)]
        if report_to is not None and line is not None:
            from tezo.trainer.callbacks import trackers

            listeners.append(trackers(report_to, output.absolute()))
        summary = run(config, output, listeners, resume=resume, accept_scorer=accept_scorer)
    if line is None:
        return
    if json:
        print_json(summary)
        return
    way_out = "restore it, or delete manifest.json to go on with the run"
    with reading(f"{output}: summary.json is not that of a run", way_out):
        _print_end(summary, output)


_REPLACED = {
    "data.train": "data.task", "data.task": "data.train", "train.steps": "train.epochs", "train.epochs": "train.steps",
}  # fmt: skip
"""A setting that is asked for -> that of the recipe which it replaces."""


def _configured(
    recipe: Path | None, begun: Path | None, flags: Sequence[tuple[str, Any]], settings: Sequence[str]
) -> "Config":
    """Returns the recipe, or without one the configuration of the run that goes on, with settings over it."""
    from tezo.training.settings import (
        check_settings_agree,
        find_recipe,
        parse_setting,
        read_config,
        read_run_config,
    )

    asked = [*flags, *map(parse_setting, settings)]
    check_settings_agree(asked)
    given = [*((_REPLACED[key], None) for key, _ in asked if key in _REPLACED), *asked]
    if recipe is None and begun is not None:
        if os.path.lexists(begun):  # its log says how many steps it is to have
            return read_run_config(begun, [("train.steps", None), ("train.epochs", None), *given])
        if not {"model", "model.name"} & set(dict(asked)):
            if os.path.lexists(begun.with_name("steps.log")):
                raise RequestError(
                    f"{begun.parent} is a run folder that has lost its {begun.name}; put it back, or give all flags of "
                    "the run again."
                )
            raise RequestError(
                f"output: there is no run in {begun.parent} to resume; give the --output of one, or --model and the "
                "other flags to begin one."
            )
    return read_config(None if recipe is None else find_recipe(recipe), given)


def _print_dry_run(found: dict[str, Any]) -> None:
    counts, parameters, seconds = found["rows"], found["parameters"], found["seconds"]
    memory = {name: mebibytes(value) for name, value in found["memory"].items()}
    steps = [f"{count} {kind} ({seconds[f'{kind} step']:.3f} s each)" for kind, count in found["steps"].items()]
    times = {name: duration_text(seconds[name]) for name in ("run", "evaluations", "preparation", "measurements")}
    rows = [
        ("rows", f"{counts['train']} training, {counts['dev']} dev, {counts['test']} test"),
        ("parameters", f"{parameters['trained']:,} of {parameters['total']:,} are trained"),
    ]
    ways: dict[str, list[dict[str, Any]]] = {}
    for row in found["plan"]:
        if row["trained"]:
            ways.setdefault(row["moved"], []).append(row)
    for way, of_way in ways.items():
        ranks = sorted({row["rank"] for row in of_way if row["rank"] is not None})
        span = f" of rank {ranks[0]}" + (f" to {ranks[-1]}" if len(ranks) > 1 else "") if ranks else ""
        rows.append(("perturbed", f"{len(of_way)} parameters{span}: {way}"))
    rows.append(("steps", f"{', '.join(steps)}; {found['num_forward_passes']} forward passes"))
    for key, count in found["measured"].items():
        rows.append(("measured", f"{key} at the start, by up to {count} forward pass{'es' * (count > 1)}"))
    model = (
        f"the model {memory['model']}" if "model" in memory else f"the model in {found['settings']['model']['engine']}"
    )
    made = f"{model}, fixed factors {memory['factors']}"
    parts = f"preparation {times['preparation']}, measurements {times['measurements']}"
    by = f"by one pass of {seconds['timed pass']:.3f} s; {found['hardware']}"
    rows.append(("memory", f"{memory['peak']} at the peak; {made}"))
    rows.append(("time", f"up to {times['run']}, of it {parts} and evaluations {times['evaluations']}, {by}"))
    print(f"{found['method']} on {found['model']}; nothing is written")
    print_table(rows)
    for line in (*found["rows_as_read"], *(f"note: {notice}" for notice in found["notices"])):
        print(line)


def _print_end(summary: dict[str, Any], output: Path) -> None:
    print(measured_rows_text(summary))
    rows = [("metric", "before", "after", "change")]
    for metric in dict.fromkeys([*summary["before"], *summary["after"]]):
        before, after = (summary[when].get(metric, 0.0) for when in ("before", "after"))  # all scores may be there
        texts = metric_text(metric, before), metric_text(metric, after), change_text(metric, before, after)
        rows.append((metric, *texts))
    print_table(rows, "  ")
    if "verdict" in summary:
        print(in_folder(str(summary["verdict"]), output))
    print(f"{work_text(summary)}.")
    made, result = summary["result"], output / summary["result"]["folder"]
    in_peft = f"  PEFT:  PeftModel.from_pretrained(base_model, {str(result)!r})"
    if made["kind"] == "adapter":
        from tezo.cli.uses import uses
        from tezo.models.lora import next_allowed

        in_file = next_allowed(made["rank"])
        padded = f", {in_file} in its file" if in_file > made["rank"] else ""
        print(f"LoRA adapter of rank {made['rank']}{padded}: {result}")
        alone = made.get("why_not_in_peft")
        unfit = "not for PEFT" if "engine_file" in made else "for tezo alone"
        print(f"  {unfit}: {alone}" if alone else in_peft)
        for program, command in uses(summary, output):
            print(f"  {program}:  {command}")
    elif made["kind"] == "peft":
        print(f"{made['adapter']} adapter: {result}")
        print(in_peft)
    else:
        print(f"model: {result}  (no adapter: {made['why_no_adapter']})")
    print(f"  new rows:  tezo predict {quote(str(output))} --input ROWS.jsonl --output ANSWERS.jsonl")
