"""Kimi-K2 family config.json -> KimiConfig. A value that this code does not compute is refused.

Follows the public config.json files of Kimi-K2-Thinking, K2.5 and K2.6.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from .interface import UserError
from .layers import RopeScaling

# Keys whose value picks another computation than the one in kimi_k25.py, and what it must be.
REQUIRED_VALUES: dict[str, object] = {
    "hidden_act": "silu", "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "attention_bias": False, "norm_topk_prob": True, "moe_layer_freq": 1, "n_group": 1,
    "topk_group": 1, "tie_word_embeddings": False, "num_nextn_predict_layers": 0,
    "rope_interleave": True,
}  # fmt: skip
ABSENT = ("sliding_window", "mlp_bias", "logit_scale")  # other models' keys, computed nowhere here
YARN_KEYS = ("factor", "original_max_position_embeddings")
YARN_OPTIONAL = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
QUANTIZATION: dict[str, object] = {
    "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32,
    "actorder": None, "dynamic": False,
}  # fmt: skip


def need(config: dict[str, Any], key: str, where: str) -> Any:
    """The value of a key that has no sensible default."""
    if config.get(key) is None:
        raise UserError(f"{where}: key '{key}' is missing; it is needed to build the model")
    return config[key]


def need_int(config: dict[str, Any], key: str, where: str, least: int = 1) -> int:
    """A whole number, at least `least`."""
    value = need(config, key, where)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(
            f"{where}: key '{key}' is {value!r}; it must be a whole number from {least} up"
        )
    return value


def need_float(config: dict[str, Any], key: str, where: str) -> float:
    """A positive number."""
    value = need(config, key, where)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        raise UserError(f"{where}: key '{key}' is {value!r}; it must be a positive number")
    return float(value)


def need_object(value: Any, where: str) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise UserError(f"{where} is {value!r}; it must be a JSON object")
    return value


def need_eos(value: Any, vocab_size: int, where: str) -> tuple[int, ...]:
    """One token id or several."""
    ids = value if isinstance(value, list) else [value]
    if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        raise UserError(
            f"{where}: key 'eos_token_id' is {value!r}; it must be a token id below {vocab_size}, "
            "or a list of them"
        )
    return tuple(ids)


def refuse_other(config: dict[str, Any], required: dict[str, object], where: str) -> None:
    """Raise for the first key that is present with another value than the one computed here."""
    for key, value in required.items():
        if key in config and config[key] != value:
            raise UserError(
                f"{where}: '{key}' is {config[key]!r}, which minispec does not compute; "
                f"it supports {value!r} only"
            )
    for key in ABSENT:
        if config.get(key):
            raise UserError(
                f"{where}: '{key}' is {config[key]!r}, which minispec does not compute; remove it"
            )


def read_rope_scaling(config: dict[str, Any], where: str) -> RopeScaling | None:
    """The `rope_scaling` (or newer `rope_parameters`) entry; only YaRN or none is known."""
    inside = f"{where}: rope_scaling"
    raw = need_object(config.get("rope_scaling") or config.get("rope_parameters") or {}, inside)
    kinds = {raw[key] for key in ("type", "rope_type") if key in raw} or {"default"}
    if kinds == {"default"}:
        return None
    if kinds != {"yarn"}:
        raise UserError(f"{inside}: type is {sorted(kinds)}; minispec knows 'yarn' or none")
    known = {"type", "rope_type", "rope_theta", *YARN_KEYS, *YARN_OPTIONAL}
    for key in raw.keys() - known:
        raise UserError(f"{inside}: key '{key}' is {raw[key]!r}, which minispec does not compute")
    given = {key: need_float(raw, key, inside) for key in YARN_OPTIONAL if key in raw}
    factor = need_float(raw, "factor", inside)
    if factor < 1:
        raise UserError(f"{inside}: key 'factor' is {factor}; it must be at least 1")
    return RopeScaling(factor, need_int(raw, YARN_KEYS[1], inside), **given)


def read_rope_theta(config: dict[str, Any], where: str) -> float:
    """`rope_theta`, which newer files keep inside `rope_parameters`."""
    newer = need_object(config.get("rope_parameters") or {}, f"{where}: rope_parameters")
    theta = need_float(newer if "rope_theta" in newer else config, "rope_theta", where)
    if theta <= 1:
        raise UserError(f"{where}: key 'rope_theta' is {theta}; it must be above 1")
    return theta


@dataclass(frozen=True)
class KimiConfig:
    """The text model of Kimi-K2 / K2.5. Field names are those of config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    first_k_dense_replace: int
    routed_scaling_factor: float
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    eos_token_id: tuple[int, ...]
    tensor_prefix: str  # what the checkpoint puts before `model.` and `lm_head.`

    @property
    def cache_width(self) -> int:
        """Values that the latent cache keeps a token and layer: latent, then roped key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @staticmethod
    def from_json(raw: dict[str, Any], where: str) -> "KimiConfig":
        """Read config.json, flat (K2-Thinking) or nested under `text_config` (K2.5).

        Raises UserError, which names the key, for a missing key or a value not computed here.
        """
        text = need_object(raw.get("text_config", raw), f"{where}: text_config")
        model_type = text.get("model_type")
        if model_type not in ("kimi_k2", "deepseek_v3"):
            raise UserError(
                f"{where}: model_type is {model_type!r}; minispec runs the Kimi-K2 family "
                "('kimi_k2' or 'deepseek_v3', flat or under 'text_config')"
            )
        refuse_other(text, REQUIRED_VALUES, where)
        refuse_other(raw, {"tie_word_embeddings": False}, where)
        check_quantization(text.get("quantization_config", raw.get("quantization_config")), where)
        ints = [
            field.name
            for field in dataclasses.fields(KimiConfig)
            if field.type is int and field.name != "first_k_dense_replace"  # which may be 0
        ]
        config = KimiConfig(
            **{key: need_int(text, key, where) for key in ints},
            first_k_dense_replace=need_int(text, "first_k_dense_replace", where, least=0),
            routed_scaling_factor=need_float(text, "routed_scaling_factor", where),
            rms_norm_eps=need_float(text, "rms_norm_eps", where),
            rope_theta=read_rope_theta(text, where),
            rope_scaling=read_rope_scaling(text, where),
            eos_token_id=need_eos(
                need(text, "eos_token_id", where), need_int(text, "vocab_size", where), where
            ),
            tensor_prefix="language_model." if "text_config" in raw else "",
        )
        if config.num_experts_per_tok > config.n_routed_experts:
            raise UserError(
                f"{where}: num_experts_per_tok is {config.num_experts_per_tok}, more than the "
                f"{config.n_routed_experts} of n_routed_experts"
            )
        for key in ("hidden_size", "moe_intermediate_size"):
            if getattr(config, key) % 32:
                raise UserError(
                    f"{where}: {key} is {getattr(config, key)}; INT4 experts need a multiple of "
                    "the group size 32"
                )
        return config


def check_quantization(quantization: Any, where: str) -> None:
    """Refuse all but compressed-tensors' INT4 pack-quantized routed experts."""
    if quantization is None:
        raise UserError(
            f"{where}: no quantization_config; this version loads INT4 pack-quantized experts only"
        )
    inside = f"{where}: quantization_config"
    outer = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    refuse_other(need_object(quantization, inside), {**outer, "kv_cache_scheme": None}, inside)
    need(quantization, "quant_method", inside)
    groups = need_object(need(quantization, "config_groups", inside), f"{inside}: config_groups")
    for name, group in groups.items():
        within = f"{inside}: {name}"
        refuse_other(need_object(group, within), {"input_activations": None}, within)
        weights = need_object(need(group, "weights", within), f"{within}.weights")
        refuse_other(weights, QUANTIZATION, f"{within}.weights")
        need(weights, "num_bits", f"{within}.weights")
