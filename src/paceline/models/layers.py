"""The parts of a network's layers: a mixer, an MLP, and the norms that join them to the residual stream."""

from dataclasses import dataclass, replace
from enum import Enum

from paceline.models.rope_config import RopeConfig


class Activation(Enum):
    """Activation of an MLP's gate."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    SIGMOID = "sigmoid"
    RELU = "relu"
    NONE = "none"  # identity


@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """gpt-oss's activation: (up + 1) * gate * sigmoid(slope * gate), with gate <= limit and -limit <= up <= limit."""

    slope: float
    limit: float


class QKNorm(Enum):
    """How queries and keys are normalised before the rotation."""

    NONE = "none"
    HEAD = "head"  # each head separately
    WIDTH = "width"  # over all heads


class NormOrder(Enum):
    """Position of a layer's norms relative to its mixer and its MLP."""

    PRE = "pre"  # x + part(norm(x))
    POST = "post"  # x + norm(part(x))
    SANDWICH = "sandwich"  # x + norm(part(norm(x)))

    @property
    def has_input_norm(self) -> bool:
        """Return whether the input of a mixer or an MLP is normalised."""
        return self is not NormOrder.POST

    @property
    def has_output_norm(self) -> bool:
        """Return whether the output of a mixer or an MLP is normalised before it is added to the residual stream."""
        return self is not NormOrder.PRE


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Softmax attention with H = `num_heads` query heads over K = `num_kv_heads` key and value heads of D = `head_size` values.

    Attributes:
        rope: rotary settings of queries.
        rotates: rotary embeddings are applied; False = no positional encoding (NoPE).
        scale: factor of scores.
        window: number of positions that a row attends to, its own included; None = all.
        soft_cap: scores become cap * tanh(score / cap); None = unchanged.
        bias: of q, k and v.
        output_bias: of o.
        has_sinks: each query head has a learned sink logit in the softmax.
        has_value_norm: each head of the values is normalised, without a weight.
        has_keys_as_values: values are the projected keys, before norm and rotation; there is no v projection.
        is_gated: the output before o is multiplied by the sigmoid of another projection of the input.
        kv_layer: the layer whose keys and values are read; None = its own.
        value_scale: factor of values.
        is_causal: attention is causal even where a pass has a mask, which then applies to other layers.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    rope: RopeConfig
    scale: float
    has_rope_embedding: bool = True
    window: int | None = None
    soft_cap: float | None = None
    bias: bool = False
    output_bias: bool = False
    qk_norm: QKNorm = QKNorm.NONE
    has_sinks: bool = False
    has_value_norm: bool = False
    has_keys_as_values: bool = False
    is_gated: bool = False
    kv_layer: int | None = None
    value_scale: float = 1.0
    is_causal: bool = False

    @property
    def key_rope(self) -> RopeConfig:
        """Return the rotary settings of keys: those of queries without the attention temperature."""
        return self.rope if self.rope.temperature == 0.0 else replace(self.rope, temperature=0.0, temperature_length=0)

    @property
    def query_size(self) -> int:
        """Return the width of all query heads."""
        return self.num_heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Return the width of all key heads, and of all value heads."""
        return self.num_kv_heads * self.head_size


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentStateShape:
    """A recurrent state of `heads` matrices [rows, columns], and `key_heads` heads of keys and queries, which heads share in groups."""

    heads: int
    rows: int
    columns: int
    key_heads: int

    @property
    def key_width(self) -> int:
        """Return the width of all keys of a row, and of all queries."""
        return self.key_heads * self.rows

    @property
    def value_width(self) -> int:
        """Return the width of all values of a row."""
        return self.heads * self.columns


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaConfig:
    """A gated delta net after a short convolution of queries, keys and values, concatenated in this order.

    Value head j has a state S [key_size, value_size] and uses key head j // (value heads / key heads). q and k are L2-normalised, and q is
    divided by sqrt(key_size). With g = exp(decay * softplus(a + bias)) and beta = sigmoid(b), a row computes
    S' = g S + k (beta (v - g S^T k))^T and outputs S'^T q.

    Attributes:
        kernel_size: rows in the convolution, its own included.

    Source: Yang et al. 2024, "Gated Delta Networks", section 3.
    """

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    kernel_size: int

    @property
    def state(self) -> RecurrentStateShape:
        return RecurrentStateShape(heads=self.num_value_heads, rows=self.key_size, columns=self.value_size, key_heads=self.num_key_heads)

    @property
    def channels(self) -> int:
        """Return the number of channels of the convolution: queries, keys and values."""
        return 2 * self.state.key_width + self.state.value_width


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Config:
    """A Mamba-2 mixer after a short convolution of x, B and C, concatenated in this order.

    Each head has a state S [state_size, head_size] and uses B and C of its group. With dt = softplus(dt + bias), clamped to `dt_limits`, a
    row computes S' = exp(decay * dt) S + B (dt x)^T and outputs S'^T C + skip x.

    Attributes:
        kernel_size: as in `GatedDeltaConfig`.
        conv_bias: of the convolution.
        bias: of the projections.
        norm_groups: groups of the output that are normalised separately, after the gate.

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
    def state(self) -> RecurrentStateShape:
        return RecurrentStateShape(heads=self.num_heads, rows=self.state_size, columns=self.head_size, key_heads=self.num_groups)

    @property
    def channels(self) -> int:
        """Return the number of channels of the convolution: x, B and C."""
        return self.state.value_width + 2 * self.state.key_width


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvConfig:
    """A gated short convolution: out(c * convolution(b * x)), where b, c and x are projections of the same row.

    Attributes:
        channels: of the convolution; equal to the hidden size.
        kernel_size: as in `GatedDeltaConfig`.
        bias: of the convolution and of the projections.

    Source: LFM2's model in transformers 5.23.
    """

    channels: int
    kernel_size: int
    bias: bool = False

    @property
    def state(self) -> RecurrentStateShape | None:
        """Return None: the mixer has no state but the last inputs of the convolution."""
        return None


