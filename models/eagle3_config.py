"""An EAGLE-3 head's config.json -> Eagle3Config, in each of the public dialects.

    Llama         LlamaForCausalLMEagle3, Eagle3LlamaForCausalLM           grouped-query attention
    latent        Eagle3DeepseekV2ForCausalLM, Eagle3DeepseekV3ForCausalLM  as in the Kimi target
    speculators   Eagle3Speculator, whose layer is nested: `transformer_layer_config`

A value that is not computed here is refused by name. Knows no tensor and no target. Keys and
their meaning follow TorchSpec's and SpecForge's training configs, ModelOpt's export template,
vLLM's llama_eagle3.py and deepseek_eagle3.py, SGLang's kimi_k25_eagle3.py and speculators.
"""

from dataclasses import dataclass, replace
from typing import Any

from .config import (
    need_float,
    need_int,
    need_object,
    read_rope_scaling,
    read_rope_theta,
    refuse_other,
)
from .interface import UserError
from .layers import RopeScaling

LLAMA = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
LATENT = ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM")
SPECULATORS = "Eagle3Speculator"
# which attention the layer of a speculators file has, by its model_type
LATENT_TYPES = ("kimi_k2", "deepseek_v3")
LAYER_TYPES = ("llama", *LATENT_TYPES)
IDS = "eagle_aux_hidden_state_layer_ids"
DEFAULT_TAPS = 3
REQUIRED_VALUES: dict[str, object] = {
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
    "tie_word_embeddings": False, "num_hidden_layers": 1, "rope_interleave": True,
    "speculators_model_type": "eagle3", "quantization_config": None,
}  # fmt: skip
# ModelOpt's keys, at the values of the layer that every Kimi head has
REQUIRED_NESTED: dict[str, object] = {
    "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True, "use_mtp_layernorm": False, "next_layer_regular": True,
    "parallel_draft_step": 1,
}  # fmt: skip


@dataclass(frozen=True)
class GroupedSizes:
    """Grouped-query attention: `num_key_value_heads` heads of keys and values serve all."""

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int  # need not be hidden_size / num_attention_heads

    @property
    def cache_width(self) -> int:
        """Values that the drafter's cache keeps per token: all keys, then all values."""
        return 2 * self.num_key_value_heads * self.head_dim

    @property
    def rope_width(self) -> int:
        return self.head_dim


