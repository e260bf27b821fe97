"""The tables of engines, and of what methods learn of real rows with a real language model."""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

from drawing import grid, machine, read
from practice_tables import probe_level, setfit_level

LORA = "LoRA with gradients"
"""Its name in `real_tasks.json`."""


def engines() -> str:
    """Seconds of a direction's pass over 64 rows, by engine, and what they are of a pass without a change."""
    found = read("engines")
    rows = [
        [
            _way(name),
            f"{own['seconds_changed']:.2f}",
            f"{own['tokens'] / own['seconds_changed']:.0f}",
            f"{own['ratio']:.2f}",
            f"{own['peak'] / 2**20:.0f}",
            f"{own['memory_ratio']:.2f}",
        ]
        for name, own in found["ways"].items()
    ]
    heads = ["", "seconds a direction", "tokens a second", "of a plain pass", "peak MiB", "of a plain pass"]
    what = f"{found['model']}, {found['rows']} rows of SST-2, a change of rank {found['rank']} in all linear layers"
    return grid(heads, rows) + (
        f"\n{what}; medians of {found['passes']} passes, each beside one without a change, a process for each engine. "
        "The peak is that of the process, with Python, torch and transformers; vLLM keeps 1 GiB for texts, and its "
        "plain pass has an adapter of zeros. `python benchmarks/engines.py`; "
        f"{machine(found)}.\n"
    )


def _way(name: str) -> str:
    """Returns the name of an engine and a data type for a table."""
    return name.replace("vllm float32", "vLLM float32, in its client's process (an earlier version)")


def engine_runs() -> str:
    """What the default run on SST-2 comes to in each engine."""
    found = read("engine_runs")
    rows = [
        [
            _way(name),
            *(f"{run[when]['loss']:.3f}" for when in ("before", "after")),
            *(f"{100 * own['accuracy']:.1f} %" for own in (run["before"], run["untuned"]["bias"], run["after"])),
            f"{sum(phase['passes'] for phase in run['phases'].values()):.0f}",
            f"{run['peak_memory'] / 2**20:.0f}",
        ]
        for name, run in found["runs"].items()
    ]
    heads = ["", "test loss before", "after", "accuracy before", "with a bias fitted", "after", "passes", "peak MiB"]
    counts = ", ".join(f"{count} {part}" for part, count in found["rows"].items())
    (first, *_) = found["runs"].values()
    return grid(heads, rows) + (
        f"\n{found['model']}, SST-2, rows: {counts}; `tezo train` with nothing set, one seed. "
        f"`python benchmarks/engine_runs.py --shared FOLDER`; {machine(first)}.\n"
    )


def any_file() -> str:
    """Architecture x type x engine: whether a file was tuned, and the result exported and read back."""
    found = read("any_file")
    trials, kinds = found["trials"], ("F32", "F16", "BF16", "Q8_0", "Q5_0", "Q4_K_M", "Q6_K", "IQ4_NL")
    rows, reasons = [], dict[str, list[str]]()
    for architecture in dict.fromkeys(key.split()[0] for key in trials):
        here, in_torch = (
            {kind: _verdict(trials.get(f"{architecture} {kind} {engine}")) for kind in kinds}
            for engine in ("llama.cpp", "torch")
        )
        tried = {own: [kind for kind in kinds if in_torch[kind] == own] for own in in_torch.values() if own != "-"}
        whole = [own if len(of) == len(kinds) else f"{own} ({', '.join(of)})" for own, of in tried.items()]
        rows.append([architecture, *here.values(), "; ".join(whole) or "-", "-"])
    for key, own in trials.items():
        if why := own.get("refused") or own.get("not exported"):
            architecture, _, engine = key.split()
            of = reasons.setdefault(f"{engine}: {why.replace(f' {architecture} ', ' X ')}", [])
            of += [] if architecture in of else [architecture]
    heads = ["", *(f"llama.cpp {kind}" for kind in kinds), "torch", "vLLM"]
    lines = [f"- {', '.join(names)}: {why}" for why, names in reasons.items()]
    counted = [own for own in trials.values() if "file" in own]
    held = sum(own["holds"] for own in counted)
    refused = sum("refused" in own and key.endswith("llama.cpp") for key, own in trials.items())
    return grid(heads, rows) + (
        f"\n{held} of the {len(counted)} trials that wrote a whole file held; {refused} were refused in llama.cpp. "
        f"The library is {found['library']}; `python benchmarks/any_file.py`; {machine(found)}.\n\nReasons:\n\n"
        + "\n".join(lines)
        + "\n"
    )


def _verdict(trial: dict[str, Any] | None) -> str:
    if trial is None:
        return "-"
    if "not exported" in trial:
        return "tuned"
    if "refused" in trial:
        return "refused"
    way = "yes" if trial["method"] == "gauss-newton" else f"by {trial['method']}"
    return way if trial["holds"] else "no"


