"""Bias-free product of a few rows with a weight, y = x W^T, the step's commonest operation.

A decode or tree step has 1 to 64 rows, so the product is bound by reading W once: N * D values.
Flops: 2 * T * N * D.

On a CPU the rows are taken in tiles of ROW_TILE, always the same shape of product: a row's
result cannot depend on how many rows share the step, and BLAS, which is slow at a handful of
rows laid out the usual way, runs at the speed of memory.

Shape suffixes: T rows, H heads, D inputs, N outputs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# 4 rows cost no more than 1 (2048 x 320 float32, weights not in cache: 230 us against 262 us)
ROW_TILE = 4


def matmul_reference(x_TD: Tensor, weight_ND: Tensor) -> Tensor:
    """Any leading shape -> [..., N]."""
    return F.linear(x_TD, weight_ND)


def row_tiles(x_TD: Tensor) -> tuple[Tensor, ...]:
    """Tiles of ROW_TILE rows; the last one is filled up with copies of the last row."""
    missing = -x_TD.shape[0] % ROW_TILE
    padded_TD = torch.cat([x_TD, *[x_TD[-1:]] * missing]) if missing else x_TD
    return padded_TD.split(ROW_TILE)


def matmul_cpu(x_TD: Tensor, weight_ND: Tensor) -> Tensor:
    """[T, D] -> [T, N], tile by tile."""
    tiles = [weight_ND @ tile_TD.T for tile_TD in row_tiles(x_TD)]
    out_NT = tiles[0] if len(tiles) == 1 else torch.cat(tiles, dim=1)
    return out_NT.T[: x_TD.shape[0]].contiguous()


def matmul(x_TD: Tensor, weight_ND: Tensor) -> Tensor:
    """The step's product where there is a kernel for it, the reference elsewhere."""
    if x_TD.device.type == "cpu" and x_TD.dim() == 2:
        return matmul_cpu(x_TD, weight_ND)
    return matmul_reference(x_TD, weight_ND)


def head_matmul(x_THD: Tensor, weight_HDN: Tensor) -> Tensor:
    """Each head's own product, [T, H, N]; on a CPU in the same tiles of rows."""
    if x_THD.device.type != "cpu":
        return torch.bmm(x_THD.transpose(0, 1), weight_HDN).transpose(0, 1)
    tiles = [torch.bmm(tile_THD.transpose(0, 1), weight_HDN) for tile_THD in row_tiles(x_THD)]
    out_HTN = tiles[0] if len(tiles) == 1 else torch.cat(tiles, dim=1)
    return out_HTN[:, : x_THD.shape[0]].transpose(0, 1)
