"""Seconds and memory of a direction's pass in torch and llama.cpp, on the embedded language model (135M).

    python benchmarks/engines.py --shared FOLDER [--only PART ...] [--out benchmarks/results]

64 rows of SST-2, answered by one of two words, under random low-rank changes of rank 16 in all linear layers of the
blocks. Each engine has a process of its own, which computes passes with a change and without one in turn; processes
run one after another, twice. Files in F32, F16 and Q8_0 are made of the embedded file's unpacked weights. `--only`
measures engines whose names have one of these parts, and keeps what engines.json has of others.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf.quants import dequantize, quantize
from tezo_studies.bench.result_files import commit
from torch import nn

from tezo.engines import load
from tezo.forward.engine import Asked
from tezo.models.kinds import ModelConfig
from tezo.models.loading import embedded_source, load_model
from tezo.models.lora import Adapter, attach_adapter
from tezo.runs.environment import hardware, versions
from tezo.tasks.objectives.batch import padded

MODEL = "embedded:smollm2-135m"
RANK, ROWS, TURNS, ROUNDS = 16, 64, 2, 2
TYPES = {"F32": gguf.GGMLQuantizationType.F32, "F16": gguf.GGMLQuantizationType.F16,
         "Q8_0": gguf.GGMLQuantizationType.Q8_0}  # fmt: skip


def write_as(source: Path, kind: gguf.GGMLQuantizationType, path: Path) -> None:
    """Writes a copy of a GGUF file with its matrices in another type."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, "llama")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value, of = field.contents(), field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, value, field.types[0], sub_type=of)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        own = kind if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, quantize(values.copy(), own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_files(folder: Path) -> dict[str, Path]:
    """Type -> the embedded model in a GGUF file of it; those that are made lie in `folder`."""
    source = embedded_source(MODEL)
    files = {"Q4_1": source} | {name: folder / f"{name}.gguf" for name in TYPES}
    for name, kind in TYPES.items():
        write_as(source, kind, files[name])
    return files


def texts_of(tokenizer: Any, shared: Path) -> list[tuple[int, ...]]:
    """The texts of the rows, up to the place where the answer is read."""
    lines = (shared / "data/sst2/train.jsonl").read_text(encoding="utf-8").splitlines()
    sentences = [json.loads(line)["sentence"] for line in lines[:ROWS]]
    return sorted({tuple(tokenizer(f"{sentence} It was")["input_ids"]) for sentence in sentences})


def change_of(model: Any) -> dict[str, Any]:
    """Random factors for each linear layer of the blocks."""
    draw = torch.Generator().manual_seed(0)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and ".layers." in name}
    return {
        name: (
            torch.randn(RANK, layer.in_features, generator=draw) * 1e-3,
            torch.randn(layer.out_features, RANK, generator=draw) * 1e-3,
        )
        for name, layer in layers.items()
    }


def in_torch(name: str, dtype: str, shared: Path) -> dict[str, Any]:
    """Passes of torch: one over all rows, sorted by length, in parts of 16."""
    loaded = load_model(name, dtype=dtype)
    texts = sorted(texts_of(loaded.tokenizer, shared), key=len)
    parts = [texts[i : i + 16] for i in range(0, len(texts), 16)]
    ids = [(padded(part, 0), padded([[1] * len(text) for text in part], 0)) for part in parts]

    def one_pass() -> None:
        with torch.no_grad():
            for part, (ids_RL, mask_RL) in zip(parts, ids, strict=True):
                hidden = loaded.model.model(input_ids=ids_RL, attention_mask=mask_RL).last_hidden_state
                last = hidden[torch.arange(len(part)), torch.tensor([len(text) - 1 for text in part])]
                loaded.model.lm_head(last).float().log_softmax(-1)

    def changed() -> None:
        handles = attach_adapter(loaded.model, Adapter(RANK, change))
        one_pass()
        for handle in handles:
            handle.remove()

    change = change_of(loaded.model)
    return timed(one_pass, changed, sum(map(len, texts)))


def in_engine(config: ModelConfig, shared: Path) -> dict[str, Any]:
    """Passes of an engine."""
    loaded = load(config)
    engine, texts = loaded.engine, texts_of(loaded.tokenizer, shared)
    assert engine is not None
    words = [loaded.tokenizer(word)["input_ids"][0] for word in (" terrible", " great")]
    last = torch.tensor([len(text) - 1 for text in texts])
    asked = Asked(texts, torch.arange(len(texts)), last, torch.tensor([words] * len(texts)), 1)
    change = change_of(loaded.model)
    engine.reserve(RANK)
    return timed(lambda: engine.log_probs([{}], asked), lambda: engine.log_probs([change], asked), sum(map(len, texts)))


def timed(plain: Any, changed: Any, tokens: int) -> dict[str, Any]:
    """Seconds of both in turn, after one of each."""
    plain()
    at_rest = peak_memory()
    changed()
    seconds: dict[str, list[float]] = {"plain": [], "changed": []}
    for _ in range(TURNS):
        for name, run in (("plain", plain), ("changed", changed)):
            begun = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - begun)
    memory = peak_memory()
    return {"seconds": seconds, "tokens": tokens, "peak_of_plain": at_rest, "peak": memory}


def peak_memory() -> int:
    """The most bytes that this process has held; what rusage says has the parent's before it."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return 1024 * int(status["VmHWM"].split()[0])


def child(kind: str, name: str, shared: Path) -> None:
    """What a process of its own measures; prints JSON."""
    own, _, dtype = kind.partition(" ")
    found = in_torch(name, dtype, shared) if own == "torch" else in_engine(ModelConfig(name=name, engine=own), shared)
    print("RESULT", json.dumps(found))


def main() -> None:
    """Runs all processes, twice, and writes engines.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--only", nargs="*", default=[""], help="parts of the names of the engines to measure")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        child(*chosen.child, chosen.shared)
        return
    with tempfile.TemporaryDirectory() as folder:
        files = gguf_files(Path(folder))
        ways = [("torch float32", MODEL), ("torch bfloat16", MODEL)]
        ways += [(f"llama.cpp {name}", str(path)) for name, path in files.items()]
        ways = [(name, path) for name, path in ways if any(part in name for part in chosen.only)]
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name, _ in ways}
        for _ in range(ROUNDS):
            for name, model in ways:
                kind = name if name.startswith("torch") else name.partition(" ")[0]
                command = [sys.executable, __file__, "--shared", chosen.shared, "--child", kind, model]
                done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
                lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
                if not lines:
                    raise SystemExit(f"{name}: {done.stderr[-2000:]}")
                runs[name].append(json.loads(lines[-1].removeprefix("RESULT ")))
                print(name, {k: [round(s, 2) for s in v] for k, v in runs[name][-1]["seconds"].items()}, flush=True)
    path = chosen.out / "engines.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["ways"] if path.exists() else {}
    for name, own in runs.items():
        plain, changed = ([s for run in own for s in run["seconds"][key]] for key in ("plain", "changed"))
        rows[name] = {
            "seconds_plain": statistics.median(plain),
            "seconds_changed": statistics.median(changed),
            "ratio": statistics.median(c / p for c, p in zip(changed, plain, strict=True)),
            "tokens": own[0]["tokens"],
            "peak": max(run["peak"] for run in own),
            "commit": commit(),
            "memory_ratio": statistics.median(run["peak"] / run["peak_of_plain"] for run in own),
        }
    about = {"model": MODEL, "rows": ROWS, "rank": RANK, "passes": TURNS * ROUNDS}
    about |= {"hardware": hardware(), "versions": versions(), "ways": rows}
    path.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
