"""TrainableKimi <-> a checkpoint folder in Kimi-K2.5's own form.

config.json with a nested text_config, `language_model.` names, dense weights bfloat16, routed
experts INT4 in compressed-tensors' pack-quantized layout, safetensors shards with an index.

Shape suffixes: E experts, N outputs, G groups of 32 inputs, W packed words.
"""

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ...kernels.int4_moe import GROUP, pack_int4, unpack_int4
from ..config import KimiConfig
from .train_target import TrainableKimi, quantise

SHARD_BYTES = 12_000_000
PREFIX = "language_model."
# what a fused parameter holds, in order
FUSED = ("gate_proj", "up_proj")


def config_json(sizes: dict[str, Any], bos: int, eos: int, pad: int) -> dict[str, Any]:
    """The whole config.json around a table of sizes (text_config's own keys)."""
    special = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad}
    weights = {
        "actorder": None, "block_structure": None, "dynamic": False, "group_size": GROUP,
        "num_bits": 4, "observer": "minmax", "observer_kwargs": {}, "strategy": "group",
        "symmetric": True, "type": "int",
    }
    group = {
        "input_activations": None, "output_activations": None, "targets": ["Linear"],
        "weights": weights,
    }
    quantization = {
        "config_groups": {"group_0": group},
        "format": "pack-quantized",
        "ignore": [
            "lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
            r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        ],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }
    text = {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", **sizes,
        "num_key_value_heads": sizes["num_attention_heads"], "n_group": 1, "topk_group": 1,
        "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "moe_layer_freq": 1, "num_nextn_predict_layers": 0, "ep_size": 1, "hidden_act": "silu",
        "attention_bias": False, "tie_word_embeddings": False, "dtype": "bfloat16", **special,
        "quantization_config": quantization,
    }
    return {
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25",
        "dtype": "bfloat16", "tie_word_embeddings": False, **special, "text_config": text,
    }


def packed(stem: str, weight_NK: Tensor) -> Iterator[tuple[str, Tensor]]:
    """One expert projection as its three checkpoint tensors."""
    code_NK, scale_NG = quantise(weight_NK)
    yield f"{stem}.weight_packed", pack_int4(code_NK)
    yield f"{stem}.weight_scale", scale_NG
    yield f"{stem}.weight_shape", torch.tensor(weight_NK.shape, dtype=torch.int32)


def checkpoint_tensors(model: TrainableKimi) -> Iterator[tuple[str, Tensor]]:
    """Every tensor under its name in the checkpoint."""
    for name, tensor in model.state_dict().items():
        stem, _, leaf = name.rpartition(".")
        full = PREFIX + (name if name.startswith("lm_head") else f"model.{name}")
        base = full.removesuffix(leaf)
        if leaf == "expert_gate_up":
            for expert, fused in enumerate(tensor.cpu()):
                for part, weight in zip(FUSED, fused.chunk(2)):
                    yield from packed(f"{base}experts.{expert}.{part}", weight)
        elif leaf == "expert_down":
            for expert, weight in enumerate(tensor.cpu()):
                yield from packed(f"{base}experts.{expert}.down_proj", weight)
        elif stem.endswith("gate_up_proj"):
            for part, weight in zip(FUSED, tensor.chunk(2)):
                yield full.replace("gate_up_proj", part), weight.to(torch.bfloat16)
        elif leaf == "e_score_correction_bias":
            yield full, tensor.float()
        else:
            yield full, tensor.to(torch.bfloat16)


def write_shards(
    tensors: Iterable[tuple[str, Tensor]], folder: Path, limit: int, with_index: bool
) -> None:
    """Fill files below `limit` bytes; the index says which tensor is where."""
    shards: list[dict[str, Tensor]] = [{}]
    room, total = limit, 0
    for name, tensor in tensors:
        size = tensor.nbytes + 256  # its entry in the header included
        if size > room and shards[-1]:
            shards.append({})
            room = limit
        # cloned: views of one fused parameter share storage, which safetensors refuses
        shards[-1][name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        room -= size
        total += tensor.nbytes
    where = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(shard, file)
    if with_index:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        write_json(folder / "model.safetensors.index.json", index)


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def export_target(
    model: TrainableKimi, raw: dict[str, Any], tokenizer: Path | None, folder: Path
) -> None:
    """Write the checkpoint folder anew."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_shards(checkpoint_tensors(model), folder, SHARD_BYTES, with_index=True)
    write_json(folder / "config.json", raw)
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {key: raw["text_config"][key] for key in keys}
    write_json(folder / "generation_config.json", ids | {"eos_token_id": [ids["eos_token_id"]]})
    if tokenizer is not None:
        shutil.copy(tokenizer, folder / "tokenizer.model")


def load_target(folder: Path) -> TrainableKimi:
    """The trainable twin of an exported folder, experts dequantised.

    Quantising them again gives the same codes: the largest code of a group is always 7.
    """
    raw = json.loads((folder / "config.json").read_text())
    model = TrainableKimi(KimiConfig.from_json(raw, str(folder / "config.json")))
    stored = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}

    def expert(base: str, number: int, part: str) -> Tensor:
        stem = f"{base}experts.{number}.{part}.weight_"
        return unpack_int4(stored[stem + "packed"], stored[stem + "scale"], torch.float32)

    for name, into in model.state_dict().items():  # views of the parameters
        stem, _, leaf = name.rpartition(".")
        full = PREFIX + (name if name.startswith("lm_head") else f"model.{name}")
        base = full.removesuffix(leaf)
        if leaf in ("expert_gate_up", "expert_down"):
            parts = FUSED if leaf == "expert_gate_up" else ("down_proj",)
            for number, weight in enumerate(into):
                weight.copy_(torch.cat([expert(base, number, part) for part in parts]))
        elif stem.endswith("gate_up_proj"):
            into.copy_(torch.cat([stored[full.replace("gate_up_proj", part)] for part in FUSED]))
        else:
            into.copy_(stored[full])
    return model
