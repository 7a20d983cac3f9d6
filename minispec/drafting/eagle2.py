"""EAGLE-2's dynamic tree: expand the most promising nodes, then keep the best of all.

Li et al., EAGLE-2 (2024), section 4: each draft step runs the `topk` frontier nodes of highest
path probability and gives each `topk` children; at the end all candidates compete for
`num_draft_nodes` places. Nodes are a fixed function of the text.
"""

import torch

from ..tree import DraftTree
from . import Proposer, TreeConfig


class Eagle2:
    """Each round's tree has another shape: wide where the drafter doubts, deep where it is sure."""

    uses = ("num_steps", "topk", "num_draft_nodes")

    def __init__(self, config: TreeConfig) -> None:
        self.config = config

    def max_nodes(self) -> int:
        return self.config.num_draft_nodes

    def max_drafted(self) -> int:
        return self.config.topk * (self.config.num_steps - 1)

    def build(self, proposer: Proposer, tree: DraftTree, max_depth: int) -> DraftTree:
        config = self.config
        frontier_F = torch.zeros(1, dtype=torch.int64, device=tree.token_N.device)
        for _ in range(min(config.num_steps, max_depth)):
            token_FK, logprob_FK = proposer.expand(tree, frontier_F, config.topk)
            tree, new_M = tree.grow(frontier_F, token_FK, logprob_FK)
            if not len(new_M):
                break
            best_M = tree.score_N[new_M].sort(descending=True, stable=True).indices
            frontier_F = new_M[best_M[: config.topk]]
        return tree.keep_best(config.num_draft_nodes)
