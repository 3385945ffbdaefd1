"""Layers of drafters in torch, with the tensor names of the publishers' files.

Attention is that of drafting: rows attend to the context up to a length of their own, and to rows that were drafted with them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.models.config import ModelConfig
from paceline.models.layers import Activation, AttentionConfig, DenseMLP, QKNorm
from paceline.models.rope import inverse_frequencies
from paceline.models.rope_config import RopeConfig
from paceline.models.weights import Weights, as_float32

DAMPING = 0.3
"""Factor of copied output projections: undamped copies answer confidently and wrongly at the start, because their inputs are new."""
FLATTENING = 0.3
"""Factor of the copied norm before the vocabulary matrix: with it SmolLM2's head begins at a loss of 8 in place of 13, and learns in 24
steps what otherwise takes 41."""
NOISE = 0.004
"""Standard deviation of start values that are not copied."""
KeysValues = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Sizes of a drafter's decoder layers."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rope: RopeConfig
    norm_eps: float
    activation: str
    has_qk_norm: bool
    has_bias: bool = False  # whether q, k and v have biases

    @classmethod
    def of_target(cls, target: ModelConfig) -> "LayerSizes":
        """Return the sizes of the target's last layer with attention, and of its last dense MLP."""
        attention = list(target.attention_layers.values())[-1]
        dense = [layer.mlp for layer in target.layers if isinstance(layer.mlp, DenseMLP) and layer.mlp.has_gate]
        is_gelu = bool(dense) and dense[-1].activation is Activation.GELU_TANH
        return cls(
            hidden_size=target.hidden_size,
            intermediate_size=dense[-1].intermediate_size if dense else 3 * target.hidden_size,
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_size=attention.head_size,
            rope=RopeConfig(theta=attention.rope.theta),
            norm_eps=target.norm_eps,
            activation="gelu_pytorch_tanh" if is_gelu else "silu",
            has_qk_norm=attention.qk_norm is QKNorm.HEAD,
        )

    def config(self) -> dict[str, object]:
        return {
            "model_type": "qwen3" if self.has_qk_norm else "qwen2" if self.has_bias else "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_size,
            "rope_theta": self.rope.theta,
            "rms_norm_eps": self.norm_eps,
            "hidden_act": self.activation,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
        }


