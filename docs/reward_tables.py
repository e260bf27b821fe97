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


def reward_form() -> str:
    """JSON with given keys: the share of exact answers to unseen prompts, what was forgotten, and the speed."""
    found = read("reward_form")
    rows = [[f"untuned, {name}", "", f"{100 * share:.1f} %", "", ""] for name, share in found["untuned"].items()]
    for name, run in found["runs"].items():
        own = run["own_answers"]
        rows.append(
            [
                name,
                f"{run['before']['reward']:.3f} to {run['after']['reward']:.3f}",
                f"{100 * run['exact_after']:.1f} %",
                f"{own[1] - own[0]:.2f}",
                f"{run['answers_a_second_in_steps']:.1f}, {run['plain_answers_a_second']:.1f}",
            ]
        )
    heads = ["", "reward", "exact answers", "forgotten, nats a token", "answers a second in steps, plainly"]
    settings = "; ".join(
        f"{name}: " + ", ".join(f"{key} {value}" for key, value in own.items())
        for name, own in found["settings"].items()
    )
    ran = dict.fromkeys(machine(run) for run in found["runs"].values())
    return (
        grid(heads, rows) + f"\n{found['model']}. {settings}. `python benchmarks/reward_form.py`; {'; '.join(ran)}.\n"
    )
