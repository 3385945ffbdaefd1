"""Compose a network layer by layer from blocks that each runtime implements.

In the native runtime a block records an operation and `Value` is its number. In torch it computes and `Value` is a tensor.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from paceline.errors import ConfigError
from paceline.models.config import ModelConfig
from paceline.models.layers import (
    Activation,
    AttentionConfig,
    BlockConvolution,
    ClampedSwiGLU,
    DenseMLP,
    ExpertMLP,
    GatedDeltaConfig,
    LayerConfig,
    Mamba2Config,
    QKNorm,
    Recurrent,
    ShortConvConfig,
)
from paceline.models.rope_config import RopeConfig
from paceline.runtimes.ranking import Ranking

Value = TypeVar("Value")

TOKEN_IDS = "token_ids"
"""The input of a language model."""
PER_LAYER_EMBEDDINGS = "layer_rows"
"""Rows of the table of layer inputs (Gemma 4), which runtimes look up by token id."""

LOGITS, RANKED, HIDDEN_STATES, COLLECTED = "logits", "ranked", "hidden_states", "collected"
"""Results."""

BLOCK_MAX = "block_max"
"""A result that a runtime may add: the maximum of each block of a row's logits."""


class Blocks(Protocol[Value]):
    """The functions a network is composed of. Weights are named as in `models/tensor_names.py`, without `.weight`.

    Rows are [T, width]; blocks on heads take and return rows of width num_heads * D.
    """

    def embedding(self, name: str) -> Value:
        """Return rows [T, E] of the input `token_ids` [T], times `config.embedding_scale` rounded to the compute type."""
        ...

    def per_layer_embedding(self, name: str) -> Value:
        """Return rows [T, L * size] of the table of per-layer embeddings, times sqrt(size), rounded as in `embedding`."""
        ...

    def columns(self, x: Value, begin: int, width: int) -> Value:
        """Return columns [begin, begin + width) of x."""
        ...

    def linear(self, x: Value, *names: str) -> tuple[Value, ...]:
        """Return x W^T (+ bias) for each name, as one fused product."""
        ...

    def rms_norm(self, x: Value, name: str) -> Value:
        """Return x / rms(x) * weight; with `config.has_norm_offset` the product is computed in float32 before rounding."""
        ...

    def head_norm(self, x: Value, name: str | None, num_heads: int) -> Value:
        """Return the RMS norm of each head's D values; None = no weight."""
        ...

    def rope(self, x: Value, num_heads: int, rope: RopeConfig) -> Value:
        """Rotate each head's first `rotary_size` values, times the attention temperature of their position; copy the others."""
        ...

    def attention(self, q: Value, kv: tuple[Value, Value] | None, attention: AttentionConfig, layer: int) -> Value:
        """Write k and v [T, K * D] to the cache of `layer` and attend q [T, H * D] to the rows each row may attend to.

        Without k and v, the keys and values another layer wrote are read, those of this pass included. Scores are multiplied by
        `attention.scale`, then soft-capped if `attention.soft_cap` is set. Sinks are the tensor `layers.N.attention.sinks`.
        """
        ...

    def store_kv(self, k: Value, v: Value, attention: AttentionConfig, layer: int) -> Value:
        """Write k and v [T, K * D] to the cache of `layer` without attention. The result [T, 1] has no meaning."""
        ...

    def convolution(self, x: Value, mixer: Recurrent, layer: int) -> Value:
        """Return the causal convolution over time of each channel of x [T, C], followed by SiLU except in `ShortConvConfig`.

        In a tree, a row follows its parent. `layers.N.conv` has a weight [C, kernel_size], the last column for the row itself, and an
        optional bias [C].
        """
        ...

    def block_convolution(self, x: Value, added: Value, convolution: BlockConvolution, name: str, side: int) -> Value:
        """Return x [T, E] convolved over the rows of each range with kernels of base plus `added` [T, 2 * kernel_size * E / group_size].

        See `BlockConvolution`. The base is the vector `name` of 2 * kernel_size * E values, sides first, then taps.
        """
        ...

    def delta_rule(self, x: Value, b: Value, a: Value, mixer: GatedDeltaConfig, layer: int) -> Value:
        """Return the output [T, heads * value_size] of a gated delta rule for rows x [T, C] and gates a, b [T, heads].

        See `GatedDeltaConfig`. `layers.N.decay` has a negative weight [heads] and a bias [heads].
        """
        ...

    def mamba2(self, x: Value, dt: Value, mixer: Mamba2Config, layer: int) -> Value:
        """Return the output [T, heads * head_size] of Mamba-2 for rows x [T, C] and step sizes dt [T, heads].

        See `Mamba2Config`. Weights are `layers.N.decay` as above and `layers.N.skip.weight` [heads].
        """
        ...

    def group_norm(self, x: Value, name: str, num_groups: int) -> Value:
        """Return the RMS norm of each of `num_groups` parts of a row, times a weight as wide as the row."""
        ...

    def gated(self, gate: Value, up: Value, activation: Activation | ClampedSwiGLU) -> Value:
        """Return activation(gate) * up."""
        ...

    def experts(self, x: Value, logits: Value, mlp: ExpertMLP, prefix: str) -> Value:
        """Return the weighted sum [T, E] of the experts `prefix + experts.N` that the router's logits [T, experts] choose for each row."""
        ...

    def sigmoid_gate(self, x: Value, y: Value) -> Value:
        """Return x * sigmoid(y), y [T, 1]."""
        ...

    def add(self, x: Value, y: Value) -> Value: ...

    def scale(self, x: Value, factor: float) -> Value:
        """Return x * factor."""
        ...

    def scale_by(self, x: Value, name: str) -> Value:
        """Return x times a scalar weight."""
        ...

    def input(self, name: str, width: int) -> Value:
        """Return the input [T, width] of `Network.forward` with this name; repeated calls return the same value."""
        ...

    def concat(self, *values: Value) -> Value:
        """Return the values concatenated by columns, [T, sum of widths]."""
        ...

    def silu_residual(self, x: Value, y: Value) -> Value:
        """Return x + silu(y)."""
        ...

    def rank(self, logits: Value, ranking: Ranking) -> Value:
        """Return summaries of rows of logits, [R, 2 + 2 * count], which `ranked_rows` decodes."""
        ...

    def logits_rows(self, x: Value) -> Value:
        """Return the rows whose logits are computed, [R, E]."""
        ...

    def lm_head(self, x: Value, name: str) -> Value:
        """Return logits [R, V] float32."""
        ...

    def soft_cap(self, x: Value, cap: float) -> Value:
        """Return cap * tanh(x / cap) of float32 logits."""
        ...


