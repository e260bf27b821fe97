"""A tiny random model in each quantised form on a real server of vLLM: served with adapters, and tuned?

    TEZO_VLLM=python TEZO_QUANTISERS=python python benchmarks/served_forms.py [--only FORM ...]
        [--out benchmarks/results]

TEZO_VLLM is the python of an environment with vLLM, TEZO_QUANTISERS that of one with llmcompressor, auto-round and
gptqmodel (`quantised_folders.py`). A Llama, two blocks deep and 256 wide, is quantised, served with adapters on all
seven kinds of layers, and tuned for four steps of `tezo` on 16 labelled rows. The server has one thread. Writes
served_forms.json after each form and leaves out those that it has.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from quantised_folders import ROUNDED, SCHEMES
from tezo_studies.bench.result_files import commit

from tezo.runs.environment import hardware, versions
from tezo.system.errors import TezoError
from tezo.system.progress import quiet_libraries
from tezo.training.loop import train
from tezo.training.settings import parse_config

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from folders import bpe_tokenizer, label_rows, saved, write_rows
from gguf_files import tiny_llama
from real_vllm import real_server, with_adapters

HERE = Path(__file__).resolve().parent
PLAIN = "bfloat16"
FORMS = (PLAIN, *SCHEMES, *ROUNDED)
PORT = 8437
ROWS = 16
METHOD = {"name": "tezo", "rank": 4, "lr": 0.05, "rho": 0.03}
TOOLS = ("llmcompressor", "auto-round", "gptqmodel", "compressed-tensors")


def quantised(plain: Path, out: Path, form: str) -> Path:
    """Returns the folder of a model in this form."""
    if form == PLAIN:
        return plain
    command = [os.environ["TEZO_QUANTISERS"], str(HERE / "quantised_folders.py"), str(plain), str(out), form]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = sorted(out.rglob("config.json"))
    if done.returncode or not found:
        raise SystemExit(f"{form} was not written: {done.stderr[-2000:]}")
    return found[0].parent


def tried(form: str, folder: Path) -> dict[str, Any]:
    """Returns whether a form is served, losses before and after, and what the run says of the server's weights."""
    tokenizer = bpe_tokenizer(chat=True)
    plain = tiny_llama(
        64 * -(-len(tokenizer) // 64), hidden_size=256, intermediate_size=512, num_attention_heads=4,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=256, initializer_range=0.06,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = quantised(saved(plain, tokenizer, folder / "plain"), folder / "quantised", form)
    rows = str(write_rows(folder / "rows.jsonl", label_rows(ROWS)))
    config = {
        "model": {"name": str(model), "engine": f"http://127.0.0.1:{PORT}"},
        "data": {"train": rows, "dev": rows, "test": rows},
        "method": METHOD,
        "train": {"steps": 4, "batch_size": ROWS, "keep_best": False},
    }
    with ExitStack() as server:
        try:
            server.enter_context(real_server(model, PORT, with_adapters(), folder / "log"))
        except RuntimeError as error:
            return {"served": False, "error": str(error)}
        try:
            summary = train(parse_config(config), folder / "run")
        except TezoError as error:
            return {"served": True, "refused": str(error).replace(str(folder), "FOLDER")}
    about = [notice for notice in summary["notices"] if notice.startswith("model.engine")]
    losses = {when: summary[when]["loss"] for when in ("before", "after")}
    return {"served": True, **losses, "notices": [notice.replace(str(folder), "FOLDER") for notice in about]}


def main() -> None:
    """Tries the forms that are missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=FORMS, default=FORMS, help="forms to try")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    given = parser.parse_args()
    quiet_libraries()
    path = given.out / "served_forms.json"
    done: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"forms": {}}
    about: dict[str, Any] = {"hardware": hardware(), "versions": versions(), "commit": commit()}
    about |= {"server": versions_in("TEZO_VLLM", "vllm"), "tools": versions_in("TEZO_QUANTISERS", *TOOLS)}
    for form in given.only:
        if form in done["forms"]:
            continue
        with tempfile.TemporaryDirectory() as place:
            done["forms"][form] = tried(form, Path(place)) | about
        path.write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")
        print(form, done["forms"][form], flush=True)


def versions_in(variable: str, *packages: str) -> dict[str, str]:
    """Returns package -> version, in the environment of the python that a variable names."""
    code = (
        "import sys; from importlib.metadata import distributions\n"
        "for d in distributions():\n"
        "    if any(d.name.lower().replace('_', '-').startswith(own) for own in sys.argv[1:]): print(d.name, d.version)"
    )
    done = subprocess.run([os.environ[variable], "-c", code, *packages], capture_output=True, text=True, check=True)
    return dict(line.split() for line in done.stdout.splitlines())


if __name__ == "__main__":
    main()
