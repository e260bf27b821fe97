"""Kinds of PEFT's adapters, one file for each; `ADAPTERS` names them by the value of `model.peft`."""

from tezo.models.adapters.adapter_kind import AdapterKind
from tezo.models.adapters.lora_tuning import LORA_TUNING
from tezo.models.adapters.prefix_tuning import PREFIX_TUNING
from tezo.models.adapters.prompt_tuning import PROMPT_TUNING

ADAPTERS: dict[str, AdapterKind] = {"lora": LORA_TUNING, "prefix": PREFIX_TUNING, "prompt": PROMPT_TUNING}
"""lora: low-rank changes of layers. prefix: keys and values in front of the text, in every layer. prompt: embeddings
in front of the text."""
