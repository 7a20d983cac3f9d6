"""A chain: the likeliest token at every step, no branches (Leviathan et al., 2023)."""

import torch

from ..tree import DraftTree
from . import Proposer, TreeConfig


class Chain:
    """`num_steps` nodes below the root."""

    uses = ("num_steps",)

    def __init__(self, config: TreeConfig) -> None:
        self.config = config

    def max_nodes(self) -> int:
        return self.config.num_steps + 1

    def max_drafted(self) -> int:
        return self.config.num_steps - 1

    def build(self, proposer: Proposer, tree: DraftTree, max_depth: int) -> DraftTree:
        tip_F = torch.zeros(1, dtype=torch.int64, device=tree.token_N.device)
        for _ in range(min(self.config.num_steps, max_depth)):
            tree, tip_F = tree.grow(tip_F, *proposer.expand(tree, tip_F, 1))
            if not len(tip_F):
                break
        return tree
