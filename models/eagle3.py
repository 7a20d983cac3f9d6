"""EAGLE-3's one-layer draft head (Li et al., 2025), Llama or latent attention, and EAGLE-3.1.

    h = fc(taps)                         tapped hidden states of the target, un-normed
    x = [norm(embed(token)) | norm(h)]   embedding first, twice the width
    r = h + attention(x);  r = r + mlp(norm(r))
    logits = lm_head(norm(r))            over the draft vocabulary, which may be reduced

Row t pairs the target's taps at position t with token t + 1 and predicts token t + 2. A drafted
token has no taps yet: it feeds on its parent's r, before the last norm. Options of the config:
`fc_norm` norms each tap before fc, `norm_before_fc` all of them joined, `norm_before_residual`
adds attention's output to norm(h), `norm_output` feeds on norm(r). Order and names follow EAGLE's
cnets.py and vLLM's and SGLang's heads for Kimi. Knows nothing of trees.

Shape suffixes: T rows, D head width, X twice that, A rotary width, U draft vocabulary,
B tapped hidden states joined.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from .eagle3_attention import Attend, GroupedAttention
from .eagle3_config import Eagle3Config, GroupedSizes
from .interface import CacheRows, Placement, Step, UserError
from .kimi_k25 import Attention, mlp_placements
from .layers import MLP, Linear, RMSNorm, at_least_float32, rope_table


class DraftLayer(nn.Module):
    """The head's only layer, called `midlayer` or `layers.0` in its checkpoints."""

    def __init__(self, config: Eagle3Config, dtype: torch.dtype) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(width, eps, dtype)  # of the embedding
        self.hidden_norm = RMSNorm(width, eps, dtype)  # of the hidden state
        self.self_attn: GroupedAttention | Attention
        if isinstance(config.attention, GroupedSizes):
            self.self_attn = GroupedAttention(config.attention, 2 * width, width, dtype)
        else:
            self.self_attn = Attention(config.attention, dtype, in_width=2 * width)
        self.post_attention_layernorm = RMSNorm(width, eps, dtype)
        self.mlp = MLP(width, config.intermediate_size, dtype)

    def forward(
        self, embedded_TD: Tensor, hidden_TD: Tensor, attention: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """`attention` maps x_TX to what is added to the residual stream."""
        normed_TD = self.hidden_norm(hidden_TD)
        x_TX = torch.cat([self.input_layernorm(embedded_TD), normed_TD], dim=-1)
        residual_TD = normed_TD if self.norm_before_residual else hidden_TD
        hidden_TD = residual_TD + attention(x_TX)
        return hidden_TD + self.mlp(self.post_attention_layernorm(hidden_TD))

    def placements(self, prefix: str) -> Iterator[Placement]:
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            yield Placement(f"{prefix}{name}.weight", getattr(self, name).weight)
        yield from self.self_attn.placements(f"{prefix}self_attn.")
        yield from mlp_placements(self.mlp, f"{prefix}mlp.")


class Eagle3(nn.Module):
    """The whole head. Where its file has no embedding, or no lm_head, it shares the target's.

    `mapped` is for a file that has a d2t though its vocabulary is the full one.
    """

    def __init__(
        self,
        config: Eagle3Config,
        dtype: torch.dtype,
        own_embedding: bool,
        own_lm_head: bool = True,
        mapped: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        width, eps = config.hidden_size, config.rms_norm_eps
        taps, tap = config.num_aux_hidden_states, config.target_hidden_size
        self.fc_norm = nn.ModuleList(
            RMSNorm(tap, eps, dtype) for _ in range(taps if config.fc_norm else 0)
        )
        self.input_norm = RMSNorm(taps * tap, eps, dtype) if config.norm_before_fc else None
        self.fc = Linear(taps * tap, width, dtype)
        self.midlayer = DraftLayer(config, dtype)
        self.norm = RMSNorm(width, eps, dtype)
        self.own_lm_head = own_lm_head
        with nullcontext() if own_lm_head else torch.device("meta"):
            self.lm_head = Linear(width, config.draft_vocab_size, dtype)
        self.own_embedding = own_embedding
        self.embed_tokens: nn.Parameter | None = None
        if own_embedding:
            table = torch.empty(config.vocab_size, width, dtype=dtype)
            self.embed_tokens = nn.Parameter(table, requires_grad=False)
        # draft id u stands for target id u + d2t[u]
        mapped = mapped or config.draft_vocab_size < config.vocab_size
        self.d2t = torch.zeros(config.draft_vocab_size, dtype=torch.int64) if mapped else None
        self.rope_S2A: Tensor | None = None

    def fuse(self, taps_TB: Tensor) -> Tensor:
        """The target's tapped states -> this head's hidden state."""
        if self.fc_norm:
            chunks = taps_TB.chunk(len(self.fc_norm), dim=-1)
            taps_TB = torch.cat([norm(part) for norm, part in zip(self.fc_norm, chunks)], dim=-1)
        if self.input_norm is not None:
            taps_TB = self.input_norm(taps_TB)
        return self.fc(taps_TB)

    def _run(
        self, token_T: Tensor, hidden_TD: Tensor, attention: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """-> (what later draft steps feed on, what lm_head reads)."""
        assert self.embed_tokens is not None
        r_TD = self.midlayer(self.embed_tokens[token_T], hidden_TD, attention)
        normed_TD = self.norm(r_TD)
        return (normed_TD if self.config.norm_output else r_TD), normed_TD

    def _logits(self, normed_TD: Tensor) -> Tensor:
        logits_TU = self.lm_head(normed_TD)
        scale = self.config.logit_scale
        return logits_TU if scale == 1 else logits_TU * scale

    def layer(
        self, token_T: Tensor, hidden_TD: Tensor, position_T: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """A draft pass with the caller's attention, for training -> (state to feed on, logits_TU).

        Any leading shape; a head with latent attention has no such pass.
        """
        grouped = self.midlayer.self_attn
        assert isinstance(grouped, GroupedAttention) and self.rope_S2A is not None
        cos_sin_T2A = self.rope_S2A[position_T]
        state_TD, normed_TD = self._run(
            token_T, hidden_TD, lambda x_TX: grouped.attend_with(x_TX, cos_sin_T2A, attend)
        )
        return state_TD, self._logits(normed_TD)

    @torch.inference_mode()
    def forward(
        self, step: Step, hidden_TD: Tensor, cache: CacheRows, last_only: bool = False
    ) -> tuple[Tensor, Tensor]:
        """A draft pass over cached rows -> (state to feed on_TD, log-probabilities_TU float32).

        `last_only` keeps the log-probabilities of the last row alone.
        """
        assert self.rope_S2A is not None, "finish_loading() was not called"
        cos_sin_T2A = self.rope_S2A[step.position_T]
        attention = self.midlayer.self_attn
        state_TD, normed_TD = self._run(
            step.token_T, hidden_TD, lambda x_TX: attention(x_TX, cos_sin_T2A, step, cache, 0)
        )
        logits_TU = self._logits(normed_TD[-1:] if last_only else normed_TD)
        return state_TD, at_least_float32(logits_TU).log_softmax(-1)

    def to_target_ids(self, draft_id: Tensor) -> Tensor:
        """Draft vocabulary -> target vocabulary."""
        return draft_id if self.d2t is None else draft_id + self.d2t[draft_id]

    def finish_loading(
        self, target_embedding: nn.Parameter, context: int, target_lm_head: Linear | None = None
    ) -> None:
        """Share what the file lacks, build the rope table, check the vocabulary map."""
        config = self.config
        if not self.own_embedding:
            self.embed_tokens = target_embedding
        if not self.own_lm_head:
            assert target_lm_head is not None
            self.lm_head = target_lm_head
        width = config.attention.rope_width
        table = rope_table(width, config.rope_theta, config.rope_scaling, context)
        self.rope_S2A = table.to(self.fc.weight.device)
        if self.d2t is not None:
            check_map(self.d2t, config.vocab_size)

    def placements(self) -> Iterator[Placement]:
        """Every tensor of the head's checkpoint, by its name in EAGLE's own files."""
        for index, weight in enumerate(self.fc_norm.parameters()):
            yield Placement(f"fc_norm.{index}.weight", weight)
        if self.input_norm is not None:
            yield Placement("input_norm.weight", self.input_norm.weight)
        yield Placement("fc.weight", self.fc.weight)
        yield from self.midlayer.placements("midlayer.")
        yield Placement("norm.weight", self.norm.weight)
        if self.own_lm_head:
            yield Placement("lm_head.weight", self.lm_head.weight)
        if self.own_embedding:
            assert self.embed_tokens is not None
            yield Placement("embed_tokens.weight", self.embed_tokens)
        if self.d2t is not None:
            yield Placement("d2t", self.d2t)


def check_map(d2t_U: Tensor, vocab_size: int, t2d_V: Tensor | None = None) -> None:
    """Raise UserError unless d2t holds offsets: draft id u is target id u + d2t[u], each once.

    `t2d_V` bool marks the target ids that are drafted; where the file has it, it must agree.
    A d2t of target ids instead of offsets is told by t2d, or without one by ids that repeat, end
    outside the vocabulary or are never neighbours, as no vocabulary of frequent tokens is.
    """
    d2t_U = d2t_U.cpu()
    draft_U = torch.arange(len(d2t_U))
    id_U = draft_U + d2t_U

    def valid(ids: Tensor) -> bool:
        inside = bool(((ids >= 0) & (ids < vocab_size)).all())
        return inside and len(ids.unique()) == len(ids)

    def marked(ids: Tensor) -> bool:
        return t2d_V is None or torch.equal(t2d_V.cpu().nonzero()[:, 0], ids.sort().values)

    rising = len(d2t_U) > 1 and bool((d2t_U.diff() > 0).all())
    if valid(id_U) and marked(id_U) and (t2d_V is not None or not rising):
        return
    if valid(d2t_U) and marked(d2t_U):
        raise UserError(
            "--draft-model: d2t holds target ids, not offsets; subtract 0, 1, 2, ... from it"
        )
    wrong = ((id_U < 0) | (id_U >= vocab_size)).nonzero()
    if len(wrong):
        at = int(wrong[0])
        raise UserError(
            f"--draft-model: d2t[{at}] is {int(d2t_U[at])}, which maps draft id {at} to "
            f"{int(id_U[at])}; the target's ids end at {vocab_size - 1}"
        )
    if not valid(id_U):
        order_U = id_U.sort(stable=True).indices
        again = int((id_U[order_U].diff() == 0).nonzero()[0])
        first, second = int(order_U[again]), int(order_U[again + 1])
        raise UserError(
            f"--draft-model: d2t maps draft ids {first} and {second} both to {int(id_U[first])}; "
            "every draft id needs a target id of its own"
        )
    raise UserError("--draft-model: d2t and t2d name different target ids; one of them is broken")
