"""What `tezo train --dry-run` prints."""

from typing import TYPE_CHECKING, Any

from tezo.cli.common import print_json
from tezo.progress.status_line import duration_text

if TYPE_CHECKING:
    from tezo.training.configuration.recipe import Config


def print_dry_run(config: "Config", *, json: bool) -> None:
    """Prepares a run, times a pass, and prints what the run would do; nothing is written."""
    from tezo.training.forecasts.dry_run import dry_run

    found = dry_run(config)
    if json:
        print_json(found)
        return
    for line in _lines(found):
        print(line)


def _lines(found: dict[str, Any]) -> list[str]:
    rows, parameters = found["rows"], found["parameters"]
    memory = {name: _mebibytes(value) for name, value in found["memory"].items()}
    seconds = found["seconds"]
    steps = [f"{count} {kind} ({seconds[f'{kind} step']:.3f} s each)" for kind, count in found["steps"].items()]
    times = {name: duration_text(seconds[name]) for name in ("run", "evaluations", "preparation", "measurements")}
    measured = [
        f"measured     {key} at the start, by up to {count} forward pass{'es' * (count > 1)}"
        for key, count in found["measured"].items()
    ]
    return [
        f"{found['method']} on {found['model']}; nothing is written",
        f"rows         {rows['train']} training, {rows['dev']} dev, {rows['test']} test",
        f"parameters   {parameters['trained']:,} of {parameters['total']:,} are trained",
        *_by_way(found["plan"]),
        f"steps        {', '.join(steps)}; {found['num_forward_passes']} forward passes",
        *measured,
        f"memory       {memory['peak']} at the peak; the model {memory['model']}, fixed factors {memory['factors']}",
        f"time         up to {times['run']}, of it preparation {times['preparation']}, measurements "
        f"{times['measurements']} and evaluations {times['evaluations']}, by one pass of "
        f"{seconds['timed pass']:.3f} s; {found['hardware']}",
        *(f"note: {notice}" for notice in found["notices"]),
    ]


def _by_way(plan: list[dict[str, Any]]) -> list[str]:
    """A line for each way in which parameters are perturbed: how many, and their ranks."""
    ways: dict[str, list[dict[str, Any]]] = {}
    for row in plan:
        if row["trained"]:
            ways.setdefault(row["moved"], []).append(row)
    lines = []
    for way, rows in ways.items():
        ranks = sorted({row["rank"] for row in rows if row["rank"] is not None})
        span = f" of rank {ranks[0]}" + (f" to {ranks[-1]}" if len(ranks) > 1 else "") if ranks else ""
        lines.append(f"perturbed    {len(rows)} parameters{span}: {way}")
    return lines


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
