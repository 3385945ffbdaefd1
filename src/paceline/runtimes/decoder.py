"""Networks as functions that call the operations of `Ops`, so that each is written once for all runtimes.

Each runtime implements `Ops`. The torch runtime computes tensors; the native runtime records operations, which the kernels run later.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Protocol, TypeVar

from paceline.errors import ConfigError
from paceline.models.config import ModelConfig
from paceline.models.layers import (
    Activation,
    AltUp,
    AttentionConfig,
    AttentionGate,
    BlockConvolution,
    ClampedSwiGLU,
    DenseMLP,
    ExpertMLP,
    GatedDeltaConfig,
    GatedNorm,
    LatentProjections,
    LayerConfig,
    Mamba2Config,
    NormOrder,
    PerLayerInput,
    QKNorm,
    Recurrent,
    ShortConvConfig,
)
from paceline.models.rope_config import RopeConfig
from paceline.runtimes.logits_summary import SummaryOptions

Value = TypeVar("Value")
"""The result of an operation: a tensor in the torch runtime, `program.Value` in the native runtime."""

TOKEN_IDS = "token_ids"
"""Name of a language model's input."""
PER_LAYER_EMBEDDINGS = "layer_rows"
"""Name of the input for which the native runtime looks up rows of the table of per-layer embeddings (Gemma 3n and 4)."""

LOGITS, SUMMARY, HIDDEN_STATES, COLLECTED = "logits", "summary", "hidden_states", "collected"
"""Names of results."""

BLOCK_MAX = "block_max"
"""Name of a result that the native runtime adds: the maximum of each block of a row of logits."""