@dataclass(frozen=True)
class LatentSizes:
    """Multi-head latent attention, with the fields that kimi_k25's Attention reads."""

    hidden_size: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rms_norm_eps: float
    rope_scaling: RopeScaling | None

    @property
    def cache_width(self) -> int:
        """A row of the target's form, 576 values in Kimi's sizes: latent, then roped key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def rope_width(self) -> int:
        return self.qk_rope_head_dim


@dataclass(frozen=True)
class Eagle3Config:
    """The head's config.json, field names as there."""

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    attention: GroupedSizes | LatentSizes
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    vocab_size: int
    draft_vocab_size: int
    num_aux_hidden_states: int
    aux_layer_ids: tuple[int, ...] | None  # None: not given, the default set is meant
    norm_before_residual: bool  # what attention's output is added to: the normed hidden state
    norm_before_fc: bool  # one norm over all taps joined
    fc_norm: bool  # EAGLE-3.1: a norm for each tap
    norm_output: bool  # EAGLE-3.1: later draft steps feed on the state after the last norm
    logit_scale: float

    @property
    def cache_width(self) -> int:
        return self.attention.cache_width

    @staticmethod
    def from_json(raw: dict[str, Any], where: str) -> "Eagle3Config":
        """Raises UserError, which names the key, for what is missing or not computed here."""
        flat, latent = read_dialect(raw, where)
        nested = need_object(flat.get("eagle_config") or {}, f"{where}: eagle_config")
        scale = 1.0 if flat.get("logit_scale") is None else need_float(flat, "logit_scale", where)
        for part, required in ((flat, REQUIRED_VALUES), (flat, REQUIRED_NESTED),
                               (nested, REQUIRED_NESTED)):  # fmt: skip
            # null is as good as absent; logit_scale, which the target's code refuses, is computed
            stated = {k: v for k, v in part.items() if v is not None and k != "logit_scale"}
            refuse_other(stated, required, where)

        def optional(key: str, default: int) -> int:
            return default if flat.get(key) is None else need_int(flat, key, where)

        hidden = need_int(flat, "hidden_size", where)
        vocab = need_int(flat, "vocab_size", where)
        scaling = read_head_scaling(flat, where)
        sizes = read_latent(flat, scaling, where) if latent else read_grouped(flat, where)
        taps = optional("num_aux_hidden_states", DEFAULT_TAPS)
        ids = nested.get(IDS) if nested.get(IDS) is not None else flat.get(IDS)
        config = Eagle3Config(
            hidden_size=hidden,
            target_hidden_size=optional("target_hidden_size", hidden),
            intermediate_size=need_int(flat, "intermediate_size", where),
            attention=sizes,
            rms_norm_eps=need_float(flat, "rms_norm_eps", where),
            rope_theta=read_rope_theta(flat, where),
            rope_scaling=scaling,
            vocab_size=vocab,
            draft_vocab_size=optional("draft_vocab_size", vocab),
            num_aux_hidden_states=taps,
            aux_layer_ids=read_layer_ids(ids, taps, where),
            norm_before_residual=read_flag(flat, "norm_before_residual", where),
            norm_before_fc=read_flag(flat, "norm_before_fc", where),
            fc_norm=read_flag(flat, "fc_norm", where) or read_flag(flat, "use_aux_norm", where),
            norm_output=read_flag(flat, "norm_output", where),
            logit_scale=scale,
        )
        if config.draft_vocab_size > vocab:
            raise UserError(
                f"{where}: draft_vocab_size is {config.draft_vocab_size}, more than the "
                f"vocab_size {vocab}"
            )
        if config.fc_norm and config.norm_before_fc:
            raise UserError(
                f"{where}: fc_norm and norm_before_fc are both true; no public head has both, and "
                "minispec computes either"
            )
        if sizes.rope_width % 2:
            raise UserError(f"{where}: the rotary width is {sizes.rope_width}; it must be even")
        return config

    def describe(self) -> str:
        """What kind of head this is, for a line at start."""
        flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        scaling = self.rope_scaling
        return ", ".join(
            [
                "EAGLE-3.1" if self.fc_norm or self.norm_output else "EAGLE-3",
                "latent attention"
                if isinstance(self.attention, LatentSizes)
                else "Llama attention",
                *(flag for flag in flags if getattr(self, flag)),
                *([f"logit_scale {self.logit_scale:g}"] if self.logit_scale != 1 else []),
                "plain rope"
                if scaling is None
                else f"yarn {scaling.factor:g} (beta {scaling.beta_fast:g}/{scaling.beta_slow:g}, "
                f"mscale {scaling.mscale:g}/{scaling.mscale_all_dim:g})",
            ]
        )


def read_dialect(raw: dict[str, Any], where: str) -> tuple[dict[str, Any], bool]:
    """-> (config.json with all keys on one level, whether attention is latent)."""
    named = raw.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    if name in LLAMA or name in LATENT:
        return raw, name in LATENT
    if name != SPECULATORS:
        raise UserError(
            f"{where}: architectures is {named!r}; minispec loads EAGLE-3 heads: "
            f"{', '.join((*LLAMA, *LATENT))} or {SPECULATORS}"
        )
    inside = f"{where}: transformer_layer_config"
    layer = need_object(raw.get("transformer_layer_config"), inside)
    kind = layer.get("model_type")
    if kind not in LAYER_TYPES:
        raise UserError(f"{inside}: model_type is {kind!r}; known are {', '.join(LAYER_TYPES)}")
    if raw.get("norm_before_residual") is None:
        raise UserError(
            f"{where}: key 'norm_before_residual' is missing; engines differ on what that means in "
            "a speculators head: write true or false"
        )
    outer = {key: value for key, value in raw.items() if value is not None}
    return layer | outer, kind in LATENT_TYPES


