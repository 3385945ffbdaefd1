"""The decoder of every supported family, composed once: layer by layer from parts, and parts from blocks that each runtime provides.

In the native runtime the blocks record operations and `Value` is a numbered buffer; on torch they compute and it is a tensor.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from paceline.models.config import ModelConfig
from paceline.models.layers import Activation, AttentionConfig, DenseMLP, LayerConfig, QKNorm

Value = TypeVar("Value")


class Blocks(Protocol[Value]):
    """The small functions a network is made of. Weights are named as in `models/families.py`, without `.weight`.

    Rows are [T, width]; a block that works on heads takes and returns rows of width num_heads * D.
    """

    def embedding(self, name: str) -> Value:
        """Rows [T, E] of the batch's token ids, times `config.embedding_scale` rounded to the type of computation."""
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

    def rope(self, x: Value, num_heads: int, attention: AttentionConfig) -> Value:
        """Rotate each head's first `rotary_size` values by `attention.rope`; the others pass through."""
        ...

    def attention(self, q: Value, k: Value, v: Value, attention: AttentionConfig, layer: int) -> Value:
        """Write k and v [T, K * D] to the cache of `layer` and attend q [T, H * D] to all each row may see, the last `window` of it.

        Scores are multiplied by `attention.scale`, then soft-capped where `attention.soft_cap` is set.
        """
        ...

    def gated(self, gate: Value, up: Value, activation: Activation) -> Value:
        """activation(gate) * up."""
        ...

    def add(self, x: Value, y: Value) -> Value: ...

    def logits_rows(self, x: Value) -> Value:
        """The rows whose logits are wanted, [R, E]."""
        ...

    def lm_head(self, x: Value, name: str) -> Value:
        """Logits [R, V] float32."""
        ...

    def soft_cap(self, x: Value, cap: float) -> Value:
        """cap * tanh(x / cap), of logits in float32."""
        ...


def attention_part(blocks: Blocks[Value], attention: AttentionConfig, x: Value, layer: int) -> Value:
    """Attention of rows x, with the products in front of it and behind it."""
    prefix = f"layers.{layer}."
    q, k, v = blocks.linear(x, prefix + "q_proj", prefix + "k_proj", prefix + "v_proj")
    if attention.qk_norm is QKNorm.HEAD:
        q = blocks.head_norm(q, prefix + "q_norm", attention.num_heads)
        k = blocks.head_norm(k, prefix + "k_norm", attention.num_kv_heads)
    elif attention.qk_norm is QKNorm.WIDTH:
        q, k = blocks.rms_norm(q, prefix + "q_norm"), blocks.rms_norm(k, prefix + "k_norm")
    q, k = blocks.rope(q, attention.num_heads, attention), blocks.rope(k, attention.num_kv_heads, attention)
    return blocks.linear(blocks.attention(q, k, v, attention, layer), prefix + "o_proj")[0]


def mlp_part(blocks: Blocks[Value], mlp: DenseMLP, x: Value, layer: int) -> Value:
    """The gated MLP of rows x."""
    prefix = f"layers.{layer}."
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
        return blocks.rms_norm(x, prefix + name) if order.behind else x

    if normed is None:
        normed = in_front(x, "attention_norm")
    x = blocks.add(x, behind(attention_part(blocks, config.mixer, normed, layer), "attention_output_norm"))
    return blocks.add(x, behind(mlp_part(blocks, config.mlp, in_front(x, "mlp_norm"), layer), "mlp_output_norm"))


def decoder(blocks: Blocks[Value], config: ModelConfig, collect_layers: Sequence[int] = ()) -> tuple[Value, Value, list[Value]]:
    """The whole network.

    Returns:
        logits [R, V], final hidden states [T, E] after the final norm, and the residual stream [T, E] at each boundary
        of `collect_layers` (boundary i is the input of layer i; L is the last layer's output).
    """
    boundaries = [blocks.embedding("embedding")]
    for index, layer in enumerate(config.layers):
        boundaries.append(decoder_layer(blocks, layer, boundaries[-1], index))
    hidden = blocks.rms_norm(boundaries[-1], "final_norm")
    logits = blocks.lm_head(blocks.logits_rows(hidden), "embedding" if config.tied_embeddings else "lm_head")
    if config.logit_soft_cap is not None:
        logits = blocks.soft_cap(logits, config.logit_soft_cap)
    return logits, hidden, [boundaries[i] for i in collect_layers]
