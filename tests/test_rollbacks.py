"""Runs that return to their best state: when they do, to the bit, through ends of all kinds, and with a log that tells."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import effective_weights, every_method, every_method_fast_for_kinds, run
from folders import folder_contents, model_and_rows, read_jsonl, settings, tezo
from short_runs import config, result, same, stopped
from tiny import lm_loss, tiny_opt, tokens

from tezo.errors import NonFiniteLossError, RequestError
from tezo.runs.step_log import Rollback, StepLog, read_log
from tezo.training.config import parse_config, to_tree
from tezo.training.listeners import Listener
from tezo.training.loop import train
from tezo.training.recipe import Config
from tezo.training.rollbacks import (
    DEV_ROSE,
    LOWERED,
    MOST_ROLLBACKS,
    NOT_FINITE,
    STAGNATED,
    STEPS_ROSE,
    GoodState,
    Rollbacks,
)

STEPS = 40
