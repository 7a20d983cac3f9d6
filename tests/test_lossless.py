"""The property that matters first: text with speculation equals text without it."""

import pytest
import torch
from toys import TREES, NeverRight, Replay, decode, make_decoder, make_proposer, toy_pair

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
