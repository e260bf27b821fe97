"""The worked example of docs/rewards.md: a decoder of 260K parameters, and the share of happy words in its stories.

    python benchmarks/reward.py --shared FOLDER [--json benchmarks/results/reward.json]

One run for each method, way to decode, perturbation scale and seed, a minute or two each; about as many evaluations of
the reward in all of them, but twice as many where weight decays are compared. "By ranks" is `es` whose members count by
their rank instead of how far they are above the mean; the library does not have it. Does what the file does not have.
"""

import argparse
import json
import runpy
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tezo_studies.bench.result_files import commit
from torch import Tensor
from transformers import AutoModelForCausalLM

import tezo
from tezo.optim.estimators.population import Population
from tezo.runs.environment import hardware, versions
from tezo.system.progress import quiet_libraries

EXAMPLE = Path(__file__).parents[1] / "examples/reward"
DECAYING = {f"es, 16 steps, weight decay {own:g}": {"steps": 16, "weight_decay": own} for own in (0.0, 0.02, 0.05)}
SETTINGS: dict[str, dict[str, Any]] = {
    "policy-gradient": {},
    "head-feedback": {"lr": 1e-3, "steps": 60},
    "es": {"steps": 8, "weight_decay": 0.0},
    "es, constant rate": {"steps": 8, "weight_decay": 0.0, "schedule": "constant"},
    "es, by ranks": {"steps": 8, "weight_decay": 0.0},
    **DECAYING,
    "es, antithetic": {"steps": 8, "weight_decay": 0.0, "num_directions": 8, "antithetic": True},
}
OURS = ("es", "es, constant rate", "es, antithetic", "es, by ranks")
MOST_TOKENS = 24
RUNS: list[tuple[str, float, float | str | None, int]] = [
    *(("policy-gradient", 0.0, None, seed) for seed in (0, 1, 2)),
    *((name, temperature, "auto", seed) for name in OURS for seed in (0, 1, 2) for temperature in (0.0, 1.0)),
    *((name, 0.0, "auto", seed) for name in DECAYING for seed in (0, 1, 2)),
    *(("head-feedback", temperature, 1e-2, seed) for seed in (0, 1, 2) for temperature in (0.0, 1.0)),
    *(("head-feedback", temperature, 1e-3, 0) for temperature in (0.0, 1.0)),
]
"""(method, temperature, rho, seed); a method without rho has None."""
SAMPLES = 3
KEYS = ("before", "after", "dev_loss_before", "dev_loss", "steps", "kept_step", "num_forward_passes", "rows",
        "seconds_stepping", "own_answers", "verdict")  # fmt: skip


def main() -> None:
    """Runs what the file does not have, and writes it after each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, required=True, help="folder with models/stories260K")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results/reward.json")
    given = parser.parse_args()
    quiet_libraries()
    runpy.run_path(str(EXAMPLE / "prompts.py"), run_name="__main__")
    found: list[dict[str, Any]] = json.loads(given.json.read_text())["runs"] if given.json.is_file() else []
    head = {"command": "python benchmarks/reward.py --shared FOLDER", "settings": SETTINGS, "hardware": hardware(),
            "versions": versions(("tezo", "torch", "transformers"))}  # fmt: skip
    for method, temperature, rho, seed in RUNS:
        what = {"method": method, "temperature": temperature, "rho": rho, "seed": seed}
        if any(what.items() <= entry.items() for entry in found):
            continue
        found.insert(0, what | measured(str(given.shared / "models/stories260K"), what) | {"commit": commit()})
        given.json.write_text(json.dumps({**head, "runs": found}, indent=1) + "\n")
        print(what, found[0]["before"], found[0]["after"], flush=True)


class Ranked(Population):
    """kappa_i = rho (rank_i - mean rank) / their spread, where members with equal scores share their mean rank."""

    def kappas(self, losses_PN: Tensor) -> list[float]:
        above_P = (losses_PN - losses_PN.nanmean(0)).nanmean(1).nan_to_num(0.0)
        below_PP, same_PP = above_P < above_P[:, None], above_P == above_P[:, None]
        rank_P = below_PP.sum(1) + (same_PP.sum(1) - 1).double() / 2
        rank_P -= rank_P.mean()
        spread = float(rank_P.square().sum() / max(1, len(rank_P) - 1)) ** 0.5
        return [0.0] * len(rank_P) if spread == 0 else (self.rho * rank_P / spread).tolist()


def measured(model: str, what: dict[str, Any]) -> dict[str, Any]:
    """How a run ended, and what the model writes before and after it."""
    parts = {part: str(EXAMPLE / f"{part}.jsonl") for part in ("dev", "test")}
    reward = f"{EXAMPLE / 'score.py'}:happy"
    members = patch("tezo.methods.es.Population", Ranked) if "ranks" in what["method"] else nullcontext()
    method = what["method"].partition(",")[0]
    given = {key: value for key, value in what.items() if value is not None} | {"method": method}
    with members:
        run = tezo.train(model, str(EXAMPLE / "train.jsonl"), reward=reward, max_new_tokens=MOST_TOKENS, **parts,
                         **SETTINGS[what["method"]], **given)  # fmt: skip
    after = stories(run.model, run.tokenizer)
    before = stories(AutoModelForCausalLM.from_pretrained(model), run.tokenizer)
    entry = {key: run.summary[key] for key in KEYS}
    run.close()
    return entry | {"samples": [{"before": b, "after": a} for b, a in zip(before, after, strict=True)]}


def stories(model: Any, tokenizer: Any) -> list[str]:
    """The first test prompts with their greedy continuations."""
    rows = [json.loads(line) for line in (EXAMPLE / "test.jsonl").read_text().splitlines()[:SAMPLES]]
    found = []
    for row in rows:
        ids = torch.tensor([tokenizer(row["prompt"])["input_ids"]])
        written = model.generate(input_ids=ids, max_new_tokens=MOST_TOKENS, do_sample=False,
                                 attention_mask=torch.ones_like(ids), pad_token_id=tokenizer.pad_token_id)  # fmt: skip
        found.append(tokenizer.decode(written[0], skip_special_tokens=True))
    return found


if __name__ == "__main__":
    main()
