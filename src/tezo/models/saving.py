"""Saves what was trained: an exact LoRA adapter if there is one, a PEFT adapter, or the whole model.

An adapter has a model card (README.md) beside it, as the Hugging Face hub and PEFT know it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Literal

from transformers import PreTrainedModel

from tezo.methods import METHODS
from tezo.models.gguf import is_gguf
from tezo.models.identity import Fingerprint, fingerprint
from tezo.models.kinds import IN_MEMORY, Kind, ModelConfig, kind_of
from tezo.models.loading import CLASSES, EMBEDDED, LoadedModel
from tezo.models.lora import ALLOWED_RANKS, BASE, Adapter, make_adapter, next_allowed, save_adapter, save_model
from tezo.models.peft import check_in_peft, why_not_in_peft
from tezo.optim.base_optimizer import BaseOptimizer
from tezo.system.files import storing, write_file

CARD = "README.md"
HERE = "THIS_REPOSITORY"
"""In a card, the place that the result is loaded from: its folder, or the hub name that `tezo push` puts there."""

_PIPELINES: dict[Kind | None, str] = {
    "causal": "text-generation",
    "masked": "fill-mask",
    "encoder": "feature-extraction",
    "classifier": "text-classification",
}


@dataclass(frozen=True)
class Tuning:
    """The facts in a card about the run behind a result.

    Attributes:
        steps: number of steps that led to the kept parameters.
        rows: split ("train", "dev", "test") -> number of rows.
        before: metrics before training of the test rows, or of the dev rows where there are none.
        after: the same after training.
        prompt: the prompt template, in Markdown; empty if each row has its prompt.
        remarks: sentences on the run, such as on a change of its scorer.
    """

    method: str
    steps: int
    rows: Mapping[str, int]
    before: Mapping[str, float]
    after: Mapping[str, float]
    prompt: str = ""
    remarks: Sequence[str] = ()


@dataclass(frozen=True)
class Saved:
    """The result that a card describes.

    Attributes:
        form: "lora" (also the exact adapter of this library), "prefix" or "prompt", or "model" for a whole one.
        base: folder or hub name of the base model.
        kind: kind of the model; None if it is not one of transformers.
        rank: rank in the file of an adapter of this library; None for other results.
        not_in_peft: reason why PEFT would not add the adapter as it was trained; None if it does.
        in_gguf: name of a file beside it with the same adapter for llama.cpp; None: there is none.
    """

    form: Literal["lora", "prefix", "prompt", "model"]
    base: str
    kind: Kind | None
    rank: int | None = None
    not_in_peft: str | None = None
    in_gguf: str | None = None

    @property
    def in_vllm(self) -> bool:
        """Whether vLLM serves it beside its base."""
        base = EMBEDDED.get(self.base, ("", self.base, ""))[1]
        fits = self.rank is not None and self.rank <= ALLOWED_RANKS[-1] and self.not_in_peft is None
        return self.form == "lora" and self.kind == "causal" and fits and not is_gguf(base)


def card_text(saved: Saved, tuning: Tuning | None) -> str:
    """Returns the card: YAML metadata and Markdown. No folder of this machine is named in it."""
    from huggingface_hub import ModelCardData

    name, method = shown_name(saved.base), METHODS.get(tuning.method) if tuning else None
    tags = ["tezo"] if saved.form == "model" else ["tezo", saved.form]
    data = ModelCardData(
        library_name="transformers" if saved.form == "model" else "peft",
        base_model=hub_name(saved.base),
        pipeline_tag=_PIPELINES.get(saved.kind),
        tags=[*tags, "zeroth-order"] if method or tuning is None else tags,
    )
    what = {"model": "Model tuned from", "lora": "LoRA adapter for"}.get(saved.form, f"{saved.form} adapter for")
    rows = {"base model": name}
    if tuning is not None:
        rows["method"] = f"`{tuning.method}`" + (f": {method.summary.partition(': ')[2]}" if method else "")
        rows["steps"] = str(tuning.steps)
        rows["rows"] = ", ".join(f"{count} {split}" for split, count in tuning.rows.items() if count)
    if saved.rank is not None:
        rows["rank"] = f"{saved.rank}, at scale 1 (`lora_alpha` = `r`)"
    origin = "| | |\n|---|---|\n" + "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    sections = [f"---\n{data.to_yaml()}\n---", f"# {what[0].upper()}{what[1:]} {name}", "Trained with `tezo`.", origin]
    if tuning is not None:
        of = "test" if tuning.rows.get("test") else "dev"
        metrics = [f"| {key} | {tuning.before[key]:.4f} | {value:.4f} |"
                   for key, value in tuning.after.items() if key in tuning.before]  # fmt: skip
        head = ["| | before | after |", "|---|---:|---:|"]
        sections += ["## Metrics", f"On the {tuning.rows.get(of, 0)} {of} rows.", "\n".join([*head, *metrics])]
        sections += [f"{text[0].upper()}{text[1:]}" for text in tuning.remarks]
        sections += ["## Prompt", tuning.prompt] if tuning.prompt else []
    return "\n\n".join([*sections, "## Loading", *_loading(saved, name)]) + "\n"


def hub_name(base: str) -> str | None:
    """Returns `base` if it is a name of the hub; None for a folder, a GGUF file or a model without a name."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if is_gguf(base):
        return None
    try:
        validate_repo_id(base)
    except HFValidationError:
        return None
    return None if not base or Path(base).exists() else base


