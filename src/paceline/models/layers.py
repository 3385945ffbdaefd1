"""Settings of a decoder layer: a mixer (attention or a recurrent network), an MLP, and where their norms are."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from paceline.models.rope_config import RopeConfig


class Activation(Enum):
    """Activation function of an MLP."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    SIGMOID = "sigmoid"
    RELU = "relu"
    XIELU = "xielu"  # with the learned `XIELU_PARAMETERS`, see `Ops.xielu`
    NONE = "none"  # the identity function


XIELU_PARAMETERS = ("alpha_p", "alpha_n", "beta", "eps")


@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """gpt-oss's activation: (up + 1) * gate * sigmoid(sigmoid_slope * gate), with gate <= limit and -limit <= up <= limit."""

    sigmoid_slope: float
    limit: float


class QKNorm(Enum):
    """How queries and keys are normalised: before the rotary embedding is applied, except with `HEAD_AFTER_ROPE`."""

    NONE = "none"
    HEAD = "head"  # each head is normalised, with the same weights
    HEAD_AFTER_ROPE = "head_after_rope"
    UNWEIGHTED_HEAD = "unweighted_head"  # each head is normalised, without weights
    ALL_HEADS = "all_heads"  # the values of all heads are normalised together


class AttentionGate(Enum):
    """Granularity of the sigmoid gate on an attention layer's output."""

    NONE = "none"
    VALUE = "value"  # one gate for each value of each head
    HEAD = "head"  # one gate for each head


