"""`tezo doctor`."""

import math
from typing import Annotated, Any

import typer

from tezo.cli.common import JsonOption, SetOption, print_json, showing_work


@showing_work()
def doctor(
    model: Annotated[str | None, typer.Option(help="Say also what this model can be tuned with.")] = None,
    quantization: Annotated[str | None, typer.Option(help="Of its linear layers: nf4, int8 or int8wo.")] = None,
    settings: list[str] = SetOption,
    json: bool = JsonOption,
) -> None:
    """Say what is installed, what this machine has, and what a model can take."""
    from tezo.training.config import parse_setting
    from tezo.training.doctor import machine_report, model_report

    report = machine_report()
    if model:
        given: list[tuple[str, Any]] = [parse_setting(text) for text in settings]
        report["model"] = model_report(model, given + [("model.quantization", quantization)] * bool(quantization))
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
    print("\nmethods, on the linear layers; counted, beside the model, without a pass's activations:")
    refused: dict[str, list[str]] = {}
    for row in report["methods"]:
        if row["refusal"]:
            refused.setdefault(row["refusal"], []).append(row["method"])
            continue
        notes = [f"rank {row['rank']}"] * (row["rank"] is not None) + ["exact LoRA adapter"] * row["adapter"]
        print(f"  {row['method']:<11} trains {row['trained']:,}, keeps {_mebibytes(row['kept'])}  {'; '.join(notes)}")
    for reason, names in refused.items():
        print(f"  not {', '.join(names)}: {reason}")
    _print_memory(report["memory"])
    print("\nperturbation scales, measured on eight short reviews along the directions of the method:")
    if isinstance(report["scales"], str):
        print(f"  not measured: {report['scales']}")
        return
    print("  rho       curvature  rounding, as parts of the change of the losses")
    for row in report["scales"]:
        mark = "  <- method.rho" if row["rho"] == report["recommended_rho"] else ""
        curvature = "not finite" if row["curvature"] == math.inf else f"{row['curvature']:.1%}"
        print(f"  {row['rho']:<8g}  {curvature:<9}  {row['rounding']:.2%}{mark}")


def _print_memory(report: dict[str, Any] | str) -> None:
    if isinstance(report, str):
        print(f"\nmemory of training: no forecast: {report}")
        return
    print(f"\nmemory of training, forecast for {report['rows']} rows of {report['length']} tokens:")
    for way in report["ways"]:
        parts = f"weights {_mebibytes(way['weights'])}, kept {_mebibytes(way['kept'])}"
        print(f"  {way['way']:<33} {_mebibytes(way['total']):>14}  ({parts}, a pass {_mebibytes(way['passing'])})")
    print(f"  {report['advice']}")


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
