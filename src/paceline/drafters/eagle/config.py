"""Configuration of an EAGLE head, from its config.json and the shapes of its tensors.

Missing config values have the defaults of the reference code: `rope_theta` is 10000, not the target's value; a norm or bias is applied if
its tensor is in the file; the predicted feature is only normalised in files of the speculators library. `--drafter-options` override these.

Source: EAGLE (Li et al. 2024, arXiv:2401.15077, section 4.1), EAGLE-3 (Li et al. 2025, arXiv:2503.01840, section 3), P-EAGLE
(arXiv:2602.01469) and their code.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

from paceline.drafters.head_files import HeadFiles, check_target_sizes
from paceline.drafters.head_kinds import HeadKind
from paceline.drafters.options import HeadOptions
from paceline.drafters.recurrent_heads.head import RecurrentHeadConfig
from paceline.errors import CheckpointError, IncompatibleDrafterError
from paceline.models.config import ModelConfig, WeightType, check_rope
from paceline.models.families.table import FAMILIES
from paceline.models.json_fields import JsonFields
from paceline.models.layer_builder import LayerBuilder
from paceline.models.layers import LayerConfig, QKNorm, share_equal_layers
from paceline.models.rope_config import RopeType

EAGLE_HEAD_KINDS = (HeadKind.EAGLE, HeadKind.EAGLE3, HeadKind.PEAGLE)
DEFAULT_MAX_POSITIONS = 2048  # context length of a head whose config has none
BOUNDARIES_KEY = "eagle_aux_hidden_state_layer_ids"
FIRST_NORM_TENSOR, LAST_NORM_TENSOR = "layers.0.input_layernorm.weight", "norm.weight"
_FC_INPUT_NORM_TENSORS = ("embedding_layernorm.weight", "hidden_states_layernorm.weight")
_LAYER_MODEL_TYPES = ("llama", "qwen3")  # model types of decoder layers that are supported in EAGLE-3 heads
_EAGLE1_LAYER_MODEL_TYPES = (*_LAYER_MODEL_TYPES, "qwen2", "mistral")
_LAYER_TYPES = _SLIDING_ATTENTION, _FULL_ATTENTION = "sliding_attention", "full_attention"
TENSOR_NAME_ALIASES = {
    "midlayer.": "layers.0.", "transformer.": "layers.0.", "fusion_fc.": "fc.",
    "embed_layernorm.": "embedding_layernorm.", "enorm.": "embedding_layernorm.",
    "hidden_layernorm.": "hidden_states_layernorm.", "hnorm.": "hidden_states_layernorm.",
    "lm_head_layernorm.": "norm.", "pre_lm_head_layernorm.": "norm.",
}  # fmt: skip
"""Prefixes of tensor names in other formats -> ours. Formats: reference code, speculators 0.1 and 0.2 and research/hass, vLLM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig(RecurrentHeadConfig):
    """Configuration of an EAGLE head of kind EAGLE (EAGLE-1 or EAGLE-2), EAGLE3 or PEAGLE."""

    has_fc: bool = True  # EAGLE-3: the target's features pass through the linear layer `fc`
    has_embedding_norm: bool = False  # the token embedding is normalised: in EAGLE-1 before `fc`, in EAGLE-3 before the attention
    has_feature_norm: bool = False  # EAGLE-1: the feature is normalised before `fc`
    has_input_norm: bool = False  # EAGLE-1: the input of the first attention is normalised
    has_concat_norm: bool = False  # EAGLE-3: the feature, all its concatenated hidden states, is normalised as a whole before `fc`
    has_boundary_norms: bool = False  # EAGLE-3: each hidden state of the feature is normalised separately before `fc`
    norm_before_residual: bool = False  # EAGLE-3: the first layer's residual is the normalised feature
    has_final_norm: bool = False  # the hidden state is normalised before the lm_head
    has_fc_bias: bool = True  # whether the bias of `fc` is added, if the file has one
    mask_token_id: int | None = None  # P-EAGLE: input token of the positions whose token is not known yet

    @property
    def is_eagle1(self) -> bool:
        """Whether the head is an EAGLE-1 or EAGLE-2 head, whose `fc` mixes embedding and feature before the first layer."""
        return self.kind is HeadKind.EAGLE


