"""Rewards that no gradient has: a language model of 135M parameters learns to write JSON, and to add.

    python benchmarks/reward_tasks.py [--tasks form sums] [--methods policy-gradient es head-feedback]
        [--engines torch llama.cpp] [--seeds 0] [--gguf FILE] [--out benchmarks/results] [--threads 2]

form: prompts say who lives where, in four forms, and ask for JSON, not for its keys; the score is 1 for valid JSON with
the keys name and city and no others, and parts of it earn parts. sums: what two numbers up to twenty are together; the
score is 1 for an answer whose last number is right, and at most a half for one that is close. Test prompts have other
pairs. Beside the share of exact answers before and after: the best of 30 sampled answers of the untuned model; what the
model has forgotten, by its own answers and by its loss on a task that the run has not seen (the labels of
examples/issues); and answers a second in steps and in plain writing, by the same engine. `--gguf` is a file for
llama.cpp in place of the embedded one; its name stands behind the engine's. Writes reward_tasks.json after each
run, and leaves out runs that it has.
"""

import argparse
import itertools
import json
import random
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tezo_studies.bench.result_files import commit

import tezo
from tezo.models.kinds import IN_MEMORY
from tezo.models.loading import LoadedModel, load_model
from tezo.runs.environment import hardware, versions
from tezo.system.progress import quiet_libraries
from tezo.tasks.evaluation import measure
from tezo.tasks.row_files import DataConfig, file_rows
from tezo.tasks.splits import read_splits
from tezo.training.job import prepare
from tezo.training.settings import parse_config

MODEL = "embedded:smollm2-135m"
ISSUES = Path(__file__).parents[1] / "examples/issues"
PEOPLE = (
    "Tom Lily Ben Sue Max Mia Sam Anna Jack Lucy Tim Emma Leo Amy Bob Jane Nick Sara Joe Molly Dan Kate Fred Rose Paul "
    "Nina Carl Eva Hugo Ida Karl Lena"
)
TOWNS = "Oslo Rome Paris Lima Cairo Delhi Tokyo Quito Berlin Madrid Dublin Vienna"
FORMS = ("{} lives in {}.", "The home of {} is {}.", "{} moved to {} last year.", "You will find {} in {}.")
PARTS = {"train": 96, "dev": 24, "test": 96}
EQUAL: dict[str, Any] = {"num_directions": 12, "batch_size": 8}
METHODS: dict[str, dict[str, Any]] = {
    "policy-gradient": {},
    "es by default": {},
    "es": EQUAL | {"steps": 60, "weight_decay": 0.02},
    "es of 20 steps": EQUAL | {"steps": 20, "weight_decay": 0.02},
    "es of 20 steps at twice the rate": EQUAL | {"steps": 20, "weight_decay": 0.02, "lr": 6.0},
    "es of 20 steps, 24 members, at twice the rate": {
        "num_directions": 24,
        "batch_size": 4,
        "steps": 20,
        "weight_decay": 0.02,
        "lr": 6.0,
    },
    "es without decay": EQUAL | {"steps": 60, "weight_decay": 0.0},
    "es of 15 steps without decay": EQUAL | {"steps": 15, "weight_decay": 0.0},
    "es without decay at a constant rate": EQUAL | {"steps": 60, "weight_decay": 0.0, "schedule": "constant"},
    "head-feedback": EQUAL | {"steps": 30},
}
"""Method -> its settings. es of 60 steps has as many answers as head-feedback, which scores both signs."""
TRIES = 30
"""Answers of the untuned model of which the best counts."""
KEYS = {"name", "city"}
Rows = dict[str, list[dict[str, Any]]]


def form(prompt: str, completion: str, row: dict[str, Any]) -> float:
    """1 for JSON with these keys and no others; less for parts of it."""
    del prompt, row
    text = completion.strip().removeprefix("```json").removesuffix("```").strip()
    try:
        found = json.loads(text)
    except ValueError:
        return 0.1 * text.startswith("{") + 0.1 * ("}" in text) + sum(0.05 for key in KEYS if f'"{key}"' in text)
    if not isinstance(found, dict):
        return 0.2
    more = set(found) - KEYS
    return 1.0 if set(found) == KEYS else 0.3 + 0.2 * len(KEYS & set(found)) - 0.1 * min(2, len(more))


def form_rows() -> Rows:
    """Part -> prompts about people in towns."""
    draw = random.Random(0)
    pairs = [(name, town) for name in PEOPLE.split() for town in TOWNS.split()]
    draw.shuffle(pairs)

    def row(pair: tuple[str, str]) -> dict[str, Any]:
        text = f"{draw.choice(FORMS).format(*pair)} Who lives where? Answer in JSON."
        return {"messages": [{"role": "user", "content": text}]}

    return parts_of([row(pair) for pair in pairs])


def total(prompt: str, completion: str, row: dict[str, Any]) -> float:
    """1 where the last number of an answer is the sum; less, the farther it is off."""
    del prompt
    numbers = re.findall(r"\d+", completion)
    off = abs(int(numbers[-1][:9]) - row["sum"]) if numbers else 10
    return 1.0 if off == 0 else 0.5 * max(0.0, 1 - off / 10)


def sum_rows() -> Rows:
    """Part -> prompts about pairs of numbers up to twenty."""
    pairs = list(itertools.product(range(1, 21), repeat=2))
    random.Random(0).shuffle(pairs)
    texts = [(f"What is {a} + {b}? Answer with the number.", a + b) for a, b in pairs]
    return parts_of([{"messages": [{"role": "user", "content": text}], "sum": found} for text, found in texts])


