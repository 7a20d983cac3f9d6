"""Residual rejection over deterministic children: EAGLE's rule, lossless at any temperature.

For a tree whose children are a fixed function of the text (top-k, n-gram), each child is a
proposal of probability one. Child x is accepted with the probability that the target gives it
among what is left; a rejected child's mass is removed and the next one tried; after the last,
the token is drawn from what is left (Li et al., EAGLE, 2024; Miao et al., SpecInfer, 2024).

Why it is lossless: P(x1) = p(x1); P(x2) = (1 - p(x1)) * p(x2) / (1 - p(x1)) = p(x2); and so on
down the list, whatever its order; the final draw gives every other token its own p.
Needs no draft probabilities. At temperature 0 it is the greedy rule.
"""

from torch import Tensor

from ..sampling import RoundRandom
from ..tree import DraftTree
from . import Accepted


class Rejection:
    """Walks down from the root, one node's children at a time."""

    name = "rejection"
    lossless = True
    greedy_only = False

    def accept(self, tree: DraftTree, prob_NV: Tensor, rng: RoundRandom) -> Accepted:
        token_N, children = tree.token_N.tolist(), tree.children()
        path = [0]
        while True:
            node, depth = path[-1], len(path) - 1
            prob_V = prob_NV[node].double()
            tried: set[int] = set()
            left = 1.0
            for slot, child in enumerate(children[node]):
                token = token_N[child]
                if token in tried:
                    continue  # a duplicate has no mass left
                prob = float(prob_V[token])
                # rounding can leave a hair less than the last child's mass: then it is certain
                chance = prob / left if left > prob else 1.0
                if prob > 0.0 and rng.coin(chance, depth, slot):
                    path.append(child)
                    break
                tried.add(token)
                left -= prob
            else:
                rest_V = prob_V.clone()
                rest_V[list(tried)] = 0.0
                if float(rest_V.sum()) <= 0.0:
                    rest_V = prob_V  # rounding rejected the whole support: a last child is due
                return Accepted(path, rng.draw(rest_V, depth))
