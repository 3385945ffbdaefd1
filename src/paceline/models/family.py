"""What is particular about one family of models."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.models.json_fields import JsonFields
from paceline.models.layer_reader import LayerReader
from paceline.models.layers import LayerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What is particular about one family.

    Attributes:
        name, architecture: `model_type` and class in a Hugging Face config.json.
        gguf: the architecture of its GGUF files; None = there are none of its own.
        layers: makes the layers from the metadata, out of the parts that the reader gives.
        defaults: what metadata leaves out, as its configuration class in transformers assumes.
        activation_field: the name of the activation in the metadata.
        has_layer_sizes: `per_layer_config` gives layers sizes of their own.
        has_local_rope: the sliding layers rotate by parameters of their own.
        tempers_queries: `llama_4_scaling_beta` makes queries larger with their position.
        rotates_partially: `partial_rotary_factor` may be below 1.
        interleaves_rotation: the values of a head that rotate together lie side by side in checkpoints; rows are put in our order at load.
        part_names: what checkpoints call parts of a layer, or whole tensors of it, by other names than most.
        fuses_projections: checkpoints stack q, k and v in one matrix, gate and up in another.
        recurrent_part: what checkpoints call a recurrent layer's mixer (models/hybrid_weights.py); empty = there is none.
        count_layers: how many layers the metadata describes; None = `num_hidden_layers`.
        aliases: other names of fields of the metadata; where they are given, they win.
        packs_experts: checkpoints hold the experts of a layer in two stacks, transposed or in MXFP4 (models/gpt_oss.py).
        rope_types: other spellings of rope types.
        norm_offset: see `ModelConfig`.
        scales_embedding: embedding rows are multiplied by the root of the hidden size.
        caps_logits: logits are soft-capped where the metadata names a cap.
        has_multipliers: embedding rows are multiplied by `embedding_multiplier`, logits divided by `logits_scaling`.
    """

    name: str
    architecture: str
    gguf: str | None = None
    layers: Callable[[LayerReader], tuple[LayerConfig, ...]]
    defaults: Mapping[str, Any]
    activation_field: str = "hidden_act"
    has_layer_sizes: bool = False
    has_local_rope: bool = False
    tempers_queries: bool = False
    rotates_partially: bool = False
    interleaves_rotation: bool = False
    part_names: Mapping[str, str] = field(default_factory=dict)
    fuses_projections: bool = False
    recurrent_part: str = ""
    count_layers: "Callable[[JsonFields], int] | None" = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    packs_experts: bool = False
    rope_types: Mapping[str, str] = field(default_factory=dict)
    norm_offset: bool = False
    scales_embedding: bool = False
    caps_logits: bool = False
    has_multipliers: bool = False