class NormOrder(Enum):
    """Position of a layer's norms relative to its mixer and its MLP."""

    PRE = "pre"  # x + mixer(norm(x))
    PARALLEL = "parallel"  # x + mixer(norm(x)) + mlp(norm(x)), with one norm
    POST = "post"  # x + norm(mixer(x))
    SANDWICH = "sandwich"  # x + norm(mixer(norm(x)))

    @property
    def has_input_norm(self) -> bool:
        return self is not NormOrder.POST

    @property
    def has_output_norm(self) -> bool:
        return self in (NormOrder.POST, NormOrder.SANDWICH)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentProjections:
    """The projections of multi-head latent attention (MLA). The key of a token is [c, r], its value is c, and all heads share them.

    c is the latent: a projection of the layer's input to `rank` values, after an RMS norm. r has `rope_size` rotated values. The
    up-projections of c are absorbed into queries and outputs, which gives the same result. A query is then [k_up q, rotated values], and
    the output of a head is v_up times the weighted sum of the latents.

    Attributes:
        query_rank: rank of the latent that queries are projected from; 0 = queries are projected from the layer's input.
        unrotated_size: number of values in a query head that do not rotate, before k_up (`qk_nope_head_dim`).
        rope_size: number of values in a head that rotate, after the others (`qk_rope_head_dim`).
        value_size: number of values in the output of a head, after v_up (`v_head_dim`).
        norm_eps: epsilon of the norms of both latents.

    Source: DeepSeek-V2 (2024), section 2.1 and appendix C.
    """

    query_rank: int
    unrotated_size: int
    rope_size: int
    value_size: int
    norm_eps: float = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Softmax attention with H = `num_heads` query heads over K = `num_kv_heads` key and value heads of D = `head_size` values.

    Attributes:
        rope: rotary settings of queries. `key_rope` has those of keys.
        scale: attention scores are multiplied by it.
        has_rope_embedding: rotary embeddings are applied; False = no positional encoding (NoPE).
        window: number of positions that a token attends to, its own included; None = all earlier positions.
        soft_cap: scores become cap * tanh(score / cap); None = unchanged.
        bias: the q, k and v projections have a bias.
        output_bias: the o projection has a bias.
        has_sinks: each query head has a learned sink logit in the softmax.
        has_value_norm: each head of the values is normalised, without a weight.
        uses_keys_as_values: values are the projected keys before norm and rotation; there is no v projection.
        gate: how the input of the o projection is multiplied by the sigmoid of another projection of the layer's input.
        kv_source_layer: index of the layer whose KV cache this layer reads; None = its own.
        value_scale: values are multiplied by it.
        is_causal: the layer ignores the mask of a forward pass and attends causally.
        latent: projections of multi-head latent attention, with one key head of D = rank + rope_size values; None = usual projections.
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
    uses_keys_as_values: bool = False
    gate: AttentionGate = AttentionGate.NONE
    kv_source_layer: int | None = None
    value_scale: float = 1.0
    is_causal: bool = False
    latent: LatentProjections | None = None

    @property
    def rotary_head_size(self) -> int:
        """Return the number of values in a head to which rotary embeddings are applied."""
        return self.head_size if self.latent is None else self.latent.rope_size

    @property
    def latent_size(self) -> int:
        """Return how many of a key's first numbers are also its value (MLA); 0 = values are cached separately."""
        return 0 if self.latent is None else self.head_size - self.latent.rope_size

    @property
    def key_rope(self) -> RopeConfig:
        """Return the rotary settings of keys: those of queries without the attention temperature."""
        return replace(self.rope, attention_temperature_scale=0.0, attention_temperature_len=0)

    @property
    def query_size(self) -> int:
        """Return the total size of a token's queries, over all heads."""
        return self.num_heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Return the total size of a token's keys, over all KV heads. Its value vectors have the same total size."""
        return self.num_kv_heads * self.head_size


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentStateShape:
    """Recurrent state: `num_heads` matrices of `rows` x `columns` numbers. Adjacent heads share one of `num_key_heads` keys and queries."""

    num_heads: int
    rows: int
    columns: int
    num_key_heads: int

    @property
    def key_width(self) -> int:
        """Return the total size of a token's keys, over all key heads. Its queries have the same total size."""
        return self.num_key_heads * self.rows

    @property
    def value_width(self) -> int:
        """Return the total size of a token's value vectors, over all heads."""
        return self.num_heads * self.columns


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaConfig:
    """A gated delta net after a short convolution of queries, keys and values, concatenated in this order.

    Value head j has a state S [key_size, value_size] and uses key head j // (value heads / key heads). q and k are L2-normalised, and q is
    divided by sqrt(key_size). With g = exp(decay * softplus(a + dt_bias)) and beta = beta_scale * sigmoid(b), a token updates the state to
    S' = g S + k (beta (v - g S^T k))^T and outputs S'^T q.

    Attributes:
        kernel_size: number of tokens that the convolution spans, the current one included.
        beta_scale: 2 allows negative eigenvalues of the state's transition.
        has_separate_qkv_projections: queries, keys and values have a projection and a convolution each. False = they share both.
        norm_eps: epsilon of the output's norm; None = `ModelConfig.norm_eps`.

    Source: Yang et al. 2024, "Gated Delta Networks", section 3.
    """

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    kernel_size: int
    beta_scale: float = 1.0
    has_separate_qkv_projections: bool = False
    norm_eps: float | None = None

    @property
    def state_shape(self) -> RecurrentStateShape:
        return RecurrentStateShape(
            num_heads=self.num_value_heads, rows=self.key_size, columns=self.value_size, num_key_heads=self.num_key_heads
        )

    @property
    def channels(self) -> int:
        """Return the number of channels of the convolution: queries, keys and values."""
        return 2 * self.state_shape.key_width + self.state_shape.value_width


class GatedNorm(Enum):
    """Position of the norm of a recurrent mixer's output relative to its gate."""

    AFTER_GATE = "after_gate"  # norm(silu(z) * y)
    BEFORE_GATE = "before_gate"  # silu(z) * norm(y)
    NONE = "none"  # no norm: silu(z) * y


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Config:
    """A Mamba-2 mixer after a short convolution of x, B and C, concatenated in this order.

    Each head has a state S [state_size, head_size] and uses B and C of its group. With dt = softplus(dt + dt_bias), clamped to `dt_limits`,
    a token updates the state to S' = exp(decay * dt) S + B (dt x)^T and outputs S'^T C + skip x.

    Attributes:
        kernel_size: as in `GatedDeltaConfig`.
        conv_bias: the convolution has a bias.
        bias: the projections have a bias.
        norm_groups: the output is split into this many groups, which are normalised separately.
        gate_scale, dt_scale, output_scale: factors of the gate z, of dt before its bias is added, and of the mixer's output.
        xbc_conv_scales: factors for x, B and C, by which the convolution's weights are multiplied at load.

    Source: Dao and Gu 2024, "Transformers are SSMs", section 7.
    """

    num_heads: int
    head_size: int
    num_groups: int
    state_size: int
    kernel_size: int
    norm: GatedNorm = GatedNorm.AFTER_GATE
    norm_groups: int = 1
    conv_bias: bool = True
    bias: bool = False
    dt_limits: tuple[float, float] = (0.0, float("inf"))
    gate_scale: float = 1.0
    dt_scale: float = 1.0
    output_scale: float = 1.0
    xbc_conv_scales: tuple[float, float, float] = (1.0, 1.0, 1.0)

    @property
    def state_shape(self) -> RecurrentStateShape:
        return RecurrentStateShape(num_heads=self.num_heads, rows=self.state_size, columns=self.head_size, num_key_heads=self.num_groups)

    @property
    def channels(self) -> int:
        """Return the number of channels of the convolution: x, B and C."""
        return self.state_shape.value_width + 2 * self.state_shape.key_width


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvConfig:
    """A gated short convolution: out(c * convolution(b * x)), where b, c and x are projections of the layer's input.

    Attributes:
        channels: number of channels of the convolution, equal to the hidden size.
        kernel_size: as in `GatedDeltaConfig`.
        bias: the convolution and the projections have a bias.

    Source: LFM2's model in transformers 5.23.
    """

    channels: int
    kernel_size: int
    bias: bool = False

    @property
    def state_shape(self) -> RecurrentStateShape | None:
        """Return None: the mixer's only state is the last inputs of the convolution."""
        return None


