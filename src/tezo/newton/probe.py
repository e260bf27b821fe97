"""A linear probe that is written into a model: factors in closed form from one pass over labelled rows, and their step.

`ProbeBasis` records the inputs x of the last layers that write to the residual stream, one of each of the last blocks.
With m the mean of x over the rows, q = m^T x / |m|^2 and p = x - q m, whose mean is zero. A ridge regression (`labels`)
predicts the errors of the outputs from p of all these layers, each scaled to the same size. f are its predictions, and
f' those of the regression without the row. The change of the scores is

    F = a f + q b,   with a and b of the lowest cross-validated loss of z + a f' + q b   (`linear_model`),

one number a, and a bias b for each class with q of the last layer as its constant input: 1 on average. F is linear in
the inputs, F = sum_l V_l^T x_l. With G the gradient of the scores (of each less their mean) at the outputs of these
layers, as added vectors show it,

    U = G (G^T G)^+,   W_l <- W_l + U V_l^T,

raises the scores by F, so far as they are linear in the outputs of these layers.

`ProbeStep` takes this step. How far outputs act was measured on other vectors, and layers do not act apart, so the
length is corrected: one pass with the whole step gives the real change z' - z, and the step is divided by the slope of
this over F. Rows that the regression has not had may shorten it: dev rows, or else those of the step.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from tezo.directions.bases.basis import DataBasis, Predictions, Source, StoredTensors, input_size, output_size
from tezo.directions.outputs import Outputs, change, errors
from tezo.directions.products import evaluating
from tezo.directions.ranks import block_of
from tezo.directions.targets import Target
from tezo.newton.labels import contrasts, regress
from tezo.newton.linear_model import PARTS, LinearModel
from tezo.newton.look import ColumnPredictions, Look
from tezo.newton.recording import AddedVectors, ClassVectors, InputRecorder, Inputs, finite, raising
from tezo.newton.step import GaussNewton, Taken
from tezo.optim.closures import NO_OUTPUTS, Closure, RowOutputs
from tezo.optim.estimators.estimate import Estimate, Probe, StepDraw, average
from tezo.system.errors import RequestError

MOST_ROWS, NUDGED_ROWS = 1024, 256
"""Rows that the regression is fitted to, and that vectors are added in, at most."""
LAST_BLOCKS = 4
"""Blocks at the end of the model that have a layer in the probe. Our choice."""
SHORTEST, LONGEST = 0.5, 2.0
"""Bounds of the corrected length."""
NO_LABELS = (
    "method.name is probe, which is fitted to labels that all rows share, and these rows have none; choose another "
    "method, such as method.name=head-feedback."
)


def last_writers(targets: Sequence[Target]) -> list[Target]:
    """Returns the layers of the last `LAST_BLOCKS` blocks with outputs of the last one's size."""
    layers = [target for target in targets if target.input_role is not None]
    like_last = [target for target in layers if output_size(target) == output_size(layers[-1])]
    blocks = [*dict.fromkeys(block_of(target.name) for target in like_last)][-LAST_BLOCKS:]
    return [target for target in like_last if block_of(target.name) in blocks]


def last_of_blocks(layers: Sequence[Target]) -> list[Target]:
    """Returns the last layer of each block."""
    return [*{block_of(target.name): target for target in layers}.values()]


