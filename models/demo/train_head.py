"""The demo pair's drafter: an EAGLE-3 head trained against the exported INT4 target.

The loop is minispec/train.py; here are the demo's sizes, its batches (taps and logits of the
target on the corpus mixture, computed as they are needed) and its draft vocabulary.

Shape suffixes: B texts, T tokens of a text, V vocabulary, X taps joined.
"""

import itertools
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...train import (
    HeadBatch,
    HeadOptions,
    draft_vocabulary,
    evaluate_head,
    export_head,
    init_head,
    mixed_precision,
    train_head,
)
from ..checkpoint import head_json
from ..eagle3 import Eagle3
from ..eagle3_config import Eagle3Config, resolve_taps
from .corpus import SPECIAL, Mixture
from .export import load_target
from .train_target import TrainableKimi


@dataclass(frozen=True)
class HeadPlan:
    """Sizes and data of the demo's head."""

    intermediate: int = 1024
    draft_vocab: int = 3072
    aux_layer_ids: tuple[int, ...] = (2, 4, 5)
    tokens: int = 60_000_000
    batch: int = 32  # texts an update
    sequence: int = 1024
    story_share: float = 0.7
    depths: int = 5
    peak_lr: float = 1e-3
    warmup: int = 100
    eval_batches: int = 4

    @property
    def options(self) -> HeadOptions:
        updates = max(1, self.tokens // (self.batch * self.sequence))
        return HeadOptions(self.depths, updates=updates, peak_lr=self.peak_lr, warmup=self.warmup)


def new_head(
    target: TrainableKimi, plan: HeadPlan, mixture: Mixture
) -> tuple[Eagle3, dict[str, object], Tensor]:
    """-> (an untrained head of the target's width in heads of 64, its config.json, t2d)."""
    width = target.config.hidden_size
    heads = max(1, width // 64)
    sizes = {
        "hidden_size": width,
        "target_hidden_size": width,
        "intermediate_size": plan.intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": width // heads,
        "max_position_embeddings": target.config.max_position_embeddings,
        "rms_norm_eps": target.config.rms_norm_eps,
        "rope_theta": 10000.0,
        "vocab_size": target.config.vocab_size,
        "draft_vocab_size": plan.draft_vocab,
    }
    raw = head_json(sizes, plan.aux_layer_ids, SPECIAL)
    config = Eagle3Config.from_json(raw, "the demo's head")
    head = Eagle3(config, torch.float32, own_embedding=False)
    head.d2t, t2d_V = draft_vocabulary(mixture.token_counts(config.vocab_size), plan.draft_vocab)
    init_head(head, target.lm_head.weight.cpu(), target.norm.weight.cpu())
    device = target.lm_head.weight.device
    head.to(device)
    head.d2t = head.d2t.to(device)
    head.finish_loading(target.embed_tokens.weight, target.config.max_position_embeddings)
    return head, raw, t2d_V


@torch.no_grad()
def observe(target: TrainableKimi, window_BT: Tensor) -> HeadBatch:
    """What the target computes on some texts, which are windows without their last token."""
    ids_BT = window_BT[:, :-1]
    with mixed_precision(ids_BT.device):
        logits_BTV, taps_BTX = target(ids_BT)
    assert taps_BTX is not None
    return HeadBatch(ids_BT, taps_BTX, logits_BTV)


def run_head_stage(
    work: Path, plan: HeadPlan, device: torch.device, deadline: float
) -> dict[str, object]:
    """Train against work/target, export to work/head, evaluate on held-out text -> report."""
    begun = time.monotonic()
    target = load_target(work / "target").to(device).eval().requires_grad_(False)
    target.tap_boundaries = resolve_taps(plan.aux_layer_ids, target.config.num_hidden_layers)
    mixture = Mixture(work, "train", plan.sequence, plan.story_share, device)
    head, raw, t2d_V = new_head(target, plan, mixture)
    batches = (observe(target, mixture.batch(step, plan.batch)) for step in itertools.count())
    log = train_head(head, batches, plan.options, deadline)
    export_head(head, raw, t2d_V, work / "head")
    held_out = Mixture(work, "heldout", plan.sequence, plan.story_share, device)
    scores = {}
    for kind, windows in held_out.kinds.items():
        taken = (windows.take(i * plan.batch, plan.batch) for i in range(plan.eval_batches))
        scores[kind] = evaluate_head(head, (observe(target, x) for x in taken), plan.depths)
    return {
        "tokens": log[-1]["update"] * plan.batch * plan.sequence,  # type: ignore[operator]
        "parameters": sum(p.numel() for p in head.parameters() if p.requires_grad),
        "held_out": scores,
        "log": log,
        "seconds": round(time.monotonic() - begun, 1),
    }
