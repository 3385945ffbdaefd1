"""Networks, composed once: layer by layer from parts, and parts from blocks that each runtime provides.

In the native runtime the blocks record operations and `Value` is a numbered buffer; on torch they compute and it is a tensor.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

from paceline.errors import ConfigError
from paceline.models.config import ModelConfig
from paceline.models.layers import Activation, AttentionConfig, ClampedSwiGLU, DenseMLP, ExpertMLP, LayerConfig, QKNorm
from paceline.models.rope_config import RopeConfig
from paceline.runtimes.ranking import Ranking

Value = TypeVar("Value")

TOKEN_IDS = "token_ids"
"""The input of a language model."""

LOGITS, RANKED, HIDDEN_STATES, COLLECTED = "logits", "ranked", "hidden_states", "collected"
"""Results."""


class Blocks(Protocol[Value]):
    """The small functions a network is made of. Weights are named as in `models/tensor_names.py`, without `.weight`.

    Rows are [T, width]; a block that works on heads takes and returns rows of width num_heads * D.
    """

    def embedding(self, name: str) -> Value:
        """Rows [T, E] of the tokens in the input `token_ids` [T], times `config.embedding_scale` rounded to the type of computation."""
        ...

    def linear(self, x: Value, *names: str) -> tuple[Value, ...]:
        """x W^T (+ bias) for each name, as one fused product."""
        ...

    def rms_norm(self, x: Value, name: str) -> Value:
        """x / rms(x) * weight; with `config.norm_offset` the product is taken in float32 before it is rounded."""
        ...

    def head_norm(self, x: Value, name: str, num_heads: int) -> Value:
        """RMS norm over each head's D values."""
        ...

    def rope(self, x: Value, num_heads: int, rope: RopeConfig) -> Value:
        """Rotate each head's first `rotary_size` values, times the temperature of their position; the others pass through."""
        ...

    def attention(self, q: Value, k: Value, v: Value, attention: AttentionConfig, layer: int) -> Value:
        """Write k and v [T, K * D] to the cache of `layer` and attend q [T, H * D] to all each row may see, the last `window` of it.

        Scores are multiplied by `attention.scale`, then soft-capped where `attention.soft_cap` is set. Sinks are the tensor
        `layers.N.attention.sinks`.
        """
        ...

    def gated(self, gate: Value, up: Value, activation: Activation | ClampedSwiGLU) -> Value:
        """activation(gate) * up."""
        ...

    def experts(self, x: Value, logits: Value, mlp: ExpertMLP, prefix: str) -> Value:
        """The experts `prefix + experts.N` that each row chooses by its router's logits [T, experts], weighted and added up, [T, E]."""
        ...

    def sigmoid_gate(self, x: Value, y: Value) -> Value:
        """x * sigmoid(y), y [T, 1]."""
        ...

    def add(self, x: Value, y: Value) -> Value: ...

    def scale(self, x: Value, factor: float) -> Value:
        """x * factor."""
        ...

    def input(self, name: str, width: int) -> Value:
        """Rows [T, width] that `Network.forward` is given by this name; the same value whenever it is asked for."""
        ...

    def concat(self, *values: Value) -> Value:
        """The values side by side, [T, sum of widths]."""
        ...

    def silu_residual(self, x: Value, y: Value) -> Value:
        """x + silu(y)."""
        ...

    def rank(self, logits: Value, ranking: Ranking) -> Value:
        """The records of rows of logits, [R, 2 + 2 * count], for `ranked_rows`."""
        ...

    def logits_rows(self, x: Value) -> Value:
        """The rows whose logits are wanted, [R, E]."""
        ...

    def lm_head(self, x: Value, name: str) -> Value:
        """Logits [R, V] float32."""
        ...

    def soft_cap(self, x: Value, cap: float) -> Value:
        """cap * tanh(x / cap), of logits in float32."""
        ...


class Compose(Protocol):
    """A network: its results by name, [T, width], or [R, width] behind `logits_rows`."""

    def __call__(self, blocks: Blocks[Value]) -> Mapping[str, Value]: ...


