"""The outputs of rows: scores of a few classes at each place where an answer is read, and where these places are."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Outputs:
    """Scores of C classes at T places, whose mean cross-entropy with the right classes is the loss.

    A place is an example with options, and its classes are they; or a token of an answer, and its classes are that
    token, the few that the model finds likeliest, and all others together.

    Attributes:
        scores_TC: float32 or wider; -inf where a place has fewer classes. Log-probabilities, up to a summand of each
            place.
        labels_T: int64, right class of each place.
        example_T: int64, example of each place.
        tokens_TC: int64, token of each class, -1 for all others together; None: the classes are options.
        shared: whether all places have the same classes, such as labels, so that a bias for each has a meaning.
    """

    scores_TC: Tensor
    labels_T: Tensor
    example_T: Tensor
    tokens_TC: Tensor | None = None
    shared: bool = False

    def losses(self) -> Tensor:
        """Returns the loss of each place, (T,)."""
        return functional.cross_entropy(self.scores_TC, self.labels_T, reduction="none")

    def loss(self) -> float:
        """Returns the mean loss of the places."""
        return float(self.losses().detach().double().mean())


def joined(parts: Sequence[Outputs]) -> Outputs:
    """Returns the outputs of all parts, in order; places with fewer classes than others get -inf for the rest."""
    most = max(part.scores_TC.shape[1] for part in parts)
    scores = [functional.pad(part.scores_TC, (0, most - part.scores_TC.shape[1]), value=-torch.inf) for part in parts]
    tokens = [part.tokens_TC for part in parts if part.tokens_TC is not None]
    return Outputs(
        torch.cat(scores),
        torch.cat([part.labels_T for part in parts]),
        torch.cat([part.example_T for part in parts]),
        torch.cat(tokens) if tokens else None,
        all(part.shared for part in parts),
    )


def change(moved: Outputs, at: Outputs) -> Tensor:
    """Returns the change of the scores, (T, C) in float64 on the CPU; 0 where a place has no such class."""
    difference = (moved.scores_TC.double() - at.scores_TC.double()).cpu()
    return torch.where(at.scores_TC.cpu().isinf(), 0.0, difference)


@dataclass(frozen=True)
class Places:
    """Where in the rows of one forward pass the inputs of the places of `Outputs` are.

    Attributes:
        row_P: int64, row of the pass.
        position_P: int64, position in the row whose output is read, of options the one that predicts the first token in
            which they differ; -1: there is none.
        stop_P: int64, end of the tokens, from 0 on, that the answer depends on; 0: they are not averaged.
        place_P: int64, number of the place.
        example_R: int64, example of each row of the pass.
    """

    row_P: Tensor
    position_P: Tensor
    stop_P: Tensor
    place_P: Tensor
    example_R: Tensor


LIKELY = 8
"""Tokens besides the right one whose scores are kept at each place of free text."""
RARE = 1e-6
"""Least probability that all other tokens together are taken to have, for its logarithm."""


def of_tokens(log_probs_TV: Tensor, right_T: Tensor, tokens_TC: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns (scores_TC, tokens_TC) of log-probabilities over a vocabulary: the right token, likely ones, all others.

    Args:
        log_probs_TV: float32 or wider.
        right_T: int64, the right tokens.
        tokens_TC: tokens whose scores are returned; None: the `LIKELY` likeliest besides the right one.
    """
    if tokens_TC is None:
        count = min(LIKELY, log_probs_TV.shape[1] - 1)
        others = log_probs_TV.scatter(1, right_T.unsqueeze(1), -torch.inf).topk(count).indices
        rest = torch.full_like(right_T, -1)
        tokens_TC = torch.cat([right_T.unsqueeze(1), others, rest.unsqueeze(1)], 1)
    return named_and_rest(log_probs_TV.gather(1, tokens_TC[:, :-1])), tokens_TC


def named_and_rest(log_probs_TC: Tensor) -> Tensor:
    """Returns log-probabilities of some tokens, and behind them that of all others together, (T, C + 1)."""
    rest_T1 = (1 - log_probs_TC.double().exp().sum(1, keepdim=True)).clamp_min(RARE).log()
    return torch.cat([log_probs_TC, rest_T1.to(log_probs_TC.dtype)], 1)


def fitted_bias(outputs: Outputs) -> Tensor:
    """Returns the bias of each class that minimises the loss, (C,) in float64, with mean 0; zero unless `shared`.

    Newton's method on a convex function; a class that no place has keeps a bias of at least -20.
    """
    scores_TC = outputs.scores_TC.detach().double().cpu()
    bias_C = torch.zeros(scores_TC.shape[1], dtype=torch.float64)
    if not outputs.shared:
        return bias_C
    target_C = torch.bincount(outputs.labels_T.cpu(), minlength=len(bias_C)).double() / len(scores_TC)
    for _ in range(50):
        p_TC = (scores_TC + bias_C).softmax(1)
        gradient_C = p_TC.mean(0) - target_C
        hessian_CC = torch.diag(p_TC.mean(0)) - p_TC.T @ p_TC / len(p_TC)
        step_C = torch.linalg.solve(hessian_CC + 1e-6 * torch.eye(len(bias_C), dtype=torch.float64), gradient_C)
        bias_C = (bias_C - step_C.clamp(-2, 2)).clamp(-20, 20)
        bias_C -= bias_C.mean()
        if float(step_C.abs().max()) < 1e-9:
            break
    return bias_C


def errors(outputs: Outputs) -> Tensor:
    """Returns the errors of outputs with options, correct minus predicted, by place: (T, C) in float64 on the CPU.

    It is 1 - p for the right option and -p for the others, after `fitted_bias`.
    """
    p_TC = (outputs.scores_TC.detach().double().cpu() + fitted_bias(outputs)).softmax(1)
    return functional.one_hot(outputs.labels_T.cpu(), p_TC.shape[1]).double() - p_TC