def read_eagle_config(files: HeadFiles, target: ModelConfig, options: HeadOptions | None = None) -> EagleConfig:
    """Read the configuration of an EAGLE head, and check that it fits the target.

    Args:
        options: the user's `--drafter-options`, which override the config.

    Raises:
        CheckpointError: the config lacks a size or has an invalid value.
        IncompatibleDrafterError: the head is not supported, or was made for another target.
    """
    if files.kind not in EAGLE_HEAD_KINDS:
        raise IncompatibleDrafterError(f"{files.path} is a {files.kind.value} head, not an EAGLE one; name its method's drafter")
    files, options = files.with_canonical_names(TENSOR_NAME_ALIASES), options or HeadOptions()
    fields = config_fields(files)
    if fields.number("logit_scale", 1.0) != 1.0:
        scale = fields.values["logit_scale"]
        raise IncompatibleDrafterError(f"{fields.path}: logit_scale = {scale}: heads that scale logits cannot be used")
    layers = _read_decoder_layers(files, fields)
    if options.rope_theta is not None:
        rope = replace(layers.attention.rope, theta=options.rope_theta)
        layers = layers.map_attention(lambda attention: replace(attention, rope=rope))
    config = _read_eagle1(files, fields, layers) if files.kind is HeadKind.EAGLE else _read_eagle3(files, fields, layers, target, options)
    if options.normed_recurrence is not None and files.kind is not HeadKind.PEAGLE:
        config = replace(config, normed_recurrence=options.normed_recurrence)
    for rows in (None, *_vocab_row_counts(files, config)):
        check_target_sizes(files, target, hidden_size=config.target_hidden_size, num_vocab_rows=rows)
    if not config.has_fc and layers.hidden_size != target.hidden_size:
        raise IncompatibleDrafterError(
            f"{files.path} takes the target's features of {target.hidden_size} values as they are, its own size is "
            f"{layers.hidden_size}: it was made for another model"
        )
    if files.matrix_shape("embed_tokens.weight") is None and layers.hidden_size != target.hidden_size:
        raise IncompatibleDrafterError(
            f"{files.path} has no embed_tokens.weight, and the target's rows of {target.hidden_size} values do not fit its "
            f"hidden size {layers.hidden_size}: the file is not complete"
        )
    return config


def ambiguous_options(files: HeadFiles, config: EagleConfig, target: ModelConfig) -> list[tuple[str, list[object]]]:
    """Return the drafter options that the head's files do not determine, each with the values to try instead of the default.

    Some training code numbers layer outputs where inference code numbers layer inputs, so layer boundaries may be off by one. The reference
    training code ignores `rope_theta`. The defaults of the other options differ between training codes.
    """
    fields = config_fields(files)
    options: list[tuple[str, list[object]]] = []
    if shifted := [
        ids for shift in (1, -1) if _are_valid_boundaries(ids := tuple(b + shift for b in config.layer_boundaries), target.num_layers)
    ]:
        options.append(("boundaries", [*shifted]))
    if not config.is_eagle1 and fields.values.get("norm_before_residual") is None:
        options.append(("norm_before_residual", [not config.norm_before_residual]))
    if config.layers.attention.rope.theta != 10000.0 and not files.is_speculators:
        options.append(("rope_theta", [10000.0]))
    if disables_final_norm(files, fields):
        options.append(("final_norm", [not config.has_final_norm]))
    elif (
        config.has_final_norm
        and config.kind is not HeadKind.PEAGLE
        and not (files.is_speculators and fields.values.get("norm_output") is not None)
    ):
        options.append(("normed_recurrence", [not config.normed_recurrence]))
    return options


def has_nested_config(files: HeadFiles) -> bool:
    """Return whether the config has vLLM's format, in which the decoder layer's config is nested in the field `model`."""
    return isinstance(files.config.get("model"), Mapping)


def config_fields(files: HeadFiles) -> JsonFields:
    """Return the fields of config.json and of its nested layer config as one dict; `model_type` is that of the layer config.

    Raises:
        CheckpointError: there is no config.json.
    """
    if not files.config:
        raise CheckpointError(f"{files.config_path} is missing: it holds an EAGLE head's sizes; download it with the weights")
    nested = files.config.get("model" if has_nested_config(files) else "transformer_layer_config")
    layer = nested if isinstance(nested, Mapping) else {}
    length = files.config.get("max_sequence_length", DEFAULT_MAX_POSITIONS)
    values: dict[str, Any] = {"max_position_embeddings": length, **layer, **files.config}
    values["model_type"] = layer.get("model_type", files.config.get("model_type"))
    if has_nested_config(files):
        values.setdefault("bias", values.get("eagle_fc_bias", False))
    for key in ("rope_scaling", "rope_parameters"):
        values[key] = _text_rope_parameters(values.get(key))
    return JsonFields(values, files.config_path)


