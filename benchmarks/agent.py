"""An agent with a calculator (examples/agent) learns to use it: questions solved before and after, nothing set.

    python benchmarks/agent.py [--engines torch llama.cpp] [--methods policy-gradient es] [--seeds 0]
        [--out benchmarks/results] [--threads 2]

The agent is a program of two calls that asks a server of the run by the name of a model. Questions of the test rows
have other names than those of the training rows, and no question is in both. Writes agent.json after each run, and
leaves out runs that it has.
"""

import argparse
import itertools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tezo_studies.bench.result_files import commit

import tezo
from tezo.runs.environment import hardware, versions
from tezo.system.progress import quiet_libraries

MODEL = "embedded:smollm2-135m"
EXAMPLE = Path(__file__).parents[1] / "examples/agent"
MOST = 12
"""The most tokens of an answer of the agent's model."""


def solved(run: tezo.Run) -> float:
    """The share of test questions that the agent solves."""
    found = run.evaluate(str(EXAMPLE / "test.jsonl"), reward=f"{EXAMPLE / 'agent.py'}:solved")
    return float(found["reward"])


def measured(engine: str, method: str, seed: int) -> dict[str, Any]:
    """One run."""
    begun = time.monotonic()
    rows = {part: str(EXAMPLE / f"{part}.jsonl") for part in ("dev", "test")}
    with tempfile.TemporaryDirectory() as folder:
        run = tezo.train(
            MODEL, str(EXAMPLE / "train.jsonl"), **rows, reward=f"{EXAMPLE / 'agent.py'}:score", serve=True,
            method=method, seed=seed, max_new_tokens=MOST, output=Path(folder) / "run", progress=False,
            settings={"model.engine": engine},
        )  # fmt: skip
        seconds = time.monotonic() - begun
        lines = (Path(folder) / "run/scored.jsonl").read_text(encoding="utf-8").splitlines()
        summary, after = run.summary, solved(run)
        found = {
            "before": summary["before"], "after": summary["after"], "solved_after": after,
            "kept_step": summary["kept_step"], "steps": summary["steps"], "seconds": round(seconds),
            "rollouts": len(lines), "own_answers": summary["own_answers"], "verdict": summary["verdict"],
        }  # fmt: skip
        run.close()
    about = {"hardware": hardware(), "versions": versions(("tezo", "torch", "transformers")), "commit": commit()}
    return found | about


def untuned(engine: str) -> float:
    """The same share of the untuned model, as a run that does not move it has it before its step."""
    with tempfile.TemporaryDirectory() as folder:
        run = tezo.train(
            MODEL, str(EXAMPLE / "train.jsonl"), test=str(EXAMPLE / "test.jsonl"), dev=str(EXAMPLE / "dev.jsonl"),
            reward=f"{EXAMPLE / 'agent.py'}:solved", serve=True, method="es", rho=1e-3, lr=0.0, steps=1, batch_size=1,
            num_directions=2, max_new_tokens=MOST, output=Path(folder) / "run", progress=False,
            settings={"model.engine": engine},
        )  # fmt: skip
        found = float(run.summary["before"]["reward"])
        run.close()
    return found


def main() -> None:
    """Makes the runs that are missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="*", default=["torch", "llama.cpp"])
    parser.add_argument("--methods", nargs="*", default=["policy-gradient", "es"])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    quiet_libraries()
    path = given.out / "agent.json"
    for engine, method, seed in itertools.product(given.engines, given.methods, given.seeds):
        done = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"untuned": {}, "runs": {}}
        called = f"{method}, {engine}, seed {seed}"
        if called in done["runs"]:
            continue
        done |= {"model": MODEL, "command": "python benchmarks/agent.py"}
        if engine not in done["untuned"]:
            done["untuned"][engine] = untuned(engine)
        done["runs"][called] = measured(engine, method, seed)
        path.write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")
        print(called, done["untuned"][engine], done["runs"][called], flush=True)


if __name__ == "__main__":
    main()
