"""A policy gradient by forward passes: what sampled answers earn, through the last blocks. Ours in its composition."""

from typing import Unpack

from torch import nn

from tezo.directions.low_rank import Temporal
from tezo.directions.ranks import FixedRank
from tezo.directions.targets import ALL_LINEAR
from tezo.newton.policy import AnswerBasis, PolicyStep, writers
from tezo.optim.optimizer import ZerothOrderOptimizer
from tezo.optim.options import Basic, with_settings
from tezo.optim.updates import SGD


@with_settings
def policy_gradient(
    model: nn.Module,
    *,
    lr: float = 1.0,
    rank: int = 16,
    frozen_rank: int | None = 64,
    **basic: Unpack[Basic],
) -> ZerothOrderOptimizer:
    """A policy gradient by forward passes: sampled answers, each token credited, in the last blocks. Ours.

        A_ij = (s_ij - mean_j s_ij) / sigma,   s_ij the score of answer j to prompt i, sigma the spread of a batch,
        U, V by Adam on - mean_t A_ij log p(token t of answer ij), over all tokens of a batch, batch after batch,
        W_l <- W_l + lr U_l V_l^T   for the layers l of the last blocks that write to the residual stream.

    For rewards of what the model writes. A step has the model write four answers to each of its prompts, eight prompts
    at a time, with what it has learnt from those before; each token is drawn by its probability. One forward pass over
    the answers shows what the last 0.4 of the blocks compute, which is enough to compute them anew, with attention as
    it is, and with that the gradient of the answers' probabilities by U and V (`tezo.newton.sweep`). Nothing goes
    back through the model. So a step learns from each token of an answer, where `es` has one number for all that a
    member writes (docs/rewards.md compares them).

    It needs the layers of the last blocks, to compute each alone, and a decoder with norms by the root mean square
    (Llama, Mistral, Qwen, SmolLM, the first Gemma), in torch or llama.cpp, or on a server whose weights torch reads.
    Other models have `es`.
    Of `targets` the layers that write to the stream are taken. `lr` is the part of what a step has learnt that is
    taken; a run lowers it to zero, so that later steps are means over more answers. `rank` is that of each step, and
    `frozen_rank` of the sum of all before it, so that the result is an exact LoRA adapter.

    The estimate is REINFORCE (Williams 1992) with the mean of the answers to a prompt as the baseline, as in GRPO (Shao
    et al. 2024, arXiv 2402.03300), and nearly as in RLOO (Ahmadian et al. 2024, arXiv 2402.14740). The last blocks from
    forward passes are ours.
    """
    basic["targets"] = [target.name for target in writers(model, basic.get("targets", (ALL_LINEAR,)))]
    perturbation = Temporal(FixedRank(rank=rank), "raw", basis=AnswerBasis(), interval=1)
    return ZerothOrderOptimizer(
        model, perturbation, SGD(), lr=lr, estimator=PolicyStep, frozen_rank=frozen_rank, **basic
    )
