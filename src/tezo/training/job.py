"""Makes a job of a configuration, before anything is written: model, rows, reward, optimizer, parameters."""

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from tezo import engines
from tezo.directions.products import float32_on_emulating_cpu
from tezo.directions.ranks import is_zero
from tezo.directions.targets import ALL, ALL_LINEAR, find_targets, never_called
from tezo.forward.engine import Engine
from tezo.forward.interception import DirectReads
from tezo.forward.perturbed_parameter import is_changed_beside, settle
from tezo.methods import AUTO, BASELINES, ES, HEAD_FEEDBACK, METHODS, POLICY_GRADIENT, method
from tezo.models.kinds import ADDRESS, IN_MEMORY, engine_kind, is_unused
from tezo.models.loading import SETTLED, LoadedModel, check_head_not_tied
from tezo.models.local_names import working_folder
from tezo.models.peft import add_adapter
from tezo.newton.policy import AnswerBasis, why_not_rebuilt
from tezo.newton.text import fits_text
from tezo.optim.base_optimizer import BaseOptimizer
from tezo.optim.optimizer import PER_EXAMPLE, ZerothOrderOptimizer
from tezo.system.errors import NonFiniteLossError, NonFiniteModelError, RequestError, nearest
from tezo.system.progress import CHECKING, ENCODING, SCORER, SETTING_UP, current, tracked
from tezo.tasks.examples import check_answers
from tezo.tasks.notices import label_notices, leak_notices, rows_as_read, token_notices
from tezo.tasks.objectives.batch import Batch
from tezo.tasks.objectives.objective import Encoded, Objective
from tezo.tasks.own_server import check_free
from tezo.tasks.programs import PROGRAMS, SECONDS_OF_A_PROGRAM, ProgramReward
from tezo.tasks.rewards import Reward, prompt_of
from tezo.tasks.rows import Format
from tezo.tasks.scorer_identity import Identity
from tezo.tasks.scorers import identity, load_score, name_of
from tezo.tasks.scoring import REWARD, Score
from tezo.tasks.scoring_processes import SECONDS_OF_A_SCORE, Processes
from tezo.tasks.setup import make_format, make_objective
from tezo.tasks.splits import Splits, are_few, digest_of, divide, read_splits, too_few_to_judge
from tezo.training.choices import (
    Choices,
    choose_columns,
    choose_dtype,
    choose_for_few,
    choose_method,
    choose_size,
    resolve,
    settled_options,
)
from tezo.training.rows_of_steps import (
    BASIS_ROWS,
    KEYS,
    BatchSampler,
    HeldOutRows,
    RunRows,
    basis_passes,
    looked_and_stepped,
    rows_to_look_at,
    sampler,
)
from tezo.training.settings import LOSS, Config, TrainConfig, parse_config


def parameter_table(model: Any, optimizer: BaseOptimizer) -> list[dict[str, Any]]:
    """One entry per parameter of the model.

    Each has "name", "shape" and "trained". A trained parameter also has "kind", "rank", "moved" (how it is perturbed
    and updated) and "also" (other modules that share it).
    """
    targets = {target.name: target for target in optimizer.targets}
    rows: list[dict[str, Any]] = []
    for name, parameter in model.named_parameters():
        shape = targets[name].shape if name in targets else parameter.shape
        row: dict[str, Any] = {"name": name, "shape": list(shape), "trained": name in targets}
        if name in targets:
            rank, way = optimizer.rank_and_way(name)
            row |= {"kind": targets[name].kind, "rank": rank, "moved": way}
            row["also"] = [site.name for site in targets[name].sites[1:]]
        rows.append(row)
    return rows


