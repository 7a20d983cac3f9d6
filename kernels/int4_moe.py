"""INT4 mixture of experts: W4A16, group 32, symmetric (compressed-tensors pack-quantized).

    y_t = sum_k weight_tk * down_e( silu(gate_e(x_t)) * up_e(x_t) ),  e = expert_tk

Layout of the checkpoint: 8 codes an int32 along the input dimension, lowest nibble first, each
code being q + 8 with q in [-8, 7]; one scale per 32 inputs; weight = q * scale.
Bytes moved: 9/16 of a byte per weight of every *distinct* expert that the step touches, so a
draft tree costs more than a token by the experts it wakes. Flops: 6 * T * K * D * F.

Shape suffixes: T tokens, K experts per token, E experts, D model, F expert width, N outputs of
one product, G groups of 32 inputs, W packed words, M token-expert pairs.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .matmul import matmul

GROUP = 32
CODES_PER_WORD = 8


def unpack_int4(packed_NW: Tensor, scale_NG: Tensor, dtype: torch.dtype) -> Tensor:
    """Packed words and scales -> the dense weight [N, D], multiplied in `dtype`."""
    shift = torch.arange(0, 4 * CODES_PER_WORD, 4, dtype=torch.int32, device=packed_NW.device)
    code = (packed_NW.unsqueeze(-1) >> shift & 0xF).sub_(8).to(dtype)
    grouped = code.view(*scale_NG.shape, GROUP) * scale_NG.unsqueeze(-1).to(dtype)
    return grouped.flatten(-2)


def pack_int4(code_ND: Tensor) -> Tensor:
    """Signed codes in [-8, 7] -> int32 words [N, D / 8]."""
    shift = torch.arange(0, 4 * CODES_PER_WORD, 4, dtype=torch.int64, device=code_ND.device)
    unsigned = (code_ND.to(torch.int64) + 8).unflatten(-1, (-1, CODES_PER_WORD))
    word = (unsigned << shift).sum(-1)
    return torch.where(word >= 2**31, word - 2**32, word).to(torch.int32)


@dataclass(frozen=True)
class PackedExperts:
    """All routed experts of a layer as the checkpoint stores them, gate above up."""

    gate_up_packed_ENW: Tensor  # int32 [E, 2F, D / 8]
    gate_up_scale_ENG: Tensor  # [E, 2F, D / 32]
    down_packed_ENW: Tensor  # int32 [E, D, F / 8]
    down_scale_ENG: Tensor  # [E, D, F / 32]


def int4_moe_reference(
    x_TD: Tensor, experts: PackedExperts, expert_TK: Tensor, weight_TK: Tensor
) -> Tensor:
    """Expert by expert in plain torch, in the dtype of `x_TD`; outputs summed in slot order."""
    out_TKD = x_TD.new_empty(*expert_TK.shape, x_TD.shape[-1])
    for expert in expert_TK.unique().tolist():
        token, slot = (expert_TK == expert).nonzero(as_tuple=True)
        gate_up = unpack_int4(
            experts.gate_up_packed_ENW[expert], experts.gate_up_scale_ENG[expert], x_TD.dtype
        )
        down = unpack_int4(
            experts.down_packed_ENW[expert], experts.down_scale_ENG[expert], x_TD.dtype
        )
        gate, up = matmul(x_TD[token], gate_up).chunk(2, dim=-1)
        out_TKD[token, slot] = matmul(F.silu(gate) * up, down)
    return combine(out_TKD, weight_TK).to(x_TD.dtype)


def combine(out_TKD: Tensor, weight_TK: Tensor) -> Tensor:
    """Weighted sum of a token's experts, always in slot order whatever else is in the step."""
    weighted_TKD = out_TKD * weight_TK.unsqueeze(-1)  # float32 or wider, as the weights are
    total_TD = weighted_TKD[:, 0]
    for slot in range(1, weighted_TKD.shape[1]):
        total_TD = total_TD + weighted_TKD[:, slot]
    return total_TD


@dataclass(frozen=True)
class CpuExperts:
    """The experts in the layout of PyTorch's own CPU kernel: (tiles, scales) of each expert.

    Still 4 bits a weight. The kernel takes a scale and a zero point per group, both bfloat16;
    the zero points are 0 here.
    """

    gate_up: list[tuple[Tensor, Tensor]]
    down: list[tuple[Tensor, Tensor]]


def repack_for_cpu(experts: PackedExperts) -> CpuExperts:
    """Checkpoint layout -> CPU kernel layout; every bit of code and scale is kept."""

    def one(packed_NW: Tensor, scale_NG: Tensor) -> tuple[Tensor, Tensor]:
        ones_NG = torch.ones_like(scale_NG, dtype=torch.float32)
        code_ND = unpack_int4(packed_NW, ones_NG, torch.float32).add_(8).to(torch.int32)
        tiles = torch.ops.aten._convert_weight_to_int4pack_for_cpu(code_ND, 1)
        scale_GN = scale_NG.t().to(torch.bfloat16)
        return tiles, torch.stack([scale_GN, torch.zeros_like(scale_GN)], dim=-1).contiguous()

    return CpuExperts(
        [one(*pair) for pair in zip(experts.gate_up_packed_ENW, experts.gate_up_scale_ENG)],
        [one(*pair) for pair in zip(experts.down_packed_ENW, experts.down_scale_ENG)],
    )


def int4_moe_cpu(x_TD: Tensor, experts: CpuExperts, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """The same sum through PyTorch's CPU INT4 product: bfloat16 in and out, float32 inside.

    Tokens are sorted by expert, so that each expert is one product over a span of rows.
    """
    order = expert_TK.flatten().argsort(stable=True)
    spans, start = [], 0
    for expert, size in enumerate(expert_TK.flatten().bincount().tolist()):
        if size:
            spans.append((expert, slice(start, start + size)))
            start += size

    def product(row_MD: Tensor, weights: list[tuple[Tensor, Tensor]]) -> Tensor:
        int4 = torch.ops.aten._weight_int4pack_mm_for_cpu
        return torch.cat(
            [int4(row_MD[span], weights[e][0], GROUP, weights[e][1]) for e, span in spans]
        )

    sorted_MD = x_TD.to(torch.bfloat16)[order // expert_TK.shape[1]]
    gate_MF, up_MF = product(sorted_MD, experts.gate_up).chunk(2, dim=-1)
    down_MD = product(F.silu(gate_MF) * up_MF, experts.down)
    out_MD = torch.empty_like(down_MD).index_copy_(0, order, down_MD)
    return combine(out_MD.unflatten(0, expert_TK.shape), weight_TK).to(x_TD.dtype)
