"""INT4 mixture of experts: W4A16, group 32, symmetric (compressed-tensors pack-quantized).

    y_t = sum_k weight_tk * down_e( silu(gate_e(x_t)) * up_e(x_t) ),  e = expert_tk

Layout of the checkpoint: 8 codes an int32 along the input dimension, lowest nibble first, each
code being q + 8 with q in [-8, 7]; one scale per 32 inputs; weight = q * scale.
Bytes moved: 9/16 of a byte per weight of every *distinct* expert that the step touches, so a
draft tree costs more than a token by the experts it wakes. Flops: 6 * T * K * D * F.

Shape suffixes: T tokens, K experts per token, E experts, D model, F expert width, N outputs of
one product, G groups of 32 inputs, W packed words.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

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
        gate, up = F.linear(x_TD[token], gate_up).chunk(2, dim=-1)
        out_TKD[token, slot] = F.linear(F.silu(gate) * up, down)
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
    """The experts in the layout of PyTorch's own CPU kernel, one entry an expert.

    Still 4 bits a weight. The kernel takes a scale and a zero point per group, both bfloat16;
    the zero points are 0 here.
    """

    gate_up: list[tuple[Tensor, Tensor]]
    down: list[tuple[Tensor, Tensor]]
    gate_up_width: int


def repack_for_cpu(experts: PackedExperts) -> CpuExperts:
    """Checkpoint layout -> CPU kernel layout; every bit of code and scale is kept."""

    def one(packed_NW: Tensor, scale_NG: Tensor) -> tuple[Tensor, Tensor]:
        ones = torch.ones_like(scale_NG, dtype=torch.float32)
        code_ND = unpack_int4(packed_NW, ones, torch.float32).add_(8).to(torch.int32)
        tiled = torch.ops.aten._convert_weight_to_int4pack_for_cpu(code_ND, 1)
        scale_GN = scale_NG.t().to(torch.bfloat16)
        return tiled, torch.stack([scale_GN, torch.zeros_like(scale_GN)], -1).contiguous()

    return CpuExperts(
        [one(*pair) for pair in zip(experts.gate_up_packed_ENW, experts.gate_up_scale_ENG)],
        [one(*pair) for pair in zip(experts.down_packed_ENW, experts.down_scale_ENG)],
        experts.gate_up_packed_ENW.shape[1],
    )


def int4_moe_cpu(
    x_TD: Tensor, experts: CpuExperts, expert_TK: Tensor, weight_TK: Tensor
) -> Tensor:
    """The same sum through PyTorch's CPU INT4 product: bfloat16 in and out, float32 inside.

    Tokens are sorted by expert, so that each expert is one product over a run of rows.
    """
    count, slots = expert_TK.shape
    order = expert_TK.flatten().argsort(stable=True)
    chosen = expert_TK.flatten().tolist()
    runs = [0] * (len(experts.down) + 1)
    for expert in chosen:
        runs[expert + 1] += 1
    for expert in range(len(experts.down)):
        runs[expert + 1] += runs[expert]
    present = sorted(set(chosen))
    product = torch.ops.aten._weight_int4pack_mm_for_cpu
    x16 = x_TD.to(torch.bfloat16)[order // slots]
    spans = [(expert, runs[expert], runs[expert + 1]) for expert in present]
    gate_up = torch.cat(
        [product(x16[a:b], experts.gate_up[e][0], GROUP, experts.gate_up[e][1]) for e, a, b in spans]
    )
    gate, up = gate_up.chunk(2, dim=-1)
    inner = F.silu(gate) * up
    down = torch.cat(
        [product(inner[a:b], experts.down[e][0], GROUP, experts.down[e][1]) for e, a, b in spans]
    )
    out_TKD = torch.empty_like(down).index_copy_(0, order, down).view(count, slots, -1)
    return combine(out_TKD, weight_TK).to(x_TD.dtype)
