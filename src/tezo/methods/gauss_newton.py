"""Gauss-Newton in a small subspace, a method of this library: each row's outputs are kept; no rate is chosen."""

from typing import Unpack

from torch import nn

from tezo.directions.bases.basis import Basis
from tezo.directions.low_rank import Temporal
from tezo.directions.ranks import FixedRank
from tezo.methods.bases import find_basis
from tezo.newton.labels import RANK
from tezo.newton.step import GaussNewton
from tezo.optim.optimizer import ZerothOrderOptimizer
from tezo.optim.options import Basic, with_settings
from tezo.optim.updates import SGD


@with_settings
def gauss_newton(
    model: nn.Module,
    *,
    num_directions: int = 16,
    rho: float = 0.1,
    lr: float = 1.0,
    rank: int = RANK,
    basis: str | Basis = "errors",
    lazy_update_interval: int | None = 1,
    frozen_rank: int | None = 64,
    **basic: Unpack[Basic],
) -> ZerothOrderOptimizer:
    """Gauss-Newton in a small subspace: the outputs of each row along a step's directions, and no rate. Ours.

        Z_j = U diag(tau_j) V^T,   U (M x r), V (N x r) and tau_j from a refresh,   j = 1, ..., K,
        F_j = (z(W + rho Z_j) - z(W)) / rho,   z the scores of the classes of each row,
        a = argmin  sum of the losses of z(W) + F a, plus lambda |a|^2,
        c <- c + lr sum_j a_j tau_j,   W = W_0 + U diag(c) V^T.

    A step takes K + 2 or K + 3 passes over a batch that should be large (`tezo train` takes 128 rows), and before
    it a refresh proposes the directions. On up to 1,024 labelled rows, those of the step among them, the refresh
    finds the inputs of later layers that predict the errors of the outputs, and the outputs of these layers that
    mend them (`tezo.newton.look`): 2 or 3 directions for two labels, of which the first `num_directions` are taken.
    The first refresh computes these outputs through the last blocks, where it has all rows and they can be rebuilt,
    or else measures them at four depths. Free text has one direction: in 32 passes over batches of 32 rows the
    last blocks learn by what each pass shows of them (`tezo.newton.sweep`), if they can be rebuilt from it, or else
    the last layer by a regression through the output head (`tezo.newton.text`). Rows with per-row options need the
    basis `gaussian`, whose tau_j are drawn; K is `num_directions` then. The step is the minimum of a convex model of
    the loss. It is shortened where the real loss is not that of the model, or where the loss of dev rows is lower
    before its end (`tezo.newton.step`). `lr` is the part of it that is taken. A run without dev rows has other
    labelled rows for refreshes than for steps, unless they are few: then both have all, in one step.

    The closure must be one of `tezo.closure`, or another `tezo.optim.closures.RowOutputs`. Without `optimizer.set_rows`
    a refresh has only the rows of its step.

    `rank` is the number of columns. A run that leaves it open has more where there are more labels than the default has
    columns for (`tezo.newton.labels.rank_for`).

    U and V are new every `lazy_update_interval` steps; the change so far is then stored beside W_0 with rank
    `frozen_rank` at most, so that the result is an exact LoRA adapter. rho is about the change of scores along a
    direction; of free text a part of the fitted change; of drawn directions the part of their outputs by which layers
    move.

    It is ours; the parts are of the derivative-free Gauss-Newton methods DFO-GN and DFBGN (Cartis and Roberts 2019,
    2023), of the kernel view of fine-tuning (Malladi et al. 2023), and of low-rank directions from activations (AGZO,
    ZO-Act). Defaults are of first trials on SST-2 and TREC with a decoder of 135M parameters, and were not searched.
    """
    perturbation = Temporal(FixedRank(rank=rank), "raw", basis=find_basis(basis), interval=lazy_update_interval)
    return ZerothOrderOptimizer(
        model,
        perturbation,
        SGD(),
        lr=lr,
        rho=rho,
        num_directions=num_directions,
        estimator=GaussNewton,
        frozen_rank=frozen_rank,
        **basic,
    )