class Ops(Protocol[Value]):
    """The functions that networks are composed of. Names are those of weights in `models/tensor_names.py`, without `.weight`.

    x, y and results are rows [T, width]. Rows of heads have the width num_heads * D.
    """

    def embedding(self, name: str) -> Value:
        """Return embedding rows [T, E] of the input `token_ids`, times `config.embedding_scale`, rounded to the compute type."""

    def per_layer_embedding(self, name: str) -> Value:
        """Return per-layer embedding rows [T, L * size] of the input `token_ids`, times sqrt(size), rounded to the compute type."""

    def columns(self, x: Value, begin: int, width: int) -> Value:
        """Return columns [begin, begin + width) of x."""

    def linear(self, x: Value, *names: str) -> tuple[Value, ...]:
        """Return x W^T (+ bias) for the weights W of each name, computed together."""

    def head_products(self, x: Value, name: str, num_heads: int, appended: Value | None = None) -> Value:
        """Return the product of each head h of x with the matrix `name.h`, each followed by head h of `appended` if that is given."""

    def rms_norm(self, x: Value, name: str, epsilon: float | None = None) -> Value:
        """Return x / rms(x) * weight. With `config.has_norm_offset` the product is rounded only once, after it is computed in float32.

        epsilon: None = that of the config.
        """

    def layer_norm(self, x: Value, name: str) -> Value:
        """Return (x - mean(x)) / std(x) * weight, plus a bias if there is one."""

    def head_norm(self, x: Value, name: str | None, num_heads: int, *, epsilon: float | None = None) -> Value:
        """Return the RMS norm of the D values of each head, times a weight [D]; name None = no weight, epsilon None = `norm_eps`."""

    def rope(self, x: Value, num_heads: int, rope: RopeConfig) -> Value:
        """Return x with the first `rotary_size` values of each head rotated, times the position's attention temperature (Llama 4)."""

    def attention(self, q: Value, kv: tuple[Value, Value] | None, attention: AttentionConfig, layer: int) -> Value:
        """Write k and v [T, K * D] to the cache of `layer`, and return attention [T, H * D] of the queries q [T, H * D].

        With `attention.latent`, the first `latent_size` values of a key are its value, v is k, and the result is [T, H * latent_size].

        kv None: attention to the keys and values that another layer wrote, including those of this pass. Scores are multiplied by
        `attention.scale`, then soft-capped if `attention.soft_cap` is set. The weight of attention sinks is `layers.N.attention.sinks`.
        """

    def store_kv(self, k: Value, v: Value, attention: AttentionConfig, layer: int) -> Value:
        """Write k and v [T, K * D] to the cache of `layer` without attention. The returned value has no meaning."""

    def convolution(self, x: Value, mixer: Recurrent, layer: int) -> Value:
        """Return the causal convolution over the sequence of each channel of x [T, C], with SiLU except for `ShortConvConfig`.

        In a draft tree, a row follows its parent. `layers.N.conv` has a weight [C, kernel_size], whose last column multiplies the row
        itself, and an optional bias [C].
        """

    def block_convolution(self, x: Value, kernel_deltas: Value, convolution: BlockConvolution, name: str, kernel_index: int) -> Value:
        """Return x [T, E] convolved over the rows of each range. Each row has a kernel of its own, see `BlockConvolution`.

        The kernel of a row is base kernel `kernel_index` (0 or 1) of the vector `name`, [2, kernel_size, E], plus the same part of the row
        in `kernel_deltas`, [T, 2 * kernel_size * E / group_size].
        """

    def delta_rule(self, x: Value, b: Value, a: Value, mixer: GatedDeltaConfig, layer: int) -> Value:
        """Return the output [T, heads * value_size] of a gated delta rule for queries, keys and values x [T, C] and gates a, b [T, heads].

        See `GatedDeltaConfig`. `layers.N.decay` has a negative weight [heads] and a bias [heads].
        """

    def mamba2(self, x: Value, dt: Value, mixer: Mamba2Config, layer: int) -> Value:
        """Return the output [T, heads * head_size] of Mamba-2 for rows x [T, C] and step sizes dt [T, heads].

        See `Mamba2Config`. Weights are `layers.N.decay` as for `delta_rule`, and `layers.N.skip.weight` [heads].
        """

    def group_norm(self, x: Value, name: str, num_groups: int) -> Value:
        """Return the RMS norm of each of `num_groups` equal parts of a row, times a weight as wide as the row."""

    def gated(self, gate: Value, up: Value, activation: Activation | ClampedSwiGLU) -> Value:
        """Return activation(gate) * up. If `up` is n times as wide as the gate, each value of the gate multiplies n adjacent columns."""

    def activated(self, x: Value, activation: Activation) -> Value:
        """Return activation(x)."""

    def xielu(self, x: Value, name: str) -> Value:
        """Return xIELU of x, whose parameters are the weights `alpha_p`, `alpha_n`, `beta` and `eps` of `name`.

        With a_p = softplus(alpha_p) and a_n = beta + softplus(alpha_n): a_p x^2 + beta x for x > 0, else
        a_n (e^min(x, eps) - 1 - x) + beta x. Source: Huang and Schlag 2024, "Deriving Activation Functions Using Integration".
        """

    def experts(self, x: Value, logits: Value, mlp: ExpertMLP, prefix: str) -> Value:
        """Return the weighted sum [T, E] of the outputs of each row's experts, which are chosen by the router's logits [T, experts]."""

    def add(self, x: Value, y: Value) -> Value: ...

    def scale(self, x: Value, factor: float) -> Value:
        """Return x * factor."""

    def scale_by(self, x: Value, name: str) -> Value:
        """Return x times the weight `name`, which has one element."""

    def scale_columns(self, x: Value, name: str) -> Value:
        """Return x times the weight `name`, which has an element for each column."""

    def input(self, name: str, width: int) -> Value:
        """Return the input [T, width] with this name, see `Network.forward`."""

    def concat(self, *values: Value) -> Value:
        """Return the values concatenated along the columns, [T, sum of widths]."""

    def mix_streams(self, y: Value, x: Value, weights: Value | None, num_streams: int, *, offset: float = 0.0, first: int = 0) -> Value:
        """Return `num_streams` adjacent streams y_i + sum_j (weights_ij + offset) x_j, or only y_i for i < first.

        The streams x_j are as wide as those of y. weights: [T, num_streams * number of x_j]; None = zeros.
        """

    def gaussian_top_k(self, x: Value, factor: float) -> Value:
        """Return max(x - mean(x) - factor * std(x), 0) of each row, where std divides by the number of values (no Bessel's correction)."""

    def match_rms(self, x: Value, like: Value) -> Value:
        """Return x * rms(like) / rms(x) of each row, where mean(x^2) counts as at least 1e-5."""

    def summarize(self, logits: Value, options: SummaryOptions) -> Value:
        """Return a summary of each row of logits, [R, 2 + 2 * num_top_tokens], see `decode_summaries`."""

    def logits_rows(self, x: Value) -> Value:
        """Return the R rows of x whose logits are computed (`LogitsRows.rows`)."""

    def lm_head(self, x: Value, name: str) -> Value:
        """Return logits [R, V] float32."""

    def soft_cap(self, x: Value, cap: float) -> Value:
        """Return cap * tanh(x / cap) of float32 logits."""


