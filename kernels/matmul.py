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


def matmul_cpu(x_TD: Tensor, weight_ND: Tensor) -> Tensor:
    """[T, D] -> [T, N], tile by tile; the last tile is filled up with zeros."""
    count = x_TD.shape[0]
    padded_TD = F.pad(x_TD, (0, 0, 0, -count % ROW_TILE))
    tiles = [weight_ND @ tile.T for tile in padded_TD.split(ROW_TILE)]
    return (tiles[0] if len(tiles) == 1 else torch.cat(tiles, dim=1)).T[:count].contiguous()


def matmul(x_TD: Tensor, weight_ND: Tensor) -> Tensor:
    """The step's product where there is a kernel for it, the reference elsewhere."""
    if x_TD.device.type == "cpu" and x_TD.dim() == 2:
        return matmul_cpu(x_TD, weight_ND)
    return matmul_reference(x_TD, weight_ND)


def head_matmul(x_THD: Tensor, weight_HDN: Tensor) -> Tensor:
    """Each head's own product, [T, H, N]; on a CPU in the same tiles of rows."""
    if x_THD.device.type != "cpu":
        return torch.bmm(x_THD.transpose(0, 1), weight_HDN).transpose(0, 1)
    count = x_THD.shape[0]
    padded_HTD = F.pad(x_THD.transpose(0, 1), (0, 0, 0, -count % ROW_TILE))
    tiles = [torch.bmm(tile, weight_HDN) for tile in padded_HTD.split(ROW_TILE, dim=1)]
    return torch.cat(tiles, dim=1)[:, :count].transpose(0, 1)
