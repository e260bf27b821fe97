"""One GPU of the H100 class: time, memory and launches of a step of OPT-125M to 30B and LLaMA-7B to 30B.

    python benchmarks/gpu.py [--seconds 550] [--json benchmarks/results/gpu.json]
    python benchmarks/gpu.py --device cpu --shapes tiny      rehearses every kind of case where there is no GPU

Random weights, batch 16, lengths like RTE's. Cases: the methods that have targets, each in rounds with the case that
its target is about (`tezo_studies.bench.targets`), a round of gauss-newton, the cells of the paper's tables of memory
and time, plain passes (F, F2), LoRA with and without gradient checkpointing (over nf4: QLoRA), and CUDA graphs. Each
case is in the file as soon as it is done, with numbers or with the reason why it has none, the most telling first; the
same command goes on with what is missing. A process measures the cases of one base; where it dies, another goes on
after the case in which it did. No case begins after --seconds.
"""

import argparse
import ctypes
import faulthandler
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tezo_studies.bench.case_results import CaseResults
from tezo_studies.bench.cases import ROUND, Case, make_case
from tezo_studies.bench.packed_model import packed
from tezo_studies.bench.result_files import commit, cpu
from tezo_studies.bench.settings import Settings
from tezo_studies.bench.shapes import SHAPES
from tezo_studies.bench.single_case import measure_case
from tezo_studies.bench.targets import PASSES, TARGETS, compared_with
from tezo_studies.bench.workload import Work
from tezo_studies.cost_tables import COST_TABLES

from tezo.models.loading import choose_device
from tezo.models.quantization import quantizer
from tezo.runs.environment import usable_memory, versions
from tezo.system.errors import TezoError, nearest
from tezo.system.files import one_line
from tezo.system.progress import quiet_libraries

LINES = {line.key: line for line in COST_TABLES["memory"].lines}
"""Rows of the paper's tables of memory and time."""
LABELS = {
    "targets": (PASSES, *dict.fromkeys(label for target in TARGETS for label in (target.label, target.beside)
                                       if label != PASSES)),
    "round": (ROUND,),
    "paper": tuple(LINES),
    "none": ("F", "F2", "lora", "lora-checkpointed", "tezo-cadam", "per-example:tezo-cadam"),
    "nf4": ("F", "F2", PASSES, "tezo", "head-feedback", "lora", "lora-checkpointed", "tezo-cadam", "per-example:tezo",
            "per-example:head-feedback", "per-example:tezo-cadam"),
    "graphs": ("plain-closure:tezo", "cuda-graphs:F2", "cuda-graphs:tezo"),
}  # fmt: skip
"""Part -> its cases: labels, and in "paper" rows of the paper's tables. Only "nf4" is over a base that is quantised."""
SETTINGS: dict[str, dict[str, str]] = {"paper": {"dtype": "float16", "targets": "all"}}
"""Part -> settings that are not those of the others, bfloat16 and all linear layers: the paper's."""
PLAN = (
    ("llama-7b", "targets"), ("opt-1.3b", "targets"), ("llama-7b", "round"), ("llama-7b", "paper"),
    ("opt-1.3b", "paper"), ("opt-13b", "paper"), ("opt-6.7b", "paper"), ("llama-13b", "paper"), ("opt-30b", "paper"),
    ("llama-30b", "paper"), ("opt-2.7b", "paper"), ("opt-125m", "paper"), ("opt-1.3b", "graphs"), ("llama-7b", "none"),
    ("opt-1.3b", "none"), ("llama-7b", "nf4"), ("opt-13b", "targets"), ("opt-125m", "targets"), ("llama-13b", "nf4"),
    ("opt-125m", "graphs"),
)  # fmt: skip
ROUNDS, REHEARSED_ROUNDS, CASE_SECONDS = 15, 3, 4.0
"""Rounds of a case on a GPU and in a rehearsal; none but the first three begins after so many seconds."""
TIME_LIMIT, GRACE = 100, 15
"""Seconds after which a case is given up, and for which one that is running at the end is waited for."""
LIBRARIES = ("tezo", "torch", "transformers", "peft", "bitsandbytes")


@dataclass(frozen=True)
class Part:
    """The cases of one base, which one process measures.

    Attributes:
        shape: key of `SHAPES`.
        kind: key of `LABELS`.
        given: the arguments of the command.
    """

    shape: str
    kind: str
    given: argparse.Namespace

    def cases(self) -> dict[str, str]:
        """Name in the file -> label."""
        dtype = self.settings()["dtype"]
        return {f"{self.shape}/{dtype}/{self.kind}/{label}": label for label in LABELS[self.kind]}

    def settings(self) -> dict[str, str]:
        """Data type of the weights, and the tuned parameters."""
        return {"dtype": "bfloat16", "targets": "all-linear"} | SETTINGS.get(self.kind, {})

    def base(self) -> tuple[Work, Case]:
        """The model with its batch, and two plain passes of it."""
        if self.kind == "nf4":
            quantizer("nf4")  # asks for bitsandbytes before there is a model
        given = self.given
        rounds = ROUNDS if given.device.startswith("cuda") else REHEARSED_ROUNDS
        settings = Settings(
            model=self.shape, device=given.device, batch=given.batch, length=given.length, rank=given.rank,
            rounds=rounds, seconds=CASE_SECONDS, **self.settings(),
        )  # fmt: skip
        work = Work(settings)
        if self.kind == "nf4":
            work.model = packed(work.model)
        return work, make_case("F2", work)

    def measured(self, label: str, work: Work, two_passes: Case) -> dict[str, Any]:
        """Measures a case on the base."""
        if self.kind != "paper":
            return measure_case(label, work, two_passes, compared_with(label) if self.kind == "targets" else ())
        line = LINES[label]
        own = work if line.rank is None else work.with_settings(replace(work.settings, rank=line.rank))
        return measure_case(line.method or "N", own, two_passes)


