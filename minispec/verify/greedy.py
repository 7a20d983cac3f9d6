"""Greedy tree match: follow the child that is the target's most likely token.

Any draft; lossless at temperature 0. The rule of blockwise parallel decoding (Stern et al.,
2018), on a tree.
"""

from torch import Tensor

from ..sampling import RoundRandom
from ..tree import DraftTree
from . import Accepted


class Greedy:
    """Compares tokens, never probabilities, so it needs nothing from the drafter."""

    name = "greedy"
    lossless = True
    greedy_only = True

    def accept(self, tree: DraftTree, prob_NV: Tensor, rng: RoundRandom) -> Accepted:
        best_N = prob_NV.argmax(-1).tolist()  # the lowest id on a tie
        token_N, children = tree.token_N.tolist(), tree.children()
        path = [0]
        while True:
            wanted = best_N[path[-1]]
            match = [child for child in children[path[-1]] if token_N[child] == wanted]
            if not match:
                return Accepted(path, wanted)
            path.append(match[0])
