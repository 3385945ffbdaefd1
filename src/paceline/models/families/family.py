"""`Family` describes how to read the config.json of related models, and how safetensors and GGUF files name their tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.models.gguf.fields import GgufFields
from paceline.models.json_fields import JsonFields
from paceline.models.layer_builder import LayerBuilder
from paceline.models.layers import LayerConfig

Layers = tuple[LayerConfig, ...]


def sliding_window_gguf_fields(fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `sliding_window` and `layer_types`, for families whose layers may have a sliding window."""
    return fields.read_sliding_window(config["num_hidden_layers"])


def special_ids(bos: int, eos: int) -> dict[str, int]:
    """Return the config.json fields for the ids of the BOS and EOS tokens."""
    return {"bos_token_id": bos, "eos_token_id": eos}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFormat:
    """How llama.cpp's converters write the models of a family.

    Attributes:
        architectures: values of `general.architecture` of the family's files.
        matches: function that returns whether a file belongs to this family, if several families share the architecture.
        read_extra_fields: function that returns the family's own config.json fields, given those that all GGUF files have.
        metadata_keys: maps config.json fields to the GGUF keys that errors name, in addition to those in `gguf/config.py`.
        module_names: maps modules to their GGUF names, where they differ from those in `gguf/weights.py`.
        ignored_tensors: per-layer tensors that are not loaded, without "blk.N.". `read_extra_fields` checks their values.
        has_interleaved_rope: rows of q and k are stored for interleaved (GPT-J style) rotary embeddings.
        has_rope: rotary settings are read from the usual metadata. False = `read_extra_fields` reads them, or the family has none.
        has_untied_output: a file without `output.weight` is damaged. False = such a file has tied embeddings.
        interleaves_value_heads_of_key_heads: gated delta nets store the first value head of each key head, then all second ones, and so on.
        allows_zero_layer_sizes: in per-layer metadata, layers without attention or without an MLP have size 0.
        allows_different_layer_sizes: layers may differ in head and MLP sizes, which `read_extra_fields` reads.
        has_latent_attention: the family has MLA. Its `head_dim` is the size of the rotated part of a head, `rope.dimension_count`.
        norm_eps_key: metadata key of the norms' epsilon; empty = `attention.layer_norm_rms_epsilon`.
    """

    architectures: tuple[str, ...]
    matches: Callable[[GgufFields], bool] | None = None
    read_extra_fields: Callable[[GgufFields, Mapping[str, Any]], dict[str, Any]] = lambda fields, config: {}
    metadata_keys: Mapping[str, str] = field(default_factory=dict)
    module_names: Mapping[str, str] = field(default_factory=dict)
    ignored_tensors: tuple[str, ...] = ()
    has_interleaved_rope: bool = False
    has_rope: bool = True
    has_untied_output: bool = False
    interleaves_value_heads_of_key_heads: bool = False
    allows_zero_layer_sizes: bool = False
    allows_different_layer_sizes: bool = False
    has_latent_attention: bool = False
    norm_eps_key: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family of models.

    Attributes:
        name, architecture: `model_type` and class in a Hugging Face config.json.
        model_names: names of published models of the family, for docs.
        build_layers: function that builds the layers from config.json.
        defaults: fields that config.json may leave out, with the values of the configuration class in transformers.
        required_field_values: values that fields must have, if they are given. A file with another value is refused.
        gguf: format of its GGUF files; None = that of `gguf_family`, if set. Otherwise GGUF files are not supported.
        gguf_family: another family with the same network. GGUF files of this family are read as files of that one.
        bundled_drafters: drafters in the publisher's checkpoints, for docs.
        third_party_head_methods: methods of drafting heads that third parties published for it, for docs.
        activation_field: the config.json field that names the activation function of MLPs.
        has_local_rope: layers with a sliding window have rotary settings of their own.
        requires_local_rope_parameters: `rope_parameters` must have an entry for sliding_attention and one for full_attention.
        has_temperature_tuning: `llama_4_scaling_beta` scales queries by their position.
        has_rope_alpha: with the rope type dynamic, the base is multiplied by a power of `alpha` at every context length.
        has_partial_rope: `partial_rotary_factor` may be below 1.
        has_interleaved_rope: checkpoints have interleaved (GPT-J style) rotary embeddings; rows of q and k are reordered at load.
        rope_type_aliases: maps other names of rope types to those of `RopeType`.
        module_names: maps modules or tensors to their checkpoint names, where they differ from those in `tensor_names.py`.
        module_aliases: maps other names of modules in checkpoints to the usual ones.
        loaded_module_names: maps checkpoint names of modules to those in transformers after loading, which adapter files use.
        mlp_module: name of the module with the experts in checkpoints, if it is not `mlp`.
        mlp_tensors: maps names of tensors in `mlp_module` to the names that most families use in `mlp`.
        has_fused_projections: checkpoints hold q, k and v in one matrix, gate and up in another.
        recurrent_module: name of a recurrent layer's mixer in checkpoints; empty = the family has no recurrent layers.
        count_layers: function that returns how many layers config.json describes; None = `num_hidden_layers`.
        field_aliases: maps other names of config.json fields to the usual ones. If a file has both, the alias is read.
        has_mxfp4_experts: checkpoints stack all experts of a layer in two tensors, in MXFP4 or as transposed bfloat16.
        has_norm_offset, has_embedding_norm, has_lm_head_bias: as in `ModelConfig`.
        has_plain_final_norm: `has_norm_offset` does not apply to the final norm.
        has_scaled_embedding: embedding rows are multiplied by the square root of the hidden size.
        has_partial_per_layer_embedding: the table of per-layer embeddings may have fewer rows than the vocabulary.
        has_logit_soft_cap: `final_logit_softcapping` is applied to logits.
        has_embedding_and_logit_multipliers: `embedding_multiplier` multiplies embedding rows,
            `lm_head_multiplier` multiplies logits, and `logits_scaling` divides them.
    """

    name: str
    architecture: str
    model_names: str
    build_layers: Callable[[LayerBuilder], Layers]
    defaults: Mapping[str, Any]
    required_field_values: Mapping[str, Any] = field(default_factory=dict)
    gguf: GgufFormat | None = None
    gguf_family: str | None = None
    bundled_drafters: tuple[str, ...] = ()
    third_party_head_methods: tuple[str, ...] = ()
    activation_field: str = "hidden_act"
    has_local_rope: bool = False
    requires_local_rope_parameters: bool = False
    has_temperature_tuning: bool = False
    has_rope_alpha: bool = False
    has_partial_rope: bool = False
    has_interleaved_rope: bool = False
    rope_type_aliases: Mapping[str, str] = field(default_factory=dict)
    module_names: Mapping[str, str] = field(default_factory=dict)
    module_aliases: Mapping[str, str] = field(default_factory=dict)
    loaded_module_names: Mapping[str, str] = field(default_factory=dict)
    mlp_module: str = ""
    mlp_tensors: Mapping[str, str] = field(default_factory=dict)
    has_fused_projections: bool = False
    recurrent_module: str = ""
    count_layers: Callable[[JsonFields], int] | None = None
    field_aliases: Mapping[str, str] = field(default_factory=dict)
    has_mxfp4_experts: bool = False
    has_norm_offset: bool = False
    has_plain_final_norm: bool = False
    has_embedding_norm: bool = False
    has_lm_head_bias: bool = False
    has_scaled_embedding: bool = False
    has_partial_per_layer_embedding: bool = False
    has_logit_soft_cap: bool = False
    has_embedding_and_logit_multipliers: bool = False
