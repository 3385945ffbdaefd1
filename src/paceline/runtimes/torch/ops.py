"""The `Ops` of `runtimes/decoder.py` that compute tensors: the reference with which tests compare the native runtime."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from paceline.kv_cache.cache import BLOCK_SIZE
from paceline.models.config import ModelConfig
from paceline.models.layers import (
    XIELU_PARAMETERS,
    Activation,
    AttentionConfig,
    BlockConvolution,
    ClampedSwiGLU,
    ExpertMLP,
    ExpertRouting,
    GatedDeltaConfig,
    Mamba2Config,
    Recurrent,
    RouterScoring,
)
from paceline.models.rope import inverse_frequencies, query_scales
from paceline.models.rope_config import RopeConfig
from paceline.runtimes.base import ForwardBatch, LogitsRows
from paceline.runtimes.decoder import TOKEN_IDS
from paceline.runtimes.embedding import per_layer_row_indices
from paceline.runtimes.logits_summary import RowSampling, SummaryOptions
from paceline.runtimes.torch.adapters import BatchAdapters, TorchAdapter
from paceline.runtimes.torch.attention import Attention
from paceline.runtimes.torch.recurrent import RecurrentPass
from paceline.runtimes.torch.weights import TorchWeights
from paceline.runtimes.xlora import Scalings

_ACTIVATIONS: Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU_TANH: partial(F.gelu, approximate="tanh"),
    Activation.SIGMOID: torch.sigmoid,
    Activation.RELU: F.relu,
    Activation.NONE: lambda gate: gate,
}

# constants of SplitMix64 (`sampling/noise.py`) as int64: int64 products wrap around like uint64 products
_SPLITMIX_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_SPLITMIX_FACTOR_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_SPLITMIX_FACTOR_2 = 0x94D049BB133111EB - (1 << 64)


class TorchOps:
    """Computes the operations of one pass. Rows have the type of the weights."""

    def __init__(
        self,
        config: ModelConfig,
        weights: TorchWeights,
        kv_storage: Sequence[torch.Tensor],
        attention: Attention,
        states: RecurrentPass,
        inputs: Mapping[str, NDArray[Any]],
        batch: ForwardBatch,
        logits_rows: LogitsRows,
        adapters: Mapping[int, TorchAdapter],
        scalings: Scalings,
    ) -> None:
        self._config, self._weights, self._kv_storage, self._attention, self._states = config, weights, kv_storage, attention, states
        device = weights.device
        self._token_ids = inputs.get(TOKEN_IDS)
        self._inputs = {name: torch.from_numpy(np.array(rows)).to(device) for name, rows in inputs.items()}
        self._logits_rows = torch.from_numpy(logits_rows.rows.astype(np.int64)).to(device)
        self._sampling = None if logits_rows.sampling is None else logits_rows.sampling.reshape(-1)
        self._num_summarized = 0  # rows of logits that `summarize` has summarised in this pass
        self._batch = batch
        self._adapters = BatchAdapters(adapters, batch, logits_rows, device, scalings)
        self._positions = torch.from_numpy(batch.positions).to(device)
        self._cos_and_sin: dict[tuple[RopeConfig, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._scales: dict[RopeConfig, torch.Tensor] = {}
        self._block_of_row, self._slot_of_row = _slots_of_rows(batch, BLOCK_SIZE, device)

    def embedding(self, name: str) -> torch.Tensor:
        token_ids = self._inputs[TOKEN_IDS]
        rows = F.embedding(token_ids, self._weights.weight(name))
        return scaled_embeddings(self._adapters.apply_to_embedding(token_ids, rows), self._config)

    def per_layer_embedding(self, name: str) -> torch.Tensor:
        """See `Ops`. The table is not loaded; only the needed rows are read."""
        if self._token_ids is None:
            raise ValueError("a network with layer inputs needs the input token_ids")
        rows = self._weights.rows(name, per_layer_row_indices(self._token_ids, self._config))
        return rows * torch.tensor(self._config.per_layer_input_size**0.5, dtype=rows.dtype)

    def columns(self, x: torch.Tensor, begin: int, width: int) -> torch.Tensor:
        return x[:, begin : begin + width]

    def input(self, name: str, width: int) -> torch.Tensor:
        return self._inputs[name]

    def concat(self, *values: torch.Tensor) -> torch.Tensor:
        return torch.cat(values, dim=-1)

    def summarize(self, logits: torch.Tensor, options: SummaryOptions) -> torch.Tensor:
        first = self._num_summarized
        self._num_summarized += len(logits)
        return summarize_logits(logits, options, None if self._sampling is None else self._sampling[first : self._num_summarized])

    def linear(self, x: torch.Tensor, *names: str) -> tuple[torch.Tensor, ...]:
        return self._linear(x, names)

    def head_products(self, x: torch.Tensor, name: str, num_heads: int, appended: torch.Tensor | None = None) -> torch.Tensor:
        heads = _split_heads(x, num_heads)
        products = [F.linear(heads[:, head], self._weights.weight(f"{name}.{head}")) for head in range(num_heads)]
        out = torch.stack(products, dim=1)
        return (out if appended is None else torch.cat((out, _split_heads(appended, num_heads)), dim=-1)).flatten(-2)

    def rms_norm(self, x: torch.Tensor, name: str, epsilon: float | None = None) -> torch.Tensor:
        """See `Ops`. x / rms(x) is computed in float32, and converted to the type of x before or after the product with the weight."""
        return self.head_norm(x, name, 1, epsilon=epsilon)

    def layer_norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], self._weights.weight(name), self._bias(name), self._config.norm_eps)

    def head_norm(self, x: torch.Tensor, name: str | None, num_heads: int, *, epsilon: float | None = None) -> torch.Tensor:
        normed = _rms_normed(_split_heads(x, num_heads), self._config.norm_eps if epsilon is None else epsilon)
        if name is None:
            return normed.to(x.dtype).flatten(-2)
        weight = self._weights.weight(name)
        return ((normed * weight).to(x.dtype) if self._config.has_norm_offset else weight * normed.to(x.dtype)).flatten(-2)

    def rope(self, x: torch.Tensor, num_heads: int, rope: RopeConfig) -> torch.Tensor:
        """See `Ops`. The rotated pairs are (j, j + R/2) of the first R values of each head."""
        key = rope, x.shape[-1] // num_heads
        if key not in self._cos_and_sin:
            self._cos_and_sin[key] = _cos_and_sin(*key, self._positions, x.dtype)
        cos, sin = self._cos_and_sin[key]
        heads, unrotated = _split_heads(x, num_heads).tensor_split([cos.shape[-1]], dim=-1)
        first, second = heads.chunk(2, dim=-1)
        rotated = torch.cat((heads * cos + torch.cat((-second, first), dim=-1) * sin, unrotated), dim=-1).flatten(-2)
        if rope.attention_temperature_scale == 0.0:
            return rotated
        if rope not in self._scales:
            self._scales[rope] = torch.from_numpy(query_scales(rope, self._batch.positions)).to(x)[:, None]
        return rotated * self._scales[rope]

    def attention(
        self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor] | None, attention: AttentionConfig, layer: int
    ) -> torch.Tensor:
        kv_source_layer = layer if attention.kv_source_layer is None else attention.kv_source_layer
        keys, values = (
            self._kv_storage[2 * kv_source_layer],
            self._kv_storage[2 * kv_source_layer + 1][..., : attention.latent_size or None],
        )
        if kv is not None:
            self.store_kv(*kv, attention, kv_source_layer)
        sinks = self._weights.vector(f"layers.{layer}.attention.sinks") if attention.has_sinks else None
        return self._attention(_split_heads(q, attention.num_heads), keys, values, attention, sinks).flatten(-2)

    def store_kv(self, k: torch.Tensor, v: torch.Tensor, attention: AttentionConfig, layer: int) -> torch.Tensor:
        self._kv_storage[2 * layer][self._block_of_row, :, self._slot_of_row] = _split_heads(k, attention.num_kv_heads)
        if attention.latent is None:
            self._kv_storage[2 * layer + 1][self._block_of_row, :, self._slot_of_row] = _split_heads(v, attention.num_kv_heads)
        return k[:, :1]

    def convolution(self, x: torch.Tensor, mixer: Recurrent, layer: int) -> torch.Tensor:
        return self._states.convolution(x, layer, self._weights)

    def block_convolution(
        self, x: torch.Tensor, kernel_deltas: torch.Tensor, convolution: BlockConvolution, name: str, kernel_index: int
    ) -> torch.Tensor:
        size = convolution.kernel_size
        base = self._weights.weight(name).reshape(2, size, -1)[kernel_index]
        kernels = kernel_deltas.reshape(len(x), 2, size, -1)[:, kernel_index].repeat_interleave(convolution.group_size, dim=-1) + base
        index_in_range = torch.from_numpy(np.concatenate([np.arange(rows.num_rows) for rows in self._batch.ranges])).to(x.device)
        result = kernels[:, 0] * x
        for distance in range(1, min(size, len(x))):
            earlier = torch.roll(x, distance, 0) * (index_in_range >= distance)[:, None]
            result = result + kernels[:, distance] * earlier
        return result

    def delta_rule(self, x: torch.Tensor, b: torch.Tensor, a: torch.Tensor, mixer: GatedDeltaConfig, layer: int) -> torch.Tensor:
        return self._states.delta_rule(x, b, a, mixer, layer, self._weights)

    def mamba2(self, x: torch.Tensor, dt: torch.Tensor, mixer: Mamba2Config, layer: int) -> torch.Tensor:
        return self._states.mamba2(x, dt, mixer, layer, self._weights)

    def group_norm(self, x: torch.Tensor, name: str, num_groups: int) -> torch.Tensor:
        normed = _rms_normed(_split_heads(x, num_groups), self._config.norm_eps).flatten(-2)
        return self._weights.weight(name) * normed.to(x.dtype)

    def gated(self, gate: torch.Tensor, up: torch.Tensor, activation: Activation | ClampedSwiGLU) -> torch.Tensor:
        if isinstance(activation, ClampedSwiGLU):
            gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
            return (up + 1) * gate * torch.sigmoid(gate * activation.sigmoid_slope)
        return _ACTIVATIONS[activation](gate).repeat_interleave(up.shape[-1] // gate.shape[-1], dim=-1) * up

    def activated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        return _ACTIVATIONS[activation](x)

    def xielu(self, x: torch.Tensor, name: str) -> torch.Tensor:
        alpha_p, alpha_n, beta, eps = (self._weights.vector(f"{name}.{part}").to(x.dtype) for part in XIELU_PARAMETERS)
        curve = torch.expm1(torch.minimum(x, eps)) - x
        return torch.where(x > 0, F.softplus(alpha_p) * x * x, curve * (beta + F.softplus(alpha_n))) + beta * x

    def experts(self, x: torch.Tensor, logits: torch.Tensor, mlp: ExpertMLP, prefix: str) -> torch.Tensor:
        routing = mlp.routing
        correction = self._weights.vector(f"{prefix}router.correction") if routing.has_correction_bias else None
        scales = self._weights.vector(f"{prefix}router.scales") if routing.has_expert_scales else None
        experts, weights = _choose_experts(logits, routing, correction, scales)
        mixed = torch.zeros_like(x)
        for expert in torch.unique(experts).tolist():
            expert_prefix = f"{prefix}experts.{expert}."
            rows, positions = torch.where(experts == expert)
            *gates, up = self._linear(
                x[rows], (*([expert_prefix + "gate_proj"] if mlp.expert.has_gate else []), expert_prefix + "up_proj"), rows
            )
            gate = gates[0] if gates else up
            (down,) = self._linear(self.gated(gate, up, mlp.expert.activation), (expert_prefix + "down_proj",), rows)
            mixed.index_add_(0, rows, down * weights[rows, positions, None].to(x.dtype))
        return mixed

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    def scale(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor

    def scale_by(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * self._weights.weight(name)

    def scale_columns(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * self._weights.weight(name)

    def mix_streams(
        self, y: torch.Tensor, x: torch.Tensor, weights: torch.Tensor | None, num_streams: int, *, offset: float = 0.0, first: int = 0
    ) -> torch.Tensor:
        streams = _split_heads(y, num_streams)
        inputs = x.reshape(len(x), -1, streams.shape[-1])
        weights = x.new_zeros(len(x), num_streams * inputs.shape[1]) if weights is None else weights
        sums = (_split_heads(weights, num_streams) + offset) @ inputs
        return torch.cat((streams[:, :first], streams[:, first:] + sums[:, first:]), dim=1).flatten(1)

    def gaussian_top_k(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        cutoff = x.mean(dim=-1, keepdim=True) + x.std(dim=-1, keepdim=True, unbiased=False) * factor
        return F.relu(x - cutoff)

    def match_rms(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        mean_square, target = (rows.square().mean(-1, keepdim=True) for rows in (x, like))
        return x * target.sqrt() / mean_square.clamp(min=1e-5).sqrt()

    def logits_rows(self, x: torch.Tensor) -> torch.Tensor:
        return x[self._logits_rows]

    def lm_head(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self._adapters.apply_to_logits(x, F.linear(x, self._weights.weight(name), self._bias(name)).float())

    def soft_cap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        return torch.tanh(x / cap) * cap

    def _bias(self, name: str) -> torch.Tensor | None:
        return self._weights.vector(f"{name}.bias").to(self._weights.dtype) if self._weights.has_tensor(f"{name}.bias") else None

    def _linear(self, x: torch.Tensor, names: tuple[str, ...], pass_rows: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """Return products after adapters are applied. pass_rows: index in the pass of each row of x; None = x has all rows."""
        fused = self._weights.fused(names)
        outs = torch.split(F.linear(x, fused.weight, fused.bias), list(fused.sizes), dim=-1)
        return self._adapters.apply_to_products(x, names, outs, pass_rows)


def _choose_experts(
    logits: torch.Tensor, routing: ExpertRouting, correction: torch.Tensor | None, scales: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices of each row's experts, [T, experts per row] int64, and the weights of their outputs, float32.

    Args:
        logits: the router's logits [T, experts].
        correction: [experts] bias added to scores for the choice of experts only, not for the weights; None = no bias.
        scales: [experts] factors by which the weights are multiplied; None = 1.
    """
    scores = logits.float().softmax(dim=-1) if routing.scoring is RouterScoring.SOFTMAX else logits.float().sigmoid()
    selection_scores = scores if correction is None else scores + correction
    if routing.num_expert_groups > 1:
        selection_scores = _mask_other_groups(selection_scores, routing)
    order = selection_scores.sort(dim=-1, descending=True, stable=True).indices  # if scores are equal, the lower index is first
    experts = order[:, : routing.num_experts_per_token]
    weights = scores.gather(1, experts)
    if routing.has_normalized_weights:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + routing.weight_sum_epsilon)
    weights = weights * routing.routed_scaling_factor
    return experts, weights if scales is None else weights * scales[experts]


