"""Results of the benchmark: environment, statistics, JSON files and tables."""

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tezo.runs.environment import hardware, threads, versions
from tezo.system.errors import RequestError
from tezo_studies.bench.settings import Settings

if TYPE_CHECKING:
    from tezo_studies.bench.workload import Work


def circumstances(work: "Work") -> dict[str, Any]:
    """The environment of a measurement: model size, hardware, threads, versions, commit and command."""
    parameters = list(work.model.parameters())
    return {
        "model": {
            "parameters": sum(parameter.numel() for parameter in parameters),
            "bytes": sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        },
        "hardware": hardware() if work.device.type == "cuda" else cpu(),
        "half_precision": features(),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "commit": commit(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def cpu() -> str:
    """The processor's name and the number of threads."""
    return f"{processor()}, {threads()}"


def processor() -> str:
    """The processor's name, or "CPU" if the system does not give it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "CPU"


def features() -> list[str]:
    """The instructions for half precision that torch reports of the CPU, such as avx512_bf16."""
    known = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return sorted(name for name, has in known.items() if has is True and name.endswith(("_bf16", "_fp16")))


def commit() -> str | None:
    """The commit of the checkout with this file, followed by "+" if it has changes; None outside a checkout."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        changes = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + "+" * bool(changes.stdout.strip())


def describe(settings: Settings) -> dict[str, Any]:
    """The settings as in the JSON file, with the row lengths."""
    return asdict(settings) | {"lengths": settings.lengths()}


def silent(progress: str) -> None:
    """Ignores a progress message."""
    del progress


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, minimum and quartiles: "median", "min", "q1", "q3"."""
    quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    summary = {"median": quartiles[1], "min": min(values), "q1": quartiles[0], "q3": quartiles[2]}
    return {name: round(value, 7) for name, value in summary.items()}


def check_target(path: Path | None) -> None:
    """Raises `RequestError` if the result cannot be written to `path`; called before anything is measured."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise RequestError(f"json: {path} cannot be written; give a file in a folder that exists.")


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as one JSON document."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def print_table(result: dict[str, Any]) -> None:
    """Prints a result as a table."""
    columns = {"step": _STEP, "memory": _MEMORY}[result["kind"]]
    lines = [list(columns), *([_cell(row, key, form) for key, form in columns.values()] for row in result["rows"])]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(_title(result))
    for first, *others in lines:
        padded = (f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))
        print("  ".join([f"{first:<{widths[0]}}", *padded]))


def _title(result: dict[str, Any]) -> str:
    said = result["settings"]
    work = f"{said['model']}, {said['dtype']}, {said['batch']} x {said['length']} tokens, rank {said['rank']}"
    return f"{work}, {said['targets']}, {result['rounds']} rounds; {result['hardware']}"


_STEP = {
    "": ("label", "{}"),
    "seconds": ("seconds.median", "{:.4f}"),
    "min": ("seconds.min", "{:.4f}"),
    "quartiles": ("seconds", "{0[q1]:.4f}-{0[q3]:.4f}"),
    "/F2": ("to_F2", "{:.2f}"),
    "/N2": ("to_N2", "{:.2f}"),
    "/J2": ("to_J2", "{:.2f}"),
    "/shared": ("to_shared", "{:.3f}"),
    "published/ours": ("speed_up", "{:.1f}"),
}
_MEMORY = {
    "": ("label", "{}"),
    "peak MiB": ("peak.median", "{0.mib:.1f}"),
    "over F": ("over_F.bytes", "{0.mib:.1f}"),
    "over N": ("over_N.bytes", "{0.mib:.1f}"),
    "held": ("held", "{0.mib:.1f}"),
    "% of model over F": ("over_F.percent", "{:.1f}"),
    "less held": ("over_F.percent_less_held", "{:.1f}"),
    "% over N": ("over_N.percent", "{:.1f}"),
    "less held ": ("over_N.percent_less_held", "{:.1f}"),
}


class _Bytes(float):
    @property
    def mib(self) -> float:
        return self / 2**20


def _cell(row: dict[str, Any], key: str, form: str) -> str:
    value: Any = row
    for part in key.split("."):
        value = value.get(part) if value is not None else None
    if value is None:
        return ""
    return form.format(_Bytes(value) if ".mib" in form else value)