Recurrent = GatedDeltaConfig | Mamba2Config | ShortConvConfig
"""Mixers with a state of fixed size: the last inputs of the convolution, and matrices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseMLP:
    """down(activation(gate(x)) * up(x)).

    Attributes:
        has_gate: False = down(activation(up(x)) * up(x)); with ReLU that is squared ReLU.
    """

    intermediate_size: int
    activation: Activation | ClampedSwiGLU = Activation.SILU
    bias: bool = False
    has_gate: bool = True


class RouterScoring(Enum):
    """How router logits become scores."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRouting:
    """How a token selects experts: those with the highest scores, the first of equal ones. Their weighted outputs are added.

    Attributes:
        bias: of the router.
        is_normalized: weights are scores / (sum of scores + `epsilon`); otherwise the scores.
        factor: of all weights.
        num_groups, chosen_groups: only experts of the `chosen_groups` groups with the largest sum of their two best scores are candidates.
        has_correction_bias: a correction bias is added to scores for selection, but not to weights.
        has_scales: each expert has a factor of its own for its weights.

    Source: Shazeer et al. 2017, section 2.1; groups and correction: DeepSeek-V3 (2024), section 2.1.2.
    """

    num_experts: int
    num_experts_per_token: int
    scoring: RouterScoring = RouterScoring.SOFTMAX
    bias: bool = False
    is_normalized: bool = True
    epsilon: float = 0.0
    factor: float = 1.0
    num_groups: int = 1
    chosen_groups: int = 1
    has_correction_bias: bool = False
    has_scales: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMLP:
    """A mixture of experts.

    Attributes:
        expert: the MLP of each expert.
        shared: an MLP for every token in addition; None = there is none.
        has_shared_gate: its output is multiplied by the sigmoid of a product with the input.
        has_own_norms: router, experts and shared MLP read the residual stream through norms of their own, and outputs are normalised
            (Gemma 4).
        router_scale: factor of the router's input if `has_own_norms`.
        latent_size: experts compute in this width, with a projection before and one after them; 0 = the hidden size.
    """

    routing: ExpertRouting
    expert: DenseMLP
    shared: DenseMLP | None = None
    has_shared_gate: bool = False
    has_own_norms: bool = False
    router_scale: float = 1.0
    latent_size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PerLayerInput:
    """x + norm(project(activation(gate(x)) * input)), after the MLP. Every layer has an input of `size` values for each token."""

    size: int
    activation: Activation | ClampedSwiGLU


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """One layer. Equal layers share one object.

    Attributes:
        mixer, mlp: one of them may be None, and has no norm then.
        residual_scale: factor of what mixer and MLP add to the residual stream.
        input: the per-layer input; None = there is none.
        has_output_scale: the residual stream after the layer is multiplied by a learned scalar.
    """

    mixer: AttentionConfig | Recurrent | None
    mlp: DenseMLP | ExpertMLP | None
    norm_order: NormOrder = NormOrder.PRE
    residual_scale: float = 1.0
    input: PerLayerInput | None = None
    has_output_scale: bool = False

    @property
    def attention(self) -> AttentionConfig:
        """Return the mixer of an attention layer.

        Raises:
            TypeError: The mixer is another.
        """
        if not isinstance(self.mixer, AttentionConfig):
            raise TypeError(f"the layer's mixer is a {type(self.mixer).__name__}")
        return self.mixer