class NetworkDefinition(Protocol):
    """A function that defines a network: it calls `ops`, a runtime's implementation, and returns the results by name.

    A result is [T, width] for the T rows of the pass, or [R, width] if it was computed from `Ops.logits_rows`.
    """

    def __call__(self, ops: Ops[Value]) -> Mapping[str, Value]: ...


def attention_block(ops: Ops[Value], attention: AttentionConfig, x: Value, layer: int) -> Value:
    """Return the attention output for rows x, including the projections before and after."""
    prefix = f"layers.{layer}."
    if attention.latent is not None:
        return _latent_attention_block(ops, attention, attention.latent, x, layer)

    def norm_and_rotate(x: Value, name: str, num_heads: int, rope: RopeConfig) -> Value:
        if attention.qk_norm in (QKNorm.HEAD, QKNorm.UNWEIGHTED_HEAD):
            x = ops.head_norm(x, prefix + name if attention.qk_norm is QKNorm.HEAD else None, num_heads)
        elif attention.qk_norm is QKNorm.ALL_HEADS:
            x = ops.rms_norm(x, prefix + name)
        x = ops.rope(x, num_heads, rope) if attention.has_rope_embedding else x
        return ops.head_norm(x, prefix + name, num_heads) if attention.qk_norm is QKNorm.HEAD_AFTER_ROPE else x

    names, is_gated = ["q_proj"], attention.gate is not AttentionGate.NONE
    if attention.kv_source_layer is None:
        names += ["k_proj"] if attention.uses_keys_as_values else ["k_proj", "v_proj"]
    q, *kv = ops.linear(x, *(prefix + name for name in names), *([prefix + "attention_gate"] if is_gated else []))
    gate = kv.pop() if is_gated else None
    q = norm_and_rotate(q, "q_norm", attention.num_heads, attention.rope)
    if not kv:
        attended = ops.attention(q, None, attention, layer)
    else:
        k, v = norm_and_rotate(kv[0], "k_norm", attention.num_kv_heads, attention.key_rope), kv[-1]
        if attention.has_value_norm:
            v = ops.head_norm(v, None, attention.num_kv_heads)
        attended = ops.attention(q, (k, _scaled(ops, v, attention.value_scale)), attention, layer)
    if gate is not None:
        attended = ops.gated(gate, attended, Activation.SIGMOID)
    return ops.linear(attended, prefix + "o_proj")[0]


def _scaled(ops: Ops[Value], x: Value, factor: float) -> Value:
    """Return x * factor. If the factor is 1, no operation is added."""
    return x if factor == 1.0 else ops.scale(x, factor)


