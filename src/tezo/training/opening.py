"""A run or a base model, opened for evaluation, prediction or export, and put to rows."""

import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from tezo.models.identity import check_model
from tezo.models.loading import LoadedModel
from tezo.models.local_names import hint, is_gone
from tezo.models.lora import attach_adapter, leave_attached, load_adapter, merge_adapter
from tezo.models.peft import open_adapter
from tezo.optim.settings import RESOLVED
from tezo.runs.files import MANIFEST, check_complete, check_manifest, resume_line_of
from tezo.runs.folder import ADAPTER, CONFIG, LOG, MODEL, SUMMARY, read_summary
from tezo.runs.step_log import read_header
from tezo.system.errors import RequestError
from tezo.system.files import json_text, reading, write_file
from tezo.system.progress import ENCODING, FILES, current, tracked
from tezo.tasks.calibration import LEAST, MOST, probabilities
from tezo.tasks.evaluation import Metrics, checked_scores, likeliest, measure, predict
from tezo.tasks.examples import Row
from tezo.tasks.notices import token_notices
from tezo.tasks.rewards import GAPS
from tezo.tasks.row_files import DataConfig
from tezo.tasks.scoring import REWARD, Score
from tezo.tasks.setup import make_format, make_objective
from tezo.tasks.splits import NO_ROWS, digest_of, rows_to_report
from tezo.training.job import load, make_reward
from tezo.training.resume import TEXT, with_dtype_of
from tezo.training.settings import Config, overlay, parse_config, read_run_config, with_absolute_paths

STANDARD = "-"
"""In the place of a file's name: standard input or output."""
ANSWER, PROBABILITY, PROBABILITIES = "prediction", "probability", "probabilities"
"""The fields that a row gains in a file of answers, the last two where it has options: the probability of the answer,
and those of all options by their names."""
DIGITS = 6
"""Decimals of a probability in a file of answers."""
MAX_NEW_TOKENS = 64
"""Longest answer of free text in tokens, where neither the user nor the task says."""


def nothing() -> None:
    """Does nothing: there is nothing beside the weights."""


@dataclass(frozen=True)
class TunedModel:
    """A tuned model in memory.

    Attributes:
        loaded: model and tokenizer; the model computes with the tuned parameters.
        merge: writes what is kept beside the weights into them, and removes the hooks, if there are any.
        close: removes the hooks alone.
        untuned: makes a context in which the model computes as its base; None: the weights are tuned themselves.
    """

    loaded: LoadedModel
    merge: Callable[[], object] = nothing
    close: Callable[[], object] = nothing
    untuned: Callable[[], AbstractContextManager[object]] | None = None


def is_run(name: str | Path) -> bool:
    """Returns whether `name` is a run folder; one that has lost its configuration is one still."""
    return any(os.path.lexists(Path(name) / file) for file in (CONFIG, LOG))


def check_is_run(name: str | Path) -> None:
    """Raises a `RequestError` where `name` is not a run folder."""
    if not is_run(name):
        raise RequestError(f"{name} is not a run folder (it has no {CONFIG}); give one that tezo train made.")


def check_result(folder: Path) -> None:
    """Raises a `RequestError` where a run has no result, or a file is not the one that the run wrote."""
    check_is_run(folder)
    if not any(os.path.lexists(folder / name) for name in (ADAPTER, MODEL, MANIFEST)):
        raise RequestError(
            f"{folder} has neither adapter/ nor model/: the run did not end; `{resume_line_of(folder)}` goes on."
        )
    with current().phase(FILES):
        check_manifest(folder, [CONFIG, LOG, ADAPTER, MODEL, SUMMARY], required=True)


def run_config(name: str, settings: list[tuple[str, Any]]) -> Config:
    """Returns the configuration of a run folder, or one made for a base model, with settings laid over it."""
    folder = Path(name)
    if is_run(name):
        return read_run_config(folder / CONFIG, settings)
    if folder.is_dir() and not (folder / "config.json").is_file() and not any(folder.glob("*.gguf")):
        if (folder / "adapter_config.json").is_file():
            raise RequestError(
                f"{name} is an adapter alone; give the run that it is of, or a model that has it: "
                "`tezo export RUN --output FOLDER --format merged`."
            )
        raise RequestError(f"{name} is neither a run folder (no {CONFIG}) nor a model (no config.json).")
    config = overlay({"model": {"name": name}}, settings)
    if not {"task", "train"} & set(config.get("data", {})):
        config = overlay(config, [("data.train", NO_ROWS)])
    return parse_config(config)


