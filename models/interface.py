"""What the engine and its models say to each other: a step in, logits and taps out.

Knows no model, no cache layout and no rule. Shape suffixes used in this file:
T tokens of this step, W window rows, L keys a token lists, V vocabulary, D the taps' joined
width, C cache row width.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from ..kernels.mla_attention import list_keys


class UserError(ValueError):
    """A wrong flag, file or config key: one line that names it, its value and the fix."""


@dataclass(frozen=True)
class Step:
    """Tokens to run in one forward pass, over a cache of `prefix` committed rows.

    The rows from `prefix` on are the *window*: not committed, seen only where `visible_TW` says
    so. Row w of the window is row `prefix + w` of the cache. A prompt chunk, one decoded token
    and a draft tree are all the same thing with another mask.
    """

    token_T: Tensor  # int64
    position_T: Tensor  # int64, where each token stands in the text
    slot_T: Tensor  # int64, the cache row that each token writes
    visible_TW: Tensor  # bool, which window rows each token attends to, itself included
    prefix: int  # committed rows, seen by all

    @staticmethod
    def chunk(token_T: Tensor, prefix: int) -> "Step":
        """Consecutive tokens of a text, each seeing all before it."""
        count = len(token_T)
        slot_T = torch.arange(prefix, prefix + count, device=token_T.device)
        visible_TW = torch.ones(count, count, dtype=torch.bool, device=token_T.device).tril()
        return Step(token_T, slot_T, slot_T, visible_TW, prefix)

    @cached_property
    def key_TL(self) -> Tensor:
        """The cache rows that each token attends to, in order of position; see `list_keys`."""
        return list_keys(self.visible_TW, self.prefix)

    @property
    def end(self) -> int:
        """One past the last cache row that any token of this step may see."""
        return self.prefix + self.visible_TW.shape[1]


@dataclass(frozen=True)
class StepOutput:
    """`logits_TV` float32; `taps_TD` the hidden states that the drafter feeds on, or None."""

    logits_TV: Tensor
    taps_TD: Tensor | None


class CacheRows(Protocol):
    """The two calls that a model makes on its cache (minispec/kv.py is the one there is)."""

    def write(self, layer: int, slot_T: Tensor, row_TC: Tensor) -> None:
        """Put one row per token of this step into `slot_T`."""

    def rows(self, layer: int, end: int) -> Tensor:
        """The first `end` rows of a layer, [end, C]."""


class Target(Protocol):
    """The model whose text is wanted."""

    vocab_size: int
    max_positions: int
    num_layers: int
    cache_width: int
    tap_boundaries: tuple[int, ...]

    def forward(self, step: Step, cache: CacheRows, last_only: bool = False) -> StepOutput:
        """Run a step. `last_only` keeps the logits of the last token alone (a prompt chunk)."""


@dataclass(frozen=True)
class Placement:
    """Where one checkpoint tensor goes: `into` is a view of a parameter, filled in place."""

    name: str
    into: Tensor


class Loadable(Protocol):
    """A module that can list where each tensor of its checkpoint belongs."""

    def placements(self) -> Iterator[Placement]:
        """One entry for every tensor that the checkpoint has to hold."""
