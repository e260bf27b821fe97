"""What a run would take, and what this machine has: memory, time, the steps of a plan; nothing is trained.

It gives `machine_report`, `model_report` and `dry_run`. May import finished_runs and what that may import.

What a run would do, found without writing anything: its plan, and a forecast of its time and memory.

The model is loaded, the rows are encoded, and one forward pass over a training batch is timed. With what loading and
preparing try on a row each, that is less than two passes; all else is a forecast from numbers of passes. Settings that
a run measures at its start are named with their cost, and stay open. What a run adds by returning to an earlier state,
or saves by an early end, is in no forecast.

Forecast of the memory of inference, of zeroth-order steps, and of training by gradients; nothing is trained.

The model is rebuilt on the meta device, and its passes are counted there (`pass_peak`), with the loss at one position
of each row. Left out: the allocator's rounding and reserve, the libraries' own memory, temporaries of an update.
Attention is counted with its scores, which fused kernels do not store.

What this machine has, what a model can be tuned with, and at which scale its losses can be measured.
"""

import math
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import nn

from tezo.directions.bases.activation import groups
from tezo.directions.products import float32_on_emulating_cpu
from tezo.directions.targets import find_targets, is_packed, select_targets
from tezo.models.kinds import Kind, ModelConfig
from tezo.models.loading import EMBEDDED, LoadedModel, embedded_source
from tezo.models.peft import add_adapter
from tezo.models.quantization import bytes_of, stored_bytes
from tezo.optim.estimators.estimate import FEEDBACK, GRADIENT
from tezo.optim.measured_scale import MeasuredScale, measure_scale, most_passes
from tezo.optim.memory_forecast import copies_of, first_order_kept, forecast, forecasts
from tezo.optim.methods import AUTO, METHODS, method
from tezo.optim.optimizer import PER_EXAMPLE
from tezo.runs.environment import hardware, memory_for, peak_memory, usable_memory, versions
from tezo.system.errors import NonFiniteLossError, RequestError
from tezo.system.progress import FORECAST, KEPT, RHO, TIMING, current, metered
from tezo.tasks.catalogue import task
from tezo.tasks.examples import Row
from tezo.tasks.objectives.objective import Encoded
from tezo.tasks.setup import make_objective
from tezo.tasks.wordings import TaskFormat
from tezo.training.config import to_tree
from tezo.training.dry_pass import META, meta_twin, pass_peak, valueless
from tezo.training.evaluations import SAMPLE_TOKENS
from tezo.training.job import BASIS_ROWS, Job, basis_passes, load, make_optimizer, parameter_counts, plan, prepare
from tezo.training.opening import run_config
from tezo.training.recipe import Config
from tezo.training.resolution import (
    first_scale,
    is_rho_open,
    known_rounding,
    losses_of,
    resolve_directions,
    search_budget,
)
from tezo.training.schedule import evaluation_steps, is_feedback
from tezo.training.summary import row_counts

WITH_GRADIENT = 3
"""Time of a pass whose gradient is taken, in forward passes."""


@dataclass(frozen=True)
class _Pace:
    """Seconds of a forward pass over a training batch, of a token in it, and of one token that is written alone."""

    batch: float
    token: float
    written: float


