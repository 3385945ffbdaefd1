"""Memory layout of recurrent states. A sequence has a float32 array with the states of all layers, and one with a record per token."""

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.models.layers import Recurrent


@dataclass(frozen=True, slots=True)
class LayerStateLayout:
    """Where one layer's state and record are in the arrays of a sequence. Offsets and sizes count floats.

    The state has the last inputs of the convolution [kernel_size - 1, C], oldest first, then the matrices as
    [heads, columns / block, rows, block], with columns padded to whole blocks. The record of a token has what is needed to apply its update
    again: the convolution's input [C], keys [key_width], updates [value_width] and decays [heads].

    Attributes:
        conv_offset: offset of the state in the array of states.
        record_offset: offset in a record.
        block: number of columns that are stored next to each other; 0 = the mixer has no matrices.
    """

    mixer: Recurrent
    conv_offset: int
    record_offset: int
    block: int

    @property
    def num_blocks(self) -> int:
        """Return how many column blocks a head's state matrix has."""
        state = self.mixer.state_shape
        return 0 if state is None else -(-state.columns // self.block)

    @property
    def matrices_offset(self) -> int:
        return self.conv_offset + _round_up_to_vector(self.conv_size)

    @property
    def conv_size(self) -> int:
        return (self.mixer.kernel_size - 1) * self.mixer.channels

    @property
    def matrices_size(self) -> int:
        state = self.mixer.state_shape
        return 0 if state is None else state.heads * state.rows * self.num_blocks * self.block

    @property
    def record_size(self) -> int:
        state = self.mixer.state_shape
        return self.mixer.channels + (0 if state is None else state.key_width + state.value_width + state.heads)


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Layout of all recurrent layers, by layer index, and the total sizes of a sequence's states and of a token's record, in floats."""

    layers: Mapping[int, LayerStateLayout]
    state_size: int
    record_size: int

    @classmethod
    def for_layers(cls, recurrent_layers: Mapping[int, Recurrent]) -> "StateLayout":
        layers, state_size, record_size = {}, 0, 0
        for layer, mixer in recurrent_layers.items():
            state = mixer.state_shape
            block = 0 if state is None else 32 if state.columns % 32 == 0 else 16
            layout = layers[layer] = LayerStateLayout(mixer, state_size, record_size, block)
            state_size = layout.matrices_offset + layout.matrices_size
            record_size += _round_up_to_vector(layout.record_size)
        return cls(layers, state_size, record_size)


def _round_up_to_vector(count: int) -> int:
    return -(-count // 16) * 16
