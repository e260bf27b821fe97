"""On which input directions of a layer the rows of a task agree: what a basis that sees the data is to find.

    python benchmarks/agreement.py --data-dir DIR [--tasks trec sst2] [--rows 256] [--json FILE]

Takes the gradient of every row by itself, with a backward pass, before any training. Along a group of eigenvectors of a
layer's inputs, mu is the mean gradient and G_b that of row b: the share |mu V|^2 / E|G_b V|^2 is what rows agree on.
Some five minutes a task on two cores.
"""

import argparse
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tezo.directions.bases.activation import RangeFinder, recording
from tezo.directions.targets import Target
from tezo.runs.environment import hardware, versions
from tezo.training.job import prepare
from tezo.training.settings import parse_config

EDGES = (0, 1, 4, 16, 64, 384)
"""Of the groups, in the order of falling eigenvalues; layers with more inputs are cut there."""


def main() -> None:
    """Measures each task."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--tasks", nargs="+", default=["trec", "sst2"])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = [agreement(task, arguments.data_dir, arguments.rows) for task in arguments.tasks]
    print(json.dumps(results, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def agreement(task: str, folder: str, rows: int) -> dict[str, Any]:
    """The shares of one task, all linear layers of the embedded encoder together."""
    data = {"task": task, "dir": folder, "num_train": rows, "num_dev": 50, "num_test": 50}
    method = {"name": "mezo", "targets": ["all-linear", "!pooler"]}  # no loss depends on the pooler
    job = prepare(parse_config({"model": "embedded:all-minilm-l6-v2", "data": data, "method": method}))
    job.optimizer.close()
    targets = job.optimizer.targets
    turns = eigenvectors(job, targets)
    for target in targets:
        target.parameter.requires_grad_(True)
    sums = {t.name: torch.zeros(t.shape[0], turns[t.name].shape[1]) for t in targets}
    squares = {t.name: torch.zeros(turns[t.name].shape[1]) for t in targets}
    for i in range(rows):
        loss = job.objective.closure(job.model, job.batches([i]))()
        grads = torch.autograd.grad(loss, [target.parameter for target in targets])
        for target, grad in zip(targets, grads, strict=True):
            turned = grad @ turns[target.name]
            sums[target.name] += turned
            squares[target.name] += turned.square().sum(0)
    groups = []
    for start, stop in pairwise(EDGES):
        mean_sq = sum(float(s[:, start:stop].square().sum()) for s in sums.values()) / rows**2
        row_sq = sum(float(s[start:stop].sum()) for s in squares.values()) / rows
        agreed = (rows * mean_sq - row_sq) / (rows - 1)  # |mean|^2 has the noise of `rows` rows in it
        groups.append({"directions": [start, stop], "mean_sq": agreed, "row_sq": row_sq})
    return {"task": task, "rows": rows, "groups": groups, "hardware": hardware(), "versions": versions()}


def eigenvectors(job: Any, targets: list[Target]) -> dict[str, Tensor]:
    """Name -> (I, the last of `EDGES`): of the layer's inputs over all rows."""
    sizes = {target.name: target.shape[1] for target in targets}
    finders = {n: RangeFinder(size, size, torch.device("cpu"), torch.float32, n) for n, size in sizes.items()}
    with torch.no_grad(), recording(job.model, targets, finders):
        job.objective.closure(job.model, job.batches(range(len(job.train)))).losses(1)
    return {n: finder.leading(EDGES[-1]).float() for n, finder in finders.items()}


if __name__ == "__main__":
    main()
