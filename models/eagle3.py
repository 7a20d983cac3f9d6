"""EAGLE-3's one-layer draft head, Llama dialect (Li et al., 2025; checkpoints by SpecForge).

    h = fc(taps)                         three tapped hidden states of the target, un-normed
    x = [norm(embed(token)) | norm(h)]   embedding first, twice the width
    r = h + attention(x);  r = r + mlp(norm(r))
    logits = lm_head(norm(r))            over the reduced draft vocabulary

Row t pairs the target's taps at position t with token t + 1 and predicts token t + 2. A drafted
token has no taps yet: it feeds on its parent's r (before the norm). Knows nothing of trees.

Shape suffixes: T rows, D head width, H query heads, J key heads, A head width, W window rows,
U draft vocabulary, B tapped hidden states joined.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import (
    need_float,
    need_int,
    need_object,
    read_rope_scaling,
    read_rope_theta,
    refuse_other,
)
from .interface import CacheRows, Placement, Step, UserError
from .kimi_k25 import mlp_placements
from .layers import (
    MLP,
    Linear,
    RMSNorm,
    RopeScaling,
    at_least_float32,
    rope_halves,
    rope_table,
)

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
REQUIRED_VALUES: dict[str, object] = {
    "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False,
    "norm_before_residual": False, "norm_before_fc": False, "fc_norm": False,
    "norm_output": False, "num_hidden_layers": 1,
}  # fmt: skip

# (q_THA, k_TJA, v_TJA) -> out_THA: where inference puts its cache and training its own mask
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Eagle3Config:
    """The head's config.json, field names as there."""

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    vocab_size: int
    draft_vocab_size: int
    aux_layer_ids: tuple[int, ...] | None  # None: not given, the default set is meant

    @property
    def cache_width(self) -> int:
        """Values that the drafter's cache keeps per token: all keys, then all values."""
        return 2 * self.num_key_value_heads * self.head_dim

    @staticmethod
    def from_json(raw: dict[str, Any], where: str) -> "Eagle3Config":
        """Raises UserError, which names the key, for what is missing or not computed here."""
        named = raw.get("architectures")
        if not isinstance(named, list) or not named or named[0] not in ARCHITECTURES:
            raise UserError(
                f"{where}: architectures is {named!r}; minispec loads EAGLE-3 heads of the "
                f"Llama dialect: {' or '.join(ARCHITECTURES)}"
            )
        refuse_other(raw, REQUIRED_VALUES, where)

        def optional(key: str, default: int) -> int:
            return default if raw.get(key) is None else need_int(raw, key, where)

        hidden = need_int(raw, "hidden_size", where)
        heads = need_int(raw, "num_attention_heads", where)
        vocab = need_int(raw, "vocab_size", where)
        config = Eagle3Config(
            hidden_size=hidden,
            target_hidden_size=optional("target_hidden_size", hidden),
            intermediate_size=need_int(raw, "intermediate_size", where),
            num_attention_heads=heads,
            num_key_value_heads=need_int(raw, "num_key_value_heads", where),
            head_dim=optional("head_dim", hidden // heads),
            rms_norm_eps=need_float(raw, "rms_norm_eps", where),
            rope_theta=read_rope_theta(raw, where),
            rope_scaling=read_rope_scaling(raw, where),
            vocab_size=vocab,
            draft_vocab_size=optional("draft_vocab_size", vocab),
            aux_layer_ids=read_layer_ids(raw, where),
        )
        if config.draft_vocab_size > vocab:
            raise UserError(
                f"{where}: draft_vocab_size is {config.draft_vocab_size}, more than the "
                f"vocab_size {vocab}"
            )
        if heads % config.num_key_value_heads:
            raise UserError(
                f"{where}: num_attention_heads is {heads}, no multiple of num_key_value_heads "
                f"{config.num_key_value_heads}"
            )
        return config


def read_layer_ids(raw: dict[str, Any], where: str) -> tuple[int, ...] | None:
    """The tapped layers, from `eagle_config` or the top level; None if neither names them."""
    nested = need_object(raw.get("eagle_config") or {}, f"{where}: eagle_config")
    refuse_other(nested, {"use_aux_hidden_state": True}, where)
    key = "eagle_aux_hidden_state_layer_ids"
    ids = nested.get(key, raw.get(key))
    if ids is None:
        return None
    if not isinstance(ids, list) or len(ids) != 3 or not all(type(i) is int for i in ids):
        raise UserError(f"{where}: {key} is {ids!r}; it must be a list of three layer numbers")
    return tuple(ids)


def resolve_taps(aux_layer_ids: tuple[int, ...] | None, num_layers: int) -> tuple[int, ...]:
    """Layer ids of a head's config -> tap boundaries (b is the input of layer b).

    Two conventions are in the wild: ids as inputs of layers, (2, N/2, N-3), and as outputs,
    (1, N/2 - 1, N-4). A set that starts with 1 is read as outputs, any other as inputs; an
    absent set means the default of EAGLE's own code.
    """
    if aux_layer_ids is None:
        boundaries = (2, num_layers // 2, num_layers - 3)
    else:
        ids = tuple(sorted(aux_layer_ids))
        boundaries = tuple(index + 1 for index in ids) if ids[0] == 1 else ids
    if not 0 <= boundaries[0] < boundaries[1] < boundaries[2] <= num_layers:
        raise UserError(
            f"--draft-model: eagle_aux_hidden_state_layer_ids is {aux_layer_ids}, read as inputs "
            f"of layers {list(boundaries)}; it must name three different ones of the target's "
            f"{num_layers}"
        )
    return boundaries


class DraftAttention(nn.Module):
    """Grouped-query attention whose input is twice as wide as its output."""

    def __init__(self, config: Eagle3Config, dtype: torch.dtype) -> None:
        super().__init__()
        head, heads, key_heads = (
            config.head_dim,
            config.num_attention_heads,
            config.num_key_value_heads,
        )
        self.split = (heads * head, key_heads * head, key_heads * head)
        self.head_dim = head
        self.qkv_proj = Linear(2 * config.hidden_size, sum(self.split), dtype)
        self.o_proj = Linear(heads * head, config.hidden_size, dtype)

    def forward(self, x_TX: Tensor, cos_sin_T2A: Tensor, attend: Attend) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim))
            for part in self.qkv_proj(x_TX).split(self.split, dim=-1)
        )
        cos_sin = cos_sin_T2A.unsqueeze(-3)
        out_THA = attend(rope_halves(q, cos_sin), rope_halves(k, cos_sin), v)
        return self.o_proj(out_THA.flatten(-2))

    def placements(self, prefix: str) -> Iterator[Placement]:
        parts = self.qkv_proj.weight.split(self.split)
        for name, part in zip(("q", "k", "v"), parts):
            yield Placement(f"{prefix}{name}_proj.weight", part)
        yield Placement(f"{prefix}o_proj.weight", self.o_proj.weight)