def disables_final_norm(files: HeadFiles, fields: JsonFields) -> bool:
    """Return whether `norm_output` turns the final norm off. In speculators files, this field affects only the predicted feature."""
    return not files.is_speculators and files.kind is HeadKind.EAGLE3 and not fields.flag("norm_output", default=True)


def _text_rope_parameters(values: object) -> object:
    """Return the rope parameters for text: if given by layer type, those of sliding layers, else all. For text, mrope is plain rope."""
    if not isinstance(values, Mapping):
        return values
    sliding = values.get("sliding_attention")
    values = sliding if isinstance(sliding, Mapping) else values
    if values.get("rope_type", values.get("type")) != "mrope":
        return values
    return {"rope_theta": values["rope_theta"]} if "rope_theta" in values else None


def _vocab_row_counts(files: HeadFiles, config: EagleConfig) -> list[int]:
    """Return the row counts of the tensors that have one row for each token id of the target."""
    shapes = [files.tensors[name].shape[:1] for name in ("t2d", "embed_tokens.weight") if name in files.tensors]
    has_whole_vocab = config.is_eagle1 and config.has_own_lm_head and "token_map" not in files.tensors
    return [rows for shape in shapes for rows in shape] + [config.layers.vocab_size] * has_whole_vocab


def _read_eagle1(files: HeadFiles, fields: JsonFields, layers: ModelConfig) -> EagleConfig:
    """Read the configuration of an EAGLE-1, EAGLE-2 or HASS head. The norms depend on the format of the files."""
    has_embedding_norm, has_feature_norm, has_input_norm, has_final_norm = (
        name in files.tensors for name in (*_FC_INPUT_NORM_TENSORS, FIRST_NORM_TENSOR, LAST_NORM_TENSOR)
    )
    normed_recurrence = False
    if files.is_speculators:
        has_any = has_embedding_norm or has_feature_norm or has_input_norm or has_final_norm
        has_embedding_norm = has_input_norm = has_final_norm = fields.flag("layernorms", default=has_any)
        has_feature_norm = False
    elif has_nested_config(files):
        has_embedding_norm = has_feature_norm = fields.flag("add_para_norm", default=False)
        has_input_norm = not fields.flag("skip_prenorm", default=True)
        has_final_norm = normed_recurrence = not fields.flag("skip_output_norm", default=True)
    lm_head = files.matrix_shape("lm_head.weight")
    token_map = files.tensors.get("token_map")
    rows = layers.vocab_size if lm_head is None else lm_head[0]
    return EagleConfig(
        kind=files.kind,
        layers=replace(layers, vocab_size=rows if token_map is None else prod(token_map.shape)),
        target_hidden_size=layers.hidden_size,
        has_embedding_norm=has_embedding_norm,
        has_feature_norm=has_feature_norm,
        has_input_norm=has_input_norm,
        has_final_norm=has_final_norm,
        normed_recurrence=normed_recurrence,
        has_fc_bias=fields.flag("bias", default=True) if has_nested_config(files) else True,
        has_own_embedding="embed_tokens.weight" in files.tensors,
        has_own_lm_head=lm_head is not None,
    )


