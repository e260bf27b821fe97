"""`tezo methods` and `tezo tasks`: what there is."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tezo.cli.common import JsonOption, print_json

if TYPE_CHECKING:
    from tezo.tasks.examples import Example
    from tezo.tasks.wordings import Task


def methods(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Describe this method in full.")] = None,
    json: bool = JsonOption,
) -> None:
    """List the methods, or describe one."""
    import inspect

    from tezo.optim.methods import BASELINES, METHODS, Method, method

    every: list[Method[Any]] = [*METHODS.values(), *BASELINES.values()]
    chosen = [method(name)] if name else every
    if json:
        print_json(
            [
                {
                    "name": m.name,
                    "summary": m.summary,
                    "in_paper": m.in_paper,
                    "exports_adapter": m.exports_adapter,
                    "options": m.defaults(),
                }
                for m in chosen
            ]
        )
        return
    if name:
        print(inspect.getdoc(chosen[0].build))
        print("\nOptions: " + ", ".join(f"{key}={value}" for key, value in chosen[0].defaults().items()))
        return
    for m in chosen:
        marks = ("" if m.in_paper else "  [ours]") + ("  [exact LoRA adapter]" if m.exports_adapter else "")
        print(f"{m.name:<11} {m.summary.partition(': ')[2]}{marks}")


def tasks(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Show this task with its prompts.")] = None,
    json: bool = JsonOption,
) -> None:
    """List the paper's data sets, or show the prompts of one."""
    from tezo.tasks.catalogue import TASKS, task

    chosen = [task(name)] if name else list(TASKS.values())
    if json:
        print_json([_description(entry) for entry in chosen])
    elif name:
        _print_one(_description(chosen[0]))
    else:
        for entry in chosen:
            print(f"{entry.name:<8} {', '.join(entry.wordings):<24} {entry.metric:<9} {_answers(entry)}")


def _description(entry: "Task") -> dict[str, Any]:
    from tezo.tasks.catalogue import example_row

    row = example_row(entry.name)
    examples = {kind: wording.example(row, answered=True) for kind, wording in entry.wordings.items()}
    return {
        "name": entry.name,
        "metric": entry.metric,
        "hub": entry.hub.name if entry.hub.subset is None else f"{entry.hub.name}, {entry.hub.subset}",
        "splits": [entry.hub.train, entry.hub.test],
        "models": {
            kind: {
                "label_words": [word.strip() for word in entry.wordings[kind].options],
                "prompt": _prompt_text(example),
                "answer": example.answer,
            }
            for kind, example in examples.items()
        },
    }


def _prompt_text(example: "Example") -> str:
    if example.slot is None:
        return example.prompt
    return f"{example.prompt[: example.slot]}<mask>{example.prompt[example.slot :]}"


def _answers(entry: "Task") -> str:
    wording = next(iter(entry.wordings.values()))
    if wording.options:
        return ", ".join(word.strip() for word in wording.options)
    return "(free text)" if wording.max_new_tokens else "(options of each row)"


def _print_one(description: dict[str, Any]) -> None:
    print(f"{description['name']}: {description['hub']} ({', '.join(description['splits'])}); {description['metric']}")
    for kind, model in description["models"].items():
        words = ", ".join(model["label_words"])
        print(f"\n{kind}" + (f": {words}" if words else ""))
        for line in f"{model['prompt']}[{model['answer']}]".splitlines():
            print(f"  | {line}")
