"""A run's result written elsewhere: its adapter for PEFT or llama.cpp, the whole model, or a repository of the hub."""

import copy
import json
import shutil
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tezo.models.gguf import GGUF_FILE, check_gguf, is_gguf, save_gguf
from tezo.models.kinds import MEAN, CarriedLabels, kind_of
from tezo.models.loading import LoadedModel, load_model
from tezo.models.lora import load_adapter, merge_adapter, next_allowed, save_adapter, save_model
from tezo.models.peft import check_in_peft, open_adapter
from tezo.models.saving import (
    CARD,
    HERE,
    Saved,
    base_in_peft,
    card_text,
    hub_name,
    save_card,
    save_peft_adapter,
    shown_name,
)
from tezo.runs.folder import ADAPTER, CONFIG, MODEL
from tezo.system.errors import RequestError, RunError, TezoError
from tezo.system.files import check_free, new_folder, one_line, open_to_read, own_object, read_bytes, write_file
from tezo.system.progress import SAVING, UPLOADING, current
from tezo.tasks.formats import default_template
from tezo.tasks.row_files import DataConfig
from tezo.training.job import load
from tezo.training.opening import (
    check_result,
    fitted_to,
    measure_rows,
    open_base,
    open_tuned,
    rows_to_measure,
    temperature_of_run,
)
from tezo.training.settings import Config, read_run_config
from tezo.training.summary import tuning_of

LORA, MERGED, GGUF, WHOLE = "lora", "merged", "gguf-lora", "gguf"
WHOLE_FILE, MODELFILE = "model.gguf", "Modelfile"

_PEFT_CONFIG = "adapter_config.json"
_WAY_OUT = "put an intact copy in its place"
_MOST_CARD = 1 << 20
"""Bytes of a model card, at most."""


def export_run(
    run: Path, output: Path, form: str, *, model: str | None = None, trust_remote_code: bool = False
) -> int | None:
    """Writes the result of a run folder into `output`; models are opened before anything is written.

    Args:
        run: folder of the run.
        output: folder to write, new.
        form: "lora", "merged" or "gguf-lora".
        model: folder or hub name of the base model, of the same weights; None: as the run names it.
        trust_remote_code: whether code that comes with the model may run; what the run says of it does not count.

    Returns:
        The rank of the adapter in the file, where it is one of this library for PEFT; else None.

    Raises:
        RequestError: the run has no result of this form, or the base model is another one.
    """
    settings = [
        ("model.placement", "device"),
        ("model.engine", "torch"),  # weights in the file of an engine take no change
        ("model.trust_remote_code", trust_remote_code),
    ]
    config = _checked_config(run, output, form, [*settings, *([("model.name", model)] if model else [])])
    saved, peft = run / ADAPTER, config.model.peft
    if form == GGUF and (saved / GGUF_FILE).is_file():  # which the engine of the run has written
        with current().phase(SAVING), new_folder(output) as folder:
            shutil.copyfile(saved / GGUF_FILE, folder / GGUF_FILE)
        return None
    if not saved.is_dir():
        kind, dtype = config.model.kind, config.model.dtype
        loaded = load_model(str(run / MODEL), kind=kind, dtype=dtype, trust_remote_code=trust_remote_code)
    else:
        loaded = open_base(run, config)
        if peft != "none":
            loaded = open_adapter(loaded, config.model, saved)
        elif form == MERGED:
            merge_adapter(loaded.model, load_adapter(saved))
    return _write(run, output, form, config, loaded)


def export_tuned(run: Path, output: Path, form: str, tuned: LoadedModel) -> None:
    """Writes the same as `export_run` from the run's model in memory, which is left as it is."""
    config = _checked_config(run, output, form, [])
    if form == MERGED:
        check_mergeable(tuned.model)
        if config.model.peft != "none":
            tuned = replace(tuned, model=copy.deepcopy(tuned.model))
    _write(run, output, form, config, tuned)


def check_mergeable(model: Any) -> None:
    """Raises a `RequestError` where the weights of a model in memory cannot take a change."""
    if any(parameter.is_meta for parameter in model.parameters()):
        raise RequestError("the weights stay in their file and take no change; export the folder of the run.")
    if getattr(model, "is_quantized", False):  # set by transformers
        raise RequestError("the base model is packed and takes no change; export its adapter, in the format lora.")