def _read_eagle3(files: HeadFiles, fields: JsonFields, layers: ModelConfig, target: ModelConfig, options: HeadOptions) -> EagleConfig:
    nested = files.config.get("eagle_config")
    nested_fields = JsonFields(nested if isinstance(nested, Mapping) else {}, fields.path)
    if nested_fields.flag("use_mtp_layernorm", default=False) or nested_fields.integer("parallel_draft_step", 1) > 1:
        raise IncompatibleDrafterError(f"{fields.path}: heads with use_mtp_layernorm or parallel_draft_step > 1 are not supported")
    fc, lm_head = files.matrix_shape("fc.weight"), files.matrix_shape("lm_head.weight")
    has_fc = nested_fields.flag("use_aux_hidden_state", default=True) or fc is not None
    target_hidden_size = fields.integer("target_hidden_size", target.hidden_size, null=target.hidden_size)
    if fc is not None and fc[1] % target_hidden_size:
        raise IncompatibleDrafterError(
            f"{files.path}: fc.weight has {fc[1]} columns, expected a multiple of the target's hidden size {target_hidden_size}: "
            "the head was made for another model"
        )
    num_boundaries = fc[1] // target_hidden_size if fc is not None else fields.integer("num_aux_hidden_states", 3)
    vocab_size = fields.integer("draft_vocab_size", layers.vocab_size, null=layers.vocab_size) if lm_head is None else lm_head[0]
    norm_before_residual, final_norm = options.norm_before_residual, options.final_norm
    if norm_before_residual is None:
        norm_before_residual = fields.flag("norm_before_residual", default=False)
    if final_norm is None:
        final_norm = nested_fields.flag("use_last_layernorm", default=True) and not disables_final_norm(files, fields)
    return EagleConfig(
        kind=files.kind,
        layers=replace(layers, vocab_size=vocab_size),
        target_hidden_size=target_hidden_size,
        layer_boundaries=_read_layer_boundaries(files, nested_fields, fields, num_boundaries, target.num_layers, options) if has_fc else (),
        has_fc=has_fc,
        has_concat_norm=fields.flag("norm_before_fc", default=False) or "input_norm.weight" in files.tensors,
        has_boundary_norms=fields.flag("fc_norm", default=False) or "fc_norm.0.weight" in files.tensors,
        has_embedding_norm=nested_fields.flag("use_input_layernorm_in_first_layer", default=True),
        norm_before_residual=norm_before_residual,
        has_final_norm=final_norm,
        normed_recurrence=files.is_speculators and fields.flag("norm_output", default=False),
        has_own_embedding="embed_tokens.weight" in files.tensors,
        has_own_lm_head=lm_head is not None,
        mask_token_id=_read_mask_token_id(files, fields, options) if files.kind is HeadKind.PEAGLE else None,
    )