def dry_run(config: Config) -> dict[str, Any]:
    """Prepares a run without measuring its open settings, and times a forward pass.

    Returns:
        JSON: the forward "passes" that were made; the resolved "settings"; those that are "measured" at the start, with
        their forward passes at most; the "plan" of every parameter; "memory" in bytes (of the model, of fixed factors,
        and a forecast of the peak); and "seconds" (of the preparation and the timed pass, and forecasts of one step of
        each kind, the measurements, the evaluations and the whole run). Times are those of this machine as it is now.

    Raises:
        RequestError: the run could not start.
        RunError: memory ran out.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RequestError("a dry run is of one process; leave out torchrun.")
    with metered() as meter:
        return _forecast(config) | {"passes": round(meter.passes, 2)}


def _forecast(config: Config) -> dict[str, Any]:
    started = time.perf_counter()
    job = prepare(config, measuring=False)
    before = peak_memory(job.loaded.device)
    with current().phase(TIMING):
        pace = _timed(job)
    preparing = time.perf_counter() - started
    measured = _measured(config, job)
    parameters, steps = plan(job.model, job.optimizer), _steps(job)
    passes = {kind: (job.optimizer.passes_of(kind, first=True), job.optimizer.passes_of(kind, first=False))
              for kind in steps}  # fmt: skip
    seconds = {kind: tuple(count * _evaluation(job, kind, pace) for count in counts) for kind, counts in passes.items()}
    evaluations, measuring = _evaluations(job, pace), sum(measured.values()) * pace.batch
    stepping = sum(_total(steps[kind], seconds[kind]) for kind in steps)
    return {
        "method": job.config.method.name,
        "model": job.config.model.name,
        "hardware": hardware(),
        "rows": row_counts(job),
        "parameters": parameter_counts(parameters),
        "steps": {kind: count for kind, (count, _) in steps.items()},
        "num_forward_passes": int(sum(_total(steps[kind], passes[kind]) for kind in steps)),
        "measured": measured,
        "seconds": {
            "preparation": round(preparing, 3),
            "timed pass": round(pace.batch, 4),
            **{f"first {kind} step": round(first, 4) for kind, (first, _) in seconds.items()},
            **{f"{kind} step": round(other, 4) for kind, (_, other) in seconds.items()},
            "measurements": round(measuring, 3),
            "evaluations": round(evaluations, 3),
            "run": round(preparing + measuring + stepping + evaluations, 3),
        },
        "notices": list(job.notices),
        "settings": to_tree(job.config),
        "plan": parameters,
        "memory": _memory(job, before),
    }


def _steps(job: Job) -> dict[str, tuple[int, int]]:
    """Kind of step -> (number of its steps, number of phases of such steps in a row)."""
    settings = job.config.train
    kinds = [FEEDBACK if is_feedback(step, settings) else job.optimizer.kinds[0] for step in range(settings.num_steps)]
    phases = [kind for kind, _ in groupby(kinds)]
    return {kind: (kinds.count(kind), phases.count(kind)) for kind in dict.fromkeys(kinds)}


def _total(steps: tuple[int, int], first_and_other: Sequence[float]) -> float:
    """Sum over the steps of a kind: the first of a phase, which computes what the others share, and each other."""
    (count, phases), (first, other) = steps, first_and_other
    return phases * first + (count - phases) * other


@torch.no_grad()
def _timed(job: Job) -> _Pace:
    rows = [job.train[i] for i in job.sampler().rows(0)]
    with memory_for("a forward pass", rows, "train.batch_size"), float32_on_emulating_cpu(job.model):
        batch = job.objective.collate(rows)
        started = time.perf_counter()
        float(job.objective.loss(job.model, batch))
        seconds, written = time.perf_counter() - started, 0.0
        if _new_tokens(job):
            started = time.perf_counter()
            logits = job.model(input_ids=batch.input_ids_RL[:1, :1]).logits
            float(logits.sum())
            written = time.perf_counter() - started
    return _Pace(seconds, seconds / _tokens(job, rows), written)


def _tokens(job: Job, encoded: Sequence[Encoded]) -> int:
    return sum(len(row.tokens) for own in job.objective.rows(encoded) for row in own)


def _new_tokens(job: Job) -> int:
    """Tokens of the longest answer that an evaluation of the test rows writes; 0: it writes none."""
    if job.reward is not None:
        return job.reward.max_new_tokens
    if job.format.measures and not job.test[0].example.options:
        return job.format.max_new_tokens or 0
    return SAMPLE_TOKENS if job.format.shape in ("completion", "messages") else 0


def _evaluation(job: Job, kind: str, pace: _Pace) -> float:
    """Seconds of one evaluation of what a step minimises."""
    if kind == GRADIENT:
        return WITH_GRADIENT * pace.batch
    if job.config.train.minimises_loss:
        return pace.batch
    return pace.batch * (job.reward is None) + pace.written * _new_tokens(job)


def _evaluations(job: Job, pace: _Pace) -> float:
    """Seconds of all evaluations; a token that is written takes as long for a batch as for a row."""
    settings = job.config.train
    of_dev = max(0, len(evaluation_steps(settings)) - (job.dev is job.test)) if job.dev else 0
    reading = of_dev * _tokens(job, job.dev) + 2 * _tokens(job, job.test)
    batches = math.ceil(len(job.test) / settings.eval_batch_size) if job.reward or job.format.measures else 1
    return reading * pace.token + 2 * batches * _new_tokens(job) * pace.written


def _measured(config: Config, job: Job) -> dict[str, int]:
    """Setting that a run measures at its start -> forward passes that it takes for that, at most."""
    options, optimizer = job.config.method.options, job.optimizer
    found: dict[str, int] = {}
    if options.get("directions") == PER_EXAMPLE != config.method.options.get("directions"):
        found["method.directions"] = 1  # four, over two rows
    if is_rho_open(job.config) and job.config.train.minimises_loss:
        found["method.rho"] = most_passes(optimizer.num_directions)
    basis = options.get("basis", method(config.method.name).defaults().get("basis"))
    if basis == "activation":
        ranks = {t.name: optimizer.rank_and_way(t.name)[0] or 0 for t in optimizer.targets if t.input_role is not None}
        shown = math.ceil(min(BASIS_ROWS, len(job.train)) / config.train.batch_size)
        found["method.basis"] = shown * len(list(groups([t for t in optimizer.targets if t.name in ranks], ranks)))
    if FEEDBACK in _steps(job):
        found["train.feedback_first"] = optimizer.passes_of(FEEDBACK, first=True)
    if options.get("lr") == AUTO:
        found["method.lr"] = search_budget(job.config.train, optimizer)
    return found


def _memory(job: Job, before: int) -> Mapping[str, int]:
    """Bytes; the peak is that of the timed pass, with a pass for both signs and what the method keeps beside it."""
    after, factors, name = peak_memory(job.loaded.device), job.optimizer.factor_bytes, job.config.method.name
    kept, copies = 0, 1
    if name in METHODS:
        job.optimizer.close()
        options = {key: value for key, value in job.config.method.options.items() if value != AUTO and key != "targets"}
        patterns = tuple(target.name for target in job.optimizer.targets)
        said = forecast(job.model, METHODS[name], targets=patterns, **options)
        kept, copies = (
            said.kept + said.collecting,
            copies_of(said, _tokens(job, job.train[: job.config.train.batch_size])),
        )
    else:
        kept = sum(first_order_kept(job.model))
    return {
        "model": stored_bytes(job.model),
        "factors": factors,
        "peak": after + (copies - 1) * max(0, after - before) + kept,
    }


INFERENCE = "inference"
LORA = "LoRA with gradients"
LORA_CHECKPOINTED = "LoRA with gradients, checkpointed"
FULL = "full fine-tuning with Adam"
ZEROTH_ORDER = ("lozo-adam", "tezo-cadam")
"""Methods that are set against gradients: the default, and the one of least memory."""
LENGTH = 128
"""Tokens of a row for which memory is forecast, where no maximum length is set."""
USABLE = 0.8
"""Share of the memory that a forecast may need and still fit, because of what it leaves out."""

WITHOUT_RANDOM_STATE = {"use_reentrant": False, "preserve_rng_state": False}
"""Options of gradient checkpointing with which it runs on the meta device."""


@dataclass(frozen=True)
class WayMemory:
    """The memory of one way to use or to train a model.

    Attributes:
        way: `INFERENCE`, a method of `ZEROTH_ORDER`, `LORA`, `LORA_CHECKPOINTED` or `FULL`.
        weights: bytes of the parameters, those of an adapter included.
        kept: bytes kept beside them from step to step: factors, coefficients, moments, float32 copies.
        passing: bytes at the peak of a pass or of the update after it: activations and gradients, and the range
            finders of a data-dependent basis before the first step.
    """

    way: str
    weights: int
    kept: int
    passing: int

    @property
    def total(self) -> int:
        """Bytes in total."""
        return self.weights + self.kept + self.passing


def memory_of_model(loaded: LoadedModel, rows: int, length: int) -> list[WayMemory]:
    """The forecast for a loaded model.

    Args:
        loaded: the model; it is only looked at.
        rows: rows of a batch.
        length: tokens of a row.

    Raises:
        RequestError: the model cannot be rebuilt without values, or PEFT has no default layers for it.
    """
    model = loaded.model
    packed = any(is_packed(parameter) for parameter in model.parameters())
    try:
        return memory_of_ways(lambda: meta_twin(model), loaded.kind, rows, length, stored_bytes(model), packed=packed)
    except RequestError:
        raise
    except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError, LookupError) as error:
        reason = " ".join(str(error).split())[:160]
        raise RequestError(f"{type(model).__name__} does not run without values ({reason}).") from None


def memory_of_ways(
    build: Callable[[], Any], kind: Kind, rows: int, length: int, weights: int, *, packed: bool
) -> list[WayMemory]:
    """The forecast for a model that is built on the meta device.

    Args:
        build: makes the model on the meta device, with plain layers, in its dtype.
        kind: its kind.
        rows: rows of a batch.
        length: tokens of a row.
        weights: bytes of its parameters as they are stored.
        packed: whether its linear layers are stored packed; a pass then unpacks one of them at a time, and full
            fine-tuning is left out.
    """
    twin = build()
    unpacked = max((target.parameter.nbytes for target in select_targets(twin)), default=0) if packed else 0
    found = [WayMemory(INFERENCE, weights, 0, pass_peak(twin, rows, length) + unpacked)]
    for name in ZEROTH_ORDER:
        with valueless(twin) as allocated:
            said = forecast(allocated, METHODS[name])
        passing = pass_peak(twin, rows * copies_of(said, rows * length), length) + unpacked
        showing = found[0].passing + said.collecting  # the passes that a data-dependent basis looks at
        found.append(WayMemory(name, weights, said.kept, max(passing, showing)))
    for way in (LORA, LORA_CHECKPOINTED):
        adapted = _with_lora(build(), kind, checkpointed=way == LORA_CHECKPOINTED)
        own = sum(parameter.nbytes for parameter in adapted.parameters() if parameter.requires_grad)
        found.append(_by_gradient(way, adapted, weights + own, unpacked, rows, length))
    if not packed:
        found.append(_by_gradient(FULL, build(), weights, 0, rows, length))
    return found


def _by_gradient(way: str, model: nn.Module, weights: int, unpacked: int, rows: int, length: int) -> WayMemory:
    kept, gradients = first_order_kept(model)
    peak = pass_peak(model, rows, length, backward=True)
    return WayMemory(way, weights, kept, max(peak + unpacked, gradients))


def _with_lora(model: Any, kind: Kind, *, checkpointed: bool) -> Any:
    with META, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT and transformers call checkpointing by two names
        adapted = add_adapter(LoadedModel(model, None, kind), ModelConfig(name="", peft="lora"), seed=0).model
        if checkpointed:
            model.gradient_checkpointing_enable(WITHOUT_RANDOM_STATE)
    return adapted


def advice(found: list[WayMemory], memory: int) -> str:
    """What to train with, in a sentence or two, where `memory` bytes are there."""
    total = {one.way: one.total for one in found}
    fitting = [way for way, needed in total.items() if needed <= USABLE * memory]
    default = ZEROTH_ORDER[0]
    for way, how in ((LORA, ""), (LORA_CHECKPOINTED, " by gradient checkpointing")):
        if way in fitting:
            return (
                f"LoRA with gradients fits here{how} and will be faster: {gibibytes(total[way])} of "
                f"{gibibytes(memory)}, beside {gibibytes(total[default])} for {default}."
            )
    lora = f"LoRA with gradients needs {gibibytes(total[LORA_CHECKPOINTED])} by gradient checkpointing"
    for way in ZEROTH_ORDER:
        if way in fitting:
            return f"{lora}, too much for {gibibytes(memory)}; {way} fits, with {gibibytes(total[way])}."
    return f"{lora} and {default} {gibibytes(total[default])}; neither fits into {gibibytes(memory)}."


def gibibytes(count: int) -> str:
    """A number of bytes in GiB."""
    return f"{count / 2**30:,.2f} GiB"


PACKAGES = ("tezo", "torch", "transformers", "safetensors", "datasets", "peft", "numpy", "bitsandbytes", "torchao")
"""Packages whose versions are reported."""

REVIEWS = {
    "a quiet film that stays with you": 1,
    "the plot falls apart in the second half": 0,
    "sharp, funny and over too soon": 1,
    "two hours that feel like four": 0,
    "the cast is a delight from start to finish": 1,
    "every joke arrives late and limps away": 0,
    "a small story told with great care": 1,
    "loud, hollow and badly cut": 0,
}
"""Rows of the task sst2, for models that are looked at without any."""


def machine_report() -> dict[str, Any]:
    """JSON: versions, processor or GPU, cores, memory in bytes, and the state of the embedded models."""
    gpu = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
    return {
        "versions": versions(PACKAGES),
        "hardware": hardware(),
        "cores": os.cpu_count(),
        "memory": usable_memory(),
        "gpu_memory": gpu,
        "embedded": {name: _embedded_state(name) for name in EMBEDDED},
    }


def _embedded_state(name: str) -> str:
    try:
        embedded_source(name)
    except RequestError as error:
        return str(error)
    return "installed, weights verified"


def model_report(name: str, settings: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON: a model's sizes, what each method trains and keeps, the memory of training, the scale of its perturbations.

    Memory is compared with training by gradients; the scale is measured as in a run. Where one of the two cannot be
    had, the reason stands in its place.

    Args:
        name: a folder, a hub name or a run folder.
        settings: (dotted key, value) pairs laid over its configuration.

    Raises:
        RequestError: the model cannot be loaded so.
    """
    config = run_config(name, settings)
    loaded = load(config)
    linear = select_targets(loaded.model)
    with current().phase(KEPT):
        methods = [asdict(forecast) for forecast in forecasts(loaded.model)]
    with current().phase(FORECAST):
        memory = memory_report(config, loaded)
    report: dict[str, Any] = {
        "name": name,
        "kind": loaded.kind,
        "dtype": str(loaded.model.dtype),
        "quantization": config.model.quantization,
        "bytes": stored_bytes(loaded.model),
        "parameters": sum(target.shape.numel() for target in find_targets(loaded.model)),
        "linear_parameters": sum(target.shape.numel() for target in linear),
        "linear_bytes": sum(bytes_of(target.parameter) for target in linear),
        "methods": methods,
        "memory": memory,
    }
    try:
        with current().phase(RHO):
            found = model_scale(config, loaded)
    except (RequestError, NonFiniteLossError) as error:
        return report | {"scales": str(error), "recommended_rho": None}
    return report | {"scales": [asdict(at) for at in found.tried], "recommended_rho": found.chosen.rho}


