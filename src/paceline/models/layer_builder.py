"""Build `LayerConfig` objects from the fields of a config.json."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from paceline.errors import CheckpointError, shortened
from paceline.models.json_fields import JsonFields
from paceline.models.layers import (
    Activation,
    AttentionConfig,
    DenseMLP,
    ExpertMLP,
    ExpertRouting,
    LayerConfig,
    share_equal_layers,
)
from paceline.models.rope_config import RopeConfig, RopeType, read_rope

if TYPE_CHECKING:
    from paceline.models.families.family import Family

MAX_LAYERS = 4096
MAX_HEAD_SIZE = 8192
"""Limit of the values in a head. `check_rope` in config.py checks it for attention."""
MAX_EXPERTS = 1024
"""The limit of the kernel in kernels/experts.c."""
NUM_EXPERTS_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of the config.json field for the number of experts."""
ACTIVATIONS = {"silu": Activation.SILU, "swish": Activation.SILU, "gelu_pytorch_tanh": Activation.GELU_TANH}
"""Activations of gated MLPs by their names in config.json."""
_UNGATED_ACTIVATIONS = {"relu2": Activation.RELU}
"""Activations of MLPs without a gate projection, by their names in config.json."""


class LayerBuilder:
    """Builds the layers of a model. `Family.build_layers` calls its methods with the options of the family.

    Attributes:
        num_heads, num_kv_heads, head_size: sizes of attention, as in `AttentionConfig`.
        rope: rotary settings of layers with full attention.
        local_rope: rotary settings of layers with a sliding window.
        max_positions: number of tokens of the longest supported text.

    Raises:
        CheckpointError: A value is missing or out of range. The methods raise it too.
    """

    def __init__(self, fields: JsonFields, family: "Family") -> None:
        self.fields, self.family = fields, family
        count = family.count_layers
        self.num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS) if count is None else count(fields)
        self.num_heads, self.num_kv_heads, self.head_size = _read_head_counts(fields)
        self.rope = self.local_rope = read_rope(fields, family, head_size=self.head_size)
        if family.has_local_rope:
            self.local_rope = read_rope(fields, family, head_size=self.head_size, layer_type="sliding_attention")
        self.max_positions = _read_max_positions(fields, self.rope)

    def flag(self, name: str) -> bool:
        """Return a boolean field of config.json; False if absent."""
        return self.fields.flag(name, default=False)

    def layer_values(self, name: str, is_valid: Callable[[Any], bool], expected: str) -> list[Any] | None:
        """Return the list in a field that has a value for each layer; None if the field is absent.

        Args:
            is_valid: returns whether a value is allowed.
            expected: which values are allowed, for errors.
        """
        values, count = self.fields.values.get(name), self.num_layers
        if values is not None and not (isinstance(values, list) and len(values) == count and all(map(is_valid, values))):
            raise CheckpointError(f"{self.fields.path}: {name} = {shortened(values)}, expected {expected} for each of {count} layers")
        return values

    def soft_cap(self, name: str) -> float | None:
        return None if self.fields.values.get(name) is None else self.fields.positive_number(name)

    def attention(self, *, bias: bool = False, output_bias: bool | None = None, **settings: Any) -> AttentionConfig:
        """Return the settings of full attention, with the sizes in config.json and a scale of 1 / sqrt(head size).

        Args:
            output_bias: the o projection has a bias; None = same as `bias`.
            settings: further settings of `AttentionConfig`, which take precedence.
        """
        usual = {
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_size": self.head_size,
            "rope": self.rope,
            "scale": float(self.head_size**-0.5),
        }
        return AttentionConfig(bias=bias, output_bias=bias if output_bias is None else output_bias, **{**usual, **settings})

    def mlp(
        self,
        *,
        bias: bool = False,
        width: int | None = None,
        width_field: str = "intermediate_size",
        has_gate: bool = True,
        activations: Mapping[str, Activation] | None = None,
    ) -> DenseMLP:
        """Return a dense MLP.

        Args:
            width: number of hidden values; None = the value of the config.json field that `width_field` names.
            activations: supported activations by their names in config.json; None = those that most families support.
        """
        field, known = self.family.activation_field, activations or (ACTIVATIONS if has_gate else _UNGATED_ACTIVATIONS)
        name = self.fields.values.get(field, "silu")
        activation = known.get(str(name))
        if activation is None:
            verb = "are" if len(known) > 1 else "is"
            raise CheckpointError(
                f"{self.fields.path}: {field} = {shortened(name)} is not supported, only {', '.join(map(repr, known))} {verb}"
            )
        if not has_gate and not bias and self.flag("mlp_bias"):
            raise CheckpointError(f"{self.fields.path}: mlp_bias = true is not supported for {self.family.name}, only false is")
        size = self.fields.integer(width_field) if width is None else width
        return DenseMLP(intermediate_size=size, activation=activation, bias=bias, has_gate=has_gate)

    def routing(self, *, count_fields: Sequence[str] = ("num_experts_per_tok",)) -> ExpertRouting:
        """Return the routing of experts. `norm_topk_prob` decides whether weights are normalised.

        Args:
            count_fields: possible names of the config.json field for the number of experts that a token uses.
        """
        fields = self.fields
        names = [name for name in NUM_EXPERTS_KEYS if fields.values.get(name) is not None]
        num_experts = fields.integer(names[0] if names else "num_experts", maximum=MAX_EXPERTS)
        name = next((name for name in count_fields if fields.values.get(name) is not None), count_fields[0])
        num_experts_per_token = fields.integer(name)
        if num_experts_per_token > num_experts:
            raise CheckpointError(f"{fields.path}: {name} = {num_experts_per_token}, but there are only {num_experts} experts")
        return ExpertRouting(
            num_experts=num_experts, num_experts_per_token=num_experts_per_token, has_normalized_weights=self.flag("norm_topk_prob")
        )

    def layers(
        self,
        attention: AttentionConfig,
        mlp: DenseMLP | ExpertMLP | Sequence[DenseMLP | ExpertMLP],
        *,
        is_sliding: Sequence[bool] = (),
        has_rope: Sequence[bool] = (),
        **settings: Any,
    ) -> tuple[LayerConfig, ...]:
        """Return layers that differ only in their MLP, and in whether they have a sliding window and rotary embeddings.

        Args:
            mlp: MLP of all layers, or a list with the MLP of each layer.
            is_sliding: for each layer whether it has a sliding window; empty = no layer has one. A window that is not shorter than the
                longest supported text is ignored.
            has_rope: for each layer whether it has rotary embeddings; empty = as in `attention`.
            settings: further settings of `LayerConfig`, equal in all layers.
        """
        sliding_attention = self.sliding_attention(attention) if any(is_sliding) else attention
        mixers = [sliding_attention if is_sliding and is_sliding[layer] else attention for layer in range(self.num_layers)]
        if has_rope:
            mixers = [replace(mixer, has_rope_embedding=rotates) for mixer, rotates in zip(mixers, has_rope, strict=True)]
        mlps = mlp if isinstance(mlp, Sequence) else [mlp] * self.num_layers
        return share_equal_layers(LayerConfig(mixer=mixer, mlp=own, **settings) for mixer, own in zip(mixers, mlps, strict=True))

    def sliding_attention(self, attention: AttentionConfig) -> AttentionConfig:
        """Return the same attention with the window `sliding_window` and the rotary settings of layers with a window."""
        window = self.fields.integer("sliding_window") if self.fields.values.get("sliding_window") is not None else None
        return replace(attention, window=None if window is None or window >= self.max_positions else window, rope=self.local_rope)

    def require_rope_parameters(self) -> None:
        """Refuse a config.json without rotary settings, for families that have no default settings."""
        if not any(self.fields.values.get(name) for name in ("rope_parameters", "rope_scaling")):
            raise CheckpointError(f"{self.fields.path} has no 'rope_parameters', which a model of family {self.family.name} needs")

    def sliding_layers(self, full_attention_interval: int | None = None, *, first_full_layer: int | None = None) -> list[bool]:
        """Return for each layer whether it has a sliding window, from the field `layer_types`.

        Args:
            full_attention_interval: without `layer_types`, one layer in every so many has full attention; None = `sliding_window_pattern`.
            first_full_layer: index of the first layer with full attention; None = `full_attention_interval` - 1.
        """
        known = ("sliding_attention", "full_attention")
        types = self.layer_values("layer_types", lambda kind: kind in known, " or ".join(known))
        if types is None:
            full_attention_interval = full_attention_interval or self.fields.integer("sliding_window_pattern")
            first = full_attention_interval - 1 if first_full_layer is None else first_full_layer
            return [(layer - first) % full_attention_interval > 0 for layer in range(self.num_layers)]
        return [kind == "sliding_attention" for kind in types]

    def layers_with_rope(self) -> list[bool]:
        """Return for each layer whether it has rotary embeddings, from `no_rope_layers` or, without it, `no_rope_layer_interval`."""
        fields, flags = self.fields, self.fields.values.get("no_rope_layers")
        if flags is None:
            interval = fields.integer("no_rope_layer_interval", 4)
            return [(layer + 1) % interval > 0 for layer in range(self.num_layers)]
        if not isinstance(flags, list) or len(flags) < self.num_layers or any(flag not in (0, 1) for flag in flags):
            raise CheckpointError(f"{fields.path}: no_rope_layers = {shortened(flags)}, expected 0 or 1 for {self.num_layers} layers")
        return [flag == 1 for flag in flags[: self.num_layers]]  # despite the field's name, 1 = the layer has rotary embeddings


