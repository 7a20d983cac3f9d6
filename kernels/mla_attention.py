"""Multi-head latent attention over the latent cache, absorbed form (DeepSeek-V2, 2024, sec. 2.1).

    score = scale * q . row ,   out = softmax(score) @ row[:C]

Every head reads the same row of R = C + P values: C of latent, which is key and value at once,
then P of roped key. A tree step sees all committed rows and, of its own window, its ancestors.
Bytes moved: R * 2 a row in bfloat16, once for all heads. Flops: 2 * T * H * S * (R + C).

Shape suffixes: T tokens, H heads, S cache rows, R row width, C latent rank, W window rows.
"""

import torch
from torch import Tensor


def mla_attention(
    q_THR: Tensor, row_SR: Tensor, visible_TW: Tensor, scale: float, latent_rank: int
) -> Tensor:
    """-> [T, H, C]. The last W of the S rows are the window; the softmax runs in float32."""
    count, heads, _ = q_THR.shape
    window = visible_TW.shape[1]
    score_THS = (q_THR.flatten(0, 1) @ row_SR.T).view(count, heads, -1)
    score_THS = score_THS.to(torch.float64 if score_THS.dtype == torch.float64 else torch.float32)
    score_THS = score_THS * scale
    hidden_T1W = ~visible_TW.unsqueeze(1)
    score_THS[..., row_SR.shape[0] - window :].masked_fill_(hidden_T1W, float("-inf"))
    weight_THS = score_THS.softmax(-1).to(row_SR.dtype)
    return (weight_THS.flatten(0, 1) @ row_SR[:, :latent_rank]).view(count, heads, latent_rank)
