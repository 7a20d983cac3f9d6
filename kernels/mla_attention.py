"""Multi-head latent attention over the latent cache, absorbed form (DeepSeek-V2, 2024, sec. 2.1).

    score = scale * q . row ,   out = softmax(score) @ row[:C]

Every head reads the same row of R = C + P values: C of latent, which is key and value at once,
then P of roped key. A tree step sees all committed rows and, of its own window, its ancestors.
Bytes moved: R * 2 a row in bfloat16, once for all heads. Flops: 2 * T * H * S * (R + C).

A row's result must not depend on what else is in the step: its keys are listed in the order of
their position, wherever in the cache they lie, reduced in blocks of KEY_BLOCK, and the blocks
added up first to last. The list's padding contributes exact zeros.

Shape suffixes: T tokens, H heads, L listed keys, J blocks, K keys of a block, R row width,
C latent rank, W window rows.
"""

import torch
from torch import Tensor

KEY_BLOCK = 32


def list_keys(visible_TW: Tensor, prefix: int) -> Tensor:
    """Cache rows that each token sees, by position: int64 [T, L], -1 behind the last.

    `prefix` committed rows, then the visible window rows: parents stand before their children,
    so the order of rows is the order of positions. L is a multiple of KEY_BLOCK.
    """
    count, window = visible_TW.shape
    device = visible_TW.device
    # a stable sort brings the visible rows to the front and keeps their order
    order_TW = (~visible_TW).to(torch.int8).sort(dim=-1, stable=True).indices + prefix
    order_TW = order_TW.where(torch.arange(window, device=device) < visible_TW.sum(-1, True), -1)
    prefix_TL = torch.arange(prefix, device=device).expand(count, -1)
    seen = prefix + int(visible_TW.sum(-1).max())
    key_TL = torch.cat([prefix_TL, order_TW], dim=-1)[:, :seen]
    return torch.nn.functional.pad(key_TL, (0, -seen % KEY_BLOCK), value=-1)


def mla_attention(
    q_THR: Tensor, row_SR: Tensor, key_TL: Tensor, scale: float, latent_rank: int
) -> Tensor:
    """-> [T, H, C]; the softmax runs in float32 or wider."""
    count, heads, _ = q_THR.shape
    blocks = key_TL.shape[1] // KEY_BLOCK
    listed_JKR = row_SR[key_TL.clamp(min=0)].view(count * blocks, KEY_BLOCK, -1)
    q_JHR = q_THR.unsqueeze(1).expand(-1, blocks, -1, -1).flatten(0, 1)
    score_JHK = torch.bmm(q_JHR, listed_JKR.transpose(1, 2))
    wide = torch.promote_types(score_JHK.dtype, torch.float32)
    score_THL = score_JHK.to(wide).view(count, blocks, heads, KEY_BLOCK).transpose(1, 2)
    score_THL = (score_THL * scale).flatten(2)
    score_THL.masked_fill_((key_TL < 0).unsqueeze(1), float("-inf"))
    weight_THL = (score_THL - score_THL.amax(-1, keepdim=True)).exp()
    weight_THJK = weight_THL.unflatten(-1, (blocks, KEY_BLOCK))
    # cumsum adds first to last by definition; its last entry is the ordered sum
    total_TH1 = weight_THJK.sum(-1).cumsum(-1)[..., -1:]
    weight_JHK = weight_THJK.transpose(1, 2).flatten(0, 1).to(row_SR.dtype)
    part_JHC = torch.bmm(weight_JHK, listed_JKR[..., :latent_rank])
    part_TJHC = part_JHC.to(wide).view(count, blocks, heads, latent_rank)
    return (part_TJHC.cumsum(1)[:, -1] / total_TH1).to(row_SR.dtype)
