"""What a recipe says: the sections model, data, method and train, each key with its default and meaning."""

from dataclasses import dataclass, field
from typing import Any, Literal

from tezo.models.model_config import ModelConfig
from tezo.tasks.data_config import DataConfig


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """A method and its options; the ones not named keep the defaults of `tezo.optim.methods`."""

    name: str = "lozo-adam"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The loop."""

    steps: int = 1000
    """Steps; one is two forward passes for each direction."""
    feedback_first: int | None = None
    """The first so many are along the error at the last hidden states; None: 15 of lozo-adam with labels, else 0."""
    feedback_last: int | None = None
    """The last so many likewise; None: 60. Below 300 steps it is a twentieth and a fifth of them, below 100 none."""
    batch_size: int = 16
    """Rows a step. The paper: 16 for LLMs, 64 for RoBERTa."""
    objective: str = "loss"
    """What is minimised: the loss, or minus a metric of the evaluation such as accuracy, f1 or exact_match."""
    seed: int = 0
    """Of directions, data order and sampling."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Of the learning rate, down to zero for linear and cosine. ZO papers keep it constant."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly."""
    eval_every: int | None = None
    """Steps between evaluations on the dev rows; None: ten a run; 0: none."""
    eval_batch_size: int = 64
    """Rows a batch in evaluation."""
    keep_best: bool = True
    """End with the parameters of the lowest dev loss rather than the last."""
    patience: int | None = None
    """Stop after so many evaluations without a lower dev loss; None: never."""
    log_every: int = 10
    """Steps between lines of metrics.jsonl."""
    sync_every: int = 10
    """Steps between forced writes of steps.log to disk: a power cut loses at most so many; 0: the system decides."""
    checkpoint_every: int | None = None
    """Steps between checkpoints; None: ten a run; 0: none."""
    keep_checkpoints: int = 2
    """The newest so many are kept until the run has ended."""
    parallel: Literal["rows", "directions"] = "rows"
    """What the processes that torchrun starts share out: the rows of each batch, or the directions of each step."""
    compare_every: int = 100
    """Steps between comparisons of the processes' parameters."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A run."""

    model: ModelConfig
    data: DataConfig
    method: MethodConfig = field(default_factory=MethodConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
