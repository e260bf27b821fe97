"""PEFT adapters that are tuned in place of a model, and whether PEFT adds an exact adapter as it was trained.

lora (Hu et al., 2021, arXiv 2106.09685): W + (alpha / r) B A with B (M x r) and A (r x N) beside each layer.
prefix (Li and Liang, 2021, arXiv 2101.00190): keys and values in front of the text, in every layer.
prompt (Lester et al., 2021, arXiv 2104.08691): embeddings in front of those of the text.

PEFT's settings are made from the settings of the run, when an adapter is added and when it is opened again. Those in
its adapter_config.json are compared with them, and never used.
"""

import copy
import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MethodType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from tezo.models.gguf_model import GgufForCausalLM
from tezo.models.kinds import Kind, ModelConfig
from tezo.models.loading import LoadedModel
from tezo.models.lora import TASK_TYPES, Adapter, for_file, save_adapter
from tezo.system.errors import RequestError
from tezo.system.files import one_line, plain_file, read_object
from tezo.system.progress import ASKING_PEFT, current


def import_peft() -> Any:
    """Returns the module `peft`; `RequestError` if it is not installed."""
    try:
        import peft
    except ImportError as error:
        raise RequestError(f"model.peft needs PEFT ({error}); pip install peft.") from None
    return peft


def virtual_task_type(kind: Kind) -> str:
    """Returns PEFT's type of task with which its model puts virtual tokens in front of the input."""
    return "CAUSAL_LM" if kind == "causal" else "FEATURE_EXTRACTION"


def random_tokens(loaded: LoadedModel, count: int, seed: int) -> Tensor:
    """Draws `count` token ids (1, count), uniform over the rows of the input embeddings, on the model's device.

    Raises:
        RequestError: they leave no position for a text.
    """
    if count >= loaded.positions:
        raise RequestError(
            f"model.prefix_length is {count}, but the model has {loaded.positions} positions for it and the text; "
            "lower it."
        )
    rows = loaded.model.get_input_embeddings().weight.shape[0]
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(rows, (1, count), generator=draw).to(loaded.device)


def _make_lora(loaded: LoadedModel, config: ModelConfig, seed: int) -> tuple[Any, None]:
    """In PEFT's default layers and with its initial values, B = 0, so the model starts as the base model."""
    del seed
    task_type = (TASK_TYPES | {"classifier": "SEQ_CLS"}).get(loaded.kind)
    return import_peft().LoraConfig(task_type=task_type, r=config.lora_rank, lora_alpha=config.lora_alpha), None


@torch.no_grad()
def _make_prefix(loaded: LoadedModel, config: ModelConfig, seed: int) -> tuple[Any, Tensor]:
    """The prefix starts with the model's keys and values for random tokens, as MeZO's prefix does.

    Random numbers, PEFT's default, are no keys of this model.
    """
    tokens_1V, cache = random_tokens(loaded, config.prefix_length, seed), DynamicCache()
    loaded.model(input_ids=tokens_1V, attention_mask=torch.ones_like(tokens_1V), past_key_values=cache)
    states = [state for layer in cache.layers for state in (layer.keys, layer.values)]  # each (1, heads, V, width)
    shapes = {tuple(state.shape) for state in states}
    if len(shapes) != 1:
        raise RequestError(
            "model.peft is prefix, which needs a model that keeps keys and values of one shape in all layers; use lora "
            "or prompt."
        )
    ((_, heads, count, width),) = shapes
    settings = import_peft().PrefixTuningConfig(
        task_type=virtual_task_type(loaded.kind),
        num_virtual_tokens=count,
        num_layers=len(states) // 2,
        num_attention_heads=heads,
        token_dim=heads * width,
    )
    # PEFT reads a row as (layer, key or value, head, entry)
    rows = [state[0].transpose(0, 1).to("cpu", torch.float32) for state in states]
    return settings, torch.stack(rows, 1).flatten(1)


@torch.no_grad()
def _make_prompt(loaded: LoadedModel, config: ModelConfig, seed: int) -> tuple[Any, Tensor]:
    """The prompt starts with the embeddings of random tokens; the paper finds random numbers worse than these."""
    embed = loaded.model.get_input_embeddings()
    start_VD = embed(random_tokens(loaded, config.prefix_length, seed))[0].to("cpu", torch.float32)
    settings = import_peft().PromptTuningConfig(
        task_type=virtual_task_type(loaded.kind),
        num_virtual_tokens=len(start_VD),
        token_dim=start_VD.shape[1],
        num_attention_heads=1,  # a prompt has none, but PEFT asks for their number where a model has none either
    )
    return settings, start_VD


