"""Writes checkpoints in the public on-disk form: Kimi-K2.5 targets and EAGLE-3 heads.

A config.json around a table of sizes, whose keys are config.json's own, and safetensors: one file,
or shards with an index in Hugging Face's naming.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from .config import QUANTIZATION, REQUIRED_VALUES

SHARD_BYTES = 12_000_000
HEADER_BYTES = 256  # no tensor's entry in a file's header is longer
INT4_EXPERTS = {
    "quant_method": "compressed-tensors", "format": "pack-quantized",
    "quantization_status": "compressed", "kv_cache_scheme": None,
    "ignore": [
        "lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    ],
    "config_groups": {"group_0": {
        "targets": ["Linear"], "input_activations": None, "output_activations": None,
        "weights": {
            **QUANTIZATION, "observer": "minmax", "observer_kwargs": {}, "block_structure": None,
        },
    }},
}  # fmt: skip
# public files leave rope_interleave to its default
COMPUTED = {key: value for key, value in REQUIRED_VALUES.items() if key != "rope_interleave"}


def target_json(sizes: dict[str, Any], special: dict[str, int]) -> dict[str, Any]:
    """A target's config.json in Kimi-K2.5's nested form; `sizes` win over all that is set here."""
    text = {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "dtype": "bfloat16",
        **COMPUTED, "ep_size": 1, "num_key_value_heads": sizes["num_attention_heads"],
        "quantization_config": INT4_EXPERTS, **special, **sizes,
    }  # fmt: skip
    return {
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25",
        "dtype": "bfloat16", "tie_word_embeddings": False, **special, "text_config": text,
    }  # fmt: skip


def head_json(
    sizes: dict[str, Any], aux_layer_ids: tuple[int, ...], special: dict[str, int]
) -> dict[str, Any]:
    """A head's config.json in the Llama dialect."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama",
        "num_hidden_layers": 1, "hidden_act": "silu", "attention_bias": False,
        "tie_word_embeddings": False, "dtype": "bfloat16", **special, **sizes,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(aux_layer_ids), "use_aux_hidden_state": True,
        },
    }  # fmt: skip


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def write_checkpoint(
    folder: Path,
    config: dict[str, Any],
    tensors: Iterable[tuple[str, Tensor]],
    shard_bytes: int | None = None,
) -> None:
    """config.json and one model.safetensors, or files below `shard_bytes` and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    shards: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, tensor in tensors:
        size = tensor.nbytes + HEADER_BYTES
        if shard_bytes is not None and shards[-1] and used + size > shard_bytes:
            shards.append({})
            used = 0
        used += size
        # cloned: views of one fused parameter share storage, which safetensors refuses
        shards[-1][name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    file_of: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        file = "model.safetensors" if shard_bytes is None else file
        save_file(shard, folder / file, metadata={"format": "pt"})
        file_of |= dict.fromkeys(shard, file)
    if shard_bytes is not None:
        total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
        write_json(folder / "model.safetensors.index.json", index)
