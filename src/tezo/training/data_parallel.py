"""How ranks share a run: the rows of each batch, or the directions of each step; one of them writes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tezo.distributed import Ranks
from tezo.errors import RequestError
from tezo.forward import NotInBlocksError
from tezo.tasks.objectives import BatchClosure
from tezo.training.job import LOSS, Job


@dataclass(frozen=True)
class SharedRows:
    """The loss on the rows of all ranks: sums and counts are added in float64 before anything is subtracted.

    Attributes:
        own: the loss on this rank's rows.
        ranks: all of them.
        tokens: the most that any rank has in a pass for one model.
    """

    own: BatchClosure
    ranks: Ranks
    tokens: int

    def __call__(self) -> Tensor:
        """The mean loss over the rows of all ranks."""
        return self.losses(1)[0]

    def losses(self, copies: int) -> Tensor:
        """(copies,): that of each model."""
        try:
            sums, count = self.own.totals(copies)
            refusals = 0
        except NotInBlocksError:  # the others must not wait for this rank's sums: all ranks take separate passes
            sums, count, refusals = [0.0] * copies, 0, 1
        *totals, whole, refused = self.ranks.sum([*sums, float(count), float(refusals)])
        if refused:
            raise NotInBlocksError
        return torch.tensor(totals, dtype=torch.float64) / whole


def shared_rows(job: Job, indices: Sequence[int], ranks: Ranks) -> SharedRows:
    """The loss on these rows, of which this rank has every `size`-th."""
    mine = indices[ranks.rank :: ranks.size]
    if job.config.model.placement == "shards":  # a pass gathers weights from all ranks: each must make as many
        batches = [job.objective.collate([job.train[i] for i in mine])]
    else:
        batches = job.batches(mine)
    own = job.objective.closure(job.model, batches)
    (tokens,) = ranks.max([float(own.tokens)])
    return SharedRows(own, ranks, int(tokens))


def check_shareable(job: Job, ranks: Ranks) -> None:
    """An error where a run cannot be shared; directions are shared out where they are what is shared."""
    if ranks.size == 1:
        return
    if job.optimizer.needs_gradient:
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
