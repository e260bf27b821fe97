"""What tests of TezoTrainer share: tiny models and rows, arguments, batches as a trainer gave them to the model."""

from pathlib import Path
from typing import Any

import datasets
import torch
from folders import completion_rows, tiny_model, words_tokenizer
from transformers import DataCollatorForLanguageModeling, TrainingArguments

import tezo

TOKENIZER = words_tokenizer()


class Collator:
    """Collates rows of tokens, and keeps what it made."""

    def __init__(self) -> None:
        self.plain = DataCollatorForLanguageModeling(TOKENIZER, mlm=False)
        self.batches: list[dict[str, torch.Tensor]] = []

    def __call__(self, rows: Any) -> Any:
        self.batches.append(self.plain(rows))
        return self.batches[-1]


def llama(seed: int = 0, **changes: Any) -> Any:
    return tiny_model("llama", len(TOKENIZER), seed=seed, **changes)


def token_rows(count: int, seed: int = 0) -> datasets.Dataset:
    texts = [row["prompt"] + row["completion"] for row in completion_rows(count, seed)]
    return datasets.Dataset.from_list([{"input_ids": TOKENIZER(text)["input_ids"]} for text in texts])


def arguments(folder: Path, **named: Any) -> TrainingArguments:
    plain = {
        "max_steps": 3, "per_device_train_batch_size": 4, "use_cpu": True, "report_to": "none",
        "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1, "seed": 5,
    }  # fmt: skip
    return TrainingArguments(str(folder), **(plain | named))


def trainer(folder: Path, model: Any = None, *, rows: Any = None, method: str = "tezo", **named: Any) -> Any:
    """A TezoTrainer; `named` are TrainingArguments but for `lr` and those of `OF_TRAINER`."""
    own = {key: named.pop(key) for key in OF_TRAINER if key in named}
    lr = named.pop("lr", 1e-2)
    rows = token_rows(12) if rows is None else rows
    settings = {"data_collator": Collator(), "processing_class": TOKENIZER, "method_options": {"rank": 4}} | own
    if lr is not None:
        settings["method_options"] = {"lr": lr} | settings["method_options"]
    model = llama() if model is None else model
    return tezo.TezoTrainer(model, arguments(folder, **named), train_dataset=rows, method=method, **settings)


OF_TRAINER = (
    "data_collator", "processing_class", "method_options", "eval_dataset", "callbacks", "compute_loss_func",
    "optimizers", "compute_metrics",
)  # fmt: skip


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
