"""Recurrent layers, computed row by row by their definition: each row continues from the state of its parent. States are float32."""

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from paceline.kv_cache.recurrent_state import NO_RECORD, RecurrentStateCache, StateUpdate
from paceline.models.layers import GatedDeltaConfig, Mamba2Config, ShortConvConfig
from paceline.models.state_layout import LayerStateLayout, StateLayout
from paceline.runtimes.base import RowRange
from paceline.runtimes.torch.weights import TorchWeights

_L2_EPS = 1e-6
"""Added before the square root in L2 norms. Source: Qwen3-Next's model in transformers 5.23."""


class RecurrentPass:
    """Computes the recurrent layers of one pass, starting from the stored states of its sequences."""

    def __init__(self, layout: StateLayout, cache: RecurrentStateCache | None, ranges: Sequence[RowRange]) -> None:
        self._layout, self._cache, self._ranges = layout, cache, ranges
        self._updates: dict[int, StateUpdate] = {}
        self._updated_states: list[tuple[_Convolution | _Matrices, torch.Tensor, torch.Tensor]] = []

    def convolution(self, x: torch.Tensor, layer: int, weights: TorchWeights) -> torch.Tensor:
        layout, name = self._layout.layers[layer], f"layers.{layer}.conv"
        bias = weights.vector(name + ".bias") if weights.has_tensor(name + ".bias") else None
        recurrence = _Convolution(layout, x.float(), weights.vector(name + ".weight"), bias)
        self._run_recurrence(recurrence)
        return (recurrence.out if isinstance(layout.mixer, ShortConvConfig) else F.silu(recurrence.out)).to(x.dtype)

    def delta_rule(
        self, x: torch.Tensor, b: torch.Tensor, a: torch.Tensor, mixer: GatedDeltaConfig, layer: int, weights: TorchWeights
    ) -> torch.Tensor:
        shape, num_rows = mixer.state_shape, len(x)
        q, k, v = torch.split(x.float(), [shape.key_width, shape.key_width, shape.value_width], dim=-1)
        q, k = (_l2_normalized(tensor.reshape(num_rows, shape.num_key_heads, -1)) for tensor in (q, k))
        gate = F.softplus(a.float() + weights.vector(f"layers.{layer}.decay.bias"))
        decays = torch.exp(weights.vector(f"layers.{layer}.decay.weight") * gate)
        values = v.reshape(num_rows, shape.num_heads, -1)
        recurrence = _Matrices(
            self._layout.layers[layer], k, q * mixer.key_size**-0.5, values, decays, mixer.beta_scale * torch.sigmoid(b.float())
        )
        self._run_recurrence(recurrence)
        return recurrence.out.flatten(-2).to(x.dtype)

    def mamba2(self, x: torch.Tensor, dt: torch.Tensor, mixer: Mamba2Config, layer: int, weights: TorchWeights) -> torch.Tensor:
        shape, num_rows = mixer.state_shape, len(x)
        values, k, q = torch.split(x.float(), [shape.value_width, shape.key_width, shape.key_width], dim=-1)
        values = values.reshape(num_rows, shape.num_heads, -1)
        k, q = (tensor.reshape(num_rows, shape.num_key_heads, -1) for tensor in (k, q))
        steps = F.softplus(dt.float() + weights.vector(f"layers.{layer}.decay.bias")).clamp(*mixer.dt_limits)
        decays = torch.exp(weights.vector(f"layers.{layer}.decay.weight") * steps)
        recurrence = _Matrices(self._layout.layers[layer], k, q, steps[..., None] * values, decays)
        self._run_recurrence(recurrence)
        skip_connection = weights.vector(f"layers.{layer}.skip.weight")[:, None] * values
        return (recurrence.out + skip_connection).flatten(-2).to(x.dtype)

    def finish(self) -> None:
        """Write back the stored states, updated by committed rows (`StateUpdate.num_applied_rows`)."""
        for recurrence, state, stored in self._updated_states:
            recurrence.store_state(state, stored)
        for update in self._updates.values():
            update.has_run[0] = 1

    def _run_recurrence(self, recurrence: "_Convolution | _Matrices") -> None:
        for rows in self._ranges:
            update = self._planned_update(rows.sequence_id)
            state = recurrence.load_state(update.state)
            for count, record in enumerate(update.pending_records, 1):
                state = recurrence.replay_row(state, update.records[record])
                if count == update.num_applied_rows:
                    self._updated_states.append((recurrence, state, update.state))
                _save_states(recurrence, state, count, update)
            _run_rows(recurrence, state, rows, update)

    def _planned_update(self, sequence_id: int) -> StateUpdate:
        if self._cache is None:
            raise RuntimeError("a network with recurrent layers needs a cache: call new_cache")
        if sequence_id not in self._updates:
            self._updates[sequence_id] = self._cache.plan_update(sequence_id)
        return self._updates[sequence_id]


