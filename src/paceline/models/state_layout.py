"""Offsets of recurrent states: one float32 array with the states of all layers of a sequence, and one with the record of each row."""

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.models.layers import Recurrent


@dataclass(frozen=True, slots=True)
class LayerStateLayout:
    """Offsets of one layer, in floats.

    A state has the last inputs of the convolution [kernel_size - 1, C], oldest first, then the matrices as
    [heads, columns / block, rows, block], with columns padded to whole blocks. A record, from which a row's update can be replayed, has the
    input [C], the keys [key_width], the updates [value_width] and the decays [heads].

    Attributes:
        conv_at, matrices_at: offsets in a state.
        record_at: offset in a record.
        block: adjacent columns in the layout; 0 = there are no matrices.
    """

    mixer: Recurrent
    conv_at: int
    matrices_at: int
    record_at: int
    block: int

    @property
    def num_blocks(self) -> int:
        """Return the number of column blocks of a head's state matrix."""
        state = self.mixer.state
        return 0 if state is None else -(-state.columns // self.block)

    @property
    def conv_size(self) -> int:
        return (self.mixer.kernel_size - 1) * self.mixer.channels

    @property
    def matrices_size(self) -> int:
        state = self.mixer.state
        return 0 if state is None else state.heads * state.rows * self.num_blocks * self.block

    @property
    def record_size(self) -> int:
        state = self.mixer.state
        return self.mixer.channels + (0 if state is None else state.key_width + state.value_width + state.heads)


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Offsets of all recurrent layers in a state and in a record, by layer index."""

    layers: Mapping[int, LayerStateLayout]
    state_size: int
    record_size: int

    @classmethod
    def of(cls, recurrent_layers: Mapping[int, Recurrent]) -> "StateLayout":
        layers, state_size, record_size = {}, 0, 0
        for layer, mixer in recurrent_layers.items():
            state = mixer.state
            block = 0 if state is None else 32 if state.columns % 32 == 0 else 16
            conv_at = state_size
            place = LayerStateLayout(mixer, conv_at, 0, record_size, block)
            matrices_at = conv_at + _whole_lanes(place.conv_size)
            layers[layer] = LayerStateLayout(mixer, conv_at, matrices_at, record_size, block)
            state_size = matrices_at + place.matrices_size
            record_size += _whole_lanes(place.record_size)
        return cls(layers, state_size, record_size)


def _whole_lanes(count: int) -> int:
    return -(-count // 16) * 16
