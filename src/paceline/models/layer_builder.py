"""Build layers with the sizes in a config.json."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.errors import CheckpointError, shortened
from paceline.models.json_fields import JsonFields
from paceline.models.layers import Activation, AttentionConfig, DenseMLP, ExpertMLP, ExpertRouting, LayerConfig, NormOrder, QKNorm
from paceline.models.rope_config import RopeConfig, RopeType, read_rope

if TYPE_CHECKING:
    from paceline.models.families.family import Family

MAX_LAYERS = 4096
MAX_HEAD_SIZE = 8192
MAX_EXPERTS = 1024
"""Limit of kernels/experts.c."""
NUM_EXPERTS_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of the number of experts in config.json."""
ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}
"""Activations of gated MLPs by their names in config.json."""
_UNGATED_ACTIVATIONS = {"relu2": Activation.RELU}
"""Those of MLPs without a gate."""


class LayerBuilder:
    """Builds layers for a family's `layers` function. Fields that no family changes are read here.

    Attributes:
        num_heads, num_kv_heads, head_size: of attention.
        rope: rotary settings of layers with full attention.
        local_rope: rotary settings of layers with a sliding window.
        max_positions: longest supported text.

    Raises:
        CheckpointError: A value is missing or out of range. So do the methods.
    """

    def __init__(self, fields: JsonFields, family: "Family") -> None:
        self.fields, self.family = fields, family
        count = family.count_layers  # the number of layers is checked before anything is built per layer
        self.num_layers = fields.size("num_hidden_layers", most=MAX_LAYERS) if count is None else count(fields)
        self.num_heads, self.num_kv_heads, self.head_size = _read_head_counts(fields)
        self.rope = self.local_rope = read_rope(fields, family, head_size=self.head_size)
        if family.has_local_rope:
            self.local_rope = read_rope(fields, family, head_size=self.head_size, layer_type="sliding_attention")
        self.max_positions = _read_max_positions(fields, self.rope)

    def flag(self, name: str) -> bool:
        """Return a boolean field of config.json; False if absent."""
        return self.fields.flag(name, default=False)

    def soft_cap(self, name: str) -> float | None:
        return None if self.fields.values.get(name) is None else self.fields.positive(name)

    def attention(
        self,
        *,
        bias: bool = False,
        output_bias: bool = False,
        qk_norm: QKNorm = QKNorm.NONE,
        scale: float | None = None,
        soft_cap: float | None = None,
        has_sinks: bool = False,
    ) -> AttentionConfig:
        """Return full attention.

        Args:
            scale: of scores; None = 1 / sqrt(head size).
        """
        return AttentionConfig(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            rope=self.rope,
            scale=float(self.head_size**-0.5) if scale is None else scale,
            soft_cap=soft_cap,
            bias=bias,
            output_bias=output_bias,
            qk_norm=qk_norm,
            has_sinks=has_sinks,
        )

    def mlp(self, *, bias: bool = False, size: str = "intermediate_size", has_gate: bool = True) -> DenseMLP:
        """Return an MLP whose width is the field `size`."""
        field, known = self.family.activation_field, ACTIVATIONS if has_gate else _UNGATED_ACTIVATIONS
        name = self.fields.values.get(field, "silu")
        activation = known.get(str(name))
        if activation is None:
            verb = "are" if len(known) > 1 else "is"
            raise CheckpointError(
                f"{self.fields.path}: {field} = {shortened(name)} is not supported, only {', '.join(map(repr, known))} {verb}"
            )
        if not has_gate and self.flag("mlp_bias"):
            raise CheckpointError(f"{self.fields.path}: mlp_bias = true is not supported for {self.family.name}, only false is")
        return DenseMLP(intermediate_size=self.fields.size(size), activation=activation, bias=bias, has_gate=has_gate)

    def routing(self, *, chosen: Sequence[str] = ("num_experts_per_tok",)) -> ExpertRouting:
        """Return the routing of experts. `norm_topk_prob` decides whether weights are normalised.

        Args:
            chosen: possible names of the field with the number of experts for a token.
        """
        fields = self.fields
        names = [name for name in NUM_EXPERTS_KEYS if fields.values.get(name) is not None]
        num_experts = fields.size(names[0] if names else "num_experts", most=MAX_EXPERTS)
        name = next((name for name in chosen if fields.values.get(name) is not None), chosen[0])
        num_experts_per_token = fields.size(name)
        if num_experts_per_token > num_experts:
            raise CheckpointError(f"{fields.path}: {name} = {num_experts_per_token}, but there are only {num_experts} experts")
        return ExpertRouting(
            num_experts=num_experts, num_experts_per_token=num_experts_per_token, is_normalized=self.flag("norm_topk_prob")
        )

    def layers(
        self,
        attention: AttentionConfig,
        mlp: DenseMLP | ExpertMLP | Sequence[DenseMLP | ExpertMLP],
        *,
        norm_order: NormOrder = NormOrder.PRE,
        is_sliding: Sequence[bool] = (),
    ) -> tuple[LayerConfig, ...]:
        """Return layers that differ only in their MLP and in whether they have a sliding window.

        Args:
            mlp: of all layers, or of each.
            slides: for each layer whether it has a sliding window; empty = none has. A window as long as the context is left out.
        """
        window = self.fields.size("sliding_window") if any(is_sliding) and self.fields.values.get("sliding_window") is not None else None
        if window is not None and window >= self.max_positions:
            window = None
        local = replace(attention, window=window, rope=self.local_rope)
        mixers = [local if is_sliding and is_sliding[layer] else attention for layer in range(self.num_layers)]
        mlps = mlp if isinstance(mlp, Sequence) else [mlp] * self.num_layers
        known: dict[LayerConfig, LayerConfig] = {}
        found = (LayerConfig(mixer=mixer, mlp=own, norm_order=norm_order) for mixer, own in zip(mixers, mlps, strict=True))
        return tuple(known.setdefault(layer, layer) for layer in found)

    def sliding_layers(self, pattern: int | None = None) -> list[bool]:
        """Return whether each layer has a sliding window: as `layer_types` lists them, or all but every `pattern`-th.

        Args:
            pattern: None = `sliding_window_pattern`.
        """
        fields, types = self.fields, self.fields.values.get("layer_types")
        if types is None:
            pattern = pattern or fields.size("sliding_window_pattern")
            return [(layer + 1) % pattern > 0 for layer in range(self.num_layers)]
        known = {"sliding_attention", "full_attention"}
        if not isinstance(types, list) or len(types) != self.num_layers or not set(map(str, types)) <= known:
            raise CheckpointError(
                f"{fields.path}: layer_types = {shortened(types)}, "
                f"expected sliding_attention or full_attention for {self.num_layers} layers"
            )
        return [kind == "sliding_attention" for kind in types]

    def layers_with_rope(self) -> list[bool]:
        """Return whether each layer has rotary embeddings: 1 in `no_rope_layers`, or all but every `no_rope_layer_interval`-th."""
        fields, marks = self.fields, self.fields.values.get("no_rope_layers")
        if marks is None:
            interval = fields.size("no_rope_layer_interval", 4)
            return [(layer + 1) % interval > 0 for layer in range(self.num_layers)]
        if not isinstance(marks, list) or len(marks) < self.num_layers or any(mark not in (0, 1) for mark in marks):
            raise CheckpointError(f"{fields.path}: no_rope_layers = {shortened(marks)}, expected 0 or 1 for {self.num_layers} layers")
        return [mark == 1 for mark in marks[: self.num_layers]]


