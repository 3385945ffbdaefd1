"""The blocks of `runtimes/decoder.py`, computed with tensors: this file is the definition the other runtime is compared with."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from paceline.kv_cache.paged import BLOCK_SIZE
from paceline.models.config import ModelConfig
from paceline.models.layers import (
    Activation,
    AttentionConfig,
    ClampedSwiGLU,
    ExpertMLP,
    GatedDeltaConfig,
    Mamba2Config,
    Recurrent,
    Routing,
    Scoring,
)
from paceline.models.rope import inverse_frequencies, query_scales
from paceline.models.rope_config import RopeConfig
from paceline.runtimes.base import ForwardBatch, Wanted
from paceline.runtimes.decoder import TOKEN_IDS
from paceline.runtimes.ranking import Ranking
from paceline.runtimes.torch.adapters import AdaptedRows, TorchAdapter
from paceline.runtimes.torch.attention import Attention
from paceline.runtimes.torch.ranking import rank_rows
from paceline.runtimes.torch.recurrent import RecurrentPass
from paceline.runtimes.torch.weights import TorchWeights

_ACTIVATIONS: Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU_TANH: partial(F.gelu, approximate="tanh"),
    Activation.SIGMOID: torch.sigmoid,
    Activation.RELU: F.relu,
    Activation.NONE: lambda gate: gate,
}


class TorchBlocks:
    """One pass: its rows, the weights and the cache. Rows are [T, width] in the weights' type."""

    def __init__(
        self,
        config: ModelConfig,
        weights: TorchWeights,
        planes: Sequence[torch.Tensor],
        attention: Attention,
        states: RecurrentPass,
        inputs: Mapping[str, NDArray[Any]],
        batch: ForwardBatch,
        wanted: Wanted,
        adapters: Mapping[int, TorchAdapter],
        scalings: Mapping[int, torch.Tensor],
    ) -> None:
        self._config, self._weights, self._planes, self._attention, self._states = config, weights, planes, attention, states
        device = weights.device
        self._token_ids = inputs.get(TOKEN_IDS)
        self._inputs = {name: torch.from_numpy(np.array(rows)).to(device) for name, rows in inputs.items()}
        self._logits_rows = torch.from_numpy(wanted.rows.astype(np.int64)).to(device)
        self._draws = None if wanted.draws is None else wanted.draws.reshape(-1)
        self._num_drawn = 0  # rows of the rankings so far
        self._batch = batch
        self._adapted = AdaptedRows(adapters, batch, wanted, device, scalings)
        self._positions = torch.from_numpy(batch.positions).to(device)
        self._rotations: dict[tuple[RopeConfig, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._scales: dict[RopeConfig, torch.Tensor] = {}
        self._block_of_row, self._slot_of_row = _slots_of_rows(batch, BLOCK_SIZE, device)

    def embedding(self, name: str) -> torch.Tensor:
        token_ids = self._inputs[TOKEN_IDS]
        return scaled_rows(self._adapted.embedding(token_ids, F.embedding(token_ids, self._weights.plain(name))), self._config)

    def layer_embedding(self, name: str) -> torch.Tensor:
        """Only the rows that are asked for leave the file."""
        if self._token_ids is None:
            raise ValueError("a network with inputs of layers needs token ids")
        rows = self._weights.rows(name, self._token_ids)
        return rows * torch.tensor(self._config.layer_input_size**0.5, dtype=rows.dtype)

    def columns(self, x: torch.Tensor, begin: int, width: int) -> torch.Tensor:
        return x[:, begin : begin + width]

    def input(self, name: str, width: int) -> torch.Tensor:
        return self._inputs[name]

    def concat(self, *values: torch.Tensor) -> torch.Tensor:
        return torch.cat(values, dim=-1)

    def silu_residual(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + F.silu(y)

    def rank(self, logits: torch.Tensor, ranking: Ranking) -> torch.Tensor:
        first = self._num_drawn
        self._num_drawn += len(logits)
        return rank_rows(logits, ranking, None if self._draws is None else self._draws[first : self._num_drawn])

    def linear(self, x: torch.Tensor, *names: str) -> tuple[torch.Tensor, ...]:
        return self._linear(x, names)

    def rms_norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Mean square in float32, then back to the type of x, then times the weight, or these two the other way round."""
        scaled = _normed(x, self._config.norm_eps)
        weight = self._weights.plain(name)
        return (scaled * weight).to(x.dtype) if self._config.norm_offset else weight * scaled.to(x.dtype)

    def head_norm(self, x: torch.Tensor, name: str | None, num_heads: int) -> torch.Tensor:
        heads = _heads(x, num_heads)
        return (_normed(heads, self._config.norm_eps).to(x.dtype) if name is None else self.rms_norm(heads, name)).flatten(-2)

    def rope(self, x: torch.Tensor, num_heads: int, rope: RopeConfig) -> torch.Tensor:
        """Rotate the pairs (j, j + R/2) of the first R values of each head; the temperature comes after it."""
        key = rope, x.shape[-1] // num_heads
        if key not in self._rotations:
            self._rotations[key] = _rotations(*key, self._positions, x.dtype)
        cos, sin = self._rotations[key]
        heads, passed = _heads(x, num_heads).tensor_split([cos.shape[-1]], dim=-1)
        first, second = heads.chunk(2, dim=-1)
        turned = torch.cat((heads * cos + torch.cat((-second, first), dim=-1) * sin, passed), dim=-1).flatten(-2)
        if rope.temperature == 0.0:
            return turned
        if rope not in self._scales:
            self._scales[rope] = torch.from_numpy(query_scales(rope, self._batch.positions)).to(x)[:, None]
        return turned * self._scales[rope]

    def attention(
        self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor] | None, attention: AttentionConfig, layer: int
    ) -> torch.Tensor:
        owner = layer if attention.kv_layer is None else attention.kv_layer
        keys, values = self._planes[2 * owner], self._planes[2 * owner + 1]
        if kv is not None:
            self.store_kv(*kv, attention, owner)
        sinks = self._weights.vector(f"layers.{layer}.attention.sinks") if attention.has_sinks else None
        return self._attention(_heads(q, attention.num_heads), keys, values, attention, sinks).flatten(-2)

    def store_kv(self, k: torch.Tensor, v: torch.Tensor, attention: AttentionConfig, layer: int) -> torch.Tensor:
        self._planes[2 * layer][self._block_of_row, :, self._slot_of_row] = _heads(k, attention.num_kv_heads)
        self._planes[2 * layer + 1][self._block_of_row, :, self._slot_of_row] = _heads(v, attention.num_kv_heads)
        return k[:, :1]

    def convolution(self, x: torch.Tensor, mixer: Recurrent, layer: int) -> torch.Tensor:
        return self._states.convolution(x, layer, self._weights)

    def delta_rule(self, x: torch.Tensor, b: torch.Tensor, a: torch.Tensor, mixer: GatedDeltaConfig, layer: int) -> torch.Tensor:
        return self._states.delta_rule(x, b, a, mixer, layer, self._weights)

    def mamba2(self, x: torch.Tensor, dt: torch.Tensor, mixer: Mamba2Config, layer: int) -> torch.Tensor:
        return self._states.mamba2(x, dt, mixer, layer, self._weights)

    def group_norm(self, x: torch.Tensor, name: str, num_groups: int) -> torch.Tensor:
        """As `rms_norm`, but the weight is as wide as all groups."""
        normed = _normed(_heads(x, num_groups), self._config.norm_eps).flatten(-2)
        return self._weights.plain(name) * normed.to(x.dtype)

    def gated(self, gate: torch.Tensor, up: torch.Tensor, activation: Activation | ClampedSwiGLU) -> torch.Tensor:
        if isinstance(activation, ClampedSwiGLU):
            gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
            return (up + 1) * gate * torch.sigmoid(gate * activation.slope)
        return _ACTIVATIONS[activation](gate) * up

    def experts(self, x: torch.Tensor, logits: torch.Tensor, mlp: ExpertMLP, prefix: str) -> torch.Tensor:
        routing = mlp.routing
        correction = self._weights.vector(f"{prefix}router.correction") if routing.is_corrected else None
        scales = self._weights.vector(f"{prefix}router.scales") if routing.has_scales else None
        choice = _choose_experts(logits, routing, correction, scales)
        mixed = torch.zeros_like(x)
        for expert in torch.unique(choice.experts).tolist():
            own = f"{prefix}experts.{expert}."
            rows, places = torch.where(choice.experts == expert)
            *gates, up = self._linear(x[rows], (*([own + "gate_proj"] if mlp.expert.has_gate else []), own + "up_proj"), rows)
            gate = gates[0] if gates else up
            (down,) = self._linear(self.gated(gate, up, mlp.expert.activation), (own + "down_proj",), rows)
            mixed.index_add_(0, rows, down * choice.weights[rows, places, None].to(x.dtype))
        return mixed

    def sigmoid_gate(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(y)

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    def scale(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor

    def scale_by(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * self._weights.plain(name)

    def logits_rows(self, x: torch.Tensor) -> torch.Tensor:
        return x[self._logits_rows]

    def lm_head(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self._adapted.lm_head(x, F.linear(x, self._weights.plain(name)).float())

    def soft_cap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        return soft_cap(x, cap)

    def _linear(self, x: torch.Tensor, names: tuple[str, ...], chosen: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """The target's products, with what adapters add to them; chosen: the rows of the pass that x has, None = all."""
        fused = self._weights.fused(names)
        outs = torch.split(F.linear(x, fused.weight, fused.bias), list(fused.sizes), dim=-1)
        return self._adapted.linear(x, names, outs, chosen)


@dataclass(frozen=True, slots=True)
class _Choice:
    """Which `experts` [T, chosen] int64 each row chooses, and their `weights` [T, chosen] float32."""

    experts: torch.Tensor
    weights: torch.Tensor


def _choose_experts(logits: torch.Tensor, routing: Routing, correction: torch.Tensor | None, scales: torch.Tensor | None) -> _Choice:
    """The choice of every row.

    Args:
        logits: [T, experts].
        correction, scales: [experts] float32 where the routing has them.
    """
    scores = logits.float().softmax(dim=-1) if routing.scoring is Scoring.SOFTMAX else logits.float().sigmoid()
    compared = scores if correction is None else scores + correction
    if routing.num_groups > 1:
        compared = _without_other_groups(compared, routing)
    experts = compared.sort(dim=-1, descending=True, stable=True).indices[:, : routing.num_chosen]  # the first of equal ones
    weights = scores.gather(1, experts)
    if routing.is_normalized:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + routing.least)
    weights = weights * routing.factor
    return _Choice(experts, weights if scales is None else weights * scales[experts])


def _without_other_groups(compared: torch.Tensor, routing: Routing) -> torch.Tensor:
    groups = compared.reshape(len(compared), routing.num_groups, -1)
    sums = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(-1)
    best = sums.sort(dim=-1, descending=True, stable=True).indices[:, : routing.chosen_groups]
    is_other = torch.ones_like(sums, dtype=torch.bool).scatter(1, best, value=False)
    left: torch.Tensor = groups.masked_fill(is_other[..., None], -torch.inf).flatten(-2)
    return left


def _normed(x: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x / rms(x) of the last dimension, in float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)


def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(x / cap): x, bent so that it stays between -cap and cap."""
    return torch.tanh(x / cap) * cap


def scaled_rows(rows: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Embedding rows as the first layer gets them; the factor is rounded to their type, as the models were trained."""
    return rows if config.embedding_scale == 1.0 else rows * torch.tensor(config.embedding_scale, dtype=rows.dtype)


def _heads(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[T, heads, D] from [T, heads * D]."""
    return x.reshape(len(x), num_heads, -1)


def _rotations(rope: RopeConfig, head_size: int, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [T, 1, R], computed in float32."""
    frequencies, attention_factor = inverse_frequencies(rope, head_size)
    angles = positions[:, None].float() * torch.from_numpy(frequencies).to(positions.device)
    angles = torch.cat((angles, angles), dim=-1)[:, None]
    return (angles.cos() * attention_factor).to(dtype), (angles.sin() * attention_factor).to(dtype)


def _slots_of_rows(batch: ForwardBatch, block_size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each row's key and value go: block [T] and slot in the block [T]."""
    blocks, slots = [], []
    for rows in batch.ranges:
        own = np.arange(rows.cached_len, rows.cached_len + rows.num_rows)
        blocks.append(rows.block_table[own // block_size])
        slots.append(own % block_size)
    return (
        torch.from_numpy(np.concatenate(blocks).astype(np.int64)).to(device),
        torch.from_numpy(np.concatenate(slots).astype(np.int64)).to(device),
    )
