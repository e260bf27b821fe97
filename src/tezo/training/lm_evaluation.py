"""A tuned model put to the tasks of lm-evaluation-harness, in memory."""

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

from tezo.models.loading import LoadedModel
from tezo.system.errors import RequestError
from tezo.system.progress import HARNESS, current
from tezo.tasks.evaluation import check_finite
from tezo.training.opening import open_model, run_config
from tezo.training.recipe import Config
from tezo.training.run import Run


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

    if loaded.kind != "causal":
        raise RequestError(f"lm-eval scores and writes continuations, and this model is {loaded.kind}; use tezo eval.")
    manager, names = _tasks(tasks, task_folder)
    size = options.pop("batch_size", config.train.eval_batch_size)
    model = HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=size)
    try:
        with (
            current().phase(HARNESS),
            redirect_stdout(sys.stderr),
        ):  # the harness prints, and standard output is for results
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

    The harness takes long to list its own tasks: they are listed only where one of them is asked for.
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
            raise RequestError(f"lm-eval has no task {task!r}; `lm-eval ls tasks` lists its own.")
        names += found
    return manager, names