def _read_head_counts(fields: JsonFields) -> tuple[int, int, int]:
    """Return the number of query heads, the number of KV heads, and the head size."""
    num_heads, hidden_size = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads, null=num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"{fields.path}: num_attention_heads = {num_heads} must be a multiple of num_key_value_heads = {num_kv_heads}"
        )
    if fields.values.get("head_dim") is None and hidden_size % num_heads:
        raise CheckpointError(
            f"{fields.path}: no head_dim, and hidden_size = {hidden_size} is not a multiple of num_attention_heads = {num_heads}"
        )
    head_size = fields.integer("head_dim", hidden_size // num_heads, null=hidden_size // num_heads)
    if head_size % 2:
        raise CheckpointError(f"{fields.path}: head_dim = {head_size}; rotary embeddings need an even one")
    return num_heads, num_kv_heads, head_size


def _read_max_positions(fields: JsonFields, rope: RopeConfig) -> int:
    max_positions = fields.integer("max_position_embeddings")
    if rope.type is not RopeType.DYNAMIC:
        return max_positions
    longest = max_positions * rope.factor
    if not 1 <= longest < 2**31:
        raise CheckpointError(
            f"{fields.path}: max_position_embeddings = {max_positions} times the rope factor {rope.factor} are {longest:g} positions, "
            f"expected 1 to {2**31 - 1}"
        )
    return int(longest)
