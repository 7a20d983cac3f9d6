"""Writes random Kimi-K2 targets in the real on-disk form; synthetic_heads.py their heads.

For tests and benchmarks, at any size: real tensor names, real dtypes, packed INT4 experts, an
index. The weights are random but keep activations near unit size, so that logits are neither flat
nor wild. A tensor of more than BLOCK values is one random block, repeated from a random place on:
drawing every value of a large checkpoint would take minutes.
"""

import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..kernels.int4_moe import CODES_PER_WORD, GROUP, pack_int4
from .checkpoint import FILES, INT4_EXPERTS, SHARD_BYTES, spread, target_json, write_checkpoint
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


# The vision part of Kimi-K2.5, which minispec skips: real names, tiny widths.
VISION: dict[str, Any] = {
    "vt_hidden_size": 32, "vt_intermediate_size": 64, "vt_num_hidden_layers": 2, "patch_size": 14,
    "vt_num_attention_heads": 4, "init_pos_emb_height": 8, "init_pos_emb_width": 8,
    "merge_kernel_size": [2, 2],
}  # fmt: skip
# Kimi-K2.5's own widths; how many layers, experts and words is full_width_config's choice.
FULL_WIDTHS: dict[str, Any] = {
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_attention_heads": 64, "num_experts_per_tok": 8, "n_shared_experts": 1,
    "routed_scaling_factor": 2.827, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "rope_theta": 50000.0,
    "rope_scaling": {"type": "yarn", **asdict(RopeScaling(64.0, 4096, 32.0, 1.0))},
}  # fmt: skip
FORMS = ("k2.5", "k2-thinking", "bf16")
BLOCK = 2**18


def target_config(form: str = "k2.5", **changes: Any) -> dict[str, Any]:
    """A small target's config.json; `changes` go into the text model's part of it.

    'k2.5' nests that part and has a vision tower, 'k2-thinking' is flat, and 'bf16' is flat with
    experts that are not quantized.
    """
    if form not in FORMS:
        raise ValueError(f"form {form!r} is not one of {', '.join(FORMS)}")
    nested = target_json(SIZES | changes, SPECIAL)
    if form == "k2.5":
        return nested | {"vision_config": VISION}
    text = nested["text_config"]
    if form == "bf16":
        del text["quantization_config"]
        text["model_type"] = "deepseek_v3"
    return text


def full_width_config(gib: float, form: str = "k2.5") -> dict[str, Any]:
    """Kimi-K2.5's widths, with layers and experts for about `gib` GiB of tensors.

    One dense layer from 4 GiB on, MoE layers of at most 384 experts, and a vocabulary of 8192, so
    that the routed experts are most of it. Raises ValueError if 8 experts do not fit.
    """
    sizes = FULL_WIDTHS | {"vocab_size": 8192, "first_k_dense_replace": int(gib >= 4)}

    def config(moe_layers: int, experts: int) -> dict[str, Any]:
        layers = sizes["first_k_dense_replace"] + moe_layers
        return target_config(form, **sizes, num_hidden_layers=layers, n_routed_experts=experts)

    def count(moe_layers: int, experts: int) -> int:
        return sum(like.nbytes for like in list_tensors(config(moe_layers, experts)).values())

    least = count(1, 8)
    expert = (count(1, 16) - least) // 8
    layer = count(2, 8) - least - 8 * expert  # a MoE layer but for its routed experts
    room = gib * 2**30 - (least - layer - 8 * expert)  # for MoE layers
    layers = max(1, round(0.5 + room / (layer + 384 * expert)))
    experts = min(384, round((room / layers - layer) / expert))
    if experts < sizes["num_experts_per_tok"]:
        raise ValueError(
            f"{gib} GiB is too small for Kimi-K2.5's widths; {least} bytes is the least"
        )
    return config(layers, experts)


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