class ProbeBasis(DataBasis[Look]):
    """The factors of a linear probe of labels, and one direction, the whole of it; see the module."""

    watches = True

    def compute(self, refresh_step: int, source: Source) -> Look:
        if source.rows is None:
            raise RequestError(NO_OUTPUTS)
        if not self._targets:
            raise RequestError(
                "method.targets: none of the tuned parameters is the weight of a linear layer, whose inputs a probe "
                "is fitted to; choose others."
            )
        few: RowOutputs = source.rows(refresh_step, NUDGED_ROWS)
        if few.are_texts:
            raise RequestError(NO_LABELS)
        outputs, sizes = _recorded(source, few, self._targets)
        if not outputs.shared:
            raise RequestError(NO_LABELS)
        tried = last_of_blocks([target for target in self._targets if target.name in sizes.found])
        if not tried:
            raise RequestError(
                "method.targets: no linear layer that is tuned has an input for each token of a row; choose others."
            )
        added = AddedVectors(source.model, few, outputs, refresh_step)
        vectors = added.class_vectors(tried, sizes.output_size, 1)
        rows: RowOutputs = source.rows(refresh_step, MOST_ROWS)
        outputs, recorded = _recorded(source, rows, [t for t in tried if t.name in vectors.layers])
        passes = sizes.passes + added.passes + recorded.passes
        return probe_of(recorded.found, outputs, vectors, self._targets, self._ranks, rows.stepped, passes)

    def read(self, stored: StoredTensors) -> Look:
        return Look.from_tensors(stored, [target.name for target in self._targets])


def _recorded(source: Source, rows: RowOutputs, layers: Sequence[Target]) -> tuple[Outputs, InputRecorder]:
    recorded = InputRecorder(layers)
    with rows.watching(source.model, recorded):
        return finite(rows.outputs()), recorded


def probe_of(
    found: Mapping[str, Inputs],
    outputs: Outputs,
    vectors: ClassVectors,
    targets: Sequence[Target],
    ranks: Mapping[str, int],
    stepped: int | None = None,
    passes: int = 0,
) -> Look:
    """Returns the probe as factors of layers, and its predictions for the rows of the step.

    Args:
        found: parameter name -> inputs of its layer, in the order in which layers are called.
        outputs: of these rows, with the same options in all.
        vectors: that raise each class. Its layers are changed, all others have zeros.
        targets: weights of all linear layers that are tuned, in the order of the model.
        ranks: parameter name -> rank; where there are more contrasts of classes, the leading ones are kept.
        stepped: number of examples, the first ones, that are rows of the step; None: all.
        passes: calls of the model that the inputs and vectors took.
    """
    layers = [name for name in found if name in vectors.layers]
    place_P, last = found[layers[-1]].places(), layers[-1]
    inputs = {name: found[name].kinds()[0] for name in layers}
    means = {name: x_PI.mean(0) for name, x_PI in inputs.items()}
    constants = {name: mean_I / mean_I.square().sum().clamp_min(1e-30) for name, mean_I in means.items()}
    parts = [x_PI - torch.outer(x_PI @ constants[name], means[name]) for name, x_PI in inputs.items()]
    constant_P = inputs[last] @ constants[last]
    sizes = [float(part.square().sum(1).mean().sqrt()) or 1.0 for part in parts]
    p_PI = torch.cat([part / size for part, size in zip(parts, sizes, strict=True)], 1)
    (regression,) = regress([p_PI], errors(outputs)[place_P])
    fitted_PC = (p_PI.float() @ regression.w_IE).double()
    scale, bias_C = _scale_and_bias(outputs, place_P, fitted_PC, regression.unseen_PE, constant_P)
    change_PC = scale * fitted_PC + constant_P.unsqueeze(1) * bias_C

    rank = min(ranks[name] for name in layers)
    turns_CR = torch.linalg.svd(change_PC, full_matrices=False)[2][:rank].T
    most, kept = max(ranks.values()), turns_CR.shape[1]
    # `raising` is its own inverse; dual vectors raise the score of a class and no other with it
    gradient_MC = raising(vectors.vectors[last][0])
    dual_MC = gradient_MC @ torch.linalg.pinv(gradient_MC.T @ gradient_MC, rtol=1e-6, hermitian=True)
    v = {t.name: torch.zeros(input_size(t), ranks[t.name], dtype=torch.float64) for t in targets}
    u = {}
    own = torch.split(regression.w_IE.double(), [part.shape[1] for part in parts])
    for name, size, w_IC in zip(layers, sizes, own, strict=True):
        v_IC = scale * w_IC / size  # without a part along m, as p has none: V^T x = V^T p
        if name == last:
            v_IC = v_IC + torch.outer(constants[name], bias_C)
        v[name][:, :kept] = v_IC @ turns_CR
        u[name] = functional.pad(dual_MC @ turns_CR, (0, ranks[name] - kept))
    examples = int(outputs.example_T.max()) + 1
    along_ER = torch.zeros(examples, most, dtype=torch.float64)
    along_ER[outputs.example_T.cpu()[place_P], :kept] = change_PC @ turns_CR
    classes_CR = functional.pad(turns_CR, (0, most - kept))
    return Look(
        inputs=v,
        outputs=u,
        proposals=torch.ones(1, most, dtype=torch.float64),
        passes=passes,
        signals=dict.fromkeys(layers, regression.signal),
        class_vectors=vectors,
        columns=ColumnPredictions(torch.stack([along_ER, along_ER])[:, :stepped], classes_CR),
    )


