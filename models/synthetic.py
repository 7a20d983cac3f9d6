"""Writes random Kimi-K2.5 targets in the real on-disk form; synthetic_heads.py their heads.

For tests and benchmarks: real tensor names, real dtypes, packed INT4 experts, an index. The
weights are random but keep activations near unit size, so that logits are neither flat nor wild.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..kernels.int4_moe import CODES_PER_WORD, GROUP, pack_int4
from .checkpoint import SHARD_BYTES, target_json, write_checkpoint
from .config import KimiConfig
from .kimi_k25 import KimiK25
from .layers import RopeScaling

SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
    "num_hidden_layers": 4, "num_attention_heads": 4, "n_routed_experts": 16,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.0, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0, "rope_scaling": {"type": "yarn", **asdict(RopeScaling(4.0, 64))},
}  # fmt: skip


def target_config(**changes: Any) -> dict[str, Any]:
    """A small config.json in Kimi-K2.5's nested form; `changes` go into its text_config."""
    return target_json(SIZES | changes, SPECIAL)


def random_tensor(name: str, like: Tensor, generator: torch.Generator) -> Tensor:
    """Values by what the name says the tensor is."""
    shape = like.shape
    if name.endswith("weight_packed"):
        codes = (*shape[:-1], shape[-1] * CODES_PER_WORD)
        return pack_int4(torch.randint(-7, 8, codes, generator=generator))
    if name.endswith("weight_scale"):  # codes of -7..7 have a standard deviation of 4.3
        size = (shape[-1] * GROUP) ** -0.5 / 4.3
        return (size * (0.5 + torch.rand(shape, generator=generator))).to(like.dtype)
    noise = torch.randn(shape, generator=generator)
    if name.endswith("e_score_correction_bias"):
        return 0.1 * noise
    if len(shape) == 1:  # a norm's weight
        return (1 + 0.1 * noise).to(like.dtype)
    if name.endswith("embed_tokens.weight"):
        return noise.to(like.dtype)
    return (noise * shape[-1] ** -0.5).to(like.dtype)


def write_target(folder: Path, config: dict[str, Any], seed: int = 0) -> None:
    """A whole target checkpoint folder, without a tokenizer."""
    model = KimiK25(KimiConfig.from_json(config, "config"), torch.bfloat16, torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for placement in model.placements():
        name = placement.name
        tensors[name] = random_tensor(name, placement.into, generator)
        if name.endswith("weight_packed"):
            rows, words = placement.into.shape
            shape = torch.tensor([rows, words * CODES_PER_WORD], dtype=torch.int32)
            tensors[name.replace("packed", "shape")] = shape
        elif name.endswith("mlp.gate.weight"):  # kept in float32 in memory, bfloat16 on disk
            tensors[name] = tensors[name].to(torch.bfloat16)
    write_checkpoint(folder, config, tensors.items(), SHARD_BYTES)
