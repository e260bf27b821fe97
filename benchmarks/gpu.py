"""One GPU of the H100 or H200 class: time and memory of a step at the shapes of OPT 125M to 30B and LLaMA 7B to 30B.

    python benchmarks/gpu.py [--shapes opt-125m,...] [--seconds 600] [--json benchmarks/results/gpu.json]

bf16, batch 16, lengths like RTE's. The result is written after each shape, so that a run that is cut leaves what it
has; shapes that do not fit, or for which no time is left, are listed with the reason. `--shapes tiny --device cpu`
shows that it runs where there is no GPU.
"""

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tezo.errors import TezoError
from tezo.studies.bench.peak_memory import measure_memory
from tezo.studies.bench.result_files import print_table, write_json
from tezo.studies.bench.settings import PREFIX, Settings, entries
from tezo.studies.bench.shapes import SHAPES, skeleton
from tezo.studies.bench.step_time import measure_step

ALL = "opt-125m,opt-350m,opt-1.3b,opt-2.7b,opt-6.7b,llama-7b,opt-13b,llama-13b,opt-30b,llama-30b"
METHODS = "tezo,tezo-adam,mezo,published:mezo"
ROOM = 0.9
"""Share of the GPU's memory that weights may take; the rest is for activations and factors."""


@dataclass(frozen=True)
class Plan:
    """What is measured, and until when."""

    device: str
    targets: str
    rank: int
    methods: list[str]
    deadline: float

    def settings(self, shape: str, shapes_left: int) -> Settings:
        """Of one shape, with its share of the time that is left: two thirds for the steps."""
        share = max(1.0, (self.deadline - time.perf_counter()) / shapes_left)
        rounds, warmup = (15, 3) if self.device == "cuda" else (3, 1)
        return Settings(
            model=shape, dtype="bfloat16", device=self.device, batch=16, length="rte", rank=self.rank,
            targets=self.targets, rounds=rounds, warmup=warmup, seconds=share * 2 / 3,
        )  # fmt: skip


def main() -> None:
    """Measures the shapes, smallest first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=ALL)
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--targets", default="all-linear")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results/gpu.json")
    a = parser.parse_args()
    methods = entries(a.methods.split(","), published=False)
    plan = Plan(a.device, a.targets, a.rank, methods, time.perf_counter() + a.seconds)
    results: list[dict[str, Any]] = []
    shapes = a.shapes.split(",")
    for done, shape in enumerate(shapes):
        for result in measured(plan, shape, len(shapes) - done):
            results.append(result)
            write_json(a.json, results)
            if "rows" in result:
                print_table(result)
            else:
                print(f"{shape}: {result['kind']} skipped: {result['reason']}", flush=True)


def measured(plan: Plan, shape: str, shapes_left: int) -> list[dict[str, Any]]:
    """The results of a shape: time, and memory; or why it was left out."""
    if time.perf_counter() >= plan.deadline:
        return [{"kind": "shape", "shape": shape, "reason": "no time was left"}]
    need = bytes_of(shape)
    if plan.device == "cuda" and need > ROOM * torch.cuda.get_device_properties(0).total_memory:
        return [{"kind": "shape", "shape": shape, "reason": f"its weights take {need / 2**30:.0f} GiB"}]
    settings = plan.settings(shape, shapes_left)
    return [attempt(measure_step, settings, plan.methods), memory(settings, plan)]


def memory(settings: Settings, plan: Plan) -> dict[str, Any]:
    """The peaks: one round on a GPU, where they repeat exactly. Published forms are left out when short of time."""
    late = time.perf_counter() > plan.deadline
    if late:
        return {"kind": "memory", "shape": settings.model, "reason": "no time was left"}
    methods = [label for label in plan.methods if not label.startswith(PREFIX) or settings.model.endswith("m")]
    one = Settings(**vars(settings) | {"rounds": 1})
    return attempt(measure_memory, one, methods)


def attempt(measure: Callable[..., Any], settings: Settings, labels: list[str]) -> dict[str, Any]:
    """A result, or the reason why there is none."""
    try:
        result: dict[str, Any] = measure(settings, labels)
    except (TezoError, torch.OutOfMemoryError) as error:
        kind = measure.__name__.removeprefix("measure_")
        result = {"kind": kind, "shape": settings.model, "reason": " ".join(str(error).split())[:300]}
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return result


def bytes_of(shape: str) -> int:
    """Of a shape's weights in bf16."""
    model = skeleton(SHAPES[shape].make(), torch.bfloat16, torch.device("meta"))
    return sum(parameter.numel() * 2 for parameter in model.parameters())


if __name__ == "__main__":
    main()
