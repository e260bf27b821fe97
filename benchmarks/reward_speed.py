"""Tokens a second in the steps of a reward run, against plain writing by the same engine (135M parameters).

    python benchmarks/reward_speed.py [--only PART ...] [--out benchmarks/results]

The task is `form` of reward_tasks.py. A step has eight members write to eight prompts, scores their answers and moves
the model; plain writing answers as many prompts without a change, and has nothing scored. No answer ends before its
longest length. Each engine has a process of its own, which does both in turn.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import reward_tasks
from engines import gguf_files
from tezo_studies.bench.result_files import commit

from tezo.models.kinds import IN_MEMORY
from tezo.runs.environment import hardware, versions
from tezo.system.progress import quiet_libraries
from tezo.tasks.rewards import MOST_WRITING, RewardRows
from tezo.tasks.splits import read_splits
from tezo.training.job import Job, prepare
from tezo.training.settings import parse_config

TASK = reward_tasks.TASKS["form"]
MEMBERS, PROMPTS, TURNS = 8, 8, 3


def job_of(model: str, engine: str) -> Job:
    """A run of `es` in an engine."""
    parts = {part: [*rows] for part, rows in TASK.rows().items()}
    config = parse_config(
        {
            "model": {"name": model, "engine": engine},
            "data": dict.fromkeys(parts, IN_MEMORY),
            "method": {"name": "es", "num_directions": MEMBERS, "rho": 7e-4},
            "train": {"reward": IN_MEMORY, "max_new_tokens": TASK.max_new_tokens, "batch_size": PROMPTS},
        }
    )
    return prepare(config, rows=read_splits(config.data, parts), score=TASK.score)


def timed(job: Job) -> dict[str, list[float]]:
    """Tokens a second of steps and of plain writing, in turn, after one of each."""
    reward = job.reward
    assert reward is not None
    written: list[int] = []
    write = type(reward).written

    def counted(*given: Any, **named: Any) -> list[list[list[int]]]:
        found = write(*given, **named)
        written.extend(len(tokens) for own in found for tokens in own)
        return found

    type(reward).written = counted  # type: ignore[method-assign]
    marks: dict[int, str] = job.objective.ends.marks  # type: ignore[attr-defined]
    marks.clear()  # all answers are of one length, however far the steps have come
    rows = job.train[: MEMBERS * PROMPTS]

    def plain() -> None:
        reward.own_answers(job.model, job.objective, rows, MOST_WRITING)

    found: dict[str, list[float]] = {"steps": [], "plain": []}
    for turn in range(TURNS + 1):
        own = [job.train[(PROMPTS * turn + i) % len(job.train)] for i in range(PROMPTS)]
        closure = RewardRows(reward, job.model, job.objective, own, turn)
        for name, run in (("steps", lambda made=closure: job.optimizer.step(made)), ("plain", plain)):
            written.clear()
            begun = time.perf_counter()
            run()
            if turn:
                found[name].append(sum(written) / (time.perf_counter() - begun))
    return found


def main() -> None:
    """Runs all processes, and writes reward_speed.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="parts of the names of the ways to measure anew")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    quiet_libraries()
    if chosen.child:
        print("RESULT", json.dumps(timed(job_of(*chosen.child))))
        return
    with tempfile.TemporaryDirectory() as folder:
        files = gguf_files(Path(folder))
        ways = {
            "torch float32": (reward_tasks.MODEL, "torch"),
            "llama.cpp Q4_1": (str(files["Q4_1"]), "llama.cpp"),
            "llama.cpp F16": (str(files["F16"]), "llama.cpp"),
        }
        ways = {name: own for name, own in ways.items() if any(part in name for part in chosen.only)}
        found: dict[str, dict[str, list[float]]] = {}
        for name, (model, engine) in ways.items():
            done = subprocess.run(
                [sys.executable, __file__, "--child", model, engine], capture_output=True, text=True, check=False
            )
            lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
            if not lines:
                raise SystemExit(f"{name}: {done.stderr[-2000:]}")
            found[name] = json.loads(lines[-1].removeprefix("RESULT "))
            print(name, found[name], flush=True)
    rows = {
        name: {
            "tokens_a_second_in_steps": statistics.median(own["steps"]),
            "tokens_a_second_plainly": statistics.median(own["plain"]),
            "ratio": statistics.median(s / p for s, p in zip(own["steps"], own["plain"], strict=True)),
            "commit": commit(),
        }
        for name, own in found.items()
    }
    about = {"model": reward_tasks.MODEL, "members": MEMBERS, "prompts": PROMPTS, "turns": TURNS}
    path = chosen.out / "reward_speed.json"
    known = json.loads(path.read_text(encoding="utf-8"))["ways"] if path.exists() else {}
    about |= {"hardware": hardware(), "versions": versions(), "ways": known | rows}
    path.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