def read_flag(config: dict[str, Any], key: str, where: str) -> bool:
    """True or false; absent is false."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise UserError(f"{where}: {key} is {value!r}; it must be true or false")
    return bool(value)


def read_head_scaling(config: dict[str, Any], where: str) -> RopeScaling | None:
    """YaRN as the engines read it for a head: an absent mscale_all_dim is 0.

    Then cos and sin carry the temperature 0.1 ln(factor) + 1 and latent attention's scale none;
    with both keys at 1, as in the training configs of the Kimi heads, it is the other way round.
    """
    scaling = read_rope_scaling(config, where)
    written = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if scaling is None or "mscale_all_dim" in written:
        return scaling
    return replace(scaling, mscale_all_dim=0.0)


def read_grouped(config: dict[str, Any], where: str) -> GroupedSizes:
    """Llama attention; head_dim is its own key, and hidden_size / heads only where absent."""
    heads = need_int(config, "num_attention_heads", where)
    key_heads = need_int(config, "num_key_value_heads", where)
    if heads % key_heads:
        raise UserError(
            f"{where}: num_attention_heads is {heads}, no multiple of num_key_value_heads "
            f"{key_heads}"
        )
    if config.get("head_dim") is not None:
        return GroupedSizes(heads, key_heads, need_int(config, "head_dim", where))
    return GroupedSizes(heads, key_heads, need_int(config, "hidden_size", where) // heads)


def read_latent(config: dict[str, Any], scaling: RopeScaling | None, where: str) -> LatentSizes:
    """Latent attention; the two inner norms take the config's eps, as serving engines do."""
    names = ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank")
    heads = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    sizes = {name: need_int(config, name, where) for name in (*names, *heads)}
    return LatentSizes(
        **sizes, rms_norm_eps=need_float(config, "rms_norm_eps", where), rope_scaling=scaling
    )


def read_layer_ids(ids: Any, count: int, where: str) -> tuple[int, ...] | None:
    """The tapped layers as they are written; None if the config names none."""
    if ids is None:
        return None
    number = "three" if count == DEFAULT_TAPS else str(count)
    whole = isinstance(ids, list) and all(type(index) is int for index in ids)
    if not whole or len(ids) != count:
        raise UserError(f"{where}: {IDS} is {ids!r}; it must be a list of {number} layer numbers")
    return tuple(ids)


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Those of EAGLE's own code: the inputs of these layers."""
    return (2, num_layers // 2, num_layers - 3)


def resolve_taps(
    aux_layer_ids: tuple[int, ...] | None, num_layers: int, where: str = "--draft-model"
) -> tuple[int, ...]:
    """Layer ids of a head's config -> tap boundaries (b is the input of layer b), ascending.

    Two conventions are in the wild: ids as inputs of layers, (2, N/2, N-3), and as outputs,
    (1, N/2 - 1, N-4): vLLM and EAGLE mean the former, TorchSpec, SpecForge, ModelOpt and
    TensorRT-LLM the latter. A set that starts with 1 is read as outputs, any other as inputs, as
    SGLang does for Kimi targets; an absent set means the default of EAGLE's own code. Boundary N
    is the last layer's output, before the final norm.
    """
    if aux_layer_ids is None:
        boundaries = default_taps(num_layers)
    else:
        ids = tuple(sorted(aux_layer_ids))
        boundaries = tuple(index + 1 for index in ids) if ids[0] == 1 else ids
    written = "absent" if aux_layer_ids is None else str(list(aux_layer_ids))
    check_taps(boundaries, f"{where}: {IDS} is {written}", num_layers)
    return boundaries


def check_taps(boundaries: tuple[int, ...], said: str, num_layers: int) -> None:
    """Raise UserError unless these are different boundaries of the target, ascending."""
    rising = all(below < above for below, above in zip(boundaries, boundaries[1:]))
    if not rising or boundaries[0] < 0 or boundaries[-1] > num_layers:
        raise UserError(
            f"{said}, read as inputs of layers {list(boundaries)}; they must be different ones "
            f"from 0 to {num_layers}, the target's number of layers; name others by --aux-layers"
        )


def choose_taps(
    config: Eagle3Config, given: tuple[int, ...] | None, num_layers: int, where: str
) -> tuple[tuple[int, ...], str]:
    """--aux-layers, the config's ids or the default -> (tap boundaries, where they are from).

    `given` are inputs of layers. Raises UserError where they do not fit head or target.
    """
    ids, count = config.aux_layer_ids, config.num_aux_hidden_states
    if given is not None:
        said = f"--aux-layers {','.join(map(str, given))}"
        if len(given) != count:
            raise UserError(f"{said}: the head fuses {count} states; name as many layers")
        boundaries = tuple(sorted(given))
        check_taps(boundaries, said, num_layers)
        return boundaries, "--aux-layers"
    if ids is None and count != DEFAULT_TAPS:
        raise UserError(
            f"{where}: num_aux_hidden_states is {count} and the config names no layers; name them "
            "by --aux-layers"
        )
    boundaries = resolve_taps(ids, num_layers, where)
    if ids is None:
        return boundaries, "no ids in the config: EAGLE's default"
    convention = "input-of-layer" if boundaries == tuple(sorted(ids)) else "output-of-layer"
    return boundaries, f"config: {convention} {', '.join(map(str, sorted(ids)))}"