def head(given: argparse.Namespace) -> dict[str, Any]:
    """The card, its memory in bytes, CUDA of its driver and of torch, versions, and the settings of all cases."""
    device = choose_device(given.device)
    on_gpu = device.type == "cuda"
    return {
        "command": "python benchmarks/gpu.py", "device": device.type,
        "hardware": torch.cuda.get_device_name(device) if on_gpu else cpu(),
        "memory": torch.cuda.get_device_properties(device).total_memory if on_gpu else usable_memory(),
        "driver_cuda": driver_cuda(), "torch_cuda": torch.version.cuda, "versions": versions(LIBRARIES),
        "batch": given.batch, "length": given.length, "rank": given.rank,
    }  # fmt: skip


def driver_cuda() -> str | None:
    """Returns the newest CUDA that the driver runs, such as "12.8"; None without a driver."""
    number = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return None if failed else f"{number.value // 1000}.{number.value % 1000 // 10}"


def main() -> None:
    """Measures what the file does not have."""
    given = arguments()
    quiet_libraries()
    chosen = [(shape, kind) for shape in given.shapes.split(",") for kind in LABELS] if given.shapes else PLAN
    parts = [Part(shape, kind, given) for shape, kind in chosen]
    if given.part is not None:
        measure(parts[given.part])
        return
    CaseResults(given.json).forget_begun()
    given.until = time.time() + given.seconds
    for number, part in enumerate(parts):
        while time.time() < given.until and (left := missing(part)):
            supervise(number, left, given)
    left = [name for part in parts for name in missing(part)]
    print(f"{given.json}: {len(left)} cases are left" + ("; the same command goes on." if left else "."), flush=True)


def arguments() -> argparse.Namespace:
    """The command line. The default file of a rehearsal is a temporary one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", help="with commas; all their cases in this order")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", default="rte")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=550)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("there is no GPU here; --device cpu --shapes tiny rehearses.")
    for shape in given.shapes.split(",") if given.shapes else ():
        if shape not in SHAPES:
            parser.error(f"there is no shape {shape!r}. {nearest(shape, SHAPES)}")
    rehearsal = Path(tempfile.gettempdir()) / "gpu-rehearsal.json"
    own = Path(__file__).parent / "results/gpu.json" if given.device.startswith("cuda") else rehearsal
    given.json = given.json or own
    return given


def missing(part: Part) -> dict[str, str]:
    """The cases of a part that are not in the file, or were cut."""
    results = CaseResults(part.given.json)
    begun = results.begun()
    return {name: label for name, label in part.cases().items() if name in begun or name not in results.cases}


def supervise(number: int, left: dict[str, str], given: argparse.Namespace) -> None:
    """Has a process measure a part. If it died in a case, the case gets the reason; if before one, the run ends."""
    line = [sys.executable, __file__, *sys.argv[1:], "--part", str(number), "--until", str(given.until)]
    patience = given.until - time.time() + 2 * GRACE
    with tempfile.TemporaryFile("w+") as errors:  # a pipe would wait for what the process has started, too
        try:
            code = subprocess.run(line, stderr=errors, timeout=patience, check=False).returncode
        except subprocess.TimeoutExpired:
            return
        errors.seek(0)
        said = errors.read().strip()
    results = CaseResults(given.json)
    begun = [name for name in results.begun() if name in left]
    if code == 0 or (begun and time.time() > given.until):
        return
    if not begun and not left.keys() & results.cases.keys():
        raise SystemExit(said[-2000:] or f"a process ended with {code}")
    why = f"it took more than {TIME_LIMIT} s" if "Timeout (" in said else (said.splitlines() or ["no error"])[-1][:300]
    for name in begun:
        results.put(name, {"reason": f"its process ended with {code}: {why}"})
        print(f"{name}: {told(results.cases[name])}", flush=True)


def measure(part: Part) -> None:
    """Measures the cases of a part that are missing; ends after an error that may have left the GPU unusable."""
    results = CaseResults(part.given.json)
    try:
        results.of_this_machine(head(part.given))
    except TezoError as error:
        raise SystemExit(str(error)) from None
    base: tuple[Work, Case] | None = None
    version = {"commit": commit()}
    for name, label in missing(part).items():
        left = part.given.until - time.time()
        if left <= 0:
            return
        results.put(name, {"begun": True, "reason": "it was cut"})
        faulthandler.dump_traceback_later(min(TIME_LIMIT, left + GRACE), exit=True)
        unusable = False
        try:
            base = base or part.base()
            result = part.measured(label, *base) | version
        except (TezoError, torch.OutOfMemoryError) as error:
            result = {"reason": one_line(error)}
        except Exception as error:
            result, unusable = {"reason": f"{type(error).__name__}: {one_line(error)}"}, True
        faulthandler.cancel_dump_traceback_later()
        results.put(name, result)
        print(f"{name}: {told(result)}", flush=True)
        if unusable:
            raise SystemExit(1)


def told(result: dict[str, Any]) -> str:
    """A result in a line."""
    if "reason" in result:
        return f"not measured ({result['reason']})"
    return (
        f"{result['seconds']['median']:.4f} s, {result['to_F2']:.2f} of F2, {result['peak'] / 2**30:.2f} GiB, "
        f"{result['tokens_per_second']:,.0f} tokens/s"
    )


if __name__ == "__main__":
    main()
