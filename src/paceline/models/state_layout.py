"""Memory layout of recurrent states. A sequence has a float32 array with all layers' states, and a replay record for each later token."""

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.models.layers import Recurrent


@dataclass(frozen=True, slots=True)
class LayerStateLayout:
    """Position of one layer's state in the state array, and of its part in a token's replay record. Offsets and sizes count floats.

    The state has the last inputs of the convolution [kernel_size - 1, C], oldest first, then the matrices, as
    [heads, columns / block_columns, rows, block_columns]. Columns are padded to whole blocks. The replay record has the inputs of a
    token's state update: the convolution's input [C], keys [key_width], updates [value_width] and decays [heads].

    Attributes:
        conv_offset: offset of the layer's state in the state array.
        record_offset: offset of the layer in a replay record.
        block_columns: number of columns that are stored next to each other; 0 = the mixer has no matrices.
    """

    mixer: Recurrent
    conv_offset: int
    record_offset: int
    block_columns: int

    @property
    def num_blocks(self) -> int:
        """Return how many column blocks a head's state matrix has."""
        state = self.mixer.state_shape
        return 0 if state is None else -(-state.columns // self.block_columns)

    @property
    def matrices_offset(self) -> int:
        return self.conv_offset + _round_up_to_vector(self.conv_size)

    @property
    def conv_size(self) -> int:
        return (self.mixer.kernel_size - 1) * self.mixer.channels

    @property
    def matrices_size(self) -> int:
        state = self.mixer.state_shape
        return 0 if state is None else state.num_heads * state.rows * self.num_blocks * self.block_columns

    @property
    def record_size(self) -> int:
        state = self.mixer.state_shape
        return self.mixer.channels + (0 if state is None else state.key_width + state.value_width + state.num_heads)


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Layout of all recurrent layers, by layer index, and the sizes in floats of a sequence's states and of a token's replay record."""

    layers: Mapping[int, LayerStateLayout]
    state_size: int
    record_size: int

    @classmethod
    def for_layers(cls, recurrent_layers: Mapping[int, Recurrent]) -> "StateLayout":
        layers, state_size, record_size = {}, 0, 0
        for layer, mixer in recurrent_layers.items():
            state = mixer.state_shape
            block_columns = 0 if state is None else 32 if state.columns % 32 == 0 else 16
            layout = layers[layer] = LayerStateLayout(mixer, state_size, record_size, block_columns)
            state_size = layout.matrices_offset + layout.matrices_size
            record_size += _round_up_to_vector(layout.record_size)
        return cls(layers, state_size, record_size)


def _round_up_to_vector(count: int) -> int:
    return -(-count // 16) * 16