def vision_tensors(vision: dict[str, Any], text_width: int) -> Iterator[tuple[str, Tensor]]:
    """Names and shapes of MoonViT and the projector: 335 tensors for 27 blocks."""
    width, inner, patch = (
        vision[key] for key in ("vt_hidden_size", "vt_intermediate_size", "patch_size")
    )
    merged = width * vision["merge_kernel_size"][0] * vision["merge_kernel_size"][1]
    grid = (vision["init_pos_emb_height"], vision["init_pos_emb_width"], width)
    modules: dict[str, tuple[int, ...]] = {
        "vision_tower.patch_embed.proj": (width, 3, patch, patch)
    }
    for block in range(vision["vt_num_hidden_layers"]):
        modules |= {
            f"vision_tower.encoder.blocks.{block}.{name}": shape
            for name, shape in (
                ("norm0", (width,)), ("norm1", (width,)), ("wqkv", (3 * width, width)),
                ("wo", (width, width)), ("mlp.fc0", (inner, width)), ("mlp.fc1", (width, inner)),
            )
        }  # fmt: skip
    modules |= {
        "vision_tower.encoder.final_layernorm": (width,), "mm_projector.pre_norm": (width,),
        "mm_projector.proj.0": (merged, merged), "mm_projector.proj.2": (text_width, merged),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"vision_tower.patch_embed.pos_emb.weight": grid}
    for name, shape in modules.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    for name, shape in shapes.items():
        yield name, torch.empty(shape, dtype=torch.bfloat16, device="meta")


def list_tensors(
    config: dict[str, Any], weight_shape: torch.dtype | None = torch.int32
) -> dict[str, Tensor]:
    """Every tensor of the checkpoint by name, on the meta device: dtypes and shapes of the disk.

    `weight_shape` is the dtype of the tensors of that name, or None for a checkpoint without.
    """
    text = config.get("text_config", config)
    # an unquantized checkpoint's names follow from those of the quantized one
    quantized = config | {"text_config": text} if "text_config" in config else dict(config)
    packed = "quantization_config" in text
    if not packed:
        quantized["quantization_config"] = INT4_EXPERTS
    with torch.device("meta"):
        model = KimiK25(KimiConfig.from_json(quantized, "config"), torch.bfloat16, torch.bfloat16)
        listed: dict[str, Tensor] = {}
        for placement in model.placements():
            name, like = placement.name, placement.into
            if name.endswith("weight_packed"):
                rows, words = like.shape
                dense = torch.empty(rows, words * CODES_PER_WORD, dtype=torch.bfloat16)
                if not packed:
                    name, like = name.removesuffix("_packed"), dense
                elif weight_shape is not None:
                    listed[name.replace("packed", "shape")] = torch.empty(2, dtype=weight_shape)
            elif name.endswith("weight_scale") and not packed:
                continue
            elif name.endswith("mlp.gate.weight"):  # kept in float32 in memory
                like = like.to(torch.bfloat16)
            listed[name] = like
        if "vision_config" in config:
            listed |= vision_tensors(config["vision_config"], text["hidden_size"])
    return listed


def draw(listed: dict[str, Tensor], seed: int) -> Iterator[tuple[str, Tensor]]:
    """A value for every tensor, one at a time; the same seed gives the same bytes."""
    generator = torch.Generator().manual_seed(seed)
    blocks: dict[str, Tensor] = {}  # one for all tensors whose names differ by numbers only
    for name, like in listed.items():
        if name.endswith("weight_shape"):
            rows, words = listed[name.replace("shape", "packed")].shape
            yield name, torch.tensor([rows, words * CODES_PER_WORD], dtype=like.dtype)
        elif like.numel() <= BLOCK:
            yield name, random_tensor(name, like, generator)
        else:
            kind = re.sub(r"\d+", "", name)
            if kind not in blocks:
                some = like[: -(-BLOCK // like.shape[-1])]
                # one value short of whole rows, so that the next repeat's rows are shifted
                blocks[kind] = random_tensor(name, some, generator).flatten()[1:]
            block = blocks[kind]
            start = int(torch.randint(len(block), (), generator=generator))
            whole, rest = divmod(like.numel(), len(block))
            block = block.roll(start)
            yield name, torch.cat([block] * whole + [block[:rest]]).view(like.shape)


def write_target(
    folder: Path,
    config: dict[str, Any],
    seed: int = 0,
    shards: int | None = None,
    weight_shape: torch.dtype | None = torch.int32,
    files: str = FILES,
) -> None:
    """A whole target checkpoint folder, without a tokenizer; the config says which form.

    `shards` is the exact number of files, else they are cut at SHARD_BYTES; `files` as in
    `write_checkpoint`, `weight_shape` as in `list_tensors`. Holds one file's tensors at a time.
    """
    listed = list_tensors(config, weight_shape)
    lengths = spread([like.nbytes for like in listed.values()], shards) if shards else None
    limit = None if shards else SHARD_BYTES
    write_checkpoint(folder, config, draw(listed, seed), limit, lengths, files)
