"""What the layers of a network are made of: a mixer, an MLP, and norms that join them to the residual stream."""

from dataclasses import dataclass, replace
from enum import Enum

from paceline.models.rope_config import RopeConfig


class Activation(Enum):
    """What is applied to the gate of an MLP."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"


class QKNorm(Enum):
    """Over which values queries and keys are normed in front of the rotation."""

    NONE = "none"
    HEAD = "head"  # each head by itself
    WIDTH = "width"  # all heads together


class NormOrder(Enum):
    """Where a layer's norms stand around its mixer and around its MLP."""

    PRE = "pre"  # x + part(norm(x))
    POST = "post"  # x + norm(part(x))
    SANDWICH = "sandwich"  # x + norm(part(norm(x)))

    @property
    def in_front(self) -> bool:
        """Whether a part's input is normed."""
        return self is not NormOrder.POST

    @property
    def behind(self) -> bool:
        """Whether a part's output is normed before it is added."""
        return self is not NormOrder.PRE


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Softmax attention with H = `num_heads` query heads over K = `num_kv_heads` key and value heads of D = `head_size` values.

    Attributes:
        rope: of queries.
        rotates: whether queries and keys are turned by `rope`; without, a layer knows no positions.
        scale: what scores are multiplied by.
        window: positions a row sees, its own included; None = all before it.
        soft_cap: scores become cap * tanh(score / cap); None = they stay.
        bias: on q, k and v.
        output_bias: on o.
        norms_values: each head of the values is normed, without a weight.
        keys_are_values: values are the keys as they are projected, neither normed nor turned; there is no projection for them.
        kv_layer: the layer whose keys and values are read; None = its own, which it writes.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    rope: RopeConfig
    scale: float
    rotates: bool = True
    window: int | None = None
    soft_cap: float | None = None
    bias: bool = False
    output_bias: bool = False
    qk_norm: QKNorm = QKNorm.NONE
    norms_values: bool = False
    keys_are_values: bool = False
    kv_layer: int | None = None

    @property
    def key_rope(self) -> RopeConfig:
        """How keys are turned: like queries, without their temperature."""
        return self.rope if self.rope.temperature == 0.0 else replace(self.rope, temperature=0.0, temperature_length=0)

    @property
    def query_size(self) -> int:
        """Values of all queries of a row."""
        return self.num_heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Values of all keys of a row, and of all values."""
        return self.num_kv_heads * self.head_size


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseMLP:
    """down(activation(gate(x)) * up(x))."""

    intermediate_size: int
    activation: Activation = Activation.SILU
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInput:
    """x + norm(project(activation(gate(x)) * input)), behind the MLP; every layer has an input of `size` values a row of its own."""

    size: int
    activation: Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """One layer. Layers that are alike share one object.

    Attributes:
        residual_scale: what the mixer and the MLP add to the residual stream is multiplied by.
        input: what it takes in besides the stream; None = nothing.
        scales_output: the stream behind it is multiplied by a weight of one value.
    """

    mixer: AttentionConfig
    mlp: DenseMLP
    norm_order: NormOrder = NormOrder.PRE
    residual_scale: float = 1.0
    input: LayerInput | None = None
    scales_output: bool = False
