"""Writes random checkpoints in the real on-disk form: Kimi-K2.5 targets and EAGLE-3 heads.

For tests and benchmarks: real tensor names, real dtypes, packed INT4 experts, an index. The
weights are random but keep activations near unit size, so that logits are neither flat nor wild.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..kernels.int4_moe import CODES_PER_WORD, GROUP, pack_int4
from .config import QUANTIZATION, KimiConfig
from .eagle3 import Eagle3, Eagle3Config
from .kimi_k25 import KimiK25

SHARD_BYTES = 12 * 2**20


def target_config(**changes: Any) -> dict[str, Any]:
    """A small config.json in Kimi-K2.5's nested form; `changes` go into its text_config."""
    text = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "routed_scaling_factor": 2.0,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "kv_cache_scheme": None,
            "ignore": [
                "lm_head",
                "re:.*self_attn.*",
                "re:.*shared_experts.*",
                "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
            ],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {**QUANTIZATION, "observer": "minmax"},
                    "input_activations": None,
                    "output_activations": None,
                }
            },
        },
    }
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": "bfloat16",
        "text_config": {**text, **changes},
    }


def head_config(target: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A Llama-dialect EAGLE-3 head that fits `target`, with half of its vocabulary."""
    text = target["text_config"]
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": text["hidden_size"],
        "intermediate_size": 2 * text["hidden_size"],
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": text["rms_norm_eps"],
        "rope_theta": text["rope_theta"],
        "vocab_size": text["vocab_size"],
        "draft_vocab_size": text["vocab_size"] // 2,
        "max_position_embeddings": text["max_position_embeddings"],
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]},
    }
    return {**config, **changes}


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


def save_sharded(tensors: dict[str, Tensor], folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Shards with an index, in Hugging Face's naming."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if size + tensor.nbytes > shard_bytes and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.contiguous()
        size += tensor.nbytes
    files = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    for file, shard in zip(files, shards):
        save_file(shard, folder / file)
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {name: file for file, shard in zip(files, shards) for name in shard},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def write_target(folder: Path, config: dict[str, Any], seed: int = 0) -> None:
    """A whole target checkpoint folder, without a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
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
    save_sharded(tensors, folder)


def write_head(folder: Path, config: dict[str, Any], seed: int = 0) -> None:
    """A whole EAGLE-3 head folder; a reduced vocabulary takes every second target id."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    head = Eagle3(Eagle3Config.from_json(config, "config"), torch.bfloat16, own_embedding=False)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for placement in head.placements():
        if placement.name == "d2t":
            tensors["d2t"] = torch.arange(len(placement.into))
        else:
            tensors[placement.name] = random_tensor(placement.name, placement.into, generator)
    save_file(tensors, folder / "model.safetensors")
