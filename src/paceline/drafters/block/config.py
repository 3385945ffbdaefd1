"""Configuration of a block drafter, read from config.json, or from GGUF metadata converted to the same field names.

A block drafter drafts a whole block of tokens in one forward pass. Its input rows are the last committed token, called the anchor, and
`block_size - 1` mask tokens. They attend to keys and values that are computed from the target's hidden states.

Sources: DFlash and DFlash2 (z-lab `dflash/model.py`, speculators, SpecForge), DSpark (deepseek-ai/DeepSpec), Muse Glimmer's assistant
(transformers).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from paceline.drafters.head_files import HeadFiles, check_target_sizes
from paceline.drafters.head_kinds import HeadKind
from paceline.errors import CheckpointError, IncompatibleDrafterError, shortened
from paceline.models.checkpoint import is_gguf
from paceline.models.config import ModelConfig, WeightType, check_rope
from paceline.models.families.table import FAMILIES
from paceline.models.gguf.config import with_metadata_keys
from paceline.models.json_fields import JsonFields
from paceline.models.layer_builder import ACTIVATIONS, LayerBuilder
from paceline.models.layers import AttentionConfig, BlockConvolution, DenseMLP, LayerConfig, NormOrder, QKNorm
from paceline.models.rope_config import read_rope

BLOCK_HEAD_KINDS = (HeadKind.DFLASH, HeadKind.DFLASH2, HeadKind.DSPARK)
GGUF_ARCHITECTURE = "dflash"
GGUF_KEY_BY_FIELD = {
    "block_size": "block_size", "sample_from_anchor": "sample_from_anchor", "is_causal": "attention.causal",
    "attention_value_scale": "attention.value_scale", "output_multiplier": "logit_scale",
    "final_logit_softcapping": "final_logit_softcapping", "input_embedding_scale": "embedding_scale",
    "conv_kernel_size": "conv_kernel_size", "conv_group_size": "conv_group_size", "selector_rank": "selector_rank",
    "selector_top_k": "selector_top_k", "target_layer_ids": "target_layers", "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}  # fmt: skip
"""config.json field -> GGUF metadata key, without the architecture prefix."""
SINK_TENSOR_NAMES = ("self_attn.attention_sink_bias", "self_attn.sinks")
CONVOLUTION_MODULE_NAMES = {"attention_conv": "attention_convolution", "mlp_conv": "mlp_convolution"}
SELECTOR_PREFIX = "candidate_selector."

_LAYER_TYPES = _SLIDING_ATTENTION, _FULL_ATTENTION = "sliding_attention", "full_attention"
TENSOR_NAME_ALIASES = {
    "midlayer.": "layers.0.", "encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm.",
    **{f"{SELECTOR_PREFIX}{name}_codebook.weight": f"{SELECTOR_PREFIX}{name}_codebook" for name in ("predecessor", "successor")},
}  # fmt: skip
_MUSE_GLIMMER_DEFAULTS = {
    "block_size": 16, "mask_token_id": 201818, "target_layer_ids": [1, 13, 25, 37, 49], "sliding_window": 2048, "is_causal": False,
    "rope_theta": 500000.0,
}  # fmt: skip
"""Defaults of transformers for config fields that checkpoints of Muse Glimmer's assistant may leave out."""
_UNSUPPORTED_KEY_PREFIXES = ("lilicorr", "shared_kv")
"""Prefixes of config keys that describe network parts which are not supported: a drafter with such a key is refused."""
_UNSUPPORTED_ARCHITECTURES = ("DeepseekV4DSpark", "LingDSpark", "Qwen3OmniDSpark")
_GEMMA4_ARCHITECTURE = "Gemma4DSpark"
_MAX_RESCORED_TOKENS = 1024


