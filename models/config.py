"""Kimi-K2 family config.json -> KimiConfig. A value that this code does not compute is refused.

Follows the public config.json files of Kimi-K2-Thinking, K2.5 and K2.6.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from .interface import UserError
from .layers import RopeScaling

# Keys whose value picks another computation than the one in kimi_k25.py, and what it must be.
REQUIRED_VALUES: dict[str, object] = {
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "attention_bias": False,
    "norm_topk_prob": True,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
    "rope_interleave": True,
}
QUANTIZATION: dict[str, object] = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": 32,
    "actorder": None,
    "dynamic": False,
}


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
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
        raise UserError(f"{where}: key '{key}' is {value!r}; it must be a positive number")
    return float(value)


def need_object(value: Any, where: str) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise UserError(f"{where} is {value!r}; it must be a JSON object")
    return value


def need_eos(config: dict[str, Any], where: str) -> tuple[int, ...]:
    """One token id or several."""
    value = need(config, "eos_token_id", where)
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) for token in ids):
        raise UserError(f"{where}: key 'eos_token_id' is {value!r}; it must be one id or a list")
    return tuple(ids)


def refuse_other(config: dict[str, Any], required: dict[str, object], where: str) -> None:
    """Raise for the first key that is present with another value than the one computed here."""
    for key, value in required.items():
        if key in config and config[key] != value:
            raise UserError(
                f"{where}: '{key}' is {config[key]!r}, which minispec does not compute; "
                f"it supports {value!r} only"
            )


def read_rope_scaling(config: dict[str, Any], where: str) -> RopeScaling | None:
    """The `rope_scaling` (or newer `rope_parameters`) entry; only YaRN or none is known."""
    inside = f"{where}: rope_scaling"
    raw = need_object(config.get("rope_scaling") or config.get("rope_parameters") or {}, inside)
    kind = raw.get("type", raw.get("rope_type", "default"))
    if kind == "default":
        return None
    if kind != "yarn":
        raise UserError(f"{where}: rope_scaling type is {kind!r}; minispec knows 'yarn' or none")
    factor = need_float(raw, "factor", inside)
    original = need_int(raw, "original_max_position_embeddings", inside)
    optional = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    given = {key: raw[key] for key in optional if raw.get(key) is not None}
    for key, value in given.items():
        if not isinstance(value, (int, float)):
            raise UserError(f"{inside}: key '{key}' is {value!r}; it must be a number")
    return RopeScaling(factor, original, **given)


def read_rope_theta(config: dict[str, Any], where: str) -> float:
    """`rope_theta`, which newer files keep inside `rope_parameters`."""
    newer = config.get("rope_parameters") or {}
    return need_float(newer if "rope_theta" in newer else config, "rope_theta", where)


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
            eos_token_id=need_eos(text, where),
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
    outer: dict[str, object] = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    refuse_other(need_object(quantization, inside), outer, inside)
    groups = need_object(need(quantization, "config_groups", inside), f"{inside}: config_groups")
    for name, group in groups.items():
        weights = need_object(group, f"{inside}: {name}").get("weights")
        weights = need_object(weights or {}, f"{inside}: {name}.weights")
        refuse_other(weights, QUANTIZATION, f"{where}: {name}.weights")
