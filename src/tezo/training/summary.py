"""The summary of a finished run, summary.json, and its verdict: whether the model got better, and what to try next."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tezo.methods import GAUSS_NEWTON, HEAD_FEEDBACK, method
from tezo.models.kinds import Kind
from tezo.models.quantization import stored_bytes
from tezo.models.saving import Tuning
from tezo.runs.environment import hardware, peak_memory, versions
from tezo.runs.folder import SUMMARY, read_summary
from tezo.runs.resuming import RUN, resume_line
from tezo.runs.step_log import Rollback, ScorerChange
from tezo.runs.words import BETTER, HARDLY, NO_BETTER, OPTIONS_LOSS, TEXT_LOSS, metric_text, minus
from tezo.system.files import reading
from tezo.system.processes import ProcessGroup
from tezo.tasks.calibration import MOST
from tezo.tasks.evaluation import CALIBRATION_ERROR, Metrics
from tezo.tasks.formats import default_template
from tezo.tasks.objectives.objective import Encoded
from tezo.tasks.paired import LEVEL
from tezo.tasks.scoring import MISSING_SCORES, REWARD
from tezo.tasks.splits import too_few_to_judge
from tezo.tasks.untuned import BIAS, PROBE
from tezo.training.evaluations import InCommon
from tezo.training.job import Job, parameter_counts, parameter_table
from tezo.training.resume import as_json, change_texts
from tezo.training.settings import Config, to_tree
from tezo.training.stopping import ENDED, IDLE

LEAST_GAIN = 1e-3
"""Relative decrease of the loss (increase of the reward) below which a run is called hardly better."""
NOT_TAKEN = "No step was taken: none was expected to lower the loss of rows that it is not fitted to."
FEW_ROWS = 100
PARTIAL_CREDIT = "give partial credit, or more prompts (train.batch_size)"
WAYS_FROM_ALIKE = (
    "give partial credit, more prompts (train.batch_size), train.temperature above 0, or a larger method.rho"
)
"""Ways out where all answers have the same scores; the first is for answers that are sampled in any case."""
UNTUNED = {BIAS: "with a bias fitted to each label", PROBE: "under a linear probe"}
"""What a run is compared with, in words."""


def verdict(summary: Mapping[str, Any], lr: float, planned_steps: int) -> str:
    """Returns two sentences on a finished run, whose first learning rate was `lr`, from its summary.

    A run is better where its loss fell by `LEAST_GAIN` of itself or more, and further than by chance at `LEVEL`.
    """
    if summary["dev_loss"] is None:
        before, after = summary["before"]["loss"], summary["after"]["loss"]
    else:
        before, after = summary["dev_loss_before"], summary["dev_loss"]
    if not summary.get("one_scorer", True):
        step = summary["scorers"][-1]["step"]
        return (
            f"{NO_BETTER} for certain: the scorer was changed after step {step}, and the figures before and after are "
            "by different ones. Compare the two models by tezo eval with one scorer."
        )
    rows = "dev" if summary["dev_loss"] is not None or summary["rows"].get("test") == 0 else "test"
    rewarded = REWARD in summary["after"]  # then the loss is minus the reward
    figure, better, worse = ("reward", "rose from", "fell from") if rewarded else ("loss", "fell from", "rose from")
    first, last = summary["before"]["loss"], summary["after"]["loss"]
    common = summary.get("in_common", {})
    if "test" in common:
        first, last = common["test"]["before"], common["test"]["after"]
    compared = common.get("test" if summary["dev_loss"] is None else "dev")
    if compared is not None:
        before, after = compared["before"], compared["after"]
        if compared["rows"] == 0:
            return f"{NO_BETTER}: no {rows} row has a score both before and after. Mend the scorer."
    start, end, first_text, last_text = (f"{-loss if rewarded else loss:.4f}" for loss in (before, after, first, last))
    chance, idle = summary["chance"], summary["stopped"] == IDLE
    advice = _ended(summary, planned_steps) if idle else _after_no_gain(summary, lr, rewarded=rewarded)
    if after < before and start != end and chance is not None and chance["p"] > LEVEL:
        noise = f"within the noise of {chance['rows']} rows (p = {chance['p']:.2g} in a paired test, above {LEVEL:g})"
        return f"{NO_BETTER}: the {rows} {figure} was {start} and is {end}, {noise}. {advice}"
    if after < before - LEAST_GAIN * abs(before):
        gain = f"the {rows} {figure} {better} {start} to {end}"
        if last > first and first_text != last_text:
            return (
                f"{NO_BETTER}: {gain}, but the test {figure} {worse} {first_text} to {last_text}. These dev rows are "
                "too few, or unlike the test rows; give more in data.dev."
            )
        return f"{BETTER}: {gain}. {_after_gain(summary, planned_steps, rewarded=rewarded)}"
    if after < before and start != end:
        little = f"by less than {100 * LEAST_GAIN:g} %"
        return f"{HARDLY}: the {rows} {figure} {better} {start} to {end}, {little}. {advice}"
    return f"{NO_BETTER}: the {rows} {figure} was {start} and is {end}. {advice}"


def _after_gain(summary: Mapping[str, Any], planned_steps: int, *, rewarded: bool) -> str:
    steps, kept = summary["steps"], summary["kept_step"]
    if summary["stopped"] is not None:
        return _ended(summary, planned_steps)
    if steps < planned_steps:
        return f"It was ended after {steps} of {planned_steps} steps."
    if not summary["state_chosen"]:
        return (
            f"The state after the last step was kept, not the best of several. More steps: `{summary['more_steps']}`."
        )
    if kept == steps:
        return f"It was {'rising' if rewarded else 'falling'} to the end. More steps: `{summary['more_steps']}`."
    best = "highest" if rewarded else "lowest"
    return f"It was {best} after step {kept}: more rows may help more than more steps."


def _ended(summary: Mapping[str, Any], planned_steps: int) -> str:
    return f"It ended after {summary['steps']} of {planned_steps} steps: {ENDED[summary['stopped']]}."


def ways_from_alike(name: str) -> str:
    """Returns what may help where all answers of a run of this method have the same scores."""
    return PARTIAL_CREDIT if method(name).takes_answers else WAYS_FROM_ALIKE


def _after_no_gain(summary: Mapping[str, Any], lr: float, *, rewarded: bool) -> str:
    lowest = lr * summary["rollbacks"][-1]["lr_scale"] if summary["rollbacks"] else lr
    if lowest < lr:
        lowered = f"The learning rate was lowered from {lr:.1e} to {lowest:.1e}"
        return f"{lowered}, still too high: try --lr {lowest / 3:.1e}."
    name = summary["method"]
    if rewarded and 2 * summary["idle_steps"] > summary["steps"]:
        return (
            f"In {summary['idle_steps']} of {summary['steps']} steps all answers scored alike: {ways_from_alike(name)}."
        )
    count = summary["rows"]["train"]
    if method(name).takes_answers:  # nor rho, nor a rate
        return f"Try more steps than {summary['steps']}, or {PARTIAL_CREDIT}."
    if method(name).takes_outputs:  # it has no rate
        not_taken = f"{NOT_TAKEN} " if summary["idle_steps"] == summary["steps"] else ""
        return f"{not_taken}Give more rows than {count}, or try method.name={HEAD_FEEDBACK}."
    few = f" {count} training rows may be too few, too." if count < FEW_ROWS else ""
    another = f"another rate (it was {lr:.1e}), " + ("a larger method.rho," if rewarded else "such as --lr auto,")
    return f"Try {another} or more steps than {summary['steps']}.{few}"


def against_untuned(summary: Mapping[str, Any]) -> str:
    """Returns a sentence on what a run has to beat: the untuned model, and what is fitted to it; "" without that."""
    end = summary["after"].get("accuracy")
    if end is None or not summary["untuned"]:
        return ""
    lines = {name: metrics["accuracy"] for name, metrics in summary["untuned"].items()}
    texts = [f"{metric_text('accuracy', value)} {UNTUNED[name]}" for name, value in lines.items()]
    first = metric_text("accuracy", summary["before"]["accuracy"])
    places: dict[str, list[str]] = {"above": [], "level with": [], "below": []}
    for name, value in {"untuned model": summary["before"]["accuracy"], **lines}.items():
        places["above" if end > value else "below" if end < value else "level with"].append(f"the {name}")
    where = ", ".join(f"{place} {_listed(names)}" for place, names in places.items() if names)
    is_below = summary["method"] == GAUSS_NEWTON and end < lines.get(PROBE, end)
    return (
        f"The untuned model has an accuracy of {first}, {_listed(texts)} on these rows; this run ends at "
        f"{metric_text('accuracy', end)}, {where}.{' `--method probe` writes a probe into the model.' * is_below}"
    )


def _listed(texts: Sequence[str]) -> str:
    return ", ".join(texts[:-1]) + " and " * (len(texts) > 1) + texts[-1]


def forgetting(summary: Mapping[str, Any]) -> str:
    """Returns a sentence on how far a rewarded model has moved from what it said before; "" where that is unknown."""
    before, after = summary["own_answers"]
    if before is None or after is None:
        return ""
    change = after - before
    if f"{abs(change):.3f}" == "0.000":
        return f"What the untuned model wrote to these prompts is as likely as before ({before:.3f} nats a token)."
    return (
        f"What the untuned model wrote to these prompts has become {'less' if change > 0 else 'more'} likely by "
        f"{abs(change):.3f} nats a token (from {before:.3f} to {after:.3f})."
    )


def sureness(summary: Mapping[str, Any]) -> str:
    """Returns sentences on the probabilities of answers, where rows have options; "" for other rows."""
    found = summary["calibration"]
    if found is None:
        return ""
    before, after, calibrated = (
        None if found[key] is None else metric_text(CALIBRATION_ERROR, found[key])
        for key in ("before", "after", "calibrated")
    )
    was = "" if before is None else f"{before} before and "
    error = f"The expected calibration error of its probabilities is {was}{after} after"
    if calibrated is not None:
        rows = "these rows themselves" if found["same_rows"] else f"the {found['dev_rows']:,} dev rows"
        rows += ", which are few: another draw of them may give another one" * too_few_to_judge(found["dev_rows"])
        even = ", at which all labels are about as likely" * (found["temperature"] >= MOST)
        return f"{error}, and {calibrated} at a temperature of {found['temperature']:.3g}{even}, fitted to {rows}."
    if found["dev_rows"] == 0:
        return f"{error}; no temperature is fitted, because there are no dev rows (data.dev names some)."
    return (
        f"{error}; no temperature is fitted, because the {found['dev_rows']:,} dev rows are all answered correctly, or "
        "all labels score alike."
    )


def missing_scores(summary: Mapping[str, Any]) -> str:
    """Returns a sentence on answers that have no score, where there are any."""
    shares = [summary[when].get(MISSING_SCORES, 0.0) for when in ("before", "after")]
    counts = {"dev" if summary["rows"]["test"] == 0 else split: found for split, found in summary["in_common"].items()}
    common = [f"{found['rows']} of {found['of']} {split} rows" for split, found in counts.items()]
    before, after = (metric_text(MISSING_SCORES, share) for share in shares)
    differ = f"Of the scores {before} are missing before and {after} after: the two means are of different answers."
    compared = f"The verdict compares the rows that have a score in both: {', '.join(common)}."
    return " ".join([differ] * any(shares) + [compared] * bool(common))


@dataclass(frozen=True)
class Outcome:
    """The outcome of a finished run.

    Attributes:
        kept_step: number of steps after which the kept parameters were reached.
        dev_loss: loss on the dev rows with the kept parameters; None if there are no dev rows.
        seconds: time spent on steps.
        idle_steps: steps that learnt nothing; see `StepRecord.is_idle`.
        before: metrics of the test rows before training.
        after: the same after training.
        untuned: name -> the same by what is fitted to the untuned model; see `tezo.tasks.untuned`.
        own_answers: loss of the untuned model's answers before and after training; None: not measured.
        calibration: see `Evaluations.calibration`.
        chosen: whether the step was kept for its loss on the dev rows.
        stopped: key of `tezo.training.stopping.ENDED` for which the run ended before its last step, or None.
        chance: see `Evaluations.chance`; of the dev rows, or of the test rows where there are none.
        in_common: split -> the losses of its rows before and after that have a score in both; empty where none misses.
        scorers: changes of the scorer.
        one_scorer: whether the metrics before and after are by one scorer, or by scorers that agree.
    """

    steps: int
    kept_step: int
    dev_loss: float | None
    seconds: float
    idle_steps: int
    before: Metrics
    after: Metrics
    untuned: Mapping[str, Metrics]
    own_answers: tuple[float | None, float | None]
    calibration: Mapping[str, Any] | None
    dev_loss_before: float | None
    rollbacks: Sequence[Rollback]
    chosen: bool
    stopped: str | None
    chance: Mapping[str, Any] | None
    in_common: Mapping[str, InCommon]
    scorers: Sequence[ScorerChange]
    one_scorer: bool


def row_counts(job: Job) -> dict[str, int]:
    """Returns split -> number of its rows; without test rows the metrics before and after are of the dev rows."""
    return {"train": len(job.train), "dev": len(job.dev), "test": 0 if job.test is job.dev else len(job.test)}


def summarize(
    job: Job,
    outcome: Outcome,
    processes: ProcessGroup,
    result: dict[str, Any],
    phases: Mapping[str, Mapping[str, float]],
) -> dict[str, Any]:
    """Returns the summary as JSON: metrics, cost, hardware and versions.

    Args:
        job: the job that ran.
        outcome: its outcome.
        processes: that shared the run.
        result: what was saved, as `save_result` returns it.
        phases: seconds and forward passes of each phase; see `tezo.system.progress`.
    """
    optimizer, train = job.optimizer, job.config.train
    calls, seconds = optimizer.cost_of_basis
    # in words, what the loss of a step is, and what the metric "loss" of dev and test rows is
    losses = {
        "steps": _loss_text(job.train) if train.minimises_loss else minus(train.objective),
        "rows": _loss_text(job.test) if job.reward is None else minus(REWARD),
    }
    summary = {
        "method": job.config.method.name,
        "model": job.config.model.name,
        "losses": losses,
        "before": outcome.before,
        "after": outcome.after,
        "untuned": outcome.untuned,
        "own_answers": list(outcome.own_answers),
        "calibration": outcome.calibration,
        "rows": row_counts(job),
        "steps": outcome.steps,
        "idle_steps": outcome.idle_steps,
        "state_chosen": outcome.chosen,
        "test_rows_chose": job.test is job.dev and outcome.chosen,
        "kept_step": outcome.kept_step,
        "dev_loss": outcome.dev_loss,
        "dev_loss_before": outcome.dev_loss_before,
        "rollbacks": [asdict(rollback) for rollback in outcome.rollbacks],
        "stopped": outcome.stopped,
        "chance": outcome.chance,
        "in_common": {split: asdict(common) for split, common in outcome.in_common.items()},
        "scorers": as_json(outcome.scorers),
        "one_scorer": outcome.one_scorer,
        "phases": phases,
        "batch_size": train.rows_per_step,
        "num_forward_passes": optimizer.num_forward_passes,
        "basis_passes": calls,
        "seconds_stepping": round(outcome.seconds, 3),
        "seconds_on_basis": round(seconds, 3),
        "compression_error": optimizer.compression_error,
        "peak_memory": peak_memory(job.loaded.device),
        "model_bytes": stored_bytes(job.model),
        "parameters": parameter_counts(parameter_table(job.model, optimizer)),
        "result": result,
        "prompt_shared_by_options": job.objective.packs,
        "notices": list(job.notices),
        "more_steps": resume_line(RUN, to_tree(job.config), 2 * outcome.steps),
        "seed": train.seed,
        "ranks": processes.size,
        "bytes_sent": processes.bytes_sent,
        "exchanges": processes.exchanges,
        "hardware": hardware(),
        "versions": versions(),
    }
    found = verdict(summary, float(job.config.method.options["lr"]), train.num_steps)
    parts = (found, against_untuned(summary), sureness(summary), forgetting(summary), missing_scores(summary))
    return summary | {"verdict": " ".join(part for part in parts if part)}


def _loss_text(rows: Sequence[Encoded]) -> str:
    return OPTIONS_LOSS if rows[0].example.options else TEXT_LOSS


def prompt_text(config: Config, kind: Kind | None) -> str:
    """Returns, in Markdown, the prompt of labelled rows and the words that answer it; empty for other rows."""
    data = config.data
    if kind not in ("causal", "masked") or not data.label_words:
        return ""
    template = data.template or default_template(kind, data.text)
    words = ", ".join(f"`{word}`" for word in data.label_words.values())
    return f"```\n{template}\n```\n\nNames in braces are fields of a row. The answer is one of {words}."


def tuning_of(run: Path, config: Config, kind: Kind | None) -> Tuning | None:
    """Returns what a model card says of a run; None if the run has no summary.

    Args:
        run: folder of the run.
        config: of the run.
        kind: of its model.

    Raises:
        RequestError: the summary is damaged.
    """
    summary = read_summary(run)
    if summary is None:
        return None
    with reading(f"{run}: {SUMMARY} is not that of a run", "restore it"):
        rows = {str(split): int(count) for split, count in summary["rows"].items()}
        before, after = (
            {str(name): float(value) for name, value in summary[when].items() if value is not None}
            for when in ("before", "after")
        )
        rows |= {"test": 0} if summary.get("test_rows_chose") is True else {}
        prompt = prompt_text(config, kind)
        remarks = change_texts(summary.get("scorers", []))
        return Tuning(str(summary["method"]), int(summary["kept_step"]), rows, before, after, prompt, remarks)
