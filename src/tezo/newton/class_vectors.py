"""The vectors that raise each class at the outputs of the last blocks, by these blocks as a function of each token.

Where labels differ in one token each, their scores are z_pc = H_c . n_p, H_c the row of the head for that token and n_p
the inputs of the head at the place. `last_blocks` rebuilds n_p as a function of the outputs y_lp of the layers that
write the stream, attention held, from one pass over a few rows. With d_c = H_c less the mean over the C classes, by
which d_c . n_p is z_pc less its mean over them,

    g_lc = mean_p d(d_c . n_p) / dy_lp,   S_lc = (1 - 1 / C) g_lc / |g_lc|^2,

for all layers at once: S_l, added to the outputs of layer l at the place, raises the score of a class by 1. In trials
on a decoder of 135M parameters, which are not committed, g of 32 rows had a cosine of 0.9 (its middle) to 1.0 (its end)
with the gradient that moves attention too, and g by 128 random vectors (`AddedVectors`) one of 0.3 to 0.5.

Further passes add S to the outputs of one layer in each row. Layers at which it does not raise scores are left out; if
the last one is among them, the model computes otherwise than its blocks were rebuilt.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from tezo.directions.bases.basis import input_size, output_size
from tezo.directions.targets import ALL_LINEAR, Target, select_targets
from tezo.forward.layers import LayerFunction
from tezo.newton.last_blocks import LastBlocks, NotRebuiltError, last_blocks, name_of
from tezo.newton.recording import AddedVectors, ClassVectors, finite, raising
from tezo.newton.text import TextRecord
from tezo.optim.closures import RowOutputs

VECTOR_ROWS = 64
"""Rows that the vectors are computed from, at most."""
TRAIL = 8
"""Tokens of each row that the blocks are rebuilt from, the last ones: where all prompts end with the same tokens,
states at the place alone vary too little for that."""


@dataclass(frozen=True)
class ComputedVectors:
    """Vectors that raise each class, and their price.

    Attributes:
        vectors: of the layers at whose outputs they act; None: labels are not told apart by one token each, the blocks
            are built otherwise, or the vectors do not act.
        passes: calls of the model that it took.
    """

    vectors: ClassVectors | None
    passes: int


def computed_vectors(model: nn.Module, rows: RowOutputs, layers: Sequence[Target], step: int) -> ComputedVectors:
    """Returns the vectors that raise each class at the outputs of these layers.

    Args:
        model: the model.
        rows: rows with labels.
        layers: layers with outputs of one size, in the order of the model.
        step: of the draws.
    """
    tokens_C, names = rows.deciding_tokens(), {layer.name for layer in layers}
    if tokens_C is None or len(torch.unique(tokens_C)) < len(tokens_C):
        return ComputedVectors(None, 0)
    every = last_blocks(select_targets(model, (ALL_LINEAR,)), output_size(layers[-1]))
    blocks = [block for block in every if names & {writer.name for writer in block.writers}]
    if not blocks:
        return ComputedVectors(None, 0)
    record = TextRecord(LastBlocks.watched(blocks), trail=TRAIL)
    with rows.watching(model, record):
        outputs = finite(rows.outputs())
    if not record.h or not record.is_whole:
        return ComputedVectors(None, record.passes)

    def function_of(target: Target) -> LayerFunction:
        return rows.layer_function(model, name_of(target), input_size(target), record.like)

    inputs, n_PD = {name: torch.cat(parts) for name, parts in record.x.items()}, torch.cat(record.h)
    weight_CD, _ = rows.head_rows(model, tokens_C, record.like)
    try:
        stream = LastBlocks(blocks, inputs, n_PD, function_of).seen(inputs, n_PD, {})
        gradients = stream.at(record.last_of_places()).gradients(weight_CD - weight_CD.mean(0))
    except NotRebuiltError:
        return ComputedVectors(None, record.passes)
    found = {name: raising(gradient_MC) for name, gradient_MC in gradients.items() if name in names}
    added = AddedVectors(model, rows, outputs, step)
    acting = added.acting([layer for layer in layers if layer.name in found], found)
    vectors = ClassVectors({layer.name: found[layer.name].unsqueeze(0) for layer in acting}) if acting else None
    return ComputedVectors(vectors, record.passes + added.passes)