def shown_name(base: str) -> str:
    """Returns a hub name in full; of a folder the last part alone."""
    return hub_name(base) or PureWindowsPath(base).name or "the base model"


def base_in_peft(name: str, model: Any) -> str:
    """Returns the name of a base by which PEFT finds it: of a model in a package its folder, if it has one.

    Args:
        name: folder or hub name, or one in `EMBEDDED`.
        model: the base.
    """
    place = str(model.name_or_path)
    return place if name in EMBEDDED and Path(place).is_dir() else name


def _loading(saved: Saved, base: str) -> list[str]:
    """How to load the result, with the libraries that take it."""
    cls = CLASSES[saved.kind or "encoder"].__name__
    load = f"from transformers import {cls}\n\nmodel = {cls}.from_pretrained({{}})"
    where = f"`{HERE}` stands for this folder or repository."
    if saved.form == "model":
        return [where, _code(load.format(f'"{HERE}"'))]
    package, place, _ = EMBEDDED.get(saved.base, ("", base, ""))
    in_gguf, file = is_gguf(place), PureWindowsPath(place).name
    load = load.format(f'"FOLDER", gguf_file="{file}"' if in_gguf else f'"{base}"')
    inside = f" in the Python package {package}" if package else ""
    folder = f"{package}/{PurePosixPath(place).parent}{inside}" if package else "of the base model"
    where += f" FOLDER is the folder of {file}{inside}." if in_gguf else ""
    where += "" if in_gguf or hub_name(saved.base) else f" `{base}` stands for the folder {folder}."
    lora = f"llama-server -m {file} --lora {HERE}/{saved.in_gguf}"
    in_llama = ["With llama.cpp:", _code(lora, language="sh")] if saved.in_gguf is not None else []
    if saved.not_in_peft is not None and in_llama:
        return [where, f"PEFT does not add this adapter: {saved.not_in_peft}.", *in_llama]
    if saved.not_in_peft is not None:
        why = f"PEFT does not add this adapter as it was trained ({saved.not_in_peft}); `tezo` does:"
        with_tezo = f'\nhandles = tezo.load_adapter(model, "{HERE}")'
        return [f"{where} {why}", _code(f"import tezo\n{load}{with_tezo}")]
    with_peft = f'\nmodel = PeftModel.from_pretrained(model, "{HERE}")'
    ways = [where, "With PEFT:", _code(f"from peft import PeftModel\n{load}{with_peft}")]
    if saved.form == "lora":
        ways += ["With transformers, which needs PEFT:", _code(load + f'\nmodel.load_adapter("{HERE}")')]
    ways += in_llama
    if saved.in_vllm:
        serve = f"vllm serve {base} --enable-lora --max-lora-rank {saved.rank} --lora-modules tuned={HERE}"
        ways += ["With vLLM:", _code(serve, language="sh")]
    return ways


def _code(text: str, language: str = "python") -> str:
    return f"```{language}\n{text}\n```"


