"""Writes random EAGLE-3 heads in every public form: dialects, names, and tensors left out.

For tests and benchmarks, as models/synthetic.py, whose targets these heads fit.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .checkpoint import head_json, write_checkpoint
from .eagle3 import Eagle3
from .eagle3_config import LATENT, LATENT_TYPES, SPECULATORS, Eagle3Config
from .heads import LEGACY_NORMS
from .synthetic import SPECIAL, random_tensor

TAPS = (2, 3, 4)  # inputs of layers, for the small target's four
SHARED = ("hidden_size", "rms_norm_eps", "rope_theta", "vocab_size", "max_position_embeddings")
LATENT_SHARED = (
    "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    "num_attention_heads", "rope_scaling",
)  # fmt: skip


def head_config(target: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A Llama-dialect EAGLE-3 head that fits `target`, with half of its vocabulary."""
    text = target["text_config"]
    sizes = {key: text[key] for key in SHARED} | {
        "intermediate_size": 2 * text["hidden_size"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "draft_vocab_size": text["vocab_size"] // 2,
    }
    return head_json(sizes, TAPS, SPECIAL) | changes


def latent_head_config(target: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A head with the target's own kind of attention, full vocabulary, ModelOpt's keys."""
    text = target["text_config"]
    sizes = {key: text[key] for key in (*SHARED, *LATENT_SHARED)} | {
        "intermediate_size": 2 * text["hidden_size"],
        "num_key_value_heads": text["num_attention_heads"],
        "architectures": [LATENT[0]],
        "model_type": LATENT_TYPES[0],
        "draft_vocab_size": text["vocab_size"],
    }
    config = head_json(sizes, TAPS, SPECIAL)
    config["eagle_config"] |= {
        "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
        "use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": None,
    }  # fmt: skip
    return config | changes


def speculators_config(target: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The nested form of a Llama head; `changes` go to the top level."""
    layer = head_config(target)
    ids = layer.pop("eagle_config")["eagle_aux_hidden_state_layer_ids"]
    outer = {
        "architectures": [SPECULATORS], "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0", "target_hidden_size": None, "tie_word_embeddings": False,
        "draft_vocab_size": layer.pop("draft_vocab_size"), "norm_before_residual": True,
        "norm_before_fc": False, "eagle_aux_hidden_state_layer_ids": ids,
        "speculators_config": {"algorithm": "eagle3"}, "transformer_layer_config": layer,
    }  # fmt: skip
    return outer | changes


def draft_ids(count: int, vocab_size: int) -> Tensor:
    """A draft vocabulary as real ones are: a run of low ids, then scattered ones to the last."""
    run = count // 2
    scattered = torch.linspace(vocab_size - 1, run, count - run + 1, dtype=torch.float64)
    return torch.cat([torch.arange(run), scattered[:-1].round().long().flip(0)])


def write_head(
    folder: Path,
    config: dict[str, Any],
    seed: int = 0,
    layer: str = "midlayer.",
    prefix: str = "",
    embedding: bool = False,
    lm_head: bool = True,
    t2d: bool = False,
    legacy_norms: bool = False,
) -> None:
    """A whole EAGLE-3 head folder.

    `layer` and `prefix` are how the file names its tensors, `embedding`, `lm_head` and `t2d` what
    it holds besides the rest, `legacy_norms` the older names of EAGLE-3.1's norms.
    """
    parsed = Eagle3Config.from_json(config, "config")
    head = Eagle3(parsed, torch.bfloat16, own_embedding=embedding, own_lm_head=lm_head)
    generator = torch.Generator().manual_seed(seed)
    id_U = draft_ids(parsed.draft_vocab_size, parsed.vocab_size)
    tensors = {}
    for placement in head.placements():
        name = placement.name
        if name.startswith("midlayer."):
            name = layer + name.removeprefix("midlayer.")
        elif legacy_norms and name.startswith("fc_norm."):
            name = f"{LEGACY_NORMS[int(name.split('.')[1])]}.weight"
        if name == "d2t":
            tensors[prefix + name] = id_U - torch.arange(len(id_U))
        else:
            tensors[prefix + name] = random_tensor(name, placement.into, generator)
    if t2d:
        t2d_V = torch.zeros(parsed.vocab_size, dtype=torch.bool)
        t2d_V[id_U] = True
        tensors[f"{prefix}t2d"] = t2d_V
    write_checkpoint(folder, config, tensors.items())
