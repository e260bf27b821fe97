"""Time of the layer-wise rank rule on 24 layers of four 1024 x 1024 and two 1024 x 4096 matrices, against exact SVD.

    python benchmarks/rank_selection.py [--json FILE]

The weights are random with spectra that fall off at different speeds. Exact SVD is timed on one matrix of each shape
and scaled up; counts are compared on those.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from torch import nn

from tezo.directions.ranks import LayerwiseRank, significant_rank
from tezo.directions.targets import select_targets
from tezo.runs.environment import hardware, versions

SHAPES = [(1024, 1024)] * 4 + [(1024, 4096), (4096, 1024)]
LAYERS = 24


def main() -> None:
    """Times both ways and prints them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = nn.ModuleList(nn.ModuleList(layer(rows, columns, i) for rows, columns in SHAPES) for i in range(LAYERS))
    targets = select_targets(model)
    started = time.perf_counter()
    ranks = LayerwiseRank(threshold=0.25, max_rank=256).ranks(targets)
    seconds = time.perf_counter() - started
    exact = {shape: seconds_of_svd(shape) for shape in set(SHAPES)}
    result = {
        "matrices": len(targets),
        "seconds": round(seconds, 2),
        "seconds_exact_svd_scaled": round(LAYERS * sum(exact[shape] for shape in SHAPES), 1),
        "ranks": sorted(set(ranks.values())),
        "hardware": hardware(),
        "versions": versions(),
    }
    print(json.dumps(result, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


def layer(rows: int, columns: int, index: int) -> nn.Linear:
    """A linear layer whose singular values fall off, faster in later layers."""
    made = nn.Linear(columns, rows, bias=False)
    decay = torch.linspace(0, 1, columns).mul(-2.0 - index / 8).exp()
    made.weight.data.copy_(torch.randn(rows, columns) * decay)
    return made


def seconds_of_svd(shape: tuple[int, int]) -> float:
    """Seconds of one exact SVD; an error where it counts otherwise."""
    weight = layer(*shape, 0).weight.detach()
    started = time.perf_counter()
    values = torch.linalg.svdvals(weight)
    seconds = time.perf_counter() - started
    assert int((values > 0.25 * values[0]).sum()) == significant_rank(weight, 0.25)
    return seconds


if __name__ == "__main__":
    main()
