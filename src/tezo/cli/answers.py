"""`tezo eval` and `tezo predict`: the answers of a model, and their quality."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tezo.cli.common import JsonOption, RewardOption, ServeOption, SetOption, print_json, print_table, showing_work
from tezo.runs.words import metric_text
from tezo.system.errors import RequestError

if TYPE_CHECKING:
    from tezo.training.settings import Config


@showing_work()
def evaluate(
    run: Annotated[str, typer.Argument(metavar="RUN|MODEL", help="Run folder, or a base model.")],
    data: Annotated[str | None, typer.Option(help="Rows to evaluate on; default: the run's test rows.")] = None,
    task: Annotated[str | None, typer.Option(help="Its test rows, instead of --data: one of `tezo tasks`.")] = None,
    data_dir: Annotated[str | None, typer.Option(help="Folder with the task's rows; default: the hub.")] = None,
    shots: Annotated[int, typer.Option(help="Training rows shown, solved, before each question.")] = 0,
    calibrate: Annotated[bool, typer.Option(help="Score options against a prompt without the row's text.")] = False,
    reward: RewardOption = None,
    serve: ServeOption = False,
    probe: Annotated[
        bool,
        typer.Option(help="Fit a bias for each label and a linear probe to the training rows."),
    ] = False,
    lm_eval: Annotated[
        str | None, typer.Option(metavar="TASKS", help="Tasks of lm-evaluation-harness, by commas, instead of rows.")
    ] = None,
    task_folder: Annotated[Path | None, typer.Option(help="Folder with more task files for --lm-eval.")] = None,
    settings: list[str] = SetOption,
    json: bool = JsonOption,
) -> None:
    """Measure a run, or a model as it is, on rows with answers."""
    from tezo.tasks import untuned
    from tezo.training.opening import fitted_to, measure_rows, open_model, rows_to_measure, run_config
    from tezo.training.settings import parse_setting

    named = [("data.task", task), ("data.dir", data_dir), ("train.reward", reward), ("train.serve", serve or None)]
    given = [(key, value) for key, value in named if value is not None]
    unset = [] if task is None else [("data.test", None)]  # the run's is of other rows
    config = run_config(run, [*unset, *given, *(parse_setting(text) for text in settings)])
    if lm_eval is not None or task_folder is not None:
        if any(value is not None for value in (data, reward, task, data_dir)) or probe or calibrate or shots < 0:
            raise RequestError(
                "--lm-eval has rows of its own, and --shots from 0 on; leave out --data, --task, --data-dir, "
                "--probe, --calibrate and --reward."
            )
        _print_harness(run, config, lm_eval, task_folder, shots, json)
    elif probe:
        if data is not None or shots or calibrate or reward is not None:
            raise RequestError(
                "--probe is fitted to the rows of the run and measured on its test rows; leave out --data, --shots, "
                "--calibrate and --reward, or name rows with --set data.train and --set data.test."
            )
        sizes = {"batch_size": config.train.eval_batch_size, "seed": config.train.seed}
        found, counts = untuned.measure_untuned(config.data, open_model(run, config), **sizes)
        if json:
            print_json({"rows": counts, **found[untuned.PROBE], untuned.BIAS: found[untuned.BIAS]})
        else:
            print(f"fitted to {counts['train']} training rows, {counts['test']} test rows")
            table = [("metric", "a bias for each label", "a linear probe")]
            for name, value in found[untuned.PROBE].items():
                table.append((name, metric_text(name, found[untuned.BIAS][name]), metric_text(name, value)))
            print_table(table, "  ")
    else:
        rows, source, changed = rows_to_measure(run, config, data)
        config, fitted = fitted_to(run, config, rows)
        metrics, notices = measure_rows(config, open_model(run, config), rows, shots=shots, calibrate=calibrate)
        notices = [*changed, *fitted, *notices]
        if json:
            print_json({"rows": len(rows), **metrics, "notices": notices})
        else:
            _say(notices)
            print(f"{len(rows)} rows of {source}")
            print_table([(name, metric_text(name, value)) for name, value in metrics.items()], "  ")


def _say(notices: Sequence[str]) -> None:
    for notice in notices:
        typer.echo(f"note: {notice}", err=True)


def _print_harness(
    run: str, config: "Config", tasks: str | None, task_folder: Path | None, shots: int, json: bool
) -> None:
    from tezo.training.opening import open_model
    from tezo.training.run import check_harness, harness_results

    names = [name.strip() for name in (tasks or "").split(",") if name.strip()]
    if not names:
        raise RequestError("--lm-eval names no task; give the names of tasks, separated by commas.")
    check_harness()
    options: dict[str, Any] = {"num_fewshot": shots} if shots else {}
    results = harness_results(config, open_model(run, config), names, task_folder, **options)["results"]
    if json:
        print_json(results)
        return
    for task, metrics in results.items():
        print(task)
        rows = []
        for key, value in metrics.items():
            metric, comma, chosen = key.partition(",")  # "acc,none": the metric, and the filter of the answers
            if comma and not metric.endswith("_stderr"):
                error = metrics.get(f"{metric}_stderr,{chosen}")
                spread = f" +- {error:.4g}" if isinstance(error, float) else ""
                name = metric if chosen == "none" else f"{metric} ({chosen})"
                rows.append((name, f"{value:.4g}{spread}" if isinstance(value, float) else value))
        print_table(rows, "  ")


@showing_work()
def predict(
    run: Annotated[str, typer.Argument(metavar="RUN|MODEL", help="Run folder, or a base model.")],
    source: Annotated[str, typer.Option("--input", help="Rows to answer; -: JSON lines from standard input.")],
    output: Annotated[
        Path, typer.Option(help="JSONL file to write: each row with its `prediction`; -: standard output.")
    ],
    max_new_tokens: Annotated[
        int | None,
        typer.Option(help="Longest answer of free text; default: the task's, or 64; a note counts what is cut."),
    ] = None,
    abstain: Annotated[
        float | None,
        typer.Option(help="Leave out answers to labelled rows that are less probable than this, such as 0.9."),
    ] = None,
    settings: list[str] = SetOption,
    json: bool = JsonOption,
) -> None:
    """Answer new rows with a tuned model, or with a model as it is; labelled rows with probabilities."""
    from tezo.tasks.row_files import standard_input_rows
    from tezo.tasks.row_sources import read_rows
    from tezo.training import opening
    from tezo.training.settings import parse_setting

    opening.check_new_tokens(max_new_tokens)
    opening.check_abstain(abstain)
    opening.check_answer_file(output)
    to_file = str(output) != opening.STANDARD
    if json and not to_file:
        raise RequestError("output is -, where the answers are JSON lines already; leave out --json.")
    config = opening.run_config(run, [parse_setting(text) for text in settings])
    rows = standard_input_rows("input") if source == opening.STANDARD else read_rows(source, key="input")
    opening.check_no_answers(rows)
    config, fitted = opening.fitted_to(run, config, rows)
    loaded = opening.open_model(run, config)
    temperature = opening.temperature_of(run, loaded)
    answers = opening.answer_rows(config, loaded, rows, max_new_tokens, temperature=temperature)
    kept = list(range(len(rows))) if abstain is None else answers.as_sure_as(abstain)
    opening.write_answers(output, rows, answers, kept)
    left_out = len(rows) - len(kept)
    notices = [*fitted, *answers.notices]
    if answers.probabilities and temperature is None:
        notices.append(f"the probabilities are not calibrated: {run} has no temperature that was fitted to dev rows.")
    if json:
        print_json({"rows": len(rows), "left_out": left_out, "file": str(output), "notices": notices})
        return
    if abstain is not None:
        notices.append(f"{left_out} of {len(rows)} answers are left out: they are less probable than {abstain:g}.")
    _say(notices)
    if to_file:
        print(f"{len(kept)} answers: {output}")
