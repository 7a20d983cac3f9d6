"""Prompt lookup: what followed the last few tokens the last times they stood in the text.

Saxena's prompt lookup decoding (2023), widened to trees: each node's own path is part of the
text that is looked up. Needs no model; good where the text repeats itself.
"""

import math

import torch
from torch import Tensor

from ..tree import DraftTree
from . import DraftSetup

LONGEST, SHORTEST = 4, 2  # tokens that have to match; a longer match is trusted more


class NgramProposer:
    """Keeps, for every run of 2..4 tokens, the tokens that followed it, the latest last."""

    needs_draft_model = False

    @classmethod
    def from_setup(cls, setup: DraftSetup) -> "NgramProposer":
        return cls()

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.text: list[int] = []
        self.followers: dict[tuple[int, ...], list[int]] = {}

    def commit(self, token_T: Tensor, taps_TD: Tensor | None, anchor: int) -> None:
        """The text's last token is the last round's anchor already; see `_append`."""
        for token in [*token_T.tolist(), anchor][1 if self.text else 0 :]:
            self._append(token)

    def _append(self, token: int) -> None:
        for size in range(SHORTEST, LONGEST + 1):
            if len(self.text) >= size:
                self.followers.setdefault(tuple(self.text[-size:]), []).append(token)
        self.text.append(token)

    def expand(self, tree: DraftTree, node_F: Tensor, k: int) -> tuple[Tensor, Tensor]:
        rows = [self._candidates(self._context(tree, node), k) for node in node_F.tolist()]
        device = tree.token_N.device
        token_FK = torch.tensor([[token for token, _ in row] for row in rows], device=device)
        logprob_FK = torch.tensor([[logprob for _, logprob in row] for row in rows], device=device)
        return token_FK, logprob_FK

    def _context(self, tree: DraftTree, node: int) -> tuple[int, ...]:
        """The last tokens of the text as they would stand at `node`."""
        parent_N, token_N = tree.parent_N.tolist(), tree.token_N.tolist()
        path: list[int] = []
        while node > 0:
            path.insert(0, token_N[node])
            node = parent_N[node]
        return tuple((self.text[-LONGEST:] + path)[-LONGEST:])

    def _candidates(self, context: tuple[int, ...], k: int) -> list[tuple[int, float]]:
        """Up to `k` followers of the longest match, most frequent first, the later on a tie."""
        seen: list[int] = []
        for size in range(min(LONGEST, len(context)), SHORTEST - 1, -1):
            seen = self.followers.get(context[-size:], [])
            if seen:
                break
        latest = {token: at for at, token in enumerate(seen)}
        ranked = sorted(latest, key=lambda token: (-seen.count(token), -latest[token]))[:k]
        # one imagined other follower, so that a single sighting is not certainty
        row = [(token, math.log(seen.count(token) / (len(seen) + 1))) for token in ranked]
        return row + [(0, float("-inf"))] * (k - len(row))