class Compose(Protocol):
    """Builds a forward pass by calling the operations of `blocks`, a backend's implementation of them.

    Returns results by name: [T, width] for the T rows of the pass, or [R, width] after `logits_rows` has taken R of them.
    """

    def __call__(self, blocks: Blocks[Value]) -> Mapping[str, Value]: ...


def attention_part(blocks: Blocks[Value], attention: AttentionConfig, x: Value, layer: int) -> Value:
    """Return attention of rows x, with its input and output projections."""
    prefix = f"layers.{layer}."

    def normed_and_rotated(x: Value, name: str, num_heads: int, rope: RopeConfig) -> Value:
        if attention.qk_norm is QKNorm.HEAD:
            x = blocks.head_norm(x, prefix + name, num_heads)
        elif attention.qk_norm is QKNorm.WIDTH:
            x = blocks.rms_norm(x, prefix + name)
        return blocks.rope(x, num_heads, rope) if attention.has_rope_embedding else x

    names = ["q_proj"]
    if attention.kv_layer is None:
        names += ["k_proj"] if attention.has_keys_as_values else ["k_proj", "v_proj"]
    q, *kv = blocks.linear(x, *(prefix + name for name in names), *([prefix + "attention_gate"] if attention.is_gated else []))
    gate = kv.pop() if attention.is_gated else None
    q = normed_and_rotated(q, "q_norm", attention.num_heads, attention.rope)
    if not kv:
        attended = blocks.attention(q, None, attention, layer)
    else:
        k, v = normed_and_rotated(kv[0], "k_norm", attention.num_kv_heads, attention.key_rope), kv[-1]
        if attention.has_value_norm:
            v = blocks.head_norm(v, None, attention.num_kv_heads)
        if attention.value_scale != 1.0:
            v = blocks.scale(v, attention.value_scale)
        attended = blocks.attention(q, (k, v), attention, layer)
    if gate is not None:
        attended = blocks.gated(gate, attended, Activation.SIGMOID)
    return blocks.linear(attended, prefix + "o_proj")[0]