def save_result(
    config: ModelConfig,
    loaded: LoadedModel,
    optimizer: BaseOptimizer,
    place: Callable[[str], AbstractContextManager[Path]],
    tuning: Tuning | None = None,
) -> dict[str, Any]:
    """Saves what was trained; returns its "kind", its "folder" and details of that kind.

    An adapter that PEFT would not add as it was trained is none: the model is saved whole, or, where packed weights
    cannot take the change, the adapter is saved for this library alone.

    Args:
        config: the section `model` of the configuration.
        loaded: the model; if it is saved whole, the change is merged into its weights.
        optimizer: the optimizer that trained it.
        place: folder name -> context manager with a folder of that name to write into.
        tuning: facts about the run for an adapter's card; None: none.
    """
    reason = optimizer.why_no_adapter()
    if config.peft != "none":
        optimizer.merge()  # into the adapter's tensors
        with place("adapter") as folder:
            save_peft_adapter(loaded, folder, config, tuning)
        return {"kind": "peft", "folder": "adapter", "adapter": config.peft}
    if reason is None:
        adapter = make_adapter(optimizer)
        with suppress(_NotInPeftError), place("adapter") as folder:
            reason = why_not_in_peft(adapter, loaded.model, folder)
            if reason is not None and all(target.is_writable for target in optimizer.targets):
                raise _NotInPeftError
            save_adapter(adapter, folder, model=loaded.model, base=base_in_peft(config.name, loaded.model))
            engine = loaded.engine
            beside = None if engine is None else engine.save_beside(adapter.rank, adapter.pairs, folder)
            rank = next_allowed(adapter.rank)
            saved = Saved("lora", config.name, kind_of([type(loaded.model).__name__]), rank, reason, beside)
            save_card(folder, saved, loaded.fingerprint, tuning)
            more: dict[str, Any] = {} if reason is None else {"why_not_in_peft": reason}
            if engine is not None and beside is not None:
                more |= {"engine": engine.name, "engine_file": beside}
            if saved.in_vllm:
                more["in_vllm"] = True
            return {"kind": "adapter", "folder": "adapter", "rank": adapter.rank, **more}
    optimizer.merge()
    with place("model") as folder:
        save_model(loaded.model, loaded.tokenizer, folder)
    return {"kind": "model", "folder": "model", "why_no_adapter": reason}


class _NotInPeftError(Exception):
    """The folder of an adapter is dropped, because PEFT would not add it as it was trained."""


def save_card(folder: Path, saved: Saved, base_is: Fingerprint, tuning: Tuning | None = None) -> None:
    """Writes the card of an adapter of this library, and the fingerprint `base_is` of its base model if it is known.

    Of `tuning` see `save_result`.
    """
    if base_is:
        write_file(folder / BASE, (json.dumps(dict(base_is), indent=2, sort_keys=True) + "\n").encode())
    write_file(folder / CARD, card_text(saved, tuning).encode())


def save_peft_adapter(loaded: LoadedModel, folder: Path, config: ModelConfig, tuning: Tuning | None) -> None:
    """Writes the adapter of PEFT that a model has, and its card in place of PEFT's; see `save_result`."""
    assert config.peft != "none"
    if config.name != IN_MEMORY:
        for adapter in loaded.model.peft_config.values():
            adapter.base_model_name_or_path = base_in_peft(config.name, loaded.model.get_base_model())
    loaded.model.save_pretrained(folder)
    write_file(folder / CARD, card_text(Saved(config.peft, config.name, loaded.kind), tuning).encode())


def export_adapter(optimizer: BaseOptimizer, folder: str | Path) -> Adapter:
    """Writes the adapter that an optimizer has trained, for `PeftModel.from_pretrained(base, folder)`, with its card.

    Its rank in the file is the next of 8, 16, 32, 64, 128, 256, 320 and 512, which vLLM takes; the rank of what is
    returned is the one that was trained.

    Raises:
        RequestError: the change is not exactly an adapter, or PEFT as it is installed here would not add it exactly;
            `optimizer.merge()` gives the whole model.
        RunError: the folder cannot be written.
    """
    adapter, model, folder = make_adapter(optimizer), optimizer.model, Path(folder)
    kind = kind_of([type(model).__name__])
    base_is = fingerprint(model, kind) if isinstance(model, PreTrainedModel) and kind is not None else {}
    base = getattr(model, "name_or_path", "")
    with storing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        check_in_peft(adapter, model, folder.parent)
        save_adapter(adapter, folder, model=model, base=base)
        save_card(folder, Saved("lora", base, kind, next_allowed(adapter.rank)), base_is)
    return adapter
