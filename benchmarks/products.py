"""From how many rows of inputs on a half-precision linear layer is faster with its weight cast to float32.

    python benchmarks/products.py [--rounds 15] [--json FILE]

Both ways are timed in turn on the linear layers of OPT-125M, on a CPU that emulates the products; `LEAST_ROWS` of
`tezo.directions.products` goes by it.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from tezo.directions.products import float32_linear, is_emulated
from tezo.runs.environment import hardware, versions

SHAPES = ((768, 768), (3072, 768), (768, 3072))
ROWS = (1, 8, 16, 24, 32, 48, 64, 128, 512)
DTYPES = (torch.bfloat16, torch.float16)
LEAST_SECONDS = 0.02
"""A figure is a mean over as many calls as take about so long."""


def main() -> None:
    """Times everything and prints it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    dtypes = [dtype for dtype in DTYPES if is_emulated(dtype)]
    if not dtypes:
        raise SystemExit("This CPU has instructions for half precision: nothing is cast here.")
    torch.manual_seed(0)
    cases = itertools.product(dtypes, ROWS, SHAPES)
    result = {
        "cases": [case(dtype, rows, shape, arguments.rounds) for dtype, rows, shape in cases],
        "rounds": arguments.rounds,
        "hardware": hardware(),
        "versions": versions(),
    }
    print(json.dumps(result, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


@torch.inference_mode()
def case(dtype: torch.dtype, rows: int, shape: tuple[int, int], rounds: int) -> dict[str, Any]:
    """Median seconds of both ways, and the median of their ratio round by round."""
    x, weight, bias = (torch.randn(size).to(dtype) for size in ((rows, shape[1]), shape, shape[:1]))
    ways: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"emulated": linear, "cast": float32_linear}
    calls = {name: calls_of(lambda way=way: way(x, weight, bias)) for name, way in ways.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _, (name, way) in itertools.product(range(rounds), ways.items()):
        seconds[name].append(mean_seconds(lambda way=way: way(x, weight, bias), calls[name]))
    ratios = [cast / emulated for cast, emulated in zip(seconds["cast"], seconds["emulated"], strict=True)]
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    of = {"dtype": str(dtype).removeprefix("torch."), "rows": rows, "shape": shape}
    return of | medians | {"cast_over_emulated": round(statistics.median(ratios), 3)}


def calls_of(call: Callable[[], Tensor]) -> int:
    """How many calls take `LEAST_SECONDS`, after one to warm up."""
    call()
    return max(1, int(LEAST_SECONDS / mean_seconds(call, 1)))


def mean_seconds(call: Callable[[], Tensor], count: int) -> float:
    """Of a call, over `count` of them."""
    begun = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begun) / count


if __name__ == "__main__":
    main()