def open_base(folder: Path, config: Config, base: LoadedModel | None = None) -> LoadedModel:
    """Returns the base model of a run's adapter; raises an error where it is not the one that the run began with.

    Weights are compared as they are loaded where that is in the data type of the run, and packed ones on its device;
    else as they are stored.

    Args:
        folder: of the run.
        config: of the run, with settings laid over it.
        base: the base model, where it is in memory already; None: as the configuration names it.
    """
    name = config.model.name
    if base is None and is_gone(name):
        raise RequestError(
            f"model.name: the base model of {folder} was in {name}, which is not here; give its place now, by --set "
            f"model.name=FOLDER (--model of export and replay, model=FOLDER of open_run).{hint(name)}"
        )
    header = read_header(folder / LOG)
    check_complete(header)
    loaded = base or load(with_dtype_of(header, config))
    packed_alike = config.model.quantization == "none" or header["device"] == loaded.device.type
    check_model(header["model"], loaded.fingerprint, packed_alike=packed_alike)
    return loaded


def open_model(name: str, config: Config) -> LoadedModel:
    """Returns the tuned model of a run folder (the base with its adapter, or the saved model), or a base model."""
    return open_tuned(Path(name), config).loaded if is_run(name) else load(config)


def open_tuned(folder: Path, config: Config, base: LoadedModel | None = None) -> TunedModel:
    """Opens the tuned model of a run folder: the base model with the run's adapter, or the saved model.

    Args:
        folder: of the run.
        config: of the run, with settings laid over it.
        base: see `open_base`; a saved model is loaded anew all the same.

    Raises:
        RequestError: the base model is another one, a file is damaged, or the run did not end.
    """
    check_result(folder)
    saved = folder / ADAPTER
    if saved.is_dir():
        loaded = open_base(folder, config, base)
        if config.model.peft != "none":
            opened = open_adapter(loaded, config.model, saved)
            return TunedModel(opened, untuned=opened.model.disable_adapter)
        return _attached(loaded, saved)
    settings = [
        ("model.name", str(folder / MODEL)),
        ("model.dtype", config.model.dtype),
        ("model.trust_remote_code", config.model.trust_remote_code),
    ]
    return TunedModel(load(read_run_config(folder / CONFIG, settings)))


def _attached(loaded: LoadedModel, saved: Path) -> TunedModel:
    adapter = load_adapter(saved)
    handles = attach_adapter(loaded.model, adapter)

    def close() -> None:
        left.detach()
        for handle in handles:
            handle.remove()

    def merge() -> None:
        close()
        merge_adapter(loaded.model, adapter)

    @contextmanager
    def untuned() -> Iterator[None]:
        for handle in handles:
            handle.remove()
        try:
            yield
        finally:
            handles[:] = attach_adapter(loaded.model, adapter)

    left = weakref.finalize(close, leave_attached, weakref.ref(loaded.model), handles, adapter)
    left.atexit = False
    return TunedModel(loaded, merge, close, untuned)


@dataclass(frozen=True)
class Speaker:
    """A model that answers in `tezo chat`.

    Attributes:
        name: "untuned" or "tuned"; empty where there is no other.
        loaded: the model; two speakers may share it.
        within: makes the context in which it computes as this speaker.
    """

    name: str
    loaded: LoadedModel
    within: Callable[[], AbstractContextManager[object]] = nullcontext


def speakers(name: str, config: Config) -> list[Speaker]:
    """Returns the base and the tuned model of a run folder, or the one model that is no run.

    An adapter is taken off and put on again. Where a run has saved a whole model, the base is loaded beside it.
    """
    if not is_run(name):
        return [Speaker("", load(config))]
    tuned = open_tuned(Path(name), config)
    if tuned.untuned is None:
        return [Speaker("untuned", open_base(Path(name), config)), Speaker("tuned", tuned.loaded)]
    return [Speaker("untuned", tuned.loaded, tuned.untuned), Speaker("tuned", tuned.loaded)]


def rows_to_measure(name: str | Path, config: Config, file: str | None) -> tuple[list[Row], str, list[str]]:
    """Returns (rows to evaluate on, their source in words, notices for the user).

    Args:
        name: a run folder, or a base model.
        config: of it, with settings laid over it.
        file: file of the rows; None: those that the figures of the run are of.
    """
    rows, source = rows_to_report(config.data, config.train.seed, file)
    if file is None and is_run(name) and config.data == read_run_config(Path(name) / CONFIG, []).data:
        header = read_header(Path(name) / LOG)
        check_complete(header)
        if header["reported_rows"] != digest_of(rows):
            return rows, source, [f"the rows of {source} are not those that the figures of the run are of."]
    return rows, source, []


