"""From the base model and the step log alone to the tuned model."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from tezo.directions.bases.basis import KIND
from tezo.directions.random import NOISE_VERSION
from tezo.models.identity import check_model
from tezo.models.saving import save_result
from tezo.optim.optimizer import ZerothOrderOptimizer
from tezo.runs.environment import versions
from tezo.runs.files import FactorFiles, check_complete, check_manifest, check_place
from tezo.runs.folder import LOG
from tezo.runs.replayed import complete
from tezo.runs.step_log import read_log
from tezo.system.errors import RequestError
from tezo.system.files import check_free, new_folder, remove
from tezo.system.progress import SAVING, STEPS, current, tracked
from tezo.training.config import dump_config, overlay, parse_config, to_tree, untrusted_tree, with_absolute_paths
from tezo.training.header import with_dtype_of
from tezo.training.job import load_for_tuning, make_optimizer


def replay(
    run: Path,
    output: Path,
    *,
    step: int | None = None,
    device: str = "auto",
    model: str | None = None,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Takes the steps of a run again, without an evaluation, and saves what they lead to.

    Args:
        run: folder with a steps.log; a run that was cut short will do.
        output: folder for the result, new; it can be opened, measured and exported as that of a run.
        step: how many steps; None: those whose parameters the run kept, or all where it did not end.
        device: to do it on. Another than the run's will do for methods that draw nothing on the device.
        model: folder or hub name of the base, of the same weights; None: as the run names it.
        trust_remote_code: whether code that comes with the model may run; what the run says of it does not count.

    Returns:
        "steps", their number; "result", see `tezo.models.saving.save_result`; "notices", those for the user.

    Raises:
        RequestError: the base model is another one, or the log does not say enough for this method and device.
    """
    check_free(output)
    check_manifest(run, [LOG])
    log = read_log(run / LOG)
    check_complete(log.header)
    here = [("model.device", device), ("model.placement", "device"), ("model.trust_remote_code", trust_remote_code)]
    named = [("model.name", model)] if model else []
    request = with_dtype_of(log.header, parse_config(overlay(untrusted_tree(log.header["config"]), named)))
    config = parse_config(overlay(to_tree(request), here))
    loaded = load_for_tuning(config)
    check_model(log.header["model"], loaded.fingerprint, saved=True)
    optimizer = make_optimizer(config, loaded, log.header["untrained"])
    if not isinstance(optimizer, ZerothOrderOptimizer):
        raise RequestError(f"method.name: {config.method.name} steps along gradients, which a log does not have.")
    optimizer.set_factor_store(FactorFiles(run, writes=False, digests=log.files))
    optimizer.set_calibration_passes(partial(_no_data, run))
    own = {"device": loaded.device.type, "noise": NOISE_VERSION, "versions": versions(("tezo", "torch"))}
    notices = check_place(log.header, own, optimizer.drawn_on_the_device)
    if log.size > log.valid:
        notices.append(f"{log.size - log.valid} bytes at the end of {LOG} are unfinished, and left out.")
    if step is None:
        step = len(log.steps) if log.end is None else log.end.kept
    if not 0 <= step <= len(log.steps):
        raise RequestError(f"step is {step}, and the log has {len(log.steps)} steps; give one from 0 to that number.")
    returned_to = {rollback.to for rollback in log.rollbacks.values()}
    kept: dict[int, dict[str, Tensor]] = {}
    with current().phase(STEPS):
        for number in tracked(range(step), STEPS):
            if number in returned_to:
                kept[number] = optimizer.tuned_state()
            if number in log.rollbacks:
                to = log.rollbacks[number].to
                optimizer.roll_back(kept[to], to)
            optimizer.replay(log.steps[number])
    with current().phase(SAVING), new_folder(output) as folder, loaded.files.unchanged():
        result = save_result(config.model, loaded, optimizer, lambda name: _part(folder / name))
        complete(folder, run, step, dump_config(with_absolute_paths(request)))
    return {"steps": step, "result": result, "notices": notices}


@contextmanager
def _part(path: Path) -> Iterator[Path]:
    """Yields a new folder, which is removed if the block fails."""
    path.mkdir()
    try:
        yield path
    except BaseException:
        remove(path)
        raise


def _no_data(run: Path, refresh_step: int) -> None:
    path = FactorFiles(run, writes=False).path(KIND, refresh_step)
    raise RequestError(
        f"{path} is missing, and steps from {refresh_step} on depend on it; put it back, or give --step {refresh_step}."
    )
