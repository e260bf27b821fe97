"""How ranks share a run: the rows of each batch, or the directions of each step; one of them writes."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tezo.forward.blocks import NotInBlocksError
from tezo.methods import method
from tezo.optim.closures import RowLosses
from tezo.optim.optimizer import PER_EXAMPLE
from tezo.system.errors import RequestError
from tezo.system.processes import ProcessGroup
from tezo.tasks.objectives.closure import BatchClosure
from tezo.training.job import Job
from tezo.training.settings import LOSS


@dataclass(frozen=True)
class SharedRows(RowLosses):
    """The loss on the rows of all ranks: sums and counts are added in float64 before anything is subtracted.

    Attributes:
        mine: the sum of the terms of this rank's rows.
        ranks: all of them.
        most_tokens: the most that any rank has in a pass for one model.
        rows: number of examples of all ranks; rank k has every `size`-th from k on.
    """

    mine: BatchClosure
    processes: ProcessGroup
    most_tokens: int
    rows: int

    @property
    def tokens(self) -> int:
        return self.most_tokens

    @property
    def examples(self) -> int:
        return self.rows

    def losses(self, copies: int) -> Tensor:
        sums_C = None
        with suppress(NotInBlocksError):
            sums_C = self.mine.losses(copies)
        sums_C, count = self._over_ranks(sums_C, (copies,))
        return sums_C / count

    def example_passes(self) -> list[list[int]]:
        """Returns for each of this rank's passes the example of each row of one copy, by its number on all ranks."""
        return [[self._number(i) for i in rows] for rows in self.mine.example_passes()]

    def example_losses(self, copies: int) -> Tensor:
        sums_CB = None
        with suppress(NotInBlocksError):
            mine_CB = self.mine.example_losses(copies).double().cpu()
            sums_CB = torch.zeros(copies, self.examples, dtype=torch.float64)
            sums_CB[:, [self._number(i) for i in range(self.mine.examples)]] = mine_CB
        sums_CB, count = self._over_ranks(sums_CB, (copies, self.examples))
        return sums_CB * (self.examples / count)

    def _number(self, example: int) -> int:
        return self.processes.rank + example * self.processes.size

    def _over_ranks(self, sums: Tensor | None, shape: tuple[int, ...]) -> tuple[Tensor, float]:
        """Returns (sums over the ranks, of this shape; the number of their terms).

        `sums`: those of this rank; None: its rows do not fall into blocks. The others must not wait for it, and all
        ranks take separate passes.
        """
        terms = torch.zeros(shape) if sums is None else sums.double()
        counts = [float(self.mine.num_terms), float(sums is None)]
        *totals, count, refusals = self.processes.sum([*terms.flatten().tolist(), *counts])
        if refusals:
            raise NotInBlocksError
        return torch.tensor(totals, dtype=torch.float64).view(shape), count


def shared_rows(job: Job, indices: Sequence[int], processes: ProcessGroup) -> SharedRows:
    """Returns the loss on these rows, of which this rank has every `size`-th."""
    mine = indices[processes.rank :: processes.size]
    if job.config.model.placement == "shards":  # a pass gathers weights from all ranks: each must make as many
        batches = [job.objective.collate([job.train[i] for i in mine])]
    else:
        batches = job.batches(mine)
    closure = replace(job.objective.closure(job.model, batches), reduction="sum")
    apart = job.config.method.options.get("directions") == PER_EXAMPLE
    (tokens,) = processes.max([float(closure.example_tokens if apart else closure.tokens)])
    return SharedRows(closure, processes, int(tokens), len(indices))


def check_shareable(job: Job, processes: ProcessGroup) -> None:
    """Raises a `RequestError` if ranks cannot share the run; shares its directions out where it asks for that."""
    if processes.size == 1:
        return
    train, chosen = job.config.train, method(job.config.method.name)
    has_one_direction = chosen.takes_rows and "num_directions" not in chosen.options()
    if job.optimizer.by_gradients or chosen.takes_answers or has_one_direction:
        raise RequestError(
            f"method.name is {job.config.method.name}, which runs in one process; start it without torchrun."
        )
    if job.config.model.placement == "shards" and train.rows_per_step < processes.size and train.parallel == "rows":
        raise RequestError(
            f"train.batch_size is {train.batch_size}, and with model.placement=shards each of {processes.size} ranks "
            "needs a row; raise it."
        )
    if chosen.takes_rows and train.parallel == "rows":
        raise RequestError(
            f"method.name is {job.config.method.name}, whose rows cannot be shared out; set train.parallel=directions."
        )
    if train.parallel == "directions":
        job.optimizer.share_directions(processes)
    elif train.objective != LOSS:
        raise RequestError(
            f"train.objective is {train.objective}, whose rows cannot be shared out; set train.parallel=directions."
        )
