"""The layers of Gemma 4: two kinds of attention of different sizes, layers that read what another one keeps, and inputs for every layer."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.errors import CheckpointError, shortened
from paceline.models.family import Family
from paceline.models.json_fields import JsonFields
from paceline.models.layer_reader import MAX_HEAD_SIZE, LayerReader
from paceline.models.layers import AttentionConfig, DenseMLP, ExpertMLP, LayerConfig, LayerInput, NormOrder, QKNorm
from paceline.models.rope_config import read_rope

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
_ROPE = {
    _LOCAL: {"rope_type": "default", "rope_theta": 1e4},
    _GLOBAL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
_SIZES = ("num_key_value_heads", "head_dim")


def gemma4_layers(read: LayerReader) -> tuple[LayerConfig, ...]:
    """The layers of a text model.

    Source: Gemma 4's model in transformers 5.23.
    """
    slides = sliding_layers(read)
    return layers_of(read, slides, _kv_layers(read, slides))


def sliding_layers(read: LayerReader) -> list[bool]:
    """Which layers see a window; the last one never does.

    Raises:
        CheckpointError: `layer_types` is not one for each layer.
    """
    return [*read.sliding_layers(6)[:-1], False]


def layers_of(read: LayerReader, slides: Sequence[bool], kv_layers: Sequence[int | None]) -> tuple[LayerConfig, ...]:
    """Layers with the attention of their kind.

    Args:
        slides: for each layer whether it sees a window.
        kv_layers: for each the layer whose keys and values it reads; None = its own.

    Raises:
        CheckpointError: a value is absurd, or stands for something that is not computed here.
    """
    _refuse_others(read)
    fields, mlp = read.fields, read.mlp()
    wide = replace(mlp, intermediate_size=2 * mlp.intermediate_size) if read.flag("use_double_wide_mlp") else mlp
    mlps = _with_experts(read, (mlp, wide)) if read.flag("enable_moe_block") else (mlp, wide)
    size = _whole(fields, "hidden_size_per_layer_input")
    taken_in = LayerInput(size=size, activation=mlp.activation) if size else None
    attentions = {is_local: _attention(read, is_local=is_local, sizes=_sizes(read, slides, is_local=is_local)) for is_local in set(slides)}
    made = [
        LayerConfig(
            mixer=replace(attentions[is_local], kv_layer=kv_layer),
            mlp=mlps[kv_layer is not None],
            norm_order=NormOrder.SANDWICH,
            input=taken_in,
            scales_output=True,
        )
        for is_local, kv_layer in zip(slides, kv_layers, strict=True)
    ]
    shared: dict[LayerConfig, LayerConfig] = {}
    return tuple(shared.setdefault(layer, layer) for layer in made)


def _with_experts(read: LayerReader, dense: Sequence[DenseMLP]) -> list[ExpertMLP]:
    """Experts beside each of these."""
    routing = replace(read.routing(chosen=("top_k_experts",)), is_normalized=True, has_scales=True)
    expert, scale = read.mlp(size="moe_intermediate_size"), float(read.fields.size("hidden_size") ** -0.5)
    return [ExpertMLP(routing=routing, expert=expert, shared=shared, has_own_norms=True, router_scale=scale) for shared in dense]


def _refuse_others(read: LayerReader) -> None:
    fields = read.fields
    sees = fields.values.get("use_bidirectional_attention")
    if sees not in (None, False, "vision"):
        raise CheckpointError(f"{fields.path}: use_bidirectional_attention = {shortened(sees)}: it embeds text, it does not generate")


def _kv_layers(read: LayerReader, slides: Sequence[bool]) -> list[int | None]:
    """The last layers read what the last one of their kind in front of them keeps."""
    fields, count = read.fields, _whole(read.fields, "num_kv_shared_layers")
    first = read.num_layers - count
    if first < 1:
        raise CheckpointError(f"{fields.path}: num_kv_shared_layers = {count}, expected fewer than num_hidden_layers = {read.num_layers}")
    owners = {is_local: index for index, is_local in enumerate(slides[:first])}
    for is_local in slides[first:]:
        if is_local not in owners:
            raise CheckpointError(
                f"{fields.path}: num_kv_shared_layers = {count}: no {_LOCAL if is_local else _GLOBAL} layer stands in front of them "
                "whose keys and values they could share"
            )
    return [None] * first + [owners[is_local] for is_local in slides[first:]]


def _whole(fields: JsonFields, name: str) -> int:
    """A count of 0 or more; null counts as 0."""
    return 0 if fields.values.get(name) in (None, 0) else fields.size(name)


def _attention(read: LayerReader, *, is_local: bool, sizes: tuple[int, int]) -> AttentionConfig:
    fields, (num_kv_heads, head_size) = read.fields, sizes
    window = fields.size("sliding_window") if is_local else None
    bias = read.flag("attention_bias")
    return replace(
        read.attention(bias=bias, output_bias=bias, qk_norm=QKNorm.HEAD, scale=1.0),
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        rope=read_rope(_with_ropes(fields), read.family, head_size=head_size, layer_type=_LOCAL if is_local else _GLOBAL),
        window=None if window is None or window >= read.max_positions else window,
        norms_values=True,
        keys_are_values=not is_local and read.flag("attention_k_eq_v"),
    )


def _with_ropes(fields: JsonFields) -> JsonFields:
    ropes = fields.values.get("rope_parameters") or _ROPE
    if not isinstance(ropes, Mapping) or any(not isinstance(ropes.get(kind), Mapping) for kind in _ROPE):
        raise CheckpointError(f"{fields.path}: rope_parameters = {shortened(ropes)}, expected those of {_LOCAL} and of {_GLOBAL}")
    return JsonFields({**fields.values, "rope_parameters": ropes}, fields.path)


def _sizes(read: LayerReader, slides: Sequence[bool], *, is_local: bool) -> tuple[int, int]:
    """K and D of the layers of one kind."""
    fields, listed = read.fields, read.fields.values.get("per_layer_config")
    if listed is None:
        own = {} if is_local else _global_sizes(read)
        return _checked(read, JsonFields({**fields.values, **own}, fields.path))
    if not isinstance(listed, Mapping):
        raise CheckpointError(f"{fields.path}: per_layer_config = {shortened(listed)}, expected what differs by layer")
    if unknown := listed.keys() - {str(index) for index in range(read.num_layers)}:
        raise CheckpointError(f"{fields.path}: per_layer_config names layer {shortened(min(unknown))}, there are {read.num_layers} layers")
    found = set()
    for index in [index for index, other in enumerate(slides) if other == is_local]:
        own = listed.get(str(index)) or {}
        if not isinstance(own, Mapping) or not own.keys() <= set(_SIZES):
            raise CheckpointError(
                f"{fields.path}: per_layer_config of layer {index} = {shortened(own)}, only {' and '.join(_SIZES)} may differ"
            )
        found.add(_checked(read, JsonFields({**fields.values, **own}, fields.path)))
    if len(found) > 1:
        kind = _LOCAL if is_local else _GLOBAL
        raise CheckpointError(f"{fields.path}: per_layer_config gives {kind} layers different sizes, {sorted(found)}: they must be alike")
    return found.pop()


def _global_sizes(read: LayerReader) -> dict[str, Any]:
    fields = read.fields
    sizes: dict[str, Any] = {"head_dim": fields.size("global_head_dim", 512)}
    if read.flag("attention_k_eq_v") and fields.values.get("num_global_key_value_heads") is not None:
        sizes["num_key_value_heads"] = fields.size("num_global_key_value_heads")
    return sizes


def _checked(read: LayerReader, fields: JsonFields) -> tuple[int, int]:
    num_kv_heads, head_size = fields.size("num_key_value_heads"), fields.size("head_dim", most=MAX_HEAD_SIZE)
    if read.num_heads % num_kv_heads or head_size % 2:
        raise CheckpointError(
            f"{fields.path}: {read.num_heads} query heads over {num_kv_heads} key heads of {head_size} values: expected a multiple, "
            "and an even head size"
        )
    return num_kv_heads, head_size


_DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_TEXT = Family(
    name="gemma4_text",
    architecture="Gemma4ForCausalLM",
    gguf="gemma4",
    layers=gemma4_layers,
    defaults={
        **_DEFAULTS,
        "sliding_window": 512,
        "max_position_embeddings": 131072,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
    },
    activation_field="hidden_activation",
    scales_embedding=True,
    caps_logits=True,
    has_layer_sizes=True,
    has_local_rope=True,
    part_names={
        "shared_expert": "mlp",
        "experts": "experts",
        "router": "router.proj",
        "router.scales": "router.per_expert_scale",
        "router_norm.weight": "router.scale",
        "experts_norm": "pre_feedforward_layernorm_2",
        "experts_output_norm": "post_feedforward_layernorm_2",
        "shared_output_norm": "post_feedforward_layernorm_1",
    },
)
GEMMA4 = (
    _TEXT,
    replace(
        _TEXT,
        name="gemma4_unified_text",
        architecture="Gemma4UnifiedForCausalLM",
        gguf=None,
        defaults={**_DEFAULTS, "sliding_window": 1024, "max_position_embeddings": 262144, "hidden_size_per_layer_input": 0},
    ),
)