def _latent_attention_block(ops: Ops[Value], attention: AttentionConfig, latent: LatentProjections, x: Value, layer: int) -> Value:
    """Return the output of multi-head latent attention for rows x. Source: DeepSeek-V2 (2024), section 2.1."""
    prefix, heads = f"layers.{layer}.", attention.num_heads
    names = [prefix + name for name in ("q_proj", "q_rope_proj")]
    inputs = [prefix + "q_a_proj"] if latent.query_rank else names
    *queries, compressed, k_rope = ops.linear(x, *inputs, prefix + "kv_a_proj", prefix + "k_rope_proj")
    if latent.query_rank:
        queries = [*ops.linear(ops.rms_norm(queries[0], prefix + "q_a_norm", latent.norm_eps), *names)]
    q = ops.head_products(queries[0], prefix + "k_up", heads, ops.rope(queries[1], heads, attention.rope))
    k = ops.concat(ops.rms_norm(compressed, prefix + "kv_a_norm", latent.norm_eps), ops.rope(k_rope, 1, attention.key_rope))
    attended = ops.attention(q, (k, k), attention, layer)
    return ops.linear(ops.head_products(attended, prefix + "v_up", heads), prefix + "o_proj")[0]


def recurrent_block(ops: Ops[Value], mixer: Recurrent, x: Value, layer: int) -> Value:
    """Return the output of a recurrent mixer for rows x, including the projections before and after."""
    prefix = f"layers.{layer}."

    def multiply_by(*names: str) -> tuple[Value, ...]:
        return ops.linear(x, *(prefix + name for name in names))

    if isinstance(mixer, ShortConvConfig):
        conv_input, b, c = multiply_by("conv_proj", "b_proj", "c_proj")
        mixed = ops.convolution(ops.gated(b, conv_input, Activation.NONE), mixer, layer)
        mixed = ops.gated(c, mixed, Activation.NONE)
    elif isinstance(mixer, GatedDeltaConfig):
        names = ("q_proj", "k_proj", "v_proj") if mixer.has_separate_qkv_projections else ("conv_proj",)
        *conv_inputs, z, b, a = multiply_by(*names, "z_proj", "b_proj", "a_proj")
        mixed = ops.delta_rule(ops.convolution(ops.concat(*conv_inputs), mixer, layer), b, a, mixer, layer)
        normed = ops.head_norm(mixed, prefix + "gated_norm", mixer.num_value_heads, epsilon=mixer.norm_eps)
        mixed = ops.gated(z, normed, Activation.SILU)
    else:
        conv_input, z, dt = multiply_by("conv_proj", "z_proj", "dt_proj")
        mixed = ops.mamba2(ops.convolution(conv_input, mixer, layer), _scaled(ops, dt, mixer.dt_scale), mixer, layer)
        if mixer.norm is GatedNorm.BEFORE_GATE:
            mixed = ops.group_norm(mixed, prefix + "gated_norm", mixer.norm_groups)
        mixed = ops.gated(_scaled(ops, z, mixer.gate_scale), mixed, Activation.SILU)
        if mixer.norm is GatedNorm.AFTER_GATE:
            mixed = ops.group_norm(mixed, prefix + "gated_norm", mixer.norm_groups)
        return _scaled(ops, ops.linear(mixed, prefix + "out_proj")[0], mixer.output_scale)
    return ops.linear(mixed, prefix + "out_proj")[0]


def token_mixer(ops: Ops[Value], mixers: Sequence[AttentionConfig | Recurrent], x: Value, layer: int) -> Value:
    """Return the sum of the outputs of a layer's token mixers, attention or recurrent, for rows x."""
    outputs = [
        attention_block(ops, mixer, x, layer) if isinstance(mixer, AttentionConfig) else recurrent_block(ops, mixer, x, layer)
        for mixer in mixers
    ]
    return reduce(ops.add, outputs)


def mlp_block(ops: Ops[Value], mlp: DenseMLP | ExpertMLP, x: Value, layer: int, stream: Value) -> Value:
    """Return the output of the MLP or the mixture of experts for rows x = norm(stream). `stream`: the residual stream."""
    prefix = f"layers.{layer}."
    if isinstance(mlp, DenseMLP):
        return _dense_mlp(ops, mlp, x, prefix)
    if mlp.has_expert_norms and mlp.shared_expert is not None:
        return ops.add(
            ops.rms_norm(_dense_mlp(ops, mlp.shared_expert, x, prefix + "shared_expert."), prefix + "shared_output_norm"),
            ops.rms_norm(_experts_with_norms(ops, mlp, stream, prefix), prefix + "experts_output_norm"),
        )
    expert_input = ops.linear(x, prefix + "latent_proj")[0] if mlp.latent_size else x
    mixed = ops.experts(expert_input, ops.linear(x, prefix + "router")[0], mlp, prefix)
    if mlp.latent_size:
        (mixed,) = ops.linear(mixed, prefix + "latent_output")
    if mlp.shared_expert is None:
        return mixed
    shared = _dense_mlp(ops, mlp.shared_expert, x, prefix + "shared_expert.")
    if mlp.has_shared_expert_gate:
        shared = ops.gated(ops.linear(x, prefix + "shared_gate")[0], shared, Activation.SIGMOID)
    return ops.add(mixed, shared)