def _settle_prompt(model: Any) -> None:
    """Gives PEFT the input embeddings, which it guesses by their size, and replaces two methods of its model.

    PEFT looks the prompt up once for all rows, which then cannot be perturbed differently. And it continues texts with
    their padding between prompt and text, without positions, so that an answer depends on the other texts of a batch.
    """
    model.word_embeddings = model.get_base_model().get_input_embeddings()
    model.get_prompt = MethodType(_prompt_of_rows, model)
    model.generate = MethodType(_continue, model)


def _prompt_of_rows(model: Any, batch_size: int, **_: object) -> Tensor:
    """The prompt of each row, (batch_size, V, D)."""
    encoder, tokens_V = model.prompt_encoder[model.active_adapter], model.prompt_tokens[model.active_adapter]
    prompt_BVD: Tensor = encoder(tokens_V.expand(batch_size, -1).to(encoder.embedding.weight.device))
    return prompt_BVD


@torch.no_grad()
def _continue(model: Any, input_ids: Tensor, attention_mask: Tensor, **options: Any) -> Tensor:
    """Texts padded on the left, with what the model continues them by; the prompt stands right before each text."""
    text_BLD = model.word_embeddings(input_ids)
    prompt_BVD = model.get_prompt(batch_size=len(input_ids)).to(text_BLD.dtype)
    whole_BTD = torch.cat([prompt_BVD, text_BLD], 1)
    mask_BT = torch.cat([attention_mask.new_ones(prompt_BVD.shape[:2]), attention_mask], 1)
    order_BT = mask_BT.argsort(dim=1, stable=True)  # padding first, then the prompt, then the text
    rows_B1 = torch.arange(len(input_ids), device=input_ids.device).unsqueeze(1)
    added = model.get_base_model().generate(
        inputs_embeds=whole_BTD[rows_B1, order_BT], attention_mask=mask_BT[rows_B1, order_BT], **options
    )
    return torch.cat([input_ids, added], 1)


ADAPTERS: dict[str, Callable[[LoadedModel, ModelConfig, int], tuple[Any, Tensor | None]]] = {
    "lora": _make_lora,
    "prefix": _make_prefix,
    "prompt": _make_prompt,
}
"""Value of `model.peft` -> (base model, configuration, seed) -> PEFT's settings, and the initial values (V, D) of V
virtual tokens, float32, or None for LoRA, which starts as PEFT draws it."""

_WITHOUT_EFFECT = {"auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision"}
"""Keys of adapter_config.json that no output depends on."""


def add_adapter(loaded: LoadedModel, config: ModelConfig, seed: int) -> LoadedModel:
    """Adds a new adapter to a model, in place; only the adapter is trainable. With `config.peft` "none", adds none.

    LoRA starts as the base model, virtual tokens as random tokens in front, drawn by `seed`.

    Raises:
        RequestError: PEFT is not installed, or does not support this adapter for this model.
    """
    if config.peft == "none":
        return loaded
    if loaded.kind == "classifier" and config.peft != "lora":
        raise RequestError(
            f"model.peft is {config.peft}, which needs a model that is causal, masked or encoder, but this one is "
            "classifier; use lora."
        )
    peft = import_peft()
    try:
        settings, start_VD = ADAPTERS[config.peft](loaded, config, seed)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = peft.get_peft_model(loaded.model, settings).eval()
        if config.peft == "prompt":
            _settle_prompt(model)
        if start_VD is not None:
            (encoder,) = model.prompt_encoder.values()
            encoder.embedding.weight.data.copy_(start_VD)
            token_11 = torch.zeros((1, 1), dtype=torch.long, device=loaded.device)
            with torch.no_grad():
                model(input_ids=token_11, attention_mask=torch.ones_like(token_11))  # whether PEFT can run it
    except (RequestError, torch.OutOfMemoryError):
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        instead = "another kind of adapter, or none" if config.peft == "lora" else "lora"
        raise RequestError(
            f"model.peft is {config.peft}, which PEFT cannot add to this model ({one_line(error)}); use {instead}."
        ) from None
    return replace(loaded, model=model, virtual_tokens=0 if start_VD is None else len(start_VD))


