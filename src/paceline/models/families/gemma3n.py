"""Gemma 3n: four residual streams (AltUp), a learned residual of low rank (Laurel), sparse activations, and Gemma 4's per-layer inputs."""

import math
from collections.abc import Mapping
from dataclasses import replace
from statistics import NormalDist
from typing import Any

from paceline.models.families.family import Family, GgufFormat, Layers
from paceline.models.families.gemma4 import kv_source_layers
from paceline.models.gguf.fields import GgufFields
from paceline.models.layer_builder import LayerBuilder
from paceline.models.layers import AltUp, DenseMLP, LayerConfig, NormOrder, PerLayerInput, QKNorm, share_equal_layers

_FULL_ATTENTION_INTERVAL = 5  # every 5th layer has full attention if config.json has no `layer_types`
_DEFAULT_NUM_SPARSE_LAYERS, _DEFAULT_SPARSITY = 10, 0.95
_SPARSITY_DECIMALS = 6  # decimals to which a fraction of zeros is rounded that is computed from a GGUF file's float32 threshold
_ALTUP_METADATA_KEYS = {"altup_active_idx": "altup.active_idx", "altup_num_inputs": "altup.num_inputs"}


def _gemma3n_layers(builder: LayerBuilder) -> Layers:
    """Return the layers of a text model.

    Source: Gemma 3n's model in transformers 5.24.
    """
    fields, is_sliding = builder.fields, builder.sliding_layers(_FULL_ATTENTION_INTERVAL)
    attention = builder.attention(bias=builder.flag("attention_bias"), qk_norm=QKNorm.HEAD, scale=1.0, has_value_norm=True)
    mixers = {True: builder.sliding_attention(attention), False: attention}
    mlps = _mlps(builder)
    per_layer_input = PerLayerInput(size=fields.integer("hidden_size_per_layer_input"), activation=mlps[0].activation)
    altup, laurel_rank = _altup(builder), fields.integer("laurel_rank")
    return share_equal_layers(
        LayerConfig(
            mixer=replace(mixers[has_window], kv_source_layer=kv_source_layer),
            mlp=mlp,
            norm_order=NormOrder.SANDWICH,
            per_layer_input=per_layer_input,
            altup=altup,
            laurel_rank=laurel_rank,
        )
        for has_window, kv_source_layer, mlp in zip(is_sliding, kv_source_layers(builder, is_sliding), mlps, strict=True)
    )


def _altup(builder: LayerBuilder) -> AltUp:
    fields = builder.fields
    num_streams = fields.integer("altup_num_inputs", minimum=2, maximum=64)
    return AltUp(
        num_streams=num_streams,
        active_index=fields.integer("altup_active_idx", minimum=0, maximum=num_streams - 1),
        hidden_size=fields.integer("hidden_size"),
        has_output_scale=fields.flag("altup_correct_scale", default=True),
    )


def _mlps(builder: LayerBuilder) -> list[DenseMLP]:
    """Return the MLP of each layer. `intermediate_size` is one width for all layers, or a list with one for each."""
    name = "intermediate_size"
    if isinstance(builder.fields.values.get(name), list):
        widths = builder.layer_values(name, lambda width: type(width) is int and 0 < width < 2**31, "a width above 0") or []
    else:
        widths = [builder.fields.integer(name)] * builder.num_layers
    return [
        replace(builder.mlp(width=width), sparsity_std_factor=NormalDist().inv_cdf(sparsity) if sparsity else None)
        for width, sparsity in zip(widths, _sparsities(builder), strict=True)
    ]


def _sparsities(builder: LayerBuilder) -> list[float]:
    """Return for each layer the fraction of gate values that its activation sets to zero if they are normally distributed."""
    pattern = builder.layer_values(
        "activation_sparsity_pattern",
        lambda fraction: type(fraction) in (int, float) and 0 <= fraction < 1,
        "a number from 0 to below 1",
    )
    if pattern is None:
        num_sparse = _DEFAULT_NUM_SPARSE_LAYERS if builder.num_layers > _DEFAULT_NUM_SPARSE_LAYERS else 0
        return [_DEFAULT_SPARSITY] * num_sparse + [0.0] * (builder.num_layers - num_sparse)
    return [float(fraction) for fraction in pattern]


def _gemma3n_gguf_fields(fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    num_layers, table = config["num_hidden_layers"], "per_layer_token_embd.weight"
    values = {
        **fields.read_layer_types(num_layers),
        **{name: fields.architecture_value(key) for name, key in _ALTUP_METADATA_KEYS.items()},
        "intermediate_size": fields.architecture_value("feed_forward_length"),
        "sliding_window": fields.count("attention.sliding_window"),
        "rope_local_base_freq": fields.architecture_value("rope.freq_base_swa"),
        "final_logit_softcapping": fields.architecture_value("final_logit_softcapping"),
        "hidden_size_per_layer_input": fields.count("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": fields.num_tensor_rows(table) or config["vocab_size"],
        "laurel_rank": fields.num_tensor_rows("blk.0.laurel_l.weight"),
        "num_kv_shared_layers": fields.architecture_value("attention.shared_kv_layers"),
        "activation_sparsity_pattern": _gguf_sparsities(fields, num_layers),
    }
    if values["num_kv_shared_layers"] is None:
        fields.raise_invalid("attention.shared_kv_layers", None, "the number of layers that share keys and values")
    return {name: value for name, value in values.items() if value is not None}


def _gguf_sparsities(fields: GgufFields, num_layers: int) -> list[float] | None:
    """Return the sparsity of each layer, from its threshold in standard deviations; None if the file has no thresholds."""
    key = "activation_sparsity_scale"
    factors = fields.architecture_value(key)
    if factors is None:
        return None
    is_list = isinstance(factors, list) and len(factors) == num_layers
    if not is_list or not all(type(factor) is float and not math.isnan(factor) for factor in factors):
        fields.raise_invalid(key, factors, f"a number for each of {num_layers} layers")
    return [round(NormalDist().cdf(factor), _SPARSITY_DECIMALS) for factor in factors]


FAMILIES = (
    Family(
        name="gemma3n_text",
        architecture="Gemma3nForCausalLM",
        model_names="Gemma 3n (text)",
        build_layers=_gemma3n_layers,
        defaults={
            "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
            "tie_word_embeddings": True, "bos_token_id": 2, "eos_token_id": 1, "vocab_size": 262400, "max_position_embeddings": 32768,
            "sliding_window": 512, "rope_theta": 1e6, "final_logit_softcapping": 30.0, "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": 262144, "altup_num_inputs": 4, "altup_active_idx": 0, "num_kv_shared_layers": 15,
            "laurel_rank": 64,
        },
        activation_field="hidden_activation",
        has_scaled_embedding=True,
        has_logit_soft_cap=True,
        has_local_rope=True,
        has_partial_per_layer_embedding=True,
        gguf=GgufFormat(
            architectures=("gemma3n",),
            read_extra_fields=_gemma3n_gguf_fields,
            metadata_keys={
                **_ALTUP_METADATA_KEYS,
                "hidden_size_per_layer_input": "embedding_length_per_layer_input",
                "num_kv_shared_layers": "attention.shared_kv_layers",
                "activation_sparsity_pattern": "activation_sparsity_scale",
            },
            allows_different_layer_sizes=True,
        ),
    ),
)  # fmt: skip
