"""Kimi-K2.5's text model: latent attention, MoE with INT4 experts, taps for the drafter.

The latent cache's rows are [normed latent | roped key]; attention runs in the absorbed form for
every step, be it a prompt chunk, one token or a draft tree. Knows nothing of trees, sampling or
of who moves cache rows. Follows DeepSeek-V3 (2024) and the public Kimi-K2.5 checkpoint.

Shape suffixes: T tokens of this step, D model, H heads, N no-rope and P rope part of a head,
C latent rank, R = C + P cache row, A value part of a head, E experts, V vocabulary.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from ..kernels.int4_moe import (
    CODES_PER_WORD,
    GROUP,
    CpuExperts,
    PackedExperts,
    int4_moe_cpu,
    int4_moe_reference,
    repack_for_cpu,
)
from ..kernels.matmul import head_matmul
from ..kernels.mla_attention import mla_attention
from .config import KimiConfig
from .interface import CacheRows, Placement, Step, StepOutput
from .layers import (
    MLP,
    Linear,
    RMSNorm,
    RopeScaling,
    at_least_float32,
    rope_pairs,
    rope_table,
    route,
    yarn_mscale,
)


class LatentSizes(Protocol):
    """What latent attention reads of a config: KimiConfig has it, and so has a latent head's."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def q_lora_rank(self) -> int: ...
    @property
    def kv_lora_rank(self) -> int: ...
    @property
    def qk_nope_head_dim(self) -> int: ...
    @property
    def qk_rope_head_dim(self) -> int: ...
    @property
    def v_head_dim(self) -> int: ...
    @property
    def cache_width(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def rope_scaling(self) -> RopeScaling | None: ...


def softmax_scale(config: LatentSizes) -> float:
    """1 / sqrt(q head width), times YaRN's mscale squared."""
    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    if config.rope_scaling is not None:
        scaling = config.rope_scaling
        scale *= yarn_mscale(scaling.factor, scaling.mscale_all_dim) ** 2
    return scale


class Attention(nn.Module):
    """Multi-head latent attention, absorbed: queries move into latent space, keys never leave.

    `in_width` is the input's width where it is not the hidden size (an EAGLE-3 head's is twice).
    """

    def __init__(
        self, config: LatentSizes, dtype: torch.dtype, in_width: int | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.scale = softmax_scale(config)
        heads = config.num_attention_heads
        q_head = config.qk_nope_head_dim + config.qk_rope_head_dim
        kv_head = config.qk_nope_head_dim + config.v_head_dim
        eps = config.rms_norm_eps
        # q_a_proj above kv_a_proj_with_mqa: both read the same input
        in_width = in_width or config.hidden_size
        self.qkv_a_proj = Linear(in_width, config.q_lora_rank + config.cache_width, dtype)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, eps, dtype)
        self.q_b_proj = Linear(config.q_lora_rank, heads * q_head, dtype)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, eps, dtype)
        self.kv_b_proj = Linear(config.kv_lora_rank, heads * kv_head, dtype)
        self.o_proj = Linear(heads * config.v_head_dim, config.hidden_size, dtype)

    def forward(
        self, x_TD: Tensor, cos_sin_T2P: Tensor, step: Step, cache: CacheRows, layer: int
    ) -> Tensor:
        config = self.config
        nope, rope, rank = config.qk_nope_head_dim, config.qk_rope_head_dim, config.kv_lora_rank
        q_a, latent_TC, key_TP = self.qkv_a_proj(x_TD).split(
            [config.q_lora_rank, rank, rope], dim=-1
        )
        q_THQ = self.q_b_proj(self.q_a_layernorm(q_a)).unflatten(-1, (-1, nope + rope))
        turned_TXP = rope_pairs(  # all heads' queries and the one key, in one go
            torch.cat([q_THQ[..., nope:], key_TP.unsqueeze(1)], dim=1), cos_sin_T2P.unsqueeze(1)
        )
        row_TR = torch.cat([self.kv_a_layernorm(latent_TC), turned_TXP[:, -1]], dim=-1)
        cache.write(layer, step.slot_T, row_TR)

        kv_b_HXC = self.kv_b_proj.weight.view(-1, nope + config.v_head_dim, rank)
        q_latent_THC = head_matmul(q_THQ[..., :nope], kv_b_HXC[:, :nope])
        out_THC = mla_attention(
            torch.cat([q_latent_THC, turned_TXP[:, :-1]], dim=-1),
            cache.rows(layer, step.end),
            step.key_TL,
            self.scale,
            rank,
        )
        out_THA = head_matmul(out_THC, kv_b_HXC[:, nope:].transpose(1, 2))
        return self.o_proj(out_THA.flatten(1))

    def placements(self, prefix: str) -> Iterator[Placement]:
        rank = self.config.q_lora_rank
        yield Placement(f"{prefix}q_a_proj.weight", self.qkv_a_proj.weight[:rank])
        yield Placement(f"{prefix}kv_a_proj_with_mqa.weight", self.qkv_a_proj.weight[rank:])
        for name in ("q_a_layernorm", "q_b_proj", "kv_a_layernorm", "kv_b_proj", "o_proj"):
            yield Placement(f"{prefix}{name}.weight", getattr(self, name).weight)