class MarkovKind(Enum):
    """What the logits bias of DSpark's Markov head is computed from."""

    VANILLA = "vanilla"  # the previous token only
    GATED = "gated"  # the previous token and the row's hidden state
    RNN = "rnn"  # all tokens drafted so far, summarised in a recurrent state


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig:
    """Configuration of a block drafter.

    `sample_from_anchor`: True if each row drafts the token after its position, so that the anchor's row drafts too. False if each row
    drafts the token at its position, so that the anchor's row drafts nothing. None: the config does not specify it.
    """

    kind: HeadKind
    layers: ModelConfig  # sizes of the drafter's decoder layers; their `vocab_size` is the number of ids that it can draft
    target_hidden_size: int
    layer_boundaries: tuple[int, ...]  # where the drafter reads hidden states, in this order; boundary b is the input of layer b
    block_size: int  # maximum number of rows of a block, the row of the anchor included
    mask_token_id: int  # input token of all rows after the row of the anchor
    embedding_scale: float = 1.0  # factor of the token embeddings
    logit_scale: float = 1.0  # factor of the logits
    logit_soft_cap: float | None = None  # applied after `logit_scale`
    sample_from_anchor: bool | None = None
    markov: MarkovKind | None = None  # kind of the Markov head, whose logits bias depends on drafted tokens; None = no such head
    has_confidence: bool = False  # there is a confidence head, which predicts the probability that a draft token is accepted
    confidence_reads_markov_embedding: bool = False  # the confidence head also reads the Markov embedding of the previous token
    num_rescored_tokens: int = 0  # how many top tokens of each row DFlash2's selector rescores; 0 = no selector
    has_own_lm_head: bool = False  # the drafter uses the lm_head in its file; False: it uses the target's
    has_own_embedding: bool = False  # the drafter uses the embedding in its file; False: it uses the target's


def read_block_config(files: HeadFiles, target: ModelConfig) -> BlockConfig:
    """Read the configuration of the drafter in `files`.

    Raises:
        CheckpointError: a config value is missing or impossible.
        IncompatibleDrafterError: the drafter has a network part that is not supported, or was made for another target.
    """
    try:
        return _read_config(files, target)
    except (CheckpointError, IncompatibleDrafterError) as error:
        if not is_gguf(files.path):
            raise
        raise type(error)(str(with_metadata_keys(CheckpointError(str(error)), GGUF_ARCHITECTURE, GGUF_KEY_BY_FIELD))) from None


def fits_target(files: HeadFiles, target: ModelConfig) -> bool:
    """Return whether the files hold a block drafter whose hidden size, vocabulary and layers fit the target.

    Raises:
        CheckpointError: a config value is missing or impossible.
    """
    if files.kind not in BLOCK_HEAD_KINDS:
        return False
    try:
        read_block_config(files, target)
    except IncompatibleDrafterError:
        return False
    return True