def recurrent_part(blocks: Blocks[Value], mixer: Recurrent, x: Value, layer: int) -> Value:
    """Return a recurrent mixer of rows x, with its input and output projections."""
    prefix = f"layers.{layer}."

    def projected(*names: str) -> tuple[Value, ...]:
        return blocks.linear(x, *(prefix + name for name in names))

    if isinstance(mixer, ShortConvConfig):
        taken, b, c = projected("conv_proj", "b_proj", "c_proj")
        mixed = blocks.convolution(blocks.gated(b, taken, Activation.NONE), mixer, layer)
        mixed = blocks.gated(c, mixed, Activation.NONE)
    elif isinstance(mixer, GatedDeltaConfig):
        taken, z, b, a = projected("conv_proj", "z_proj", "b_proj", "a_proj")
        mixed = blocks.delta_rule(blocks.convolution(taken, mixer, layer), b, a, mixer, layer)
        mixed = blocks.gated(z, blocks.head_norm(mixed, prefix + "gated_norm", mixer.num_value_heads), Activation.SILU)
    else:
        taken, z, dt = projected("conv_proj", "z_proj", "dt_proj")
        mixed = blocks.mamba2(blocks.convolution(taken, mixer, layer), dt, mixer, layer)
        mixed = blocks.group_norm(blocks.gated(z, mixed, Activation.SILU), prefix + "gated_norm", mixer.norm_groups)
    return blocks.linear(mixed, prefix + "o_proj")[0]


def mixer_part(blocks: Blocks[Value], mixer: AttentionConfig | Recurrent, x: Value, layer: int) -> Value:
    """Return the token mixer of rows x: attention or a recurrence."""
    if isinstance(mixer, AttentionConfig):
        return attention_part(blocks, mixer, x, layer)
    return recurrent_part(blocks, mixer, x, layer)


def mlp_part(blocks: Blocks[Value], mlp: DenseMLP | ExpertMLP, x: Value, layer: int, stream: Value) -> Value:
    """Return the MLP, or mixture of experts, of rows x. `stream` is the residual stream before the norm that made x."""
    prefix = f"layers.{layer}."
    if isinstance(mlp, DenseMLP):
        return _dense(blocks, mlp, x, prefix)
    if mlp.has_own_norms and mlp.shared is not None:
        return blocks.add(
            blocks.rms_norm(_dense(blocks, mlp.shared, x, prefix + "shared_expert."), prefix + "shared_output_norm"),
            blocks.rms_norm(_experts_of_stream(blocks, mlp, stream, prefix), prefix + "experts_output_norm"),
        )
    taken = blocks.linear(x, prefix + "latent_proj")[0] if mlp.latent_size else x
    mixed = blocks.experts(taken, blocks.linear(x, prefix + "router")[0], mlp, prefix)
    if mlp.latent_size:
        (mixed,) = blocks.linear(mixed, prefix + "latent_output")
    if mlp.shared is None:
        return mixed
    shared = _dense(blocks, mlp.shared, x, prefix + "shared_expert.")
    if mlp.has_shared_gate:
        shared = blocks.sigmoid_gate(shared, blocks.linear(x, prefix + "shared_gate")[0])
    return blocks.add(mixed, shared)


def _experts_of_stream(blocks: Blocks[Value], mlp: ExpertMLP, stream: Value, prefix: str) -> Value:
    """Return a mixture of experts that reads the residual stream. Source: Gemma 4's model in transformers 5.23."""
    scaled = blocks.scale(blocks.rms_norm(stream, prefix + "router_norm"), mlp.router_scale)
    return blocks.experts(blocks.rms_norm(stream, prefix + "experts_norm"), blocks.linear(scaled, prefix + "router")[0], mlp, prefix)


def _dense(blocks: Blocks[Value], mlp: DenseMLP, x: Value, prefix: str) -> Value:
    *gates, up = blocks.linear(x, *([prefix + "gate_proj"] if mlp.has_gate else []), prefix + "up_proj")
    gate = gates[0] if gates else up
    return blocks.linear(blocks.gated(gate, up, mlp.activation), prefix + "down_proj")[0]


