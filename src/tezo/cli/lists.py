"""`tezo doctor`, `tezo methods` and `tezo tasks`: lists of hardware, packages, methods and tasks."""

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tezo.cli.common import JsonOption, SetOption, mebibytes, print_json, print_table, showing_work
from tezo.system.errors import RequestError


@showing_work()
def doctor(
    model: Annotated[str | None, typer.Option(help="Say also what this model can be tuned with.")] = None,
    quantization: Annotated[str | None, typer.Option(help="Of its linear layers: nf4, int8 or int8wo.")] = None,
    settings: list[str] = SetOption,
    json: bool = JsonOption,
) -> None:
    """Report installed packages, the hardware, and how a model can be tuned here."""
    from tezo.forecast.doctor import machine_report, model_report
    from tezo.training.settings import parse_setting

    if not model and (settings or quantization):
        raise RequestError("--set and --quantization are of a model; name one with --model, or leave them out.")
    report = machine_report()
    if model:
        given: list[tuple[str, Any]] = [parse_setting(text) for text in settings]
        report["model"] = model_report(model, given + [("model.quantization", quantization)] * bool(quantization))
    if json:
        print_json(report)
        return
    of_model = report.pop("model", None)
    for key, value in report.items():
        if isinstance(value, dict):
            print(key)
            print_table(value.items(), "  ")
        elif value is not None:
            print(f"{key}: {value / 2**30:.1f} GiB" if "memory" in key else f"{key}: {value}")
    if of_model is not None:
        _print_model(of_model)


def _print_model(report: dict[str, Any]) -> None:
    print("model")
    keys = ("name", "kind", "dtype", "quantization", "parameters", "linear_parameters")
    rows: list[tuple[object, ...]] = [(key, report[key]) for key in keys]
    sizes = f"{mebibytes(report['bytes'])}, of linear layers {mebibytes(report['linear_bytes'])}"
    print_table([*rows, ("bytes", sizes)], "  ")
    print("\nmethods, on the linear layers; counted, beside the model, without a pass's activations:")
    refused: dict[str, list[str]] = {}
    rows = []
    for row in report["methods"]:
        if row["refusal"]:
            refused.setdefault(row["refusal"], []).append(row["method"])
            continue
        notes = [f"rank {row['rank']}"] * (row["rank"] is not None) + ["exact LoRA adapter"] * row["adapter"]
        cost = f"trains {row['trained']:,}, keeps {mebibytes(row['kept'])}"
        rows.append((row["method"], cost, "; ".join(notes)))
    print_table(rows, "  ")
    for reason, names in refused.items():
        print(f"  not {', '.join(names)}: {reason}")
    memory = report["memory"]
    if isinstance(memory, str):
        print(f"\nmemory of training: no forecast: {memory}")
    else:
        print(f"\nmemory of training, forecast for {memory['rows']} rows of {memory['length']} tokens:")
        rows = [("", "in all", "weights", "kept", "a pass")]
        for way in memory["ways"]:
            rows.append((way["way"], *(mebibytes(way[part]) for part in ("total", "weights", "kept", "passing"))))
        print_table(rows, "  ")
        print(f"  {memory['advice']}")
    print("\nperturbation scales, measured on eight short reviews along the directions of the method:")
    if isinstance(report["scales"], str):
        print(f"  not measured: {report['scales']}")
        return
    rows = [("rho", "curvature", "rounding, as parts of the change of the losses")]
    for row in report["scales"]:
        mark = "  <- method.rho" if row["rho"] == report["recommended_rho"] else ""
        curvature = "not finite" if row["curvature"] == math.inf else f"{row['curvature']:.1%}"
        rows.append((f"{row['rho']:g}", curvature, f"{row['rounding']:.2%}{mark}"))
    print_table(rows, "  ")


if TYPE_CHECKING:
    from tezo.tasks.wordings import Task


def methods(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Describe this method in full.")] = None,
    json: bool = JsonOption,
) -> None:
    """List the methods, or describe one."""
    import inspect

    from tezo.methods import BASELINES, FORWARD_PASSES, METHODS, Method, method

    chosen: list[Method[Any]] = [method(name)] if name else [*METHODS.values(), *BASELINES.values()]
    if json:
        keys = ("name", "summary", "in_paper", "exports_adapter", "needs")
        print_json([{key: getattr(m, key) for key in keys} | {"options": m.defaults()} for m in chosen])
    elif name:
        print(inspect.getdoc(chosen[0].build))
        print("\nOptions: " + ", ".join(f"{key}={value}" for key, value in chosen[0].defaults().items()))
    else:
        marks = [
            ("" if m.in_paper else "  [not in the paper]") + "  [exact LoRA adapter]" * m.exports_adapter
            + (f"  [{m.needs}]" if m.needs != FORWARD_PASSES else "")
            for m in chosen
        ]  # fmt: skip
        texts = [m.summary.partition(": ")[2] + mark for m, mark in zip(chosen, marks, strict=True)]
        print_table(zip([m.name for m in chosen], texts, strict=True))


def tasks(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Show this task with its prompts.")] = None,
    json: bool = JsonOption,
) -> None:
    """List the paper's data sets, or show the prompts of one."""
    from tezo.tasks.catalogue import TASKS, task

    chosen = [task(name)] if name else list(TASKS.values())
    if json:
        print_json([_description(entry) for entry in chosen])
    elif not name:
        print_table((entry.name, ", ".join(entry.wordings), entry.metric, _answers(entry)) for entry in chosen)
    else:
        shown = _description(chosen[0])
        print(f"{shown['name']}: {shown['hub']} ({', '.join(shown['splits'])}); {shown['metric']}")
        for kind, model in shown["models"].items():
            words = ", ".join(model["label_words"])
            print(f"\n{kind}" + (f": {words}" if words else ""))
            for line in f"{model['prompt']}[{model['answer']}]".splitlines():
                print(f"  | {line}")


def _description(entry: "Task") -> dict[str, Any]:
    from tezo.tasks.catalogue import example_row

    row, models = example_row(entry.name), {}
    for kind, wording in entry.wordings.items():
        example = wording.example(row, answered=True)
        prompt = example.prompt
        if example.slot is not None:
            prompt = f"{prompt[: example.slot]}<mask>{prompt[example.slot :]}"
        words = [word.strip() for word in wording.options]
        models[kind] = {"label_words": words, "prompt": prompt, "answer": example.answer}
    return {
        "name": entry.name,
        "metric": entry.metric,
        "hub": entry.hub.name if entry.hub.subset is None else f"{entry.hub.name}, {entry.hub.subset}",
        "splits": [entry.hub.train, entry.hub.test],
        "models": models,
    }


def _answers(entry: "Task") -> str:
    wording = next(iter(entry.wordings.values()))
    if wording.options:
        return ", ".join(word.strip() for word in wording.options)
    return "(free text)" if wording.max_new_tokens else "(options of each row)"
