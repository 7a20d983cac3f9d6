"""Reading checkpoints: safetensors files into parameters, every tensor accounted for.

A model lists its `placements()`; this file walks them. Nothing is unpickled and no code of a
checkpoint runs. Knows no architecture beyond which tensor names it may skip.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .config import KimiConfig
from .interface import Placement, UserError
from .kimi_k25 import KimiK25

# Kimi-K2.5 sees pictures; minispec does not. weight_shape repeats what the config says.
SKIPPED_PREFIXES = ("vision_tower.", "mm_projector.")
SKIPPED_SUFFIXES = (".weight_shape", ".rotary_emb.inv_freq")
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or one line that says what is wrong with it."""
    if not path.is_file():
        raise UserError(f"{path}: file is missing; a model folder holds config.json and weights")
    try:
        content = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds no JSON object")
    return content


class Checkpoint:
    """A folder with config.json and one or many safetensors files."""

    def __init__(self, folder: str | Path, flag: str) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise UserError(f"{flag} {folder}: no such folder; give the folder of a checkpoint")
        if not any(self.folder.iterdir()):
            raise UserError(f"{flag} {folder}: the folder is empty; put config.json and weights in")
        self.config_path = self.folder / "config.json"
        self.config = read_json(self.config_path)
        self.file_of = self._index()

    def _index(self) -> dict[str, Path]:
        """Tensor name -> file, from the index if there is one, else from the files."""
        index_path = self.folder / "model.safetensors.index.json"
        if index_path.is_file():
            names = read_json(index_path).get("weight_map")
            if not isinstance(names, dict):
                raise UserError(f"{index_path}: key 'weight_map' is missing")
            if not all(isinstance(file, str) for file in names.values()):
                raise UserError(f"{index_path}: key 'weight_map' must map names to file names")
            for file in sorted(set(names.values())):
                if file != Path(file).name or not (self.folder / file).is_file():
                    raise UserError(f"{index_path}: names {file}, which is not in the folder")
            return {name: self.folder / file for name, file in names.items()}
        files = sorted(self.folder.glob("*.safetensors"))
        if not files:
            raise UserError(f"{self.folder}: holds no .safetensors file; no other format is read")
        found: dict[str, Path] = {}
        for path in files:
            for name in list(self._open(path).keys()):
                if name in found:
                    raise UserError(f"{path}: tensor {name} is in {found[name].name} already")
                found[name] = path
        return found

    @staticmethod
    def _open(path: Path) -> Any:
        try:
            return safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path}: not a whole safetensors file ({error})") from None

    def load(self, placements: Iterable[Placement], skipped: tuple[str, ...] = ()) -> None:
        """Fill every placement; raise UserError if a tensor is missing, misshapen or unused."""
        wanted = {placement.name: placement.into for placement in placements}
        present = {name for name in self.file_of if not is_skipped(name, skipped)}
        refuse(self.folder, "is missing", wanted.keys() - present)
        refuse(self.folder, "has no place in the model of config.json", present - wanted.keys())
        by_file: dict[Path, list[str]] = {}
        for name in wanted:
            by_file.setdefault(self.file_of[name], []).append(name)
        for path, names in sorted(by_file.items()):
            with self._open(path) as tensors:
                held = set(tensors.keys())
                for name in names:
                    if name not in held:
                        raise UserError(f"{path}: the index puts tensor {name} here; it is not")
                    self._fill(wanted[name], tensors.get_tensor(name), f"{path}: tensor {name}")

    @staticmethod
    def _fill(into: Tensor, tensor: Tensor, where: str) -> None:
        if tensor.shape != into.shape:
            raise UserError(
                f"{where} has shape {list(tensor.shape)}; the config asks for {list(into.shape)}"
            )
        fits = FLOATS if into.is_floating_point() else (into.dtype,)
        if tensor.dtype not in fits:
            raise UserError(f"{where} is {tensor.dtype}; {into.dtype} was expected")
        with torch.no_grad():
            into.copy_(tensor)


def is_skipped(name: str, also: tuple[str, ...]) -> bool:
    """Whether a tensor is left in the file by a named rule."""
    return name.startswith(SKIPPED_PREFIXES) or name.endswith(SKIPPED_SUFFIXES) or name in also


def refuse(folder: Path, what: str, names: set[str]) -> None:
    """Raise if a set of tensor names that should be empty is not."""
    if names:
        first = min(names)
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        raise UserError(f"{folder}: tensor {first} {what}{more}")


def load_target(
    folder: str | Path,
    device: torch.device,
    dtype: torch.dtype,
    expert_dtype: torch.dtype,
    context: int | None,
) -> KimiK25:
    """A Kimi-K2.5 checkpoint folder -> model ready to run `context` positions."""
    checkpoint = Checkpoint(folder, "--model")
    config = KimiConfig.from_json(checkpoint.config, str(checkpoint.config_path))
    limit = config.max_position_embeddings
    if context is not None and context > limit:
        raise UserError(
            f"--context {context}: {folder} has positions for {limit} only "
            "(max_position_embeddings); ask for fewer"
        )
    with torch.device(device):
        model = KimiK25(config, dtype, expert_dtype)
    checkpoint.load(model.placements())
    model.finish_loading(context or limit)
    return model
