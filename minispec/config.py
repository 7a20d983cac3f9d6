"""Settings of an engine, and the one way by which a name becomes a class."""

import importlib
from dataclasses import dataclass, field
from typing import Any

import torch

from .drafting import TreeConfig
from .models.interface import UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SEAMS = {  # what a class must have to be of use behind a flag; the Protocols say it in full
    "--proposer": ("needs_draft_model", "from_setup", "reset", "commit", "expand"),
    "--tree": ("uses", "max_nodes", "max_drafted", "build"),
    "--verify": ("name", "lossless", "greedy_only", "accept"),
}


@dataclass(frozen=True)
class EngineConfig:
    """What is loaded and how it runs.

    `proposer` None is plain decoding. `dtype` "auto" is bfloat16 on a GPU; on a CPU it is float32
    for the dense weights and bfloat16 for the activations inside the INT4 experts, the mixture
    that CPUs are fast at. `context` None means what the model's config allows. `aux_layers` are
    the target's layers whose inputs the head reads; None means those of the head's config.
    """

    model: str
    draft_model: str | None = None
    proposer: str | None = None
    tree: str = "eagle2"
    tree_config: TreeConfig = field(default_factory=TreeConfig)
    device: str = "auto"
    dtype: str = "auto"
    context: int | None = None
    aux_layers: tuple[int, ...] | None = None


def load(flag: str, name: str, known: dict[str, str]) -> Any:
    """A built-in by its name, or anyone's class as `module:Class`."""
    dotted = known.get(name, name)
    module_name, _, class_name = dotted.partition(":")
    if not class_name:
        raise UserError(f"{flag} {name}: unknown; known are {', '.join(known)}, or 'module:Class'")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, SyntaxError, TypeError, ValueError) as error:
        raise UserError(f"{flag} {name}: cannot be imported ({error}); check the name") from None
    lacking = [attribute for attribute in SEAMS[flag] if not hasattr(found, attribute)]
    if lacking:
        raise UserError(f"{flag} {name}: lacks {', '.join(lacking)}; it cannot serve as {flag}")
    return found


def pick_device(name: str) -> torch.device:
    """'auto' is the GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise UserError(f"--device {name}: unknown; known are auto, cpu, cuda, cuda:N")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"--device {name}: not a device; write cpu, cuda or cuda:N") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"--device {name}: this machine has {torch.cuda.device_count()} CUDA GPU(s); "
            "use --device cpu or auto"
        )
    return device


def pick_dtypes(name: str, device: torch.device) -> tuple[torch.dtype, torch.dtype]:
    """-> (dense weights and activations, activations inside the INT4 experts)."""
    if name == "auto":
        dense = torch.float32 if device.type == "cpu" else torch.bfloat16
        return dense, torch.bfloat16
    if name not in DTYPES:
        raise UserError(f"--dtype {name}: unknown; known are auto, {', '.join(DTYPES)}")
    return DTYPES[name], DTYPES[name]
