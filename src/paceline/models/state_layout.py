"""Memory layout of recurrent states: a float32 array with the states of all layers, and a replay record for each token after it."""

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.models.layers import Recurrent


@dataclass(frozen=True, slots=True)
class LayerStateLayout:
    """Position of one layer's state in the state array, and of its part in a token's replay record. Offsets count floats.

    The state has the last inputs of the convolution [kernel_size - 1, C], oldest first, then the matrices, as
    [heads, columns / block_columns, rows, block_columns]. Columns are padded to whole blocks. The replay record has the inputs of a
    token's state update: the convolution's input [C], keys [key_width], updates [value_width] and decays [heads].

    Attributes:
        conv_offset: offset of the layer's state in the state array.
        record_offset: offset of the layer's part in a replay record.
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
        """Return the offset of the layer's state matrices in the state array."""
        return self.conv_offset + _round_up_to_vector_size(self.num_conv_values)

    @property
    def num_conv_values(self) -> int:
        return (self.mixer.kernel_size - 1) * self.mixer.channels

    @property
    def num_matrix_values(self) -> int:
        state = self.mixer.state_shape
        return 0 if state is None else state.num_heads * state.rows * self.num_blocks * self.block_columns

    @property
    def num_record_values(self) -> int:
        state = self.mixer.state_shape
        return self.mixer.channels + (0 if state is None else state.key_width + state.value_width + state.num_heads)


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Layouts of the states of recurrent layers, by layer index, and the numbers of floats in a state array and in a replay record."""

    layers: Mapping[int, LayerStateLayout]
    num_state_values: int
    num_record_values: int

    @classmethod
    def for_layers(cls, recurrent_layers: Mapping[int, Recurrent]) -> "StateLayout":
        layers, num_state_values, num_record_values = {}, 0, 0
        for layer, mixer in recurrent_layers.items():
            state = mixer.state_shape
            block_columns = 0 if state is None else 32 if state.columns % 32 == 0 else 16
            layout = layers[layer] = LayerStateLayout(mixer, num_state_values, num_record_values, block_columns)
            num_state_values = layout.matrices_offset + layout.num_matrix_values
            num_record_values += _round_up_to_vector_size(layout.num_record_values)
        return cls(layers, num_state_values, num_record_values)


def _round_up_to_vector_size(num_values: int) -> int:
    return -(-num_values // 16) * 16
