"""The tables of docs/rewards.md."""

from typing import Any

from drawing import grid, machine, read


def reward() -> str:
    """The mean reward of the test rows before and after each run."""
    results = read("reward")
    rows = [
        [
            f"`{run['method']}`",
            "greedy" if run["temperature"] == 0 else f"sampled at {run['temperature']:g}",
            run["rho"] if run["rho"] == "auto" else f"{run['rho']:g}",
            f"{run['seed']}",
            *(f"{run[when]['reward']:.3f}" for when in ("before", "after")),
            f"{run['kept_step']} of {run['steps']}",
            f"{run['num_forward_passes']}",
        ]
        for run in sorted(results["runs"], key=_order)
    ]
    heads = ["method", "completions", "`rho`", "seed", "before", "after", "step kept", "evaluations in steps"]
    settings = "; ".join(
        f"`{method}`: " + ", ".join(f"{key} {value}" for key, value in own.items())
        for method, own in results["settings"].items()
    )
    return grid(heads, rows) + f"\n{settings}; others are defaults. `{results['command']}`; {machine(results)}.\n"


def _order(run: dict[str, Any]) -> tuple[Any, ...]:
    return run["method"], str(run["rho"]) == "0.001", run["temperature"], run["seed"]


def reward_samples() -> str:
    """What the model writes before and after the first greedy run, for the first test rows."""
    run = next(run for run in read("reward")["runs"] if run["temperature"] == 0 and run["method"] == "es")
    return grid(["before", "after"], [[" ".join(s[k].split()) for k in ("before", "after")] for s in run["samples"]])
