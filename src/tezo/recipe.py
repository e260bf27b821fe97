"""What a recipe says: the sections model, data, method and train, each key with its default and meaning."""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The base model."""

    name: str
    """A folder, a hub name, or embedded:all-minilm-l6-v2."""
    kind: Literal["auto", "causal", "masked", "encoder"] = "auto"
    """How it answers; auto goes by its architecture."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """Of the weights; auto is as stored."""
    device: str = "auto"
    """auto is the first GPU, else the CPU."""
    quantization: Literal["none", "nf4", "int8", "int8wo"] = "none"
    """Of linear layers: nf4 and int8 by bitsandbytes, int8wo (weights alone) by torchao."""
    placement: Literal["device", "spread", "cpu", "disk", "shards"] = "device"
    """Where weights lie: on the device; spread over all; in memory or on disk between uses; shared out by torchrun."""
    trust_remote_code: bool = False
    """Whether code that comes with the model may run."""
    peft: Literal["none", "lora", "prefix"] = "none"
    """Tune an adapter of PEFT instead of the model: LoRA in PEFT's choice of layers, or a prefix."""
    lora_rank: int = 8
    """Rank of LoRA. MeZO: 8."""
    lora_alpha: int = 16
    """Scale of LoRA, times its rank. MeZO: 16."""
    prefix_length: int = 5
    """Virtual tokens of a prefix. MeZO: 5."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The rows."""

    train: str | None = None
    """A JSONL, CSV, TSV or Parquet file, or a hub data set."""
    task: str | None = None
    """Instead of train: one of the paper's data sets, see `tezo tasks`."""
    dir: str | None = None
    """Folder with a task's rows, TASK/train.jsonl and TASK/validation.jsonl; None: the hub."""
    dev: str | None = None
    """Rows that choose the checkpoint, evaluated during the run: a file, or a split of the hub data set."""
    test: str | None = None
    """Rows for the figures before and after: a file, or a split of the hub data set. None: the dev rows."""
    hold_out: float = 0.1
    """Share of the training rows used as dev rows where neither dev nor test is given."""
    subset: str | None = None
    """Configuration name of a hub data set."""
    train_split: str = "train"
    """Split of a hub data set to train on."""
    shape: Literal["auto", "completion", "messages", "label"] = "auto"
    """What a row is; auto goes by the fields of the first."""
    text: str = "text"
    """Field of a labelled text."""
    label: str = "label"
    """Field of its label."""
    prompt: str = "prompt"
    """Field of a prompt."""
    completion: str = "completion"
    """Field of its completion."""
    messages: str = "messages"
    """Field of a conversation."""
    template: str | None = None
    """Of labelled rows: {field} stands for a field, {mask} for the mask of a masked model."""
    label_words: dict[str, str] | None = None
    """Label -> word, or description for an encoder; None: the labels found, as they are."""
    num_train: int | None = None
    """Training rows; None: all, of a task 1000."""
    num_dev: int | None = None
    """Dev rows; None: all that are given; of a task 500 (cb and copa 100), taken from the training rows."""
    num_test: int | None = None
    """Test rows, the same for every seed; None: all, of a task at most 1000."""
    per_class: int | None = None
    """Training rows of each label (k-shot), and of a task as many dev rows but where num_dev says; None: num_train."""
    allow_fewer: bool = False
    """Take what there is where there are fewer rows than num_train or per_class says."""
    seed: int | None = None
    """Of the choice of rows; None: train.seed."""
    max_length: int | None = None
    """Longest input in tokens; None: the model's."""


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """A method and its options; the ones not named keep the defaults of `tezo.methods`."""

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
    order: Literal["shuffled", "stratified"] = "shuffled"
    """Of training rows in an epoch; stratified spreads labels evenly, so that batches have them in proportion."""
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
