"""Every rule keeps the target's law: by exact enumeration, and by draws through the real dice.

Toy models are tables: the next-token law is a function of the last two tokens. Trees here are
deterministic functions of the text, as top-k trees are.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from minispec.config import load
from minispec.sampling import KeyedRandom, RoundRandom, SamplingParams, draw, probs
from minispec.tree import DraftTree
from minispec.verify import RULES, Accepted, Rule

VOCAB = 3


class Enumerator:
    """Stands in for RoundRandom: replays a list of outcomes and remembers what else was open."""

    def __init__(self, script: list[int]) -> None:
        self.script = script
        self.weights: list[list[float]] = []  # probability of every outcome, per decision

    def _decide(self, weights: list[float]) -> int:
        at = len(self.weights)
        self.weights.append(weights)
        if at == len(self.script):
            self.script.append(next(i for i, weight in enumerate(weights) if weight > 0))
        return self.script[at]

    def coin(self, prob: float, depth: int, slot: int) -> bool:
        assert 0.0 <= prob <= 1.0
        return bool(self._decide([1.0 - prob, prob]))

    def draw(self, prob_V: Tensor, depth: int) -> int:
        return self._decide((prob_V / prob_V.sum()).tolist())


def outcomes(run: Callable[[Any], Any]) -> list[tuple[Any, float]]:
    """Every result of a function of random decisions, with its probability; depth first."""
    results = []
    script: list[int] = []
    while True:
        dice = Enumerator(script)
        result = run(dice)
        weight = float(np.prod([w[i] for w, i in zip(dice.weights, dice.script)]))
        results.append((result, weight))
        script = dice.script
        while script:
            later = range(script[-1] + 1, len(dice.weights[len(script) - 1]))
            open_ = [i for i in later if dice.weights[len(script) - 1][i] > 0]
            if open_:
                script[-1] = open_[0]
                break
            script.pop()
        else:
            return results


class Table:
    """A random target over VOCAB tokens: `law(text)` depends on the last two tokens."""

    def __init__(self, seed: int, sparse: bool) -> None:
        dice = np.random.default_rng(seed)
        table = dice.dirichlet([0.6] * VOCAB, size=(VOCAB, VOCAB))
        if sparse:  # zeros, as top-k and top-p leave them
            table[table < 0.2] = 0.0
            table /= table.sum(-1, keepdims=True)
        self.table = torch.tensor(table)

    def law(self, text: tuple[int, ...]) -> Tensor:
        return self.table[text[-2], text[-1]]


SHAPES: dict[str, list[tuple[int, ...]]] = {
    "one node": [],
    "chain": [(0,), (0, 1), (0, 1, 2)],
    "full": [path for n in (1, 2) for path in itertools.product(range(VOCAB), repeat=n)],
    "ragged": [(2,), (1,), (2, 0), (2, 1), (1, 1), (2, 1, 0)],
    "duplicates": [(1,), (1,), (0,), (1, 2), (1, 2)],
}


def make_tree(shape: str, text: tuple[int, ...]) -> DraftTree:
    """Tokens shifted by the text's last one: the draft is a function of the text."""
    shift = text[-1]
    tree, node_of = DraftTree.root(text[-1], torch.device("cpu")), {(): 0}
    for path in SHAPES[shape]:
        parent = torch.tensor([node_of[path[:-1]]])
        token = torch.tensor([[(path[-1] + shift) % VOCAB]])
        tree, new = tree.grow(parent, token, torch.tensor([[-1.0]]))
        node_of[path] = int(new)
    return tree


def node_laws(tree: DraftTree, table: Table, text: tuple[int, ...]) -> Tensor:
    """The target's law after every node."""
    paths: list[tuple[int, ...]] = []
    for node, parent in enumerate(tree.parent_N.tolist()):
        paths.append(text if parent < 0 else (*paths[parent], int(tree.token_N[node])))
    return torch.stack([table.law(path) for path in paths]).float()


def emit(rule: Rule, shape: str, table: Table, dice: Any) -> tuple[int, ...]:
    """The first three tokens after a fixed text, in as many rounds as they take."""
    start = (0, 1)
    text = start
    while len(text) < len(start) + 3:
        tree = make_tree(shape, text)
        done: Accepted = rule.accept(tree, node_laws(tree, table, text), dice(len(text)))
        text = (*text, *tree.token_N[done.path[1:]].tolist(), done.bonus)
    return text[len(start) :][:3]


def exact_law(table: Table) -> dict[tuple[int, ...], float]:
    """The target's own joint law of three tokens."""
    law = {}
    for tokens in itertools.product(range(VOCAB), repeat=3):
        text, weight = (0, 1), 1.0
        for token in tokens:
            weight *= float(table.law(text)[token])
            text = (*text, token)
        law[tokens] = weight
    return law


def distance(rule: Rule, shape: str, table: Table) -> float:
    """Total variation between what a rule emits and the target's law, all outcomes counted."""
    emitted: dict[tuple[int, ...], float] = {}
    total = 0.0
    for tokens, weight in outcomes(lambda dice: emit(rule, shape, table, lambda length: dice)):
        emitted[tokens] = emitted.get(tokens, 0.0) + weight
        total += weight
    assert abs(total - 1.0) < 1e-9
    law = exact_law(table)
    assert set(emitted) <= set(law)
    return 0.5 * sum(abs(emitted.get(tokens, 0.0) - law[tokens]) for tokens in law)