def open_adapter(loaded: LoadedModel, config: ModelConfig, folder: Path) -> LoadedModel:
    """Adds the tuned adapter that `save_pretrained` wrote into `folder` to its base model, in place.

    Raises:
        RequestError: PEFT is not installed, the adapter is missing or damaged, or it is not the one that was added.
    """
    try:
        tensors = load_file(plain_file(folder / "adapter_model.safetensors"))
        described = read_object(folder / "adapter_config.json")
        opened = add_adapter(loaded, config, seed=0)
        opened.model.requires_grad_(requires_grad=False)
        (settings,) = opened.model.peft_config.values()
        wanted = json.loads(json.dumps(settings.to_dict(), default=sorted))
        # another version of PEFT has other settings besides
        for key in sorted((described.keys() & wanted.keys()) - _WITHOUT_EFFECT):
            here, there = (sorted(v) if isinstance(v, list) else v for v in (wanted[key], described[key]))
            if here != there:
                raise ValueError(f"its adapter_config.json says {key}: {there!r:.40}, and the run has {here!r:.40}")
        peft = import_peft()
        peft.set_peft_model_state_dict(opened.model, tensors)
        found = peft.get_peft_model_state_dict(opened.model, save_embedding_layers=False)
        for name in sorted(tensors.keys() | found.keys()):
            given, got = tensors.get(name), found.get(name)
            if given is None or got is None or not torch.equal(got.cpu(), given.to(got.dtype)):
                raise ValueError(f"its {name} is not one of the adapter of this run")
    except RequestError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise RequestError(f"{folder} is not an adapter that can be read ({one_line(error)}); train again.") from None
    return opened


def check_in_peft(adapter: Adapter, model: nn.Module, disk: Path) -> None:
    """Raises a `RequestError` if PEFT would not add exactly this adapter to the model; see `why_not_in_peft`."""
    reason = why_not_in_peft(adapter, model, disk)
    if reason is not None:
        raise RequestError(
            f"there is no exact adapter, because {reason}; export the merged model, or leave such layers out of "
            "method.targets."
        )


def why_not_in_peft(adapter: Adapter, model: nn.Module, disk: Path) -> str | None:
    """Returns None if PEFT adds exactly this adapter to the model; else the reason, in words.

    When PEFT loads an adapter it renames layers and targets of some families, refuses layers of others by their names,
    and only warns of layers that it leaves out. So it is asked: it loads the adapter into a model of the same
    configuration whose weights take no memory. None, too, where there is nothing to ask: PEFT is not installed, or the
    model is not one of transformers, whose layers PEFT takes by the names that it finds.

    For a moment the adapter is written into the folder `disk`; the system's temporary folder may be without room. Who
    calls it turns an error of that disk into words.
    """
    if isinstance(model, GgufForCausalLM):
        return "its layers have the names of the file, which llama.cpp alone knows"
    if find_spec("peft") is None or not isinstance(model, PreTrainedModel):
        return None
    peft = import_peft()
    by = f"PEFT {peft.__version__}"
    with (
        current().phase(ASKING_PEFT),
        TemporaryDirectory(dir=disk, prefix=".adapter-", suffix=".partial") as folder,
        warnings.catch_warnings(action="ignore"),  # tensors that PEFT leaves out are found by comparison
    ):
        save_adapter(adapter, Path(folder), model=model, base="")
        try:
            loaded: Any = peft.PeftModel.from_pretrained(
                _without_memory(model), folder, low_cpu_mem_usage=True, torch_device="cpu"
            )
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, NotImplementedError) as error:
            return f"{by} refuses it ({one_line(error)})"
    pairs, wrong = for_file(adapter).pairs, []
    added = {name: layer for name, layer in loaded.get_base_model().named_modules() if hasattr(layer, "lora_A")}
    for name in sorted(pairs.keys() | added.keys()):
        if name not in pairs or name not in added or not _has_pair(added[name], *pairs[name]):
            wrong.append(name)
    if not wrong:
        return None
    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return f"{by} does not add to {wrong[0]}{more} what was trained"


def _without_memory(model: PreTrainedModel) -> PreTrainedModel:
    """A model of the same class and configuration; each weight is one number, seen as often as the weight has any."""
    with torch.device("meta"):
        bare: PreTrainedModel = type(model)(copy.deepcopy(model.config))
    for module in bare.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            # on the CPU, since PEFT moves an adapter to the device of its layer
            value = torch.zeros((), dtype=weight.dtype).expand(weight.shape)
            setattr(module, name, nn.Parameter(value, requires_grad=False))
    return bare


def _has_pair(layer: Any, a_RI: Tensor, b_OR: Tensor) -> bool:
    (key,) = layer.lora_A  # the name that PEFT gives to the adapter
    in_peft_a, in_peft_b = layer.lora_A[key].weight, layer.lora_B[key].weight
    if in_peft_a.is_meta or in_peft_b.is_meta or layer.scaling[key] != 1:
        return False
    return torch.equal(in_peft_a, a_RI) and torch.equal(in_peft_b, b_OR)
