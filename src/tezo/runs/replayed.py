"""The folder of a replay: it is opened, measured and exported as that of a run, and has no summary and no metrics."""

import os
import re
import shutil
from pathlib import Path

from tezo.runs.files import MANIFEST, write_manifest
from tezo.runs.folder import CONFIG, FILES, LOG, SUMMARY
from tezo.runs.step_log import End, StepLog, first_steps

_OF_A_STEP = re.compile(r"[a-z]+-\d+\.safetensors")


def complete(folder: Path, run: Path, steps: int, config: str) -> None:
    """Writes the files beside a result: the settings, the log of the steps with its files, and the manifest.

    Args:
        folder: of the replay, with its result.
        run: folder whose steps were taken again.
        steps: how many.
        config: the settings, as YAML.
    """
    (folder / CONFIG).write_text(config, encoding="utf-8")
    (folder / LOG).write_bytes(first_steps(run / LOG, steps))
    log = StepLog(folder / LOG, {})
    try:
        log.append_end(End(steps, steps))
        for name in log.contents.files:
            if _OF_A_STEP.fullmatch(name) and (run / name).is_file():
                shutil.copyfile(run / name, folder / name)
    finally:
        log.close()
    write_manifest(folder, FILES)


def is_replayed(folder: Path) -> bool:
    """Returns whether a folder with a log is one of a replay, whose files must have been checked."""
    return os.path.lexists(folder / MANIFEST) and not os.path.lexists(folder / SUMMARY)
