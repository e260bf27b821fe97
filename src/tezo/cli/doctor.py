"""`tezo doctor`."""

from typing import Annotated, Any

import typer

from tezo.cli.common import JsonOption, print_json, quiet_libraries


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("doctor")(doctor)


def doctor(
    model: Annotated[str | None, typer.Option(help="Say also what this model can be tuned with.")] = None,
    json: bool = JsonOption,
) -> None:
    """Say what is installed, what this machine has, and what a model can take."""
    quiet_libraries()
    import os

    import torch

    from tezo.machine import hardware, versions
    from tezo.models import EMBEDDED

    report: dict[str, Any] = {
        "versions": versions(("tezo", "torch", "transformers", "safetensors", "datasets", "peft", "numpy")),
        "hardware": hardware(),
        "cores": os.cpu_count(),
        "memory": _memory(),
        "gpu_memory": torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None,
        "embedded": {name: _embedded_state(name) for name in EMBEDDED},
    }
    if model:
        report["model"] = _model_report(model)
    if json:
        print_json(report)
        return
    for key, value in report.items():
        if isinstance(value, dict):
            print(key)
            for name, inner in value.items():
                print(f"  {name:<26} {inner}")
        elif value is not None:
            print(f"{key:<28} {value / 2**30:.1f} GiB" if "memory" in key else f"{key:<28} {value}")


def _memory() -> int:
    import os

    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _embedded_state(name: str) -> str:
    from tezo.errors import RequestError
    from tezo.models import embedded_folder

    try:
        embedded_folder(name)
    except RequestError as error:
        return str(error)
    return "installed, weights verified"


def _model_report(name: str) -> dict[str, Any]:
    from tezo.models import load_model
    from tezo.params import find_targets, select_targets

    loaded = load_model(name)
    targets = find_targets(loaded.model)
    linear = {target.name for target in select_targets(loaded.model)}
    total = sum(t.parameter.numel() for t in targets)
    in_linear = sum(t.parameter.numel() for t in targets if t.name in linear)
    report = {
        "kind": loaded.kind,
        "dtype": str(loaded.model.dtype),
        "bytes": sum(t.parameter.numel() * t.parameter.element_size() for t in targets),
        "parameters": total,
        "all-linear": f"{len(linear)} matrices, {in_linear} parameters",
    }
    for kind in ("linear", "embedding", "vector", "other"):
        mine = [t for t in targets if t.kind == kind]
        report[kind] = f"{len(mine)} tensors, {sum(t.parameter.numel() for t in mine)} parameters"
    return report
