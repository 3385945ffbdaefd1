"""The supported families in one table: what differs between them.

A family is data and one function that makes its layers from the metadata, out of the parts that `layers.py` knows; `runtimes/decoder.py`
composes them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError, shortened
from paceline.models.expert_families import EXPERTS
from paceline.models.family import Family
from paceline.models.gemma4 import GEMMA4
from paceline.models.hybrid_families import HYBRIDS
from paceline.models.layer_reader import LayerReader
from paceline.models.layers import LayerConfig, NormOrder, QKNorm
from paceline.models.nemotron_h import NEMOTRON_H

Layers = tuple[LayerConfig, ...]


def _llama(read: LayerReader) -> Layers:
    bias = read.flag("attention_bias")
    return read.layers(read.attention(bias=bias, output_bias=bias), read.mlp(bias=read.flag("mlp_bias")))


def _mistral(read: LayerReader) -> Layers:
    return read.layers(read.attention(), read.mlp(), slides=[True] * read.num_layers)


def _qwen2(read: LayerReader) -> Layers:
    return read.layers(read.attention(bias=True), read.mlp(), slides=_qwen_slides(read))


def _qwen3(read: LayerReader) -> Layers:
    bias = read.flag("attention_bias")
    attention = read.attention(bias=bias, output_bias=bias, qk_norm=QKNorm.HEAD)
    return read.layers(attention, read.mlp(), slides=_qwen_slides(read))


def _qwen_slides(read: LayerReader) -> Sequence[bool]:
    """Where windows are switched on: the layers listed in `layer_types`, else those from `max_window_layers` on."""
    if not read.flag("use_sliding_window"):
        return ()
    types = read.fields.values.get("layer_types")
    if isinstance(types, list):  # a model that lost its last layers may keep the whole list
        kinds = [*types[: read.num_layers], *["full_attention"] * (read.num_layers - len(types))]
        return [kind == "sliding_attention" for kind in kinds]
    first = read.fields.number("max_window_layers", 28)
    return [layer >= first for layer in range(read.num_layers)]


def _gemma2(read: LayerReader) -> Layers:
    return _gemma(read, pattern=2, soft_cap=read.soft_cap("attn_logit_softcapping"))


def _gemma3(read: LayerReader) -> Layers:
    return _gemma(read, qk_norm=QKNorm.HEAD)


def _gemma(read: LayerReader, *, pattern: int | None = None, qk_norm: QKNorm = QKNorm.NONE, soft_cap: float | None = None) -> Layers:
    if read.flag("use_bidirectional_attention"):
        raise CheckpointError(f"{read.fields.path}: use_bidirectional_attention is set: the model embeds text, it does not generate")
    bias, scale = read.flag("attention_bias"), read.fields.positive("query_pre_attn_scalar") ** -0.5
    attention = read.attention(bias=bias, output_bias=bias, qk_norm=qk_norm, scale=scale, soft_cap=soft_cap)
    return read.layers(attention, read.mlp(), norm_order=NormOrder.SANDWICH, slides=read.sliding_layers(pattern))


def _olmo2(read: LayerReader, slides: Sequence[bool] = ()) -> Layers:
    bias = read.flag("attention_bias")
    attention = read.attention(bias=bias, output_bias=bias, qk_norm=QKNorm.WIDTH)
    return read.layers(attention, read.mlp(), norm_order=NormOrder.POST, slides=slides)


def _olmo3(read: LayerReader) -> Layers:
    return _olmo2(read, read.sliding_layers(4))


def _exaone4(read: LayerReader) -> Layers:
    attention, mlp = read.attention(qk_norm=QKNorm.HEAD), read.mlp()
    if read.fields.values.get("sliding_window") is None:
        return read.layers(attention, mlp, norm_order=NormOrder.POST)
    slides = read.sliding_layers()
    layers = read.layers(attention, mlp, norm_order=NormOrder.POST, slides=slides)
    unturned = LayerConfig(mixer=replace(attention, rotates=False), mlp=mlp, norm_order=NormOrder.POST)
    return tuple(layer if is_local else unturned for layer, is_local in zip(layers, slides, strict=True))


def _granite(read: LayerReader) -> Layers:
    bias, scale = read.flag("attention_bias"), read.fields.positive("attention_multiplier", 1.0)
    layers = read.layers(read.attention(bias=bias, output_bias=bias, scale=scale), read.mlp(bias=read.flag("mlp_bias")))
    return (replace(layers[0], residual_scale=read.fields.positive("residual_multiplier", 1.0)),) * read.num_layers


def _seed_oss(read: LayerReader) -> Layers:
    attention = read.attention(bias=read.fields.flag("attention_bias", default=True), output_bias=read.flag("attention_out_bias"))
    return read.layers(attention, read.mlp(bias=read.flag("mlp_bias")))


def _smollm3(read: LayerReader) -> Layers:
    bias, rotates = read.flag("attention_bias"), read.rotating_layers()
    is_listed = read.fields.values.get("layer_types") is not None
    slides = read.sliding_layers() if is_listed else [read.flag("use_sliding_window") and not turned for turned in rotates]
    layers = read.layers(read.attention(bias=bias, output_bias=bias), read.mlp(bias=read.flag("mlp_bias")), slides=slides)
    unturned = {layer: replace(layer, mixer=replace(layer.attention, rotates=False)) for layer in dict.fromkeys(layers)}
    return tuple(layer if turned else unturned[layer] for layer, turned in zip(layers, rotates, strict=True))


def _glm4(read: LayerReader) -> Layers:
    attention = read.attention(bias=read.fields.flag("attention_bias", default=True))
    return read.layers(attention, read.mlp(), norm_order=NormOrder.SANDWICH)


def _ministral3(read: LayerReader) -> Layers:
    if not any(read.fields.values.get(name) for name in ("rope_parameters", "rope_scaling")):
        raise CheckpointError(f"{read.fields.path} has no 'rope_parameters', which a ministral3 needs")
    return _mistral(read)


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
        gguf="llama",  # Mistral's files say so too: it is the same network
        layers=_llama,
        defaults={"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    ),
    Family(
        name="mistral",
        architecture="MistralForCausalLM",
        layers=_mistral,
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
        gguf="qwen2",
        layers=_qwen2,
        defaults=_QWEN,
    ),
    Family(
        name="qwen3",
        architecture="Qwen3ForCausalLM",
        gguf="qwen3",
        layers=_qwen3,
        defaults={**_QWEN, "head_dim": 128},
    ),
    Family(
        name="mimo",  # a qwen2 with a module for multi-token prediction beside it
        architecture="MiMoForCausalLM",
        layers=_qwen2,
        defaults=_QWEN,
    ),
    Family(
        name="phi3",
        architecture="Phi3ForCausalLM",
        gguf="phi3",
        layers=_mistral,
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
        gguf="gemma2",
        layers=_gemma2,
        defaults={
            **_GEMMA,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        activation_field="hidden_activation",
        norm_offset=True,
        scales_embedding=True,
        caps_logits=True,
    ),
    Family(
        name="gemma3_text",
        architecture="Gemma3ForCausalLM",
        gguf="gemma3",
        layers=_gemma3,
        defaults={
            **_GEMMA,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "sliding_window_pattern": 6,
            "rope_theta": 1e6,
        },
        activation_field="hidden_activation",
        norm_offset=True,
        scales_embedding=True,
        caps_logits=True,
        has_local_rope=True,
    ),
    Family(
        name="olmo2",
        architecture="Olmo2ForCausalLM",
        gguf="olmo2",
        layers=_olmo2,
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "eos_token_id": 50279},
    ),
    Family(
        name="olmo3",
        architecture="Olmo3ForCausalLM",
        layers=_olmo3,
        defaults={
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "rope_local_base_freq": 5e5,
            "sliding_window": 4096,
            "eos_token_id": 50279,
        },
        has_local_rope=True,
    ),
    Family(
        name="exaone4",
        architecture="Exaone4ForCausalLM",
        gguf="exaone4",
        layers=_exaone4,
        defaults={
            "max_position_embeddings": 2048,
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "bos_token_id": 0,
            "eos_token_id": 2,
        },
    ),
    Family(
        name="granite",
        architecture="GraniteForCausalLM",
        gguf="granite",
        layers=_granite,
        defaults={"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
        has_multipliers=True,
    ),
    Family(
        name="seed_oss",
        architecture="SeedOssForCausalLM",
        gguf="seed_oss",
        layers=_seed_oss,
        defaults={
            "max_position_embeddings": 524288,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "bos_token_id": 0,
            "eos_token_id": 2,
        },
    ),
    Family(
        name="smollm3",
        architecture="SmolLM3ForCausalLM",
        gguf="smollm3",
        layers=_smollm3,
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
        },
    ),
    Family(
        name="ministral3",
        architecture="Ministral3ForCausalLM",
        gguf="mistral3",
        layers=_ministral3,
        defaults={
            "max_position_embeddings": 262144,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        tempers_queries=True,
    ),
    Family(
        name="glm4",
        architecture="Glm4ForCausalLM",
        gguf="glm4",
        layers=_glm4,
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1.5625e-7,
            "partial_rotary_factor": 0.5,
            "eos_token_id": [151329, 151336, 151338],
        },
        rotates_partially=True,
        interleaves_rotation=True,
        part_names={
            "attention_output_norm": "post_self_attn_layernorm",
            "mlp_norm": "post_attention_layernorm",
            "mlp_output_norm": "post_mlp_layernorm",
        },
        fuses_projections=True,
    ),
    *EXPERTS,
    *GEMMA4,
    *HYBRIDS,
    NEMOTRON_H,
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
