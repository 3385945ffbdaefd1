"""Llama, and families that differ from it by a few switches: Mistral, Mixtral, Phi-3, SmolLM3, Seed-OSS, Arcee."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.errors import CheckpointError
from paceline.models.families.family import Family, GgufFormat
from paceline.models.gguf.fields import GgufFields
from paceline.models.layer_builder import LayerBuilder
from paceline.models.layers import ExpertMLP, LayerConfig

Layers = tuple[LayerConfig, ...]


def _llama_layers(build: LayerBuilder) -> Layers:
    bias = build.flag("attention_bias")
    return build.layers(build.attention(bias=bias, output_bias=bias), build.mlp(bias=build.flag("mlp_bias")))


def _mistral_layers(build: LayerBuilder) -> Layers:
    return build.layers(build.attention(), build.mlp(), is_sliding=[True] * build.num_layers)


def _ministral3_layers(build: LayerBuilder) -> Layers:
    if not any(build.fields.values.get(name) for name in ("rope_parameters", "rope_scaling")):
        raise CheckpointError(f"{build.fields.path} has no 'rope_parameters', which a ministral3 needs")
    return _mistral_layers(build)


def _ministral3_gguf_fields(fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary settings, including the query temperature, whose length is that of the rotary scaling."""
    original, length = config.get("original_max_position_embeddings"), fields.architecture_value("attention.temperature_length")
    beta = fields.architecture_value("attention.temperature_scale") or 0.0
    if beta and length not in (None, original):
        fields.refuse("attention.temperature_length", length, f"the original context length, {original}")
    rope = {"rope_theta": config["rope_theta"], **(config.get("rope_scaling") or {}), "llama_4_scaling_beta": beta}
    return {"rope_parameters": rope, "rope_scaling": None}


def _mixtral_layers(build: LayerBuilder) -> Layers:
    experts = ExpertMLP(routing=replace(build.routing(), is_normalized=True), expert=build.mlp())
    return build.layers(build.attention(), experts, is_sliding=[True] * build.num_layers)


def _mixtral_gguf_fields(fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    experts = fields.read_experts(width=config["intermediate_size"])
    return {**experts, "intermediate_size": experts["moe_intermediate_size"]}


def _phi3_gguf_fields(fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"sliding_window": fields.architecture_value("attention.sliding_window") or None}  # 0 = none


def _smollm3_layers(build: LayerBuilder) -> Layers:
    bias, has_rope_embedding = build.flag("attention_bias"), build.layers_with_rope()
    is_listed = build.fields.values.get("layer_types") is not None
    is_sliding = build.sliding_layers() if is_listed else [build.flag("use_sliding_window") and not turned for turned in has_rope_embedding]
    layers = build.layers(build.attention(bias=bias, output_bias=bias), build.mlp(bias=build.flag("mlp_bias")), is_sliding=is_sliding)
    unturned = {layer: replace(layer, mixer=replace(layer.attention, has_rope_embedding=False)) for layer in dict.fromkeys(layers)}
    return tuple(layer if turned else unturned[layer] for layer, turned in zip(layers, has_rope_embedding, strict=True))


def _seed_oss_layers(build: LayerBuilder) -> Layers:
    attention = build.attention(bias=build.fields.flag("attention_bias", default=True), output_bias=build.flag("attention_out_bias"))
    return build.layers(attention, build.mlp(bias=build.flag("mlp_bias")))


def _arcee_layers(build: LayerBuilder) -> Layers:
    bias = build.flag("attention_bias")
    return build.layers(build.attention(bias=bias, output_bias=bias), build.mlp(has_gate=False))


FAMILIES = (
    Family(
        name="llama",
        architecture="LlamaForCausalLM",
        models="Llama 1 to 3.3, and what has their shape (Vicuna, TinyLlama, SmolLM2, Yi)",
        published_heads=("medusa", "eagle", "eagle3"),
        layers=_llama_layers,
        defaults={"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
        gguf=GgufFormat(architectures=("llama",), has_interleaved_rope=True),
    ),
    Family(
        name="mistral",
        architecture="MistralForCausalLM",
        models="Mistral 7B, Mistral Nemo, Mistral Small 3 (text)",
        layers=_mistral_layers,
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        gguf_family="llama",
    ),
    Family(
        name="ministral3",
        architecture="Ministral3ForCausalLM",
        models="Ministral 3 (text)",
        layers=_ministral3_layers,
        defaults={
            "max_position_embeddings": 262144,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        has_temperature_tuning=True,
        gguf=GgufFormat(architectures=("mistral3",), read_config=_ministral3_gguf_fields, has_interleaved_rope=True),
    ),
    Family(
        name="mixtral",
        architecture="MixtralForCausalLM",
        models="Mixtral",
        published_heads=("eagle",),
        layers=_mixtral_layers,
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        mlp_module="block_sparse_moe",
        mlp_tensors={"gate.weight": "gate.weight"},
        gguf=GgufFormat(
            architectures=("llama",),
            matches=lambda fields: bool(fields.architecture_value("expert_count")),
            read_config=_mixtral_gguf_fields,
            has_interleaved_rope=True,
        ),
    ),
    Family(
        name="phi3",
        architecture="Phi3ForCausalLM",
        models="Phi-3, Phi-3.5, Phi-4-mini",
        layers=_mistral_layers,
        defaults={
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 1,
            "eos_token_id": 32000,
        },
        has_partial_rope=True,
        has_fused_projections=True,
        rope_type_aliases={"su": "longrope", "yarn": "longrope"},  # in early checkpoints
        gguf=GgufFormat(architectures=("phi3",), read_config=_phi3_gguf_fields),
    ),
    Family(
        name="smollm3",
        architecture="SmolLM3ForCausalLM",
        models="SmolLM3",
        layers=_smollm3_layers,
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
        },
        gguf=GgufFormat(architectures=("smollm3",), has_interleaved_rope=True),
    ),
    Family(
        name="seed_oss",
        architecture="SeedOssForCausalLM",
        models="Seed-OSS",
        layers=_seed_oss_layers,
        defaults={
            "max_position_embeddings": 524288,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "bos_token_id": 0,
            "eos_token_id": 2,
        },
        gguf=GgufFormat(architectures=("seed_oss",), module_names={"mlp_norm": "post_attention_norm"}),
    ),
    Family(
        name="arcee",
        architecture="ArceeForCausalLM",
        models="Arcee AFM",
        layers=_arcee_layers,
        defaults={
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "hidden_act": "relu2",
            "bos_token_id": 128000,
            "eos_token_id": 128001,
        },
        gguf=GgufFormat(architectures=("arcee",), has_interleaved_rope=True),
    ),
)
