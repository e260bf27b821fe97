"""A hundred first runs with measured settings: does each end better than it began? Beside them the paper's TeZO.

    python benchmarks/first_runs.py --shared FOLDER [--out benchmarks/results] [--workers 2]

Four models, three data sets each, five methods, two seeds, and four more of each of ours; every other setting is left
at its default, but the rate and rho of published methods are measured, as those of `head-feedback`. By default labels
or free text and a causal model have `gauss-newton`, other rows and models `head-feedback`. Beside them TeZO at each of
three rates, without the guard, of which the best by dev loss counts.
More than an hour on two cores. Writes first_runs.json after every run, and goes on with what is missing.
"""

from collections.abc import Iterator
from pathlib import Path

from small_runs import Job, command, measured, model_name, rows

MODELS = {
    "decoder": ("completions", "sst2", "rte"),
    "encoder": ("sst2", "trec", "rte"),
    "opt": ("completions", "sst2", "rte"),
    "roberta": ("sst2", "trec", "rte"),
}
"""Model -> its data sets; completions need a causal model, trec one that is not."""
METHODS = ("head-feedback", "gauss-newton", "tezo", "tezo-cadam", "mezo")
OURS = METHODS[:2]
SEEDS = (0, 1)
PAPER, PAPER_RATES = "tezo, no guard", (3e-5, 1e-4, 3e-4)


def jobs(shared: Path, made: Path) -> Iterator[Job]:
    """All runs."""
    for model, sets in MODELS.items():
        for data in sets:
            common = {"model.name": model_name(model, shared, made), **rows(data, shared)}
            for method in METHODS:
                for seed in (*SEEDS, 2) if method in OURS and data == "sst2" else SEEDS:
                    entry = {"model": model, "data": data, "method": method, "seed": seed, "asked_lr": None}
                    yield entry, {**common, **measured(method), "method.name": method, "train.seed": seed}
            for lr in PAPER_RATES:
                entry = {"model": model, "data": data, "method": PAPER, "seed": 0, "asked_lr": lr}
                own = {"method.name": "tezo", "method.lr": lr, "method.scale": "unit", "train.guard": False}
                yield entry, {**common, **measured("tezo"), **own}


if __name__ == "__main__":
    command(__doc__, "first_runs", jobs, ("opt", "roberta"), paper=PAPER)
