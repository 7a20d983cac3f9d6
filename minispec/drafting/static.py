"""A fixed tree, given as rank paths: [0], [1], [0, 0] is two children and a grandchild.

Node [r1, r2, ...] takes the r1-th likeliest token, below it the r2-th, and so on: the format of
Medusa's and EAGLE-1's tree choices (Cai et al., 2024; Li et al., 2024).
"""

import json
from pathlib import Path

import torch

from ..models.interface import UserError
from ..tree import DraftTree
from . import Proposer, TreeConfig

# The likeliest 7 paths of a peaked drafter; 8 nodes with the root.
DEFAULT = "[0],[1],[2],[0,0],[0,1],[0,0,0],[0,0,0,0]"


def read_paths(text: str) -> set[tuple[int, ...]]:
    """A JSON list of rank paths (outer brackets optional), or the name of a file with one."""
    source = f"--static-tree {text}"
    try:
        if not text.lstrip().startswith("["):
            text = Path(text).read_text()
        raw = json.loads(f"[{text}]")
        if len(raw) == 1 and raw[0] and isinstance(raw[0][0], list):
            raw = raw[0]
        if not raw or not all(isinstance(path, list) for path in raw):
            raise ValueError
        paths = {tuple(path) for path in raw}
    except OSError:
        raise UserError(f"{source}: no such file; give a file or a list '[0],[1],[0,0]'") from None
    except (ValueError, TypeError, KeyError):
        raise UserError(f"{source}: not a list of rank paths like '[0],[1],[0,0]'") from None
    for path in paths:
        if not path or not all(isinstance(rank, int) and rank >= 0 for rank in path):
            raise UserError(f"{source}: path {list(path)} must be one or more ranks from 0 up")
    for path in sorted(paths):
        if len(path) > 1 and path[:-1] not in paths:
            raise UserError(f"{source}: path {list(path)} has no parent {list(path[:-1])}")
    return paths


class Static:
    """The same shape every round, whatever the drafter thinks of it."""

    uses = ("static_tree",)

    def __init__(self, config: TreeConfig) -> None:
        self.paths = read_paths(DEFAULT if config.static_tree is None else config.static_tree)

    def max_nodes(self) -> int:
        return len(self.paths) + 1

    def max_drafted(self) -> int:
        return len({path[:-1] for path in self.paths if len(path) > 1})

    def build(self, proposer: Proposer, tree: DraftTree, max_depth: int) -> DraftTree:
        node_of: dict[tuple[int, ...], int] = {(): 0}
        for depth in range(1, max_depth + 1):
            level = sorted(path for path in self.paths if len(path) == depth)
            parents = sorted({path[:-1] for path in level} & node_of.keys())
            if not parents:
                break
            width = 1 + max(path[-1] for path in level)
            node_F = torch.tensor([node_of[path] for path in parents], device=tree.token_N.device)
            token_FK, logprob_FK = proposer.expand(tree, node_F, width)
            shape_FK = torch.full_like(logprob_FK, float("-inf"))
            for row, parent in enumerate(parents):
                offered = range(token_FK.shape[1])
                ranks = [path[-1] for path in level if path[:-1] == parent and path[-1] in offered]
                shape_FK[row, ranks] = logprob_FK[row, ranks]
            tree, new_M = tree.grow(node_F, token_FK, shape_FK)
            grown = shape_FK.isfinite().nonzero().tolist()
            for (row, rank), node in zip(grown, new_M.tolist()):
                node_of[(*parents[row], rank)] = node
        return tree
