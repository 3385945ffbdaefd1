"""What the layers of a network are made of: a mixer, an MLP, and norms that join them to the residual stream."""

from dataclasses import dataclass, replace
from enum import Enum

from paceline.models.rope_config import RopeConfig


class Activation(Enum):
    """What is applied to the gate of an MLP."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"


@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """gpt-oss' activation of an MLP: (up + 1) * gate * sigmoid(slope * gate), gate at most `limit`, up between -limit and limit."""

    slope: float
    limit: float


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
        has_sinks: every row also sees one key without a value for each query head, whose score is a weight.
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
    has_sinks: bool = False
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
    activation: Activation | ClampedSwiGLU = Activation.SILU
    bias: bool = False


class Scoring(Enum):
    """What makes scores of a router's logits."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How a row chooses its experts: those with the highest scores, of equal ones the first. Their outputs are added up with weights.

    Attributes:
        bias: on the router.
        is_normalized: the weights are the scores divided by their sum and `least`; else the scores themselves.
        factor: on all weights.
        num_groups, chosen_groups: only the experts of the groups with the largest sums of their two best scores can be chosen.
        is_corrected: a vector is added to scores where they are compared, and not to weights.
        has_scales: the weights of each expert are multiplied by a number of its own.

    Source: Shazeer et al. 2017, section 2.1; groups and correction: DeepSeek-V3 (2024), section 2.1.2.
    """

    num_experts: int
    num_chosen: int
    scoring: Scoring = Scoring.SOFTMAX
    bias: bool = False
    is_normalized: bool = True
    least: float = 0.0
    factor: float = 1.0
    num_groups: int = 1
    chosen_groups: int = 1
    is_corrected: bool = False
    has_scales: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMLP:
    """A mixture of experts.

    Attributes:
        expert: each of them.
        shared: one that every row runs through as well; None = there is none.
        gates_shared: its output is multiplied by the sigmoid of a product with the row.
        has_own_norms: experts and shared one have a norm behind them each; router and experts take the stream, each behind a norm.
        router_scale: what the router's rows are multiplied by then.
    """

    routing: Routing
    expert: DenseMLP
    shared: DenseMLP | None = None
    gates_shared: bool = False
    has_own_norms: bool = False
    router_scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInput:
    """x + norm(project(activation(gate(x)) * input)), behind the MLP; every layer has an input of `size` values a row of its own."""

    size: int
    activation: Activation | ClampedSwiGLU


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """One layer. Layers that are alike share one object.

    Attributes:
        residual_scale: what the mixer and the MLP add to the residual stream is multiplied by.
        input: what it takes in besides the stream; None = nothing.
        scales_output: the stream behind it is multiplied by a weight of one value.
    """

    mixer: AttentionConfig
    mlp: DenseMLP | ExpertMLP
    norm_order: NormOrder = NormOrder.PRE
    residual_scale: float = 1.0
    input: LayerInput | None = None
    scales_output: bool = False
