"""The callbacks of transformers in a run: any that the user gives, and those of trackers of experiments."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, TrainerControl, TrainerState

from tezo.system.errors import RequestError
from tezo.tasks.evaluation import Metrics
from tezo.training.job import Job
from tezo.training.listeners import Listener, Progress


class TrainerCallbacks(Listener):
    """Calls on_train_begin, on_step_begin, on_step_end, on_log, on_evaluate and on_train_end.

    `state` has global_step, max_steps, epoch and log_history; `control.should_training_stop` ends the run.
    Dev metrics have the prefix "eval_" as in Trainer ("eval_loss"), test metrics the prefix "test_".

    Args:
        callbacks: instances of transformers.TrainerCallback.
        output_dir: value of `args.output_dir` in the callbacks.

    Raises:
        RequestError: accelerate, which transformers' TrainingArguments needs, is not installed.
    """

    def __init__(self, callbacks: Sequence[Any], output_dir: str = ".") -> None:
        self._callbacks = [DefaultFlowCallback(), *callbacks]
        self._output_dir = output_dir
        self.state = TrainerState()
        self.control = TrainerControl()
        self._handler: Any = None

    def started(self, job: Job) -> None:
        settings = job.config.train
        try:
            self._args = TrainingArguments(
                output_dir=self._output_dir,
                max_steps=settings.num_steps,
                learning_rate=job.optimizer.param_groups[0]["lr"],
                per_device_train_batch_size=settings.batch_size,
                logging_steps=settings.log_every,
                seed=settings.seed,
                eval_strategy="steps",
                load_best_model_at_end=False,
                metric_for_best_model="eval_loss",
                greater_is_better=False,
                report_to="none",
                use_cpu=job.model.device.type == "cpu",
            )
        except ImportError as error:
            raise RequestError(f"callbacks need accelerate ({error}); pip install accelerate.") from None
        self._rows, self._settings, self._is_dev = len(job.train), settings, job.dev is job.test
        self._handler = CallbackHandler(self._callbacks, job.model, job.loaded.tokenizer, job.optimizer, None)
        self.state.max_steps = settings.num_steps
        self.control = self._handler.on_train_begin(self._args, self.state, self.control)

    def stepping(self, step: int) -> None:
        del step
        self.control = self._handler.on_step_begin(self._args, self.state, self.control)

    def stepped(self, progress: Progress) -> None:
        step = progress.record.step + 1
        self.state.global_step = step
        self.state.epoch = step * self._settings.rows_per_step / self._rows
        self.control = self._handler.on_step_end(self._args, self.state, self.control)
        if step % self._settings.log_every == 0:
            record = progress.record
            kappa = {"projected_grad": record.projected_grads[0]} if record.probes else {}
            self._log({"loss": record.loss, **kappa, "learning_rate": record.lr})

    def evaluated(self, split: str, step: int, metrics: Metrics) -> None:
        of_dev = split == "dev" or (split == "test" and step == 0 and self._is_dev)
        prefix = "eval" if of_dev else split.replace(" ", "_")
        named = {f"{prefix}_{key}": value for key, value in metrics.items()}
        self._log(named)
        if of_dev:
            self.control = self._handler.on_evaluate(self._args, self.state, self.control, named)
            best = self.state.best_metric
            if best is None or metrics["loss"] < best:
                self.state.best_metric = metrics["loss"]

    def finished(self, summary: dict[str, Any]) -> None:
        del summary
        self.control = self._handler.on_train_end(self._args, self.state, self.control)

    @property
    def wants_stop(self) -> bool:
        return bool(self.control.should_training_stop)

    def _log(self, logs: dict[str, float]) -> None:
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.control = self._handler.on_log(self._args, self.state, self.control, logs)


_PACKAGES = {"azure_ml": "azureml-mlflow", "comet_ml": "comet-ml", "flyte": "flytekit"}
"""Name of a tracker -> the package that it needs, where that has another name."""


def trackers(names: str, output: Path) -> TrainerCallbacks:
    """A listener that reports to the trackers.

    Args:
        names: tracker names of transformers with commas between, such as "tensorboard,wandb".
        output: the run folder; files of trackers, such as TensorBoard's `runs/`, are written there.

    Raises:
        RequestError: there is no such tracker, or its package is not installed.
    """
    asked = [name.strip() for name in names.split(",") if name.strip()]
    if not asked:
        raise RequestError("report_to names no tracker; give some, such as tensorboard.")
    for path in output.iterdir() if output.is_dir() else ():
        if path.is_symlink():  # trackers choose their file names, and follow links
            raise RequestError(f"report_to: {path} is a link, which a tracker could write through; remove it.")
    return TrainerCallbacks([_callback(name) for name in dict.fromkeys(asked)], str(output))


def _callback(name: str) -> object:
    try:
        (kind,) = get_reporting_integration_callbacks([name])
    except ValueError as error:
        known = str(error).partition("only ")[2].partition(" are")[0]
        raise RequestError(f"report_to: there is no tracker {name!r}; give one of {known}.") from None
    try:
        return kind()
    except (ImportError, RuntimeError):
        package = _PACKAGES.get(name, name)
        raise RequestError(f"report_to: {name} is not installed; pip install {package}, or leave it out.") from None
