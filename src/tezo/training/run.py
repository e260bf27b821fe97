"""A finished run in Python: its metrics, and its model to evaluate, to ask, to export, and for lm-eval."""

import shutil
import sys
import warnings
import weakref
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

from tezo.models.loading import LoadedModel
from tezo.models.local_names import absolute_name
from tezo.runs.files import check_manifest
from tezo.runs.folder import CONFIG, METRICS
from tezo.runs.text_logs import MOST_METRICS, value_of
from tezo.system.errors import RequestError
from tezo.system.files import read_bytes
from tezo.system.progress import HARNESS, current, quieted, showing
from tezo.system.values import coerce, path_of
from tezo.tasks.evaluation import check_finite
from tezo.tasks.examples import Row
from tezo.tasks.scorers import as_scorer
from tezo.tasks.scoring import Score
from tezo.tasks.setup import make_format
from tezo.tasks.splits import Rows, Splits, reported_rows, rows_of
from tezo.training.exporting import LORA, MERGED, WHOLE, check_mergeable, export_run, export_tuned, export_whole
from tezo.training.job import with_reward
from tezo.training.opening import (
    TunedModel,
    answer_rows,
    fitted_to,
    measure_rows,
    open_model,
    open_tuned,
    rows_to_measure,
    run_config,
    temperature_of_run,
)
from tezo.training.settings import Config, read_run_config


