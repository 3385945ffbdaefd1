"""ERNIE 4.5, dense and with experts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.models.families.experts import experts_with_shared
from paceline.models.families.family import Family, GgufFormat, Layers
from paceline.models.gguf.fields import GgufFields
from paceline.models.layer_builder import LayerBuilder


def _ernie4_5_layers(builder: LayerBuilder) -> Layers:
    bias = builder.flag("use_bias")
    return builder.layers(builder.attention(bias=bias), builder.mlp(bias=bias))


def _ernie4_5_moe_layers(builder: LayerBuilder) -> Layers:
    fields, count = builder.fields, builder.num_layers
    routing = replace(builder.routing(), has_normalized_weights=True, has_correction_bias=True)
    experts = experts_with_shared(builder, routing, fields.integer("moe_num_shared_experts", 2, minimum=0))
    first, interval = fields.integer("moe_layer_start_index", 1, minimum=0), fields.integer("moe_layer_interval", 1)
    last = count - 1 if fields.values.get("moe_layer_end_index", -1) == -1 else fields.integer("moe_layer_end_index", minimum=0)
    has_experts = [first <= layer <= last and (layer + 1) % interval == 0 for layer in range(count)]
    return builder.layers(builder.attention(), [experts if is_sparse else builder.mlp() for is_sparse in has_experts])


def _ernie4_5_moe_gguf_fields(fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    first, interval = fields.architecture_value("leading_dense_block_count") or 0, fields.count("interleave_moe_layer_step", 1)
    experts = fields.read_experts(is_normalized=True)
    width = experts["moe_intermediate_size"]
    sparse = (layer for layer in range(first, config["num_hidden_layers"]) if (layer + 1) % interval == 0)
    shared = fields.num_tensor_rows(f"blk.{next(sparse, 0)}.ffn_up_shexp.weight")
    if shared % width:
        fields.raise_invalid("expert_feed_forward_length", width, f"a divisor of the shared experts' {shared} rows")
    return {
        **experts,
        "use_bias": config["attention_bias"] or config["mlp_bias"],
        "moe_num_shared_experts": shared // width,
        "moe_layer_start_index": first,
        "moe_layer_interval": interval,
    }


_DEFAULT_FIELDS = {
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": True, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_ERNIE4_5_FAMILY = Family(
    name="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    model_names="ERNIE 4.5 0.3B",
    build_layers=_ernie4_5_layers,
    defaults={**_DEFAULT_FIELDS, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128},
    required_field_values={"compression_ratio": 1.0},
    has_interleaved_rope=True,
    gguf=GgufFormat(
        architectures=("ernie4_5",), read_extra_fields=lambda fields, config: {"use_bias": config["mlp_bias"]}, has_interleaved_rope=True
    ),
)
FAMILIES = (
    _ERNIE4_5_FAMILY,
    replace(
        _ERNIE4_5_FAMILY,
        name="ernie4_5_moe",
        architecture="Ernie4_5_MoeForCausalLM",
        model_names="ERNIE 4.5 MoE (text)",
        build_layers=_ernie4_5_moe_layers,
        defaults={
            **_DEFAULT_FIELDS,
            "num_attention_heads": 20,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 1536,
            "num_experts": 64,
            "num_experts_per_tok": 6,
        },
        # use_bias is refused: lm_head would have a bias, which this family does not read.
        required_field_values={"compression_ratio": 1.0, "use_bias": False, "moe_norm_min": 1e-12},
        field_aliases={"moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok"},
        module_names={"shared_expert": "mlp.shared_experts"},
        mlp_module="mlp",
        mlp_tensors={
            "moe_statics.e_score_correction_bias": "gate.e_score_correction_bias",
            "gate.moe_statics.e_score_correction_bias": "gate.e_score_correction_bias",
        },
        gguf=GgufFormat(
            architectures=("ernie4_5-moe",),
            read_extra_fields=_ernie4_5_moe_gguf_fields,
            metadata_keys={"moe_layer_start_index": "leading_dense_block_count", "moe_layer_interval": "interleave_moe_layer_step"},
            has_interleaved_rope=True,
        ),
    ),
)