def _run_rows(recurrence: "_Convolution | _Matrices", committed: torch.Tensor, rows: RowRange, update: StateUpdate) -> None:
    """Run the rows of a range, each from the state of its parent. A state is freed when no later row needs it."""
    parents = rows.parents()
    last_child = {parent: row for row, parent in enumerate(parents)}
    states = {-1: committed}
    for row, parent in enumerate(parents):
        record = update.row_records[row]
        state = recurrence.compute_row(states[parent], rows.start + row, None if record == NO_RECORD else update.records[record])
        _save_states(recurrence, state, len(update.pending_records) + row + 1, update)
        if last_child[parent] == row:
            del states[parent]
        if row in last_child:
            states[row] = state


def _save_states(recurrence: "_Convolution | _Matrices", state: torch.Tensor, count: int, update: StateUpdate) -> None:
    """Copy the state, which is that after `count` rows, to each of `update.states_to_save` that belongs to `count` rows."""
    for end, stored in update.states_to_save:
        if end == count:
            recurrence.store_state(state, stored)


class _Convolution:
    """A causal convolution, whose state is the last inputs [kernel_size - 1, C], oldest first. `_Matrices` has the same methods.

    `stored` is the stored recurrent state of a layer, which contains the states of the convolution and of the matrices.
    """

    def __init__(self, layout: LayerStateLayout, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._layout, self._x, self._weight, self._bias = layout, x, weight.T, bias
        self.out = torch.empty_like(x)

    def load_state(self, stored: torch.Tensor | None) -> torch.Tensor:
        """Return a copy of the state in `stored`; None = zeros, the state before the first token."""
        shape = self._layout.mixer.kernel_size - 1, self._layout.mixer.channels
        return self._x.new_zeros(shape) if stored is None else self._view_state(stored).reshape(shape).clone()

    def store_state(self, state: torch.Tensor, stored: torch.Tensor) -> None:
        self._view_state(stored)[:] = state.flatten()

    def replay_row(self, state: torch.Tensor, record: torch.Tensor) -> torch.Tensor:
        """Return the state after a committed row, computed from the replay record of the row."""
        return torch.cat((state, self._view_input(record)[None]))[1:]

    def compute_row(self, state: torch.Tensor, row: int, record: torch.Tensor | None) -> torch.Tensor:
        """Return the state after a row of the pass. Store the output of the row and, if `record` is given, its replay record."""
        inputs = torch.cat((state, self._x[row][None]))
        convolved = (inputs * self._weight).sum(0)
        self.out[row] = convolved if self._bias is None else convolved + self._bias
        if record is not None:
            self._view_input(record)[:] = self._x[row]
        return inputs[1:]

    def _view_state(self, stored: torch.Tensor) -> torch.Tensor:
        return stored[self._layout.conv_offset : self._layout.conv_offset + self._layout.num_conv_values]

    def _view_input(self, record: torch.Tensor) -> torch.Tensor:
        return record[self._layout.record_offset : self._layout.record_offset + self._layout.mixer.channels]


class _Matrices:
    """State matrices S [rows, columns], one for each head. Each row updates S = decay * S + key update^T; its output is S^T query.

    Args:
        keys, queries: [T, key_heads, rows].
        values: [T, heads, columns].
        decays: [T, heads].
        rates: [T, heads] of a delta rule: update = rate * (value - S^T key), with the decayed S; None = update is the value.
    """

    def __init__(
        self,
        layout: LayerStateLayout,
        keys: torch.Tensor,
        queries: torch.Tensor,
        values: torch.Tensor,
        decays: torch.Tensor,
        rates: torch.Tensor | None = None,
    ) -> None:
        assert layout.mixer.state_shape is not None
        self._layout, self._sizes = layout, layout.mixer.state_shape
        self._keys, self._queries, self._values, self._decays, self._rates = keys, queries, values, decays, rates
        self.out = torch.empty_like(values)

    def load_state(self, stored: torch.Tensor | None) -> torch.Tensor:
        sizes = self._sizes
        if stored is None:
            return self._values.new_zeros(sizes.num_heads, sizes.rows, sizes.columns)
        return self._view_state(stored).permute(0, 2, 1, 3).flatten(2)[..., : sizes.columns].clone()

    def store_state(self, state: torch.Tensor, stored: torch.Tensor) -> None:
        view = self._view_state(stored)
        padded = F.pad(state, (0, view.shape[1] * view.shape[3] - state.shape[2]))
        view[:] = padded.reshape(*state.shape[:2], view.shape[1], view.shape[3]).permute(0, 2, 1, 3)

    def replay_row(self, state: torch.Tensor, record: torch.Tensor) -> torch.Tensor:
        key, update, decay = self._view_fields(record)
        return _add_outer_product(state * decay[:, None, None], self._repeat_for_heads(key), update)

    def compute_row(self, state: torch.Tensor, row: int, record: torch.Tensor | None) -> torch.Tensor:
        key, update, decay = self._repeat_for_heads(self._keys[row]), self._values[row], self._decays[row]
        state = state * decay[:, None, None]
        if self._rates is not None:
            update = self._rates[row, :, None] * (update - _multiply_key(key, state))
        state = _add_outer_product(state, key, update)
        self.out[row] = _multiply_key(self._repeat_for_heads(self._queries[row]), state)
        if record is not None:
            for field, number in zip(self._view_fields(record), (self._keys[row], update, decay), strict=True):
                field[:] = number
        return state

    def _repeat_for_heads(self, key: torch.Tensor) -> torch.Tensor:
        """Return `key` [key_heads, rows] repeated for the heads that share it, [heads, rows]."""
        return key.repeat_interleave(self._sizes.num_heads // self._sizes.num_key_heads, dim=0)

    def _view_state(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the matrices in `stored` as a view [heads, blocks, rows, columns of a block]."""
        layout = self._layout
        matrices = stored[layout.matrices_offset : layout.matrices_offset + layout.num_matrix_values]
        return matrices.view(self._sizes.num_heads, layout.num_blocks, self._sizes.rows, layout.block_columns)

    def _view_fields(self, record: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return views of the key [key_heads, rows], update [heads, columns] and decay [heads] in a replay record."""
        sizes, begin = self._sizes, self._layout.record_offset + self._layout.mixer.channels
        fields = record[begin : begin + sizes.key_width + sizes.value_width + sizes.num_heads]
        key, update, decay = torch.split(fields, [sizes.key_width, sizes.value_width, sizes.num_heads])
        return key.view(sizes.num_key_heads, sizes.rows), update.view(sizes.num_heads, sizes.columns), decay


def _add_outer_product(matrices: torch.Tensor, key: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
    """Return S + key update^T for the matrix S of each head."""
    return matrices + key[:, :, None] * update[:, None]


def _multiply_key(key: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """Return S^T key for the matrix S of each head, [heads, columns]."""
    return (key[:, :, None] * matrices).sum(1)


def _l2_normalized(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _L2_EPS)
