"""Sizes of an EAGLE head's own decoder layers; where config and tensors differ the tensors are right."""

from dataclasses import replace

from paceline.drafters.eagle.layout import is_nested
from paceline.drafters.head_files import HeadFiles
from paceline.drafters.head_kinds import HeadKind
from paceline.errors import CheckpointError, IncompatibleDrafterError
from paceline.models.config import ModelConfig, WeightType, check_frequencies
from paceline.models.families.table import FAMILIES
from paceline.models.json_fields import JsonFields
from paceline.models.layer_builder import ACTIVATIONS
from paceline.models.layers import AttentionConfig, DenseMLP, LayerConfig, QKNorm
from paceline.models.rope_config import RopeConfig, RopeType, read_rope

_LAYER_TYPES = ("llama", "qwen3")  # in containers that name the layers' family; all others use llama's
_FIRST_LAYER_TYPES = (*_LAYER_TYPES, "qwen2", "mistral")
_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_layers(files: HeadFiles, fields: JsonFields) -> ModelConfig:
    """
    Args:
        files: with plain tensor names.

    Raises:
        CheckpointError: a size is missing or absurd, or the layers are none we run.
        IncompatibleDrafterError: they are of a family whose layers differ.
    """
    _check_family(files, fields)
    hidden_size, num_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    query, key, gate = (files.shape(f"layers.0.{name}.weight") for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj"))
    head_size = fields.size("head_dim", hidden_size // num_heads, null=hidden_size // num_heads)
    if fields.values.get("head_dim") is None and query is not None and query[0] and query[0] % num_heads == 0:
        head_size = query[0] // num_heads
    num_kv_heads = fields.size("num_key_value_heads", num_heads, null=num_heads)
    if key is not None and key[0] % head_size == 0 and num_heads % max(1, key[0] // head_size) == 0:
        num_kv_heads = max(1, key[0] // head_size)
    activation = str(fields.values.get("hidden_act", "silu"))
    if activation not in ACTIVATIONS or head_size % 2 or num_heads % num_kv_heads:
        raise CheckpointError(
            f"{fields.path}: hidden_act {activation!r} with {num_heads} heads of {head_size} values and {num_kv_heads} key heads is no "
            f"network we run: the activation is one of {', '.join(ACTIVATIONS)}, heads are of even size and a multiple of the key heads"
        )
    has_qk_norm = "layers.0.self_attn.q_norm.weight" in files.tensors or (files.is_speculators and fields.values["model_type"] == "qwen3")
    attention = AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        rope=_rope(files, fields, head_size),
        scale=float(head_size**-0.5),
        qk_norm=QKNorm.HEAD if has_qk_norm else QKNorm.NONE,
    )
    inner = gate[0] if gate is not None else fields.size("intermediate_size")
    mlp = DenseMLP(intermediate_size=inner, activation=ACTIVATIONS[activation])
    windows = _windows(fields, max(1, files.count("layers.{}.")))
    by_window = {window: LayerConfig(mixer=replace(attention, window=window), mlp=mlp) for window in windows}
    config = ModelConfig(
        family="llama",
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden_size,
        layers=tuple(by_window[window] for window in windows),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_positions=fields.size("max_position_embeddings"),
        weight_type=WeightType.F32,
    )
    check_frequencies(config, fields.path)
    return config


def _check_family(files: HeadFiles, fields: JsonFields) -> None:
    """Some containers name the family of the head's layers; in all others the name is the target's, and the layers are llama's."""
    if not files.is_speculators and not is_nested(files):
        return
    family = fields.values["model_type"]
    known = _FIRST_LAYER_TYPES if files.kind is HeadKind.EAGLE else _LAYER_TYPES
    if family is not None and family not in known:
        raise IncompatibleDrafterError(
            f"{fields.path}: its layers are those of {family!r}; {files.kind.value} heads with layers of {', '.join(known)} can be used"
        )


def _windows(fields: JsonFields, num_layers: int) -> list[int | None]:
    """How many of the last positions each layer sees, None = all: the head's layers are the first that `layer_types` names."""
    is_qwen = str(fields.values["model_type"]).startswith("qwen")
    if fields.values.get("sliding_window") is None or (is_qwen and not fields.flag("use_sliding_window", default=False)):
        return [None] * num_layers
    kinds = fields.values.get("layer_types")
    if kinds is None:
        first = fields.number("max_window_layers", 28) if is_qwen else num_layers
        slides = [layer >= first for layer in range(num_layers)]
    elif isinstance(kinds, list) and len(kinds) >= num_layers and all(kind in (_FULL, _SLIDING) for kind in kinds[:num_layers]):
        slides = [kind == _SLIDING for kind in kinds[:num_layers]]
    else:
        raise CheckpointError(
            f"{fields.path}: layer_types = {str(kinds)[:80]}, expected {_SLIDING} or {_FULL} for each of {num_layers} layers"
        )
    window = fields.size("sliding_window") if any(slides) else None
    return [window if is_local else None for is_local in slides]


def written_rope(files: HeadFiles, fields: JsonFields, head_size: int) -> RopeConfig:
    """The rotation as the config describes it.

    Raises:
        CheckpointError: it is not one we compute.
    """
    family = replace(FAMILIES["llama"], has_partial_rope=files.is_speculators)
    return read_rope(fields, family, head_size=head_size).for_context(None)


def _rope(files: HeadFiles, fields: JsonFields, head_size: int) -> RopeConfig:
    """As the classes of speculators compute it: `partial_rotary_factor` counts only where the rotation is scaled."""
    rope = written_rope(files, fields, head_size)
    return replace(rope, rotated_fraction=1.0) if rope.type is RopeType.DEFAULT else rope