class Run:
    """A finished run, as `tezo.train` and `tezo.open_run` return it.

    `model` is the tuned model, ready to be called. Where the run's result is an adapter, the change is beside the
    weights, in forward hooks, until `merge` or `close`. As long as the hooks are there,

    - `model.save_pretrained` and `model.state_dict` give the tuned weights, `model.named_parameters` those of the base;
    - the model can be neither copied nor pickled; `model.state_dict()` is a snapshot;
    - the model must stay on its device;
    - another run or optimizer on the same model is refused.

    When this object is gone, the model stays tuned, and is free: the next run or optimizer on it first adds the change
    to the weights, and says so. `tezo.open_run`, and a run that is resumed, take it off: they are given the base.

    Attributes:
        folder: the run folder.
        summary: what is in summary.json, metrics before and after among it; empty for what `tezo replay` made.
        config: the settings of the run, resolved.
        progress: whether standard error shows how far `evaluate`, `predict` and `export` are; may be set. Without it
            other libraries show no bars either.
    """

    def __init__(
        self,
        folder: Path,
        summary: dict[str, Any],
        *,
        base: str | LoadedModel | None = None,
        tuned: TunedModel | None = None,
        rows: Splits | None = None,
        reward: Score | str | None = None,
        temporary: bool = False,
        trust_remote_code: bool = False,
        progress: bool = True,
    ) -> None:
        self.folder = folder.absolute()
        self.summary = summary
        self.progress = progress
        self._name = absolute_name(base) if isinstance(base, str) else None
        self._base = None if isinstance(base, str) else base
        settings: list[tuple[str, Any]] = [("model.trust_remote_code", trust_remote_code)]
        if self._name:
            settings.append(("model.name", self._name))
        self.config: Config = read_run_config(folder / CONFIG, settings)
        self._tuned = tuned
        self._rows = rows
        self._reward = reward
        self._merged = self._closed = False
        self._remove = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True) if temporary else None

    def __repr__(self) -> str:
        name = self.config.method.name
        if not self.summary:
            return f"<tezo.Run {name}, replayed; {self.folder}>"
        figures = ", ".join(f"{key}={value:.4g}" for key, value in self.summary["after"].items())
        return f"<tezo.Run {name}, {self.summary['steps']} steps, after: {figures}; {self.folder}>"

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, in order.

        A line with "split" ("dev" or "test") is an evaluation after "step" steps: "loss", "accuracy" and the like. The
        others are of a step: "loss", "projected_grads", "lr", "seconds" since the first and "memory" in bytes. None
        stands for what is not finite.
        """
        if self._remove is not None:  # another folder stays
            self._check_open()
        check_manifest(self.folder, [METRICS], required=True)
        path = self.folder / METRICS
        try:
            return [value_of(line, checked=False) for line in read_bytes(path, MOST_METRICS).splitlines()]
        except ValueError:  # of a folder whose manifest a stranger has written
            raise RequestError(f"{path} is damaged; put a sound copy in its place.") from None

    @property
    def model(self) -> Any:
        """The tuned model, in evaluation mode; of a run that was opened it is loaded at first use."""
        return self.loaded.model

    @property
    def loaded(self) -> LoadedModel:
        """`model` with its tokenizer, its kind and its maximum length."""
        return self._open().loaded

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.loaded.tokenizer

    def evaluate(
        self, data: Rows | None = None, *, reward: Score | Sequence[Score] | str | None = None
    ) -> dict[str, float]:
        """Metrics of the tuned model on rows with answers.

        Args:
            data: a file, the name of a hub data set, a list of dicts, or a split of a `datasets` data set; None: what
                the run was tested on, its dev rows where it had no test rows.
            reward: scorer of completions, see `tezo.train`, that is measured in place of the answers; None: the one
                that this process trained the run by.

        Raises:
            RequestError: rows cannot be read, or do not fit the run.
        """
        with quieted(not self.progress), showing(self.progress):
            loaded = self.loaded
            settings, seed = self.config.data, self.config.train.seed
            rows: Sequence[Row]
            changed: Sequence[str] = ()
            if data is not None:
                rows = rows_of(data, "data")
            elif self._rows is None:
                rows, _, changed = rows_to_measure(self.folder, self.config, None)
            else:
                rows = reported_rows(self._rows, make_format(settings, loaded, self._rows.train), settings, seed)
            fitted, told = fitted_to(self.folder, self.config, rows)
            config, score = with_reward(fitted, self._reward if reward is None else as_scorer(reward))
            metrics, notices = measure_rows(config, loaded, rows, score=score)
        _warn([*changed, *told, *notices])
        return metrics

    def predict(self, rows: Rows, *, max_new_tokens: int | None = None) -> list[str]:
        """The tuned model's answer to each row, in order; answers that rows may have are not looked at.

        Args:
            rows: as for `evaluate`.
            max_new_tokens: longest answer of free text; None: the task's, or 64.

        Raises:
            RequestError: rows cannot be read, or do not fit the run.
        """
        most = coerce("max_new_tokens", max_new_tokens, int | None)
        with quieted(not self.progress), showing(self.progress):
            read = rows_of(rows, "rows")
            config, told = fitted_to(self.folder, self.config, read)
            found = answer_rows(config, self.loaded, read, most)
        _warn([*told, *found.notices])
        return found.texts

    def probabilities(self, rows: Rows) -> list[dict[str, float]]:
        """The probability of each option of each row by its name, from 0 to 1, at the temperature of the run.

        The run has fitted it to its dev rows; without dev rows it is 1, and the probabilities are not calibrated.

        Args:
            rows: as for `predict`, with labels or options.

        Raises:
            RequestError: rows cannot be read, do not fit the run, or their answers are free text.
        """
        with quieted(not self.progress), showing(self.progress):
            temperature = temperature_of_run(self.folder)
            read = rows_of(rows, "rows")
            config, told = fitted_to(self.folder, self.config, read)
            found = answer_rows(config, self.loaded, read, 1, temperature=temperature)
        if not found.probabilities:
            raise RequestError("the answers of this run are free text, which has no probability; use predict().")
        _warn([*told, *found.notices])
        return found.probabilities

    def export(self, folder: str | Path, form: str = LORA) -> Path:
        """Writes the result elsewhere; the model in memory stays as it is.

        Args:
            folder: to write, new.
            form: "lora": the adapter, which PEFT and vLLM load; "gguf-lora": the adapter for llama.cpp, adapter.gguf;
                "merged": the whole model with everything merged in, which takes the memory of a second one while it
                is written; "gguf": a whole GGUF file, of a base in GGUF.

        Returns:
            The folder.

        Raises:
            RequestError: the folder exists already, or the run has no result of this form.
        """
        output = path_of("folder", folder)
        with quieted(not self.progress), showing(self.progress):
            if form == WHOLE:  # of the files of the run, where the weights are packed
                export_whole(self.folder, output, model=self._name)
            elif self._base is None and (self._tuned is None or form == MERGED):
                self._check_open()
                trust = self.config.model.trust_remote_code
                export_run(self.folder, output, form, model=self._name, trust_remote_code=trust)
            else:
                export_tuned(self.folder, output, form, self.loaded)
        return output

    def merge(self) -> Any:
        """Writes the change into the weights of `model`, removes the hooks, and returns the model.

        It is an ordinary model then, to be saved, copied, moved or tuned again. Where the run's result is no adapter
        of this library there are no hooks, and nothing changes.

        Raises:
            RequestError: the weights are packed, or cannot be written.
        """
        tuned = self._open()
        if not self._merged:
            check_mergeable(tuned.loaded.model)
            tuned.merge()
            self._merged = True
        return tuned.loaded.model

    def close(self) -> None:
        """Removes the hooks from `model`, which is the base model again unless it was merged, and a temporary folder.

        The run cannot be used after that; one in a folder that was named can be opened again with `tezo.open_run`. What
        a method has written into the weights stays there, and so do layers of PEFT (`run.model.unload()` removes them).
        """
        if self._tuned is not None and not self._merged:
            self._tuned.close()
        self._tuned, self._closed = None, True
        if self._remove is not None:
            self._remove()

    def _open(self) -> TunedModel:
        self._check_open()
        if self._tuned is None:
            with quieted(not self.progress):  # `model` loads it too
                self._tuned = open_tuned(self.folder, self.config, self._base)
        return self._tuned

    def _check_open(self) -> None:
        if self._closed and self._remove is not None:
            raise RequestError("this run was closed, and its temporary folder is gone; give output to keep a folder.")
        if self._closed:
            raise RequestError(f"this run was closed; tezo.open_run({str(self.folder)!r}) opens it again.")


def _warn(notices: Sequence[str]) -> None:
    for notice in notices:
        warnings.warn(notice, stacklevel=3)


def lm_eval(
    run: Run | str | Path, tasks: str | Sequence[str], *, task_folder: str | Path | None = None, **options: Any
) -> dict[str, Any]:
    """Evaluates a tuned model with lm-evaluation-harness.

    The harness is handed the model in memory, so what is tuned beside the weights, in forward hooks, counts too.

    Args:
        run: a `Run`, a run folder, or the folder or hub name of a base model.
        tasks: names of tasks of the harness, or paths of task files.
        task_folder: folder with more task files. A task file can name Python code, which then runs.
        options: arguments of `lm_eval.simple_evaluate`, such as `num_fewshot` and `limit`. `batch_size` is
            train.eval_batch_size of the run, or 64.

    Returns:
        The dictionary that `lm_eval.simple_evaluate` returns; "results" has the metrics of each task.

    Raises:
        RequestError: lm-eval is not installed, there is no such task, or the model is not causal.
    """
    names = [tasks] if isinstance(tasks, str) else list(tasks)
    if isinstance(run, Run):
        return harness_results(run.config, run.loaded, names, task_folder, **options)
    config = run_config(str(run), [])
    return harness_results(config, open_model(str(run), config), names, task_folder, **options)


def harness_results(
    config: Config, loaded: LoadedModel, tasks: Sequence[str], task_folder: str | Path | None = None, **options: Any
) -> dict[str, Any]:
    """Does the same as `lm_eval`, of a model that was opened with this configuration."""
    check_harness()
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    from tezo.tasks.harness import HarnessModel

    if loaded.kind != "causal":
        raise RequestError(f"lm-eval scores and writes continuations, and this model is {loaded.kind}; use tezo eval.")
    manager, names = _tasks(tasks, task_folder)
    size = options.pop("batch_size", config.train.eval_batch_size)
    if loaded.engine is None:
        model = HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=size)
    else:
        model = HarnessModel(loaded, size)
    try:
        # the harness prints, and standard output is for results
        with current().phase(HARNESS), redirect_stdout(sys.stderr), loaded.files.unchanged():
            results: dict[str, Any] = simple_evaluate(model, tasks=names, task_manager=manager, **options)
    except OSError as error:  # of a data set that cannot be read, or fetched
        raise RequestError(f"lm-eval cannot read its task ({error}); check its files, or the network.") from error
    for metrics in results["results"].values():
        check_finite({k: v for k, v in metrics.items() if isinstance(v, float) and "_stderr" not in k}, loaded.model)
    return results


def check_harness() -> None:
    """Raises a `RequestError` where lm-eval cannot be imported."""
    try:
        for name in ("lm_eval", "lm_eval.models.huggingface"):  # the second needs more packages
            import_module(name)
    except ImportError as error:
        raise RequestError(f"lm-eval cannot be imported ({error}); pip install 'tezo[lm-eval]'.") from None


def _tasks(tasks: Sequence[str], folder: str | Path | None) -> tuple[Any, list[str]]:
    """(the manager that has these tasks, their names, with patterns such as "mmlu_*" expanded).

    The harness takes long to list its tasks: they are listed only where one of them is asked for.
    """
    from lm_eval.tasks import TaskManager

    if folder is not None and not Path(folder).is_dir():
        raise RequestError(f"task_folder: there is no folder {folder}; give one with task files of lm-eval.")
    path = None if folder is None else str(folder)
    manager = TaskManager(include_path=path, include_defaults=False)
    named = [task for task in tasks if not Path(task).is_file()]
    if not all(manager.match_tasks([task]) for task in named):
        manager = TaskManager(include_path=path)
    names: list[str] = []
    for task in tasks:
        found = manager.match_tasks([task]) if task in named else [task]
        if not found:
            raise RequestError(f"lm-eval has no task {task!r}; `lm-eval ls tasks` lists them.")
        names += found
    return manager, names
