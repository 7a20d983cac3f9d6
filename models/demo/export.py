"""TrainableKimi <-> a checkpoint folder in Kimi-K2.5's own form.

`language_model.` names, dense weights bfloat16, routed experts INT4 in compressed-tensors'
pack-quantized layout.

Shape suffixes: N outputs, K inputs, G groups of 32 inputs.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from ...kernels.int4_moe import pack_int4, unpack_int4
from ..checkpoint import SHARD_BYTES, write_checkpoint, write_json
from ..config import KimiConfig
from .corpus import SPECIAL
from .train_target import TrainableKimi, quantise

PREFIX = "language_model."
# what a fused parameter holds, in order
FUSED = ("gate_proj", "up_proj")
STACKED = {"expert_gate_up": FUSED, "expert_down": ("down_proj",)}


def checkpoint_weights(model: TrainableKimi) -> Iterator[tuple[str, Tensor]]:
    """Views of all weights by their names in the checkpoint, experts before quantisation."""
    for name, tensor in model.state_dict().items():
        full = PREFIX + (name if name.startswith("lm_head") else f"model.{name}")
        base, _, leaf = full.rpartition(".")
        if leaf in STACKED:
            parts = STACKED[leaf]
            for expert, fused in enumerate(tensor):
                for part, weight in zip(parts, fused.chunk(len(parts))):
                    yield f"{base}.experts.{expert}.{part}.weight", weight
        elif base.endswith("gate_up_proj"):
            for part, weight in zip(FUSED, tensor.chunk(2)):
                yield full.replace("gate_up_proj", part), weight
        else:
            yield full, tensor


def checkpoint_tensors(model: TrainableKimi) -> Iterator[tuple[str, Tensor]]:
    """What the files hold; each projection of an expert is three tensors."""
    for name, weight in checkpoint_weights(model):
        if ".experts." in name:
            code_NK, scale_NG = quantise(weight.cpu())
            yield f"{name}_packed", pack_int4(code_NK)
            yield f"{name}_scale", scale_NG
            yield f"{name}_shape", torch.tensor(weight.shape, dtype=torch.int32)
        else:
            is_bias = name.endswith("e_score_correction_bias")
            yield name, weight.to(torch.float32 if is_bias else torch.bfloat16)


def export_target(
    model: TrainableKimi, raw: dict[str, Any], tokenizer: Path | None, folder: Path
) -> None:
    """Write the checkpoint folder anew."""
    shutil.rmtree(folder, ignore_errors=True)
    write_checkpoint(folder, raw, checkpoint_tensors(model), SHARD_BYTES)
    ids = SPECIAL | {"eos_token_id": [SPECIAL["eos_token_id"]]}
    write_json(folder / "generation_config.json", ids)
    if tokenizer is not None:
        shutil.copy(tokenizer, folder / "tokenizer.model")


def load_target(folder: Path) -> TrainableKimi:
    """The trainable twin of an exported folder, experts dequantised.

    Quantising them again gives the same codes: the largest code of a group is always 7.
    """
    raw = json.loads((folder / "config.json").read_text())
    model = TrainableKimi(KimiConfig.from_json(raw, str(folder / "config.json")))
    stored = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
    for name, weight in checkpoint_weights(model):
        if ".experts." in name:
            packed, scale = stored[f"{name}_packed"], stored[f"{name}_scale"]
            weight.copy_(unpack_int4(packed, scale, torch.float32))
        else:
            weight.copy_(stored[name])
    return model
