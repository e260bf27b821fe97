"""The tables of the documents, drawn from `benchmarks/results`."""

import json
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks/results"
FIGURES = sorted(path.stem for path in (RESULTS.parents[1] / "docs/figures").glob("*.json"))
SMALL = "opt-125m"
SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def demo() -> str:
    """Accuracy before and after, seed by seed."""
    results = read("demo")
    runs = results["runs"]
    rows = [
        [f"{r['seed']}", *(f"{100 * r[when]['accuracy']:.1f} %" for when in ("before", "after")), f"{r['steps']}"]
        for r in runs
    ]
    for row, r in zip(rows, runs, strict=True):
        row.append(f"{r['seconds_stepping']:.0f}")
    gain = statistics.median(100 * (r["after"]["accuracy"] - r["before"]["accuracy"]) for r in runs)
    table = grid(["seed", "zero-shot", "tuned", "steps", "seconds stepping"], rows)
    return table + f"\nMedian gain {gain:.1f} points. `{results['command']}`; {machine(runs[0])}.\n"


def step(targets: str) -> str:
    """Time of a step of OPT-125M over that of two plain forward passes; mezo also against its published form."""
    chosen = [r for r in read("step_cpu") if r["settings"]["targets"] == targets and r["settings"]["model"] == SMALL]
    found = [by_label(result) for result in chosen]
    rows = [[label, *(f"{of[label]['to_F2']:.2f}" for of in found)] for label in found[0]]
    rows.append(["published:mezo / mezo", *(f"{of['mezo']['speed_up']:.1f}" for of in found)])
    return grid(["", *(head(result["settings"]) for result in chosen)], rows) + "\n" + circumstances(chosen)


def step_sizes() -> str:
    """The first setting of `step` for models of several sizes."""
    results = read("step_cpu")
    first = results[0]["settings"]
    chosen = [r for r in results if all(r["settings"][key] == first[key] for key in ("dtype", "batch", "targets"))]
    found = [by_label(result) for result in chosen]
    rows = [[label, *(f"{of[label]['to_F2']:.2f}" for of in found)] for label in by_label(chosen[-1])]
    heads = ["", *(f"{r['settings']['model']} {head(r['settings'])}" for r in chosen)]
    return grid(heads, rows) + "\n" + circumstances(chosen)


