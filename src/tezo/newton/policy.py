"""A policy gradient without a backward pass through the model: what sampled answers earn, through the last blocks.

The model writes J answers to each of a few prompts (J is `ANSWERS`), each token drawn by its probability. A scorer
gives them scores s_ij. With advantages over the other answers to the prompt, in units of their spread in the batch,

    A_ij = (s_ij - mean_j s_ij) / sigma,   sigma^2 = mean_ij (s_ij - mean_j s_ij)^2,

the gradient of the expected score is that of sum_ij A_ij log p(answer_ij) (REINFORCE, Williams 1992; the mean over
the answers to a prompt as a baseline is of GRPO). An answer without a score has A = 0, and 0 in the mean of sigma^2.
The loss is minus the mean over all tokens of a batch. One forward pass over the answers shows what the last blocks are
rebuilt from (`last_blocks`), and a step of Adam is taken with this loss (`sweep`). So each token of an answer is
credited, where a population has one score for all that a member writes.

A refresh does so for all prompts of a step, batch after batch: answers of a batch are of the model with what those
before have taught it. The step then is along one direction, all that was learnt.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from tezo.directions.bases.basis import DataBasis, Source, StoredTensors, output_size
from tezo.directions.targets import ALL_LINEAR, Target, select_targets
from tezo.newton.last_blocks import NotRebuiltError, last_blocks
from tezo.newton.look import LEAST_BLOCK_BYTES, Look, look_along_one
from tezo.newton.sweep import Sweep, blocks_to_sweep, learning_blocks
from tezo.optim.closures import Answers, Closure, RowAnswers, RowOutputs
from tezo.optim.estimators.estimate import POLICY_GRADIENT, Estimate, Probe, StepDraw, average
from tezo.optim.estimators.two_point import TwoPoint, check_finite
from tezo.system.errors import RequestError
from tezo.system.progress import tracked
from tezo.system.signals import let_interrupt

PROMPTS, ANSWERS = 8, 4
"""Prompts of a batch, and answers to each. Our choice."""
RATE_FACTOR = 0.25
"""Factor of the rates of a sweep over texts: an answer says less than a text that is to be learnt. Chosen by trials
that are not committed, on dev rows of sums (docs/rewards.md) with a decoder of 135M parameters: with 1 the reward fell
after 200 answers. A decoder of 260K parameters learnt faster with 0.5 and 1, and forgot more."""
NO_ANSWERS = (
    "policy-gradient learns from answers that the model writes and a scorer scores, and this closure writes none; use "
    "tezo.train(..., reward=...), or choose another method."
)
COMPUTES_ANEW = "policy-gradient computes the last blocks of the model anew"
NO_BLOCKS = "its linear layers are not those of a decoder's blocks"
FEW_PLACES = 8
"""Tokens of all answers of a first batch of which fewer may be too few to compute blocks by."""


def writers(model: nn.Module, asked: Sequence[str]) -> list[Target]:
    """Returns the layers of the last blocks that write to the residual stream, of those that are asked for.

    Args:
        model: the model.
        asked: patterns, see `select_targets`.

    Raises:
        RequestError: there are none.
    """
    every, wanted = _writers(model), {target.name for target in select_targets(model, asked)}
    if not every:
        raise _not_rebuilt(NO_BLOCKS)
    kept = [target for target in every if target.name in wanted]
    if not kept:
        raise RequestError(
            f"method.targets is {[*asked]}, and policy-gradient changes layers of the last blocks that write to the "
            f"residual stream, such as {every[-1].name}; tune those too, or leave it out."
        )
    return kept


def _writers(model: nn.Module) -> list[Target]:
    every = select_targets(model, (ALL_LINEAR,))
    found = learning_blocks(last_blocks(every, output_size(every[-1]))) if every else []
    names = {each.name for block in found for each in block.writers}
    return [target for target in every if target.name in names]


class AnswerBasis(DataBasis[Look]):
    """One direction: what the last blocks learn from scored answers to the prompts of a step; see the module."""

    watches = True

    def compute(self, refresh_step: int, source: Source) -> Look:
        answers = source.answers
        if not isinstance(answers, RowAnswers):
            raise RequestError(NO_ANSWERS)
        learner: Sweep | None = None
        prompts = range(answers.prompts)
        try:
            for start in tracked(range(0, len(prompts), PROMPTS), "batches"):
                let_interrupt()
                batch = prompts[start : start + PROMPTS]
                with nullcontext() if learner is None else learner.beside():
                    written = answers.write(batch, ANSWERS)
                if written.rows is None:
                    continue
                if learner is None:
                    learner = _learner(source.model, self._ranks, written.rows, refresh_step)
                weight_X = advantages(written)[written.answer_X]
                if bool(weight_X.any()):
                    learner.learn(written.rows, weight_X)
        except NotRebuiltError as error:
            if written.rows is not None and len(written.rows.outputs().labels_T) < FEW_PLACES:
                raise RequestError(
                    f"method.name: {COMPUTES_ANEW} by tokens of answers, and the first {len(batch)} prompts have too "
                    "few; raise train.batch_size, or use --method es."
                ) from None
            raise _not_rebuilt(str(error)) from None
        found, calls = ({}, 0) if learner is None else (learner.found, learner.calls)
        return look_along_one(found, self._targets, self._ranks, calls)

    def computes_again(self, source: Source) -> bool:
        return source.answers is not None  # a run that was killed before the step has logged none of its answers

    def read(self, stored: StoredTensors) -> Look:
        return Look.from_tensors(stored, [target.name for target in self._targets])


def _learner(model: nn.Module, ranks: Mapping[str, int], rows: RowOutputs, step: int) -> Sweep:
    """Returns what learns in these layers.

    Raises:
        NotRebuiltError: they are not of blocks that can be computed anew.
    """
    every = select_targets(model, (ALL_LINEAR,))
    budget = max(LEAST_BLOCK_BYTES, sum(each.parameter.nbytes for each in every))
    blocks = blocks_to_sweep(every, every[-1], rows, budget) if every else []
    if not blocks:
        raise NotRebuiltError(NO_BLOCKS)
    return Sweep(model, every[-1], blocks, ranks, step, lambda _: RATE_FACTOR)


@torch.no_grad()
def why_not_rebuilt(model: nn.Module, rows: RowOutputs, count: int) -> str | None:
    """Returns why the last blocks of a model cannot learn from answers, as a clause; None: they can.

    Args:
        model: the model.
        rows: some of free text, which are passed once.
        count: of these rows.
    """
    try:
        learner = _learner(model, {each.name: 1 for each in _writers(model)}, rows, 0)
        learner.learn(rows, torch.zeros(count))
    except NotRebuiltError as error:
        return f"{COMPUTES_ANEW}, and {error}"
    except RequestError as error:  # a layer that cannot be read
        return str(error).rstrip(".")
    return None


def _not_rebuilt(why: str) -> RequestError:
    return RequestError(f"method.name: {COMPUTES_ANEW}, and {why}; use --method es.")


def advantages(written: Answers) -> Tensor:
    """Returns A of each answer, (E,) in float64; 0 where its score is missing, or all to the prompt earn the same."""
    above_E = torch.zeros_like(written.score_E)
    for prompt in torch.unique(written.prompt_E):
        own = (written.prompt_E == prompt) & written.score_E.isfinite()
        scores = written.score_E[own]
        if len(scores) and scores.min() < scores.max():  # equal scores may differ from their mean by rounding
            above_E[own] = scores - scores.mean()
    sigma = float(above_E.square().mean().sqrt())
    return above_E / sigma if sigma > 0 else above_E


class PolicyStep(TwoPoint):
    """The step along the one direction of `AnswerBasis`, the whole of it; see the module.

    The loss is minus the mean score of the answers that the refresh has learnt from, and the projected gradient -1, or
    0 where all answers to each prompt have the same score. No further pass is taken.
    """

    rule = POLICY_GRADIENT
    compares = False

    def estimate(self, closure: Closure, draw: StepDraw) -> Estimate:
        if not isinstance(closure, RowAnswers):
            raise RequestError(NO_ANSWERS)
        loss = closure.written_loss()
        probe = Probe(loss, loss, 0.0 if closure.are_alike else -1.0)
        check_finite((probe,))
        return average(loss, (probe,), ANSWERS, draw)

    def passes(self, directions: int, *, first: bool) -> int:
        del directions, first
        return ANSWERS
