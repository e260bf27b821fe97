"""A model's base in several forms: bytes, the scale at which its losses can be measured, and what tuning reaches.

    python benchmarks/packed.py [--recipe examples/routing/recipe.yaml] [--json FILE]

Every form is looked at by `tezo doctor`, and tuned by `tezo train` but for float16, which a CPU emulates; each in a
process of its own. Some ten minutes on two cores.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

STEPS = 80
LOOKED_AT = ("float16",)
"""Forms that are not tuned."""
FORMS = {
    "float32": {"model.dtype": "float32"},
    "float16": {"model.dtype": "float16"},
    "int8wo": {"model.dtype": "float32", "model.quantization": "int8wo"},
    "int8": {"model.dtype": "float32", "model.quantization": "int8"},
    "nf4": {"model.dtype": "float32", "model.quantization": "nf4"},
}


def main() -> None:
    """Measures all forms, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=Path("examples/routing/recipe.yaml"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = []
    for name in FORMS:
        results.append(measure(arguments.recipe, name))
        print(json.dumps(results[-1], indent=2), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def measure(recipe: Path, name: str) -> dict[str, Any]:
    """The row of one form."""
    settings = [part for key, value in FORMS[name].items() for part in ("--set", f"{key}={value}")]
    report = tezo("doctor", "--model", "embedded:all-minilm-l6-v2", *settings)["model"]
    of_model = ("name", "bytes", "linear_bytes", "parameters", "linear_parameters", "scales", "recommended_rho")
    row = {"form": name, "run": None, **{key: report[key] for key in of_model}}
    if name not in LOOKED_AT:
        rho = report["recommended_rho"]
        with TemporaryDirectory() as folder:
            settings += ["--set", f"method.rho={rho}", "--steps", str(STEPS), "--output", f"{folder}/run"]
            run = tezo("train", str(recipe), *settings)
        row["run"] = {
            key: run[key] for key in ("method", "seed", "steps", "rows", "before", "after", "hardware", "versions")
        }
    return row


def tezo(*arguments: str) -> Any:
    """What a command answers."""
    done = subprocess.run([sys.executable, "-m", "tezo", *arguments, "--json"], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)


if __name__ == "__main__":
    main()
