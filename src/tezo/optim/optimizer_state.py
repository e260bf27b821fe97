"""The state of an optimizer besides the parameters: counts, and the moments of its update rules."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import torch
from torch import Tensor

from tezo.estimators.estimate import StepRecord
from tezo.optim.updates import State

Moments = dict[str, State]
"""Parameter name -> the update rule's state of the parameter."""


@dataclass
class OptimizerState:
    """Counts and moments.

    Attributes:
        num_steps: number of steps taken.
        num_forward_passes: number of closure evaluations in all steps.
        last_step: record of the last step; None before the first.
        counts: kind of step -> number of estimates in its moments.
        moments: kind of step -> moments of its update rule.
    """

    num_steps: int = 0
    num_forward_passes: int = 0
    last_step: StepRecord | None = None
    counts: dict[str, int] = field(default_factory=dict)
    moments: dict[str, Moments] = field(default_factory=dict)

    def add(self, record: StepRecord, restarting: Iterable[str]) -> None:
        """Counts a step; `restarting` are the kinds whose moments are dropped by a step of another kind."""
        for kind in restarting:
            if kind != record.kind:
                self.counts[kind], self.moments[kind] = 0, {}
        self.counts[record.kind] += 1
        self.num_steps += 1
        self.num_forward_passes += record.forward_passes
        self.last_step = record

    def drop_moments(self) -> None:
        """Drops the moments of all kinds."""
        self.counts = dict.fromkeys(self.counts, 0)
        self.moments = {kind: {} for kind in self.moments}

    def tensors(self) -> dict[str, Tensor]:
        """The moments: "update/NAME/KEY" for two-point steps, "KIND/NAME/KEY" for other kinds; not copies."""
        return {
            f"{_PREFIX.get(kind, kind)}/{name}/{key}": value
            for kind, moments in self.moments.items()
            for name, state in moments.items()
            for key, value in state.items()
        }

    def load_tensors(self, tensors: Mapping[str, Tensor], devices: Mapping[str, torch.device]) -> None:
        """Restores the moments of all kinds from the result of `tensors`; other names are ignored.

        Args:
            tensors: tensors by name.
            devices: parameter name -> device of its moments.
        """
        for kind in self.moments:
            start, moments = f"{_PREFIX.get(kind, kind)}/", Moments()
            for key in tensors:
                name, _, role = key.removeprefix(start).rpartition("/")
                if key.startswith(start) and name in devices:
                    moments.setdefault(name, {})[role] = tensors[key].to(devices[name]).clone()
            self.moments[kind] = moments

    def load_records(self, records: Sequence[StepRecord], restarting: Collection[str], moments_since: int = 0) -> None:
        """Restores the counts from the records of all steps since the first.

        Args:
            records: of all steps.
            restarting: kinds whose moments are dropped by a step of another kind.
            moments_since: number of steps after which all moments were last dropped.
        """
        self.num_steps, self.num_forward_passes = len(records), sum(record.forward_passes for record in records)
        self.last_step = records[-1] if records else None
        last_kind = self.last_step.kind if self.last_step else None
        counted = records[moments_since:]
        phase = sum(1 for _ in takewhile(lambda record: record.kind == last_kind, reversed(counted)))
        for kind in self.counts:
            since = counted[len(counted) - phase :] if kind in restarting else counted
            self.counts[kind] = sum(record.kind == kind for record in since)


_PREFIX = {"two-point": "update"}