def _read_config(files: HeadFiles, target: ModelConfig) -> BlockConfig:
    _check_supported(files)
    files = files.with_canonical_names(TENSOR_NAME_ALIASES)
    fields = merged_config_fields(files)
    fc = files.matrix_shape("fc.weight")
    if fc is None or fc[1] % target.hidden_size or not fc[1]:
        width = "no fc.weight" if fc is None else f"fc.weight of {fc[1]} columns"
        raise IncompatibleDrafterError(
            f"the {files.kind.value} drafter {files.path} holds {width}, the target's hidden states have {target.hidden_size} values: "
            "it was made for another model"
        )
    block_size = fields.integer("block_size", 16, minimum=2, maximum=256)
    layers = _read_decoder_layers(files, fields, fc[0], block_size)
    _check_config_sizes(files, fields, layers)
    layer_boundaries = _read_layer_boundaries(files, fields, fc[1] // target.hidden_size, target)
    check_target_sizes(files, target, hidden_size=fc[1] // len(layer_boundaries))
    num_own_rows, has_own_lm_head = _read_own_lm_head(files, layers, target)
    _, confidence_size = files.matrix_shape("confidence_head.proj.weight") or (0, 0)
    return BlockConfig(
        kind=files.kind,
        layers=replace(layers, vocab_size=num_own_rows if has_own_lm_head else target.vocab_size),
        target_hidden_size=target.hidden_size,
        layer_boundaries=layer_boundaries,
        block_size=block_size,
        mask_token_id=_read_mask_token_id(fields, target),
        embedding_scale=fields.positive_number("input_embedding_scale", layers.hidden_size**0.5 if _has_gemma4_layers(files) else 1.0),
        logit_scale=fields.positive_number("output_multiplier", 1.0),
        logit_soft_cap=None
        if fields.values.get("final_logit_softcapping") in (None, 0)
        else fields.positive_number("final_logit_softcapping"),
        sample_from_anchor=_read_sample_from_anchor(files, fields),
        markov=_read_markov_head_kind(files, fields),
        has_confidence="confidence_head.proj.weight" in files.tensors,
        # by default, the confidence head reads the Markov embedding if its input is wider than the hidden state
        confidence_reads_markov_embedding=fields.flag("confidence_head_with_markov", default=confidence_size > layers.hidden_size),
        num_rescored_tokens=_read_num_rescored_tokens(files, fields),
        has_own_lm_head=has_own_lm_head,
        has_own_embedding=layers.hidden_size != target.hidden_size,
    )


def _read_own_lm_head(files: HeadFiles, layers: ModelConfig, target: ModelConfig) -> tuple[int, bool]:
    """Return the row count of the file's lm_head, and whether to use it: not if it is a copy of the target's (same shape, no `d2t`)."""
    if layers.hidden_size != target.hidden_size and "embed_tokens.weight" not in files.tensors:
        raise IncompatibleDrafterError(
            f"{files.path} has no embed_tokens.weight, and the target's rows of {target.hidden_size} values do not fit its hidden size "
            f"{layers.hidden_size}: it was made for another model"
        )
    shape = files.matrix_shape("lm_head.weight")
    return (0, False) if shape is None else (shape[0], "d2t" in files.tensors or shape != (target.vocab_size, target.hidden_size))


def _read_mask_token_id(fields: JsonFields, target: ModelConfig) -> int:
    ids = fields.token_ids("mask_token_id")
    if not ids:
        raise CheckpointError(f"{fields.path} has no mask_token_id, the token that fills a block: download the drafter's config again")
    if len(ids) > 1 or ids[0] >= target.vocab_size:
        raise IncompatibleDrafterError(
            f"{fields.path}: mask_token_id = {shortened(list(ids))}, expected one id below the target's {target.vocab_size}"
        )
    return ids[0]


def _check_config_sizes(files: HeadFiles, fields: JsonFields, layers: ModelConfig) -> None:
    """Check that config and tensors have the same sizes: otherwise one of the two files belongs to another drafter."""
    markov, hidden = (files.matrix_shape(f"markov_head.{name}.weight") for name in ("markov_w1", "markov_w2"))
    selector, lm_head = files.matrix_shape(SELECTOR_PREFIX + "hidden_projection.weight"), files.matrix_shape("lm_head.weight")
    stored_sizes = {
        "hidden_size": layers.hidden_size,
        "num_hidden_layers": layers.num_layers,
        "markov_rank": 0 if markov is None or hidden is None else markov[1],
        "selector_rank": 0 if selector is None else selector[0],
        **({"draft_vocab_size": lm_head[0]} if lm_head is not None and "d2t" in files.tensors else {}),
    }
    for name, size in stored_sizes.items():
        configured = fields.values.get(name)
        if configured is not None and fields.integer(name, minimum=0) != size:
            raise CheckpointError(f"{fields.path}: {name} = {configured}, and the tensors of {files.path} have {size}: download both again")


def _read_num_rescored_tokens(files: HeadFiles, fields: JsonFields) -> int:
    """Return how many top tokens of each row DFlash2's selector rescores; 0 = there is no selector."""
    if not any(name.startswith(SELECTOR_PREFIX) for name in files.tensors):
        if files.kind is HeadKind.DFLASH2:
            raise CheckpointError(f"{files.path} is a dflash2 drafter without {SELECTOR_PREFIX}*: the file is damaged, download it again")
        return 0
    return fields.integer("selector_top_k", 16, maximum=_MAX_RESCORED_TOKENS)


def _read_markov_head_kind(files: HeadFiles, fields: JsonFields) -> MarkovKind | None:
    if "markov_head.markov_w1.weight" not in files.tensors:
        return None
    name = str(fields.values.get("markov_head_type", "vanilla"))
    supported = [kind.value for kind in MarkovKind]
    if name not in supported:
        raise IncompatibleDrafterError(f"{files.path}: markov_head_type {name!r} is not supported; {', '.join(supported)} are")
    return MarkovKind(name)


def _check_supported(files: HeadFiles) -> None:
    """Raise an error if the config describes a network part that is not supported."""
    nested, architecture = files.config.get("dflash_config"), _first_architecture(files)
    levels = [files.config, nested if isinstance(nested, Mapping) else {}]
    unsupported = next((repr(key) for level in levels for key in level if key.startswith(_UNSUPPORTED_KEY_PREFIXES)), None)
    for level in levels:
        if level.get("projector_type") not in (None, *(kind.value for kind in BLOCK_HEAD_KINDS)):
            unsupported = f"projector_type {shortened(level['projector_type'])}"
    if any(name in architecture for name in _UNSUPPORTED_ARCHITECTURES):
        raise IncompatibleDrafterError(f"{files.path} is a drafter of the kind {architecture}, which is not supported: use another drafter")
    if unsupported is not None:
        raise IncompatibleDrafterError(
            f"{files.path} is a {files.kind.value} drafter with {unsupported}, which is not supported: use another drafter"
        )


def _first_architecture(files: HeadFiles) -> str:
    architectures = files.config.get("architectures")
    return str(architectures[0]) if isinstance(architectures, list) and architectures else ""


def merged_config_fields(files: HeadFiles) -> JsonFields:
    """Return the config fields, with the nested `transformer_layer_config` and `dflash_config` merged in.

    Raises:
        CheckpointError: there is no config.
    """
    config: Mapping[str, Any] = files.config
    if not config:
        raise CheckpointError(f"{files.config_path} is missing: it holds a block drafter's sizes; download it with the weights")
    is_muse = config.get("model_type") == "muse_glimmer_assistant"
    values: dict[str, Any] = dict(_MUSE_GLIMMER_DEFAULTS) if is_muse else {}
    for part in (config.get("transformer_layer_config"), config, config.get("dflash_config")):
        values |= part if isinstance(part, Mapping) else {}
    fields = JsonFields(values, files.config_path)
    if is_muse:
        values["layer_types"] = [_SLIDING_ATTENTION] * max(1, files.count_indices("layers.{}."))
        # unlike ours, the window of transformers excludes the row's own position
        values["sliding_window"] = fields.integer("sliding_window") + 1
    scaling = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping) or scaling.get("rope_type", scaling.get("type", "default")) == "default":
        values.setdefault("max_position_embeddings", 2**20)  # only scaled rotary embeddings depend on the context length
    return fields


def _has_gemma4_layers(files: HeadFiles) -> bool:
    """Return whether the decoder layers are Gemma 4's: norms before and after attention and MLP, attention scale 1, normed values."""
    return _GEMMA4_ARCHITECTURE in _first_architecture(files)


def _read_decoder_layers(files: HeadFiles, fields: JsonFields, hidden_size: int, block_size: int) -> ModelConfig:
    gate, is_gemma4 = files.matrix_shape("layers.0.mlp.gate_proj.weight"), _has_gemma4_layers(files)
    num_layers = max(1, files.count_indices("layers.{}."))
    attention = _read_gemma4_attention(files, fields) if is_gemma4 else _read_attention(files, fields, hidden_size, num_layers)
    name = "hidden_activation" if is_gemma4 else "hidden_act"
    activation = str(fields.values.get(name, "gelu_pytorch_tanh" if is_gemma4 else "silu"))
    if gate is None:
        raise CheckpointError(f"{files.path} has no layers.0.mlp.gate_proj.weight: the file is damaged, download it again")
    if activation not in ACTIVATIONS:
        raise CheckpointError(f"{fields.path}: {name} {activation!r} is not supported; {', '.join(ACTIVATIONS)} are")
    windows = [(None, False)] * num_layers if is_gemma4 else _read_windows(files, fields, num_layers, block_size)
    layer = LayerConfig(
        mixer=attention,
        mlp=DenseMLP(intermediate_size=gate[0], activation=ACTIVATIONS[activation]),
        norm_order=NormOrder.SANDWICH if is_gemma4 else NormOrder.PRE,
        has_output_scale="layers.0.layer_scalar" in files.tensors,
        convolution=_read_convolution(files, fields, hidden_size),
    )
    config = ModelConfig(
        family="llama",
        vocab_size=1,
        hidden_size=hidden_size,
        layers=tuple(replace(layer, mixer=replace(attention, window=window, is_causal=causal)) for window, causal in windows),
        norm_eps=fields.epsilon("norm_eps" if fields.values.get("rms_norm_eps") is None else "rms_norm_eps", 1e-6),
        max_positions=fields.integer("max_position_embeddings"),
        weight_type=WeightType.F32,
    )
    check_rope(config, fields.path)
    return config


def _read_attention(files: HeadFiles, fields: JsonFields, hidden_size: int, num_layers: int) -> AttentionConfig:
    values = {**fields.values, "hidden_size": hidden_size, "num_hidden_layers": num_layers}
    builder = LayerBuilder(_with_partial_rotary_factor(JsonFields(values, fields.path)), replace(FAMILIES["llama"], has_partial_rope=True))
    _check_head_counts(files, fields, builder.num_heads, builder.num_kv_heads, builder.head_size)
    tensors = files.tensors
    uses_keys_as_values = "layers.0.self_attn.v_proj.weight" not in tensors and is_gguf(files.path)
    return replace(
        builder.attention(
            qk_norm=QKNorm.HEAD if "layers.0.self_attn.q_norm.weight" in tensors else QKNorm.NONE,
            has_sinks=any(f"layers.0.{name}" in tensors for name in SINK_TENSOR_NAMES),
        ),
        rope=builder.rope.for_context(None),
        has_value_norm=uses_keys_as_values,
        uses_keys_as_values=uses_keys_as_values,
        value_scale=fields.positive_number("attention_value_scale", 1.0),
    )


def _with_partial_rotary_factor(fields: JsonFields) -> JsonFields:
    """Return the fields with LFM2's `rope_dim`, the number of rotated values of a head, converted to `partial_rotary_factor`."""
    scaling = fields.values.get("rope_parameters") or fields.values.get("rope_scaling")
    if not isinstance(scaling, Mapping) or scaling.get("rope_dim") is None:
        return fields
    head_size = fields.integer("head_dim", null=fields.integer("hidden_size") // fields.integer("num_attention_heads"))
    rotated = JsonFields(scaling, fields.path).integer("rope_dim", maximum=head_size)
    return JsonFields({**fields.values, "partial_rotary_factor": rotated / head_size}, fields.path)


def _read_gemma4_attention(files: HeadFiles, fields: JsonFields) -> AttentionConfig:
    """Return the attention of Gemma4DSparkModel: all of its layers have the full attention of Gemma 4."""
    key, norm = (files.tensors.get(f"layers.0.self_attn.{name}.weight") for name in ("k_proj", "q_norm"))
    if key is None or norm is None or len(norm.shape) != 1 or not key.shape or 0 in norm.shape or key.shape[0] < norm.shape[0]:
        raise CheckpointError(f"{files.path} has no whole layer 0: the file is damaged, download it again")
    head_size = norm.shape[0]  # configs have several names for the head size
    num_heads, num_kv_heads = fields.integer("num_attention_heads"), key.shape[0] // head_size
    _check_head_counts(files, fields, num_heads, num_kv_heads, head_size)
    ropes = fields.values.get("rope_parameters")
    if not isinstance(ropes, Mapping) or not isinstance(ropes.get(_FULL_ATTENTION), Mapping):
        raise CheckpointError(f"{fields.path}: rope_parameters = {shortened(ropes)}, expected those of {_FULL_ATTENTION}")
    return AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        rope=read_rope(fields, FAMILIES["gemma4_text"], head_size=head_size, layer_type=_FULL_ATTENTION),
        scale=1.0,
        qk_norm=QKNorm.HEAD,
        has_value_norm=True,
        uses_keys_as_values=fields.flag("attention_k_eq_v", default=False),
    )


def _check_head_counts(files: HeadFiles, fields: JsonFields, num_heads: int, num_kv_heads: int, head_size: int) -> None:
    """Check the head counts of the config against the first layer's tensors, before memory is allocated for them."""
    query, key = (files.matrix_shape(f"layers.0.self_attn.{name}.weight") for name in ("q_proj", "k_proj"))
    if query is None or key is None:
        raise CheckpointError(f"{files.path} has no whole layer 0: the file is damaged, download it again")
    if query[0] != num_heads * head_size:
        raise CheckpointError(f"{fields.path}: {num_heads} heads of {head_size} values, expected {query[0]} in all as q_proj has")
    if head_size % 2 or num_heads % num_kv_heads:
        raise CheckpointError(
            f"{fields.path}: {num_heads} heads of {head_size} values and {num_kv_heads} key heads: heads must be of even size, and their "
            "number a multiple of that of the key heads"
        )


def _read_convolution(files: HeadFiles, fields: JsonFields, hidden_size: int) -> BlockConvolution | None:
    """Return sizes of DFlash2's convolutions; None = there are none."""
    base = files.tensors.get("layers.0.attention_conv.base_kernel")
    if base is None:
        if fields.values.get("conv_kernel_size"):
            raise CheckpointError(f"{fields.path}: conv_kernel_size is set, and {files.path} holds no attention_conv: download both again")
        return None
    group = fields.integer("conv_group_size", 16)
    size = base.shape[1] if len(base.shape) == 3 else 0
    if not 0 < size <= 16 or fields.integer("conv_kernel_size", size) != size or hidden_size % group:
        raise CheckpointError(
            f"{fields.path}: convolutions of {fields.values.get('conv_kernel_size')} rows over groups of {group} values, and base_kernel "
            f"is of shape {list(base.shape)}: expected [2, up to 16 rows, {hidden_size}] and a divisor of {hidden_size}"
        )
    return BlockConvolution(kernel_size=size, group_size=group)


def _read_windows(files: HeadFiles, fields: JsonFields, num_layers: int, block_size: int) -> list[tuple[int | None, bool]]:
    """Return attention window and causality of each layer. By default, only layers with a window are causal."""
    values = fields.values
    types = values.get("layer_types")
    if fields.flag("use_swa", default=False):
        windows: list[int | None] = [fields.integer("swa_window_size")] * num_layers
    elif types is None:
        windows = [None] * num_layers
    elif isinstance(types, list) and len(types) >= num_layers and all(kind in _LAYER_TYPES for kind in types[:num_layers]):
        window = fields.integer("sliding_window") if _SLIDING_ATTENTION in types[:num_layers] else None
        windows = [window if kind == _SLIDING_ATTENTION else None for kind in types[:num_layers]]
    else:
        raise CheckpointError(
            f"{fields.path}: layer_types = {shortened(types)}, expected {' or '.join(_LAYER_TYPES)} for each of {num_layers} layers"
        )
    field_name = "is_causal" if values.get("is_causal") is not None else "causal"
    is_bidirectional = files.is_speculators and fields.flag("sliding_window_non_causal", default=True)
    causal = [fields.flag(field_name, default=window is not None and not is_bidirectional) for window in windows]
    too_narrow = [window for window, is_causal in zip(windows, causal, strict=True) if window and not is_causal and window < block_size]
    if too_narrow:
        raise IncompatibleDrafterError(f"{fields.path}: a window of {too_narrow[0]} positions is shorter than a block of {block_size} rows")
    return list(zip(windows, causal, strict=True))


def _read_layer_boundaries(files: HeadFiles, fields: JsonFields, num_boundaries: int, target: ModelConfig) -> tuple[int, ...]:
    """Return the layer boundaries that the drafter reads. speculators configs list boundaries; others list layers, read at their output."""
    num_layers = target.num_layers
    listed = fields.values.get("aux_hidden_state_layer_ids", fields.values.get("target_layer_ids"))
    if listed is not None and not (isinstance(listed, list) and all(type(layer) is int for layer in listed)):
        raise CheckpointError(f"{fields.path}: target_layer_ids = {shortened(listed)}, expected a list of layers")
    if "aux_hidden_state_layer_ids" in fields.values or (listed is None and files.is_speculators):
        boundaries = [2, num_layers // 2, num_layers - 3] if listed is None else list(listed)
    elif listed is not None:
        boundaries = [layer + 1 for layer in listed]
    elif num_boundaries == 1:
        boundaries = [num_layers // 2 + 1]
    else:
        boundaries = [round(1 + index * (num_layers - 4) / (num_boundaries - 1)) + 1 for index in range(num_boundaries)]
    if listed is None and (boundaries != sorted(set(boundaries)) or boundaries[0] < 0 or boundaries[-1] > num_layers):
        raise IncompatibleDrafterError(
            f"{fields.path} has no target_layer_ids, and the usual ones for {num_boundaries} layers do not exist in a target of "
            f"{num_layers}: download the drafter's config again, or use another drafter"
        )
    if not (len(boundaries) == len(set(boundaries)) == num_boundaries and all(0 <= boundary <= num_layers for boundary in boundaries)):
        raise IncompatibleDrafterError(
            f"{files.path} reads {num_boundaries} of the target's layer boundaries, and its config names {boundaries} of "
            f"{num_layers} layers: it was made for another model"
        )
    return tuple(boundaries)


def _read_sample_from_anchor(files: HeadFiles, fields: JsonFields) -> bool | None:
    name = "sample_from_anchor" if "sample_from_anchor" in fields.values else "shift_label"
    if fields.values.get(name) is None and files.kind is HeadKind.DSPARK:
        return None
    return fields.flag(name, default=False)


def default_sample_from_anchor(files: HeadFiles) -> bool:
    """Return `sample_from_anchor` for configs without it: true for DSpark files, unless speculators wrote them."""
    is_speculators = files.is_speculators or bool({"transformer_layer_config", "aux_hidden_state_layer_ids"} & files.config.keys())
    return files.kind is HeadKind.DSPARK and not is_speculators


def describe_drafted_position(*, sample_from_anchor: bool, is_known: bool) -> str:
    """Describe for the user which position a row drafts. `is_known`: it is in the config or was detected."""
    place = "the token after its own position" if sample_from_anchor else "the token at its own position"
    return f"a row drafts {place}" if is_known else f"a row is expected to draft {place}, which the first drafts will show"


def is_neox_rope(fields: JsonFields) -> bool:
    """Return whether rotary embeddings rotate value i with value i + size / 2 (NeoX style), not with its neighbour."""
    architectures = fields.values.get("architectures")
    default = not (isinstance(architectures, list) and architectures and str(architectures[0]).startswith("Lfm2"))
    return fields.flag("rope_is_neox_style", default=fields.flag("is_neox_style", default=default))