def real_tasks() -> str:
    """What methods learn of real rows, beside LoRA: test loss and accuracy, and passes; of several rates the best."""
    found = read("real_tasks")
    tasks = list(dict.fromkeys(name.partition("/")[0] for name in found["runs"]))
    rows = []
    for task in tasks:
        of = {name.partition("/")[2]: run for name, run in found["runs"].items() if name.startswith(f"{task}/")}
        first = next(iter(of.values()))
        known = {"untuned": first["before"]}
        if first.get("untuned"):
            known |= {"untuned, bias fitted": first["untuned"]["bias"], "linear probe": first["untuned"]["probe"]}
        own = [[task, what, "", "0", *_ends([{"after": metrics}])] for what, metrics in known.items()]
        for method in dict.fromkeys(_method(name) for name in of):
            label, runs = at_best_rate(of, method)
            own.append([task, label, f"{len(runs)}", f"{_middle(_passes, runs):.0f}", *_ends(runs)])
        rows += sorted(own, key=lambda row: -float(row[4]))
    heads = ["rows", "", "seeds", "passes of 64 rows", "test loss", "accuracy"]
    sizes = {name.partition("/")[0]: run["rows"] for name, run in found["runs"].items()}
    counts = "; ".join(f"{task}: " + ", ".join(f"{n} {part}" for part, n in own.items()) for task, own in sizes.items())
    ran = dict.fromkeys(machine(run) for run in found["runs"].values())
    return grid(heads, rows) + (
        f"\n{found['model']} in float32; medians of the seeds; {counts} rows; accuracy of tokens where the rows are "
        "texts. Of several rates, the one with the lowest dev loss. Passes include refreshes and searches, but not "
        "evaluations; LoRA's are forward passes, each with a backward pass. `python benchmarks/real_tasks.py`; "
        f"{'; '.join(ran)}.\n"
    )


ABLATED = {
    "as it is": "the default",
    "without the look: Gaussian directions": "without computed directions: Gaussian ones",
    "without outputs: one loss of each pass": "without outputs: one loss for each pass",
    "without leaving rows out of what is foretold": "without leave-one-out predictions",
    "without the last word of dev rows": "without the final decision on dev rows",
    "without trust: no step is measured": "without measuring a step",
}
"""Part in the results -> its words in the table, where they differ."""


def ablations() -> str:
    """Results of gauss-newton with one part removed."""
    found = read("ablations")
    parts: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for name, run in found["runs"].items():
        task, _, part = name.partition(", seed")[0].partition("/")
        parts.setdefault(part, {}).setdefault(task, []).append(run)
    tasks = list(dict.fromkeys(task for of in parts.values() for task in of))
    rows = [
        [
            ABLATED.get(part, part),
            *(
                cell
                for task in tasks
                for cell in (f"{len(of[task])}", f"{_middle(_passes, of[task]):.0f}", *_ends(of[task]))
            ),
        ]
        for part, of in parts.items()
    ]
    heads = ["", *(head for task in tasks for head in (f"{task}: seeds", "passes", "test loss", "accuracy"))]
    every = list(found["runs"].values())
    ran = dict.fromkeys(machine(run) for run in every)
    return grid(heads, rows) + (
        f"\n{found['model']} in float32, two steps; medians of the seeds; rows and passes as above. "
        f"`python benchmarks/ablations.py`; {'; '.join(ran)}.\n"
    )


def _method(name: str) -> str:
    return name.partition(",")[0]


def at_best_rate(of: dict[str, dict[str, Any]], method: str) -> tuple[str, list[dict[str, Any]]]:
    """(name with the rate, the runs of all seeds at it) of a method among some runs, by the dev loss."""
    rates: dict[str, list[dict[str, Any]]] = {}
    for name, run in of.items():
        if _method(name) == method:
            rates.setdefault(name.partition(", seed")[0], []).append(run)
    return min(rates.items(), key=lambda rate: _middle(_dev_loss, rate[1]), default=(method, []))


def _middle(part: Callable[[dict[str, Any]], float], runs: list[dict[str, Any]]) -> float:
    return statistics.median(part(run) for run in runs)


def _ends(runs: list[dict[str, Any]]) -> list[str]:
    return [f"{_middle(_loss, runs):.3f}", f"{_middle(_accuracy, runs):.1f} %"]


def levels(task: str) -> str:
    """A sentence on a task: the untuned model, what is fitted to it, our default, LoRA at its best rate."""
    runs = {name.partition("/")[2]: run for name, run in read("real_tasks")["runs"].items() if name.startswith(task)}
    ours = [run for name, run in runs.items() if _method(name) == "gauss-newton"]
    lora = at_best_rate(runs, LORA)[1]
    fitted = {what: _accuracy({"after": ours[0]["untuned"][what]}) for what in ("bias", "probe")}
    said = [
        f"Accuracy on {ours[0]['rows']['test']} test rows: untuned {_accuracy({'after': ours[0]['before']}):.1f} %;",
        f"untuned with a fitted bias for each label {fitted['bias']:.1f} %; a linear probe of the last states "
        f"{fitted['probe']:.1f} %{probe_level(task)};",
        f"the default {_middle(_accuracy, ours):.1f} % in {_middle(_passes, ours):.0f} passes of 64 rows, median of",
        f"{len(ours)} seeds; {LORA} {_middle(_accuracy, lora):.1f} % in {_middle(_passes, lora):.0f} passes, each",
        "forward and backward.",
        *filter(None, [setfit_level(task)]),
        f"`python benchmarks/real_tasks.py`; {machine(lora[0])}.",
    ]
    return " ".join(said) + "\n"


def _loss(run: dict[str, Any]) -> float:
    loss: float = run["after"]["loss"]
    return loss


def _accuracy(run: dict[str, Any]) -> float:
    after = run["after"]
    return 100 * float(after["accuracy"] if "accuracy" in after else after["token_accuracy"])


def _dev_loss(run: dict[str, Any]) -> float:
    loss: float = run["dev_loss"]
    return loss


def _passes(run: dict[str, Any]) -> float:
    passes: float = run["passes_of_64_rows"]
    return passes


ENGINE_TABLES: dict[str, Callable[[], str]] = {
    "any-file": any_file,
    "engines": engines,
    "engine-runs": engine_runs,
    "real-tasks": real_tasks,
    "ablations": ablations,
    "levels": partial(levels, "issues"),
}
