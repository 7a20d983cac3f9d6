"""Verification rules: which path of a draft tree the target accepts, and what follows it.

A rule sees the tree and the target's probabilities, no model and no cache. To add one: a class
with `accept`, in a file here or in any module, and `--verify module:Class`.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..sampling import RoundRandom
from ..tree import DraftTree


@dataclass(frozen=True)
class Accepted:
    """`path` starts at node 0; `bonus` is the target's own token after the path's last node."""

    path: list[int]
    bonus: int


class Rule(Protocol):
    """`lossless`: the emitted text keeps the target's law. `greedy_only`: temperature 0 alone."""

    name: str
    lossless: bool
    greedy_only: bool

    def accept(self, tree: DraftTree, prob_NV: Tensor, rng: RoundRandom) -> Accepted:
        """`prob_NV` float32 [N, V]: the target's law after every node, already transformed."""


RULES = {
    "greedy": "minispec.verify.greedy:Greedy",
    "rejection": "minispec.verify.rejection:Rejection",
}
