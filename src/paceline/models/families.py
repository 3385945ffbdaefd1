"""The supported families in one table: what differs between them, and the tensors a network has.

All are pre-norm decoders with rotary attention and a gated MLP (`runtimes/decoder.py`). A family differs in which
projections have a bias, what is normed, scaled or capped, how a sliding window is declared, and in its defaults.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import CheckpointError, shortened
from paceline.models.json_fields import JsonFields

if TYPE_CHECKING:
    from paceline.models.config import ModelConfig


Switches = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What is particular about one family.

    Attributes:
        switches: fields of `ModelConfig` that follow from its metadata.
        window: the sliding window, or None where no layer has one.
        defaults: what metadata leaves out, as its configuration class in transformers assumes.
        activation_field: the name of the activation in the metadata.
        has_local_rope: the sliding layers rotate by parameters of their own.
        rotates_partially: `partial_rotary_factor` may be below 1.
        fuses_projections: checkpoints stack q, k and v in one matrix, gate and up in another.
        rope_types: other spellings of rope types.
    """

    name: str
    architecture: str
    switches: Callable[[JsonFields], Switches]
    window: Callable[[JsonFields], int | None]
    defaults: Mapping[str, Any]
    activation_field: str = "hidden_act"
    has_local_rope: bool = False
    rotates_partially: bool = False
    fuses_projections: bool = False
    rope_types: Mapping[str, str] = field(default_factory=dict)


def _llama_switches(fields: JsonFields) -> Switches:
    bias = fields.flag("attention_bias", default=False)
    return {"attention_bias": bias, "output_bias": bias, "mlp_bias": fields.flag("mlp_bias", default=False)}


def _qwen3_switches(fields: JsonFields) -> Switches:
    bias = fields.flag("attention_bias", default=False)
    return {"attention_bias": bias, "output_bias": bias, "qk_norm": True}


def _gemma_switches(fields: JsonFields) -> Switches:
    if fields.flag("use_bidirectional_attention", default=False):
        raise CheckpointError(f"{fields.path}: use_bidirectional_attention is set: the model embeds text, it does not generate")
    bias = fields.flag("attention_bias", default=False)
    return {
        "attention_bias": bias,
        "output_bias": bias,
        "sandwich_norms": True,
        "norm_offset": True,
        "embedding_scale": fields.size("hidden_size") ** 0.5,
        "query_scalar": fields.positive("query_pre_attn_scalar"),
        "logit_soft_cap": _soft_cap(fields, "final_logit_softcapping"),
        "sliding_layers": _sliding_layers(fields),
    }


def _soft_cap(fields: JsonFields, name: str) -> float | None:
    return None if fields.values.get(name) is None else fields.positive(name)


def _sliding_layers(fields: JsonFields) -> tuple[int, ...]:
    """Those `layer_types` names, else all but every `sliding_window_pattern`-th."""
    num_layers = fields.size("num_hidden_layers")
    types = fields.values.get("layer_types")
    if types is None:
        pattern = fields.size("sliding_window_pattern")
        return tuple(layer for layer in range(num_layers) if (layer + 1) % pattern)
    if not isinstance(types, list) or len(types) != num_layers or not set(map(str, types)) <= {"sliding_attention", "full_attention"}:
        raise CheckpointError(
            f"{fields.path}: layer_types = {shortened(types)}, expected sliding_attention or full_attention for {num_layers} layers"
        )
    return tuple(layer for layer, kind in enumerate(types) if kind == "sliding_attention")


def _window_of_all(fields: JsonFields) -> int | None:
    return None if fields.values.get("sliding_window") is None else fields.size("sliding_window")


def _qwen_window(fields: JsonFields) -> int | None:
    """The window of the layers that have one: those listed in `layer_types`, else those from `max_window_layers` on."""
    if not fields.flag("use_sliding_window", default=False):
        return None
    layer_types = fields.values.get("layer_types")
    if isinstance(layer_types, list):
        slides = "sliding_attention" in layer_types
    else:
        slides = fields.number("max_window_layers", 28) < fields.size("num_hidden_layers")
    return _window_of_all(fields) if slides else None


def _gemma_window(fields: JsonFields) -> int | None:
    return _window_of_all(fields) if _sliding_layers(fields) else None