def mlp_placements(mlp: MLP, prefix: str) -> Iterator[Placement]:
    """gate_proj above up_proj in the fused weight."""
    gate, up = mlp.gate_up_proj.weight.chunk(2)
    yield Placement(f"{prefix}gate_proj.weight", gate)
    yield Placement(f"{prefix}up_proj.weight", up)
    yield Placement(f"{prefix}down_proj.weight", mlp.down_proj.weight)


class MoE(nn.Module):
    """Routed INT4 experts plus one shared expert that is neither routed nor scaled."""

    def __init__(self, config: KimiConfig, dtype: torch.dtype, expert_dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.expert_dtype = expert_dtype
        experts, width, inner = (
            config.n_routed_experts,
            config.hidden_size,
            config.moe_intermediate_size,
        )
        self.gate = nn.Parameter(torch.empty(experts, width), requires_grad=False)
        self.e_score_correction_bias = nn.Parameter(torch.empty(experts), requires_grad=False)
        self.shared_experts = MLP(width, inner * config.n_shared_experts, dtype)
        self.experts = PackedExperts(
            torch.empty(experts, 2 * inner, width // CODES_PER_WORD, dtype=torch.int32),
            torch.empty(experts, 2 * inner, width // GROUP, dtype=torch.bfloat16),
            torch.empty(experts, width, inner // CODES_PER_WORD, dtype=torch.int32),
            torch.empty(experts, width, inner // GROUP, dtype=torch.bfloat16),
        )
        self.cpu_experts: CpuExperts | None = None

    def forward(self, x_TD: Tensor) -> Tensor:
        expert_TK, weight_TK = route(
            x_TD,
            self.gate,
            self.e_score_correction_bias,
            self.config.num_experts_per_tok,
            self.config.routed_scaling_factor,
        )
        if self.cpu_experts is not None:
            routed_TD = int4_moe_cpu(x_TD, self.cpu_experts, expert_TK, weight_TK)
        else:
            x_expert_TD = x_TD.to(self.expert_dtype)
            routed_TD = int4_moe_reference(x_expert_TD, self.experts, expert_TK, weight_TK)
        return routed_TD.to(x_TD.dtype) + self.shared_experts(x_TD)

    def finish_loading(self) -> None:
        """Move the experts into the layout of the kernel that will read them."""
        on_cpu = self.gate.device.type == "cpu"
        if on_cpu and self.expert_dtype == torch.bfloat16:
            self.cpu_experts = repack_for_cpu(self.experts)
            del self.experts

    def placements(self, prefix: str) -> Iterator[Placement]:
        yield Placement(f"{prefix}gate.weight", self.gate)
        yield Placement(f"{prefix}gate.e_score_correction_bias", self.e_score_correction_bias)
        yield from mlp_placements(self.shared_experts, f"{prefix}shared_experts.")
        inner = self.config.moe_intermediate_size
        for expert in range(self.config.n_routed_experts):
            packed = self.experts.gate_up_packed_ENW[expert]
            scale = self.experts.gate_up_scale_ENG[expert]
            stem = f"{prefix}experts.{expert}."
            for name, rows in (("gate", slice(0, inner)), ("up", slice(inner, None))):
                yield Placement(f"{stem}{name}_proj.weight_packed", packed[rows])
                yield Placement(f"{stem}{name}_proj.weight_scale", scale[rows])
            yield Placement(f"{stem}down_proj.weight_packed", self.experts.down_packed_ENW[expert])
            yield Placement(f"{stem}down_proj.weight_scale", self.experts.down_scale_ENG[expert])


class Layer(nn.Module):
    """Attention, then MLP or MoE, each behind its norm."""

    def __init__(
        self, config: KimiConfig, index: int, dtype: torch.dtype, expert_dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.index = index
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.self_attn = Attention(config, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp: MLP | MoE
        if index < config.first_k_dense_replace:
            self.mlp = MLP(config.hidden_size, config.intermediate_size, dtype)
        else:
            self.mlp = MoE(config, dtype, expert_dtype)

    def forward(self, x_TD: Tensor, cos_sin_T2P: Tensor, step: Step, cache: CacheRows) -> Tensor:
        normed_TD = self.input_layernorm(x_TD)
        x_TD = x_TD + self.self_attn(normed_TD, cos_sin_T2P, step, cache, self.index)
        return x_TD + self.mlp(self.post_attention_layernorm(x_TD))

    def placements(self, prefix: str) -> Iterator[Placement]:
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield Placement(f"{prefix}{name}.weight", getattr(self, name).weight)
        yield from self.self_attn.placements(f"{prefix}self_attn.")
        if isinstance(self.mlp, MoE):
            yield from self.mlp.placements(f"{prefix}mlp.")
        else:
            yield from mlp_placements(self.mlp, f"{prefix}mlp.")


class KimiK25(nn.Module):
    """The whole text model.

    `dtype` is that of all dense weights and activations, `expert_dtype` that of the activations
    inside the INT4 experts. `tap_boundaries` names the taps: b is the input of layer b, which
    is the output of layer b - 1; b = num_layers is the last output, before the final norm.
    """

    def __init__(self, config: KimiConfig, dtype: torch.dtype, expert_dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = config.vocab_size
        self.max_positions = config.max_position_embeddings
        self.num_layers = config.num_hidden_layers
        self.cache_width = config.cache_width
        self.tap_boundaries: tuple[int, ...] = ()
        self.embed_tokens = nn.Parameter(
            torch.empty(config.vocab_size, config.hidden_size, dtype=dtype), requires_grad=False
        )
        self.layers = nn.ModuleList(
            Layer(config, index, dtype, expert_dtype) for index in range(self.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, dtype)
        self.rope_S2P: Tensor | None = None

    @torch.inference_mode()
    def forward(self, step: Step, cache: CacheRows, last_only: bool = False) -> StepOutput:
        """Write the step's rows into `cache`, return logits float32 and the taps side by side."""
        assert self.rope_S2P is not None, "finish_loading() was not called"
        x_TD = self.embed_tokens[step.token_T]
        cos_sin_T2P = self.rope_S2P[step.position_T]
        tapped = []
        for index, layer in enumerate(self.layers):
            if index in self.tap_boundaries:
                tapped.append(x_TD)
            x_TD = layer(x_TD, cos_sin_T2P, step, cache)
        if self.num_layers in self.tap_boundaries:
            tapped.append(x_TD)
        logits_TV = self.lm_head(self.norm(x_TD[-1:] if last_only else x_TD))
        taps_TD = torch.cat(tapped, dim=-1) if tapped else None
        return StepOutput(at_least_float32(logits_TV), taps_TD)

    def finish_loading(self, context: int) -> None:
        """Build the rope table for `context` positions and repack the experts."""
        config = self.config
        table = rope_table(config.qk_rope_head_dim, config.rope_theta, config.rope_scaling, context)
        self.rope_S2P = table.to(self.embed_tokens.device)
        for layer in self.layers:
            if isinstance(layer.mlp, MoE):
                layer.mlp.finish_loading()

    def placements(self) -> Iterator[Placement]:
        """Every tensor of the checkpoint's text model, by its name there."""
        prefix = self.config.tensor_prefix
        yield Placement(f"{prefix}model.embed_tokens.weight", self.embed_tokens)
        for index, layer in enumerate(self.layers):
            yield from layer.placements(f"{prefix}model.layers.{index}.")
        yield Placement(f"{prefix}model.norm.weight", self.norm.weight)
        yield Placement(f"{prefix}lm_head.weight", self.lm_head.weight)
