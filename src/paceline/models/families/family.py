"""What a family of models is: how its config.json is read, and what its tensors are called in safetensors and in GGUF files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.models.gguf.fields import GgufFields
from paceline.models.json_fields import JsonFields
from paceline.models.layer_builder import LayerBuilder
from paceline.models.layers import LayerConfig


def no_family_fields(fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return no further config.json fields: those that all GGUF files have are enough for the family."""
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFormat:
    """How llama.cpp's converters write the models of a family.

    Attributes:
        architectures: the values of `general.architecture`.
        matches: whether a file of such an architecture holds this family. Only for a family that shares the architecture of another.
        read_config: return the config.json fields that are not in every GGUF file, given those that are.
        metadata_keys: for errors, the metadata keys of config.json fields (beyond `gguf/config.py`'s).
        module_names: names of modules where they differ from `gguf/weights.py`'s.
        has_interleaved_rope: the rows of q and k are in the order of interleaved (GPT-J style) rotary embeddings.
        has_rope: the files hold rotary settings that are read as in most architectures.
        has_untied_output: a file without `output.weight` is damaged; in other architectures it has tied embeddings.
        has_tiled_value_heads: the value heads of gated delta nets are stored in the order (value head of its key head, key head).
        allows_zero_sizes: layers without attention or without an MLP have size 0 in per-layer metadata.
        allows_mixed_sizes: layers differ in size, which `read_config` reads.
        norm_eps_key: an alternative to `attention.layer_norm_rms_epsilon`.
    """

    architectures: tuple[str, ...]
    matches: Callable[[GgufFields], bool] | None = None
    read_config: Callable[[GgufFields, Mapping[str, Any]], dict[str, Any]] = no_family_fields
    metadata_keys: Mapping[str, str] = field(default_factory=dict)
    module_names: Mapping[str, str] = field(default_factory=dict)
    has_interleaved_rope: bool = False
    has_rope: bool = True
    has_untied_output: bool = False
    has_tiled_value_heads: bool = False
    allows_zero_sizes: bool = False
    allows_mixed_sizes: bool = False
    norm_eps_key: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family of models.

    Attributes:
        name, architecture: `model_type` and class in a Hugging Face config.json.
        models: published models of the family, for docs.
        layers: builds the layers from config.json.
        defaults: fields that config.json may leave out, with the values of the configuration class in transformers.
        gguf: how its GGUF files are read; None = as those of `gguf_family`, or there are none.
        gguf_family: the family as which GGUF files of these models are read, because the network is the same.
        bundled_drafters: drafters that its publisher trained with it, for docs.
        published_heads: methods of heads that others trained for it, for docs.
        activation_field: the config.json field of the activation.
        has_layer_sizes: `per_layer_config` may give single layers other sizes.
        has_local_rope: layers with a sliding window have rotary settings of their own.
        needs_local_rope: `rope_parameters` must be given for each type of layer.
        has_temperature_tuning: `llama_4_scaling_beta` scales queries by their position.
        has_partial_rope: `partial_rotary_factor` may be below 1.
        has_interleaved_rope: checkpoints have interleaved (GPT-J style) rotary embeddings; rows of q and k are reordered at load.
        rope_type_aliases: other spellings of rope types.
        module_names: what checkpoints call modules of a layer, or single tensors, where it differs from `tensor_names.py`.
        mlp_module: what checkpoints call the module of the experts, if not `mlp`.
        mlp_tensors: names of tensors in `mlp_module`, with what they are called in `mlp` by most families.
        has_fused_projections: checkpoints hold q, k and v in one matrix, gate and up in another.
        recurrent_module: what checkpoints call the mixer of a recurrent layer; empty = there is none.
        count_layers: returns how many layers config.json describes; None = `num_hidden_layers`.
        field_aliases: other names of config.json fields. If both are given, the alias counts.
        has_mxfp4_experts: checkpoints hold all experts of a layer in two tensors, transposed or in MXFP4.
        has_norm_offset: see `ModelConfig`.
        has_scaled_embedding: embedding rows are multiplied by the square root of the hidden size.
        has_logit_soft_cap: `final_logit_softcapping` is applied to logits.
        has_multipliers: embedding rows are multiplied by `embedding_multiplier`, logits divided by `logits_scaling`.
    """

    name: str
    architecture: str
    models: str
    layers: Callable[[LayerBuilder], tuple[LayerConfig, ...]]
    defaults: Mapping[str, Any]
    gguf: GgufFormat | None = None
    gguf_family: str | None = None
    bundled_drafters: tuple[str, ...] = ()
    published_heads: tuple[str, ...] = ()
    activation_field: str = "hidden_act"
    has_layer_sizes: bool = False
    has_local_rope: bool = False
    needs_local_rope: bool = False
    has_temperature_tuning: bool = False
    has_partial_rope: bool = False
    has_interleaved_rope: bool = False
    rope_type_aliases: Mapping[str, str] = field(default_factory=dict)
    module_names: Mapping[str, str] = field(default_factory=dict)
    mlp_module: str = ""
    mlp_tensors: Mapping[str, str] = field(default_factory=dict)
    has_fused_projections: bool = False
    recurrent_module: str = ""
    count_layers: Callable[[JsonFields], int] | None = None
    field_aliases: Mapping[str, str] = field(default_factory=dict)
    has_mxfp4_experts: bool = False
    has_norm_offset: bool = False
    has_scaled_embedding: bool = False
    has_logit_soft_cap: bool = False
    has_multipliers: bool = False
