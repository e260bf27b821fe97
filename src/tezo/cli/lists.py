"""`tezo methods` and `tezo tasks`: what there is."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tezo.cli.common import JsonOption, print_json, print_table

if TYPE_CHECKING:
    from tezo.tasks.wordings import Task


def methods(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Describe this method in full.")] = None,
    json: bool = JsonOption,
) -> None:
    """List the methods, or describe one."""
    import inspect

    from tezo.optim.methods import BASELINES, FORWARD_PASSES, METHODS, Method, method

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