def fitted_to(name: str | Path, config: Config, rows: Sequence[Row]) -> tuple[Config, list[str]]:
    """Returns (the configuration with which rows are read, notices for the user).

    Where a run has found the field of its texts, and these rows have none of that name, theirs is found anew. A field
    or a template that the user named stays.

    Args:
        name: a run folder, or a base model.
        config: of it, with settings laid over it.
        rows: to evaluate or to answer.
    """
    text = config.data.text
    if not is_run(name) or config.data.template is not None or any(row.column(text) is not None for row in rows):
        return config, []
    header = read_header(Path(name) / LOG)
    check_complete(header)
    of_run = read_run_config(Path(name) / CONFIG, []).data.text
    if header["sources"].get(TEXT) != RESOLVED or text != of_run:
        return config, []
    found_anew = replace(config, data=replace(config.data, text=DataConfig.text))
    return found_anew, [f"these rows have no field {text!r}, where the run found its texts; theirs is found anew."]


def measure_rows(
    config: Config,
    loaded: LoadedModel,
    rows: Sequence[Row],
    *,
    shots: int = 0,
    calibrate: bool = False,
    score: Score | None = None,
) -> tuple[Metrics, list[str]]:
    """Returns (metrics, notices for the user) of a model on rows with answers.

    `shots` training rows are shown before each question; of `calibrate` see `tezo.tasks.evaluation.option_scores`. With
    `score`, a scorer of completions that is an object, or with train.reward, the reward is what is measured.
    """
    config = with_absolute_paths(config)  # a scorer may change the working folder
    sizes = {"batch_size": config.train.eval_batch_size, "seed": config.train.seed}
    given = score is not None or config.train.reward is not None
    reward = make_reward(config, score) if given else None
    by_reward = "run maximised a reward, which --reward FILE.py:FUNCTION measures (in Python, reward=...)."
    untold = not given and config.train.objective == REWARD
    try:
        with loaded.files.unchanged():
            metrics, notices = measure(
                config.data, loaded, rows, **sizes, shots=shots, calibrate=calibrate, reward=reward
            )
    except RequestError as error:  # most often of rows without answers
        if not untold:
            raise
        raise RequestError(f"{error} The {by_reward}") from None
    finally:
        if reward is not None:
            reward.close()
    gaps = reward.gaps if reward is not None else {}
    said = [*notices, *(f"{GAPS[kind]}: {reason}." for kind, reason in gaps.items())]
    return metrics, [*said, f"the {by_reward}"] if untold else said


def check_new_tokens(count: int | None) -> None:
    """Raises a `RequestError` where `count` is no length of an answer."""
    if count is not None and count < 1:
        raise RequestError(f"max_new_tokens is {count}; it must be at least 1.")


class Answers(NamedTuple):
    """The answers to rows.

    Attributes:
        texts: the answer to each row.
        notices: for the user.
        probabilities: for each row the probability of each of its options by its name; empty for free text.
    """

    texts: list[str]
    notices: list[str]
    probabilities: list[dict[str, float]]

    def of(self, row: int) -> float:
        """Returns the probability of the answer to a row that has options."""
        return self.probabilities[row][self.texts[row]]

    def as_sure_as(self, least: float) -> list[int]:
        """Returns the numbers of the rows whose answer is at least so likely; those of free text are refused.

        Raises:
            RequestError: the answers are free text.
        """
        if not self.probabilities:
            raise RequestError(f"abstain is {least:g}, and answers in free text have no probability; leave it out.")
        return [row for row in range(len(self.texts)) if self.of(row) >= least]


def check_abstain(least: float | None) -> None:
    """Raises a `RequestError` where `least` is no probability that answers can have."""
    if least is not None and not 0 < least <= 1:
        raise RequestError(f"abstain is {least:g}; it must be above 0 and at most 1.")


def temperature_of(name: str | Path, loaded: LoadedModel) -> float | None:
    """Returns the temperature that a run, or that of a merged model, has fitted to its dev rows; None: there is none.

    Args:
        name: a run folder, or a base model.
        loaded: the model.

    Raises:
        RequestError: the summary of the run is damaged.
    """
    if is_run(name):
        return temperature_of_run(Path(name))
    return None if loaded.labels is None else loaded.labels.temperature


