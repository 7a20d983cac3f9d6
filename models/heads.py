"""From the folder of an EAGLE-3 head to a head that is wired to its target.

Knows by which names a head's tensors go, which of them a file may leave out, and what the head
then shares with the target. All that config.json and the tensor names can say wrong is said by
`check_head`, before any weight is read.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .config import KimiConfig
from .eagle3 import Eagle3, check_map
from .eagle3_config import Eagle3Config, choose_taps
from .interface import Placement, UserError
from .kimi_k25 import KimiK25
from .weights import Checkpoint

PREFIXES = ("", "model.")
LAYER_NAMES = ("midlayer.", "layers.0.")
SHAREABLE = ("embed_tokens.weight", "lm_head.weight")
LEGACY_NORMS = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")  # of fc_norm.0, .1 and .2


def aliases(name: str) -> list[str]:
    """Every name by which public files call the tensor that `Eagle3.placements` calls `name`."""
    names = [name]
    if name.startswith(LAYER_NAMES[0]):
        names = [layer + name.removeprefix(LAYER_NAMES[0]) for layer in LAYER_NAMES]
    for index, legacy in enumerate(LEGACY_NORMS):
        if name == f"fc_norm.{index}.weight":
            names.append(f"{legacy}.weight")
    return [prefix + alias for alias in names for prefix in PREFIXES]


@dataclass(frozen=True)
class CheckedHead:
    """A head folder whose config fits the target; its weights are still on disk."""

    checkpoint: Checkpoint
    config: Eagle3Config
    boundaries: tuple[int, ...]  # the taps, as inputs of layers
    taps_from: str  # what said so

    def name_of(self, name: str) -> str | None:
        """What the file calls a tensor; None if it has none."""
        found = [alias for alias in aliases(name) if alias in self.checkpoint.file_of]
        return found[0] if found else None

    def has(self, name: str) -> bool:
        return self.name_of(name) is not None

    def renamed(self, placement: Placement) -> Placement:
        """The placement under the file's name; under the usual one if the file lacks it."""
        return Placement(self.name_of(placement.name) or placement.name, placement.into)

    def notes(self) -> list[str]:
        """One line each: the kind of head, what is whose, the taps."""
        config = self.config
        norm = self.name_of("midlayer.hidden_norm.weight") or ""
        names = norm.removesuffix("hidden_norm.weight") + "*"
        if (self.name_of("fc_norm.0.weight") or "").endswith(f"{LEGACY_NORMS[0]}.weight"):
            names += " and aux_norm_*"
        source = {True: "its own", False: "the target's"}
        ids = f"{config.draft_vocab_size} of {config.vocab_size} ids"
        vocabulary = f"{ids} by d2t" if self.has("d2t") else f"all {config.vocab_size} ids"
        return [
            f"drafter: {config.describe()}, tensors {names}",
            f"drafter: embed_tokens {source[self.has(SHAREABLE[0])]}, "
            f"lm_head {source[self.has(SHAREABLE[1])]}, {vocabulary}",
            f"drafter: taps before layers {', '.join(map(str, self.boundaries))} "
            f"({self.taps_from})",
        ]


def check_head(
    folder: str | Path, target: KimiConfig, aux_layers: tuple[int, ...] | None = None
) -> CheckedHead:
    """All that can be checked without weights; raises UserError where head and target differ.

    `aux_layers` are --aux-layers: the tapped layers, by their inputs.
    """
    checkpoint = Checkpoint(folder, "--draft-model")
    where = str(checkpoint.config_path)
    config = Eagle3Config.from_json(checkpoint.config, where)
    taps = choose_taps(config, aux_layers, target.num_hidden_layers, where)
    head = CheckedHead(checkpoint, config, *taps)
    width, vocab = target.hidden_size, target.vocab_size
    if config.target_hidden_size != width:
        raise UserError(
            f"{where}: the head reads target states of width {config.target_hidden_size}; "
            f"the target's hidden_size is {width}"
        )
    for name in SHAREABLE:
        if not head.has(name) and config.hidden_size != width:
            raise UserError(
                f"{where}: hidden_size is {config.hidden_size} and the head has no {name}; "
                f"it cannot share the target's, whose width is {width}"
            )
    if config.vocab_size != vocab:
        raise UserError(
            f"{where}: vocab_size is {config.vocab_size}; the target's vocabulary has {vocab}"
        )
    if config.draft_vocab_size < vocab:
        for name, why in (
            ("d2t", "to map draft ids to target ids"),
            ("lm_head.weight", "and the target's is for the full vocabulary"),
        ):
            if not head.has(name):
                raise UserError(
                    f"{where}: draft_vocab_size is {config.draft_vocab_size} of {vocab}, but the "
                    f"head has no {name} tensor {why}"
                )
    return head


def load_head(
    folder: str | Path,
    target: KimiK25,
    device: torch.device,
    dtype: torch.dtype,
    context: int,
    aux_layers: tuple[int, ...] | None = None,
    note: Callable[[str], None] = lambda line: None,
) -> Eagle3:
    """An EAGLE-3 head folder -> head wired to `target`, whose taps it also sets.

    What the file holds is used, what it lacks is shared from the target; `note` is told which.
    Raises UserError as `check_head` does, for a d2t that is no map, for weights not finite.
    """
    checked = check_head(folder, target.config, aux_layers)
    config = checked.config
    with torch.device(device):
        embedding, lm_head, mapped = map(checked.has, (*SHAREABLE, "d2t"))
        head = Eagle3(config, dtype, embedding, lm_head, mapped)
        t2d_V = torch.zeros(config.vocab_size, dtype=torch.bool)
    placements = [*head.placements(), *([Placement("t2d", t2d_V)] if checked.has("t2d") else [])]
    placements = [checked.renamed(placement) for placement in placements]
    checked.checkpoint.load(placements)
    refuse_not_finite(placements, checked.checkpoint)
    if checked.has("t2d") and head.d2t is not None:
        check_map(head.d2t, config.vocab_size, t2d_V)
    head.finish_loading(target.embed_tokens, context, target.lm_head)
    target.tap_boundaries = checked.boundaries
    for line in checked.notes():
        note(line)
    return head


def refuse_not_finite(placements: list[Placement], checkpoint: Checkpoint) -> None:
    """Raise UserError for the first tensor that holds NaN or infinity."""

    def finite(tensor: Tensor) -> bool:
        # the sum costs no memory; only a sum that overflowed needs the second look
        return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())

    for name, tensor in ((placement.name, placement.into) for placement in placements):
        if tensor.is_floating_point() and not finite(tensor):
            raise UserError(
                f"{checkpoint.file_of[name]}: tensor {name} holds NaN or infinity; the head's "
                "file is broken: fetch it again"
            )