def _checked_config(run: Path, output: Path, form: str, settings: list[tuple[str, Any]]) -> Config:
    """The configuration of a run; an error where it has no result of this form, or not the one that it wrote."""
    check_result(run)
    check_free(output)
    if form not in (LORA, MERGED, GGUF):
        raise RequestError(f"format is {form!r}; it must be {LORA}, {MERGED}, {GGUF} or {WHOLE}.")
    config = read_run_config(run / CONFIG, settings)
    peft = config.model.peft
    if form == MERGED and config.model.quantization != "none":
        raise RequestError(
            f"format is merged, but the base is packed as {config.model.quantization} and takes no change; "
            "use the format lora."
        )
    if form != MERGED and not (run / ADAPTER).is_dir():
        raise RequestError(f"{run} has no adapter: {config.method.name} changed the weights; use the format merged.")
    if form == GGUF and peft != "none":
        raise RequestError("format is gguf-lora, which is written for adapters of this library, not of PEFT; use lora.")
    if form == MERGED and peft not in ("none", "lora"):
        raise RequestError(f"format is merged, but a {peft} has no weights to merge into; use the format lora.")
    return config


def _write(run: Path, output: Path, form: str, config: Config, loaded: LoadedModel) -> int | None:
    """Writes an export; returns the rank of an adapter of this library for PEFT, else None.

    The model is the base for an adapter of this library, has its adapter of PEFT, or has everything merged in.
    """
    model, data, tuning = loaded.model, config.data, tuning_of(run, config, loaded.kind)
    is_ours = form != MERGED and config.model.peft == "none"
    adapter = load_adapter(run / ADAPTER) if is_ours else None
    if form == GGUF and adapter is not None:
        check_gguf(adapter, model, loaded.untied)
    if form == MERGED and config.model.peft != "none":
        model = model.merge_and_unload()
    with current().phase(SAVING), new_folder(output) as folder, loaded.files.unchanged():
        if form == MERGED:
            save_model(model, loaded.tokenizer, folder)
            if data.task is None and data.label_words is not None:
                pooling = MEAN if loaded.kind == "encoder" else None
                named = None if data.text == DataConfig.text else default_template(loaded.kind, data.text)
                template, temperature = data.template or named, temperature_of_run(run)
                CarriedLabels(data.label_words, template, pooling, temperature).write(folder)
        elif adapter is None:
            save_peft_adapter(loaded, folder, config.model, tuning)
        elif form == GGUF:
            save_gguf(adapter, folder, model=model)
        else:
            check_in_peft(adapter, model, folder)
            save_adapter(adapter, folder, model=model, base=base_in_peft(config.model.name, model))
            rank = next_allowed(adapter.rank)
            save_card(folder, Saved("lora", config.model.name, loaded.kind, rank), loaded.fingerprint, tuning)
            return rank
    return None


@dataclass(frozen=True)
class WholeFile:
    """A GGUF file that has a run's change in it.

    Attributes:
        path: of the file.
        matrices: number of matrices that were changed.
        lost: largest error of packing a matrix, as a part of its change.
        rows: what the losses are of; None: they were not measured.
        losses: of the base with the adapter, and of the file.
        notices: for the user.
    """

    path: Path
    matrices: int
    lost: float
    rows: str | None
    losses: tuple[float, float] | None
    notices: tuple[str, ...] = ()


def export_whole(run: Path, output: Path, *, model: str | None = None, keep_tuned: str | None = None) -> WholeFile:
    """Writes the base's GGUF file with the change of a run in it, and a Modelfile for Ollama beside it.

    Args:
        run: folder of the run.
        output: folder to write, new.
        model: GGUF file of the base model; None: as the run names it.
        keep_tuned: type of the changed matrices, such as q8_0; None: that of each in the base.

    Raises:
        RequestError: the base is no GGUF file or another one, the run has no adapter, or a matrix cannot be packed.
    """
    from tezo.engines.llama_cpp.engine import LlamaCpp
    from tezo.engines.llama_cpp.loading import file_of
    from tezo.engines.llama_cpp.model import LlamaModel
    from tezo.engines.llama_cpp.modelfile import modelfile
    from tezo.engines.llama_cpp.tokenizer import LlamaTokenizer
    from tezo.engines.llama_cpp.whole import write_whole

    check_result(run)
    check_free(output)
    settings = [("model.engine", "llama.cpp"), ("model.dtype", "auto"), ("model.device", "auto")]
    config = read_run_config(run / CONFIG, [*settings, *([("model.name", model)] if model else [])])
    if config.model.peft != "none" or not (run / ADAPTER).is_dir():
        raise RequestError(
            f"format is {WHOLE}, which needs an adapter of this library, and {run} has none; use merged."
        )
    name = config.model.name
    if not name.startswith("embedded:") and not is_gguf(Path(name).expanduser()):
        raise RequestError(
            f"format is {WHOLE}, which is written of a base in GGUF, and that of {run} is {name}; give the file of the "
            "same weights by --model, or use the format merged, and then convert_hf_to_gguf.py of llama.cpp."
        )
    path, loaded = file_of(name), open_base(run, config)
    assert isinstance(loaded.engine, LlamaCpp)
    change = loaded.engine.stored(load_adapter(run / ADAPTER).pairs)
    with current().phase(SAVING), new_folder(output) as folder:
        done = write_whole(path, folder / WHOLE_FILE, change, keep_tuned=keep_tuned)
        tokenizer = LlamaTokenizer(LlamaModel(path, vocabulary_only=True), path, loaded.max_length)
        write_file(folder / MODELFILE, modelfile(WHOLE_FILE, tokenizer).encode())
    lost, written = max((own.lost for own in done), default=0.0), output / WHOLE_FILE
    try:
        rows, losses = _losses(run, config, loaded, written)
    except TezoError as error:
        return WholeFile(written, len(done), lost, None, None, (f"the loss of the file was not measured ({error}).",))
    return WholeFile(written, len(done), lost, rows, losses)


