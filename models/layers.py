"""Pieces that the target, the drafter and their training share: norm, rope, YaRN, MLP, router.

Pure functions of tensors, so that training and inference run the same mathematics.
Shape suffixes: T tokens (any leading shape), D model, P rotary width, E experts, K experts per
token, F MLP width.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.matmul import matmul


def at_least_float32(x: Tensor) -> Tensor:
    """Widen the 16-bit types; float32 and float64 pass."""
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm (Zhang & Sennrich, 2019): float32 inside, the weight after the cast."""
    normed_TD = F.rms_norm(at_least_float32(x_TD), (x_TD.shape[-1],), None, eps)
    return normed_TD.to(x_TD.dtype) * weight_D


class RMSNorm(nn.Module):
    """`rms_norm` with its weight under the checkpoint's name."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=dtype), requires_grad=False)
        self.eps = eps

    def forward(self, x_TD: Tensor) -> Tensor:
        return rms_norm(x_TD, self.weight, self.eps)


class Linear(nn.Linear):
    """A bias-free product through `matmul`; its weight waits to be loaded."""

    def __init__(self, in_width: int, out_width: int, dtype: torch.dtype) -> None:
        super().__init__(in_width, out_width, bias=False, dtype=dtype)
        self.weight.requires_grad_(False)

    def reset_parameters(self) -> None:
        """Nothing: random numbers would only be overwritten."""

    def forward(self, x_TD: Tensor) -> Tensor:
        return matmul(x_TD, self.weight)


@dataclass(frozen=True)
class RopeScaling:
    """YaRN (Peng et al., 2023): which frequencies are stretched, and by how much."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's attention temperature, 0.1 * mscale * ln(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rope_inv_freq(width: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Rotary frequencies, float64 [width / 2], stretched by YaRN where `scaling` is given."""
    exponent_P = torch.arange(0, width, 2, dtype=torch.float64) / width
    plain_P = theta**-exponent_P
    if scaling is None:
        return plain_P

    def turn_index(turns: float) -> float:
        """The channel whose wave turns `turns` times over the original context."""
        ratio = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return width * math.log(ratio) / (2 * math.log(theta))

    low = max(math.floor(turn_index(scaling.beta_fast)), 0)
    high = min(math.ceil(turn_index(scaling.beta_slow)), width - 1)
    span = (high - low) or 0.001  # both ends on one channel: a step instead of a ramp
    ramp_P = ((torch.arange(width // 2, dtype=torch.float64) - low) / span).clamp(0, 1)
    return plain_P / scaling.factor * ramp_P + plain_P * (1 - ramp_P)


def rope_table(width: int, theta: float, scaling: RopeScaling | None, length: int) -> Tensor:
    """cos and sin of every position, float32 [length, 2, width / 2]."""
    inv_freq_P = rope_inv_freq(width, theta, scaling)
    angle_SP = torch.arange(length, dtype=torch.float64)[:, None] * inv_freq_P
    size = 1.0
    if scaling is not None:  # 1.0 for every public Kimi config, where both mscales are equal
        size = yarn_mscale(scaling.factor, scaling.mscale)
        size /= yarn_mscale(scaling.factor, scaling.mscale_all_dim)
    return torch.stack([angle_SP.cos(), angle_SP.sin()], dim=1).mul(size).float()


def rope_pairs(x_P: Tensor, cos_sin_2P: Tensor) -> Tensor:
    """Turn neighbouring channels (0,1), (2,3), ... together: DeepSeek's and Kimi's layout.

    `x_P` [..., P]; `cos_sin_2P` [..., 2, P / 2] broadcasts against it.
    """
    cos_P, sin_P = cos_sin_2P.unbind(-2)
    wide_P = at_least_float32(x_P)
    even_P, odd_P = wide_P[..., 0::2], wide_P[..., 1::2]
    turned = (even_P * cos_P - odd_P * sin_P, odd_P * cos_P + even_P * sin_P)
    return torch.stack(turned, dim=-1).flatten(-2).to(x_P.dtype)


def rope_halves(x_P: Tensor, cos_sin_2P: Tensor) -> Tensor:
    """Turn channel i with channel i + P/2: the Llama layout."""
    cos_P, sin_P = cos_sin_2P.unbind(-2)
    first_P, second_P = at_least_float32(x_P).chunk(2, dim=-1)
    turned = (first_P * cos_P - second_P * sin_P, second_P * cos_P + first_P * sin_P)
    return torch.cat(turned, dim=-1).to(x_P.dtype)


def swiglu(gate_up_TF: Tensor) -> Tensor:
    """silu(gate) * up, where both halves come out of one product."""
    gate_TF, up_TF = gate_up_TF.chunk(2, dim=-1)
    return F.silu(gate_TF) * up_TF


class MLP(nn.Module):
    """SwiGLU with gate and up in one product (Shazeer, 2020)."""

    def __init__(self, width: int, inner: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up_proj = Linear(width, 2 * inner, dtype)
        self.down_proj = Linear(inner, width, dtype)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_up_proj(x_TD)))


def route(
    x_TD: Tensor, gate_ED: Tensor, bias_E: Tensor, experts_per_token: int, scaling: float
) -> tuple[Tensor, Tensor]:
    """DeepSeek-V3's sigmoid router (2024, eq. 12-16) -> (expert_TK int64, weight_TK float32).

    The bias only steers the choice; the weights are the bare sigmoids, normalised over the
    chosen and multiplied by `scaling`.
    """
    wide_TD = at_least_float32(x_TD)
    score_TE = matmul(wide_TD, gate_ED.to(wide_TD.dtype)).sigmoid()
    expert_TK = (score_TE + bias_E).topk(experts_per_token, dim=-1).indices
    weight_TK = score_TE.gather(-1, expert_TK)
    weight_TK = weight_TK / (weight_TK.sum(-1, keepdim=True) + 1e-20) * scaling
    return expert_TK, weight_TK
