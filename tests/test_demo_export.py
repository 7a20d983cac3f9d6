"""The demo's training code against the engine: exported target, and the head's unrolled steps."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from minispec.models.checkpoint import head_json, target_json
from minispec.models.config import KimiConfig
from minispec.models.demo.export import export_target, load_target
from minispec.models.demo.train_target import TrainableKimi
from minispec.models.eagle3 import Eagle3, Eagle3Config
from minispec.models.interface import Loadable, Step
from minispec.models.kimi_k25 import KimiK25
from minispec.train import (
    HeadBatch,
    HeadOptions,
    draft_vocabulary,
    export_head,
    init_head,
    train_head,
    unroll,
)

SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
    "num_hidden_layers": 6, "num_attention_heads": 2, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.0, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 12, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
}  # fmt: skip
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
TAPS = (2, 3, 4)


class Rows:
    """The least cache there can be."""

    def __init__(self, layers: int, length: int, width: int) -> None:
        self.table = torch.zeros(layers, length, width)

    def write(self, layer: int, slot_T: Tensor, row_TC: Tensor) -> None:
        self.table[layer, slot_T] = row_TC

    def rows(self, layer: int, end: int) -> Tensor:
        return self.table[layer, :end]


def fill(model: Loadable, folder: Path) -> None:
    stored = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
    for placement in model.placements():
        placement.into.copy_(stored[placement.name])


def target_of_size(scale: float = 6.0) -> tuple[TrainableKimi, dict[str, object]]:
    """A model whose weights are big enough for every part to matter in the logits."""
    torch.manual_seed(0)
    raw = target_json(SIZES, SPECIAL)
    model = TrainableKimi(KimiConfig.from_json(raw, "test")).eval()
    for name, tensor in model.state_dict().items():
        if tensor.ndim > 1:
            tensor.mul_(scale)
        elif "correction_bias" in name:
            tensor.normal_(std=0.2)
        else:
            tensor.uniform_(0.5, 1.5)
        if "expert_" not in name and "bias" not in name:  # what export rounds
            tensor.copy_(tensor.bfloat16())
    model.fake_quant = True
    model.tap_boundaries = TAPS
    return model, raw


def head_of(target: TrainableKimi) -> tuple[Eagle3, dict[str, object], Tensor]:
    sizes = {
        "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
        "vocab_size": 64, "draft_vocab_size": 32, "max_position_embeddings": 64,
    }  # fmt: skip
    raw = head_json(sizes, TAPS, SPECIAL)
    head = Eagle3(Eagle3Config.from_json(raw, "test"), torch.float32, own_embedding=False)
    head.d2t, t2d_V = draft_vocabulary(torch.rand(64), 32)
    init_head(head, target.lm_head.weight, target.norm.weight)
    head.finish_loading(nn.Parameter(target.embed_tokens.weight.detach()), 64)
    return head, raw, t2d_V


@pytest.fixture
def ids_T() -> Tensor:
    return torch.randint(0, 64, (40,), generator=torch.Generator().manual_seed(1))


def test_exported_target_gives_the_same_logits_in_the_engine(tmp_path: Path, ids_T: Tensor) -> None:
    model, raw = target_of_size()
    export_target(model, raw, None, tmp_path)
    with torch.no_grad():
        logits_BTV, taps_BTX = model(ids_T[None])
    stored = json.loads((tmp_path / "config.json").read_text())
    engine = KimiK25(KimiConfig.from_json(stored, "test"), torch.float32, torch.float32)
    engine.tap_boundaries = TAPS
    fill(engine, tmp_path)
    engine.finish_loading(64)
    cache = Rows(engine.num_layers, 64, engine.cache_width)
    out = engine.forward(Step.chunk(ids_T, 0), cache)
    assert logits_BTV.std() > 0.1
    assert out.taps_TD is not None and taps_BTX is not None
    torch.testing.assert_close(out.taps_TD, taps_BTX[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(out.logits_TV, logits_BTV[0], atol=1e-4, rtol=1e-4)
    model.fake_quant = False  # and the quantisation is no empty act
    with torch.no_grad():
        assert (model(ids_T[None])[0] - logits_BTV).abs().max() > 1e-2


def test_load_target_gives_back_what_was_exported(tmp_path: Path, ids_T: Tensor) -> None:
    model, raw = target_of_size()
    export_target(model, raw, None, tmp_path)
    again = load_target(tmp_path).eval()
    with torch.no_grad():
        wanted = model(ids_T[None])[0]
        assert torch.equal(again(ids_T[None])[0], wanted)
        again.fake_quant = True
        assert torch.equal(again(ids_T[None])[0], wanted)


def test_unrolled_steps_equal_drafting_with_a_cache(ids_T: Tensor) -> None:
    model, _ = target_of_size()
    head, _, _ = head_of(model)
    depths, anchor = 3, 20
    with torch.no_grad():
        logits_BTV, taps_BTX = model(ids_T[None])
        batch = HeadBatch(ids_T[None], taps_BTX, logits_BTV)
        unrolled = [x[0, anchor].log_softmax(-1) for x in unroll(head, batch, depths)]
    cache = Rows(1, 64, head.config.cache_width)
    count = anchor + 1
    hidden_TD = head.fuse(taps_BTX[0, :count]).detach()
    r_TD, log_prob_TU = head.forward(Step.chunk(ids_T[1 : count + 1], 0), hidden_TD, cache)
    for depth, wanted_U in enumerate(unrolled):
        torch.testing.assert_close(log_prob_TU[-1], wanted_U, atol=1e-4, rtol=1e-4)
        token_T = ids_T[count + 1 + depth : count + 2 + depth]
        r_TD, log_prob_TU = head.forward(Step.chunk(token_T, count + depth), r_TD[-1:], cache)


def test_head_learns_and_its_export_loads(tmp_path: Path) -> None:
    model, _ = target_of_size()
    head, raw, t2d_V = head_of(model)
    ids_BT = torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        logits_BTV, taps_BTX = model(ids_BT)
    batch = HeadBatch(ids_BT, taps_BTX, logits_BTV)
    options = HeadOptions(depths=2, updates=40, peak_lr=5e-3, warmup=5)
    embedding = head.embed_tokens.clone()
    log = train_head(head, iter([batch] * 40), options, float("inf"))
    first, last = log[0], log[-1]
    assert last["loss"] < first["loss"] - 0.2
    assert min(last["agree"]) > 0.15 > 5 * max(first["agree"])  # by chance 1 in 64
    assert torch.equal(head.embed_tokens, embedding)
    export_head(head, raw, t2d_V, tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    loaded = Eagle3(Eagle3Config.from_json(stored, "test"), torch.float32, own_embedding=False)
    fill(loaded, tmp_path)
    assert torch.equal(loaded.fc.weight, head.fc.weight.bfloat16().float())
    kept = loaded.to_target_ids(torch.arange(32))
    assert torch.equal(kept, t2d_V.nonzero()[:, 0])