def _read_head_counts(fields: JsonFields) -> tuple[int, int, int]:
    """Return the number of query heads and of key heads, and the head size."""
    num_heads, hidden_size = fields.size("num_attention_heads"), fields.size("hidden_size")
    num_kv_heads = fields.size("num_key_value_heads", num_heads, null=num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"{fields.path}: num_attention_heads = {num_heads} must be a multiple of num_key_value_heads = {num_kv_heads}"
        )
    if fields.values.get("head_dim") is None and hidden_size % num_heads:
        raise CheckpointError(
            f"{fields.path}: no head_dim, and hidden_size = {hidden_size} is no multiple of num_attention_heads = {num_heads}"
        )
    head_size = fields.size("head_dim", hidden_size // num_heads, null=hidden_size // num_heads, most=MAX_HEAD_SIZE)
    if head_size % 2:
        raise CheckpointError(f"{fields.path}: head_dim = {head_size}; rotary embeddings need an even one")
    return num_heads, num_kv_heads, head_size


def _read_max_positions(fields: JsonFields, rope: RopeConfig) -> int:
    max_positions = fields.size("max_position_embeddings")
    if rope.type is not RopeType.DYNAMIC:
        return max_positions
    longest = max_positions * rope.factor
    if not 1 <= longest < 2**31:
        raise CheckpointError(
            f"{fields.path}: max_position_embeddings = {max_positions} times the rope factor {rope.factor} are {longest:g} positions, "
            f"expected 1 to {2**31 - 1}"
        )
    return int(longest)
