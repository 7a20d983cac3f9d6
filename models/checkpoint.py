"""Writes checkpoints in the public on-disk form: Kimi-K2.5 targets and EAGLE-3 heads.

A config.json around a table of sizes, whose keys are config.json's own, and safetensors: one file,
or shards with an index in Hugging Face's naming. Tensors stream through: one shard is held at a
time, so that a checkpoint may be larger than the memory.
"""

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from .config import QUANTIZATION, REQUIRED_VALUES

SHARD_BYTES = 12_000_000
HEADER_BYTES = 256  # no tensor's entry in a file's header is longer
ONE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FILES = "model-{:05}-of-{:05}.safetensors"
K25_FILES = "model-{:05}-of-{:06}.safetensors"  # Kimi-K2.5 counts with six digits
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


def spread(sizes: Sequence[int], shards: int) -> list[int]:
    """How many consecutive tensors each of exactly `shards` files gets, about equal in bytes.

    `sizes` are the tensors' bytes. A tensor larger than its share fills a file alone, and the
    files after it share what is left. Raises ValueError if there are fewer tensors than files.
    """
    if not 0 < shards <= len(sizes):
        raise ValueError(f"{len(sizes)} tensors cannot fill {shards} files")
    lengths = []
    start, left = 0, sum(sizes)
    for after in reversed(range(shards)):  # files still to come
        share, used, end = left / (after + 1), 0, start
        while end < len(sizes) - after and (end == start or used + sizes[end] / 2 <= share):
            used += sizes[end]
            end += 1
        end = end if after else len(sizes)
        lengths.append(end - start)
        start, left = end, left - used
    return lengths


def group(
    tensors: Iterable[tuple[str, Tensor]], shard_bytes: int | None, lengths: Sequence[int] | None
) -> Iterator[dict[str, Tensor]]:
    """Shard after shard. Whoever takes one empties it before asking for the next."""
    if lengths is not None:
        iterator = iter(tensors)
        yield from (dict(islice(iterator, length)) for length in lengths)
        assert next(iterator, None) is None, "more tensors than the lengths say"
        return
    shard: dict[str, Tensor] = {}
    used = 0
    for name, tensor in tensors:
        size = tensor.nbytes + HEADER_BYTES
        if shard_bytes is not None and shard and used + size > shard_bytes:
            yield shard
            used = 0
            assert not shard
        used += size
        shard[name] = tensor
        del tensor  # while the next one is made, only the shard holds it
    yield shard


def storable(tensor: Tensor) -> Tensor:
    """On the host and in a storage of its own: safetensors refuses views of a fused parameter."""
    tensor = tensor.detach().cpu()
    if tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def write_checkpoint(
    folder: Path,
    config: dict[str, Any],
    tensors: Iterable[tuple[str, Tensor]],
    shard_bytes: int | None = None,
    lengths: Sequence[int] | None = None,
    files: str = FILES,
) -> None:
    """config.json and one model.safetensors, or numbered files and their index.

    Files stay below `shard_bytes` (or hold one larger tensor), or hold as many tensors each as
    `lengths` says (see `spread`); `files` is a format of a file's number and their count. All
    are written in a temporary folder inside `folder` and moved when the last one is whole: an
    exception, also one of the iterable's, leaves nothing behind.
    """
    folder.mkdir(parents=True, exist_ok=True)
    total = 0
    held: list[list[str]] = []  # the names in each file
    with tempfile.TemporaryDirectory(dir=folder, prefix=".partial-") as name:
        partial = Path(name)
        for shard in group(tensors, shard_bytes, lengths):
            for key in shard:
                shard[key] = storable(shard[key])
            total += sum(tensor.nbytes for tensor in shard.values())
            save_file(shard, partial / str(len(held)), metadata={"format": "pt"})
            held.append(list(shard))
            shard.clear()
        names = [ONE_FILE]
        if shard_bytes is not None or lengths is not None:
            names = [files.format(number, len(held)) for number in range(1, len(held) + 1)]
            file_of = {key: file for file, keys in zip(names, held) for key in keys}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
            write_json(partial / INDEX_FILE, index)
            os.replace(partial / INDEX_FILE, folder / INDEX_FILE)
        for number, file in enumerate(names):
            os.replace(partial / str(number), folder / file)
        write_json(partial / "config.json", config)
        os.replace(partial / "config.json", folder / "config.json")
