"""Small random pairs in the real on-disk form, and proposers whose outcome is known."""

import base64
import json
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from minispec.config import load
from minispec.drafting import BUILDERS, DraftSetup, Proposer, TreeConfig
from minispec.drafting.eagle3 import Eagle3Proposer
from minispec.drafting.ngram import NgramProposer
from minispec.engine import pick_rule
from minispec.kv import RowCache
from minispec.models.eagle3 import Eagle3
from minispec.models.heads import load_head
from minispec.models.kimi_k25 import KimiK25
from minispec.models.synthetic import target_config, write_target
from minispec.models.synthetic_heads import head_config, write_head
from minispec.models.weights import load_target
from minispec.round import Decoder, Round
from minispec.sampling import SamplingParams
from minispec.tree import DraftTree

CPU = torch.device("cpu")
CONTEXT = 256
TREES = {
    "chain": TreeConfig(num_steps=3),
    "eagle2": TreeConfig(num_steps=4, topk=3, num_draft_nodes=10),
    "static": TreeConfig(static_tree="[0],[1],[2],[0,0],[0,2],[1,0],[0,0,0],[1,0,1]"),
}


def write_byte_tokenizer(folder: Path) -> None:
    """A tiktoken.model of the 256 bytes: 512 ids with Kimi's special slots."""
    lines = [f"{base64.b64encode(bytes([byte])).decode()} {byte}" for byte in range(256)]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")


def write_pair(folder: Path, seed: int = 0, **target_changes: object) -> tuple[Path, Path]:
    """Target and head folders that fit each other, with a tokenizer for a vocabulary of 512."""
    config = target_config(**{"vocab_size": 512, **target_changes})
    write_target(folder / "target", config, seed)
    write_head(folder / "head", head_config(config), seed + 1)
    write_byte_tokenizer(folder / "target")
    return folder / "target", folder / "head"


@cache
def toy_pair(
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    expert_dtype: torch.dtype = torch.float32,
    vocab_size: int = 128,
) -> tuple[KimiK25, Eagle3]:
    """A loaded pair of random weights; every seed is another model."""
    with tempfile.TemporaryDirectory() as folder:
        target_folder, head_folder = write_pair(Path(folder), seed, vocab_size=vocab_size)
        target = load_target(target_folder, CPU, dtype, expert_dtype, CONTEXT)
        return target, load_head(head_folder, target, CPU, dtype, CONTEXT)


class Replay:
    """Proposes what it was told the text will be: every node of a chain is right."""

    needs_draft_model = False

    def __init__(self, text: list[int]) -> None:
        self.text = text

    @classmethod
    def from_setup(cls, setup: DraftSetup) -> "Replay":
        raise NotImplementedError

    def reset(self) -> None:
        self.length = 0

    def commit(self, token_T: Tensor, taps_TD: Tensor | None, anchor: int) -> None:
        self.length += len(token_T)  # the anchor stands at this position

    def expand(self, tree: DraftTree, node_F: Tensor, k: int) -> tuple[Tensor, Tensor]:
        depth_F = tree.depth_N[node_F].tolist()
        right = [self.pick(self.length + depth + 1) for depth in depth_F]
        token_FK = torch.tensor([[(token + i) % 128 for i in range(k)] for token in right])
        return token_FK, -torch.arange(1.0, k + 1).expand(len(right), k)

    def pick(self, position: int) -> int:
        return self.text[position] if position < len(self.text) else 0


class NeverRight(Replay):
    """Proposes any token but the right one."""

    def pick(self, position: int) -> int:
        return super().pick(position) + 1


def make_proposer(name: str, head: Eagle3, tree: str) -> Proposer:
    """The built-in proposers, sized for a tree of TREES."""
    if name == "ngram":
        return NgramProposer()
    window = load("--tree", tree, BUILDERS)(TREES[tree]).max_drafted()
    return Eagle3Proposer(head, CONTEXT, window)


def make_decoder(
    target: KimiK25,
    proposer: Proposer | None = None,
    tree: str = "eagle2",
    sampling: SamplingParams | None = None,
    rule: str | None = None,
) -> Decoder:
    """A decoder with a cache of its own."""
    sampling = sampling or SamplingParams()
    builder = load("--tree", tree, BUILDERS)(TREES[tree]) if proposer else None
    nodes = builder.max_nodes() if builder else 1
    dtype = target.embed_tokens.dtype
    cache = RowCache(target.num_layers, CONTEXT + nodes, target.cache_width, dtype, CPU)
    return Decoder(target, cache, proposer, builder, pick_rule(rule, sampling), sampling)


def decode(decoder: Decoder, prompt: list[int], count: int) -> tuple[list[int], list[Round]]:
    """Exactly `count` tokens after the prompt, and the rounds that made them."""
    anchor = decoder.prefill(prompt)
    tokens, rounds = [anchor.token], []
    while len(tokens) < count:
        rounds.append(decoder.round(anchor, max_depth=count - len(tokens) - 1))
        anchor = rounds[-1].anchor
        tokens += rounds[-1].tokens
    return tokens, rounds


def edit_json(path: Path, **changes: object) -> None:
    """Change keys of a JSON file; None deletes a key."""
    content = json.loads(path.read_text())
    content.update(changes)
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
