"""Peak memory of a feedback step on free text beside that of a two-point step and of inference.

    python benchmarks/feedback_memory.py [--out benchmarks/results] [--quick]

Rows of different lengths, every token but the first is an answer token, so that the head gives logits for almost all
positions. A fresh process for each case. Writes feedback_memory.json, in some minutes.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from tezo_studies.bench.peak_memory import ALLOCATOR, forget_peak, peak_now
from tezo_studies.bench.result_files import commit, cpu
from tezo_studies.bench.shapes import build_model
from tezo_studies.bench.workload import NoWords

from tezo.methods.head_feedback import head_feedback
from tezo.optim.estimators.estimate import FEEDBACK, TWO_POINT
from tezo.runs.environment import versions
from tezo.tasks.examples import Example
from tezo.tasks.objectives.causal import CausalObjective
from tezo.tasks.objectives.objective import Encoded

INFERENCE = "inference"
KINDS = (INFERENCE, TWO_POINT, FEEDBACK)
BATCHES = (("bfloat16", 4, 128), ("bfloat16", 16, 64), ("float32", 4, 128), ("float32", 16, 64))
"""dtype, rows, tokens of the longest row; the others are shorter in equal steps."""
STEPS = 2
"""Steps before the peak is read."""


def peak(kind: str, shape: str, dtype: str, rows: int, longest: int) -> dict[str, int]:
    """Bytes of the peak resident set of two steps, or of a pass, of the model, and the number of parts of the batch."""
    device = torch.device("cpu")
    model = build_model(shape, dtype, device)
    draw = torch.Generator().manual_seed(0)
    lengths = [max(2, longest * (i + 1) // rows) for i in range(rows)]
    texts = [tuple(torch.randint(model.config.vocab_size, (n,), generator=draw).tolist()) for n in lengths]
    encoded = [Encoded((ids,), (len(ids) - 1,), Example("", "", (), None, "the benchmark")) for ids in texts]
    objective = CausalObjective(NoWords(), device, longest, ())
    closure = objective.closure(model, objective.batches(encoded))
    gc.collect()
    forget_peak(device)
    if kind == INFERENCE:
        with torch.no_grad():
            float(closure())
    else:
        optimizer = head_feedback(model, basis="gaussian", directions="per-example")
        for _ in range(STEPS):
            optimizer.step(closure, rule=kind)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    return {"peak": peak_now(device), "model": weights, "parts": len(closure.batches)}


def peak_of_process(kind: str, *setting: Any) -> dict[str, int]:
    """`peak` in a process of its own."""
    line = [sys.executable, __file__, "--case", json.dumps([kind, *setting])]
    done = subprocess.run(line, env=os.environ | ALLOCATOR, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{kind} {setting}: {done.stderr.strip()[-2000:]}")
    result: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    """Measures all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        print(json.dumps(peak(*json.loads(given.case))))
        return
    shape, batches = ("tiny", BATCHES[-1:]) if given.quick else ("opt-125m", BATCHES)
    rows = [
        {"dtype": dtype, "rows": count, "longest": longest}
        | {kind: peak_of_process(kind, shape, dtype, count, longest) for kind in KINDS}
        for dtype, count, longest in batches
    ]
    made = {
        "command": "python benchmarks/feedback_memory.py", "hardware": cpu(), "model": shape, "commit": commit(),
        "versions": versions(("tezo", "torch", "transformers")), "rows": rows,
    }  # fmt: skip
    (given.out / "feedback_memory.json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