class RMSNorm(nn.Module):
    """Root mean square norm, in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Rotary(nn.Module):
    """Rotary embedding of pairs (j, j + D / 2).

    Args:
        max_positions: positions to prepare for.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_size: int, rope: RopeConfig, max_positions: int) -> None:
        super().__init__()
        frequencies, _ = inverse_frequencies(rope, head_size)
        angles = torch.from_numpy(np.arange(max_positions, dtype=np.float32)[:, None] * frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x [..., heads, D] at positions [...]."""
        cos, sin = self.cos[positions].unsqueeze(-2), self.sin[positions].unsqueeze(-2)
        low, high = x.float().chunk(2, -1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


class Attention(nn.Module):
    """Projections of an attention layer, and the attention of drafted rows.

    Args:
        width: columns of q, k and v.
    """

    def __init__(self, sizes: LayerSizes, width: int, max_positions: int) -> None:
        super().__init__()
        self.sizes = sizes
        self.q_proj = nn.Linear(width, sizes.num_heads * sizes.head_size, bias=sizes.has_bias)
        self.k_proj = nn.Linear(width, sizes.num_kv_heads * sizes.head_size, bias=sizes.has_bias)
        self.v_proj = nn.Linear(width, sizes.num_kv_heads * sizes.head_size, bias=sizes.has_bias)
        self.o_proj = nn.Linear(sizes.num_heads * sizes.head_size, sizes.hidden_size, bias=False)
        if sizes.has_qk_norm:
            self.q_norm, self.k_norm = RMSNorm(sizes.head_size, sizes.norm_eps), RMSNorm(sizes.head_size, sizes.norm_eps)
        self.rotary = Rotary(sizes.head_size, sizes.rope, max_positions)

    def keys_values(self, x: Tensor, positions: Tensor) -> KeysValues:
        """Return keys and values [..., K, D] of rows x [..., width]."""
        shape = (*x.shape[:-1], self.sizes.num_kv_heads, self.sizes.head_size)
        k = self.k_proj(x).view(shape)
        return self.rotary(self.k_norm(k) if self.sizes.has_qk_norm else k, positions), self.v_proj(x).view(shape)

    def forward(self, x: Tensor, positions: Tensor, context: KeysValues, context_len: Tensor, own: KeysValues | None) -> Tensor:
        """Return the output [B, N, Q, E] of drafted rows.

        Args:
            x: [B, N, Q, width] rows: N groups of Q rows in each sequence.
            positions: [B, N, Q].
            context: keys and values [B, T, K, D] of a sequence.
            context_len: [B, N] rows of the context that a group attends to.
            own: keys and values [B, N, O, K, D] that a group's rows all attend to.
        """
        q = self.q_proj(x).view(*x.shape[:-1], self.sizes.num_heads, self.sizes.head_size)
        q = self.rotary(self.q_norm(q) if self.sizes.has_qk_norm else q, positions)
        mixed = attend(q, context, context_len, own)
        return self.o_proj(mixed.flatten(-2).to(x.dtype))  # type: ignore[no-any-return]


def attend(q: Tensor, context: KeysValues, context_len: Tensor, own: KeysValues | None) -> Tensor:
    """Return [B, N, Q, H, D]: softmax attention of groups of rows over the beginning of a context and over rows of their own.

    Args:
        q: [B, N, Q, H, D]; the other arguments as in `Attention.forward`.
    """
    keys, values = context
    num, groups, rows, heads, size = q.shape
    length, kv_heads = keys.shape[1], keys.shape[2]
    q = (q * size**-0.5).view(num, groups, rows, kv_heads, heads // kv_heads, size)
    wide = q.permute(0, 3, 1, 2, 4, 5)  # [B, K, N, Q, G, D]
    flat = wide.reshape(num, kv_heads, -1, size)
    scores = (flat @ keys.permute(0, 2, 3, 1).to(flat.dtype)).view(num, kv_heads, groups, -1, length).float()
    hidden = torch.arange(length, device=q.device) >= context_len[:, None, :, None, None]
    scores = scores.masked_fill(hidden, float("-inf"))
    if own is not None:
        own_scores = torch.einsum("bknrd,bnokd->bknro", wide.flatten(3, 4), own[0].to(wide.dtype)).float()
        scores = torch.cat([scores, own_scores], -1)
    weights = scores.softmax(-1)
    seen = weights[..., :length].reshape(num, kv_heads, -1, length)
    mixed = (seen.to(values.dtype) @ values.transpose(1, 2)).view(num, kv_heads, groups, rows, heads // kv_heads, size)
    if own is not None:
        added = torch.einsum("bknro,bnokd->bknrd", weights[..., length:].to(own[1].dtype), own[1])
        mixed = mixed + added.view_as(mixed)
    return mixed.permute(0, 2, 3, 1, 4, 5).reshape(num, groups, rows, heads, size)


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.up_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.down_proj = nn.Linear(sizes.intermediate_size, sizes.hidden_size, bias=False)
        self._is_gelu = sizes.activation != "silu"

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        gate = F.gelu(gate, approximate="tanh") if self._is_gelu else F.silu(gate)
        return self.down_proj(gate * self.up_proj(x))  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """A decoder layer with norms before attention and MLP.

    Args:
        width: columns of q, k and v.
    """

    def __init__(self, sizes: LayerSizes, width: int, max_positions: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(sizes.hidden_size, sizes.norm_eps)
        self.self_attn = Attention(sizes, width, max_positions)
        self.post_attention_layernorm = RMSNorm(sizes.hidden_size, sizes.norm_eps)
        self.mlp = GatedMLP(sizes)

    def feed_forward(self, x: Tensor) -> Tensor:
        """Return x with the MLP added."""
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]

    @torch.no_grad()
    def start_from(self, tensors: Mapping[str, Tensor], *, damping: float = DAMPING) -> None:
        """Copy what fits of a layer of the target; the rest is small noise.

        Args:
            tensors: of the layer, by our names. Columns of q, k and v beyond the hidden size are those of the embedding, which come first.
            damping: factor of copied output projections.
        """
        names = {f"self_attn.{name}": name for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")}
        names |= {f"mlp.{name}": name for name in ("gate_proj", "up_proj", "down_proj")}
        names |= {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
        for name, parameter in self.named_parameters():
            stem, _, kind = name.rpartition(".")
            if parameter.dim() == 2:
                parameter.normal_(0.0, NOISE if stem.endswith(("o_proj", "down_proj")) else 0.02)
            found = tensors.get(f"{names.get(stem, stem)}.{kind}")
            place = parameter if parameter.dim() == 1 or found is None else parameter[:, parameter.shape[1] - found.shape[1] :]
            if found is not None and place.shape == found.shape:
                place.copy_(found * damping if stem.endswith(("o_proj", "down_proj")) else found)


def last_layers(weights: Weights, target: ModelConfig, count: int) -> list[dict[str, Tensor]]:
    """Return the tensors, by our names, of the target's last layers with attention and a dense MLP; none where there are fewer."""
    usable = [
        index
        for index, layer in enumerate(target.layers)
        if isinstance(layer.mixer, AttentionConfig) and isinstance(layer.mlp, DenseMLP) and layer.mixer.kv_source_layer is None
    ]
    found = [layer_tensors(weights, index) for index in usable[-count:]]
    return [{} for _ in range(count - len(found))] + found


def layer_tensors(weights: Weights, index: int) -> dict[str, Tensor]:
    """Return the tensors of a layer of the target, by our names."""
    prefix = f"layers.{index}."
    names = [name for name in weights if name.startswith(prefix)]
    return {name.removeprefix(prefix): torch.from_numpy(np.array(as_float32(weights[name]))) for name in names}


def context_projection(num_boundaries: int, hidden_size: int) -> nn.Linear:
    """Return `fc`, which starts as the identity of the last boundary."""
    fc = nn.Linear(num_boundaries * hidden_size, hidden_size, bias=False)
    with torch.no_grad():
        fc.weight.normal_(0.0, NOISE)
        fc.weight[:, -hidden_size:] += torch.eye(hidden_size)
    return fc
