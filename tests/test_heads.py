"""EAGLE-3 heads of every public dialect: their mathematics, their files, what is refused.

`Plain` is the head written a second time, row by row in float64 from the checkpoint's tensors:
keys and values spelled out, rope as complex numbers, no cache, no mask. It shares no code with
the engine. Rows: a prompt, accepted text, then a draft tree whose nodes feed on their parents.
"""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_bad_input import change_tensors, cut_file, refused
from torch import Tensor
from toys import CPU, edit_json, write_byte_tokenizer

from minispec.config import EngineConfig
from minispec.drafting import TreeConfig
from minispec.drafting.eagle3 import Eagle3Proposer
from minispec.engine import Engine, GenerationParams, pick_rule
from minispec.generate import main
from minispec.models.eagle3_config import SPECULATORS, Eagle3Config, choose_taps
from minispec.models.heads import check_head, load_head
from minispec.models.interface import UserError
from minispec.models.synthetic import SIZES, target_config, write_target
from minispec.models.synthetic_heads import (
    draft_ids,
    head_config,
    latent_head_config,
    speculators_config,
    write_head,
)
from minispec.models.weights import load_target
from minispec.sampling import SamplingParams
from minispec.tree import DraftTree

CONTEXT = 128
# float32 against float64, in units of log-probability; measured below 4e-6
TOLERANCE = 2e-5
YARN = {
    "type": "yarn", "factor": 64.0, "original_max_position_embeddings": 8, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
TARGET = target_config(vocab_size=512)
NO_MSCALES = {key: value for key, value in YARN.items() if not key.startswith("mscale")}

# name -> (config.json, how write_head writes it, the note lines)
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, str, str]]] = {
    "llama, midlayer, d2t": (
        head_config(TARGET, rope_scaling=YARN),
        {},
        (
            "EAGLE-3, Llama attention, yarn 64 (beta 32/1, mscale 1/1), tensors midlayer.*",
            "embed_tokens the target's, lm_head its own, 256 of 512 ids by d2t",
            "taps before layers 2, 3, 4 (config: input-of-layer 2, 3, 4)",
        ),
    ),
    "llama, model.layers.0, full vocabulary, no ids": (
        head_config(TARGET, draft_vocab_size=None, eagle_config=None, rope_scaling=NO_MSCALES),
        {"layer": "layers.0.", "prefix": "model."},
        (
            "EAGLE-3, Llama attention, yarn 64 (beta 32/1, mscale 1/0), tensors model.layers.0.*",
            "embed_tokens the target's, lm_head its own, all 512 ids",
            "taps before layers 2, 3, 4 (no ids in the config: EAGLE's default)",
        ),
    ),
    "llama, own embedding, no lm_head, ids as outputs": (
        head_config(
            TARGET, draft_vocab_size=None, eagle_config=None, logit_scale=0.5,
            eagle_aux_hidden_state_layer_ids=[1, 2, 5],
        ),
        {"embedding": True, "lm_head": False},
        (
            "EAGLE-3, Llama attention, logit_scale 0.5, plain rope, tensors midlayer.*",
            "embed_tokens its own, lm_head the target's, all 512 ids",
            "taps before layers 2, 3, 6 (config: output-of-layer 1, 2, 5)",
        ),
    ),
    "EAGLE-3.1": (
        latent_head_config(TARGET, use_aux_norm=True, norm_output=True, draft_vocab_size=200),
        {"layer": "layers.0.", "legacy_norms": True, "t2d": True},
        (
            "EAGLE-3.1, latent attention, fc_norm, norm_output, yarn 4 (beta 32/1, mscale 1/1), "
            "tensors layers.0.* and aux_norm_*",
            "embed_tokens the target's, lm_head its own, 200 of 512 ids by d2t",
            "taps before layers 2, 3, 4 (config: input-of-layer 2, 3, 4)",
        ),
    ),
    "speculators": (
        speculators_config(TARGET, norm_before_fc=True),
        {"layer": "layers.0.", "embedding": True, "t2d": True},
        (
            "EAGLE-3, Llama attention, norm_before_residual, norm_before_fc, plain rope, "
            "tensors layers.0.*",
            "embed_tokens its own, lm_head its own, 256 of 512 ids by d2t",
            "taps before layers 2, 3, 4 (config: input-of-layer 2, 3, 4)",
        ),
    ),
    "latent": (
        latent_head_config(TARGET, rope_scaling=YARN),
        {"layer": "layers.0."},
        (
            "EAGLE-3, latent attention, yarn 64 (beta 32/1, mscale 1/1), tensors layers.0.*",
            "embed_tokens the target's, lm_head its own, all 512 ids",
            "taps before layers 2, 3, 4 (config: input-of-layer 2, 3, 4)",
        ),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`target` of seven layers, and every variant's head beside it."""
    made = tmp_path_factory.mktemp("heads")
    write_target(made / "target", target_config(vocab_size=512, num_hidden_layers=7))
    write_byte_tokenizer(made / "target")
    for number, (name, (config, how, _)) in enumerate(VARIANTS.items()):
        config = {key: value for key, value in config.items() if value is not None}
        write_head(made / name, config, number + 1, **how)
    return made


# the mathematics


class Plain:
    """The head in float64. `fault` names one thing to get wrong."""

    def __init__(self, folder: Path, target: Path, fault: str = "") -> None:
        self.fault = fault
        raw = json.loads((folder / "config.json").read_text())
        self.c = c = raw.get("transformer_layer_config", {}) | raw
        stored = load_file(folder / "model.safetensors")
        self.w = {}
        for name, tensor in stored.items():
            name = name.removeprefix("model.").replace("layers.0.", "").replace("midlayer.", "")
            self.w[name.removesuffix(".weight")] = tensor.double()
        shared = {k: v for file in target.glob("*.safetensors") for k, v in load_file(file).items()}
        for name, key in (("embed_tokens", "model.embed_tokens"), ("lm_head", "lm_head")):
            self.w.setdefault(name, shared[f"language_model.{key}.weight"].double())
        self.eps = c["rms_norm_eps"]
        if fault == "eps":
            self.eps = 1e-2
        self.heads = c["num_attention_heads"]
        self.latent = "DeepseekV" in c["architectures"][0]
        self.rope_width = c["qk_rope_head_dim"] if self.latent else c["head_dim"]
        self.keys: list[Tensor] = []  # one a row, [H, A]
        self.values: list[Tensor] = []
        self.states: list[Tensor] = []  # what a row's children feed on

    def norm(self, x: Tensor, name: str) -> Tensor:
        if self.fault == f"no {name}":
            return x
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.w[name]

    def frequencies(self) -> tuple[Tensor, float, float]:
        """-> (radians a position, size of cos and sin, the temperature in latent scores)."""
        theta, width = self.c["rope_theta"], self.rope_width
        plain = torch.tensor([theta ** (-2 * i / width) for i in range(width // 2)]).double()
        yarn = self.c.get("rope_scaling")
        if yarn is None or self.fault == "no yarn":
            return plain, 1.0, 1.0
        ends = []
        for beta in (yarn["beta_fast"], yarn["beta_slow"]):
            waves = yarn["original_max_position_embeddings"] / (beta * 2 * math.pi)
            ends.append(width * math.log(waves) / (2 * math.log(theta)))
        low, high = max(0, math.floor(ends[0])), min(width - 1, math.ceil(ends[1]))
        slow = [min(1.0, max(0.0, (i - low) / (high - low or 0.001))) for i in range(width // 2)]
        kept = 1 - torch.tensor(slow).double()
        blend = plain / yarn["factor"] * (1 - kept) + plain * kept

        def mscale(key: str, absent: float) -> float:
            return 0.1 * yarn.get(key, absent) * math.log(yarn["factor"]) + 1

        all_dim = mscale("mscale_all_dim", 0.0)
        size = mscale("mscale", 1.0) / all_dim
        return blend, (1.0 if self.fault == "no size" else size), all_dim**2

    def rope(self, x: Tensor, position: int) -> Tensor:
        """x [..., A], turned as complex numbers: neighbours if latent, else i with i + A/2."""
        radians, size, _ = self.frequencies()
        turn = torch.polar(torch.full_like(radians, size), radians * position)
        if self.latent != (self.fault == "rope layout"):
            pairs = torch.complex(x[..., 0::2], x[..., 1::2]) * turn
            return torch.stack([pairs.real, pairs.imag], -1).flatten(-2)
        half = x.shape[-1] // 2
        pairs = torch.complex(x[..., :half], x[..., half:]) * turn
        return torch.cat([pairs.real, pairs.imag], -1)

    def project(self, x: Tensor, position: int) -> tuple[Tensor, Tensor, Tensor]:
        """-> q, k, v of one row, [H, A] each, latent ones expanded."""
        if not self.latent:
            q, k, v = (
                (self.w[f"self_attn.{n}_proj"] @ x).view(-1, self.c["head_dim"]) for n in "qkv"
            )
            serves = self.heads // len(k)
            order = [i // serves for i in range(self.heads)]
            if self.fault == "key heads":
                order = [i % len(k) for i in range(self.heads)]
            return self.rope(q, position), self.rope(k, position)[order], v[order]
        nope, rank = self.c["qk_nope_head_dim"], self.c["kv_lora_rank"]
        q_a = self.norm(self.w["self_attn.q_a_proj"] @ x, "self_attn.q_a_layernorm")
        q = (self.w["self_attn.q_b_proj"] @ q_a).view(self.heads, -1)
        row = self.w["self_attn.kv_a_proj_with_mqa"] @ x
        latent = self.norm(row[:rank], "self_attn.kv_a_layernorm")
        kv = (self.w["self_attn.kv_b_proj"] @ latent).view(self.heads, -1)
        key = self.rope(row[rank:], position).expand(self.heads, -1)
        q = torch.cat([q[:, :nope], self.rope(q[:, nope:], position)], -1)
        return q, torch.cat([kv[:, :nope], key], -1), kv[:, nope:]

    def fuse(self, taps: Tensor) -> Tensor:
        names = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")
        parts = list(taps.double().chunk(3))
        if self.c.get("use_aux_norm") and self.fault != "no fc_norm":
            parts = [self.norm(part, name) for part, name in zip(parts, names)]
        if self.fault == "tap order":
            parts = parts[::-1]
        joined = torch.cat(parts)
        if self.c.get("norm_before_fc"):
            joined = self.norm(joined, "input_norm")
        return self.w["fc"] @ joined

    def row(self, token: int, hidden: Tensor, position: int, sees: list[int]) -> Tensor:
        """Append one row, which sees the rows `sees` and itself -> log-probabilities over V."""
        embedded = self.norm(self.w["embed_tokens"][token], "input_layernorm")
        normed = self.norm(hidden, "hidden_norm")
        order = (normed, embedded) if self.fault == "concat order" else (embedded, normed)
        if self.fault == "position":
            position += len(self.states) % 3
        q, k, v = self.project(torch.cat(order), position)
        self.keys.append(k)
        self.values.append(v)
        if self.fault == "sees siblings":
            sees = list(range(len(self.states)))
        seen = [*sees, len(self.states)]
        scale = q.shape[-1] ** -0.5
        if self.latent == (self.fault != "mscale"):  # the temperature is latent attention's alone
            scale *= self.frequencies()[2]
        scores = torch.stack([(q * self.keys[i]).sum(-1) for i in seen]) * scale
        weights = scores.softmax(0)
        mixed = sum(weights[n, :, None] * self.values[i] for n, i in enumerate(seen))
        residual = self.c.get("norm_before_residual", False) != (self.fault == "residual")
        r = (normed if residual else hidden) + self.w["self_attn.o_proj"] @ mixed.flatten()
        inner = self.norm(r, "post_attention_layernorm")
        gate, up = self.w["mlp.gate_proj"] @ inner, self.w["mlp.up_proj"] @ inner
        r = r + self.w["mlp.down_proj"] @ (gate * gate.sigmoid() * up)
        out = self.norm(r, "norm")
        feed_normed = self.c.get("norm_output", False) != (self.fault == "fed back")
        self.states.append(out if feed_normed else r)
        logprobs = (self.w["lm_head"] @ out * self.c.get("logit_scale", 1.0)).log_softmax(0)
        whole = torch.full((self.c["vocab_size"],), -math.inf).double()
        ids = torch.arange(len(logprobs))
        return whole.index_put((ids + self.w.get("d2t", 0 * ids).long(),), logprobs)


def taps_of(rows: int, seed: int) -> Tensor:
    """Hidden states of growing size, as they are up a real model."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.tensor([0.5, 1.0, 2.0]).repeat_interleave(SIZES["hidden_size"])
    return torch.randn(rows, 3 * SIZES["hidden_size"], generator=generator) * sizes


TEXT = [7, 300, 17, 71, 511, 72, 90, 8, 45, 263]  # 6 of prompt, 3 accepted, the anchor
TREE = [(0, 33), (0, 400), (1, 5), (1, 6), (2, 5), (4, 250), (3, 9)]  # (parent, token) of 1, 2 ..


def plain_rows(plain: Plain) -> list[Tensor]:
    """Log-probabilities after rows 5 and 8 and after every tree node, the root first."""
    rows = []
    for position, taps in enumerate(torch.cat([taps_of(6, 1), taps_of(3, 2)])):
        sees = list(range(position))
        rows.append(plain.row(TEXT[position + 1], plain.fuse(taps), position, sees))
    of_node, path, depth = {0: 8}, {0: list(range(9))}, {0: 0}
    for node, (parent, token) in enumerate(TREE, 1):
        depth[node] = depth[parent] + 1
        hidden = plain.states[of_node[parent]]
        of_node[node] = len(plain.states)
        rows.append(plain.row(token, hidden, 8 + depth[node], path[parent]))
        path[node] = [*path[parent], of_node[node]]
    return [rows[5], *rows[8:]]


def engine_rows(folder: Path, name: str) -> list[Tensor]:
    """The same by the proposer: two commits, then three levels of a tree."""
    target = load_target(folder / "target", CPU, torch.float32, torch.float32, CONTEXT)
    head = load_head(folder / name, target, CPU, torch.float32, CONTEXT)
    proposer = Eagle3Proposer(head, CONTEXT, window=len(TREE))
    proposer.reset()
    rows = []

    def expand(tree: DraftTree, nodes: list[int]) -> None:
        token_FK, logprob_FK = proposer.expand(tree, torch.tensor(nodes), 512)
        whole = torch.full((len(nodes), 512), -math.inf)
        rows.extend(whole.scatter(1, token_FK, logprob_FK).double())

    proposer.commit(torch.tensor(TEXT[:6]), taps_of(6, 1), TEXT[6])
    expand(DraftTree.root(TEXT[6], CPU), [0])
    proposer.commit(torch.tensor(TEXT[6:9]), taps_of(3, 2), TEXT[9])
    tree = DraftTree.root(TEXT[9], CPU)
    expand(tree, [0])
    # children of one parent at a time, so that node numbers are those of TREE
    for parents, nodes in (((0,), [1, 2]), ((1, 2), [3, 4, 5]), ((4, 3), [6, 7])):
        for parent in parents:
            token_K = torch.tensor([[token for at, token in TREE if at == parent]])
            tree, _ = tree.grow(torch.tensor([parent]), token_K, torch.zeros(token_K.shape))
        expand(tree, nodes)
    return rows


@pytest.fixture(scope="module")
def rows_of(folder: Path) -> Callable[[str], list[Tensor]]:
    return {name: engine_rows(folder, name) for name in VARIANTS}.__getitem__


def distance(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest difference of a log-probability; the same ids must have one."""
    assert len(found) == len(wanted) == 2 + len(TREE)
    worst = 0.0
    for a, b in zip(found, wanted):
        assert torch.equal(a.isfinite(), b.isfinite())
        worst = max(worst, (a - b)[a.isfinite()].abs().max().item())
    return worst


@pytest.mark.parametrize("name", VARIANTS)
def test_rows_are_those_of_the_plain_head(
    folder: Path, rows_of: Callable[[str], list[Tensor]], name: str
) -> None:
    wanted = plain_rows(Plain(folder / name, folder / "target"))
    assert min(row[row.isfinite()].std() for row in wanted) > 0.3  # not flat: faults would show
    assert distance(rows_of(name), wanted) < TOLERANCE


NORMS = ["no input_layernorm", "no hidden_norm", "no post_attention_layernorm", "no norm"]
COMMON = [*NORMS, "concat order", "residual", "rope layout", "tap order", "fed back", "position",
          "sees siblings", "eps"]  # fmt: skip
FAULTS = {
    "llama, midlayer, d2t": [*COMMON, "key heads", "no yarn", "mscale"],
    "llama, model.layers.0, full vocabulary, no ids": [*COMMON, "no size"],
    "EAGLE-3.1": [*COMMON, "no fc_norm"],
    "speculators": [*COMMON, "no input_norm"],
    "latent": [*COMMON, "no self_attn.q_a_layernorm", "no self_attn.kv_a_layernorm", "mscale",
               "no yarn"],
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_the_comparison_sees_faults(
    folder: Path, rows_of: Callable[[str], list[Tensor]], name: str
) -> None:
    found = rows_of(name)
    faulty = {
        fault: distance(found, plain_rows(Plain(folder / name, folder / "target", fault)))
        for fault in FAULTS[name]
    }
    print(name, {fault: f"{size:.1e}" for fault, size in faulty.items()})
    assert {fault: size for fault, size in faulty.items() if size < 50 * TOLERANCE} == {}


# the engine


def run(engine: Engine, speculate: bool) -> list[int]:
    params = GenerationParams(max_new_tokens=24, ignore_eos=True)
    sampling = SamplingParams()
    made = engine.generate(
        list(b"a head of its own"), sampling, params, pick_rule(None, sampling), speculate
    )
    for _ in made:
        pass
    assert not speculate or any(stats.nodes > 4 for stats in made.report.rounds)
    return made.token_ids


@pytest.mark.parametrize("name", VARIANTS)
def test_text_is_plain_text_and_notes_say_what_was_met(folder: Path, name: str) -> None:
    notes: list[str] = []
    config = EngineConfig(
        str(folder / "target"), str(folder / name), "eagle3", "eagle2",
        TreeConfig(num_steps=3, topk=3, num_draft_nodes=9), context=CONTEXT,
    )  # fmt: skip
    engine = Engine(config, notes.append)
    assert run(engine, True) == run(engine, False)
    assert tuple(notes) == tuple(f"drafter: {line}" for line in VARIANTS[name][2])


def test_other_taps_change_the_drafts_and_not_the_text(folder: Path) -> None:
    name = "llama, midlayer, d2t"
    tokens, first = [], []
    for taps in (None, (2, 3, 4), (4, 2, 3), (0, 3, 6)):
        config = EngineConfig(
            str(folder / "target"), str(folder / name), "eagle3", context=CONTEXT, aux_layers=taps
        )
        notes: list[str] = []
        engine = Engine(config, notes.append)
        tokens.append(run(engine, True))
        first.append(engine.proposer.root_logprob_U)  # type: ignore[union-attr]
        if taps is not None:
            named = ", ".join(map(str, sorted(taps)))
            assert notes[-1] == f"drafter: taps before layers {named} (--aux-layers)"
    assert tokens[0] == tokens[1] == tokens[2] == tokens[3]
    assert torch.equal(first[0], first[1]) and torch.equal(first[0], first[2])
    assert not torch.allclose(first[0], first[3], atol=0.1)


# layer ids


def eagle3_config(**changes: Any) -> Eagle3Config:
    return Eagle3Config.from_json(head_config(TARGET) | changes, "config.json")


@pytest.mark.parametrize(
    "ids, wanted, said",
    [
        (None, (2, 30, 58), "default"),
        ([1, 29, 57], (2, 30, 58), "output-of-layer 1, 29, 57"),
        ([57, 1, 29], (2, 30, 58), "output-of-layer 1, 29, 57"),
        ([2, 30, 58], (2, 30, 58), "input-of-layer 2, 30, 58"),
        ([0, 30, 61], (0, 30, 61), "input-of-layer 0, 30, 61"),
        ([1, 30, 60], (2, 31, 61), "output-of-layer 1, 30, 60"),
    ],
    ids=str,
)
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "top level"])
def test_layer_ids_of_kimis_61_layers(
    ids: list[int] | None, wanted: tuple[int, ...], said: str, nested: bool
) -> None:
    entry = {"eagle_aux_hidden_state_layer_ids": ids}
    config = eagle3_config(**({"eagle_config": entry} if nested else {"eagle_config": {}, **entry}))
    boundaries, source = choose_taps(config, None, 61, "config.json")
    assert boundaries == wanted and said in source
    assert choose_taps(config, (58, 2, 30), 61, "config.json") == ((2, 30, 58), "--aux-layers")


@pytest.mark.parametrize("ids", [[2, 30, 62], [1, 30, 61], [-1, 2, 3], [2, 2, 30]], ids=str)
def test_layer_ids_that_do_not_fit(ids: list[int]) -> None:
    config = eagle3_config(eagle_config={"eagle_aux_hidden_state_layer_ids": ids})
    with pytest.raises(UserError, match="eagle_aux_hidden_state_layer_ids.*61"):
        choose_taps(config, None, 61, "config.json")


def test_another_number_of_taps(folder: Path, tmp_path: Path) -> None:
    ids = {"eagle_aux_hidden_state_layer_ids": [2, 3, 4, 5]}
    config = head_config(TARGET, num_aux_hidden_states=4, eagle_config=ids)
    write_head(tmp_path / "head", config)
    target = load_target(folder / "target", CPU, torch.float32, torch.float32, CONTEXT)
    head = load_head(tmp_path / "head", target, CPU, torch.float32, CONTEXT)
    assert target.tap_boundaries == (2, 3, 4, 5)
    assert head.fc.weight.shape == (64, 4 * 64)
    with pytest.raises(UserError, match="fuses 4 states"):
        load_head(tmp_path / "head", target, CPU, torch.float32, CONTEXT, (2, 3, 4))
    edit_json(tmp_path / "head" / "config.json", eagle_config={})
    with pytest.raises(UserError, match="num_aux_hidden_states is 4.*--aux-layers"):
        check_head(tmp_path / "head", target.config)


# what is shared and what is not


def test_the_file_wins_over_the_target(folder: Path) -> None:
    target = load_target(folder / "target", CPU, torch.float32, torch.float32, CONTEXT)
    for name, (_, how, _) in VARIANTS.items():
        head = load_head(folder / name, target, CPU, torch.float32, CONTEXT)
        assert (head.embed_tokens is target.embed_tokens) != how.get("embedding", False)
        assert (head.lm_head is target.lm_head) != how.get("lm_head", True)


def test_a_map_of_the_full_vocabulary(folder: Path, tmp_path: Path) -> None:
    """SpecForge writes d2t for every head; a permutation is as good as zeros."""
    name = "llama, model.layers.0, full vocabulary, no ids"
    shutil.copytree(folder / name, tmp_path / "head")
    order = torch.randperm(512, generator=torch.Generator().manual_seed(0))
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    tensors["model.d2t"] = order - torch.arange(512)
    save_file(tensors, tmp_path / "head" / "model.safetensors")
    target = load_target(folder / "target", CPU, torch.float32, torch.float32, CONTEXT)
    head = load_head(tmp_path / "head", target, CPU, torch.float32, CONTEXT)
    assert torch.equal(head.to_target_ids(torch.arange(512)), order)


# what is refused


def set_d2t(id_U: Tensor, offsets: bool = True) -> Callable[[dict[str, Tensor]], object]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["d2t"] = id_U - torch.arange(len(id_U)) * offsets

    return change


def with_t2d(
    change: Callable[[dict[str, Tensor]], object],
) -> Callable[[dict[str, Tensor]], object]:
    def both(tensors: dict[str, Tensor]) -> None:
        marks = torch.zeros(512, dtype=torch.bool)
        marks[tensors["d2t"] + torch.arange(256)] = True
        tensors["t2d"] = marks
        change(tensors)

    return both


def spoil(name: str, value: float) -> Callable[[dict[str, Tensor]], object]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name].view(-1)[3] = value

    return change


LOW = torch.arange(256)
TWICE = LOW.clone()
TWICE[9] = 4
# what is done to a good Llama head with d2t -> words of the line
TENSORS: dict[str, tuple[Callable[[dict[str, Tensor]], object], tuple[str, ...]]] = {
    "d2t out of range": (spoil("d2t", 600), ("d2t[3]", "600", "603", "511")),
    "d2t negative": (spoil("d2t", -4), ("d2t[3]", "-4", "-1")),
    "d2t of target ids": (set_d2t(draft_ids(256, 512), False), ("target ids, not offsets",)),
    "d2t of low target ids": (set_d2t(LOW, False), ("target ids, not offsets",)),
    "d2t of target ids beside t2d": (
        with_t2d(set_d2t(draft_ids(256, 512), False)), ("target ids, not offsets",),
    ),
    "d2t twice on one id": (set_d2t(TWICE), ("draft ids 4 and 9 both to 4",)),
    "t2d of another d2t": (with_t2d(set_d2t(LOW)), ("d2t and t2d",)),
    "d2t of int32": (
        lambda tensors: tensors.update(d2t=tensors["d2t"].int()), ("d2t", "int32", "int64"),
    ),
    "no d2t": (lambda tensors: tensors.pop("d2t"), ("draft_vocab_size", "256", "512", "d2t")),
    "no lm_head": (lambda tensors: tensors.pop("lm_head.weight"), ("256", "512", "no lm_head")),
    "NaN in a norm": (
        spoil("midlayer.hidden_norm.weight", math.nan), ("midlayer.hidden_norm.weight", "NaN"),
    ),
    "infinity in fc": (spoil("fc.weight", math.inf), ("fc.weight", "infinity")),
    "a tensor under two names": (
        lambda tensors: tensors.update({"model.fc.weight": tensors["fc.weight"].clone()}),
        ("model.fc.weight", "no place"),
    ),
    "fc_norm without its flag": (
        lambda tensors: tensors.update({"fc_norm.0.weight": torch.ones(64)}),
        ("fc_norm.0.weight", "no place"),
    ),
}  # fmt: skip
IDS = "eagle_aux_hidden_state_layer_ids"
CONFIGS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "another hidden size": ({"hidden_size": 32}, ("width 32", "64")),
    "another hidden size of its own": (
        {"hidden_size": 32, "target_hidden_size": 64}, ("hidden_size is 32", "embed_tokens", "64"),
    ),
    "another target": ({"target_hidden_size": 7168}, ("width 7168", "64")),
    "another vocabulary": ({"vocab_size": 500}, ("vocab_size is 500", "512")),
    "unknown architecture": (
        {"architectures": ["MambaEagle3"]},
        ("architectures", "MambaEagle3", "Eagle3DeepseekV2ForCausalLM"),
    ),
    "layers beyond the last": ({"eagle_config": {IDS: [2, 3, 8]}}, (IDS, "[2, 3, 8]", "0 to 7")),
    "outputs beyond the last": ({"eagle_config": {IDS: [1, 3, 7]}}, (IDS, "[2, 4, 8]", "0 to 7")),
    "last hidden state only": (
        {"eagle_config": {"use_aux_hidden_state": False}}, ("use_aux_hidden_state", "False"),
    ),
    "mtp norm": ({"eagle_config": {"use_mtp_layernorm": True}}, ("use_mtp_layernorm", "True")),
    "no last norm": ({"eagle_config": {"use_last_layernorm": False}}, ("use_last_layernorm",)),
    "medusa heads": ({"eagle_config": {"parallel_draft_step": 4}}, ("parallel_draft_step", "4")),
    "two layers": ({"num_hidden_layers": 2}, ("num_hidden_layers", "2")),
    "quantised": ({"quantization_config": {"quant_method": "fp8"}}, ("quantization_config",)),
    "both norms before fc": (
        {"fc_norm": True, "norm_before_fc": True}, ("fc_norm and norm_before_fc",),
    ),
    "a flag that is none": ({"norm_output": "yes"}, ("norm_output", "'yes'", "true or false")),
    "norms that the file lacks": ({"fc_norm": True}, ("fc_norm.0.weight is missing",)),
    "rope of another kind": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ("rope_scaling", "llama3"),
    ),
    "odd heads": ({"head_dim": 15}, ("rotary width", "15")),
    "speculators, no residual key": (
        {"architectures": [SPECULATORS], "transformer_layer_config": {"model_type": "llama"}},
        ("norm_before_residual", "missing"),
    ),
    "speculators of another layer": (
        {"architectures": [SPECULATORS], "transformer_layer_config": {"model_type": "qwen3"}},
        ("transformer_layer_config", "qwen3"),
    ),
}  # fmt: skip
FLAGS: dict[str, tuple[str, ...]] = {
    "--aux-layers 2,x,4": ("--aux-layers 2,x,4", "2,30,58"),
    "--aux-layers 2,,4": ("--aux-layers 2,,4", "2,30,58"),
    "--aux-layers=-1,2,3": ("--aux-layers -1,2,3", "2,30,58"),
    "--aux-layers 2,2,3": ("--aux-layers 2,2,3", "different"),
    "--aux-layers 2,3": ("--aux-layers 2,3", "3 states"),
    "--aux-layers 2,3,8": ("--aux-layers 2,3,8", "0 to 7"),
}


@pytest.fixture
def head(folder: Path, tmp_path: Path) -> Path:
    """A copy of the first variant."""
    shutil.copytree(folder / "llama, midlayer, d2t", tmp_path / "head")
    return tmp_path / "head"


def argv(folder: Path, head: Path) -> list[str]:
    return ["--model", str(folder / "target"), "--draft-model", str(head), "-n", "2", "hello"]


@pytest.mark.parametrize("case", TENSORS)
def test_spoiled_tensors(
    capsys: pytest.CaptureFixture[str], folder: Path, head: Path, case: str
) -> None:
    change, words = TENSORS[case]
    change_tensors(head / "model.safetensors", change)
    refused(capsys, argv(folder, head), *words)


@pytest.mark.parametrize("case", CONFIGS)
def test_config_that_does_not_fit(
    capsys: pytest.CaptureFixture[str], folder: Path, head: Path, case: str
) -> None:
    changes, words = CONFIGS[case]
    edit_json(head / "config.json", **changes)
    refused(capsys, argv(folder, head), "head", *words)


@pytest.mark.parametrize("typed", FLAGS)
def test_aux_layers_that_do_not_fit(
    capsys: pytest.CaptureFixture[str], folder: Path, head: Path, typed: str
) -> None:
    refused(capsys, [*argv(folder, head), *typed.split()], *FLAGS[typed])


@pytest.mark.parametrize("other", [["--no-draft"], ["--proposer", "ngram"]], ids=" ".join)
def test_aux_layers_without_a_head(capsys: pytest.CaptureFixture[str], other: list[str]) -> None:
    refused(capsys, ["--aux-layers", "2,3,4", *other], "--aux-layers", *other)


def test_a_wrong_head_is_refused_before_the_targets_weights(
    capsys: pytest.CaptureFixture[str], folder: Path, head: Path, tmp_path: Path
) -> None:
    """The target's files are cut: reading them would be the error."""
    shutil.copytree(folder / "target", tmp_path / "target")
    for file in (tmp_path / "target").glob("*.safetensors"):
        cut_file(file, 1000)
    refused(capsys, argv(tmp_path, head), "whole safetensors file")
    edit_json(head / "config.json", target_hidden_size=96)
    refused(capsys, argv(tmp_path, head), "head/config.json", "width 96")


def test_notes_are_shown_at_start(
    capsys: pytest.CaptureFixture[str], folder: Path, head: Path
) -> None:
    assert main([*argv(folder, head), "--aux-layers", "1,2,3"]) == 0
    shown = capsys.readouterr().err.splitlines()[:3]
    assert all(line.startswith("[drafter: ") for line in shown)
    assert shown[2] == "[drafter: taps before layers 1, 2, 3 (--aux-layers)]"