def by_label(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows of a result."""
    return {row["label"]: row for row in result["rows"]}


def circumstances(results: Sequence[dict[str, Any]]) -> str:
    """The line below a table of steps."""
    rounds = sorted({result["rounds"] for result in results})
    models = dict.fromkeys(result["settings"]["model"] for result in results)
    return (
        f"Medians of {rounds[0]} to {rounds[-1]} interleaved rounds; {', '.join(models)}, random weights, rank "
        f"{results[0]['settings']['rank']}. `benchmarks/cpu.sh`; {machine(results[0])}.\n"
    )


def memory() -> str:
    """Peak memory over that of inference, in percent of the model's bytes, with what a method holds between steps."""
    chosen = read("memory_cpu")
    found = [by_label(result) for result in chosen]
    labels = [label for label in found[0] if label not in ("F", "N")]
    rows = []
    for label in labels:
        cells = []
        for of in found:
            over = of[label]["over_F"]
            cells += [f"{over['percent']:.1f} %", f"{over['percent_less_held']:.1f} %"]
        rows.append([label, *cells])
    heads = [""]
    for result in chosen:
        heads += [head(result["settings"]), "less factors and state"]
    return grid(heads, rows) + (
        f"\nPeak resident set of a fresh process each, all linear layers, {chosen[0]['settings']['model']}. "
        f"`benchmarks/cpu.sh`; {machine(chosen[0])}.\n"
    )


def evaluation() -> str:
    """Options scored with a shared prompt, against one option at a time."""
    result = read("evaluation")
    return (
        f"{result['rows']} rows of {result['options']} options, prompts of {result['prompt']} tokens and options of "
        f"{result['option']}: {result['speed_up']:.1f} times faster than one option of one row at a time, "
        f"scores alike. `python benchmarks/evaluation.py`; {result['model']}, {machine(result)}.\n"
    )


def kills() -> str:
    """What a run went through, by method."""
    results = read("kills")
    keys = ("kills", "in_save", "runs", "steps_of_a_run")
    rows = [[f"`{r['method']}`", *(f"{r[key]}" for key in keys)] for r in results]
    table = grid(["method", "kills", "inside a save", "runs, all as the undisturbed one", "steps a run"], rows)
    names = " ".join(r["method"] for r in results)
    return table + f"\n`python tests/kills.py --kills 100 --methods {names}`; {machine(results[0])}.\n"


def packed() -> str:
    """A base in several forms."""
    results, rows = read("packed"), []
    for r in results:
        scatter = next(at["scatter"] for at in r["noise"] if at["rho"] == 1e-3)
        each = 8 * r["linear_bytes"] / r["linear_parameters"]
        losses = [f"{r['run'][when]['loss']:.3f}" if r["run"] else "-" for when in ("before", "after")]
        row = [f"{r['bytes'] / 2**20:.1f}", f"{each:.1f}", f"{100 * scatter:.1f} %", f"{r['recommended_rho']:g}"]
        rows.append([f"`{r['form']}`", *row, *losses])
    heads = ["base", "MiB", "bits a linear weight", "scatter at rho 1e-3", "recommended rho", "loss before", "after"]
    run = results[0]["run"]
    return grid(heads, rows) + (
        f"\n{results[0]['name']}, whose embeddings stay in float32 under a packed form; {run['method']}, "
        f"{run['steps']} steps of the routing example at the recommended rho, loss of {run['rows']['test']} test rows, "
        f"one seed: each learns; which is best it does not say. `python benchmarks/packed.py`; {machine(run)}.\n"
    )


def exchange() -> str:
    """Adding up a step's numbers."""
    result = read("exchange")
    rows = [[count, f"{1e6 * seconds:.0f}"] for count, seconds in result["seconds"].items()]
    return grid(["processes", "microseconds an exchange"], rows) + (
        f"\nMedians over a thousand exchanges of {result['numbers']} numbers, gloo, all on one machine of two cores. "
        f"`python benchmarks/exchange.py`; {machine(result)}.\n"
    )


def encoder() -> str:
    """The accuracies of all methods on the embedded encoder, as `tezo reproduce` wrote them."""
    text = (RESULTS / "encoder/table.md").read_text(encoding="utf-8")
    return text.partition("\n\n")[2]


def agreement() -> str:
    """What rows agree on, by groups of input directions."""
    results = read("agreement")
    groups = [group["directions"] for group in results[0]["groups"]]
    rows = [[r["task"].upper(), *(f"{g['mean_sq'] / g['row_sq']:.4f}" for g in r["groups"])] for r in results]
    heads = ["", *(f"{start + 1} to {stop}" if stop > start + 1 else f"{stop}" for start, stop in groups)]
    return grid(heads, rows) + (
        "\nThe share \\|mu V\\|^2 / E\\|G_b V\\|^2 along eigenvectors of each layer's inputs, the leading first, all "
        f"linear layers together, {results[0]['rows']} rows. `python benchmarks/agreement.py --data-dir DATA`; "
        f"{machine(results[0])}.\n"
    )


def study() -> str:
    """Dev losses of the study, with the forward passes that its lines take to a loss, and its figure."""
    made = study_numbers()
    if made is None:
        return ""
    rows = []
    for line in made["lines"]:
        found = [line["columns"].get(key) for key in made["columns"]]
        cells = [f"{mean_of(c['dev_loss'], '{:.3f}')}{rate_of(c)}" if c is not None else "-" for c in found]
        rows.append([line["label"], *cells, *shares_of(line)])
    heads = ["dev loss at the end (rate)", *map(column_head, made["columns"]), "to TeZO's", "to TeZO-Adam's"]
    return grid(heads, [row for row in rows if set(row[1:]) != {"-"}]) + (
        f"\nMeans over seeds {', '.join(map(str, made['seeds']))} ± standard deviations; the rate has the lowest loss "
        "at the end on the first seed, * the first or last of its search. To TeZO's: the share of the budget after "
        "which a line has the loss that TeZO ends with on the same rows and seed, its median over columns and seeds, "
        f"and in how many it has it at all. {made['runs']} runs; `{made['command']}`; {machine(made)}.\n\n"
        "![dev loss against forward passes](figures/study.png)\n\n"
        "*Dev loss against forward passes, those that collect a basis among them; means over seeds, bands from the "
        "least to the most.*\n"
    )


def study_accuracy() -> str:
    """Test accuracies of the study, with the gap to fine-tuning that a line leaves."""
    made = study_numbers()
    if made is None:
        return ""
    rows = []
    for line in made["lines"]:
        found = [line["columns"].get(key) for key in made["columns"]]
        cells = [mean_of(c["accuracy"], "{:.1f}", 100) + gap_of(c) if c is not None else "-" for c in found]
        rows.append([line["label"], *cells])
    flat = [column_head(key) for key in made["columns"] if not made["gaps"][key]["is_gap"]]
    none = f" No gap, FT being less than {100 * made['least_gap']:.0f} points above MeZO: {'; '.join(flat)}."
    return grid(["test accuracy, percent", *map(column_head, made["columns"])], rows) + (
        "\nMeans over seeds ± standard deviations. In brackets the gap to FT that a line leaves, over the gap that "
        f"MeZO leaves.{none if flat else ''}\n"
    )


def study_short() -> str:
    """The forward passes that the study's lines take to a loss, and which are adapters."""
    made = study_numbers()
    if made is None:
        return ""
    rows = [
        [line["label"], *shares_of(line), f"{100 * line['basis_share']:.1f} %", "yes" if line["exports"] else "no"]
        for line in made["lines"]
        if line["passes_to_tezo"]["of"]
    ]
    heads = ["", "budget to TeZO's loss", "to TeZO-Adam's", "passes for the basis", "exact LoRA adapter"]
    best = next((line["label"] for line in made["lines"] if line["key"] == made["best_adapter"]), "none")
    return grid(heads, rows) + (
        f"\nMedians over {len(made['columns'])} columns and {len(made['seeds'])} seeds, in brackets in how many the "
        f"loss is reached; the lowest median dev loss of an adapter: {best}. `{made['command']}`; {machine(made)}.\n"
    )


def study_numbers() -> Any:
    """What `benchmarks/study.py` has written; None: nothing yet."""
    return read("study/numbers") if (RESULTS / "study/numbers.json").is_file() else None


def column_head(key: str) -> str:
    """sst2-16 -> SST2, k=16."""
    name, _, count = key.partition("-")
    return f"{name.upper()}, k={count}"


def mean_of(values: dict[str, Any], form: str, by: float = 1.0) -> str:
    """Mean ± standard deviation."""
    if values["mean"] is None:
        return "-"
    shown = [form.format(by * values[key]) for key in ("mean", "stdev") if values[key] is not None]
    return " ± ".join(shown)


def rate_of(column: dict[str, Any]) -> str:
    """The learning rate, for behind a figure."""
    return f" ({column['rate']:g}{'*' * column['at_an_end']})" if column["rate"] is not None else ""


def gap_of(column: dict[str, Any]) -> str:
    """The share of the gap to fine-tuning that is left, for behind a figure."""
    return f" ({column['gap_left']:.2f})" if column["gap_left"] is not None else ""


def shares_of(line: dict[str, Any]) -> list[str]:
    """The share of the budget to each reference's loss."""
    found = [line["passes_to_tezo"], line["passes_to_tezo_adam"]]
    medians = ["never" if share["median"] is None else f"{100 * share['median']:.0f} %" for share in found]
    return [
        f"{median} ({share['reached']} of {share['of']})" if share["of"] else "-"
        for median, share in zip(medians, found, strict=True)
    ]


def figure(name: str) -> str:
    """A figure of `tezo analyze`, with its caption and what it was made on."""
    numbers = json.loads((RESULTS.parents[1] / f"docs/figures/{name}.json").read_text(encoding="utf-8"))
    made = f"`benchmarks/figures.sh {name}`; {machine(numbers)}."
    return f"![{name}](figures/{name}.png)\n\n*{numbers['caption']}* {made}\n"


def head(settings: dict[str, Any]) -> str:
    """A setting, for the head of a column."""
    return f"{SHORT[settings['dtype']]} {settings['batch']} x {settings['length']}"


def machine(result: dict[str, Any]) -> str:
    """What it ran on."""
    versions = result["versions"]
    return f"{result['hardware']}, torch {versions['torch']}, transformers {versions['transformers']}"


def grid(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (heads, *rows)]
    lines.insert(1, "|---" * len(heads) + "|")
    return "\n".join(lines) + "\n"


def read(name: str) -> Any:
    """A committed result."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


TABLES: dict[str, Callable[[], str]] = {
    "demo": demo,
    "step": partial(step, "all-linear"),
    "step-all": partial(step, "all"),
    "step-sizes": step_sizes,
    "memory": memory,
    "evaluation": evaluation,
    "kills": kills,
    "packed": packed,
    "exchange": exchange,
    "encoder": encoder,
    "agreement": agreement,
    "study": study,
    "study-accuracy": study_accuracy,
    "study-short": study_short,
    **{f"figure-{name}": partial(figure, name) for name in FIGURES},
}
