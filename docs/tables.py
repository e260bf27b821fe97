"""The tables of the documents, drawn from `benchmarks/results`."""

import json
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from drawing import RESULTS, SHORT, grid, head, machine, read
from engine_tables import ENGINE_TABLES
from first_run_tables import FIRST_RUN_TABLES
from gpu_tables import GPU_TABLES
from practice_tables import PRACTICE_TABLES
from reward_tables import agent, reward, reward_samples, reward_speed, reward_tasks
from served_tables import SERVED_TABLES
from study_tables import study, study_accuracy, study_decoder, study_ranked, study_removed, study_short
from when_tables import WHEN_TABLES

from tezo.directions.products import LEAST_ROWS

FIGURES = sorted(path.stem for path in (RESULTS.parents[1] / "docs/figures").glob("*.json"))
STUDIES = ("study", "study-long")
SMALL = "opt-125m"
COSTS = ("costs-memory", "costs-time", "costs-peft-memory", "costs-elements")


def demo(name: str) -> str:
    """Accuracy before and after, seed by seed, beside what is fitted to the untuned model where that was measured."""
    results = read(name)
    runs, fitted = results["runs"], [key for key in ("bias", "probe") if key in results["runs"][0].get("untuned", {})]
    rows = []
    for r in runs:
        metrics = [r["before"], *(r["untuned"][key] for key in fitted), r["after"]]
        seconds = sum(spent["seconds"] for spent in r["phases"].values()) if fitted else r["seconds_stepping"]
        rows.append([f"{r['seed']}", *(f"{100 * own['accuracy']:.1f} %" for own in metrics), f"{r['steps']}"])
        rows[-1].append(f"{seconds:.0f}")
    gain = statistics.median(100 * (r["after"]["accuracy"] - r["before"]["accuracy"]) for r in runs)
    heads = ["seed", "untuned", *(f"untuned, {key}" for key in fitted), "tuned", "steps"]
    table = grid([*heads, "seconds in all" if fitted else "seconds stepping"], rows)
    return table + f"\nMedian gain {gain:.1f} points. `{results['command']}`; {machine(runs[0])}.\n"


def step(targets: str, name: str = "step_cpu", labels: Sequence[str] | None = None, ratio: str = "to_F2") -> str:
    """Time of a step of OPT-125M over that of two plain forward passes; mezo also against its published form.

    Args:
        targets: tuned parameters.
        name: of the results.
        labels: the rows; None: all that were measured.
        ratio: "to_F2", or "to_J2" for one pass over the batch twice.
    """
    chosen = [r for r in read(name) if r["settings"]["targets"] == targets and r["settings"]["model"] == SMALL]
    found = [by_label(result) for result in chosen]
    rows = [[label, *(f"{of[label][ratio]:.2f}" for of in found)] for label in labels or found[0]]
    if labels is None and ratio == "to_F2":
        rows.append(["published:mezo / mezo", *(f"{of['mezo']['speed_up']:.1f}" for of in found)])
    return grid(["", *(head(result["settings"]) for result in chosen)], rows) + "\n" + circumstances(chosen)


