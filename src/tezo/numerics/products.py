"""Products with a matrix that is computed tile by tile: a perturbed weight, or a weight cast to float32."""

from collections.abc import Iterator

import torch
from torch import Tensor

from tezo.numerics.scratch import row_slices, scratch

Tiles = Iterator[tuple[slice, int, Tensor]]
"""Yields (rows, g, W_g[rows]); the next item may overwrite the tensor."""

SharedTiles = Iterator[tuple[slice, slice, Tensor]]
"""Yields (rows, blocks, W_g[rows]), the same for all these blocks; the next item may overwrite the tensor."""

TILE = 1 << 19
"""Number of entries of a tile that is cast to float32 (2 MB)."""


def tiled_linear(x_GTN: Tensor, bias_M: Tensor | None, height: int, tiles: Tiles) -> Tensor:
    """X_g W_g^T + bias for each block g: (G, T, M). `height` is M, the number of rows of each W_g."""
    out_GTM = x_GTN.new_empty(*x_GTN.shape[:2], height)
    for rows, g, tile in tiles:
        torch.mm(x_GTN[g], tile.T, out=out_GTM[g, :, rows])
    return out_GTM if bias_M is None else out_GTM.add_(bias_M)


def add_tiled_linear_(out_GTM: Tensor, x_GTN: Tensor, scale: float, tiles: SharedTiles) -> None:
    """Out_g += scale * X_g W_g^T, in place; both are contiguous."""
    for rows, blocks, tile in tiles:
        out_GTM[blocks].flatten(0, 1)[:, rows].addmm_(x_GTN[blocks].flatten(0, 1), tile.T, alpha=scale)


def add_tiled_transposed_(out_GTN: Tensor, x_GTM: Tensor, scale: float, tiles: SharedTiles) -> None:
    """Out_g += scale * X_g W_g, in place; both are contiguous."""
    for rows, blocks, tile in tiles:
        out_GTN[blocks].flatten(0, 1).addmm_(x_GTM[blocks].flatten(0, 1)[:, rows], tile, alpha=scale)


def tiled_transposed(x_GTM: Tensor, bias_N: Tensor, tiles: Tiles) -> Tensor:
    """X_g W_g + bias for each block g: (G, T, N)."""
    out_GTN = bias_N.to(x_GTM.dtype).expand(*x_GTM.shape[:2], -1).clone()
    for rows, g, tile in tiles:
        out_GTN[g].addmm_(x_GTM[g][:, rows], tile)
    return out_GTN


def float32_linear(x: Tensor, weight_MN: Tensor, bias_M: Tensor | None = None) -> Tensor:
    """X W^T + bias, computed in float32 and rounded to the dtype of `x` at the end."""
    x_1TN = x.reshape(1, -1, x.shape[-1]).float()
    out_1TM = tiled_linear(x_1TN, bias_M, weight_MN.shape[0], _cast_tiles(weight_MN))
    return out_1TM.to(x.dtype).view(*x.shape[:-1], -1)


def float32_addmm(bias_N: Tensor, x_TM: Tensor, weight_MN: Tensor) -> Tensor:
    """X W + bias, computed in float32 and rounded to the dtype of `x_TM` at the end."""
    return tiled_transposed(x_TM.unsqueeze(0).float(), bias_N, _cast_tiles(weight_MN))[0].to(x_TM.dtype)


def _cast_tiles(weight_MN: Tensor) -> Tiles:
    for rows in row_slices(weight_MN.shape, TILE):
        part = weight_MN[rows]
        yield rows, 0, scratch("cast", part.shape, torch.float32, part.device).copy_(part)
