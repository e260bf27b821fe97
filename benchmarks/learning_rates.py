"""Is the learning rate that a run chooses for itself as good as the best of a grid? Twenty settings, 160 short runs.

    python benchmarks/learning_rates.py --shared FOLDER [--out benchmarks/results] [--workers 2]

Each setting is run for 200 steps with the default rate (auto) and with each of seven rates, a factor of about 3 apart,
without the guard. Compared is the dev loss of the kept step. About two hours of one core. Writes learning_rates.json
after every run, and goes on with what is missing.
"""

from collections.abc import Iterator
from pathlib import Path

from small_runs import Job, command, measured, model_name, rows

STEPS = 200
GRID = (3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3)
METHODS = ("tezo", "tezo-m", "tezo-adam", "tezo-cadam", "lozo", "head-feedback", "mezo")
SETTINGS = [
    *(("decoder", "completions", method) for method in METHODS),
    *(("decoder", "sst2", method) for method in ("tezo", "tezo-cadam", "head-feedback", "mezo")),
    *(("encoder", "trec", method) for method in ("tezo", "tezo-cadam", "head-feedback", "lozo")),
    *(("encoder", "sst2", method) for method in ("tezo", "tezo-m", "head-feedback")),
    *(("roberta", "sst2", method) for method in ("tezo-adam", "mezo")),
]


def jobs(shared: Path, made: Path) -> Iterator[Job]:
    """All runs."""
    for model, data, method in SETTINGS:
        for lr in (None, *GRID):
            entry = {"model": model, "data": data, "method": method, "seed": 0, "asked_lr": lr}
            own = measured(method) | ({} if lr is None else {"method.lr": lr, "train.guard": False})
            yield entry, {
                "model.name": model_name(model, shared, made), "method.name": method, "train.steps": STEPS, **own,
                **rows(data, shared),
            }  # fmt: skip


if __name__ == "__main__":
    command(__doc__, "learning_rates", jobs, ("roberta",), steps=STEPS, grid=GRID)