def _losses(run: Path, config: Config, loaded: LoadedModel, written: Path) -> tuple[str, tuple[float, float]]:
    """Returns (rows in words, losses of the base with the adapter and of a file that has it packed in)."""
    rows, source, _ = rows_to_measure(run, config, None)
    config, _ = fitted_to(run, config, rows)
    tuned = open_tuned(run, config, loaded)
    try:
        with_adapter, _ = measure_rows(config, tuned.loaded, rows)
    finally:
        tuned.close()
    alone = replace(config, model=replace(config.model, name=str(written)))
    packed, _ = measure_rows(alone, load(alone), rows)
    if "loss" not in with_adapter:
        raise RequestError(f"{source} have no loss")
    return f"{len(rows)} rows of {source}", (float(with_adapter["loss"]), float(packed["loss"]))


def push_run(run: Path, name: str, *, public: bool = False) -> str:
    """Uploads the adapter of a run, or its model, with a model card; the base model is not loaded.

    Only the result goes up: neither rows nor logs nor the run's configuration, and no name of a folder.

    Args:
        run: folder of the run.
        name: repository, as owner/name; it is created if there is none.
        public: whether a repository that is created can be seen by everybody.

    Returns:
        The address of the repository.

    Raises:
        RequestError: the run has no result, the name is not one of the hub, or the hub does not let it be written.
        RunError: the upload failed.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    check_result(run)
    config = read_run_config(run / CONFIG, [])
    result = run / (ADAPTER if (run / ADAPTER).is_dir() else MODEL)
    if hub_name(name) is None or name.count("/") != 1:
        raise RequestError(f"{name!r} is not a name on the hub, or is a folder here; give OWNER/NAME.")
    changed = _changed(result, run, config, name)
    api = HfApi(library_name="tezo", library_version=version("tezo"))
    login = "log in with `hf auth login` or set HF_TOKEN, to an account that may write there"
    with current().phase(UPLOADING), ExitStack() as opened:
        try:
            url = api.create_repo(name, private=not public, exist_ok=True)
        except (HfHubHTTPError, LocalTokenNotFoundError) as error:
            raise RequestError(f"{name} cannot be written on the hub ({one_line(error)}); {login}.") from error
        except Exception as error:  # of the network library, see below
            raise RunError(f"the hub cannot be reached ({one_line(error)}); check the network.") from error
        files: dict[str, Any] = {
            path.relative_to(result).as_posix(): opened.enter_context(open_to_read(path))
            for path in sorted(result.rglob("*"))
            if not path.is_dir()
        }
        added = [CommitOperationAdd(file, content) for file, content in (files | changed).items()]
        try:
            api.create_commit(name, added, commit_message="Upload by tezo push")
        except Exception as error:  # of the network library that huggingface_hub has, whichever it is
            raise RunError(f"the upload to {name} failed ({one_line(error)}); run the same command again.") from error
    return str(url)


def _changed(result: Path, run: Path, config: Config, name: str) -> dict[str, bytes]:
    """Name -> content of the files that others get changed: a card with its repository, settings without a folder."""
    if (result / CARD).is_file():
        text = read_bytes(result / CARD, _MOST_CARD).decode()
    else:  # a whole model, which has none beside it
        architectures = own_object(result / "config.json", _WAY_OUT).get("architectures") or []
        kind = kind_of(architectures)
        text = card_text(Saved("model", config.model.name, kind), tuning_of(run, config, kind))
    changed = {CARD: text.replace(HERE, name).encode()}
    if (result / _PEFT_CONFIG).is_file():
        settings = own_object(result / _PEFT_CONFIG, _WAY_OUT)
        settings["base_model_name_or_path"] = shown_name(config.model.name)
        changed[_PEFT_CONFIG] = (json.dumps(settings, indent=2) + "\n").encode()
    return changed