def _experts_with_norms(ops: Ops[Value], mlp: ExpertMLP, stream: Value, prefix: str) -> Value:
    """Return the output of a mixture of experts that has its own input norms. Source: Gemma 4's model in transformers 5.23."""
    scaled = ops.scale(ops.rms_norm(stream, prefix + "router_norm"), mlp.router_scale)
    return ops.experts(ops.rms_norm(stream, prefix + "experts_norm"), ops.linear(scaled, prefix + "router")[0], mlp, prefix)


def _dense_mlp(ops: Ops[Value], mlp: DenseMLP, x: Value, prefix: str) -> Value:
    *gates, up = ops.linear(x, *([prefix + "gate_proj"] if mlp.has_gate else []), prefix + "up_proj")
    if mlp.activation is Activation.XIELU:
        return ops.linear(ops.xielu(up, prefix + "activation"), prefix + "down_proj")[0]
    if not gates and mlp.activation is Activation.GELU_TANH:
        return ops.linear(ops.activated(up, mlp.activation), prefix + "down_proj")[0]
    gate = _scaled(ops, gates[0] if gates else up, mlp.gate_scale)
    gate = gate if mlp.sparsity_std_factor is None else ops.gaussian_top_k(gate, mlp.sparsity_std_factor)
    return _scaled(ops, ops.linear(ops.gated(gate, up, mlp.activation), prefix + "down_proj")[0], mlp.output_scale)


def layer_or_rms_norm(ops: Ops[Value], config: LayerConfig, x: Value, name: str, epsilon: float | None = None) -> Value:
    """Return the layer norm of x if the model has layer norms, else the RMS norm with `epsilon` (None = that of the config)."""
    return ops.layer_norm(x, name) if config.has_layer_norm else ops.rms_norm(x, name, epsilon)


def decoder_layer(
    ops: Ops[Value], config: LayerConfig, x: Value, layer: int, *, normed: Value | None = None, layer_input: Value | None = None
) -> Value:
    """Return the residual stream after one layer: token mixer, then MLP. The output of each is added to the stream x [T, E].

    Args:
        layer: index of the layer, which selects its weights and its cache.
        normed: input of the mixer; None = x after the norms that `config.norm_order` defines.
        layer_input: [T, size] the layer's rows of `per_layer_inputs`; None = the model has none.
    """
    prefix, order = f"layers.{layer}.", config.norm_order

    def input_norm(x: Value, name: str) -> Value:
        return layer_or_rms_norm(ops, config, x, prefix + name) if order.has_input_norm else x

    def output_norm(x: Value, name: str) -> Value:
        x = layer_or_rms_norm(ops, config, x, prefix + name, config.output_norm_eps) if order.has_output_norm else x
        return _scaled(ops, x, config.residual_scale)

    def convolve_before_and_after(x: Value, name: str, compute: Callable[[Value], Value]) -> Value:  # before and after `compute`
        if config.convolution is None:
            return compute(x)
        (kernel_deltas,) = ops.linear(x, f"{prefix}{name}_kernels")
        out = compute(ops.block_convolution(x, kernel_deltas, config.convolution, f"{prefix}{name}_base", 0))
        return ops.block_convolution(out, kernel_deltas, config.convolution, f"{prefix}{name}_base", 1)

    mixers, mlp = config.mixers, config.mlp
    if mixers:
        normed = input_norm(x, "attention_norm") if normed is None else normed
        mixed = convolve_before_and_after(normed, "attention_convolution", lambda n: token_mixer(ops, mixers, n, layer))
        x = ops.add(x, output_norm(mixed, "attention_output_norm"))
        x = ops.scale(ops.add(x, _laurel(ops, normed, prefix)), 0.5**0.5) if config.laurel_rank else x
    if mlp is not None:
        stream = x
        mlp_input = normed if order is NormOrder.PARALLEL and normed is not None else input_norm(x, "mlp_norm")
        mixed = convolve_before_and_after(mlp_input, "mlp_convolution", lambda n: mlp_block(ops, mlp, n, layer, stream))
        x = ops.add(x, output_norm(mixed, "mlp_output_norm"))
    if config.per_layer_input is not None and layer_input is not None:
        x = ops.add(x, _per_layer_output(ops, config.per_layer_input, x, layer_input, prefix))
    return ops.scale_by(x, prefix + "output_scale") if config.has_output_scale else x


