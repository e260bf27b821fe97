"""A linear probe of labels, written into a model in closed form: a method of this library."""

from typing import Unpack

from torch import nn

from tezo.directions.bases.basis import Basis
from tezo.directions.low_rank import Temporal
from tezo.directions.ranks import FixedRank
from tezo.directions.targets import ALL_LINEAR, select_targets
from tezo.methods.bases import find_basis
from tezo.newton.probe import ProbeStep, last_writers
from tezo.optim.optimizer import ZerothOrderOptimizer
from tezo.optim.options import Basic, with_settings
from tezo.optim.updates import SGD


@with_settings
def probe(
    model: nn.Module,
    *,
    lr: float = 1.0,
    rank: int = 64,
    basis: str | Basis = "probe",
    frozen_rank: int | None = 64,
    **basic: Unpack[Basic],
) -> ZerothOrderOptimizer:
    """Linear probe: a change of the last layers in closed form, by which labels are predicted from their inputs. Ours.

        F = a f + q b,   f a ridge regression from the inputs of these layers to the errors of the scores,
        W_l <- W_l + lr t U V_l^T,   where F = sum_l V_l^T x_l, and U raises each score by 1.

    A step reads up to 1,024 labelled rows in one pass, and 256 of them in three more, which show by which outputs
    scores rise. No direction is measured. The layers are the last one of each of the last four blocks that has an input
    for each token of a row, of those among `targets` that write to the residual stream. Two passes over the rows of the
    step measure its length t, by which the scores change as predicted; dev rows may shorten it (`tezo.newton.probe`).
    `lr` is the part that is taken. `rank` bounds the contrasts of labels that are kept: all, if there are at most
    `rank` + 1 labels. `basis` finds the factors; with another than `probe` there is one direction of that basis, which
    is no probe.

    One step is the probe. A further step is the probe of the model so far; the change before it is then stored beside
    W_0 with rank `frozen_rank` at most, so that the result is an exact LoRA adapter.

    The closure must be one of `tezo.closure`, or another `tezo.optim.closures.RowOutputs`, of rows that share their
    labels. The number of blocks was chosen on examples/issues, SST-2 and TREC with a decoder of 135M parameters.
    """
    basic["targets"] = [t.name for t in last_writers(select_targets(model, basic.get("targets", (ALL_LINEAR,))))]
    perturbation = Temporal(FixedRank(rank=rank), "raw", basis=find_basis(basis), interval=1)
    return ZerothOrderOptimizer(
        model, perturbation, SGD(), lr=lr, estimator=ProbeStep, frozen_rank=frozen_rank, **basic
    )
