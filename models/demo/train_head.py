"""The demo pair's drafter: an EAGLE-3 head trained against the exported INT4 target.

The loop is minispec/train.py; here are the demo's sizes, its batches (taps and logits of the
target on the corpus mixture, computed as they are needed) and its draft vocabulary.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ...train import (
    HeadBatch,
    HeadOptions,
    draft_vocabulary,
    evaluate_head,
    export_head,
    head_json,
    init_head,
    mixed_precision,
    train_head,
)
from ..eagle3 import Eagle3, Eagle3Config, resolve_taps
from .corpus import Mixture
from .export import load_target
from .train_target import TrainableKimi


@dataclass(frozen=True)
class HeadPlan:
    """Sizes and data of the demo's head."""

    intermediate: int
    draft_vocab: int
    aux_layer_ids: tuple[int, ...]
    tokens: int
    batch: int  # texts an update
    sequence: int
    story_share: float
    depths: int
    peak_lr: float
    warmup: int
    eval_batches: int


def config_for(target: TrainableKimi, plan: HeadPlan, special: dict[str, int]) -> dict[str, object]:
    """The head's config.json: the target's width in heads of 64."""
    config = target.config
    heads = max(1, config.hidden_size // 64)
    sizes = {
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.hidden_size,
        "intermediate_size": plan.intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": config.hidden_size // heads,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": 10000.0,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": plan.draft_vocab,
    }
    return head_json(sizes, plan.aux_layer_ids, special)


@torch.no_grad()
def observe(target: TrainableKimi, ids_BT: torch.Tensor) -> HeadBatch:
    """What the target computes on some texts."""
    with mixed_precision(ids_BT.device):
        logits_BTV, taps_BTX = target(ids_BT)
    assert taps_BTX is not None
    return HeadBatch(ids_BT, taps_BTX, logits_BTV)


def training_batches(
    target: TrainableKimi, mixture: Mixture, batch: int
) -> Iterator[HeadBatch]:
    """The mixture without end."""
    step = 0
    while True:
        yield observe(target, mixture.batch(step, batch)[:, :-1])
        step += 1


def new_head(
    target: TrainableKimi, plan: HeadPlan, mixture: Mixture, special: dict[str, int]
) -> tuple[Eagle3, dict[str, object], torch.Tensor]:
    """-> (an untrained head beside its target, its config.json, t2d)."""
    raw = config_for(target, plan, special)
    config = Eagle3Config.from_json(raw, "the demo's head")
    head = Eagle3(config, torch.float32, own_embedding=False)
    head.d2t, t2d_V = draft_vocabulary(
        mixture.token_counts(config.vocab_size), config.draft_vocab_size
    )
    init_head(head, target.lm_head.weight.cpu(), target.norm.weight.cpu())
    device = target.lm_head.weight.device
    head.to(device)
    head.d2t = head.d2t.to(device)
    head.finish_loading(target.embed_tokens.weight, target.config.max_position_embeddings)
    return head, raw, t2d_V


def frozen_target(folder: Path, plan: HeadPlan, device: torch.device) -> TrainableKimi:
    """The exported target, to be observed."""
    target = load_target(folder).to(device).eval().requires_grad_(False)
    target.tap_boundaries = resolve_taps(plan.aux_layer_ids, target.config.num_hidden_layers)
    return target


def run_head_stage(
    work: Path, plan: HeadPlan, device: torch.device, deadline: float, out: Path
) -> dict[str, object]:
    """Train, evaluate on each kind of held-out text, export to `out`."""
    target = frozen_target(work / "target", plan, device)
    special = json.loads((work / "target" / "generation_config.json").read_text())
    special["eos_token_id"] = special["eos_token_id"][0]
    mixture = Mixture(work, "train", plan.sequence, plan.story_share, device)
    head, raw, t2d_V = new_head(target, plan, mixture, special)
    updates = max(1, plan.tokens // (plan.batch * plan.sequence))
    options = HeadOptions(
        depths=plan.depths, updates=updates, peak_lr=plan.peak_lr, warmup=plan.warmup
    )
    batches = training_batches(target, mixture, plan.batch)
    log = train_head(head, batches, options, deadline)
    export_head(head, raw, t2d_V, out)
    held_out = Mixture(work, "heldout", plan.sequence, plan.story_share, device)
    scores = {}
    for kind, windows in held_out.kinds.items():
        ids = (windows.take(i * plan.batch, plan.batch)[:, :-1] for i in range(plan.eval_batches))
        scores[kind] = evaluate_head(head, (observe(target, x) for x in ids), plan.depths)
    return {
        "tokens": log[-1]["update"] * plan.batch * plan.sequence,  # type: ignore[operator]
        "parameters": sum(p.numel() for p in head.parameters() if p.requires_grad),
        "held_out": scores,
        "log": log,
    }