Recurrent = GatedDeltaConfig | Mamba2Config | ShortConvConfig
"""Mixers whose state has a fixed size: the convolution's last inputs and, except for `ShortConvConfig`, matrices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseMLP:
    """A dense MLP: down(activation(gate(x)) * up(x)).

    Attributes:
        has_gate: there is a gate projection. False = the MLP computes down(activation(up(x))) with GELU, and
            down(activation(up(x)) * up(x)) with other activations: ReLU then gives squared ReLU.
        gate_scale, output_scale: factors of the gate projection's result before the activation, and of the MLP's output.
        sparsity_std_factor: the gate projection's result x becomes max(x - mean(x) - sparsity_std_factor * std(x), 0) before the
            activation (Gemma 3n's Gaussian top-k); None = it is unchanged.
    """

    intermediate_size: int
    activation: Activation | ClampedSwiGLU = Activation.SILU
    bias: bool = False
    has_gate: bool = True
    gate_scale: float = 1.0
    output_scale: float = 1.0
    sparsity_std_factor: float | None = None


class RouterScoring(Enum):
    """How router logits become scores."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRouting:
    """How experts are selected for a token: those with the highest scores; of equal scores the first. Their weighted outputs are added.

    Attributes:
        has_router_bias: the linear layer that computes the scores has a bias.
        has_normalized_weights: weights are scores / (sum of selected scores + `weight_sum_epsilon`). False = weights are the scores.
        routed_scaling_factor: all weights are multiplied by it.
        num_expert_groups, num_selected_groups, top_scores_per_group: experts are divided into groups, and a group's score is the sum of
            its `top_scores_per_group` (1 or 2) highest scores. Only experts of the `num_selected_groups` best groups can be selected.
        has_correction_bias: a learned bias is added to scores to select experts, but not to weights.
        has_expert_scales: the weight of each expert is multiplied by a learned scale of the expert.

    Source: Shazeer et al. 2017, section 2.1; groups: DeepSeek-V2 (2024), section 2.2; correction: DeepSeek-V3, section 2.1.2.
    """

    num_experts: int
    num_experts_per_token: int
    scoring: RouterScoring = RouterScoring.SOFTMAX
    has_router_bias: bool = False
    has_normalized_weights: bool = True
    weight_sum_epsilon: float = 0.0
    routed_scaling_factor: float = 1.0
    num_expert_groups: int = 1
    num_selected_groups: int = 1
    top_scores_per_group: int = 2
    has_correction_bias: bool = False
    has_expert_scales: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMLP:
    """A mixture of experts.

    Attributes:
        expert: the MLP of each expert.
        shared_expert: an MLP that every token uses in addition to the selected experts; None = there is none.
        has_shared_expert_gate: the shared expert's output is multiplied by the sigmoid of a learned projection of the input.
        has_expert_norms: router, experts and shared expert have input norms; experts and shared expert also have output norms (Gemma 4).
        router_scale: the router's input is multiplied by it if `has_expert_norms` is set.
        latent_size: width of the experts' input and output, to and from which the hidden state is projected; 0 = the hidden size.
    """

    routing: ExpertRouting
    expert: DenseMLP
    shared_expert: DenseMLP | None = None
    has_shared_expert_gate: bool = False
    has_expert_norms: bool = False
    router_scale: float = 1.0
    latent_size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PerLayerInput:
    """Gemma's per-layer input of `size` values for each token and layer: after the MLP, x + norm(project(activation(gate(x)) * input))."""

    size: int
    activation: Activation | ClampedSwiGLU


@dataclass(frozen=True, slots=True, kw_only=True)
class AltUp:
    """Alternating updates: the residual stream is `num_streams` streams x_i of `hidden_size` values. A layer computes only the active one.

    With g(x) = tanh(router(norm(x)) / hidden_size), a layer predicts p_i = x_i + sum_j predict(g(x_active))_ij x_j, computes y from
    p_active, and corrects the streams to p_i + (1 + correct(g(y))_i) (y - p_active).

    Attributes:
        active_index: index of the active stream.
        has_output_scale: the corrected active stream is multiplied by a learned vector before the gate of the per-layer input reads it.

    Source: Baykal et al. 2023, "Alternating Updates for Efficient Transformers", section 3; Gemma 3n's model in transformers 5.24.
    """

    num_streams: int
    active_index: int
    hidden_size: int
    has_output_scale: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConvolution:
    """DFlash2's convolutions along a block of draft positions, before and after each mixer and MLP. Every position has its own kernel.

    n is the normed input of the mixer or MLP, `kernels` = projection(n), and `base` are two learned weights [kernel_size, E]. The kernel
    of a position is `base[side, tap] + kernels[side, tap, column // group_size]`. Side 0 is applied to n, side 1 to the output of the
    mixer or MLP. Positions before the block are zeros.

    Source: DFlash2 (z-lab `dflash/model.py`).
    """

    kernel_size: int
    group_size: int  # columns that share `kernels`


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """One layer. Equal layers share one object.

    Attributes:
        mixer, mlp: None = the layer has neither this part nor its norm. At most one of the two is None.
        parallel_mixer: a recurrent mixer with the same input as the attention in `mixer`; their outputs are added. None = there is none.
        output_norm_eps: epsilon of the norms of mixer and MLP outputs; None = `ModelConfig.norm_eps`.
        residual_scale: outputs of mixer and MLP are multiplied by it before they are added to the residual stream.
        per_layer_input: settings of the per-layer input; None = there is none.
        has_output_scale: the residual stream after the layer is multiplied by a learned scalar.
        has_layer_norm: norms of inputs and outputs of mixer and MLP are layer norms. False = RMS norms.
        has_norm_bias: these norms have a bias.
        convolution: settings of convolutions before and after mixer and MLP; None = there are none.
        altup: settings of alternating updates; None = there is one residual stream. With `altup`, the gated per-layer input is added to
            all streams except the first.
        laurel_rank: rank of the learned residual norm(right(left(n))) + n, where n is the mixer's input. This residual is added after
            the mixer, and the sum is divided by sqrt(2). 0 = there is none.
    """

    mixer: AttentionConfig | Recurrent | None
    mlp: DenseMLP | ExpertMLP | None
    parallel_mixer: Recurrent | None = None
    norm_order: NormOrder = NormOrder.PRE
    output_norm_eps: float | None = None
    residual_scale: float = 1.0
    per_layer_input: PerLayerInput | None = None
    has_output_scale: bool = False
    has_layer_norm: bool = False
    has_norm_bias: bool = False
    convolution: BlockConvolution | None = None
    altup: AltUp | None = None
    laurel_rank: int = 0

    @property
    def mixers(self) -> "tuple[AttentionConfig | Recurrent, ...]":
        """Return the layer's mixers: none, one, or an attention and a recurrent one."""
        return tuple(mixer for mixer in (self.mixer, self.parallel_mixer) if mixer is not None)

    @property
    def attention(self) -> AttentionConfig:
        """Return the mixer of an attention layer.

        Raises:
            TypeError: The layer has no attention.
        """
        if not isinstance(self.mixer, AttentionConfig):
            raise TypeError(f"the layer's mixer is a {type(self.mixer).__name__}")
        return self.mixer


def share_equal_layers(layers: Iterable[LayerConfig]) -> tuple[LayerConfig, ...]:
    """Return the layers, with one object in place of all objects that are equal."""
    unique_layers: dict[LayerConfig, LayerConfig] = {}
    return tuple(unique_layers.setdefault(layer, layer) for layer in layers)