_QWEN = {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096}
_GEMMA = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_TABLE = (
    Family(
        name="llama",
        architecture="LlamaForCausalLM",
        switches=_llama_switches,
        window=lambda _: None,
        defaults={"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    ),
    Family(
        name="mistral",
        architecture="MistralForCausalLM",
        switches=lambda _: {},
        window=_window_of_all,
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    Family(
        name="qwen2",
        architecture="Qwen2ForCausalLM",
        switches=lambda _: {"attention_bias": True},
        window=_qwen_window,
        defaults=_QWEN,
    ),
    Family(
        name="qwen3",
        architecture="Qwen3ForCausalLM",
        switches=_qwen3_switches,
        window=_qwen_window,
        defaults={**_QWEN, "head_dim": 128},
    ),
    Family(
        name="mimo",  # a qwen2 with a module for multi-token prediction beside it
        architecture="MiMoForCausalLM",
        switches=lambda _: {"attention_bias": True},
        window=_qwen_window,
        defaults=_QWEN,
    ),
    Family(
        name="phi3",
        architecture="Phi3ForCausalLM",
        switches=lambda _: {},
        window=_window_of_all,
        defaults={
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 1,
            "eos_token_id": 32000,
        },
        rotates_partially=True,
        fuses_projections=True,
        rope_types={"su": "longrope", "yarn": "longrope"},  # early checkpoints say so
    ),
    Family(
        name="gemma2",
        architecture="Gemma2ForCausalLM",
        switches=lambda fields: {**_gemma_switches(fields), "attention_soft_cap": _soft_cap(fields, "attn_logit_softcapping")},
        window=_gemma_window,
        defaults={
            **_GEMMA,
            "max_position_embeddings": 8192,
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        activation_field="hidden_activation",
    ),
    Family(
        name="gemma3_text",
        architecture="Gemma3ForCausalLM",
        switches=lambda fields: {**_gemma_switches(fields), "qk_norm": True},
        window=_gemma_window,
        defaults={
            **_GEMMA,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "sliding_window_pattern": 6,
            "rope_theta": 1e6,
        },
        activation_field="hidden_activation",
        has_local_rope=True,
    ),
)
FAMILIES: Mapping[str, Family] = {family.name: family for family in _TABLE}


def family_of(values: Mapping[str, Any], path: Path) -> Family:
    """The family a config.json names by `model_type`, or by its architecture where that is absent.

    Raises:
        CheckpointError: it is none of ours, or not a causal language model.
    """
    architectures = values.get("architectures")
    architecture = str(architectures[0]) if isinstance(architectures, list) and architectures else None
    model_type = values.get("model_type")
    by_architecture = {family.architecture.lower(): family for family in FAMILIES.values()}
    family = by_architecture.get(str(architecture).lower()) if model_type is None else FAMILIES.get(str(model_type))
    if family is None or (architecture is not None and architecture.lower() != family.architecture.lower()):
        raise CheckpointError(
            f"{path} describes model_type {shortened(model_type)} with architecture {shortened(architecture)}, which is not supported; "
            f"supported are {', '.join(f'{known.name} ({known.architecture})' for known in FAMILIES.values())}"
        )
    return family


def tensor_shapes(config: "ModelConfig") -> dict[str, tuple[int, ...]]:
    """Every tensor of the network, by our name, with its shape; matrices are [out, in]."""
    query_size, kv_size = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    hidden, inner = config.hidden_size, config.intermediate_size
    projections = {
        "q_proj": (query_size, hidden, config.attention_bias),
        "k_proj": (kv_size, hidden, config.attention_bias),
        "v_proj": (kv_size, hidden, config.attention_bias),
        "o_proj": (hidden, query_size, config.output_bias),
        "gate_proj": (inner, hidden, config.mlp_bias),
        "up_proj": (inner, hidden, config.mlp_bias),
        "down_proj": (hidden, inner, config.mlp_bias),
    }
    norms = {"attention_norm": hidden, "mlp_norm": hidden}
    if config.sandwich_norms:
        norms |= {"attention_output_norm": hidden, "mlp_output_norm": hidden}
    if config.qk_norm:
        norms |= {"q_norm": config.head_size, "k_norm": config.head_size}
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        for name, size in norms.items():
            shapes[f"layers.{layer}.{name}.weight"] = (size,)
        for name, (rows, columns, has_bias) in projections.items():
            shapes[f"layers.{layer}.{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"layers.{layer}.{name}.bias"] = (rows,)
    shapes["final_norm.weight"] = (hidden,)
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


_CHECKPOINT_PARTS = {
    "embedding": "model.embed_tokens",
    "final_norm": "model.norm",
    "lm_head": "lm_head",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    **{name: f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")},
    **{name: f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")},
}


_SANDWICH_PARTS = {
    **_CHECKPOINT_PARTS,
    "attention_output_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}


def checkpoint_name(name: str, *, sandwich_norms: bool = False) -> str:
    """How Hugging Face checkpoints call our tensor: `layers.3.q_proj.weight` is `model.layers.3.self_attn.q_proj.weight`."""
    *prefix, part, kind = name.split(".")
    parts = _SANDWICH_PARTS if sandwich_norms else _CHECKPOINT_PARTS
    return ".".join((["model", *prefix] if prefix else []) + [parts[part], kind])
