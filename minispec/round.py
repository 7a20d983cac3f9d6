"""One decode round: draft a tree, verify it in one target pass, accept a path, commit it.

    builder.build(proposer, root)   -> DraftTree       node 0 is the anchor: chosen, not cached
    tree_step(tree, length)         -> Step            one row a node, each sees its ancestors
    target.forward(step)            -> StepOutput      logits and taps of every node
    probs(logits)                   -> prob_NV         the one transform, baseline and speculation
    rule.accept(tree, prob_NV)      -> Accepted        a path from the root, and a bonus token
    cache.commit(path)                                 accepted rows become text, the rest vanish
    proposer.commit(tokens, taps)                      the drafter's rows, from the target's taps

Plain decoding is this round with a tree of one node, so there is one forward path for both.
Shape suffixes: N tree nodes, T tokens, V vocabulary, B tapped states joined.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .drafting import Builder, Proposer
from .kv import RowCache
from .models.interface import Step, StepOutput, Target, UserError
from .sampling import DRAW, KeyedRandom, RoundRandom, SamplingParams, draw, probs
from .stats import Clock, RoundStats
from .tree import DraftTree
from .verify import Accepted, Rule

PREFILL_CHUNK = 128  # prompt tokens a forward pass: bounds the score matrix


@dataclass(frozen=True)
class Anchor:
    """The last chosen token and how many tokens stand before it in the cache."""

    token: int
    length: int


@dataclass(frozen=True)
class Round:
    """What one round did; `tokens` are the accepted drafts and the bonus."""

    tokens: list[int]
    anchor: Anchor
    tree: DraftTree
    accepted: Accepted
    stats: RoundStats


def tree_step(tree: DraftTree, length: int) -> Step:
    """The tree as window rows behind `length` committed ones: node i in window row i."""
    slot_N = torch.arange(length, length + len(tree), device=tree.token_N.device)
    return Step(tree.token_N, length + tree.depth_N, slot_N, tree.ancestors_NN(), length)


class Decoder:
    """Target, cache, drafter and rule, tied together for one text at a time.

    `proposer` and `builder` are None for plain decoding. `vocab_size` is the tokenizer's: a
    target may have more rows than there are tokens, and those are never chosen.
    """

    def __init__(
        self,
        target: Target,
        cache: RowCache,
        proposer: Proposer | None,
        builder: Builder | None,
        rule: Rule,
        sampling: SamplingParams,
        vocab_size: int | None = None,
    ) -> None:
        self.vocab_size = vocab_size or target.vocab_size
        self.target = target
        self.cache = cache
        self.proposer = proposer
        self.builder = builder
        self.rule = rule
        self.sampling = sampling
        self.random = KeyedRandom(sampling.seed)
        self.device = cache.row_LSC.device

    def prefill(self, prompt: list[int]) -> Anchor:
        """Fill the caches with the prompt and choose the token after it."""
        self.cache.reset()
        if self.proposer is not None:
            self.proposer.reset()
        token_T = torch.tensor(prompt, device=self.device)
        for start in range(0, len(prompt), PREFILL_CHUNK):
            chunk_T = token_T[start : start + PREFILL_CHUNK]
            output = self.target.forward(
                Step.chunk(chunk_T, self.cache.length), self.cache, last_only=True
            )
            self.cache.commit(list(range(len(chunk_T))))
            end = self.cache.length
            follower = prompt[end] if end < len(prompt) else self._first_token(output)
            if self.proposer is not None:
                self.proposer.commit(chunk_T, output.taps_TD, follower)
        return Anchor(follower, len(prompt))

    def _first_token(self, output: StepOutput) -> int:
        """The token after the prompt, drawn as every other."""
        prob_V = self._probs(output)[-1]
        return draw(prob_V, self.random.uniform(self.cache.length, DRAW))

    def _probs(self, output: StepOutput) -> Tensor:
        if not bool(output.logits_TV.isfinite().all()):
            raise UserError(
                f"--model: the logits after {self.cache.length} tokens hold NaN or infinity; the "
                "checkpoint's weights, or its config, are broken"
            )
        return probs(output.logits_TV[:, : self.vocab_size], self.sampling)

    def round(self, anchor: Anchor, max_depth: int) -> Round:
        """Emit 1 to `max_depth` + 1 tokens after the anchor."""
        assert self.cache.length == anchor.length, (self.cache.length, anchor.length)
        clock = Clock(self.device)
        tree = DraftTree.root(anchor.token, self.device)
        if self.proposer is not None and self.builder is not None:
            tree = self.builder.build(self.proposer, tree, max_depth)
        draft_seconds = clock.lap()
        output = self.target.forward(tree_step(tree, anchor.length), self.cache)
        prob_NV = self._probs(output)
        rng = RoundRandom(self.random, anchor.length)
        accepted = self.rule.accept(tree, prob_NV, rng)
        verify_seconds = clock.lap()
        self._commit(tree, accepted, output.taps_TD)
        tokens = [*tree.token_N[accepted.path[1:]].tolist(), accepted.bonus]
        offered = len(accepted.path) - 1 + bool(tree.children()[accepted.path[-1]])
        stats = RoundStats(
            nodes=len(tree),
            accepted=len(accepted.path) - 1,
            offered=offered,
            draft_seconds=draft_seconds,
            verify_seconds=verify_seconds,
            commit_seconds=clock.lap(),
        )
        after = Anchor(accepted.bonus, anchor.length + len(accepted.path))
        return Round(tokens, after, tree, accepted, stats)

    def _commit(self, tree: DraftTree, accepted: Accepted, taps_NB: Tensor | None) -> None:
        self.cache.commit(accepted.path)
        if self.proposer is not None:
            path = torch.tensor(accepted.path, device=self.device)
            taps_TB = None if taps_NB is None else taps_NB[path]
            self.proposer.commit(tree.token_N[path], taps_TB, accepted.bonus)
