"""Drafting: proposers say which tokens may follow, builders decide the tree's shape.

Both are seams: a class in a file here or in any module, chosen by `--proposer module:Class` or
`--tree module:Class`. Shape suffixes: T tokens, D the taps' joined width, F nodes, K children.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..models.interface import UserError
from ..models.kimi_k25 import KimiK25
from ..tree import DraftTree


@dataclass(frozen=True)
class TreeConfig:
    """Settings of the tree shapes; each shape names those that it `uses`."""

    num_steps: int = 4  # draft steps: the deepest node
    topk: int = 3  # children tried under each node
    num_draft_nodes: int = 8  # nodes verified, the root counted
    static_tree: str | None = None  # rank paths, or a file with them

    def __post_init__(self) -> None:
        bounds = {"num_steps": (1, 64), "topk": (1, 64), "num_draft_nodes": (2, 1024)}
        for name, (least, most) in bounds.items():
            if not least <= getattr(self, name) <= most:
                flag = "--" + name.replace("_", "-")
                raise UserError(f"{flag} {getattr(self, name)}: must be from {least} to {most}")


@dataclass(frozen=True)
class DraftSetup:
    """What a proposer may build itself from."""

    target: KimiK25
    draft_model: str | None  # a checkpoint folder
    device: torch.device
    dtype: torch.dtype
    context: int  # positions that the text can have
    window: int  # the most nodes that the tree shape expands in one round
    aux_layers: tuple[int, ...] | None = None  # layers whose inputs are tapped; None: the head's
    note: Callable[[str], None] = lambda line: None  # told what loading found out


class Proposer(Protocol):
    """Says which tokens are likely to follow; proposes only, so it cannot change the text."""

    needs_draft_model: bool

    @classmethod
    def from_setup(cls, setup: DraftSetup) -> "Proposer":
        """Load what is needed; may set the target's tap boundaries."""

    def reset(self) -> None:
        """Forget the text."""

    def commit(self, token_T: Tensor, taps_TD: Tensor | None, anchor: int) -> None:
        """Take in text that became certain.

        `token_T` int64 are the tokens that entered the target's cache, in order, `taps_TD` the
        target's hidden states there, and `anchor` the chosen token that follows them, which is
        the root of the next tree.
        """

    def expand(self, tree: DraftTree, node_F: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Candidates for the children of each node -> (token_FK int64, logprob_FK float32).

        Likeliest first; a place that cannot be filled has log-probability -inf. Every node but
        the root was itself proposed by an earlier call, and each node is asked once.
        """


class Builder(Protocol):
    """A tree shape; made with a TreeConfig, of which it reads the fields in `uses`."""

    uses: tuple[str, ...]

    def max_nodes(self) -> int:
        """The most nodes that a tree of this shape can have, the root counted."""

    def max_drafted(self) -> int:
        """The most nodes that are given to `expand` in one round, the root not counted."""

    def build(self, proposer: Proposer, tree: DraftTree, max_depth: int) -> DraftTree:
        """Grow the root-only `tree`, at most `max_depth` deep (0 leaves it as it is)."""


PROPOSERS = {
    "eagle3": "minispec.drafting.eagle3:Eagle3Proposer",
    "ngram": "minispec.drafting.ngram:NgramProposer",
}
BUILDERS = {
    "eagle2": "minispec.drafting.eagle2:Eagle2",
    "chain": "minispec.drafting.chain:Chain",
    "static": "minispec.drafting.static:Static",
}
