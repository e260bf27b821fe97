"""One file and one engine: is it tuned, is the result exported, and is that read back by llama.cpp itself?"""

from pathlib import Path

from architectures import write_model
from folders import label_rows, write_rows

from tezo.cli.runs import MUCH_LOST
from tezo.engines.llama_cpp.file import GgufHeader
from tezo.system.errors import TezoError
from tezo.training.exporting import export_whole
from tezo.training.loop import train
from tezo.training.settings import parse_config

STEP = {"name": "gauss-newton", "rank": 4, "num_directions": 4}
PLAIN = {"name": "tezo", "rank": 4, "lr": 0.05}
WAYS = ((16, STEP), (48, STEP), (16, PLAIN))
"""Rows and method: more rows where a step on few is not taken, since others do not bear it out, then another method."""
LARGE = {"gemma3n"}
"""Has no fewer than 22 blocks, and is tried in float32 alone."""
MOVED = 0.01
"""Least change of the loss by a step that counts."""
OVERFLOWS = {("mpt", "F16")}
"""Products by matrices in F16 take their inputs in F16, where those of this random model are infinite."""
MOST_PACKED_AWAY = 0.75
"""Part of the change of the loss that packing may take back, at most."""
READ_BACK = 0.02
"""Difference of losses that packed products may make, whose inputs are rounded in groups of tokens."""
REFUSED, NOT_EXPORTED = "refused", "not exported"


def tried(architecture, kind, engine, folder):
    """Tunes a tiny random model for a round, and writes it whole.

    Returns {"engine", "before", "after": losses of the rows, untuned and after the run, "with_adapter", "file": those
    of the adapter and of the whole file in llama.cpp, "lost": largest part of a matrix's change that packing lost,
    "layers": number of those changed, "notices", "rows": their number, "method"}, or {"refused": why}; "not exported":
    why stands in the place of those behind "after".
    """
    for number, (count, method) in enumerate(WAYS):
        found = _tried(architecture, kind, engine, folder / f"{number}", count, method)
        if REFUSED in found or abs(found["before"] - found["after"]) > MOVED:
            break
    return found | {"rows": count, "method": method["name"]}


def _tried(architecture, kind, engine, folder, count, method):
    folder.mkdir(parents=True)
    model, rows = folder / "model.gguf", folder / "rows.jsonl"
    write_model(model, architecture, kind)
    write_rows(rows, label_rows(count))
    config = parse_config(
        {
            "model": {"name": str(model), "engine": engine},
            "data": {"train": str(rows), "dev": str(rows), "test": str(rows)},
            "method": method,
            "train": {"steps": 1, "batch_size": count, "keep_best": method is STEP},
        }
    )

    def said(error):
        return str(error).replace(f"{folder}/model.gguf", "the file").replace(f"{folder}/run", "the run")

    try:
        summary = train(config, folder / "run")
    except TezoError as error:
        return {REFUSED: said(error)}
    losses = {"engine": engine} | {when: summary[when]["loss"] for when in ("before", "after")}
    try:
        whole = export_whole(folder / "run", folder / "out")
    except TezoError as error:
        return losses | {NOT_EXPORTED: said(error)}
    assert whole.losses is not None, whole.notices
    changed = {name for name, own in GgufHeader(model).tensors.items()
               if data_of(model, own) != data_of(whole.path, GgufHeader(whole.path).tensors[name])}  # fmt: skip
    return losses | {
        "with_adapter": whole.losses[0],
        "file": whole.losses[1],
        "lost": whole.lost,
        **_finer(folder, whole),
        "layers": len(changed),
        "notices": [notice for notice in summary["notices"] if "tuned" in notice],
    }


def _finer(folder, whole):
    if whole.lost <= MUCH_LOST:
        return {}
    finer = export_whole(folder / "run", folder / "finer", keep_tuned="q8_0")
    assert finer.losses is not None, finer.notices
    return {"finer": finer.losses[1]}


def data_of(path, stored):
    with Path(path).open("rb") as file:
        file.seek(stored.start)
        return file.read(stored.size)


def holds(found, kind):
    """Whether a file was tuned, and its result read back from the file of the run and from the whole one."""
    if REFUSED in found or NOT_EXPORTED in found:
        return False
    exact = 1e-3 if kind == "F32" else READ_BACK
    change = found["before"] - found["after"]
    change = change if found["method"] == STEP["name"] else abs(change)
    is_apart = found["engine"] == "torch" and kind != "F32"  # torch does not round the inputs of packed products
    is_read_back = abs(found["with_adapter"] - found["after"]) <= (1.0 if is_apart else exact)
    packed = found.get("finer", found["file"])
    may_differ = exact if kind == "F32" else max(exact, MOST_PACKED_AWAY * change)
    return change > 0 and is_read_back and abs(packed - found["with_adapter"]) <= may_differ
