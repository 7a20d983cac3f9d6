"""From logits to the next token: one transform for target, baseline and every rule; keyed noise.

Shape suffixes: N tree nodes (or any rows), V vocabulary.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .models.interface import UserError

ACCEPT, DRAW = 0, 1  # what a random number is for; part of its key
COLDEST = 1e-6  # below it logits / temperature would leave float32


@dataclass(frozen=True)
class SamplingParams:
    """How the target's text is drawn. Temperature 0 is greedy; None switches a filter off."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.temperature == 0.0 or COLDEST <= self.temperature < math.inf):
            raise UserError(
                f"--temperature {self.temperature}: must be 0 (greedy) or at least {COLDEST}"
            )
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"--top-k {self.top_k}: must be 1 or more; leave it out for no limit")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise UserError(f"--top-p {self.top_p}: must be above 0 and at most 1")
        if self.min_p is not None and not 0.0 <= self.min_p < 1.0:
            raise UserError(f"--min-p {self.min_p}: must be at least 0 and below 1")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"--seed {self.seed}: must be a whole number from 0 to 2^63 - 1")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def probs(logits_NV: Tensor, params: SamplingParams) -> Tensor:
    """The law that the next token is drawn from, float32 [N, V].

    Temperature, then top-k, top-p and min-p in the order of Hugging Face's warpers. Greedy is
    the one-hot law of the highest logit, the lowest id on a tie.
    """
    if params.greedy:
        best_N1 = logits_NV.argmax(-1, keepdim=True)
        return torch.zeros_like(logits_NV).scatter_(-1, best_N1, 1.0)
    prob_NV = (logits_NV / params.temperature).softmax(-1)
    if params.top_k is not None and params.top_k < prob_NV.shape[-1]:
        prob_NV = keep_sorted(prob_NV, first=params.top_k)
    if params.top_p is not None and params.top_p < 1.0:
        prob_NV = keep_sorted(prob_NV, mass=params.top_p)
    if params.min_p is not None and params.min_p > 0.0:
        floor_N1 = prob_NV.amax(-1, keepdim=True) * params.min_p
        prob_NV = prob_NV.where(prob_NV >= floor_N1, 0.0)
        prob_NV = prob_NV / prob_NV.sum(-1, keepdim=True)
    return prob_NV


def keep_sorted(prob_NV: Tensor, first: int | None = None, mass: float | None = None) -> Tensor:
    """Keep the `first` likeliest tokens, or the fewest that reach `mass`; lowest ids on ties."""
    sorted_NV, id_NV = prob_NV.sort(dim=-1, descending=True, stable=True)
    if first is not None:
        sorted_NV[:, first:] = 0.0
    if mass is not None:
        before_NV = sorted_NV.cumsum(-1) - sorted_NV
        sorted_NV = sorted_NV.where(before_NV < mass, 0.0)
    kept_NV = torch.zeros_like(prob_NV).scatter_(-1, id_NV, sorted_NV)
    return kept_NV / kept_NV.sum(-1, keepdim=True)


def draw(prob_V: Tensor, uniform: float) -> int:
    """Inverse-CDF draw: the token in whose slice of [0, 1) `uniform` falls."""
    cumulative_V = prob_V.double().cumsum(-1)
    target = uniform * float(cumulative_V[-1])
    token = int(torch.searchsorted(cumulative_V, target, right=True))
    return min(token, int(prob_V.nonzero()[-1]))  # rounding must not pick a token of mass 0


class KeyedRandom:
    """Uniform numbers that are a function of (seed, position, purpose, slot) and nothing else.

    Counter-based (Philox; Salmon et al., 2011): what was drawn elsewhere never shifts a draw.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def uniform(self, position: int, purpose: int, slot: int = 0) -> float:
        """A number in [0, 1)."""
        bits = np.random.Philox(key=self.seed, counter=[0, slot, purpose, position])
        return float(np.random.Generator(bits).random())


class RoundRandom:
    """The random decisions of one round; the node at depth d decides position `length + 1 + d`.

    A rule asks for coins and draws and never sees a bare number, so that a test can put an
    enumerator of all outcomes in this object's place.
    """

    def __init__(self, random: KeyedRandom, length: int) -> None:
        self.random = random
        self.length = length

    def coin(self, prob: float, depth: int, slot: int) -> bool:
        """True with probability `prob`; for the child in `slot` of the node at `depth`."""
        return self.random.uniform(self.length + 1 + depth, ACCEPT, slot) < prob

    def draw(self, prob_V: Tensor, depth: int) -> int:
        """A token by `prob_V`, which need not be normalised; after the node at `depth`."""
        return draw(prob_V, self.random.uniform(self.length + 1 + depth, DRAW))
