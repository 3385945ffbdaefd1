"""The decoder every supported family is, composed once from blocks that each runtime provides.

On OpenVINO the blocks add nodes to a graph and `Value` is a graph output; on torch they compute and `Value` is a tensor.
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
        """Rows [T, E] of the batch's token ids."""
        ...

    def linear(self, x: Value, *names: str) -> tuple[Value, ...]:
        """x W^T (+ bias) for each name, as one fused product."""
        ...

    def rms_norm(self, x: Value, name: str) -> Value: ...

    def head_norm(self, x: Value, name: str, num_heads: int) -> Value:
        """RMS norm over each head's D values."""
        ...

    def rope(self, x: Value, num_heads: int) -> Value: ...

    def attention(self, q: Value, k: Value, v: Value, layer: int) -> Value:
        """Write k and v [T, K * D] to the cache and attend q [T, H * D] to all each row may see."""
        ...

    def gated_mlp(self, gate: Value, up: Value) -> Value:
        """silu(gate) * up."""
        ...

    def add(self, x: Value, y: Value) -> Value: ...

    def logits_rows(self, x: Value) -> Value:
        """The rows whose logits are wanted, [R, E]."""
        ...

    def lm_head(self, x: Value, name: str) -> Value:
        """Logits [R, V] float32."""
        ...


def decoder_layer(blocks: Blocks[Value], config: ModelConfig, x: Value, layer: int) -> Value:
    """One pre-norm layer: attention, then a gated MLP, each added to the residual stream x [T, E]."""
    prefix = f"layers.{layer}."
    normed = blocks.rms_norm(x, prefix + "attention_norm")
    q, k, v = blocks.linear(normed, prefix + "q_proj", prefix + "k_proj", prefix + "v_proj")
    if config.qk_norm:
        q = blocks.head_norm(q, prefix + "q_norm", config.num_heads)
        k = blocks.head_norm(k, prefix + "k_norm", config.num_kv_heads)
    q, k = blocks.rope(q, config.num_heads), blocks.rope(k, config.num_kv_heads)
    (attended,) = blocks.linear(blocks.attention(q, k, v, layer), prefix + "o_proj")
    x = blocks.add(x, attended)
    gate, up = blocks.linear(blocks.rms_norm(x, prefix + "mlp_norm"), prefix + "gate_proj", prefix + "up_proj")
    (down,) = blocks.linear(blocks.gated_mlp(gate, up), prefix + "down_proj")
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
    return logits, hidden, [boundaries[i] for i in collect_layers]
