"""The attention of an EAGLE-3 head in the Llama dialect; the latent one is the target's own.

Its input, [norm(embedding) | norm(hidden)], is twice as wide as its output. Half-split rope, and
no YaRN temperature in the softmax scale. Knows nothing of trees or of where a mask comes from.

Shape suffixes: T rows, X twice the head's width, H query heads, J key heads, A head width,
S cached rows, W window rows.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .eagle3_config import GroupedSizes
from .interface import CacheRows, Placement, Step
from .layers import Linear, rope_halves

# (q_THA, k_TJA, v_TJA) -> out_THA: where inference puts its cache and training its own mask
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class GroupedAttention(nn.Module):
    """Grouped-query attention: `forward` over cached rows, `attend_with` over anything."""

    def __init__(self, sizes: GroupedSizes, in_width: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.sizes = sizes
        queries = sizes.num_attention_heads * sizes.head_dim
        keys = sizes.num_key_value_heads * sizes.head_dim
        self.split = (queries, keys, keys)
        self.qkv_proj = Linear(in_width, sum(self.split), dtype)
        self.o_proj = Linear(queries, width, dtype)

    def attend_with(self, x_TX: Tensor, cos_sin_T2A: Tensor, attend: Attend) -> Tensor:
        """Projections and rope around the caller's attention. Any leading shape."""
        q, k, v = (
            part.unflatten(-1, (-1, self.sizes.head_dim))
            for part in self.qkv_proj(x_TX).split(self.split, dim=-1)
        )
        cos_sin = cos_sin_T2A.unsqueeze(-3)
        out_THA = attend(rope_halves(q, cos_sin), rope_halves(k, cos_sin), v)
        return self.o_proj(out_THA.flatten(-2))

    def forward(
        self, x_TX: Tensor, cos_sin_T2A: Tensor, step: Step, cache: CacheRows, layer: int
    ) -> Tensor:
        """Write the step's keys and values into `cache`, attend to what each row may see."""

        def attend(q_THA: Tensor, k_TJA: Tensor, v_TJA: Tensor) -> Tensor:
            row_TC = torch.cat([k_TJA.flatten(1), v_TJA.flatten(1)], dim=-1)
            cache.write(layer, step.slot_T, row_TC)
            row_SC = cache.rows(layer, step.end)
            key_heads = self.sizes.num_key_value_heads
            k_JSA, v_JSA = row_SC.view(len(row_SC), 2, key_heads, -1).permute(1, 2, 0, 3)
            visible_TS = F.pad(step.visible_TW, (step.prefix, 0), value=True)
            return F.scaled_dot_product_attention(
                q_THA.transpose(0, 1), k_JSA, v_JSA, attn_mask=visible_TS, enable_gqa=True
            ).transpose(0, 1)

        return self.attend_with(x_TX, cos_sin_T2A, attend)

    def placements(self, prefix: str) -> Iterator[Placement]:
        parts = self.qkv_proj.weight.split(self.split)
        for name, part in zip(("q", "k", "v"), parts):
            yield Placement(f"{prefix}{name}_proj.weight", part)
        yield Placement(f"{prefix}o_proj.weight", self.o_proj.weight)