def temperature_of_run(run: Path) -> float | None:
    """Returns the temperature that a run has fitted to its dev rows; None: it has fitted none, or has not ended.

    Raises:
        RequestError: the summary is damaged.
    """
    summary = read_summary(run)
    with reading(f"{run}: {SUMMARY} is not that of a run", "restore it"):
        found = ((summary or {}).get("calibration") or {}).get("temperature")
        if found is None:
            return None
        if not LEAST <= float(found) <= MOST:
            raise ValueError(f"temperature is {found}")
        return float(found)


def answer_rows(
    config: Config,
    loaded: LoadedModel,
    rows: Sequence[Row],
    max_new_tokens: int | None = None,
    heard: Callable[[str], None] | None = None,
    temperature: float | None = None,
) -> Answers:
    """Returns an answer to each row; answers that rows may have are not looked at.

    Args:
        config: of the run or the model.
        loaded: the model.
        rows: at least one.
        max_new_tokens: length of the longest answer of free text; None: the task's, that of a run by a reward, or
            `MAX_NEW_TOKENS`. Answers are greedy.
        heard: called with each new piece of an answer in free text, of one row.
        temperature: of the probabilities; None: 1, that of training.
    """
    check_new_tokens(max_new_tokens)
    form, train = make_format(config.data, loaded, rows), config.train
    rewarded = train.objective == REWARD
    scored = train.max_new_tokens if rewarded else MAX_NEW_TOKENS
    new = 0 if form.options else max_new_tokens or form.max_new_tokens or scored
    objective = make_objective(config.data, loaded, form, new)
    with current().phase(ENCODING):
        encoded = [objective.encode(form.example(row, answered=False)) for row in tracked(rows)]
    found: list[dict[str, float]] = []
    with loaded.files.unchanged():
        if encoded[0].example.options:
            scores = checked_scores(loaded.model, objective, encoded, train.eval_batch_size)
            answers = likeliest(scores, encoded)
            for row, e in zip(probabilities(scores, temperature or 1.0), encoded, strict=True):
                found.append({e.example.name_of(option): value for option, value in enumerate(row.tolist())})
        else:
            answers = predict(loaded.model, objective, encoded, train.eval_batch_size, new, heard)
    notices = [*form.notices, *token_notices(objective, new)]
    if rewarded and train.temperature:
        notices.append(f"these answers are greedy; the run's were sampled at train.temperature {train.temperature:g}.")
    return Answers(answers, notices, found)


def check_answer_file(output: Path) -> None:
    """Raises a `RequestError` where a file of answers cannot be written, exists, or has the name of another format."""
    if str(output) == STANDARD:
        return
    if output.suffix.lower() not in ("", ".jsonl", ".json"):
        raise RequestError(f"output is {output}, but answers are written as JSONL; give a file that ends in .jsonl.")
    if output.exists():
        raise RequestError(f"output: {output} exists; give another --output, or delete it first.")
    above = next(folder for folder in output.absolute().parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise RequestError(f"output: nothing can be written in {above}; give another --output.")


def check_no_answers(rows: Sequence[Row]) -> None:
    """Raises a `RequestError` where a row has a field of a name that its answer gets in a file."""
    for row in rows:
        for name in (ANSWER, PROBABILITY, PROBABILITIES):
            if name in row.fields:
                raise RequestError(f"{row.where}: there is a field {name!r} already; rename it, or take it out.")


def write_answers(output: Path, rows: Sequence[Row], answers: Answers, kept: Sequence[int]) -> None:
    """Writes JSONL: each row with its answer, in order; a file whole or not at all, or a `RunError`.

    Args:
        output: the file, or `STANDARD`.
        rows: all rows.
        answers: to them.
        kept: numbers of the rows that are written.
    """
    text = "".join(json_text({**rows[i].fields, **_fields(answers, i)}, default=str) + "\n" for i in kept)
    if str(output) == STANDARD:
        sys.stdout.write(text)
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    write_file(output, text.encode())


def _fields(answers: Answers, row: int) -> dict[str, Any]:
    """Returns the fields that a row gains in a file of answers."""
    found: dict[str, Any] = {ANSWER: answers.texts[row]}
    if answers.probabilities:
        shown = {name: round(value, DIGITS) for name, value in answers.probabilities[row].items()}
        found |= {PROBABILITY: shown[answers.texts[row]], PROBABILITIES: shown}
    return found
