"""EAGLE-3 head training with training-time test (Li et al., 2025).

The head's own draft steps are unrolled in parallel over all rows of a text. Row t at depth 0 is
what inference commits: the target's taps at t with token t + 1, predicting token t + 2. Depth j
goes on from row t with token t + 1 + j, feeds on the row's own output of depth j - 1, stands at
position t + j, and attends to the depth-0 rows up to t and to its own rows of depth 1 .. j: just
the cache that a drafted node sees. Knows no target; batches bring ids, taps and logits.

Shape suffixes: B texts, T tokens of a text, N rows that are unrolled, U draft vocabulary,
V vocabulary, X taps joined, D head width, H query heads, J key heads, A head width, S key rows,
I own rows, L depths.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .models.checkpoint import write_checkpoint
from .models.eagle3 import Eagle3
from .models.eagle3_attention import Attend

INIT_STD = 0.02


@dataclass(frozen=True)
class HeadBatch:
    """Texts and what the target computed on them."""

    ids_BT: Tensor  # int64
    taps_BTX: Tensor  # the tapped hidden states side by side
    logits_BTV: Tensor


@dataclass(frozen=True)
class HeadOptions:
    """How a head is trained."""

    depths: int = 5  # draft steps unrolled
    decay: float = 0.8  # weight of depth j is decay**j
    updates: int = 1000
    peak_lr: float = 1e-3
    final_lr: float = 5e-5
    warmup: int = 100
    clip: float = 0.5


@dataclass(frozen=True)
class Unrolled:
    """Means over a batch. `mass` is the target's probability inside the draft vocabulary."""

    loss: Tensor
    agree_L: Tensor  # how often the head's first choice is the target's, over all ids
    mass: Tensor

    def plain(self) -> dict[str, object]:
        """Rounded numbers for a log."""
        return {
            "loss": round(self.loss.item(), 4),
            "agree": [round(value, 4) for value in self.agree_L.tolist()],
            "mass": round(self.mass.item(), 4),
        }


def mixed_precision(device: torch.device) -> torch.autocast:
    """Products in bfloat16 on a GPU; a CPU, where they are slow, keeps float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def learning_rate(step: int, steps: int, warmup: int, peak: float, final: float) -> float:
    """Linear warm-up, then half a cosine."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return final + (peak - final) * (1 + math.cos(math.pi * progress)) / 2


