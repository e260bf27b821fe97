"""Names that settings have elsewhere, for the suggestion that an unknown name gets."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from tezo.errors import nearest
from tezo.models.model_config import ModelConfig
from tezo.optim.methods import BASELINES, METHODS, Method
from tezo.tasks.data_config import DataConfig
from tezo.training.configuration.recipe import TrainConfig

ALIASES: Mapping[str, str] = {
    # transformers' TrainingArguments
    "learning_rate": "method.lr",
    "per_device_train_batch_size": "train.batch_size",
    "per_device_eval_batch_size": "train.eval_batch_size",
    "gradient_accumulation_steps": "train.batch_size",
    "max_steps": "train.steps",
    "num_train_epochs": "train.epochs",
    "lr_scheduler_type": "train.schedule",
    "adam_beta1": "method.betas",
    "adam_beta2": "method.betas",
    "adam_epsilon": "method.eps",
    "optim": "method.name",
    "eval_steps": "train.eval_every",
    "logging_steps": "train.log_every",
    "save_steps": "train.checkpoint_every",
    "save_total_limit": "train.keep_checkpoints",
    "load_best_model_at_end": "train.keep_best",
    "early_stopping_patience": "train.patience",
    "data_seed": "data.seed",
    "bf16": "model.dtype=bfloat16",
    "fp16": "model.dtype=float16",
    "output_dir": "--output",
    "report_to": "--report-to",
    "resume_from_checkpoint": "--resume",
    # scripts of transformers, TRL and PEFT
    "model_name_or_path": "model.name",
    "model_name": "model.name",
    "torch_dtype": "model.dtype",
    "load_in_4bit": "model.quantization=nf4",
    "load_in_8bit": "model.quantization=int8",
    "dataset_name": "data.train",
    "dataset_config_name": "data.subset",
    "dataset_text_field": "data.text",
    "task_name": "data.task",
    "train_file": "data.train",
    "validation_file": "data.dev",
    "test_file": "data.test",
    "max_train_samples": "data.num_train",
    "max_eval_samples": "data.num_dev",
    "max_predict_samples": "data.num_test",
    "max_seq_length": "data.max_length",
    "r": "model.lora_rank",
    "lora_r": "model.lora_rank",
    "num_virtual_tokens": "model.prefix_length",
    "target_modules": "method.targets",
    # MeZO and the code of later papers
    "zo_eps": "method.rho",
    "perturbation_scale": "method.rho",
    "num_dev_samples": "data.num_dev",
    "num_k": "data.per_class",
    "rank_r": "method.rank",
    "step_interval": "method.lazy_update_interval",
    "update_interval": "method.lazy_update_interval",
    "num_perturbations": "method.num_directions",
    # plain words
    "learning_rates": "method.lr",
    "batch": "train.batch_size",
    "train_batch_size": "train.batch_size",
    "num_steps": "train.steps",
    "iterations": "train.steps",
    "num_epochs": "train.epochs",
    "eval": "data.test",
    "optimizer": "method.name",
    "precision": "model.dtype",
}  # fmt: skip
"""Name elsewhere -> our key, perhaps with its value, or an option of `tezo train`."""

OPTIONS: Mapping[str, str] = {
    "model.name": "--model",
    "model.quantization": "--quantization",
    "data.train": "--data",
    "data.task": "--task",
    "data.dir": "--data-dir",
    "data.test": "--test",
    "method.name": "--method",
    "method.lr": "--lr",
    "train.steps": "--steps",
    "train.seed": "--seed",
}
"""Key -> the option of `tezo train` that sets it."""


def keys_by_name() -> dict[str, list[str]]:
    """Name -> the dotted keys that end in it, of all sections and of the options of all methods."""
    sections = {"model": ModelConfig, "data": DataConfig, "train": TrainConfig}
    keys = [f"{section}.{field.name}" for section, cls in sections.items() for field in dataclasses.fields(cls)]
    methods: list[Method[Any]] = [*METHODS.values(), *BASELINES.values()]
    options = {"name", *(name for method in methods for name in method.options())}
    found: dict[str, list[str]] = {}
    for key in [*keys, *(f"method.{name}" for name in sorted(options))]:
        found.setdefault(key.partition(".")[2], []).append(key)
    return found


def key_meant(name: str) -> str | None:
    """The key that an unknown name stands for; None if it stands for none.

    Args:
        name: as it was given: with or without a section, with dashes or underscores.
    """
    last = name.lstrip("-").replace("-", "_").lower().rpartition(".")[2]
    if last in ALIASES:
        return ALIASES[last]
    keys = keys_by_name().get(last, [])
    return " or ".join(keys) if keys and name not in keys else None


def suggestion(key: str, known: Iterable[str]) -> str:
    """What to say of an unknown key: the key that it stands for elsewhere, else the nearest known name.

    Args:
        key: as it was given.
        known: names that are known in its place.
    """
    meant = key_meant(key)
    if meant is None:
        return nearest(key.rpartition(".")[2], known)
    option = f" (or {OPTIONS[meant]})" if meant in OPTIONS else ""
    return f"Did you mean {meant}{option}?"
