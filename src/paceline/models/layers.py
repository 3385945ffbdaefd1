"""What the layers of a network are made of: a mixer, an MLP, and norms that join them to the residual stream."""

from dataclasses import dataclass, replace
from enum import Enum

from paceline.models.rope_config import RopeConfig


class Activation(Enum):
    """What is applied to the gate of an MLP."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    SIGMOID = "sigmoid"
    RELU = "relu"
    NONE = "none"  # the gate itself


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
        is_gated: what goes to o is multiplied by the sigmoid of another projection of the same rows.
        kv_layer: the layer whose keys and values are read; None = its own, which it writes.
        value_scale: what values are multiplied by.
        is_causal: rows attend causally even where a pass has a mask, which then counts in other layers alone.
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
    is_gated: bool = False
    kv_layer: int | None = None
    value_scale: float = 1.0
    is_causal: bool = False

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
class StateSizes:
    """A recurrent state of `heads` matrices [rows, columns]; `key_heads` of them have keys and queries of their own, the others share."""

    heads: int
    rows: int
    columns: int
    key_heads: int

    @property
    def key_width(self) -> int:
        """Values of all keys of a row of a pass, and of all queries."""
        return self.key_heads * self.rows

    @property
    def value_width(self) -> int:
        """Values of all values of a row."""
        return self.heads * self.columns


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaConfig:
    """A gated delta rule behind a short convolution of queries, keys and values, which stand side by side in this order.

    Each value head j has a state S [key_size, value_size] and uses key head j // (value heads / key heads). With q and k divided by
    their norms, q by the root of `key_size` too, decay g = exp(decay * softplus(a + bias)) and beta = sigmoid(b), a row makes of it
    S' = g S + k (beta (v - g S^T k))^T and gives S'^T q.

    Attributes:
        kernel_size: rows that the convolution sees, its own included.

    Source: Yang et al. 2024, "Gated Delta Networks", section 3.
    """

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    kernel_size: int

    @property
    def state(self) -> StateSizes:
        return StateSizes(heads=self.num_value_heads, rows=self.key_size, columns=self.value_size, key_heads=self.num_key_heads)

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return 2 * self.state.key_width + self.state.value_width


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Config:
    """A Mamba-2 mixer behind a short convolution of x, B and C, which stand side by side in this order.

    Each head has a state S [state_size, head_size] and uses the B and C of its group. With dt = softplus(dt + bias), at least and at
    most `dt_limits`, a row makes of it S' = exp(decay * dt) S + B (dt x)^T and gives S'^T C + skip x.

    Attributes:
        kernel_size: as in `GatedDeltaConfig`.
        conv_bias: on the convolution.
        bias: on the projections.
        norm_groups: parts of a row's output that are normed by themselves, behind the gate.

    Source: Dao and Gu 2024, "Transformers are SSMs", section 7.
    """

    num_heads: int
    head_size: int
    num_groups: int
    state_size: int
    kernel_size: int
    norm_groups: int = 1
    conv_bias: bool = True
    bias: bool = False
    dt_limits: tuple[float, float] = (0.0, float("inf"))

    @property
    def state(self) -> StateSizes:
        return StateSizes(heads=self.num_heads, rows=self.state_size, columns=self.head_size, key_heads=self.num_groups)

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return self.state.value_width + 2 * self.state.key_width


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvConfig:
    """out(c * convolution(b * x)), with b, c and x projections of the same row; nothing is activated.

    Attributes:
        channels: of the convolution; as many as a row of the stream has values.
        kernel_size: as in `GatedDeltaConfig`.
        bias: on the convolution and on the projections.

    Source: LFM2's model in transformers 5.23.
    """

    channels: int
    kernel_size: int
    bias: bool = False

    @property
    def state(self) -> StateSizes | None:
        """There is none but what the convolution sees."""
        return None


Recurrent = GatedDeltaConfig | Mamba2Config | ShortConvConfig
"""Mixers that keep a state of a fixed size for a text, whatever its length: a layer's last inputs of its convolution, and its matrices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseMLP:
    """down(activation(gate(x)) * up(x)).

    Attributes:
        has_gate: without, up takes the gate's place too: of ReLU that is its square.
    """

    intermediate_size: int
    activation: Activation | ClampedSwiGLU = Activation.SILU
    bias: bool = False
    has_gate: bool = True


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
        latent_size: experts compute in rows of so many values, with a projection in front of them and one behind them; 0 = in the stream's.
    """

    routing: Routing
    expert: DenseMLP
    shared: DenseMLP | None = None
    gates_shared: bool = False
    has_own_norms: bool = False
    router_scale: float = 1.0
    latent_size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInput:
    """x + norm(project(activation(gate(x)) * input)), behind the MLP; every layer has an input of `size` values a row of its own."""

    size: int
    activation: Activation | ClampedSwiGLU


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """One layer. Layers that are alike share one object.

    Attributes:
        mixer, mlp: one of them may be absent, with its norm.
        residual_scale: what the mixer and the MLP add to the residual stream is multiplied by.
        input: what it takes in besides the stream; None = nothing.
        scales_output: the stream behind it is multiplied by a weight of one value.
    """

    mixer: AttentionConfig | Recurrent | None
    mlp: DenseMLP | ExpertMLP | None
    norm_order: NormOrder = NormOrder.PRE
    residual_scale: float = 1.0
    input: LayerInput | None = None
    scales_output: bool = False

    @property
    def attention(self) -> AttentionConfig:
        """The mixer of a layer that is known to have attention.

        Raises:
            TypeError: it has not.
        """
        if not isinstance(self.mixer, AttentionConfig):
            raise TypeError(f"the layer's mixer is a {type(self.mixer).__name__}")
        return self.mixer