def _mask_other_groups(selection_scores: torch.Tensor, routing: ExpertRouting) -> torch.Tensor:
    """Return scores with -inf outside the best groups, which have the largest sums of their `top_scores_per_group` largest scores."""
    groups = selection_scores.reshape(len(selection_scores), routing.num_expert_groups, -1)
    sums = groups.topk(min(routing.top_scores_per_group, groups.shape[-1]), dim=-1).values.sum(-1)
    best = sums.sort(dim=-1, descending=True, stable=True).indices[:, : routing.num_selected_groups]
    is_other = torch.ones_like(sums, dtype=torch.bool).scatter(1, best, value=False)
    masked: torch.Tensor = groups.masked_fill(is_other[..., None], -torch.inf).flatten(-2)
    return masked


def _rms_normed(x: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return x / rms(x) over the last dimension, in float32."""
    x_float32 = x.float()
    return x_float32 * torch.rsqrt(x_float32.square().mean(-1, keepdim=True) + epsilon)


def scaled_embeddings(rows: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Return embedding rows times `config.embedding_scale` in the type of the rows."""
    return rows if config.embedding_scale == 1.0 else rows * torch.tensor(config.embedding_scale, dtype=rows.dtype)


def _split_heads(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    return x.reshape(len(x), num_heads, -1)


def _cos_and_sin(rope: RopeConfig, head_size: int, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin [T, 1, R] of the rotary angles, computed in float32."""
    frequencies, attention_factor = inverse_frequencies(rope, head_size)
    angles = positions[:, None].float() * torch.from_numpy(frequencies).to(positions.device)
    angles = torch.cat((angles, angles), dim=-1)[:, None]
    return (angles.cos() * attention_factor).to(dtype), (angles.sin() * attention_factor).to(dtype)


def _slots_of_rows(batch: ForwardBatch, block_size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cache block of each row [T], and the slot in that block [T]."""
    blocks, slots = [], []
    for rows in batch.ranges:
        positions = np.arange(rows.cached_len, rows.cached_len + rows.num_rows)
        blocks.append(rows.block_table[positions // block_size])
        slots.append(positions % block_size)
    return (
        torch.from_numpy(np.concatenate(blocks).astype(np.int64)).to(device),
        torch.from_numpy(np.concatenate(slots).astype(np.int64)).to(device),
    )


def summarize_logits(logits: torch.Tensor, options: SummaryOptions, sampling: RowSampling | None) -> torch.Tensor:
    """Return summaries [R, 2 + 2 * num_top_tokens] of rows of logits [R, V], as kernels/summary.c does; see `decode_summaries`.

    Args:
        sampling: `SAMPLING_DTYPE` [R]; None = no token is sampled.
    """
    columns = min(options.num_columns, logits.shape[1])
    scores = logits[:, :columns].float()
    ids = torch.arange(columns, device=logits.device)
    if options.target_ids is not None:
        ids = torch.from_numpy(options.target_ids[:columns]).to(logits.device)
    sampled = torch.full((len(logits),), -1, device=logits.device)
    if sampling is not None:
        temperatures = torch.from_numpy(sampling["temperature"].copy()).to(logits.device)
        is_sampled = temperatures > 0
        scores = scores / torch.where(is_sampled, temperatures, 1.0)[:, None]
        keys = torch.from_numpy(sampling["key"].view(np.int64).copy()).to(logits.device)
        sampled = torch.where(is_sampled, ids[_gumbel_scores(scores, keys, ids).argmax(dim=1)], sampled)
    log_sum_exp = scores.logsumexp(dim=1)
    values, best = _top_n(scores, options.num_top_tokens)
    token_ids = torch.where(values > -torch.inf, ids[best], -1)
    numbers = torch.cat((sampled[:, None], token_ids), dim=1).to(torch.int32).view(torch.float32)
    return torch.cat((log_sum_exp[:, None], numbers[:, :1], values, numbers[:, 1:]), dim=1)


def _top_n(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `count` largest scores of each row and their columns [R, count]; equal scores are ordered by column."""
    remaining = scores.clone()
    columns = []
    for _ in range(count):
        columns.append(remaining.argmax(dim=1, keepdim=True))
        remaining.scatter_(1, columns[-1], -torch.inf)
    best = torch.cat(columns, dim=1)
    is_first = torch.ones_like(best, dtype=torch.bool)
    for rank in range(1, count):  # argmax repeats a column if all remaining scores are -inf
        is_first[:, rank] = (best[:, :rank] != best[:, rank : rank + 1]).all(dim=1)
    return torch.where(is_first, scores.gather(1, best), -torch.inf), best


def _gumbel_scores(scores: torch.Tensor, keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return score - log(E) [R, V] in float64, where E is exponential noise from the key of each row (`sampling/noise.py`)."""
    mixed = _splitmix64(keys[:, None] + (ids >> 1) * _SPLITMIX_GAMMA)
    bits = (mixed >> ((ids & 1) << 5)) & 0xFFFFFFFF
    return scores.double() - torch.log(-torch.log1p(-(bits.double() + 0.5) * 2.0**-32))


def _splitmix64(state: torch.Tensor) -> torch.Tensor:
    state = (state ^ _logical_shift(state, 30)) * _SPLITMIX_FACTOR_1
    state = (state ^ _logical_shift(state, 27)) * _SPLITMIX_FACTOR_2
    return state ^ _logical_shift(state, 31)


def _logical_shift(state: torch.Tensor, count: int) -> torch.Tensor:
    """Return `state` shifted right by `count` bits, as if it were unsigned."""
    return (state >> count) & ((1 << (64 - count)) - 1)
