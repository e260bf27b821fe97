"""Rewards of whole programs, which ask the model by its name on an OpenAI-compatible server, and return one score."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from tezo.forward.engine import Named, Writer
from tezo.tasks.generation import Turn
from tezo.tasks.objectives.causal import CausalObjective
from tezo.tasks.objectives.objective import Encoded, Objective
from tezo.tasks.own_server import OwnServer
from tezo.tasks.rewards import Reward, sample_of
from tezo.tasks.scores import Scored
from tezo.tasks.scoring import check_asks

PROGRAMS = 16
"""Processes in which the scorer of a file is called where their number is not set: as many calls side by side."""

SECONDS_OF_A_PROGRAM = 600.0
"""Limit of a call there where it is not set: calls wait for each other at the server."""


@dataclass(frozen=True)
class ProgramReward(Reward):
    """The mean score of a program that asks the model itself, as often as it wants, on a server.

    The scorer is called with a row, see `tezo.tasks.scoring.call_on`. It asks a server of this process, which computes
    the answers, or has an engine that is a server write them. It asks such an engine itself where no tokens are kept.

    Attributes:
        port: of 127.0.0.1; 0: any that is free.
    """

    port: int = 0
    _servers: list[OwnServer] = field(default_factory=list)
    _alone: threading.Lock = field(default_factory=threading.Lock)

    scores_texts: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_asks(self.score, self.name)

    def close(self) -> None:
        super().close()
        while self._servers:
            self._servers.pop().close()

    @property
    def notice(self) -> str:
        return (
            f"train.serve: an evaluation calls {self.name} for each row, which asks the model as often as it wants; "
            "num_forward_passes counts the evaluation as one."
        )

    @property
    def way_on(self) -> str:
        return f"{super().way_on} and {'--accept-scorer' if self.in_file else 'accept_scorer=True'}"

    def most_copies(self, objective: Objective, rows: int) -> int:
        del rows
        assert isinstance(objective, CausalObjective)
        return objective.evaluator.most_named

    def scored(
        self, model: Any, objective: Objective, encoded: Sequence[Encoded], batch_size: int, step: int, copies: int
    ) -> list[tuple[list[str], list[Scored]]]:
        del batch_size
        assert isinstance(objective, CausalObjective)
        samples = [sample_of(each, "") for each in encoded]

        def ask(named: Named) -> list[Scored]:
            of_model = [replace(each, base_url=named.base_url, model=named.model) for each in samples]
            if self.processes is not None:
                return self.scores(of_model)
            with self._alone:  # the environment of this process names one model at a time
                return self.scores(of_model)

        evaluator = objective.evaluator
        if evaluator.serves:
            found = evaluator.serve(model, copies, ask)
        else:
            writers = evaluator.writers(model, objective.tokenizer, copies)
            found = self._server().serve(model, objective, writers, step, ask)
        return self._of_models(samples * copies, [one for of_model in found for one in of_model], len(samples))

    def sampled(
        self, model: Any, objective: Objective, encoded: Sequence[Encoded], step: int, first: int
    ) -> tuple[list[list[Turn]], list[str], list[Scored]]:
        """Returns (turns, no texts, scores) of the program for each row, all of whose answers are sampled."""
        assert isinstance(objective, CausalObjective)
        samples = [sample_of(each, "") for each in encoded]

        def ask(named: Sequence[Named]) -> list[Scored]:
            own = [replace(s, base_url=n.base_url, model=n.model) for s, n in zip(samples, named, strict=True)]
            if self.processes is not None:
                return self.scores(own)
            with self._alone:
                return [score for sample in own for score in self.scores([sample])]

        def rolled_out(writer: Writer, *, apart: bool) -> tuple[list[Scored], list[list[Turn]]]:
            count = len(samples)
            return self._server().roll_out(model, objective, writer, step, first, count, ask, apart=apart)

        evaluator = objective.evaluator
        if evaluator.serves:
            ((found, turns),) = evaluator.serve(model, 1, lambda served: rolled_out(served.write, apart=True))
        else:
            (writer,) = evaluator.writers(model, objective.tokenizer, 1)
            found, turns = rolled_out(writer, apart=False)
        return turns, [""] * len(samples), found

    def _server(self) -> OwnServer:
        if not self._servers:
            self._servers.append(OwnServer(self.port, self.max_new_tokens, self.temperature, self.seed))
        return self._servers[0]