def parts_of(every: list[dict[str, Any]]) -> Rows:
    """Part -> its rows, of all in order."""
    rows = iter(every)
    return {part: list(itertools.islice(rows, count)) for part, count in PARTS.items()}


@dataclass(frozen=True)
class Task:
    """Prompts, what scores their answers, and the longest answer in tokens."""

    rows: Callable[[], Rows]
    score: Callable[[str, str, dict[str, Any]], float]
    max_new_tokens: int

    def exact(self, prompt: str, completion: str, row: dict[str, Any]) -> float:
        """Whether an answer is right."""
        return float(self.score(prompt, completion, row) == 1.0)


TASKS = {"form": Task(form_rows, form, 28), "sums": Task(sum_rows, total, 16)}


def measured(task: Task, method: str, engine: str, model: str, seed: int) -> dict[str, Any]:
    """One run, and what it is compared with."""
    made, begun = task.rows(), time.monotonic()
    named = {"model.engine": engine} if engine != "torch" else {}
    common = {"progress": False, "method": method.partition(" ")[0], "settings": named}
    with tempfile.TemporaryDirectory() as folder:
        run = tezo.train(model, made["train"], dev=made["dev"], test=made["test"], reward=task.score, seed=seed,
                         output=Path(folder) / "run", max_new_tokens=task.max_new_tokens,
                         **METHODS[method], **common)  # fmt: skip
        seconds = time.monotonic() - begun
        lines = (Path(folder) / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
        last = [line for line in map(json.loads, lines) if "seconds" in line][-1]
        summary = run.summary
        written = summary["num_forward_passes"] * summary["batch_size"] * last["step"] // summary["steps"]
        started = time.perf_counter()
        after = run.evaluate(made["test"], reward=task.exact)["reward"]
        plain = len(made["test"]) / (time.perf_counter() - started)
        found = {
            "before": summary["before"], "after": summary["after"], "exact_after": after,
            "untouched_loss": untouched(run.loaded), "own_answers": summary["own_answers"],
            "kept_step": summary["kept_step"], "steps": summary["steps"],
            "answers_a_second_in_steps": round(written / last["seconds"], 2), "plain_answers_a_second": round(plain, 2),
            "answers": written,
            "answers_for_each_training_prompt": round(written / len(made["train"])), "seconds": round(seconds),
            "verdict": summary["verdict"],
        }  # fmt: skip
        run.close()
    about = {"hardware": hardware(), "versions": versions(("tezo", "torch", "transformers")), "commit": commit()}
    return found | about


def untouched(loaded: LoadedModel) -> float:
    """The loss of a model on a task that no run here has seen: the labels of examples/issues."""
    rows = file_rows(ISSUES / "test.jsonl", "data")
    metrics, _ = measure(DataConfig(train=str(ISSUES / "train.jsonl")), loaded, rows, batch_size=16, seed=0)
    return metrics["loss"]


@cache
def untouched_before(model: str) -> float:
    """The same of an untuned model."""
    return untouched(load_model(model))


def untuned(task: Task) -> dict[str, float]:
    """The share of exact answers of the untuned model: greedy ones, and the best of so many sampled at 1."""
    settings = {
        "model": {"name": MODEL},
        "data": dict.fromkeys(("train", "dev", "test"), IN_MEMORY),
        "method": {"name": "es", "rho": 1e-3},
        "train": {"reward": IN_MEMORY, "max_new_tokens": task.max_new_tokens},
    }
    made = {part: [*own] for part, own in task.rows().items()}
    shares = {}
    for name, temperature, count in (("greedy", 0.0, 1), (f"best of {TRIES}", 1.0, TRIES)):
        settings["train"]["temperature"] = temperature
        config = parse_config(settings)
        job = prepare(config, rows=read_splits(config.data, made), score=task.exact, measuring=False)
        assert job.reward is not None
        right = [False] * len(job.test)
        with torch.no_grad():
            for step in range(count):
                ((_, scores),) = job.reward.scored(job.model, job.objective, job.test, 48, step, 1)
                right = [known or own.value == 1.0 for known, own in zip(right, scores, strict=True)]
        job.optimizer.close()
        shares[name] = sum(right) / len(right)
    return shares


def main() -> None:
    """Makes the runs that are missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="*", default=[*TASKS])
    parser.add_argument("--methods", nargs="*", default=[*METHODS])
    parser.add_argument("--engines", nargs="*", default=["torch", "llama.cpp"])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--gguf")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    quiet_libraries()
    path = given.out / "reward_tasks.json"
    for name, seed, method, engine in itertools.product(given.tasks, given.seeds, given.methods, given.engines):
        done = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"model": MODEL, "tasks": {}}
        settings = METHODS | {"all": {"max_new_tokens": TASKS[name].max_new_tokens}}
        own = done["tasks"].setdefault(name, {"untuned": {}, "runs": {}})
        own["settings"] = settings
        file = given.gguf if engine == "llama.cpp" else None
        called = f"{method}, {engine}{f' of {Path(file).stem}' if file else ''}, seed {seed}"
        if called in own["runs"]:
            continue
        own["untuned"] = own["untuned"] or untuned(TASKS[name])
        found = measured(TASKS[name], method, engine, file or MODEL, seed)
        own["runs"][called] = found | {"untouched_loss_before": untouched_before(file or MODEL)}
        path.write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")
        print(name, called, found, flush=True)


if __name__ == "__main__":
    main()
