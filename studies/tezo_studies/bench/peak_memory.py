"""Peak memory relative to inference.

On a GPU it is the maximum that the allocator reserved, as in the paper. On a CPU it is the peak resident set of a new
process for each case and round, so that no case hides another. The process builds the model, resets the kernel's peak,
runs the case and reads the peak. The C library is set to return freed blocks to the system at once.

    python -m tezo_studies.bench.peak_memory '{"label": "tezo", "threads": 2, "settings": {...}}'

starts such a process; it prints one JSON document.
"""

import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tezo.models.loading import choose_device
from tezo.runs.environment import peak_resident
from tezo.system.errors import RunError
from tezo_studies.bench.cases import make_case
from tezo_studies.bench.result_files import circumstances, describe, silent, spread
from tezo_studies.bench.settings import Settings
from tezo_studies.bench.workload import Work

INFERENCE = ("F", "N")
STEPS = 3
"""Steps before the peak is read, followed by one refresh if there are lazy factors."""

ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Environment variables with which the C library returns freed blocks to the system at once."""


def measure_memory(settings: Settings, labels: Sequence[str], tell: Callable[[str], None] = silent) -> Any:
    """Measures F (one forward pass), N (needed logits only) and `labels`; returns the content of the JSON file.

    Args:
        settings: settings of the benchmark.
        labels: labels of cases, from `settings.entries`.
        tell: called with progress messages.
    """
    started, runs = time.perf_counter(), {label: list[dict[str, Any]]() for label in (*INFERENCE, *labels)}
    on_cuda = choose_device(settings.device).type == "cuda"
    for number in range(settings.rounds):
        for label, found in runs.items():
            tell(f"round {number + 1}: {label}")
            found.append(peak_of(label, settings) if on_cuda else peak_of_fresh_process(label, settings))
        elapsed = time.perf_counter() - started
        if settings.seconds is not None and elapsed * (number + 2) / (number + 1) > settings.seconds:
            break
    head = {"kind": "memory", "settings": describe(settings)} | runs["F"][0]["circumstances"]
    return head | {"rounds": len(runs["F"]), "rows": rows(runs, head["model"]["bytes"])}


def rows(runs: dict[str, list[dict[str, Any]]], model_bytes: int) -> list[dict[str, Any]]:
    """One row per case: its peak, and the difference to inference with and without the bytes it holds.

    Args:
        runs: label -> results of `peak_of`, one per round.
        model_bytes: bytes of the model's parameters.
    """
    peaks = {label: statistics.median(run["peak"] for run in found) for label, found in runs.items()}
    table = []
    for label, found in runs.items():
        all_peaks, held = [run["peak"] for run in found], found[0]["held"]
        row: dict[str, Any] = {"label": label, "peak": spread(all_peaks), "held": held}
        for base in INFERENCE:
            over = peaks[label] - peaks[base]
            row[f"over_{base}"] = {
                "bytes": int(over),
                "ratio": round(peaks[label] / peaks[base], 4),
                "percent": round(100 * over / model_bytes, 3),
                "percent_less_held": round(100 * (over - held) / model_bytes, 3),
            }
        table.append(row | {"rounds": all_peaks, "peak_reset": found[0]["peak_reset"]})
    return table


def peak_of(label: str, settings: Settings) -> dict[str, Any]:
    """Measures the peak of one case in this process."""
    gc.collect()  # earlier cases may be kept alive by reference cycles
    work = Work(settings)
    peak_reset = forget_peak(work.device)
    entry = make_case(label, work)
    for _ in range(STEPS):
        entry.run()
    if entry.interval is not None:
        entry.run_refresh()
    work.synchronize()
    result = {"peak": peak_now(work.device), "held": entry.state_bytes(), "peak_reset": peak_reset}
    entry.close()
    return result | {"circumstances": circumstances(work)}


def peak_of_fresh_process(label: str, settings: Settings) -> dict[str, Any]:
    """`peak_of` in a new process, with as many threads as this one."""
    request = {"label": label, "threads": torch.get_num_threads(), "settings": asdict(settings)}
    done = subprocess.run(
        [sys.executable, "-m", "tezo_studies.bench.peak_memory", json.dumps(request)],
        env=os.environ | ALLOCATOR,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it was killed, perhaps because memory ran out"])[-1]
        raise RunError(f"the process that measured {label} ended with code {done.returncode}: {last}")
    result: dict[str, Any] = json.loads(done.stdout)
    result["circumstances"]["command"] = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return result


def forget_peak(device: torch.device) -> bool:
    """Resets the peak to the memory in use now; returns False if the system does not allow it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except (OSError, AttributeError, TypeError):  # no such library, function or file, as on macOS and Windows
        return False
    return True


def peak_now(device: torch.device) -> int:
    """Peak in bytes: the maximum reserved on the GPU, or the peak resident set of this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_reserved(device))
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="utf-8").splitlines() if status.is_file() else []
    for line in lines:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return peak_resident()


def main() -> None:
    """Measures the case that the JSON in the first argument describes, and prints the result."""
    request = json.loads(sys.argv[1])
    torch.set_num_threads(request["threads"])
    print(json.dumps(peak_of(request["label"], Settings(**request["settings"]))))


if __name__ == "__main__":
    main()
