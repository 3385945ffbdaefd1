"""The decoder every supported family is, composed once from blocks that each runtime provides.

In the native runtime the blocks record operations and `Value` is a numbered buffer; on torch they compute and it is a tensor.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from paceline.models.config import ModelConfig

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

    def rope(self, x: Value, num_heads: int, layer: int) -> Value:
        """Rotate each head's first `rotary_size` values by `config.rope_of(layer)`; the others pass through."""
        ...

    def attention(self, q: Value, k: Value, v: Value, layer: int) -> Value:
        """Write k and v [T, K * D] to the cache and attend q [T, H * D] to all each row may see, the last `config.window_of(layer)` of it.

        Scores are multiplied by `config.attention_scale`, then soft-capped where `config.attention_soft_cap` is set.
        """
        ...

    def gated_mlp(self, gate: Value, up: Value) -> Value:
        """activation(gate) * up, the activation being `config.activation`."""
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


def decoder_layer(blocks: Blocks[Value], config: ModelConfig, x: Value, layer: int, *, normed: Value | None = None) -> Value:
    """One pre-norm layer: attention, then a gated MLP, each (normed again with sandwich norms) added to the stream x [T, E].

    Args:
        normed: what q, k and v are computed from; None = x behind the layer's norm.
    """
    prefix = f"layers.{layer}."
    if normed is None:
        normed = blocks.rms_norm(x, prefix + "attention_norm")
    q, k, v = blocks.linear(normed, prefix + "q_proj", prefix + "k_proj", prefix + "v_proj")
    if config.qk_norm:
        q = blocks.head_norm(q, prefix + "q_norm", config.num_heads)
        k = blocks.head_norm(k, prefix + "k_norm", config.num_kv_heads)
    q, k = blocks.rope(q, config.num_heads, layer), blocks.rope(k, config.num_kv_heads, layer)
    (attended,) = blocks.linear(blocks.attention(q, k, v, layer), prefix + "o_proj")
    if config.sandwich_norms:
        attended = blocks.rms_norm(attended, prefix + "attention_output_norm")
    x = blocks.add(x, attended)
    gate, up = blocks.linear(blocks.rms_norm(x, prefix + "mlp_norm"), prefix + "gate_proj", prefix + "up_proj")
    (down,) = blocks.linear(blocks.gated_mlp(gate, up), prefix + "down_proj")
    if config.sandwich_norms:
        down = blocks.rms_norm(down, prefix + "mlp_output_norm")
    return blocks.add(x, down)


def decoder(blocks: Blocks[Value], config: ModelConfig, collect_layers: Sequence[int] = ()) -> tuple[Value, Value, list[Value]]:
    """The whole network.

    Returns:
        logits [R, V], final hidden states [T, E] after the final norm, and the residual stream [T, E] at each boundary
        of `collect_layers` (boundary i is the input of layer i; L is the last layer's output).
    """
    boundaries = [blocks.embedding("embedding")]
    for layer in range(config.num_layers):
        boundaries.append(decoder_layer(blocks, config, boundaries[-1], layer))
    hidden = blocks.rms_norm(boundaries[-1], "final_norm")
    logits = blocks.lm_head(blocks.logits_rows(hidden), "embedding" if config.tied_embeddings else "lm_head")
    if config.logit_soft_cap is not None:
        logits = blocks.soft_cap(logits, config.logit_soft_cap)
    return logits, hidden, [boundaries[i] for i in collect_layers]
