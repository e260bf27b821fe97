"""How ranks share a run: the rows of each batch, or the directions of each step; one of them writes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tezo.forward.blocks import NotInBlocksError
from tezo.optim.estimators.estimate import RowsClosure
from tezo.optim.optimizer import PER_EXAMPLE, ZerothOrderOptimizer
from tezo.system.errors import RequestError
from tezo.system.ranks import Ranks
from tezo.tasks.objectives.objective import BatchClosure
from tezo.training.job import Job
from tezo.training.recipe import LOSS


@dataclass(frozen=True)
class SharedRows(RowsClosure):
    """The loss on the rows of all ranks: sums and counts are added in float64 before anything is subtracted.

    Attributes:
        own: the loss on this rank's rows.
        ranks: all of them.
        most_tokens: the most that any rank has in a pass for one model.
        rows: number of examples of all ranks; rank k has every `size`-th from k on.
    """

    own: BatchClosure
    ranks: Ranks
    most_tokens: int
    rows: int

    @property
    def tokens(self) -> int:
        return self.most_tokens

    @property
    def examples(self) -> int:
        return self.rows

    def losses(self, copies: int) -> Tensor:

        def own() -> tuple[Tensor, int]:
            sums, count = self.own.totals(copies)
            return torch.tensor(sums, dtype=torch.float64), count

        sums_C, count = self._summed(own, (copies,))
        return sums_C / count

    def example_passes(self) -> list[list[int]]:
        """For each of this rank's passes, the example of each row of one copy, by its number among all ranks'."""
        return [[self._number(i) for i in rows] for rows in self.own.example_passes()]

    def example_losses(self, copies: int) -> Tensor:

        def own() -> tuple[Tensor, int]:
            sums, count = self.own.example_totals(copies)
            table = torch.zeros(copies, self.examples, dtype=torch.float64)
            table[:, [self._number(i) for i in range(self.own.examples)]] = sums.double().cpu()
            return table, count

        sums_CB, count = self._summed(own, (copies, self.examples))
        return sums_CB * (self.examples / count)

    def _number(self, example: int) -> int:
        """The number among all examples of this rank's own."""
        return self.ranks.rank + example * self.ranks.size

    def _summed(self, own: Callable[[], tuple[Tensor, int]], shape: tuple[int, ...]) -> tuple[Tensor, float]:
        """(sums over the ranks, of this shape; the sum of their counts)."""
        try:
            (sums, count), refusals = own(), 0
        except NotInBlocksError:  # the others must not wait for this rank's sums: all ranks take separate passes
            sums, count, refusals = torch.zeros(shape), 0, 1
        *totals, whole, refused = self.ranks.sum([*sums.flatten().tolist(), float(count), float(refusals)])
        if refused:
            raise NotInBlocksError
        return torch.tensor(totals, dtype=torch.float64).view(shape), whole


def shared_rows(job: Job, indices: Sequence[int], ranks: Ranks) -> SharedRows:
    """The loss on these rows, of which this rank has every `size`-th."""
    mine = indices[ranks.rank :: ranks.size]
    if job.config.model.placement == "shards":  # a pass gathers weights from all ranks: each must make as many
        batches = [job.objective.collate([job.train[i] for i in mine])]
    else:
        batches = job.batches(mine)
    own = job.objective.closure(job.model, batches)
    apart = job.config.method.options.get("directions") == PER_EXAMPLE
    (tokens,) = ranks.max([float(own.example_tokens if apart else own.tokens)])
    return SharedRows(own, ranks, int(tokens), len(indices))


def check_shareable(job: Job, ranks: Ranks) -> None:
    """An error where a run cannot be shared; directions are shared out where they are what is shared."""
    if ranks.size == 1:
        return
    if not isinstance(job.optimizer, ZerothOrderOptimizer):
        raise RequestError(
            f"method.name is {job.config.method.name}, which runs in one process; start it without torchrun."
        )
    train = job.config.train
    if job.config.model.placement == "shards" and train.batch_size < ranks.size and train.parallel == "rows":
        raise RequestError(
            f"train.batch_size is {train.batch_size}, and with model.placement=shards each of {ranks.size} ranks needs "
            "a row; raise it."
        )
    if train.parallel == "directions":
        job.optimizer.share_directions(ranks)
    elif train.objective != LOSS:
        raise RequestError(
            f"train.objective is {train.objective}, whose rows cannot be shared out; set train.parallel=directions."
        )