SAMPLING_RULES = [name for name in RULES if not load("--verify", name, RULES).greedy_only]


@pytest.mark.parametrize("rule", SAMPLING_RULES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "zeros"])
@pytest.mark.parametrize("seed", range(3))
def test_joint_law_of_three_tokens(rule: str, shape: str, sparse: bool, seed: int) -> None:
    made = load("--verify", rule, RULES)()
    assert distance(made, shape, Table(seed, sparse)) < 1e-6  # the laws are float32


class AcceptsOwnCoin:
    """Wrong on purpose: the residual keeps the rejected child's mass."""

    def accept(self, tree: DraftTree, prob_NV: Tensor, rng: RoundRandom) -> Accepted:
        path = [0]
        while True:
            node, depth = path[-1], len(path) - 1
            for slot, child in enumerate(tree.children()[node]):
                if rng.coin(float(prob_NV[node, tree.token_N[child]]), depth, slot):
                    path.append(child)
                    break
            else:
                return Accepted(path, rng.draw(prob_NV[node].double(), depth))


def test_enumeration_catches_a_wrong_rule() -> None:
    assert distance(AcceptsOwnCoin(), "ragged", Table(0, False)) > 0.02


@pytest.mark.parametrize("rule", SAMPLING_RULES)
@pytest.mark.parametrize("shape", ["one node", "ragged"])
def test_chi_square_with_the_real_dice(rule: str, shape: str) -> None:
    made, table, draws = load("--verify", rule, RULES)(), Table(1, False), 3000
    law = exact_law(table)
    counts = dict.fromkeys(law, 0)
    for seed in range(draws):
        dice = partial(RoundRandom, KeyedRandom(seed))
        counts[emit(made, shape, table, dice)] += 1
    cells = [tokens for tokens in law if law[tokens] * draws >= 5]
    rare = [tokens for tokens in law if law[tokens] * draws < 5]
    expected = [law[tokens] * draws for tokens in cells] + [sum(law[t] for t in rare) * draws]
    observed = [counts[tokens] for tokens in cells] + [sum(counts[t] for t in rare)]
    chi2 = sum((o - e) ** 2 / e for o, e in zip(observed, expected) if e > 0)
    freedom = len(cells) - 1 + bool(rare)
    # Wilson-Hilferty: 4.5 sigma, one false alarm in 300,000 by chance; the seeds are fixed
    bound = freedom * (1 - 2 / (9 * freedom) + 4.5 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert chi2 < bound


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", SHAPES)
def test_temperature_zero_is_greedy(rule: str, shape: str) -> None:
    table, text = Table(2, False), (0, 1)
    tree = make_tree(shape, text)
    prob_NV = probs(node_laws(tree, table, text).log(), SamplingParams())
    done = load("--verify", rule, RULES)().accept(tree, prob_NV, RoundRandom(KeyedRandom(0), 2))
    for node in done.path:
        best = int(table.law(text).argmax())
        after = done.path[done.path.index(node) + 1 :]
        token = int(tree.token_N[after[0]]) if after else done.bonus
        assert token == best
        text = (*text, token)
    deeper = [tree.token_N[child] for child in tree.children()[done.path[-1]]]
    assert done.bonus not in deeper  # it stopped because no child was right


def test_greedy_takes_the_lowest_id_on_a_tie() -> None:
    logits_NV = torch.tensor([[1.0, 2.0, 2.0, 0.0]])
    assert probs(logits_NV, SamplingParams()).argmax() == 1
    assert probs(logits_NV, SamplingParams(temperature=1.0, top_k=1))[0].tolist() == [0, 1, 0, 0]


def test_filters_in_order() -> None:
    prob_V = torch.tensor([0.4, 0.3, 0.2, 0.08, 0.02])
    logits = prob_V.log().unsqueeze(0)

    def kept(**params: Any) -> list[int]:
        law = probs(logits, SamplingParams(temperature=1.0, **params))[0]
        assert abs(float(law.sum()) - 1) < 1e-6
        return law.nonzero().flatten().tolist()

    assert kept() == [0, 1, 2, 3, 4]
    assert kept(top_k=2) == [0, 1]
    assert kept(top_p=0.65) == [0, 1]
    assert kept(top_p=0.75) == [0, 1, 2]
    assert kept(min_p=0.3) == [0, 1, 2]
    # top-p counts the mass that top-k left: 0.4 / 0.7 alone holds 0.55
    assert kept(top_k=2, top_p=0.55) == [0]
    hot = probs(logits, SamplingParams(temperature=2.0))[0]
    assert torch.allclose(hot, prob_V.sqrt() / prob_V.sqrt().sum())


def test_draw_never_picks_a_token_without_mass() -> None:
    prob_V = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0])
    picked = {draw(prob_V, uniform) for uniform in np.linspace(0, 1 - 1e-16, 101)}
    assert picked == {1, 3}


def test_keyed_numbers_depend_on_their_key_alone() -> None:
    random = KeyedRandom(7)
    keys = list(itertools.product(range(20), range(2), range(3)))
    numbers = {key: random.uniform(*key) for key in keys}
    assert len(set(numbers.values())) == len(keys)
    assert all(KeyedRandom(7).uniform(*key) == numbers[key] for key in reversed(keys))
    assert KeyedRandom(8).uniform(0, 0, 0) != numbers[0, 0, 0]
