"""`tezo doctor`."""

from typing import Annotated, Any

import typer

from tezo.cli.common import JsonOption, SetOption, print_json
from tezo.models.quiet import quiet_libraries


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("doctor")(doctor)


def doctor(
    model: Annotated[str | None, typer.Option(help="Say also what this model can be tuned with.")] = None,
    quantization: Annotated[str | None, typer.Option(help="Of its linear layers: nf4, int8 or int8wo.")] = None,
    settings: list[str] = SetOption,
    json: bool = JsonOption,
) -> None:
    """Say what is installed, what this machine has, and what a model can take."""
    quiet_libraries()
    import os

    import torch

    from tezo.models.loading import EMBEDDED
    from tezo.runs.environment import hardware, versions
    from tezo.training.config import parse_setting

    packages = ("tezo", "torch", "transformers", "safetensors", "datasets", "peft", "numpy", "bitsandbytes", "torchao")
    report: dict[str, Any] = {
        "versions": versions(packages),
        "hardware": hardware(),
        "cores": os.cpu_count(),
        "memory": _memory(),
        "gpu_memory": torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None,
        "embedded": {name: _embedded_state(name) for name in EMBEDDED},
    }
    if model:
        given: list[tuple[str, Any]] = [parse_setting(text) for text in settings]
        report["model"] = _model_report(model, given + [("model.quantization", quantization)] * bool(quantization))
    if json:
        print_json(report)
    else:
        _print(report)


def _print(report: dict[str, Any]) -> None:
    of_model = report.pop("model", None)
    for key, value in report.items():
        if isinstance(value, dict):
            print(key)
            for name, inner in value.items():
                print(f"  {name:<26} {inner}")
        elif value is not None:
            print(f"{key:<28} {value / 2**30:.1f} GiB" if "memory" in key else f"{key:<28} {value}")
    if of_model is not None:
        _print_model(of_model)


def _print_model(report: dict[str, Any]) -> None:
    print("model")
    for key in ("name", "kind", "dtype", "quantization", "parameters", "linear_parameters"):
        print(f"  {key:<26} {report[key]}")
    print(f"  {'bytes':<26} {_mebibytes(report['bytes'])}, of linear layers {_mebibytes(report['linear_bytes'])}")
    print("\nmethods, on the linear layers; beside the model, without a pass's activations:")
    refused: dict[str, list[str]] = {}
    for row in report["methods"]:
        if row["refusal"]:
            refused.setdefault(row["refusal"], []).append(row["method"])
            continue
        notes = [f"rank {row['rank']}"] * (row["rank"] is not None) + ["exact LoRA adapter"] * row["adapter"]
        print(f"  {row['method']:<11} trains {row['trained']:,}, keeps {_mebibytes(row['kept'])}  {'; '.join(notes)}")
    for reason, names in refused.items():
        print(f"  not {', '.join(names)}: {reason}")
    print("\nprojected gradient at close scales: scatter, and shift to the next smaller, as shares of its size")
    if isinstance(report["noise"], str):
        print(f"  not measured: {report['noise']}")
        return
    print("  rho       scatter  shift")
    for row in report["noise"]:
        mark = "  <- method.rho" if row["rho"] == report["recommended_rho"] else ""
        print(f"  {row['rho']:<8g}  {row['scatter']:<7.3f}  {row['shift']:.3f}{mark}")


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


def _memory() -> int:
    import os

    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _embedded_state(name: str) -> str:
    from tezo.errors import RequestError
    from tezo.models.loading import embedded_folder

    try:
        embedded_folder(name)
    except RequestError as error:
        return str(error)
    return "installed, weights verified"


def _model_report(name: str, settings: list[tuple[str, Any]]) -> dict[str, Any]:
    from dataclasses import asdict

    from tezo.directions.targets import find_targets, select_targets
    from tezo.errors import RequestError
    from tezo.models.quantization import bytes_of, stored_bytes
    from tezo.optim.estimate_error import recommended
    from tezo.optim.memory_forecast import forecasts
    from tezo.training.diagnosis import model_estimate_error
    from tezo.training.job import load
    from tezo.training.opening import run_config

    config = run_config(name, settings)
    loaded = load(config)
    linear = select_targets(loaded.model)
    report: dict[str, Any] = {
        "name": name,
        "kind": loaded.kind,
        "dtype": str(loaded.model.dtype),
        "quantization": config.model.quantization,
        "bytes": stored_bytes(loaded.model),
        "parameters": sum(target.shape.numel() for target in find_targets(loaded.model)),
        "linear_parameters": sum(target.shape.numel() for target in linear),
        "linear_bytes": sum(bytes_of(target.parameter) for target in linear),
        "methods": [asdict(forecast) for forecast in forecasts(loaded.model)],
    }
    try:
        noise = model_estimate_error(config.data, loaded)
    except RequestError as error:
        return report | {"noise": str(error), "recommended_rho": None}
    return report | {"noise": [asdict(at) for at in noise], "recommended_rho": recommended(noise).rho}
