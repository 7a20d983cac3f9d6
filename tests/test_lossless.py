"""The property that matters first: text with speculation equals text without it."""

import pytest
import torch
from toys import (
    CONTEXT,
    CPU,
    TREES,
    NeverRight,
    Replay,
    decode,
    make_decoder,
    make_proposer,
    toy_pair,
)

from minispec.kv import RowCache
from minispec.models.interface import Step
from minispec.round import tree_step
from minispec.tree import DraftTree

PROPOSERS = ["eagle3", "ngram"]
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize("tree", TREES)
def test_greedy_text_is_plain_greedy_text(tree: str, proposer: str, seed: int) -> None:
    target, head = toy_pair(seed)
    prompt = [(token * (seed + 1)) % 127 for token in PROMPT]
    plain, _ = decode(make_decoder(target), prompt, 40)
    decoder = make_decoder(target, make_proposer(proposer, head, tree), tree)
    drafted, _ = decode(decoder, prompt, 40)
    assert drafted == plain


@pytest.mark.parametrize("tree", TREES)
def test_experts_in_bfloat16(tree: str) -> None:
    target, head = toy_pair(0, expert_dtype=torch.bfloat16)
    plain, _ = decode(make_decoder(target), PROMPT, 60)
    drafted, _ = decode(make_decoder(target, make_proposer("eagle3", head, tree), tree), PROMPT, 60)
    assert drafted == plain


@pytest.mark.parametrize("prompt", [[5], PROMPT * 12], ids=["one token", "many"])
def test_prompt_lengths(prompt: list[int]) -> None:
    target, head = toy_pair(1)
    plain, _ = decode(make_decoder(target), prompt, 20)
    drafted, _ = decode(make_decoder(target, make_proposer("eagle3", head, "eagle2")), prompt, 20)
    assert drafted == plain


@pytest.mark.parametrize("tree", TREES)
def test_a_right_draft_is_accepted_whole(tree: str) -> None:
    target, _ = toy_pair(2)
    plain, _ = decode(make_decoder(target), PROMPT, 60)
    drafted, rounds = decode(make_decoder(target, Replay(PROMPT + plain), tree), PROMPT, 60)
    assert drafted == plain
    for done in rounds[:-1]:
        # every level of the tree holds the right token among its likeliest
        assert len(done.accepted.path) - 1 == done.tree.depth_N.max()


@pytest.mark.parametrize("tree", TREES)
def test_a_wrong_draft_costs_nothing_but_time(tree: str) -> None:
    target, _ = toy_pair(3)
    plain, _ = decode(make_decoder(target), PROMPT, 40)
    drafted, rounds = decode(make_decoder(target, NeverRight(PROMPT + plain), tree), PROMPT, 40)
    assert drafted == plain
    assert [len(done.tokens) for done in rounds] == [1] * 39  # accepted length exactly 1.00
    assert all(len(done.tree) > 1 for done in rounds[:-1])


def test_plain_decoding_is_a_tree_of_one_node() -> None:
    target, _ = toy_pair(0)
    _, rounds = decode(make_decoder(target), PROMPT, 10)
    assert [len(done.tree) for done in rounds] == [1] * 9


@pytest.mark.parametrize("expert_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [1, 31, 32, 33, 64, 70])
def test_logits_do_not_depend_on_the_step(length: int, expert_dtype: torch.dtype) -> None:
    """The same tokens in one chunk, one by one, and as a path of a tree: equal to the last bit."""
    target, _ = toy_pair(6, expert_dtype=expert_dtype)
    generator = torch.Generator().manual_seed(length)
    text_T = torch.randint(0, 128, (length + 8,), generator=generator)

    def run(sizes: list[int]) -> tuple[torch.Tensor, RowCache]:
        cache = RowCache(target.num_layers, CONTEXT, target.cache_width, torch.float32, CPU)
        logits = []
        for chunk_T in text_T[: sum(sizes)].split(sizes):
            logits.append(target.forward(Step.chunk(chunk_T, cache.length), cache).logits_TV)
            cache.commit(list(range(len(chunk_T))))
        return torch.cat(logits), cache

    whole, _ = run([length + 8])
    singles, _ = run([1] * (length + 8))
    assert torch.equal(whole, singles)
    before, cache = run([length])
    assert torch.equal(whole[:length], before)
    # a chain of the true tokens with a wrong sibling in front of each
    tree = DraftTree.root(int(text_T[length]), CPU)
    node, path = torch.tensor([0]), [0]
    for token in text_T[length + 1 :].tolist():
        tree, new = tree.grow(node, torch.tensor([[(token + 1) % 128, token]]), torch.zeros(1, 2))
        node = new[1:]
        path.append(int(node))
    output = target.forward(tree_step(tree, length), cache)
    assert torch.equal(output.logits_TV[path], whole[length:])