def memory_report(config: Config, loaded: LoadedModel) -> dict[str, Any] | str:
    """JSON: the memory of inference, of zeroth-order steps and of training by gradients, and what fits here.

    Rows are those of a batch of the run, tokens as many as `data.max_length` or `LENGTH`. The reason in words where
    there is no forecast.
    """
    if config.model.placement != "device":
        return f"model.placement is {config.model.placement}, and the forecast is for a model on one device."
    rows, length = config.train.batch_size, min(config.data.max_length or LENGTH, loaded.max_length)
    try:
        ways = memory_of_model(loaded, rows, length)
    except RequestError as error:
        return str(error)
    cuda = loaded.device.type == "cuda"
    memory = torch.cuda.get_device_properties(loaded.device).total_memory if cuda else usable_memory()
    told = [asdict(way) | {"total": way.total} for way in ways]
    return {"rows": rows, "length": length, "available": memory, "ways": told, "advice": advice(ways, memory)}


def model_scale(config: Config, loaded: LoadedModel) -> MeasuredScale:
    """The perturbation scale that a run of this configuration would measure, if its rows were `REVIEWS`."""
    entry = task("sst2")
    form = TaskFormat(entry, entry.wording(loaded.kind))
    objective = make_objective(config.data, loaded, form)
    rows = [Row({"sentence": text, "label": label}, text) for text, label in REVIEWS.items()]
    encoded = [objective.encode(form.example(row)) for row in rows]
    options = {key: value for key, value in config.method.options.items() if key != "rho"}
    build = partial(make_optimizer, loaded=loaded, untrained=())
    config, _ = resolve_directions(
        replace(config, method=replace(config.method, options=options)),
        build,
        objective.closure(loaded.model, objective.batches(encoded[:2])),
        rows_share_inputs=objective.shared_tokens > 0,
    )
    optimizer = build(config)
    try:
        optimizer.set_calibration_passes(basis_passes(loaded, objective, encoded, config.train.seed))
        losses = losses_of(objective.closure(loaded.model, objective.batches(encoded)), optimizer)
        start, rounding = first_scale(loaded.model), known_rounding(loaded.model)
        return measure_scale(optimizer, losses, start, current().report, rounding=rounding)
    finally:
        optimizer.close()
