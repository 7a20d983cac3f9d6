"""After every commit the caches are what a fresh prefill of the same text would have made."""

import pytest
import torch
from toys import CPU, TREES, decode, make_decoder, make_proposer, toy_pair

from minispec.drafting.eagle3 import Eagle3Proposer
from minispec.kv import RowCache
from minispec.models.interface import Step
from minispec.verify import Accepted

PROMPT = [7, 77, 17, 71, 27, 72]
TOLERANCE = 2e-5  # float32 rows of unit size, summed in another order: measured below 3e-6


def check_caches(tokens: list[int], decoder, proposer: Eagle3Proposer) -> None:
    """`tokens` are those in the target's cache, then the anchor."""
    target, length = decoder.target, decoder.cache.length
    assert length == len(tokens) - 1
    fresh = RowCache(target.num_layers, length, target.cache_width, torch.float32, CPU)
    output = target.forward(Step.chunk(torch.tensor(tokens[:-1]), 0), fresh)
    stale_LSC = decoder.cache.row_LSC[:, :length]
    torch.testing.assert_close(stale_LSC, fresh.row_LSC, atol=TOLERANCE, rtol=0)

    head, rows = proposer.head, proposer.cache
    assert rows.length == length  # row t pairs taps t with token t + 1
    fresh_rows = RowCache(1, length, head.config.cache_width, torch.float32, CPU)
    step = Step.chunk(torch.tensor(tokens[1:]), 0)
    _, logprob_TU = head(step, head.fuse(output.taps_TD), fresh_rows)
    stale = rows.row_LSC[:, :length]
    torch.testing.assert_close(stale, fresh_rows.row_LSC, atol=10 * TOLERANCE, rtol=0)
    torch.testing.assert_close(proposer.root_logprob_U, logprob_TU[-1], atol=10 * TOLERANCE, rtol=0)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("deepest", [False, True])
def test_every_commit(tree: str, deepest: bool) -> None:
    target, head = toy_pair(4)
    proposer = make_proposer("eagle3", head, tree)
    assert isinstance(proposer, Eagle3Proposer)
    decoder = make_decoder(target, proposer, tree)
    if deepest:  # long paths with gaps, which a random pair's own text would not commit
        decoder.rule = Deepest()
    anchor = decoder.prefill(PROMPT)
    text = [*PROMPT, anchor.token]
    check_caches(text, decoder, proposer)
    depths = set()
    for _ in range(12):
        done = decoder.round(anchor, max_depth=10)
        anchor = done.anchor
        text += done.tokens
        depths.add(len(done.accepted.path) - 1)
        check_caches(text, decoder, proposer)
    assert not deepest or max(depths) > 1


class Deepest:
    """Not a rule for users: accepts the last deepest node, so that paths skip window rows."""

    name, lossless, greedy_only = "deepest", False, False

    def accept(self, tree, prob_NV, rng):
        depths = tree.depth_N.tolist()
        node = max(i for i, depth in enumerate(depths) if depth == max(depths))
        path = []
        while node >= 0:
            path.insert(0, node)
            node = int(tree.parent_N[node])
        return Accepted(path, int(prob_NV[path[-1]].argmax()))


def test_unused_rows_are_never_read() -> None:
    """NaN in every row that is not committed changes nothing."""
    target, head = toy_pair(5)
    plain, _ = decode(make_decoder(target), PROMPT, 20)
    proposer = make_proposer("eagle3", head, "eagle2")
    decoder = make_decoder(target, proposer)
    anchor = decoder.prefill(PROMPT)
    tokens = [anchor.token]
    while len(tokens) < 20:
        for cache in (decoder.cache, proposer.cache):
            cache.row_LSC[:, cache.length :] = float("nan")
        done = decoder.round(anchor, max_depth=20 - len(tokens) - 1)
        anchor = done.anchor
        tokens += done.tokens
    assert tokens == plain


def test_commit_moves_rows_forward_only() -> None:
    cache = RowCache(2, 10, 1, torch.float32, CPU)
    cache.row_LSC[:] = torch.arange(10.0).view(1, 10, 1)
    cache.commit([0, 1])
    cache.commit([0, 2, 5])
    assert cache.row_LSC[:, :5, 0].tolist() == [[0, 1, 2, 4, 7]] * 2
    assert cache.length == 5
    with pytest.raises(AssertionError):
        cache.commit([2, 1])