def step_sizes(name: str = "step_cpu") -> str:
    """The first setting of `step` for models of several sizes."""
    results = read(name)
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
    has = results[0].get("half_precision") or ["no instructions for half precision"]
    return (
        f"Medians of {rounds[0]} to {rounds[-1]} interleaved rounds; {', '.join(models)}, random weights, rank "
        f"{results[0]['settings']['rank']}. `benchmarks/cpu.sh`; {machine(results[0])}, {', '.join(has)}.\n"
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


def per_example() -> str:
    """Directions of each example beside shared ones: time of a step, peak memory in percent of the model's bytes."""
    steps, memories = read("step_per_example"), read("memory_per_example")
    labels = [row["label"] for row in steps[0]["rows"] if row["to_shared"] is not None]
    rows = []
    for label in labels:
        name = label.removeprefix("per-example:")
        ratios = [f"{by_label(result)[label]['to_shared']:.2f}" for result in steps]
        peaks = [[by_label(result)[key]["over_F"]["percent"] for key in (label, name)] for result in memories]
        rows.append([name, *ratios, *(f"{each - shared:+.1f} %" for each, shared in peaks)])
    heads = ["", *(head(r["settings"]) for r in steps), *(f"memory, {head(r['settings'])}" for r in memories)]
    rounds = sorted({result["rounds"] for result in steps})
    return grid(heads, rows) + (
        f"\nMedians of {rounds[0]} to {rounds[-1]} interleaved rounds; {steps[0]['settings']['model']}, random "
        f"weights, rank {steps[0]['settings']['rank']}. `python benchmarks/per_example.py`; {machine(steps[0])}.\n"
    )


def feedback_memory() -> str:
    """Peak memory of each kind of step on free text, over that of inference, in percent of the model's bytes."""
    made = read("feedback_memory")
    rows = []
    for case in made["rows"]:
        batch = f"{SHORT[case['dtype']]}, {case['rows']} rows up to {case['longest']} tokens"
        inference = case["inference"]
        kinds = ("two-point", "feedback")
        over = [100 * (case[kind]["peak"] - inference["peak"]) / inference["model"] for kind in kinds]
        rows.append([batch, str(inference["parts"]), *(f"{percent:+.1f} %" for percent in over)])
    return grid(["", "parts of the batch", "two-point step", "feedback step"], rows) + (
        f"\nPeak resident set of a fresh process each, over that of a forward pass; {made['model']}, random weights, "
        f"`head-feedback` without its analysis of the inputs. `{made['command']}`; {machine(made)}.\n"
    )


def products() -> str:
    """The weight of a half-precision layer cast first, against the emulated product."""
    result = read("products")
    cases = {(c["dtype"], tuple(c["shape"]), c["rows"]): c["cast_over_emulated"] for c in result["cases"]}
    counts = sorted({rows for _, _, rows in cases})
    rows = [
        [f"{SHORT[dtype]} {shape[0]} x {shape[1]}", *(f"{cases[dtype, shape, count]:.2f}" for count in counts)]
        for dtype, shape in dict.fromkeys((dtype, shape) for dtype, shape, _ in cases)
    ]
    least = ", ".join(f"{SHORT[str(dtype).removeprefix('torch.')]} from {rows}" for dtype, rows in LEAST_ROWS.items())
    return grid(["rows of inputs", *map(str, counts)], rows) + (
        f"\nSeconds with the weight cast first over seconds of the emulated product, medians of {result['rounds']} "
        f"interleaved rounds. Cast: {least}. `python benchmarks/products.py`; {machine(result)}.\n"
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
        at = next(at for at in r["scales"] if at["rho"] == r["recommended_rho"])
        each = 8 * r["linear_bytes"] / r["linear_parameters"]
        losses = [f"{r['run'][when]['loss']:.3f}" if r["run"] else "-" for when in ("before", "after")]
        row = [f"{r['bytes'] / 2**20:.1f}", f"{each:.1f}", f"{at['rho']:g}", f"{at['curvature']:.1%}"]
        rows.append([f"`{r['form']}`", *row, f"{at['rounding']:.1%}", *losses])
    heads = ["base", "MiB", "bits a linear weight", "rho", "curvature there", "rounding", "loss before", "after"]
    run = results[0]["run"]
    return grid(heads, rows) + (
        f"\n{results[0]['name']}, whose embeddings stay in float32 under a packed form; {run['method']}, "
        f"{run['steps']} steps of the routing example at this rho, loss of {run['rows']['test']} test rows, "
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


def reproduced(name: str) -> str:
    """A table in a folder of the results, as `tezo reproduce` wrote it, without its title."""
    text = (RESULTS / name / "table.md").read_text(encoding="utf-8")
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


def figure(name: str) -> str:
    """A figure of `tezo analyze`, with its caption and what it was made on."""
    numbers = json.loads((RESULTS.parents[1] / f"docs/figures/{name}.json").read_text(encoding="utf-8"))
    made = f"`benchmarks/figures.sh {name}`; {machine(numbers)}."
    return f"![{name}](figures/{name}.png)\n\n*{numbers['caption']}* {made}\n"


TABLES: dict[str, Callable[[], str]] = {
    "demo": partial(demo, "demo"),
    "demo-issues": partial(demo, "demo_issues"),
    "step": partial(step, "all-linear"),
    "step-short": partial(
        step, "all-linear", labels=("F2", "tezo", "head-feedback", "tezo-adam", "mezo", "published:mezo")
    ),
    "step-to-J2": partial(step, "all-linear", labels=("tezo", "lozo", "head-feedback", "subzo"), ratio="to_J2"),
    "step-all": partial(step, "all"),
    "step-sizes": step_sizes,
    "step-emulated": partial(step, "all-linear", "step_cpu_emulated"),
    "step-all-emulated": partial(step, "all", "step_cpu_emulated"),
    "step-sizes-emulated": partial(step_sizes, "step_cpu_emulated"),
    "memory": memory,
    "per-example": per_example,
    "feedback-memory": feedback_memory,
    "evaluation": evaluation,
    "products": products,
    "kills": kills,
    "packed": packed,
    "exchange": exchange,
    "encoder": partial(reproduced, "encoder"),
    **{name: partial(reproduced, name) for name in COSTS},
    "agreement": agreement,
    "reward": reward,
    "agent": agent,
    "reward-samples": reward_samples,
    "reward-tasks": reward_tasks,
    "reward-speed": reward_speed,
    **{name: partial(study, name) for name in STUDIES},
    "study-decoder": study_decoder,
    **{f"{name}-accuracy": partial(study_accuracy, name) for name in STUDIES},
    **{f"{name}-short": partial(study_short, name) for name in STUDIES},
    **{f"{name}-ranked": partial(study_ranked, name) for name in STUDIES},
    **{f"{name}-removed": partial(study_removed, name) for name in STUDIES},
    **{f"figure-{name}": partial(figure, name) for name in FIGURES},
    **ENGINE_TABLES,
    **FIRST_RUN_TABLES,
    **GPU_TABLES,
    **PRACTICE_TABLES,
    **SERVED_TABLES,
    **WHEN_TABLES,
}