def _scale_and_bias(
    outputs: Outputs, place_P: Tensor, fitted_PC: Tensor, unseen_PC: Tensor, constant_P: Tensor
) -> tuple[float, Tensor]:
    """Returns (a, b (C,)): the factor of the predictions, and the bias of each class that goes with it."""
    rows = Outputs(outputs.scores_TC.cpu()[place_P], outputs.labels_T.cpu()[place_P], outputs.example_T.cpu()[place_P])
    turns_CB = contrasts(fitted_PC.shape[1])
    biases_PCB = constant_P.view(-1, 1, 1) * turns_CB
    slopes, unseen = (torch.cat([part.unsqueeze(2), biases_PCB], 2) for part in (fitted_PC, unseen_PC))
    scale, *biases = LinearModel(rows, slopes, unseen).best().coefficients
    return scale, turns_CB @ torch.tensor(biases, dtype=torch.float64)


class ProbeStep(GaussNewton):
    """The step along the one direction of `ProbeBasis`, until scores have changed as predicted; see the module."""

    def estimate(self, closure: Closure, draw: StepDraw) -> Estimate:
        if not isinstance(closure, RowOutputs):
            raise RequestError(NO_OUTPUTS)
        try:
            with evaluating(self._model):
                outputs = closure.outputs()
                self._move(draw, [1.0])
                moved = closure.outputs(outputs)
                length = self._processes.first([length_of(outputs, moved, draw.predictions)])
                taken = Taken(length, {"own": outputs.loss(), "real": moved.loss(), "taken": length[0]})
                if closure.held_out is not None and any(length):
                    taken = self._shortened(taken, closure.held_out, draw)
        finally:
            self._set_perturbations(draw.directions, [])
        (part,) = taken.coefficients
        probes = self._checked((Probe(moved.loss(), outputs.loss(), -part),))
        return average(outputs.loss(), probes, 2, draw, {"round": dict(taken.metrics)})

    def passes(self, directions: int, *, first: bool) -> int:
        del directions, first
        return 2


def length_of(outputs: Outputs, moved: Outputs, predictions: Predictions | None) -> float:
    """Returns the part of a step that is taken.

    Args:
        outputs: at W.
        moved: after the whole step.
        predictions: of the change of the first E examples, by a regression that had them. The part is 1 over the slope
            of the real change over it, within bounds, and 0 if the slope is not above 0. None, or E = 0: the regression
            had no example, and the part has their lowest loss.
    """
    real_TC = change(moved, outputs)
    known_T = outputs.example_T.cpu() < (0 if predictions is None else len(predictions.fitted_ECJ))
    if predictions is None or not bool(known_T.any()):
        scores_TC, labels_T = outputs.scores_TC.double().cpu(), outputs.labels_T.cpu()

        def loss(part: float) -> float:
            return float(functional.cross_entropy(scores_TC + part * real_TC, labels_T))

        return min((0.0, *PARTS), key=loss)
    wanted_TC = predictions.fitted_ECJ[outputs.example_T.cpu()[known_T], :, 0]
    real_TC = real_TC[known_T] - real_TC[known_T].mean(1, keepdim=True)
    slope = float((real_TC * wanted_TC).sum() / wanted_TC.square().sum().clamp_min(1e-30))
    return min(LONGEST, max(SHORTEST, 1 / slope)) if slope > 0 else 0.0
