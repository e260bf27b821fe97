"""Tiny random models of many architectures and types: which engine tunes their files, and reads the result back.

    python benchmarks/any_file.py [--only PART ...] [--out benchmarks/results]

Each file is tuned by gauss-newton for one round in llama.cpp, and in torch where that holds of a file in F32; the
result is written as a whole file and read back by llama.cpp's library. Writes any_file.json after each, and leaves out
those that it has.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tezo_studies.bench.result_files import commit

from tezo.engines.llama_cpp.library import load_library
from tezo.runs.environment import hardware, versions

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from architectures import ARCHITECTURES, TYPES
from file_trials import LARGE, holds, tried

ENGINES = ("llama.cpp", "torch")
FIRST = ("F32", "Q4_K_M", "Q8_0")


def main() -> None:
    """Makes the trials that are missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="parts of the names of the architectures to try")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    path = given.out / "any_file.json"
    about = {"library": load_library().name, "commit": commit(), "hardware": hardware(), "versions": versions()}
    done: dict[str, Any] = {"trials": {}, **about}
    if path.exists():
        done = json.loads(path.read_text(encoding="utf-8"))
    of_trial = {name: value for name, value in about.items() if value != done[name]}  # what differs from the first ones
    for kind in sorted(TYPES, key=[*FIRST, *TYPES].index):
        for architecture in ARCHITECTURES:
            for engine in ENGINES:
                key = f"{architecture} {kind} {engine}"
                first = done["trials"].get(f"{architecture} F32 {engine}", {})
                is_refused = engine == "torch" and not first.get("holds", True)  # for its architecture
                is_left_out = is_refused or (architecture in LARGE and kind != "F32")
                if key in done["trials"] or is_left_out or not any(part in architecture for part in given.only):
                    continue
                with tempfile.TemporaryDirectory() as folder:
                    found = tried(architecture, kind, engine, Path(folder))
                done["trials"][key] = found | {"holds": holds(found, kind)} | of_trial
                path.write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")
                print(key, done["trials"][key], flush=True)


if __name__ == "__main__":
    main()