def parameter_counts(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """The number of parameter entries of a `parameter_table`: {"total": all, "trained": those that are trained}."""
    sizes = [(math.prod(row["shape"]), row["trained"]) for row in rows]
    return {"total": sum(size for size, _ in sizes), "trained": sum(size for size, trained in sizes if trained)}


def check_readable(optimizer: BaseOptimizer, loaded: LoadedModel, *, labelled: bool) -> None:
    """Raises a `RequestError` where a basis looks at inputs of layers that neither torch nor the engine shows."""
    if not isinstance(optimizer, ZerothOrderOptimizer):
        return
    why_not = loaded.unseen(optimizer.basis, labelled=labelled)
    engine, modules = loaded.engine, [target.sites[0].name for target in optimizer.targets]
    looks = engine if labelled and optimizer.basis.watches else None
    if looks is not None and looks.watches_some and not any(map(looks.watches, modules)):
        raise RequestError(
            f"method.targets: {looks.name} shows inputs of other layers than these, such as down_proj of the blocks "
            "whose states it shows; tune those too."
        )
    if why_not is not None:
        raise RequestError(
            f"method.basis is computed from inputs of layers, for which torch needs the weights, and {why_not}; leave "
            "method.name out, set method.basis=gaussian, or give a model with weights that torch reads."
        )


def untrained_notice(names: Sequence[str], engine: Engine | None) -> list[str]:
    """On parameters that no step can reach."""
    why = "the loss does not depend on them, or reads them past their modules"
    why = why if engine is None else f"{engine.name} changes linear layers inside the model alone"
    return [f"left untrained, since {why}: {_some(names)}."] if names else []


def left_out_notice(config: Config, optimizer: BaseOptimizer, untrained: Collection[str]) -> list[str]:
    """On matrices that the loss depends on and that all-linear leaves out, such as the experts of a mixture."""
    if ALL_LINEAR not in config.method.options.get("targets", method(config.method.name).defaults()["targets"]):
        return []
    tuned = {*(target.name for target in optimizer.targets), *untrained}
    out = [t for t in find_targets(optimizer.model) if t.kind == "other" and t.name not in tuned]
    if not out:
        return []
    share = sum(t.parameter.numel() for t in out) / sum(p.numel() for p in optimizer.model.parameters())
    return [f"not trained, since they are no linear layers' weights: {_some([t.name for t in out])} "
            f"({share:.0%} of the model); method.targets=all, or their names, trains them too."]  # fmt: skip


def rank_notice(config: Config, optimizer: BaseOptimizer) -> list[str]:
    """On ranks that were chosen, or are lower than what was asked for."""
    defaults = method(config.method.name).defaults()
    wanted = config.method.options.get("rank", defaults.get("rank"))
    if "rank_rule" in defaults and wanted is None:
        return _chosen_ranks_notice(config.method.options.get("rank_rule", defaults["rank_rule"]), optimizer)
    names = [target.name for target in optimizer.targets]
    lower = [name for name in names if wanted and (optimizer.rank_and_way(name)[0] or wanted) < wanted]
    return [f"method.rank is {wanted}, lowered to the smaller side of: {_some(lower)}."] if lower else []


def _chosen_ranks_notice(rule: str, optimizer: BaseOptimizer) -> list[str]:
    """On the ranks that Eq. 7 chose, before the first step."""
    matrices = [target for target in optimizer.targets if target.is_matrix]
    ranks = sorted({optimizer.rank_and_way(target.name)[0] or 0 for target in matrices})
    if not ranks:
        return []
    zero = [target.name for target in matrices if is_zero(target)]
    of = f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
    without = f", without {_some(zero)}, which are zero" if zero else ""
    return [f"method.rank: {of} in {len(matrices)} matrices, by method.rank_rule={rule}{without}."]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


logger = logging.getLogger(__name__)


def make_reward(config: Config, given: Score | None = None) -> Reward | None:
    """The reward that a configuration maximises; None: it has another objective.

    Args:
        config: of a run. Its train.reward is what the user gave: that of a run folder does not count.
        given: a scorer that is an object, in place of the file that the configuration names.

    Raises:
        RequestError: no scorer was given, it cannot be loaded, or there are settings of a reward without one.
    """
    train = config.train
    if train.objective != REWARD:
        for key in ("max_new_tokens", "temperature", "reward_workers", "reward_seconds", "serve", "serve_port"):
            if getattr(train, key) != getattr(TrainConfig, key):
                raise RequestError(
                    f"train.{key} is {getattr(train, key)}, which is for a reward; give train.reward too."
                )
        return None
    workers = train.reward_workers or (PROGRAMS if train.serve and given is None else 0)
    if train.serve:
        _check_serves(config)
    elif train.serve_port:
        raise RequestError(f"train.serve_port is {train.serve_port}, which is for train.serve; set that too.")
    if train.reward_seconds is not None and not workers:
        raise RequestError(
            f"train.reward_seconds is {train.reward_seconds:g}, a limit of processes that score; set "
            "train.reward_workers to their number too."
        )
    if train.reward_workers and (given is not None or train.reward == IN_MEMORY):
        raise RequestError(
            f"train.reward_workers is {train.reward_workers}, and the scorer is an object, which other processes do "
            "not have; give FILE.py:FUNCTION, or leave it out."
        )
    processes = None
    if given is not None:
        name, score, known_by = name_of(given), given, identity(given)
    elif train.reward in (None, IN_MEMORY):
        raise RequestError(
            f"train.objective is {REWARD}, and no scorer is given; the one that a run folder names is not loaded "
            "from it. Give --reward FILE.py:FUNCTION, or reward=... in Python."
        )
    else:
        name, folder = str(train.reward), working_folder()
        with current().phase(SCORER):
            score, known_by = load_score(name)  # its file may change the folder
        if workers:
            usual = SECONDS_OF_A_PROGRAM if train.serve else SECONDS_OF_A_SCORE
            processes = Processes(name, workers, train.reward_seconds or usual, folder)
    common = score, name, known_by, train.max_new_tokens, train.temperature, train.seed, processes, given is None
    return ProgramReward(*common, port=train.serve_port) if train.serve else Reward(*common)


def _check_own_server(config: Config) -> None:
    """Raises a `RequestError` where no server can be opened that sees what programs ask a server of vLLM."""
    try:
        check_free(config.train.serve_port)
    except RequestError as error:
        raise RequestError(f"{str(error).rstrip('.')}, or use --method {ES}, whose programs ask vLLM itself.") from None


def _check_serves(config: Config) -> None:
    """Raises a `RequestError` where the model of a configuration cannot have names on a server."""
    model, port = config.model, config.train.serve_port
    if model.workers:
        raise RequestError(
            f"model.workers is {model.workers}, and train.serve answers from one engine of this process; leave one of "
            "them out."
        )
    if engine_kind(model.engine) != ADDRESS:
        check_free(port)


def with_reward(config: Config, reward: Score | str | None) -> tuple[Config, Score | None]:
    """(the configuration with this reward as its objective, the scorer where it is an object)."""
    if reward is None:
        return config, None
    named = reward if isinstance(reward, str) else IN_MEMORY
    train = replace(config.train, objective=REWARD, reward=named)
    return replace(config, train=train), None if isinstance(reward, str) else reward


def reward_notice(reward: Reward | None) -> list[str]:
    """What an evaluation of the reward takes."""
    return [] if reward is None else [reward.notice]


MOST_UNKNOWN = 8
"""Parts of a scorer that a notice names, at most."""


def with_settled_scorer(job: "Job") -> "Job":
    """The job after first calls of its scorer: what they changed of it is its state, and is not compared."""
    reward = job.reward
    if reward is None or reward.in_file:
        return job
    known_by = reward.identity.settled(identity(reward.score))
    settled = replace(reward, identity=known_by)
    return replace(job, reward=settled, notices=(*job.notices, *_identity_notice(reward.name, known_by)))


def _identity_notice(name: str, known_by: Identity) -> list[str]:
    parts = [f"{part} ({why})" for part, why in known_by.unknown.items()]
    if not parts:
        return []
    more = f" and {len(parts) - MOST_UNKNOWN} more" if len(parts) > MOST_UNKNOWN else ""
    return [
        f"train.reward: these parts of {name} are not compared where this run goes on: "
        f"{', '.join(parts[:MOST_UNKNOWN])}{more}. Leave them as they are."
    ]


@dataclass(frozen=True)
class Job:
    """A run, ready to start.

    Attributes:
        config: resolved: with no open setting.
        loaded: model, tokenizer, kind.
        format: rows -> examples.
        objective: examples -> losses.
        train: rows to look at and to step on.
        stepped: numbers of those to step on.
        dev: rows that choose the checkpoint; may be empty.
        test: rows for the figures before and after; without test rows, the same list as `dev`.
        optimizer: on the model.
        held_out: the dev rows, where a step keeps outputs and may be shortened by theirs.
        untrained: parameters that the loss does not depend on, or reads past their modules.
        read_rows: digest of all rows that were read, see `Splits.digest`.
        reported_rows: digest of those that the run's figures are of, see `digest_of`.
        reward: what is maximised, where it is the objective.
        rows_as_read: the shape of the rows and the first of them as the model reads it, in words, for the screen.
        notices: what the user should know before the start: cuts, label words that are alike, parameters left out,
            held-out rows.
        text_found: whether the field of the text was found in the rows, and not named by the request.
    """

    config: Config
    loaded: LoadedModel
    format: Format
    objective: Objective
    train: list[Encoded]
    stepped: Sequence[int]
    dev: list[Encoded]
    test: list[Encoded]
    optimizer: BaseOptimizer
    read_rows: str
    reported_rows: str
    held_out: HeldOutRows | None = None
    untrained: tuple[str, ...] = ()
    reward: Reward | None = None
    rows_as_read: tuple[str, ...] = ()
    text_found: bool = False
    notices: tuple[str, ...] = field(default=())

    @property
    def model(self) -> Any:
        """The model being tuned."""
        return self.loaded.model

    def with_lr(self, lr: float) -> "Job":
        """The job with another learning rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return replace(self, config=self.config.with_options(lr=lr))

    def sampler(self) -> BatchSampler:
        """Which rows a step takes."""
        return sampler(self.config, self.stepped)

    def batches(self, indices: Sequence[int]) -> list[Batch]:
        """These training rows, ready for `objective.closure`."""
        return self.objective.batches([self.train[i] for i in indices], self.config.train.most_rows)


def prepare(
    config: Config,
    *,
    loaded: LoadedModel | None = None,
    rows: Splits | None = None,
    score: Score | None = None,
    measuring: bool = True,
) -> Job:
    """Loads, reads, encodes and plans.

    Args:
        config: of the run.
        loaded: a model that is in memory, in place of the one that the configuration names.
        rows: rows that are in memory, in place of those that the configuration names.
        score: scorer of completions that is an object, in place of the file that train.reward names.
        measuring: whether open settings may be measured by forward passes; otherwise they stay open.

    Raises:
        RequestError: something does not fit.
    """
    reward = make_reward(config, score)
    engine, asked = config.model.engine, config.method.name
    if engine != engines.TORCH and config.method.options.get("directions") == PER_EXAMPLE:
        raise RequestError(f"method.directions is per-example, which {engine} does not compute; set shared, or auto.")
    splits = rows if rows is not None else read_splits(config.data)
    loaded = load_for_tuning(config, loaded)
    choices = Choices(config)
    choices.add(choose_dtype(config, loaded.dtype))
    form = make_format(choices.config.data, loaded, splits.train)
    if form.options:  # how their rows are divided depends on the method
        choices.add(choose_method(choices.config, loaded, learns_outputs=True, labelled=True))
    used = _encode(choices.config, loaded, splits, form, reward)
    if not form.options:
        learns_outputs = used.is_text and fits_text(loaded.model)
        why_no_answers = partial(_why_no_answers, loaded, used)
        choices.add(
            choose_method(
                choices.config,
                loaded,
                learns_outputs=learns_outputs,
                labelled=False,
                why_no_answers=why_no_answers,
            )
        )
    config = choices.config
    _check_objective(config, learns_labels=bool(used.format.options))
    if (
        method(config.method.name).takes_answers
        and asked != AUTO
        and (why := _why_no_answers(loaded, used)) is not None
    ):
        raise RequestError(f"method.name is {config.method.name}, and {why}; use --method {ES}.")
    untrained = _untrained(loaded, used.objective, used.train)
    passes = basis_passes(loaded, used.objective, used.train, config.train.seed)
    is_few = _learns_few(config, used)
    if is_few:
        choices.add(choose_for_few(config.train))
        config = choices.config
    looked, stepped = looked_and_stepped(config, len(used.train), judged=bool(used.dev) or is_few)

    unchecked: list[str] = []

    def build(settings: Config) -> BaseOptimizer:
        try:
            optimizer = make_optimizer(settings, loaded, untrained)
            check_readable(optimizer, loaded, labelled=bool(used.format.options))
            if loaded.engine is not None:
                modules = [target.sites[0].name for target in optimizer.targets]
                unchecked.extend(loaded.engine.reserve(optimizer.largest_rank(settings.train.num_steps), modules))
        except RequestError as error:
            if engine == engines.TORCH:
                raise
            raise RequestError(f"method.name is {settings.method.name}, model.engine {engine}: {error}") from None
        optimizer.set_passes(passes)
        taken = sampler(settings, stepped)
        judges = used.dev if used.is_text and settings.train.guard is not False else ()
        optimizer.set_rows(
            partial(rows_to_look_at, loaded, used.objective, used.train, settings.train, looked, taken, judges)
        )
        return optimizer

    chosen = method(config.method.name)
    choices.add(choose_size(config.train, len(stepped), chosen.for_texts() if used.is_text else chosen))
    train = choices.config.train
    if train.rows_per_step < (least := method(config.method.name).least_rows):
        raise RequestError(
            f"train.batch_size is {train.rows_per_step}, and {config.method.name} compares the rows of a step; give "
            f"{least} or more, or choose another method."
        )
    current().rows_per_pass = used.objective.rows_of_pass(used.train[:BASIS_ROWS], train.rows_per_step)
    choices.add(choose_columns(used.format))
    seen = RunRows(train, loaded.model, used.objective, used.train, used.dev, reward)
    try:
        with loaded.files.unchanged():
            found = resolve(choices, seen, build, measuring=measuring)
    except NonFiniteLossError:
        check_untuned(loaded, used.objective, used.train[: train.rows_per_step])
        raise
    optimizer = found.optimizer
    return Job(
        config=found.config,
        loaded=loaded,
        format=used.format,
        objective=used.objective,
        train=used.train,
        stepped=stepped,
        dev=used.dev,
        test=used.test or used.dev,
        optimizer=optimizer,
        read_rows=splits.digest,
        reported_rows=used.reported,
        held_out=_held_out(found.config, loaded, used),
        untrained=tuple(untrained),
        reward=reward,
        rows_as_read=used.as_read,
        text_found=found.config.data.text != config.data.text,
        notices=(
            *reward_notice(reward),
            *used.notices,
            *untrained_notice(untrained, loaded.engine),
            *left_out_notice(config, optimizer, untrained),
            *rank_notice(found.config, optimizer),
            *found.notices,
            *dict.fromkeys(unchecked),
        ),
    )


def _held_out(config: Config, loaded: LoadedModel, used: "_EncodedRows") -> HeldOutRows | None:
    train, objective = config.train, used.objective
    if not (used.dev and train.guard and method(config.method.name).takes_outputs):
        return None
    batches = objective.batches(used.dev, train.eval_batch_size)
    return HeldOutRows(objective.evaluator, loaded.model, batches, bool(objective.options))


def _learns_few(config: Config, used: "_EncodedRows") -> bool:
    """Returns whether the outputs of so few rows with labels are kept that none can be spared, and none can judge."""
    keeps = bool(used.format.options) and method(config.method.name).takes_outputs
    return keeps and are_few(len(used.train)) and too_few_to_judge(len(used.dev))


TRIED_ROWS = 8
"""Prompts that tell whether the last blocks can be computed anew."""


def _why_no_answers(loaded: LoadedModel, used: "_EncodedRows") -> str | None:
    """Returns why nothing can be learnt from the tokens of answers, as a clause; None: it can."""
    basis, shown = AnswerBasis(), used.objective.shown()
    if (unseen := loaded.unseen(basis, labelled=False)) is not None:
        return f"{POLICY_GRADIENT} looks at inputs of layers, for which torch needs the weights, and {unseen}"
    # the blocks are known by many places, and the prompts have them
    read = [replace(row, answers=(len(row.prompt) - 1,)) for row in used.train[:TRIED_ROWS] if len(row.prompt) > 1]
    if not read:
        return f"{POLICY_GRADIENT} is tried on prompts, and these are of one token"
    with current().phase(CHECKING):
        return why_not_rebuilt(loaded.model, shown.closure(loaded.model, shown.batches(read)), len(read))


def _check_objective(config: Config, *, learns_labels: bool) -> None:
    name, objective, chosen = config.method.name, config.train.objective, method(config.method.name)
    if chosen.takes_labels and not learns_labels:
        raise RequestError(
            f"method.name is {name}, which needs labels that all rows share, and these rows have none; leave --method "
            f"{name} out, or name another method, such as --method {HEAD_FEEDBACK}."
        )
    if chosen.takes_answers and config.model.peft != "none":
        raise RequestError(
            f"model.peft is {config.model.peft}, and {name} changes layers of the model itself; leave one of them out."
        )
    if chosen.takes_answers and objective != REWARD:
        raise RequestError(
            f"method.name is {name}, which learns from answers that the model writes, and train.objective is "
            f"{objective}; give a scorer of answers in train.reward, or choose another method."
        )
    if config.train.serve and engine_kind(config.model.engine) == ADDRESS:
        if chosen.takes_answers:
            _check_own_server(config)
        elif config.train.serve_port:
            raise RequestError(
                f"train.serve_port is {config.train.serve_port}, and under {name} programs ask {config.model.engine} "
                "itself; leave it out."
            )
    if chosen.takes_outputs and objective != LOSS:
        raise RequestError(
            f"train.objective is {objective}, and {name} needs the outputs of each row; choose another method "
            f"(method.name={ES} for a reward)."
        )
    if chosen.takes_rows and objective not in (LOSS, REWARD):
        raise RequestError(
            f"train.objective is {objective}, a metric of whole batches, and {name} needs the loss of each row; choose "
            "another method."
        )


def check_untuned(loaded: LoadedModel, objective: Objective, encoded: Sequence[Encoded]) -> None:
    """An error where the loss of the model on these rows is NaN or infinite, whatever a step does."""
    with torch.no_grad(), float32_on_emulating_cpu(loaded.model):
        loss = float(objective.closure(loaded.model, objective.batches(encoded))())
    if not math.isfinite(loss):
        raise NonFiniteModelError("the loss of the untuned model", loss, loaded.model.dtype)


@dataclass(frozen=True)
class _EncodedRows:
    """The rows of a run, encoded for the model."""

    format: Format
    objective: Objective
    train: list[Encoded]
    dev: list[Encoded]
    test: list[Encoded]
    reported: str
    is_text: bool
    notices: Sequence[str]
    as_read: tuple[str, ...]


def _encode(config: Config, loaded: LoadedModel, found: Splits, form: Format, reward: Reward | None) -> _EncodedRows:
    spares_few = bool(form.options) and method(config.method.name).takes_outputs
    used = divide(found, form, config.data, config.train.seed, spares_few=spares_few)
    objective = make_objective(config.data, loaded, form, reward.max_new_tokens if reward is not None else None)
    own_dev = used.dev if found.dev else []  # not those that were held out of the training rows
    forms = [form, form.fitted(own_dev, config.data), form.fitted(used.test, config.data)]
    examples_of = [each.example if reward is None else partial(prompt_of, each) for each in forms]
    learnt_of = form.training_example if config.train.minimises_loss else examples_of[0]
    uses = ((used.train, learnt_of), (used.dev, examples_of[1]), (used.test, examples_of[2]))
    with current().phase(ENCODING):
        examples = [[example(row) for row in part] for part, example in uses]
        if reward is None:
            check_answers([example for part in examples for example in part])
        train = [objective.encode(example) for example in tracked(examples[0])]
        dev, test = ([objective.encode(example) for example in part] for part in examples[1:])
        objective.adapt(loaded.model, train)
    of_columns = dict.fromkeys(notice for each in forms for notice in each.notices)
    notices = [*loaded.notices, *of_columns, *used.notices, *leak_notices(*examples), *token_notices(objective)]
    if form.labels and reward is None:
        notices += label_notices(examples[0], form.labels)
    as_read = rows_as_read(form, used.train[0], objective, train[0], scored=reward is not None)
    is_text = loaded.kind == "causal" and not any(example.options for example in examples[0])
    reported = digest_of(used.test or used.dev)
    return _EncodedRows(form, objective, train, dev, test, reported, is_text, notices, as_read)


def load(config: Config) -> LoadedModel:
    """The base model of a configuration."""
    return engines.load(config.model)


def load_for_tuning(config: Config, loaded: LoadedModel | None = None) -> LoadedModel:
    """The base, or `loaded` in its place, with a new adapter of PEFT where the configuration asks for one."""
    return add_adapter(loaded if loaded is not None else load(config), config.model, config.train.seed)


def _untrained(loaded: LoadedModel, objective: Objective, train: Sequence[Encoded]) -> list[str]:
    """Parameters that the loss does not depend on, or that it reads past their modules."""
    targets = find_targets(loaded.model)
    if loaded.engine is not None:
        return [t.name for t in targets if not (t.is_linear and loaded.engine.changes(t.sites[0].name))]
    closure = objective.closure(loaded.model, [objective.collate(train[:1])])
    with current().phase(CHECKING), torch.no_grad(), DirectReads(targets) as reads:
        uncalled = {target.name for target in never_called(targets, closure)}
    apart = uncalled | reads.names
    return [target.name for target in targets if target.name in apart or is_unused(target.name, loaded.kind)]


def make_optimizer(config: Config, loaded: LoadedModel, untrained: Collection[str]) -> BaseOptimizer:
    """The method of a configuration on a model; `untrained` parameters are left alone."""
    options = settled_options(config.method)
    if config.model.peft != "none":
        options.setdefault("targets", (ALL,))
    wanted = method(config.method.name)
    targets = options.pop("targets", wanted.defaults()["targets"])
    check_head_not_tied(loaded.model, targets)
    targets = (*targets, *(f"!{name}" for name in untrained))
    with current().phase(SETTING_UP):
        return wanted.build(loaded.model, seed=config.train.seed, targets=targets, **options)


def parse_method(name: str, options: Mapping[str, Any], known: Collection[str] = METHODS) -> Config:
    """A configuration with this method and these options, whose other settings are at their defaults.

    `feedback_first` and `feedback_last`, which are settings of a run, may be among the options.

    Raises:
        RequestError: the method is not among the `known`, or an option is unknown or of another type.
    """
    if name not in known:
        if name not in (*METHODS, *BASELINES):
            raise RequestError(f"method is {name!r}, and there is no such method. {nearest(name, known)}")
        ways = "tezo.train or tezo.prepare" if name in METHODS else "tezo.train"
        raise RequestError(
            f"method is {name!r}, which needs more than the loss of a batch; use {ways} for it, or give another method."
        )
    of_method = {key: value for key, value in options.items() if key not in KEYS}
    return parse_config(
        {
            "model": {"name": IN_MEMORY},
            "data": {"train": IN_MEMORY},
            "method": {"name": name, **of_method},
            "train": {key: options[key] for key in KEYS if key in options},
        }
    )


def build_method(config: Config, model: Any, seed: int) -> ZerothOrderOptimizer:
    """The optimizer of a configuration; of a model with an adapter of PEFT it tunes the adapter.

    Raises:
        RequestError: the model cannot be tuned this way.
    """
    if settle(model.parameters(), keep=True):
        logger.warning(SETTLED)
    if is_changed_beside(model.parameters()):
        raise RequestError(
            "model has been tuned by another trainer, run or optimizer, whose change is not in the weights; call that "
            "one's merge() to keep it, or close() to drop it."
        )
    options = settled_options(config.method)
    chosen = METHODS[config.method.name]
    adapted = getattr(model, "peft_config", None) is not None
    targets = options.pop("targets", (ALL,) if adapted else chosen.defaults()["targets"])
    check_head_not_tied(model, targets)
    return chosen.build(model, seed=seed, targets=targets, **options)
