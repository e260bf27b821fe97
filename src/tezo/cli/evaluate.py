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
    settings: list[str] = SetOption,
    json: bool = JsonOption,
) -> None:
    """Measure a run, or a model as it is, on rows with answers."""
    from tezo.config import parse_setting
    from tezo.errors import RequestError

    quiet_libraries()
    from tezo.cli.runs import is_run, open_model, run_config
    from tezo.evaluate import evaluate as measure
    from tezo.job import cut_notices, make_format, options_of, read_part
    from tezo.objectives import objective_for
    from tezo.tasks import read_rows

    config = run_config(run, [parse_setting(text) for text in settings])
    source = data or (config.data.test or config.data.dev if is_run(run) else None)
    if not source:
        raise RequestError("data is not set; give --data FILE with the rows to evaluate on.")
    rows = read_rows(source, key="data") if data or not is_run(run) else read_part(config.data, source)
    loaded = open_model(run, config)
    form = make_format(config, loaded, rows)
    objective = objective_for(loaded, options_of(form), config.data.max_length)
    encoded = [objective.encode(form.example(row)) for row in rows]
    metrics = measure(loaded.model, objective, encoded, config.train.eval_batch_size)
    if json:
        print_json({"rows": len(rows), **metrics, "notices": cut_notices(objective)})
        return
    for notice in cut_notices(objective):
        typer.echo(f"note: {notice}", err=True)
    print(f"{len(rows)} rows of {source}")
    for name, value in metrics.items():
        print(f"  {name:<15} {readable(name, value)}")