def attention_part(blocks: Blocks[Value], attention: AttentionConfig, x: Value, layer: int) -> Value:
    """Attention of rows x, with the products in front of it and behind it."""
    prefix = f"layers.{layer}."
    q, k, v = blocks.linear(x, prefix + "q_proj", prefix + "k_proj", prefix + "v_proj")
    if attention.qk_norm is QKNorm.HEAD:
        q = blocks.head_norm(q, prefix + "q_norm", attention.num_heads)
        k = blocks.head_norm(k, prefix + "k_norm", attention.num_kv_heads)
    elif attention.qk_norm is QKNorm.WIDTH:
        q, k = blocks.rms_norm(q, prefix + "q_norm"), blocks.rms_norm(k, prefix + "k_norm")
    if attention.rotates:
        q, k = blocks.rope(q, attention.num_heads, attention.rope), blocks.rope(k, attention.num_kv_heads, attention.key_rope)
    return blocks.linear(blocks.attention(q, k, v, attention, layer), prefix + "o_proj")[0]


def mlp_part(blocks: Blocks[Value], mlp: DenseMLP | ExpertMLP, x: Value, layer: int) -> Value:
    """The MLP of rows x, or its mixture of experts."""
    prefix = f"layers.{layer}."
    if isinstance(mlp, DenseMLP):
        return _dense(blocks, mlp, x, prefix)
    mixed = blocks.experts(x, blocks.linear(x, prefix + "router")[0], mlp, prefix)
    if mlp.shared is None:
        return mixed
    shared = _dense(blocks, mlp.shared, x, prefix + "shared_expert.")
    if mlp.gates_shared:
        shared = blocks.sigmoid_gate(shared, blocks.linear(x, prefix + "shared_gate")[0])
    return blocks.add(mixed, shared)


def _dense(blocks: Blocks[Value], mlp: DenseMLP, x: Value, prefix: str) -> Value:
    gate, up = blocks.linear(x, prefix + "gate_proj", prefix + "up_proj")
    return blocks.linear(blocks.gated(gate, up, mlp.activation), prefix + "down_proj")[0]


def decoder_layer(blocks: Blocks[Value], config: LayerConfig, x: Value, layer: int, *, normed: Value | None = None) -> Value:
    """One layer: attention, then an MLP, each joined to the stream x [T, E] as `config.norm_order` says.

    Args:
        layer: the number that names its weights and its place in the cache.
        normed: what q, k and v are computed from; None = x, behind a norm where the order has one there.
    """
    prefix, order = f"layers.{layer}.", config.norm_order

    def in_front(x: Value, name: str) -> Value:
        return blocks.rms_norm(x, prefix + name) if order.in_front else x

    def behind(x: Value, name: str) -> Value:
        x = blocks.rms_norm(x, prefix + name) if order.behind else x
        return x if config.residual_scale == 1.0 else blocks.scale(x, config.residual_scale)

    if normed is None:
        normed = in_front(x, "attention_norm")
    x = blocks.add(x, behind(attention_part(blocks, config.mixer, normed, layer), "attention_output_norm"))
    return blocks.add(x, behind(mlp_part(blocks, config.mlp, in_front(x, "mlp_norm"), layer), "mlp_output_norm"))


def decoder(config: ModelConfig, collect_layers: Sequence[int] = ()) -> Compose:
    """A whole language model: its input is `token_ids`.

    Results are `logits` [R, V]; `hidden_states` [T, E], after the final norm; and `collected.0` … [T, E], the residual stream at each
    boundary of `collect_layers` (boundary i is the input of layer i; L is the last layer's output).

    Raises:
        ConfigError: there is no such boundary.
    """
    if any(not 0 <= layer <= config.num_layers for layer in collect_layers):
        raise ConfigError(f"collect_layers = {list(collect_layers)}: boundaries go from 0 to {config.num_layers}")

    def compose(blocks: Blocks[Value]) -> Mapping[str, Value]:
        boundaries = [blocks.embedding("embedding")]
        for index, layer in enumerate(config.layers):
            boundaries.append(decoder_layer(blocks, layer, boundaries[-1], index))
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
    """The same network, which also ranks its rows of logits: `ranked` beside `logits`, `ranked.x` beside `logits.x`."""
    if ranking is None:
        return compose

    def composed(blocks: Blocks[Value]) -> Mapping[str, Value]:
        results = dict(compose(blocks))
        for name in [name for name in results if name.split(".")[0] == LOGITS]:
            results[RANKED + name.removeprefix(LOGITS)] = blocks.rank(results[name], ranking)
        return results

    return composed