def _per_layer_output(ops: Ops[Value], config: PerLayerInput, x: Value, layer_input: Value, prefix: str) -> Value:
    """Return what a layer adds to the residual stream for its per-layer input, gated by x."""
    (gate,) = ops.linear(x, prefix + "input_gate")
    (added,) = ops.linear(ops.gated(gate, layer_input, config.activation), prefix + "input_proj")
    return ops.rms_norm(added, prefix + "input_norm")


def _laurel(ops: Ops[Value], x: Value, prefix: str) -> Value:
    """Return the learned augmented residual (LAuReL) x + norm(right(left(x)))."""
    (low_rank,) = ops.linear(x, prefix + "laurel_left")
    return ops.add(x, ops.rms_norm(ops.linear(low_rank, prefix + "laurel_right")[0], prefix + "laurel_norm"))


def altup_layer(ops: Ops[Value], config: LayerConfig, altup: AltUp, streams: Value, layer: int, layer_input: Value | None) -> Value:
    """Return the streams [T, num_streams * E] after one layer with alternating updates, see `AltUp`. Arguments as in `decoder_layer`."""
    prefix, count = f"layers.{layer}.", altup.num_streams

    def stream_mixing_weights(x: Value, name: str) -> Value:
        scaled = ops.scale(ops.rms_norm(x, prefix + "altup_router_norm"), 1.0 / altup.hidden_size)
        (routed,) = ops.linear(scaled, prefix + "altup_router")
        return ops.linear(ops.soft_cap(routed, 1.0), prefix + name)[0]  # a soft cap of 1 is tanh

    predictions = ops.mix_streams(streams, streams, stream_mixing_weights(active_stream(ops, altup, streams), "altup_predict"), count)
    active = active_stream(ops, altup, predictions)
    activated = decoder_layer(ops, config, active, layer)
    innovation = ops.mix_streams(activated, active, None, 1, offset=-1.0)  # activated - active
    corrected = ops.mix_streams(predictions, innovation, stream_mixing_weights(activated, "altup_correct"), count, offset=1.0)
    if config.per_layer_input is None or layer_input is None:
        return corrected
    x = active_stream(ops, altup, corrected)
    x = ops.scale_columns(x, prefix + "altup_output_scale") if altup.has_output_scale else x
    added = _per_layer_output(ops, config.per_layer_input, x, layer_input, prefix)
    return ops.mix_streams(corrected, added, None, count, offset=1.0, first=1)


def active_stream(ops: Ops[Value], altup: AltUp, streams: Value) -> Value:
    """Return the AltUp stream [T, E] that is the input of the layers. The other streams are only predicted and corrected."""
    return ops.columns(streams, altup.active_index * altup.hidden_size, altup.hidden_size)


def split_into_streams(ops: Ops[Value], altup: AltUp, x: Value) -> Value:
    """Return the streams before the first layer: x, and projections of x scaled to the root mean square of x."""
    projected = ops.linear(x, *(f"altup_proj.{index}" for index in range(altup.num_streams - 1)))
    return ops.concat(x, *(ops.match_rms(stream, x) for stream in projected))


