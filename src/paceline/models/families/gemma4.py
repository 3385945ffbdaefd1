"""Gemma 4: head sizes differ by attention type, the last layers share KV caches of earlier ones, and layers have per-layer inputs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from paceline.errors import CheckpointError, shortened
from paceline.models.families.family import Family, GgufFormat, Layers
from paceline.models.gguf.fields import GgufFields
from paceline.models.gguf.file import GgufFile
from paceline.models.json_fields import JsonFields
from paceline.models.layer_builder import LayerBuilder
from paceline.models.layers import AttentionConfig, DenseMLP, ExpertMLP, LayerConfig, NormOrder, PerLayerInput, QKNorm, share_equal_layers
from paceline.models.rope_config import read_rope

ASSISTANT_ARCHITECTURES = ("gemma4-assistant", "gemma4_assistant")
"""`general.architecture` of the drafters that Google trained for Gemma 4: llama.cpp's name, and that of older converters."""
_SLIDING, _FULL = "sliding_attention", "full_attention"
_DEFAULT_ROPE_PARAMETERS = {
    _SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
_FIELDS_THAT_DIFFER_BY_LAYER = ("num_key_value_heads", "head_dim")
_DEFAULT_FULL_ATTENTION_INTERVAL = 6  # every 6th layer has full attention if a GGUF file does not list the layers with a sliding window
_MIN_DIVISOR_OF_UNROTATED_PAIR = 1e20  # a rotary pair whose frequency is divided by this much or more counts as unrotated


def _gemma4_layers(builder: LayerBuilder) -> Layers:
    """Return the layers of a text model.

    Source: Gemma 4's model in transformers 5.23.
    """
    is_sliding = sliding_layers(builder)
    return build_gemma4_layers(builder, is_sliding, kv_source_layers(builder, is_sliding))


def sliding_layers(builder: LayerBuilder) -> list[bool]:
    """Return for each layer whether it has a sliding window. The last layer never has one.

    Raises:
        CheckpointError: `layer_types` does not have one type for each layer.
    """
    return [*builder.sliding_layers(6)[:-1], False]


def build_gemma4_layers(builder: LayerBuilder, is_sliding: Sequence[bool], kv_source_layers: Sequence[int | None]) -> Layers:
    """Return the layers of a Gemma 4 model or assistant.

    Args:
        is_sliding: for each layer whether it has a sliding window.
        kv_source_layers: for each layer the index of the layer whose KV cache it reads; None = its own.

    Raises:
        CheckpointError: A value is out of range or not supported.
    """
    _refuse_bidirectional_attention(builder)
    fields, mlp = builder.fields, builder.mlp()
    double_wide = replace(mlp, intermediate_size=2 * mlp.intermediate_size) if builder.flag("use_double_wide_mlp") else mlp
    mlps = _mlps_with_experts(builder, (mlp, double_wide)) if builder.flag("enable_moe_block") else (mlp, double_wide)
    size = _read_non_negative_integer(fields, "hidden_size_per_layer_input")
    per_layer_input = PerLayerInput(size=size, activation=mlp.activation) if size else None
    attention_layers = {
        has_window: _attention_config(builder, has_window=has_window, sizes=_attention_sizes(builder, is_sliding, has_window=has_window))
        for has_window in set(is_sliding)
    }
    return share_equal_layers(
        LayerConfig(
            mixer=replace(attention_layers[has_window], kv_source_layer=kv_source_layer),
            mlp=mlps[kv_source_layer is not None],
            norm_order=NormOrder.SANDWICH,
            per_layer_input=per_layer_input,
            has_output_scale=True,
        )
        for has_window, kv_source_layer in zip(is_sliding, kv_source_layers, strict=True)
    )


def _mlps_with_experts(builder: LayerBuilder, shared_mlps: Sequence[DenseMLP]) -> list[ExpertMLP]:
    """Return a mixture of experts for each dense MLP in `shared_mlps`, which becomes its shared expert."""
    routing = replace(builder.routing(count_fields=("top_k_experts",)), has_normalized_weights=True, has_expert_scales=True)
    expert, scale = builder.mlp(width_field="moe_intermediate_size"), float(builder.fields.integer("hidden_size") ** -0.5)
    return [ExpertMLP(routing=routing, expert=expert, shared_expert=mlp, has_expert_norms=True, router_scale=scale) for mlp in shared_mlps]


def _refuse_bidirectional_attention(builder: LayerBuilder) -> None:
    fields, name = builder.fields, "use_bidirectional_attention"
    if (value := fields.values.get(name)) not in (None, False, "vision"):
        raise CheckpointError(f"{fields.path}: {name} = {shortened(value)}: embedding models are not supported")


def kv_source_layers(builder: LayerBuilder, is_sliding: Sequence[bool]) -> list[int | None]:
    """Return for each layer the layer whose KV cache it reads: for the last ones an earlier layer of their type; None = its own."""
    fields, count = builder.fields, _read_non_negative_integer(builder.fields, "num_kv_shared_layers")
    first = builder.num_layers - count
    if first < 1:
        limit = f"num_hidden_layers = {builder.num_layers}"
        raise CheckpointError(f"{fields.path}: num_kv_shared_layers = {count}, expected fewer than {limit}")
    owners = {has_window: index for index, has_window in enumerate(is_sliding[:first])}
    for has_window in is_sliding[first:]:
        if has_window not in owners:
            raise CheckpointError(
                f"{fields.path}: num_kv_shared_layers = {count}: no {_SLIDING if has_window else _FULL} layer before them "
                "has keys and values to share"
            )
    return [None] * first + [owners[has_window] for has_window in is_sliding[first:]]


def _read_non_negative_integer(fields: JsonFields, name: str) -> int:
    """Return an integer of 0 or more; null = 0."""
    return 0 if fields.values.get(name) in (None, 0) else fields.integer(name)


def _attention_config(builder: LayerBuilder, *, has_window: bool, sizes: tuple[int, int]) -> AttentionConfig:
    fields, (num_kv_heads, head_size) = builder.fields, sizes
    window = fields.integer("sliding_window") if has_window else None
    return builder.attention(
        bias=builder.flag("attention_bias"),
        qk_norm=QKNorm.HEAD,
        scale=1.0,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        rope=read_rope(_with_default_rope(fields), builder.family, head_size=head_size, layer_type=_SLIDING if has_window else _FULL),
        window=None if window is None or window >= builder.max_positions else window,
        has_value_norm=True,
        uses_keys_as_values=not has_window and builder.flag("attention_k_eq_v"),
    )


def _with_default_rope(fields: JsonFields) -> JsonFields:
    ropes = fields.values.get("rope_parameters") or _DEFAULT_ROPE_PARAMETERS
    if not isinstance(ropes, Mapping) or any(not isinstance(ropes.get(kind), Mapping) for kind in _DEFAULT_ROPE_PARAMETERS):
        raise CheckpointError(f"{fields.path}: rope_parameters = {shortened(ropes)}, expected those of {_SLIDING} and of {_FULL}")
    return JsonFields({**fields.values, "rope_parameters": ropes}, fields.path)


def _attention_sizes(builder: LayerBuilder, is_sliding: Sequence[bool], *, has_window: bool) -> tuple[int, int]:
    """Return the number of KV heads and the head size, which must be the same for all sliding, or all full-attention, layers."""
    fields, per_layer = builder.fields, builder.fields.values.get("per_layer_config")
    if per_layer is None:
        own = {} if has_window else _full_attention_fields(builder)
        return _read_attention_sizes(builder, JsonFields({**fields.values, **own}, fields.path))
    if not isinstance(per_layer, Mapping):
        raise CheckpointError(f"{fields.path}: per_layer_config = {shortened(per_layer)}, expected the sizes that differ, by layer")
    per_layer = {key.lstrip("0") or "0": own for key, own in per_layer.items()}  # transformers pads layer numbers with zeros
    if unknown := per_layer.keys() - {str(index) for index in range(builder.num_layers)}:
        num_layers = builder.num_layers
        raise CheckpointError(f"{fields.path}: per_layer_config names layer {shortened(min(unknown))}, there are {num_layers} layers")
    found = set()
    for index in [index for index, other in enumerate(is_sliding) if other == has_window]:
        own = per_layer.get(str(index)) or {}
        if not isinstance(own, Mapping) or not own.keys() <= set(_FIELDS_THAT_DIFFER_BY_LAYER):
            raise CheckpointError(
                f"{fields.path}: per_layer_config of layer {index} = {shortened(own)}, only "
                f"{' and '.join(_FIELDS_THAT_DIFFER_BY_LAYER)} may differ"
            )
        found.add(_read_attention_sizes(builder, JsonFields({**fields.values, **own}, fields.path)))
    if len(found) > 1:
        kind = _SLIDING if has_window else _FULL
        raise CheckpointError(f"{fields.path}: per_layer_config gives {kind} layers different sizes, {sorted(found)}: they must be equal")
    return found.pop()


def _full_attention_fields(builder: LayerBuilder) -> dict[str, Any]:
    fields = builder.fields
    sizes: dict[str, Any] = {"head_dim": fields.integer("global_head_dim", 512)}
    if builder.flag("attention_k_eq_v") and fields.values.get("num_global_key_value_heads") is not None:
        sizes["num_key_value_heads"] = fields.integer("num_global_key_value_heads")
    return sizes


def _read_attention_sizes(builder: LayerBuilder, fields: JsonFields) -> tuple[int, int]:
    num_kv_heads, head_size = fields.integer("num_key_value_heads"), fields.integer("head_dim")
    if builder.num_heads % num_kv_heads or head_size % 2:
        raise CheckpointError(
            f"{fields.path}: {builder.num_heads} query heads over {num_kv_heads} key heads of {head_size} values: expected a multiple, "
            "and an even head size"
        )
    return num_kv_heads, head_size


def _gemma4_gguf_fields(fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    num_layers = config["num_hidden_layers"]
    num_shared = fields.architecture_value("attention.shared_kv_layers") or 0
    if not isinstance(num_shared, int) or isinstance(num_shared, bool) or not 0 <= num_shared < num_layers:
        fields.raise_invalid("attention.shared_kv_layers", num_shared, f"fewer than {num_layers} layers")
    return _GgufLayers(fields, num_layers, num_shared).config_fields()


def assistant_fields(file: GgufFile) -> dict[str, Any]:
    """Return the config.json fields of a Gemma 4 assistant's layers. All of them read the target's KV cache.

    Raises:
        CheckpointError: A value is missing, out of range or not supported.
    """
    fields = GgufFields(file)
    count, hidden_size = fields.num_blocks(), fields.count("embedding_length")
    for key in ("attention.shared_kv_layers", "nextn_predict_layers"):
        if (found := fields.architecture_value(key)) not in (None, 0, count):
            fields.raise_invalid(key, found, f"all {count} layers")
    layers = _GgufLayers(fields, count, count)
    return {
        "vocab_size": fields.vocab_size(hidden_size),
        "hidden_size": hidden_size,
        "num_hidden_layers": count,
        "num_attention_heads": fields.count("attention.head_count"),
        "num_key_value_heads": layers.layer_values("attention.head_count_kv")[0],
        "max_position_embeddings": fields.count("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon", 1e-6),
        **layers.config_fields(),
    }


class _GgufLayers:
    """Reads the metadata of the layers of a GGUF file. The last `num_shared` layers read the KV cache of another layer."""

    def __init__(self, fields: GgufFields, num_layers: int, num_shared: int) -> None:
        self._fields, self._num_layers, self._num_shared = fields, num_layers, num_shared
        self._num_owners = num_layers - num_shared

    def config_fields(self) -> dict[str, Any]:
        fields, is_sliding = self._fields, self._sliding_layers()
        full_head_size = fields.count("attention.key_length")
        sliding_head_size = fields.count("attention.key_length_swa", full_head_size)
        for key, expected in (("value_length", full_head_size), ("value_length_swa", sliding_head_size)):
            if (size := fields.architecture_value(f"attention.{key}")) not in (None, expected):
                fields.raise_invalid(f"attention.{key}", size, f"the size of keys, {expected}")
        table = fields.file.tensors.get("per_layer_token_embd.weight")
        full_layers = [layer for layer in range(self._num_owners) if not is_sliding[layer]]
        soft_cap = fields.architecture_value("final_logit_softcapping")
        values = {
            "layer_types": [_SLIDING if has_window else _FULL for has_window in is_sliding],
            "num_kv_shared_layers": self._num_shared,
            "attention_k_eq_v": any(not fields.has_tensor(f"blk.{layer}.attn_v.weight") for layer in full_layers),
            "hidden_size_per_layer_input": fields.architecture_value("embedding_length_per_layer_input") or 0,
            "vocab_size_per_layer_input": None if table is None else table.shape[0],
            "enable_moe_block": bool(fields.architecture_value("expert_count")),
            "final_logit_softcapping": None if soft_cap is None else fields.number("final_logit_softcapping"),
            "per_layer_config": self._kv_head_fields(is_sliding, full_head_size, sliding_head_size),
            "head_dim": sliding_head_size,
            "rope_parameters": self._rope_fields(full_head_size, sliding_head_size),
            **self._mlp_width_fields(),
            **self._expert_fields(),
        }
        return {**values, "sliding_window": fields.count("attention.sliding_window")} if any(is_sliding) else values

    def layer_values(self, key: str) -> Sequence[int]:
        """Return the value of each layer for a metadata key. The metadata may hold one number for all layers."""
        value = self._fields.architecture_value(key)
        sizes = value if isinstance(value, list) else [value] * self._num_layers
        if len(sizes) != self._num_layers or not all(isinstance(one, int) and not isinstance(one, bool) for one in sizes):
            self._fields.raise_invalid(key, value, f"a whole number, or one for each of {self._num_layers} layers")
        return sizes

    def _sliding_layers(self) -> list[bool]:
        key = "attention.sliding_window_pattern"
        pattern = self._fields.architecture_value(key)
        pattern = _DEFAULT_FULL_ATTENTION_INTERVAL if pattern is None else pattern
        if isinstance(pattern, list) and len(pattern) == self._num_layers and all(one in (0, 1) for one in pattern):
            return [bool(one) for one in pattern]
        if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0:
            return [layer % pattern < pattern - 1 for layer in range(self._num_layers)]
        self._fields.raise_invalid(key, pattern, f"for each of {self._num_layers} layers whether it has a sliding window")

    def _kv_head_fields(self, is_sliding: Sequence[bool], full_head_size: int, sliding_head_size: int) -> dict[str, dict[str, int]]:
        """Return `per_layer_config`: head size and number of KV heads by layer. Layers without a KV cache have those of their type."""
        counts, sizes = self.layer_values("attention.head_count_kv"), dict[str, dict[str, int]]()
        count_by_type = dict(zip(is_sliding[: self._num_owners], counts, strict=False))
        for layer, has_window in enumerate(is_sliding):
            count = counts[layer] if layer < self._num_owners else count_by_type.get(has_window, counts[layer])
            sizes[str(layer)] = {"head_dim": sliding_head_size if has_window else full_head_size, "num_key_value_heads": count}
        return sizes

    def _mlp_width_fields(self) -> dict[str, Any]:
        """Return the fields for MLP widths. Layers without a KV cache of their own may be twice as wide."""
        widths = self.layer_values("feed_forward_length")
        is_double = self._num_shared > 0 and widths[-1] == 2 * widths[0]
        expected = [widths[0]] * self._num_owners + [widths[0] * (1 + is_double)] * self._num_shared
        if list(widths) != expected:
            allowed = "the same for every layer, or twice as much for those that share keys"
            self._fields.raise_invalid("feed_forward_length", list(widths), allowed)
        return {"intermediate_size": widths[0], "use_double_wide_mlp": is_double}

    def _expert_fields(self) -> dict[str, Any]:
        if not self._fields.architecture_value("expert_count"):
            return {}
        keys = {"num_experts": "expert_count", "top_k_experts": "expert_used_count", "moe_intermediate_size": "expert_feed_forward_length"}
        return {name: self._fields.count(key) for name, key in keys.items()}

    def _rope_fields(self, full_head_size: int, sliding_head_size: int) -> dict[str, Any]:
        fields = self._fields
        for key, size in (("dimension_count", full_head_size), ("dimension_count_swa", sliding_head_size)):
            if (rotated := fields.architecture_value(f"rope.{key}")) not in (None, size):
                fields.raise_invalid(f"rope.{key}", rotated, f"the whole head, {size}")
        if (kind := fields.architecture_value("rope.scaling.type") or "none") != "none":
            fields.raise_invalid("rope.scaling.type", kind, "none")
        proportional = {"rope_type": "proportional", "rope_theta": fields.number("rope.freq_base", 1e6)}
        return {
            _SLIDING: {"rope_type": "default", "rope_theta": fields.number("rope.freq_base_swa", 1e4)},
            _FULL: {**proportional, **self._rotated_fraction_and_divisor(full_head_size)},
        }

    def _rotated_fraction_and_divisor(self, head_size: int) -> dict[str, float]:
        """Return the fraction of rotary pairs that rotate in full-attention heads, and the divisor of their frequencies.

        `rope_freqs.weight` has a frequency divisor for each pair. In llama.cpp a huge divisor disables the rotation of a pair.
        """
        tensor, num_pairs = self._fields.file.tensors.get("rope_freqs.weight"), head_size // 2
        if tensor is None:
            return {"partial_rotary_factor": 1.0}
        divisors = tensor.data.view("<f4") if tensor.block_type.name == "F32" and tensor.shape == (num_pairs,) else np.zeros(1, np.float32)
        count = int(np.count_nonzero(divisors < _MIN_DIVISOR_OF_UNROTATED_PAIR))
        if not count or not np.isfinite(divisors).all() or divisors[0] <= 0 or not (divisors[:count] == divisors[0]).all():
            raise CheckpointError(
                f"{self._fields.file.path}: rope_freqs.weight of type {tensor.block_type.name} and shape {list(tensor.shape)} is not "
                f"one number above 0 for the first of {num_pairs} pairs and a huge one for the others; download the file again"
            )
        fraction = 2 * count / head_size
        if int(fraction * head_size // 2) < count:  # transformers rounds the number of pairs down, so the fraction must not be too small
            fraction = math.nextafter(fraction, 1.0)
        return {"partial_rotary_factor": fraction, "factor": float(divisors[0])}


METADATA_KEYS = {
    "top_k_experts": "expert_used_count",
    "hidden_size_per_layer_input": "embedding_length_per_layer_input",
    "num_kv_shared_layers": "attention.shared_kv_layers",
    "backbone_hidden_size": "embedding_length_out",
    "centroid_intermediate_top_k": "centroid_top_k",
}
"""Metadata keys of config.json fields, for models and for assistants."""
_DEFAULT_FIELDS = {
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True, "bos_token_id": 2, "eos_token_id": 1,
}  # fmt: skip
_GEMMA4_FAMILY = Family(
    name="gemma4_text",
    architecture="Gemma4ForCausalLM",
    model_names="Gemma 4 (text)",
    bundled_drafters=("gemma4_assistant",),
    third_party_head_methods=("dflash", "dspark"),
    build_layers=_gemma4_layers,
    defaults={
        **_DEFAULT_FIELDS,
        "sliding_window": 512,
        "max_position_embeddings": 131072,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
    },
    activation_field="hidden_activation",
    has_scaled_embedding=True,
    has_logit_soft_cap=True,
    has_local_rope=True,
    module_names={
        "shared_expert": "mlp",
        "experts": "experts",
        "router": "router.proj",
        "router.scales": "router.per_expert_scale",
        "router_norm.weight": "router.scale",
        "experts_norm": "pre_feedforward_layernorm_2",
        "experts_output_norm": "post_feedforward_layernorm_2",
        "shared_output_norm": "post_feedforward_layernorm_1",
    },
    gguf=GgufFormat(
        architectures=("gemma4",),
        read_extra_fields=_gemma4_gguf_fields,
        metadata_keys=METADATA_KEYS,
        module_names={"shared_expert": ""},
        has_rope=False,
        allows_different_layer_sizes=True,
    ),
)
FAMILIES = (
    _GEMMA4_FAMILY,
    replace(
        _GEMMA4_FAMILY,
        name="gemma4_unified_text",
        architecture="Gemma4UnifiedForCausalLM",
        model_names="Gemma 4 unified (text)",
        defaults={**_DEFAULT_FIELDS, "sliding_window": 1024, "max_position_embeddings": 262144, "hidden_size_per_layer_input": 0},
        gguf=None,
        gguf_family="gemma4_text",
    ),
)
