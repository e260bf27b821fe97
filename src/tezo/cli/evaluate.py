"""`tezo eval`."""

from typing import Annotated

import typer

from tezo.cli.common import JsonOption, SetOption, print_json, quiet_libraries, readable


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("eval")(evaluate)


def evaluate(
    run: Annotated[str, typer.Argument(metavar="RUN|MODEL", help="Run folder, or a base model.")],
    data: Annotated[str | None, typer.Option(help="Rows to evaluate on; default: the run's test rows.")] = None,
    task: Annotated[str | None, typer.Option(help="Its test rows, instead of --data: one of `tezo tasks`.")] = None,
    data_dir: Annotated[str | None, typer.Option(help="Folder with the task's rows; default: the hub.")] = None,
    settings: list[str] = SetOption,
    json: bool = JsonOption,
) -> None:
    """Measure a run, or a model as it is, on rows with answers."""
    from tezo.config import parse_setting

    quiet_libraries()
    from tezo.cli.runs import open_model, run_config
    from tezo.evaluate import evaluate as measure
    from tezo.job import cut_notices, make_format, make_objective
    from tezo.splits import rows_to_report

    named = [("data.task", task), ("data.dir", data_dir)]
    given = [(key, value) for key, value in named if value is not None]
    config = run_config(run, [*given, *(parse_setting(text) for text in settings)])
    rows, source = rows_to_report(config.data, data)
    loaded = open_model(run, config)
    form = make_format(config, loaded, rows)
    objective = make_objective(config, loaded, form)
    encoded = [objective.encode(form.example(row)) for row in rows]
    metrics = measure(
        loaded.model, objective, encoded, config.train.eval_batch_size,
        measures=form.measures, max_new_tokens=form.max_new_tokens or 0,
    )  # fmt: skip
    if json:
        print_json({"rows": len(rows), **metrics, "notices": cut_notices(objective)})
        return
    for notice in cut_notices(objective):
        typer.echo(f"note: {notice}", err=True)
    print(f"{len(rows)} rows of {source}")
    for name, value in metrics.items():
        print(f"  {name:<15} {readable(name, value)}")