class DraftLayer(nn.Module):
    """The head's only layer, called `midlayer` in its checkpoints."""

    def __init__(self, config: Eagle3Config, dtype: torch.dtype) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(width, eps, dtype)  # of the embedding
        self.hidden_norm = RMSNorm(width, eps, dtype)  # of the hidden state
        self.self_attn = DraftAttention(config, dtype)
        self.post_attention_layernorm = RMSNorm(width, eps, dtype)
        self.mlp = MLP(width, config.intermediate_size, dtype)

    def forward(
        self, embedded_TD: Tensor, hidden_TD: Tensor, cos_sin_T2A: Tensor, attend: Attend
    ) -> Tensor:
        x_TX = torch.cat([self.input_layernorm(embedded_TD), self.hidden_norm(hidden_TD)], dim=-1)
        hidden_TD = hidden_TD + self.self_attn(x_TX, cos_sin_T2A, attend)
        return hidden_TD + self.mlp(self.post_attention_layernorm(hidden_TD))


class Eagle3(nn.Module):
    """The whole head. Where its file has no embedding it shares the target's."""

    def __init__(self, config: Eagle3Config, dtype: torch.dtype, own_embedding: bool) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.fc = Linear(3 * config.target_hidden_size, width, dtype)
        self.midlayer = DraftLayer(config, dtype)
        self.norm = RMSNorm(width, config.rms_norm_eps, dtype)
        self.lm_head = Linear(width, config.draft_vocab_size, dtype)
        self.own_embedding = own_embedding
        self.embed_tokens: nn.Parameter | None = None
        if own_embedding:
            table = torch.empty(config.vocab_size, width, dtype=dtype)
            self.embed_tokens = nn.Parameter(table, requires_grad=False)
        # draft id u stands for target id u + d2t[u]
        reduced = config.draft_vocab_size < config.vocab_size
        self.d2t = torch.zeros(config.draft_vocab_size, dtype=torch.int64) if reduced else None
        self.rope_S2A: Tensor | None = None

    def fuse(self, taps_TB: Tensor) -> Tensor:
        """The target's three tapped states -> this head's hidden state."""
        return self.fc(taps_TB)

    def hidden(
        self, token_T: Tensor, hidden_TD: Tensor, position_T: Tensor, attend: Attend
    ) -> Tensor:
        """-> r_TD, which later draft steps feed on. Any leading shape."""
        assert self.embed_tokens is not None and self.rope_S2A is not None
        embedded_TD = self.embed_tokens[token_T]
        return self.midlayer(embedded_TD, hidden_TD, self.rope_S2A[position_T], attend)

    def logits(self, r_TD: Tensor) -> Tensor:
        """-> [T, U] over the draft vocabulary."""
        return self.lm_head(self.norm(r_TD))

    def layer(
        self, token_T: Tensor, hidden_TD: Tensor, position_T: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """`hidden` and `logits` together."""
        r_TD = self.hidden(token_T, hidden_TD, position_T, attend)
        return r_TD, self.logits(r_TD)

    @torch.inference_mode()
    def forward(
        self, step: Step, hidden_TD: Tensor, cache: CacheRows, last_only: bool = False
    ) -> tuple[Tensor, Tensor]:
        """One draft pass over cached rows -> (r_TD, log-probabilities_TU float32).

        `last_only` keeps the log-probabilities of the last row alone.
        """
        key_heads = self.config.num_key_value_heads

        def attend(q_THA: Tensor, k_TJA: Tensor, v_TJA: Tensor) -> Tensor:
            cache.write(0, step.slot_T, torch.cat([k_TJA.flatten(1), v_TJA.flatten(1)], dim=-1))
            row_SX = cache.rows(0, step.end)
            k_JSA, v_JSA = row_SX.view(len(row_SX), 2, key_heads, -1).permute(1, 2, 0, 3)
            visible_TS = F.pad(step.visible_TW, (step.prefix, 0), value=True)
            return F.scaled_dot_product_attention(
                q_THA.transpose(0, 1), k_JSA, v_JSA, attn_mask=visible_TS, enable_gqa=True
            ).transpose(0, 1)

        r_TD = self.hidden(step.token_T, hidden_TD, step.position_T, attend)
        logits_TU = self.logits(r_TD[-1:] if last_only else r_TD)
        return r_TD, at_least_float32(logits_TU).log_softmax(-1)

    def to_target_ids(self, draft_id: Tensor) -> Tensor:
        """Draft vocabulary -> target vocabulary."""
        return draft_id if self.d2t is None else draft_id + self.d2t[draft_id]

    def finish_loading(self, target_embedding: nn.Parameter, context: int) -> None:
        """Share what the file lacks, build the rope table, check the vocabulary map."""
        config = self.config
        if not self.own_embedding:
            self.embed_tokens = target_embedding
        table = rope_table(config.head_dim, config.rope_theta, config.rope_scaling, context)
        self.rope_S2A = table.to(self.fc.weight.device)
        if self.d2t is not None:
            ids = self.to_target_ids(torch.arange(len(self.d2t), device=self.d2t.device))
            wrong = ((ids < 0) | (ids >= config.vocab_size)).nonzero()
            if len(wrong):
                at = int(wrong[0])
                raise UserError(
                    f"--draft-model: d2t[{at}] is {int(self.d2t[at])}, which maps draft id {at} to "
                    f"{int(ids[at])}; the target's ids end at {config.vocab_size - 1}"
                )

    def placements(self) -> Iterator[Placement]:
        """Every tensor of the head's checkpoint, by its name there."""
        yield Placement("fc.weight", self.fc.weight)
        layer = self.midlayer
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            yield Placement(f"midlayer.{name}.weight", getattr(layer, name).weight)
        yield from layer.self_attn.placements("midlayer.self_attn.")
        yield from mlp_placements(layer.mlp, "midlayer.mlp.")
        yield Placement("norm.weight", self.norm.weight)
        yield Placement("lm_head.weight", self.lm_head.weight)
        if self.own_embedding:
            assert self.embed_tokens is not None
            yield Placement("embed_tokens.weight", self.embed_tokens)
        if self.d2t is not None:
            yield Placement("d2t", self.d2t)