def _read_layer_boundaries(
    files: HeadFiles, nested: JsonFields, fields: JsonFields, num_boundaries: int, num_layers: int, options: HeadOptions
) -> tuple[int, ...]:
    """Return the layer boundaries whose hidden states a head reads, ascending; boundary b is the input of layer b.

    speculators and GGUF files list boundaries. In other files a list that begins with 1 numbers layer outputs: 1 means boundary 2.
    If the config has no list, the boundaries are those of the EAGLE-3 paper's code.

    Args:
        nested: fields of the config's `eagle_config`.
        fields: fields of the whole config.
        num_boundaries: number of boundaries for which the head's `fc` has columns.
        num_layers: number of layers of the target.
        options: the user's `--drafter-options`, which override the config.
    """
    ids = sorted(set(fields.token_ids(BOUNDARIES_KEY) or nested.token_ids(BOUNDARIES_KEY)))
    source = BOUNDARIES_KEY
    if options.boundaries is not None:
        source, ids = "the drafter option 'boundaries'", sorted(set(options.boundaries))
    elif not ids:
        source, ids = "the default", [2, num_layers // 2, num_layers - 3]
    elif ids[0] == 1 and not {"speculators_model_type", "general.architecture"} & files.config.keys():
        ids = [layer + 1 for layer in ids]
    if len(ids) != num_boundaries or not _are_valid_boundaries(tuple(ids), num_layers):
        raise IncompatibleDrafterError(
            f"{files.path} reads {num_boundaries} of the target's layer boundaries, but {source} gives {ids} for its {num_layers} layers: "
            f"the head was made for another model, or its config.json needs {BOUNDARIES_KEY!r}; "
            f"--drafter-options boundaries=… names {num_boundaries} different ones from 0 to {num_layers}"
        )
    return tuple(ids)


def _are_valid_boundaries(layer_boundaries: tuple[int, ...], num_layers: int) -> bool:
    """Return whether boundaries ascend and exist in a target of `num_layers` layers; False if there are none."""
    ascend = all(below < above for below, above in pairwise(layer_boundaries))
    return bool(layer_boundaries) and ascend and layer_boundaries[0] >= 0 and layer_boundaries[-1] <= num_layers


def _read_mask_token_id(files: HeadFiles, fields: JsonFields, options: HeadOptions) -> int:
    """Return the mask token of a P-EAGLE head; vLLM, speculators and Automodel have different names for the config field."""
    if options.mask_token_id is not None:
        return options.mask_token_id
    block = files.config.get("dflash_config")
    for values in (block if isinstance(block, Mapping) else {}, fields.values):
        for name in ("mask_token_id", "pard_token", "ptd_token_id"):
            if ids := JsonFields(values, fields.path).token_ids(name):
                return ids[0]
    raise IncompatibleDrafterError(
        f"{fields.path} has no mask_token_id, the token of the masked positions of a peagle head: add --drafter-options mask_token_id=ID"
    )


def _read_decoder_layers(files: HeadFiles, fields: JsonFields) -> ModelConfig:
    """Return the sizes of the head's decoder layers."""
    _check_model_type(files, fields)
    builder = LayerBuilder(_with_sizes_of_tensors(files, fields), replace(FAMILIES["llama"], has_partial_rope=files.is_speculators))
    rope = builder.rope.for_context(None)
    if rope.type is RopeType.DEFAULT:  # speculators ignores `partial_rotary_factor` unless the rotary embedding is scaled
        rope = replace(rope, rotated_fraction=1.0)
    has_qk_norm = "layers.0.self_attn.q_norm.weight" in files.tensors or (files.is_speculators and fields.values["model_type"] == "qwen3")
    attention = replace(builder.attention(qk_norm=QKNorm.HEAD if has_qk_norm else QKNorm.NONE), rope=rope)
    windows = _read_windows(fields, builder.num_layers)
    config = ModelConfig(
        family="llama",
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        layers=share_equal_layers(LayerConfig(mixer=replace(attention, window=window), mlp=builder.mlp()) for window in windows),
        norm_eps=fields.epsilon("rms_norm_eps", 1e-6),
        max_positions=fields.integer("max_position_embeddings"),
        weight_type=WeightType.F32,
    )
    check_rope(config, fields.path)
    return config


def _with_sizes_of_tensors(files: HeadFiles, fields: JsonFields) -> JsonFields:
    """Return the fields with sizes replaced by those of the first layer's tensors, and with the number of layers in the file."""
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    query, key, gate = (files.matrix_shape(f"layers.0.{name}.weight") for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj"))
    head_size = fields.integer("head_dim", hidden_size // num_heads, null=hidden_size // num_heads)
    if fields.values.get("head_dim") is None and query is not None and query[0] and query[0] % num_heads == 0:
        head_size = query[0] // num_heads
    num_kv_heads = fields.integer("num_key_value_heads", num_heads, null=num_heads)
    if key is not None and key[0] % head_size == 0 and num_heads % max(1, key[0] // head_size) == 0:
        num_kv_heads = max(1, key[0] // head_size)
    values = {**fields.values, "head_dim": head_size, "num_key_value_heads": num_kv_heads}
    values["num_hidden_layers"] = max(1, files.count_indices("layers.{}."))
    if gate is not None:
        values["intermediate_size"] = gate[0]
    return JsonFields(values, fields.path)


def _check_model_type(files: HeadFiles, fields: JsonFields) -> None:
    """Check that the head's `model_type` is supported. In formats other than speculators' and vLLM's, it is the target's."""
    if not files.is_speculators and not has_nested_config(files):
        return
    model_type = fields.values["model_type"]
    supported = _EAGLE1_LAYER_MODEL_TYPES if files.kind is HeadKind.EAGLE else _LAYER_MODEL_TYPES
    if model_type is not None and model_type not in supported:
        raise IncompatibleDrafterError(
            f"{fields.path}: its layers are {model_type!r}; {files.kind.value} heads with layers of {', '.join(supported)} can be used"
        )


def _read_windows(fields: JsonFields, num_layers: int) -> list[int | None]:
    """Return the attention window of each layer; None = full attention. The config may list more `layer_types` than the head has."""
    is_qwen = str(fields.values["model_type"]).startswith("qwen")
    if fields.values.get("sliding_window") is None or (is_qwen and not fields.flag("use_sliding_window", default=False)):
        return [None] * num_layers
    types = fields.values.get("layer_types")
    if types is None:
        first = fields.number("max_window_layers", 28) if is_qwen else num_layers
        is_sliding = [layer >= first for layer in range(num_layers)]
    elif isinstance(types, list) and len(types) >= num_layers and all(kind in _LAYER_TYPES for kind in types[:num_layers]):
        is_sliding = [kind == _SLIDING_ATTENTION for kind in types[:num_layers]]
    else:
        raise CheckpointError(
            f"{fields.path}: layer_types = {str(types)[:80]}, expected {' or '.join(_LAYER_TYPES)} for each of {num_layers} layers"
        )
    window = fields.integer("sliding_window") if any(is_sliding) else None
    return [window if is_local else None for is_local in is_sliding]