def merge_streams(ops: Ops[Value], altup: AltUp, streams: Value) -> Value:
    """Return the mean of the first stream and projections of the other streams, scaled to the root mean square of the first."""
    first, *others = (ops.columns(streams, index * altup.hidden_size, altup.hidden_size) for index in range(altup.num_streams))
    projected = (ops.linear(stream, f"altup_unembed_proj.{index}")[0] for index, stream in enumerate(others))
    matched = (ops.match_rms(stream, first) for stream in projected)
    return ops.scale(reduce(ops.add, matched, first), 1.0 / altup.num_streams)


def per_layer_inputs(ops: Ops[Value], config: ModelConfig, x: Value) -> Value:
    """Return the additional inputs of all layers [T, L * size], computed from a table by token id and from the embedding x.

    Source: Gemma 4's model in transformers 5.23.
    """
    (projected,) = ops.linear(x, "layer_inputs_proj")
    context = ops.head_norm(ops.scale(projected, float(config.hidden_size**-0.5)), "layer_inputs_norm", config.num_layers)
    return ops.scale(ops.add(context, ops.per_layer_embedding("layer_embedding")), 0.5**0.5)


def decoder(config: ModelConfig, collect_layers: Sequence[int] = ()) -> NetworkDefinition:
    """Return the function that defines a language model with the input `token_ids`.

    Its results are `logits` [R, V]; `hidden_states` [T, E], after the final norm; and `collected.0`, `collected.1`, ... [T, E], the
    residual stream (with AltUp, the active one) at the layer boundaries in `collect_layers`. Boundary i is the input of layer i; boundary L
    is the output of the last layer.

    Raises:
        ConfigError: a boundary does not exist.
    """
    if any(not 0 <= layer <= config.num_layers for layer in collect_layers):
        raise ConfigError(f"collect_layers = {list(collect_layers)}: boundaries go from 0 to {config.num_layers}")

    def define_network(ops: Ops[Value]) -> Mapping[str, Value]:
        embedded, size, altup = ops.embedding("embedding"), config.per_layer_input_size, config.altup
        embedded = ops.head_norm(embedded, None, 1) if config.has_embedding_norm else embedded
        inputs = per_layer_inputs(ops, config, embedded) if size else None
        boundaries = [embedded if altup is None else split_into_streams(ops, altup, embedded)]
        for index, layer in enumerate(config.layers):
            layer_input = None if inputs is None else ops.columns(inputs, index * size, size)
            boundaries.append(
                decoder_layer(ops, layer, boundaries[-1], index, layer_input=layer_input)
                if altup is None
                else altup_layer(ops, layer, altup, boundaries[-1], index, layer_input)
            )
        last = boundaries[-1] if altup is None else merge_streams(ops, altup, boundaries[-1])
        hidden = layer_or_rms_norm(ops, config.layers[-1], last, "final_norm")
        logits = ops.lm_head(ops.logits_rows(hidden), "embedding" if config.tied_embeddings else "lm_head")
        logits = _scaled(ops, logits, config.logit_scale)
        if config.logit_soft_cap is not None:
            logits = ops.soft_cap(logits, config.logit_soft_cap)
        residuals = [boundaries[layer] for layer in collect_layers]
        if altup is not None:
            residuals = [active_stream(ops, altup, streams) for streams in residuals]
        collected = {f"{COLLECTED}.{index}": residual for index, residual in enumerate(residuals)}
        return {LOGITS: logits, HIDDEN_STATES: hidden, **collected}

    return define_network


def with_summaries(definition: NetworkDefinition, options: SummaryOptions | None) -> NetworkDefinition:
    """Return a definition with additional results: `summary`, the summaries of `logits`, and `summary.x` for each result `logits.x`."""
    if options is None:
        return definition

    def define_with_summaries(ops: Ops[Value]) -> Mapping[str, Value]:
        results = dict(definition(ops))
        for name in [name for name in results if name.split(".")[0] == LOGITS]:
            results[SUMMARY + name.removeprefix(LOGITS)] = ops.summarize(results[name], options)
        return results

    return define_with_summaries
