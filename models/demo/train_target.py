"""TrainableKimi, the differentiable twin of kimi_k25.py, and its training.

Expanded latent attention and all experts at once instead of the absorbed form and a loop over
experts; norm, rope, YaRN and router are the shared functions of layers.py. Architecture and
aux-loss-free load balancing: DeepSeek-V3 (2024). Routed experts see their INT4 values through a
straight-through estimator (Bengio et al., 2013) where fake quantisation is on, as in Kimi K2's
own quantisation-aware training.

Shape suffixes: B sequences, T tokens, D model, H heads, Q query/key and A value part of a head,
P rotary part, E experts, K experts per token, F expert width, V vocabulary, X taps joined,
N outputs and G groups of 32 inputs of a weight, L MoE layers.
"""

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ...kernels.int4_moe import GROUP
from ...train import learning_rate, make_optimizer, mixed_precision, update_weights
from ..config import KimiConfig
from ..kimi_k25 import softmax_scale
from ..layers import MLP, RMSNorm, rope_pairs, rope_table, route, swiglu
from .corpus import Mixture, Windows

LOG_EVERY = 50
SAVE_EVERY = 500
INIT_STD = 0.02
ADAMW_STATE = ("step", "exp_avg", "exp_avg_sq")


def quantise(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric group INT4 -> (codes in [-8, 7] as float [..., N, K], scales bfloat16 [..., G])."""
    grouped = weight_NK.detach().float().unflatten(-1, (-1, GROUP))
    scale_NG = (grouped.abs().amax(-1) / 7).to(torch.bfloat16)
    divisor = scale_NG.float().unsqueeze(-1)
    code = (grouped / divisor.where(divisor > 0, 1)).round().clamp(-8, 7)
    return code.flatten(-2), scale_NG


def fake_quantise(weight_NK: Tensor) -> Tensor:
    """The values that the INT4 checkpoint holds, with the gradient of the weight itself."""
    code_NK, scale_NG = quantise(weight_NK)
    value = code_NK.unflatten(-1, (-1, GROUP)) * scale_NG.float().unsqueeze(-1)
    # w - w is exactly 0, so the sum is the stored value to the last bit
    return value.flatten(-2) + (weight_NK - weight_NK.detach())


def linear(in_width: int, out_width: int) -> nn.Linear:
    return nn.Linear(in_width, out_width, bias=False)


class Attention(nn.Module):
    """Multi-head latent attention with keys and values expanded, causal."""

    def __init__(self, config: KimiConfig) -> None:
        super().__init__()
        heads, eps = config.num_attention_heads, config.rms_norm_eps
        self.nope, self.rope = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.value, self.rank = config.v_head_dim, config.kv_lora_rank
        self.scale = softmax_scale(config)
        self.q_a_proj = linear(config.hidden_size, config.q_lora_rank)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, eps, torch.float32)
        self.q_b_proj = linear(config.q_lora_rank, heads * (self.nope + self.rope))
        self.kv_a_proj_with_mqa = linear(config.hidden_size, self.rank + self.rope)
        self.kv_a_layernorm = RMSNorm(self.rank, eps, torch.float32)
        self.kv_b_proj = linear(self.rank, heads * (self.nope + self.value))
        self.o_proj = linear(heads * self.value, config.hidden_size)

    def forward(self, x_BTD: Tensor, cos_sin_T2P: Tensor) -> Tensor:
        q_BTHQ = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BTD)))
        q_BTHQ = q_BTHQ.unflatten(-1, (-1, self.nope + self.rope))
        latent, shared_key_BTP = self.kv_a_proj_with_mqa(x_BTD).split([self.rank, self.rope], -1)
        key_value = self.kv_b_proj(self.kv_a_layernorm(latent))
        k_nope, v_BTHA = key_value.unflatten(-1, (-1, self.nope + self.value)).split(
            [self.nope, self.value], -1
        )
        q_rope = rope_pairs(q_BTHQ[..., self.nope :], cos_sin_T2P.unsqueeze(1))
        k_rope = rope_pairs(shared_key_BTP, cos_sin_T2P).unsqueeze(2)
        q_BTHQ = torch.cat([q_BTHQ[..., : self.nope], q_rope], -1)
        k_BTHQ = torch.cat([k_nope, k_rope.expand(*k_nope.shape[:-1], -1)], -1)
        # values padded to the keys' width: the flash kernel wants all three alike
        v_BTHQ = F.pad(v_BTHA, (0, self.nope + self.rope - self.value))
        out = F.scaled_dot_product_attention(
            *(part.transpose(1, 2) for part in (q_BTHQ, k_BTHQ, v_BTHQ)),
            is_causal=True,
            scale=self.scale,
        )
        return self.o_proj(out[..., : self.value].transpose(1, 2).flatten(2))


class MoE(nn.Module):
    """All experts as two wide products; those not chosen are multiplied by a weight of 0."""

    load_E: Tensor

    def __init__(self, config: KimiConfig) -> None:
        super().__init__()
        experts, width = config.n_routed_experts, config.hidden_size
        inner = config.moe_intermediate_size
        self.per_token, self.scaling = config.num_experts_per_tok, config.routed_scaling_factor
        self.gate = linear(width, experts)
        self.gate.register_buffer("e_score_correction_bias", torch.zeros(experts))
        self.shared_experts = MLP(width, inner * config.n_shared_experts, torch.float32)
        self.expert_gate_up = nn.Parameter(torch.empty(experts, 2 * inner, width))
        self.expert_down = nn.Parameter(torch.empty(experts, width, inner))
        self.register_buffer("load_E", torch.zeros(experts), persistent=False)

    def forward(self, x_BTD: Tensor, gate_up_END: Tensor, down_EDF: Tensor) -> Tensor:
        with torch.autocast(x_BTD.device.type, enabled=False):  # the router stays in float32
            bias_E = self.gate.e_score_correction_bias
            expert_BTK, weight_BTK = route(
                x_BTD, self.gate.weight, bias_E, self.per_token, self.scaling
            )
        weight_BTE = weight_BTK.new_zeros(*x_BTD.shape[:-1], len(bias_E))
        weight_BTE = weight_BTE.scatter(-1, expert_BTK, weight_BTK)
        if self.training:
            self.load_E += (weight_BTE.detach() > 0).flatten(0, -2).sum(0)
        gate_up = F.linear(x_BTD, gate_up_END.flatten(0, 1)).unflatten(-1, (len(bias_E), -1))
        inner_BTEF = swiglu(gate_up)
        inner_BTEF = inner_BTEF * weight_BTE.unsqueeze(-1).to(inner_BTEF.dtype)
        routed_BTD = F.linear(inner_BTEF.flatten(-2), down_EDF.transpose(0, 1).flatten(1))
        return routed_BTD + self.shared_experts(x_BTD)


class Layer(nn.Module):
    """Attention, then MLP or MoE, each behind its norm, with dropout on what they add."""

    def __init__(self, config: KimiConfig, index: int) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(width, eps, torch.float32)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(width, eps, torch.float32)
        dense = index < config.first_k_dense_replace
        self.mlp = MLP(width, config.intermediate_size, torch.float32) if dense else MoE(config)
        self.dropout = 0.0

    def forward(self, x_BTD: Tensor, cos_sin_T2P: Tensor, *experts: Tensor) -> Tensor:
        added = self.self_attn(self.input_layernorm(x_BTD), cos_sin_T2P)
        x_BTD = x_BTD + F.dropout(added, self.dropout, self.training)
        added = self.mlp(self.post_attention_layernorm(x_BTD), *experts)
        return x_BTD + F.dropout(added, self.dropout, self.training)


class TrainableKimi(nn.Module):
    """The text model, float32 weights; state_dict names are the checkpoint's, experts stacked.

    `fake_quant` shows the routed experts' INT4 values to the forward pass.
    """

    rope_S2P: Tensor

    def __init__(self, config: KimiConfig) -> None:
        super().__init__()
        self.config = config
        self.fake_quant = False
        self.tap_boundaries: tuple[int, ...] = ()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, torch.float32)
        self.lm_head = linear(config.hidden_size, config.vocab_size)
        table = rope_table(
            config.qk_rope_head_dim,
            config.rope_theta,
            config.rope_scaling,
            config.max_position_embeddings,
        )
        self.register_buffer("rope_S2P", table, persistent=False)
        self.requires_grad_(True)
        for name, weight in self.named_parameters():
            if weight.ndim > 1:  # norms keep their ones
                writes = "o_proj" in name or "down" in name  # adds to the residual stream
                std = INIT_STD / math.sqrt(2 * config.num_hidden_layers) if writes else INIT_STD
                nn.init.normal_(weight, std=std)

    def expert_weights(self, layer: Layer) -> tuple[Tensor, ...]:
        """Computed outside the layer: torch.compile would drop the scale's bfloat16 rounding."""
        if not isinstance(layer.mlp, MoE):
            return ()
        weights = (layer.mlp.expert_gate_up, layer.mlp.expert_down)
        return tuple(map(fake_quantise, weights)) if self.fake_quant else weights

    def forward(self, ids_BT: Tensor) -> tuple[Tensor, Tensor | None]:
        """-> (logits_BTV, the taps side by side [B, T, X] or None)."""
        x_BTD = self.embed_tokens(ids_BT)
        cos_sin_T2P = self.rope_S2P[: ids_BT.shape[1]]
        boundaries = []
        for layer in self.layers:
            boundaries.append(x_BTD)
            run = layer if self.training else layer.forward  # only training is compiled
            x_BTD = run(x_BTD, cos_sin_T2P, *self.expert_weights(layer))
        boundaries.append(x_BTD)
        tapped = [boundaries[b] for b in sorted(self.tap_boundaries)]
        taps_BTX = torch.cat(tapped, dim=-1) if tapped else None
        return self.lm_head(self.norm(x_BTD)), taps_BTX

    @torch.no_grad()
    def balance(self, rate: float) -> Tensor:
        """DeepSeek-V3's bias update -> the busiest expert's load over its layer's mean."""
        worst = []
        for moe in (layer.mlp for layer in self.layers if isinstance(layer.mlp, MoE)):
            mean = moe.load_E.mean()
            moe.gate.e_score_correction_bias += rate * torch.sign(mean - moe.load_E)
            worst.append(moe.load_E.max() / mean)
            moe.load_E.zero_()
        return torch.stack(worst).max()


@dataclass(frozen=True)
class Phase:
    """One stretch of training."""

    name: str
    tokens: int
    batch: int  # sequences a step
    sequence: int
    peak_lr: float
    final_lr: float
    warmup: int  # steps
    dropout: float
    fake_quant: bool
    balance: float  # DeepSeek-V3's bias update speed; 0 leaves the bias alone

    @property
    def steps(self) -> int:
        return max(1, self.tokens // (self.batch * self.sequence))


def next_token_loss(model: TrainableKimi, window_BT: Tensor) -> Tensor:
    """Mean cross-entropy of [B, T + 1] windows, products in bfloat16."""
    with mixed_precision(window_BT.device):
        logits_BTV, _ = model(window_BT[:, :-1])
    return F.cross_entropy(logits_BTV.float().flatten(0, 1), window_BT[:, 1:].flatten())


def save_state(
    path: Path, model: TrainableKimi, optimizer: torch.optim.AdamW, progress: dict[str, Any]
) -> None:
    """Weights and AdamW's moments by name; the progress as JSON in the same file's header."""
    tensors = {f"model {name}": tensor for name, tensor in model.state_dict().items()}
    for name, weight in model.named_parameters():
        tensors |= {f"{key} {name}": optimizer.state[weight][key] for key in ADAMW_STATE}
    partly = path.with_suffix(".part")  # a run that is killed here leaves the last state whole
    save_file(tensors, partly, metadata={"progress": json.dumps(progress)})
    partly.rename(path)


def load_state(path: Path, model: TrainableKimi, optimizer: torch.optim.AdamW) -> dict[str, Any]:
    """What `save_state` wrote -> the progress."""
    with safe_open(path, "pt") as file:
        progress: dict[str, Any] = json.loads(file.metadata()["progress"])
        names = model.state_dict().keys()
        model.load_state_dict({name: file.get_tensor(f"model {name}") for name in names})
        for name, weight in model.named_parameters():
            stored = {key: file.get_tensor(f"{key} {name}") for key in ADAMW_STATE}
            stored |= {key: value.to(weight) for key, value in stored.items() if key != "step"}
            optimizer.state[weight] = stored  # AdamW wants its step counters on the CPU
    return progress


def train_phase(
    model: TrainableKimi, phase: Phase, mixture: Mixture, path: Path, deadline: float
) -> dict[str, object] | None:
    """Train, going on from `path` where it exists. None: the deadline came first; run again.

    `deadline` is a value of time.monotonic().
    """
    optimizer = make_optimizer(model, 0.1, exempt=("embed_tokens",))
    progress: dict[str, Any] = {"step": 0, "seconds": 0.0, "log": []}
    if path.exists():
        progress = load_state(path, model, optimizer)
    step, log = progress["step"], progress["log"]
    model.train()
    model.fake_quant = phase.fake_quant
    for layer in model.layers:
        layer.dropout = phase.dropout
    recent, recent_step = time.monotonic(), step
    begun = recent - progress["seconds"]
    while step < phase.steps:
        lr = learning_rate(step, phase.steps, phase.warmup, phase.peak_lr, phase.final_lr)
        loss = next_token_loss(model, mixture.batch(step, phase.batch))
        update_weights(model, optimizer, loss, lr, 1.0)
        load = model.balance(phase.balance * lr / phase.peak_lr)
        step += 1
        if step % LOG_EVERY == 0 or step in (1, phase.steps):
            value, now = loss.item(), time.monotonic()
            speed = (step - recent_step) * phase.batch * phase.sequence / (now - recent)
            recent, recent_step = now, step
            if not math.isfinite(value):
                raise RuntimeError(f"{phase.name}: loss is {value} at step {step}")
            log.append([step, round(value, 4)])
            print(
                f"{phase.name} {step}/{phase.steps} loss {value:.4f} lr {lr:.2e} "
                f"load {load.item():.2f} {speed:,.0f} tokens/s",
                flush=True,
            )
        late = step < phase.steps and time.monotonic() > deadline
        if step % SAVE_EVERY == 0 or step == phase.steps or late:
            seconds = time.monotonic() - begun
            save_state(path, model, optimizer, {"step": step, "seconds": seconds, "log": log})
        if late:
            print(f"{phase.name}: out of time at step {step}; run again to go on", flush=True)
            return None
    seconds = time.monotonic() - begun
    tokens = phase.steps * phase.batch * phase.sequence
    return {
        "tokens": tokens,
        "seconds": round(seconds, 1),
        "tokens_per_s": round(tokens / max(seconds, 1e-9)),
        "loss": log,
    }


@torch.no_grad()
def evaluate(
    model: TrainableKimi, kinds: dict[str, Windows], batches: int, batch: int
) -> dict[str, dict[str, float]]:
    """Held-out perplexity of each kind of text, experts in float and, left so, as INT4."""
    model.eval()
    result: dict[str, dict[str, float]] = {kind: {} for kind in kinds}
    for kind, windows in kinds.items():
        for name, quantised in (("float", False), ("int4", True)):
            model.fake_quant = quantised
            losses = [
                next_token_loss(model, windows.take(i * batch, batch)) for i in range(batches)
            ]
            result[kind][name] = round(math.exp(torch.stack(losses).mean().item()), 4)
    return result
