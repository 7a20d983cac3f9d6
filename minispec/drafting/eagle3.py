"""The EAGLE-3 proposer: runs the head over committed text and over drafted nodes.

Its cache holds one row per target position: row t pairs the target's taps at t with token
t + 1. The last committed row is the root's: it carries the anchor and predicts its children.
Drafted nodes get window rows behind it, which the next commit overwrites with rows made from
the target's real taps.

Shape suffixes: T tokens, B tapped states joined, D head width, F nodes, K children, W window.
"""

import torch
from torch import Tensor

from ..kv import RowCache
from ..models.config import KimiConfig
from ..models.eagle3 import Eagle3
from ..models.heads import check_head, load_head
from ..models.interface import Step
from ..models.weights import Checkpoint
from ..tree import DraftTree
from . import DraftSetup


class Eagle3Proposer:
    """`window` bounds the drafted rows of a round."""

    needs_draft_model = True

    @staticmethod
    def check_draft_model(model: str, draft_model: str, aux_layers: tuple[int, ...] | None) -> None:
        """Raise UserError for a head that cannot serve this target, before weights are read."""
        target = Checkpoint(model, "--model")
        config = KimiConfig.from_json(target.config, str(target.config_path))
        check_head(draft_model, config, aux_layers)

    @classmethod
    def from_setup(cls, setup: DraftSetup) -> "Eagle3Proposer":
        assert setup.draft_model is not None, "checked where the flags are"
        head = load_head(
            setup.draft_model, setup.target, setup.device, setup.dtype, setup.context,
            setup.aux_layers, setup.note,
        )  # fmt: skip
        return cls(head, setup.context, setup.window)

    def __init__(self, head: Eagle3, context: int, window: int) -> None:
        self.head = head
        weight = head.fc.weight
        self.cache = RowCache(
            1, context + window, head.config.cache_width, weight.dtype, weight.device
        )
        self.window = window

    def reset(self) -> None:
        self.cache.reset()

    def commit(self, token_T: Tensor, taps_TD: Tensor | None, anchor: int) -> None:
        assert taps_TD is not None, "the target was not asked for taps"
        next_T = torch.cat([token_T[1:], token_T.new_tensor([anchor])])
        step = Step.chunk(next_T, self.cache.length)
        r_TD, logprob_TU = self.head(step, self.head.fuse(taps_TD), self.cache, last_only=True)
        self.cache.commit(list(range(len(next_T))))
        self.root_logprob_U = logprob_TU[-1]
        # window row 0 is the root's own, committed row
        self.hidden_WD = r_TD[-1:]
        self.visible_WW = torch.ones(1, 1, dtype=torch.bool, device=r_TD.device)
        self.row_of_node = {0: 0}

    def expand(self, tree: DraftTree, node_F: Tensor, k: int) -> tuple[Tensor, Tensor]:
        nodes = node_F.tolist()
        if nodes == [0]:
            logprob_FU = self.root_logprob_U.unsqueeze(0)
        else:
            logprob_FU = self._run(tree, node_F, nodes)
        logprob_FK, draft_id_FK = logprob_FU.topk(min(k, logprob_FU.shape[-1]), dim=-1)
        return self.head.to_target_ids(draft_id_FK), logprob_FK

    def _run(self, tree: DraftTree, node_F: Tensor, nodes: list[int]) -> Tensor:
        """Draft pass over nodes whose parents have rows already; gives them rows of their own."""
        before, count = len(self.hidden_WD), len(nodes)
        assert before + count <= self.window + 1, "more drafted rows than the cache was made for"
        prefix = self.cache.length - 1
        parents = tree.parent_N[node_F].tolist()
        parent_row_F = node_F.new_tensor([self.row_of_node[parent] for parent in parents])
        self.visible_WW = grow_mask(self.visible_WW, parent_row_F)
        step = Step(
            token_T=tree.token_N[node_F],
            position_T=prefix + tree.depth_N[node_F],
            slot_T=torch.arange(prefix + before, prefix + before + count, device=node_F.device),
            visible_TW=self.visible_WW[before:],
            prefix=prefix,
        )
        r_FD, logprob_FU = self.head(step, self.hidden_WD[parent_row_F], self.cache)
        self.hidden_WD = torch.cat([self.hidden_WD, r_FD])
        self.row_of_node |= {node: before + i for i, node in enumerate(nodes)}
        return logprob_FU


def grow_mask(visible_WW: Tensor, parent_row_F: Tensor) -> Tensor:
    """Ancestor mask with new rows below the old ones: each sees its parent's sight and itself."""
    count = len(parent_row_F)
    own_FF = torch.eye(count, dtype=torch.bool, device=visible_WW.device)
    new_FW = torch.cat([visible_WW[parent_row_F], own_FF], dim=1)
    old_WW = torch.nn.functional.pad(visible_WW, (0, count))
    return torch.cat([old_WW, new_FW])
