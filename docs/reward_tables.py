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
            f"{run['rho']:g}" if isinstance(run["rho"], float) else run["rho"] or "",
            f"{run['seed']}",
            *(f"{run[when]['reward']:.3f}" for when in ("before", "after")),
            f"{-run['dev_loss']:.3f}",
            f"{said[1] - said[0]:.2f}" if (said := run.get("own_answers")) else "",
            f"{run['kept_step']} of {run['steps']}",
            f"{run['num_forward_passes']}",
        ]
        for run in sorted(results["runs"], key=_order)
    ]
    heads = ["method", "completions", "`rho`", "seed", "before", "after", "dev, at its best", "forgotten, nats a token",
             "step kept", "evaluations in steps"]  # fmt: skip
    settings = "; ".join(
        f"`{method}`: " + ", ".join(f"{key} {value}" for key, value in own.items())
        for method, own in results["settings"].items()
        if own
    )
    return grid(heads, rows) + f"\n{settings}; others are defaults. `{results['command']}`; {machine(results)}.\n"


def _order(run: dict[str, Any]) -> tuple[Any, ...]:
    return run["method"], str(run["rho"]) == "0.001", run["temperature"], run["seed"]


def reward_samples() -> str:
    """What the model writes before and after the first greedy run, for the first test rows."""
    run = next(run for run in read("reward")["runs"] if run["temperature"] == 0 and run["method"] == "es")
    return grid(["before", "after"], [[" ".join(s[k].split()) for k in ("before", "after")] for s in run["samples"]])


TRAINING_PROMPTS = 96
"""Of each task; runs made before they counted their answers have the number for each of these."""


def reward_tasks() -> str:
    """Exact answers to unseen prompts of each task, and what was forgotten."""
    found = read("reward_tasks")
    rows, settings, ran = [], [], {}
    for task, own in found["tasks"].items():
        for name, share in own["untuned"].items():
            rows.append([task, f"untuned, {name}", "", "", f"{100 * share:.1f} %", "", ""])
        for name, run in own["runs"].items():
            said = run["own_answers"]
            other = [run.get("untouched_loss_before"), run.get("untouched_loss")]
            rows.append(
                [
                    task,
                    name,
                    f"{run.get('answers', TRAINING_PROMPTS * run['answers_for_each_training_prompt']):,}",
                    f"{run['before']['reward']:.3f} to {run['after']['reward']:.3f}",
                    f"{100 * run['exact_after']:.1f} %",
                    f"{said[1] - said[0]:.2f}" if None not in said else "not measured",
                    f"{other[0]:.2f} to {other[1]:.2f}" if None not in other else "not measured",
                ]
            )
            ran[machine(run)] = None
        ran_here = {name.partition(",")[0] for name in own["runs"]}
        each = [f"{name}: " + ", ".join(f"{key} {value}" for key, value in said.items()) + "nothing set" * (not said)
                for name, said in own["settings"].items() if name in ran_here | {"all"}]  # fmt: skip
        settings.append(f"{task}: {'; '.join(each)}")
    heads = [
        "task",
        "",
        "answers in steps",
        "reward",
        "exact answers",
        "forgotten, nats a token",
        "loss of an untouched task",
    ]
    command = "`python benchmarks/reward_tasks.py`"
    return grid(heads, rows) + f"\n{found['model']}. {'. '.join(settings)}. {command}; {'; '.join(ran)}.\n"


def agent() -> str:
    """Questions that the agent with a calculator solves before and after."""
    found = read("agent")
    rows, ran = [], {}
    for name, run in found["runs"].items():
        _, engine, _ = name.split(", ")
        solved = f"{100 * found['untuned'][engine]:.1f} to {100 * run['solved_after']:.1f} %"
        reward = " to ".join(f"{run[when]['reward']:.3f}" for when in ("before", "after"))
        rows.append([name, f"{run['rollouts']:,}", solved, reward, f"{run['kept_step']} of {run['steps']}"])
        ran[machine(run)] = None
    heads = ["", "calls of the program", "test questions solved", "reward", "step kept"]
    return grid(heads, rows) + f"\n{found['model']}, nothing set. `{found['command']}`; {'; '.join(ran)}.\n"


def reward_speed() -> str:
    """Tokens a second in the steps of a reward run, and in plain writing by the same engine."""
    found = read("reward_speed")
    rows = [
        [way, *(f"{own[f'tokens_a_second_{where}']:.0f}" for where in ("in_steps", "plainly")), f"{own['ratio']:.2f}"]
        for way, own in found["ways"].items()
    ]
    heads = ["engine", "tokens a second in steps", "plainly", "ratio"]
    how = f"{found['members']} members, {found['prompts']} prompts, {found['turns']} turns"
    return grid(heads, rows) + f"\n{found['model']}, {how}. `python benchmarks/reward_speed.py`; {machine(found)}.\n"