def decoder_layer(
    blocks: Blocks[Value], config: LayerConfig, x: Value, layer: int, *, normed: Value | None = None, layer_input: Value | None = None
) -> Value:
    """Return the residual stream after one layer: mixer, then MLP, each added to the stream x [T, E] in `config.norm_order`.

    Args:
        layer: number of its weights and of its keys and values in the cache.
        normed: input of the mixer; None = x, normed first if the order says so.
        layer_input: of a layer with its own input (Gemma 4), its rows.
    """
    prefix, order = f"layers.{layer}.", config.norm_order

    def before(x: Value, name: str) -> Value:
        return blocks.rms_norm(x, prefix + name) if order.has_input_norm else x

    def after(x: Value, name: str) -> Value:
        x = blocks.rms_norm(x, prefix + name) if order.has_output_norm else x
        return x if config.residual_scale == 1.0 else blocks.scale(x, config.residual_scale)

    def convolved(n: Value, name: str, part: Callable[[Value], Value]) -> Value:
        if config.convolution is None:
            return part(n)
        (added,) = blocks.linear(n, f"{prefix}{name}_kernels")
        out = part(blocks.block_convolution(n, added, config.convolution, f"{prefix}{name}_base", 0))
        return blocks.block_convolution(out, added, config.convolution, f"{prefix}{name}_base", 1)

    mixer, mlp = config.mixer, config.mlp
    if mixer is not None:
        normed = before(x, "attention_norm") if normed is None else normed
        mixed = convolved(normed, "attention_convolution", lambda n: mixer_part(blocks, mixer, n, layer))
        x = blocks.add(x, after(mixed, "attention_output_norm"))
    if mlp is not None:
        stream = x
        mixed = convolved(before(x, "mlp_norm"), "mlp_convolution", lambda n: mlp_part(blocks, mlp, n, layer, stream))
        x = blocks.add(x, after(mixed, "mlp_output_norm"))
    if config.per_layer_input is not None and layer_input is not None:
        (gate,) = blocks.linear(x, prefix + "input_gate")
        (added,) = blocks.linear(blocks.gated(gate, layer_input, config.per_layer_input.activation), prefix + "input_proj")
        x = blocks.add(x, blocks.rms_norm(added, prefix + "input_norm"))
    return blocks.scale_by(x, prefix + "output_scale") if config.has_output_scale else x


def per_layer_inputs(blocks: Blocks[Value], config: ModelConfig, x: Value) -> Value:
    """Return the inputs of all layers [T, L * size], computed from a table by token id and from the embedding x.

    Source: Gemma 4's model in transformers 5.23.
    """
    (projected,) = blocks.linear(x, "layer_inputs_proj")
    context = blocks.head_norm(blocks.scale(projected, float(config.hidden_size**-0.5)), "layer_inputs_norm", config.num_layers)
    return blocks.scale(blocks.add(context, blocks.per_layer_embedding("layer_embedding")), 0.5**0.5)


def decoder(config: ModelConfig, collect_layers: Sequence[int] = ()) -> Compose:
    """Return the composition of a language model, whose input is `token_ids`.

    Results are `logits` [R, V]; `hidden_states` [T, E], after the final norm; and `collected.0` … [T, E], the residual stream at each
    boundary of `collect_layers` (boundary i is the input of layer i; L is the last layer's output).

    Raises:
        ConfigError: a boundary does not exist.
    """
    if any(not 0 <= layer <= config.num_layers for layer in collect_layers):
        raise ConfigError(f"collect_layers = {list(collect_layers)}: boundaries go from 0 to {config.num_layers}")

    def compose(blocks: Blocks[Value]) -> Mapping[str, Value]:
        boundaries, size = [blocks.embedding("embedding")], config.per_layer_input_size
        inputs = per_layer_inputs(blocks, config, boundaries[0]) if size else None
        for index, layer in enumerate(config.layers):
            layer_input = None if inputs is None else blocks.columns(inputs, index * size, size)
            boundaries.append(decoder_layer(blocks, layer, boundaries[-1], index, layer_input=layer_input))
        hidden = blocks.rms_norm(boundaries[-1], "final_norm")
        logits = blocks.lm_head(blocks.logits_rows(hidden), "embedding" if config.tied_embeddings else "lm_head")
        if config.logit_scale != 1.0:
            logits = blocks.scale(logits, config.logit_scale)
        if config.logit_soft_cap is not None:
            logits = blocks.soft_cap(logits, config.logit_soft_cap)
        collected = {f"{COLLECTED}.{place}": boundaries[layer] for place, layer in enumerate(collect_layers)}
        return {LOGITS: logits, HIDDEN_STATES: hidden, **collected}

    return compose


def ranked(compose: Compose, ranking: Ranking | None) -> Compose:
    """Return the same network with rankings of its logits added: `ranked` of `logits`, `ranked.x` of `logits.x`."""
    if ranking is None:
        return compose

    def compose_ranked(blocks: Blocks[Value]) -> Mapping[str, Value]:
        results = dict(compose(blocks))
        for name in [name for name in results if name.split(".")[0] == LOGITS]:
            results[RANKED + name.removeprefix(LOGITS)] = blocks.rank(results[name], ranking)
        return results

    return compose_ranked
