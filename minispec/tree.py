"""The draft tree: tokens and parents; depth, scores, ancestor sets and paths are derived.

Knows no model and no cache. Node 0 is the root: the last chosen token, whose text is certain.
Parents come before their children. Shape suffixes: N nodes, F frontier nodes, K children each,
M nodes kept.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftTree:
    """`logprob_N` is the drafter's log-probability of a node given its parent; 0 at the root."""

    token_N: Tensor  # int64
    parent_N: Tensor  # int64, -1 at the root
    depth_N: Tensor  # int64, 0 at the root
    logprob_N: Tensor  # float32
    score_N: Tensor  # float32, log-probability of the path from the root

    @staticmethod
    def root(token: int, device: torch.device) -> "DraftTree":
        """A tree of one node: plain decoding."""
        zero = torch.zeros(1, device=device)
        count = torch.zeros(1, dtype=torch.int64, device=device)
        return DraftTree(count + token, count - 1, count, zero, zero)

    def __len__(self) -> int:
        return len(self.token_N)

    def grow(
        self, node_F: Tensor, token_FK: Tensor, logprob_FK: Tensor
    ) -> tuple["DraftTree", Tensor]:
        """Add K children under each node of `node_F` -> (larger tree, ids of the new nodes).

        A child of log-probability -inf is no child (a proposer had fewer to offer).
        """
        offered_FK = logprob_FK.isfinite()
        parent_M = node_F.unsqueeze(1).expand_as(token_FK)[offered_FK]
        token_M, logprob_M = token_FK[offered_FK], logprob_FK[offered_FK]
        tree = DraftTree(
            torch.cat([self.token_N, token_M]),
            torch.cat([self.parent_N, parent_M]),
            torch.cat([self.depth_N, self.depth_N[parent_M] + 1]),
            torch.cat([self.logprob_N, logprob_M]),
            torch.cat([self.score_N, self.score_N[parent_M] + logprob_M]),
        )
        return tree, torch.arange(len(self), len(tree), device=self.token_N.device)

    def keep_best(self, count: int) -> "DraftTree":
        """The `count` nodes of highest path score, root included; their ancestors always are.

        A child never scores above its parent, and on a tie the older node wins, so whatever is
        kept is connected.
        """
        if count >= len(self):
            return self
        best_M = self.score_N.sort(descending=True, stable=True).indices[:count].sort().values
        new_id_N = torch.full_like(self.parent_N, -1)
        new_id_N[best_M] = torch.arange(count, device=best_M.device)
        parent_M = self.parent_N[best_M]
        renamed_M = torch.where(parent_M < 0, -1, new_id_N[parent_M.clamp(min=0)])
        kept = (self.depth_N[best_M], self.logprob_N[best_M], self.score_N[best_M])
        return DraftTree(self.token_N[best_M], renamed_M, *kept)

    def ancestors_NN(self) -> Tensor:
        """bool [N, N]: row i marks node i and all its ancestors."""
        size = len(self)
        mask_NN = torch.eye(size, dtype=torch.bool, device=self.token_N.device)
        has_parent_N1 = (self.parent_N >= 0).unsqueeze(1)
        parent_N = self.parent_N.clamp(min=0)
        for _ in range(int(self.depth_N.max()) if size > 1 else 0):
            mask_NN = mask_NN | (mask_NN[parent_N] & has_parent_N1)
        return mask_NN

    def children(self) -> list[list[int]]:
        """Child ids of every node, in the order in which the drafter ranked them."""
        lists: list[list[int]] = [[] for _ in range(len(self))]
        for node, parent in enumerate(self.parent_N.tolist()):
            if parent >= 0:
                lists[parent].append(node)
        return lists
