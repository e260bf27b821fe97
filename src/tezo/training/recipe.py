"""Sections of a recipe (model, data, method, train): every key with its default and meaning."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tezo.methods import AUTO
from tezo.models.kinds import ModelConfig
from tezo.tasks.row_files import DataConfig
from tezo.tasks.scoring import REWARD as REWARD

LOSS = "loss"
"""The objective that batches have of themselves; any other is a metric."""


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """A method and the options that are set; the other options keep the defaults of `tezo.methods`.

    "auto" is the method that a run of these rows has by default; see `tezo.training.resolution.with_method`.
    """

    name: str = AUTO
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The section `train`: settings of the training loop."""

    steps: int | None = None
    """Number of steps. Default: 20 epochs, at least 200 and at most 1000; 6 rounds of gauss-newton, 30 steps of es."""
    epochs: float | None = None
    """Passes over the training rows, instead of steps."""
    feedback_first: int | None = None
    """Feedback steps at the start. Default: 15 for head-feedback if the objective is the loss, at most 5 %; else 0."""
    feedback_last: int | None = None
    """Feedback steps at the end. Default: 60 in the same case, at most 20 %. Below 100 steps both default to 0."""
    batch_size: int | None = None
    """Rows per step, each at most once. Default: 16, the paper's for LLMs (64 for RoBERTa); 128 for gauss-newton."""
    objective: str = LOSS
    """What is minimised: the loss, or the negative of the reward or a metric such as accuracy, f1 or exact_match."""
    reward: str | None = None
    """Scorer of completions that is maximised, FILE.py:FUNCTION; train.objective is then reward. Default: none."""
    max_new_tokens: int = 64
    """Longest completion that a reward scores, in tokens; each takes a forward pass."""
    temperature: float = 0.0
    """Temperature that a reward's completions are sampled at, with random numbers that both signs share; 0: greedy."""
    reward_workers: int = 0
    """Processes in which the scorer of a file is called; 0: it is called in the process of the run."""
    reward_seconds: float = 60.0
    """Limit of the time for a score in such a process. What takes longer is missing."""
    seed: int = 0
    """Seed of directions, data order and sampling."""
    schedule: Literal["constant", "linear", "cosine"] | None = None
    """Learning-rate schedule; linear and cosine decay to zero. Default: constant, as papers have; linear for es."""
    eval_every: int | None = None
    """Steps between evaluations on the dev rows; 0: none. Default: a tenth of the steps."""
    eval_batch_size: int = 64
    """Rows per batch in evaluation."""
    keep_best: bool = True
    """Keep the parameters with the lowest dev loss instead of the last ones."""
    guard: bool | None = None
    """Return to the best state when the loss has risen or stagnates, or feedback steps at the start raised it. Default:
    true for head-feedback, gauss-newton and es; published methods never return."""
    log_every: int = 10
    """Steps between lines of metrics.jsonl."""
    checkpoint_every: int | None = None
    """Steps between checkpoints; 0: none. Default: a tenth of the steps."""
    parallel: Literal["rows", "directions"] = "rows"
    """What is divided among the processes that torchrun starts: the rows of a batch, or the directions of a step."""

    @property
    def minimises_loss(self) -> bool:
        """Whether the objective is the loss rather than a metric, which has no gradient."""
        return self.objective == LOSS

    @property
    def chooses_by_dev_rows(self) -> bool:
        """Whether dev rows measure what steps minimise, so that a guard can go by them: a loss, or a reward."""
        return self.objective in (LOSS, REWARD)

    @property
    def most_rows(self) -> int:
        """Rows of a forward pass, at most: the batch of a step may be many times as large as that of an evaluation."""
        return max(self.eval_batch_size, 64)

    @property
    def num_steps(self) -> int:
        """`steps` of a run whose settings are resolved."""
        assert self.steps is not None
        return self.steps

    @property
    def rows_per_step(self) -> int:
        """`batch_size` of a run whose settings are resolved."""
        assert self.batch_size is not None
        return self.batch_size


@dataclass(frozen=True, kw_only=True)
class Config:
    """The configuration of a run: the four sections of a recipe."""

    model: ModelConfig
    data: DataConfig
    method: MethodConfig = field(default_factory=MethodConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def with_options(self, **options: object) -> "Config":
        """The configuration with these options of the method."""
        return replace(self, method=replace(self.method, options={**self.method.options, **options}))
