"""A reward that no gradient has: a language model of 135M parameters learns to write JSON with given keys.

    python benchmarks/reward_form.py [--methods es head-feedback] [--engines torch llama.cpp] [--seeds 0]
        [--out benchmarks/results] [--threads 2]

Prompts say who lives where, in four forms, and ask for JSON, not for its keys; the score is 1 for valid JSON with the
keys name and city and no others, and parts of it earn parts. Test prompts have people and towns in other pairs. Beside
the share of exact answers before and after: the best of 30 sampled answers of the untuned model (a run writes 60
for each training prompt); what the model has forgotten; and answers a second in steps and in plain writing, by
the same engine. Writes reward_form.json after each run, and leaves out runs that it has.
"""

import argparse
import itertools
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tezo_studies.bench.result_files import commit

import tezo
from tezo.models.kinds import IN_MEMORY
from tezo.runs.environment import hardware, versions
from tezo.system.progress import quiet_libraries
from tezo.tasks.splits import read_splits
from tezo.training.config import parse_config
from tezo.training.job import prepare

MODEL = "embedded:smollm2-135m"
PEOPLE = (
    "Tom Lily Ben Sue Max Mia Sam Anna Jack Lucy Tim Emma Leo Amy Bob Jane Nick Sara Joe Molly Dan Kate Fred Rose Paul "
    "Nina Carl Eva Hugo Ida Karl Lena"
)
TOWNS = "Oslo Rome Paris Lima Cairo Delhi Tokyo Quito Berlin Madrid Dublin Vienna"
FORMS = ("{} lives in {}.", "The home of {} is {}.", "{} moved to {} last year.", "You will find {} in {}.")
ASKED = "Who lives where? Answer in JSON."
PARTS = {"train": 96, "dev": 24, "test": 96}
METHODS: dict[str, dict[str, Any]] = {
    "es": {"steps": 60, "num_directions": 12},
    "es at a constant rate": {"steps": 60, "num_directions": 12, "schedule": "constant"},
    "head-feedback": {"steps": 30, "num_directions": 12},
}
"""Method -> its settings: as many answers in all of one as of the other, for head-feedback scores both signs."""
EVALUATIONS = 720
BOTH: dict[str, Any] = {"batch_size": 8, "max_new_tokens": 28}
TRIES = 30
"""Answers of the untuned model of which the best counts."""
KEYS = {"name", "city"}


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


def exact(prompt: str, completion: str, row: dict[str, Any]) -> float:
    """Whether the answer is of the form."""
    return float(form(prompt, completion, row) == 1.0)


def rows() -> dict[str, list[dict[str, Any]]]:
    """Part -> its rows."""
    draw = random.Random(0)
    pairs = [(name, town) for name in PEOPLE.split() for town in TOWNS.split()]
    draw.shuffle(pairs)
    found, start = {}, 0
    for part, count in PARTS.items():
        texts = [draw.choice(FORMS).format(*pair) for pair in pairs[start : start + count]]
        found[part] = [{"messages": [{"role": "user", "content": f"{text} {ASKED}"}]} for text in texts]
        start += count
    return found


def measured(method: str, engine: str, seed: int) -> dict[str, Any]:
    """One run, and what it is compared with."""
    made, begun = rows(), time.monotonic()
    named = {"model.engine": engine} if engine != "torch" else {}
    common = {"progress": False, "method": method.partition(" ")[0], "settings": named}
    with tempfile.TemporaryDirectory() as folder:
        run = tezo.train(MODEL, made["train"], dev=made["dev"], test=made["test"], reward=form, seed=seed,
                         output=Path(folder) / "run", **METHODS[method], **BOTH, **common)  # fmt: skip
        seconds = time.monotonic() - begun
        lines = (Path(folder) / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
        last = [line for line in map(json.loads, lines) if "seconds" in line][-1]
        written = EVALUATIONS * BOTH["batch_size"] * last["step"] // METHODS[method]["steps"]
        started = time.perf_counter()
        after = run.evaluate(made["test"], reward=exact)["reward"]
        plain = len(made["test"]) / (time.perf_counter() - started)
        summary = run.summary
        found = {
            "before": summary["before"], "after": summary["after"], "exact_after": after,
            "own_answers": summary["own_answers"], "kept_step": summary["kept_step"], "steps": summary["steps"],
            "answers_a_second_in_steps": round(written / last["seconds"], 2), "plain_answers_a_second": round(plain, 2),
            "answers_for_each_training_prompt": round(written / len(made["train"])), "seconds": round(seconds),
            "verdict": summary["verdict"],
        }  # fmt: skip
        run.close()
    about = {"hardware": hardware(), "versions": versions(("tezo", "torch", "transformers")), "commit": commit()}
    return found | about


def untuned(tries: int) -> dict[str, float]:
    """The share of exact answers of the untuned model: greedy ones, and the best of so many sampled at 1."""
    settings = {
        "model": {"name": MODEL},
        "data": dict.fromkeys(("train", "dev", "test"), IN_MEMORY),
        "method": {"name": "es", "rho": 1e-3},
        "train": {"reward": IN_MEMORY, "max_new_tokens": BOTH["max_new_tokens"]},
    }
    made = {part: [*own] for part, own in rows().items()}
    shares = {}
    for name, temperature, count in (("greedy", 0.0, 1), (f"best of {tries}", 1.0, tries)):
        settings["train"]["temperature"] = temperature
        config = parse_config(settings)
        job = prepare(config, rows=read_splits(config.data, made), score=exact, measuring=False)
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
    parser.add_argument("--methods", nargs="*", default=[*METHODS])
    parser.add_argument("--engines", nargs="*", default=["torch", "llama.cpp"])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    quiet_libraries()
    path = given.out / "reward_form.json"
    done = (
        json.loads(path.read_text(encoding="utf-8"))
        if path.exists()
        else {"settings": METHODS | {"both": BOTH}, "runs": {}}
    )
    if "untuned" not in done:
        done["untuned"] = untuned(TRIES)
        print(done["untuned"], flush=True)
    for seed in given.seeds:
        for method, engine in itertools.product(given.methods, given.engines):
            name = f"{method}, {engine}, seed {seed}"
            if name in done["runs"]:
                continue
            done["runs"][name] = measured(method, engine, seed)
            path.write_text(json.dumps(done | {"model": MODEL}, indent=1) + "\n", encoding="utf-8")
            print(name, done["runs"][name], flush=True)


if __name__ == "__main__":
    main()