def draft_vocabulary(count_V: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The most frequent ids -> (d2t int64 [size], t2d bool [V])."""
    id_U = count_V.topk(size).indices.sort().values
    t2d_V = torch.zeros(len(count_V), dtype=torch.bool)
    t2d_V[id_U] = True
    return id_U - torch.arange(size), t2d_V


@torch.no_grad()
def init_head(head: Eagle3, target_lm_head_VD: Tensor, target_norm_D: Tensor) -> None:
    """Random weights; output side copied from the target, h starting near its last tap."""
    for name, weight in head.named_parameters():
        if name != "embed_tokens":
            nn.init.normal_(weight, std=INIT_STD) if weight.ndim > 1 else weight.fill_(1.0)
    id_U = head.to_target_ids(torch.arange(head.config.draft_vocab_size))
    width = head.config.hidden_size
    if head.config.target_hidden_size == width:
        head.fc.weight[:, -width:] += torch.eye(width)
        head.lm_head.weight.copy_(target_lm_head_VD[id_U])
        head.norm.weight.copy_(target_norm_D)


def attend_unrolled(past: list[tuple[Tensor, Tensor]], hidden_NS: Tensor) -> Attend:
    """Attention of one depth. `past` holds keys and values of earlier depths and is extended."""

    def attend(q_BNHA: Tensor, k_BNJA: Tensor, v_BNJA: Tensor) -> Tensor:
        repeat = q_BNHA.shape[2] // k_BNJA.shape[2]
        q_BHNA, k_BHNA, v_BHNA = (
            part.repeat_interleave(times, dim=2).transpose(1, 2)
            for part, times in ((q_BNHA, 1), (k_BNJA, repeat), (v_BNJA, repeat))
        )
        past.append((k_BHNA, v_BHNA))
        (first_key, first_value), *own = past
        q_BHNA = q_BHNA * q_BHNA.shape[-1] ** -0.5
        score_BHNS = (q_BHNA @ first_key.transpose(-1, -2)).masked_fill(hidden_NS, -torch.inf)
        own_scores = [(q_BHNA * key).sum(-1, keepdim=True) for key, _ in own]
        weight = torch.cat([score_BHNS, *own_scores], dim=-1).softmax(-1).to(v_BHNA.dtype)
        first_weight, own_weight_BHNI = weight.tensor_split([len(hidden_NS)], dim=-1)
        out_BHNA = first_weight @ first_value
        for index, (_, value) in enumerate(own):
            out_BHNA = out_BHNA + own_weight_BHNI[..., index : index + 1] * value
        return out_BHNA.transpose(1, 2)

    return attend


def unroll(head: Eagle3, batch: HeadBatch, depths: int) -> Iterator[Tensor]:
    """The logits [B, N, U] of each depth, N = T - depths; row t at depth j: token t + 2 + j."""
    rows = batch.ids_BT.shape[1] - depths
    device = batch.ids_BT.device
    position_N = torch.arange(rows, device=device)
    hidden_NS = torch.ones(rows, rows, dtype=torch.bool, device=device).triu(1)
    past: list[tuple[Tensor, Tensor]] = []
    state_BND = head.fuse(batch.taps_BTX[:, :rows])
    for depth in range(depths):
        token_BN = batch.ids_BT[:, 1 + depth : 1 + depth + rows]
        attend = attend_unrolled(past, hidden_NS)
        state_BND, logits_BNU = head.layer(token_BN, state_BND, position_N + depth, attend)
        yield logits_BNU


def unrolled_loss(head: Eagle3, batch: HeadBatch, depths: int, decay: float) -> Unrolled:
    """Cross-entropy against the target's distribution, restricted to the draft vocabulary.

    The target's probabilities are taken as they are: the same as renormalising them over the
    draft vocabulary and weighting each row by the mass that lies in it.
    """
    device = batch.ids_BT.device
    id_U = head.to_target_ids(torch.arange(head.config.draft_vocab_size, device=device))
    rows = batch.ids_BT.shape[1] - depths
    wide_BTV = batch.logits_BTV.float()
    prob_BTU = (wide_BTV[..., id_U] - wide_BTV.logsumexp(-1, keepdim=True)).exp()
    best_BT = wide_BTV.argmax(-1)
    losses, agreement = [], []
    for depth, logits_BNU in enumerate(unroll(head, batch, depths)):
        target = slice(1 + depth, 1 + depth + rows)
        log_prob_BNU = logits_BNU.float().log_softmax(-1)
        losses.append(-(prob_BTU[:, target] * log_prob_BNU).sum(-1).mean() * decay**depth)
        choice_BN = id_U[logits_BNU.detach().argmax(-1)]
        agreement.append((choice_BN == best_BT[:, target]).float().mean())
    loss = torch.stack(losses).sum() / sum(decay**depth for depth in range(depths))
    return Unrolled(loss, torch.stack(agreement), prob_BTU.sum(-1).mean())


def make_optimizer(
    model: nn.Module, weight_decay: float, exempt: tuple[str, ...] = ()
) -> torch.optim.AdamW:
    """AdamW over what requires a gradient; weight decay on matrices whose name is not exempt."""
    decayed: list[Tensor] = []
    plain: list[Tensor] = []
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            (plain if weight.ndim < 2 or name.startswith(exempt) else decayed).append(weight)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95))


def update_weights(
    model: nn.Module, optimizer: torch.optim.AdamW, loss: Tensor, lr: float, clip: float
) -> None:
    """One update from a loss, its gradient clipped to the norm `clip`."""
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def train_head(
    head: Eagle3, batches: Iterator[HeadBatch], options: HeadOptions, deadline: float
) -> list[dict[str, object]]:
    """Train all but a shared embedding in place -> log entries.

    Stops early, and says so, when time.monotonic() passes `deadline`.
    """
    for name, weight in head.named_parameters():
        weight.requires_grad_(head.own_embedding or name != "embed_tokens")
    optimizer = make_optimizer(head, 0.01)
    log: list[dict[str, object]] = []
    begun = time.monotonic()
    for update, batch in zip(range(1, options.updates + 1), batches):
        lr = learning_rate(
            update - 1, options.updates, options.warmup, options.peak_lr, options.final_lr
        )
        with mixed_precision(batch.ids_BT.device):
            result = unrolled_loss(head, batch, options.depths, options.decay)
        update_weights(head, optimizer, result.loss, lr, options.clip)
        late = update < options.updates and time.monotonic() > deadline
        if update % 50 == 0 or update in (1, options.updates) or late:
            log.append(result.plain() | {"update": update})
            speed = update * batch.ids_BT.numel() / (time.monotonic() - begun)
            print(f"head {update}/{options.updates} {log[-1]} {speed:,.0f} tokens/s", flush=True)
        if late:
            print(f"head: out of time at update {update} of {options.updates}", flush=True)
            break
    return log


@torch.no_grad()
def evaluate_head(head: Eagle3, batches: Iterator[HeadBatch], depths: int) -> dict[str, object]:
    """Means over held-out batches: loss, agreement per depth, mass of the draft vocabulary."""
    results = []
    for batch in batches:
        with mixed_precision(batch.ids_BT.device):
            results.append(unrolled_loss(head, batch, depths, 1.0))
    loss, agree_L, mass = (
        torch.stack([getattr(result, name) for result in results]).mean(0)
        for name in ("loss", "agree_L", "mass")
    )
    return Unrolled(loss, agree_L, mass).plain()


def export_head(head: Eagle3, raw: dict[str, Any], t2d_V: Tensor, folder: Path) -> None:
    """Write config.json and model.safetensors; a shared embedding stays with the target."""
    tensors = {placement.name: placement.into for placement in head.placements()}
    for name, tensor in tensors.items():
        tensors[name] = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
    write_checkpoint(folder, raw, [*tensors.items(), ("t2d", t2d_V)])
