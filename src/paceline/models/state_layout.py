"""Where the parts of recurrent states stand: one array of float32 for all layers of a text, and one for what a row leaves of itself."""

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.models.layers import Recurrent


@dataclass(frozen=True, slots=True)
class LayerStateLayout:
    """One layer, counted in floats.

    A state begins with the inputs of the convolution [kernel_size - 1, C], the oldest first; behind them stand the matrices as
    [heads, columns / block, rows, block], columns rounded up to whole blocks. A record is the input [C], the keys [key_width], the
    updates [value_width] that the keys' outer products are taken with, and the decays [heads].

    Attributes:
        conv_at, matrices_at: in a state.
        record_at: in a record.
        block: columns that stand side by side; 0 = there are no matrices.
    """

    mixer: Recurrent
    conv_at: int
    matrices_at: int
    record_at: int
    block: int

    @property
    def num_blocks(self) -> int:
        """Of a head."""
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
    """Of all recurrent layers, by their number."""

    places: Mapping[int, LayerStateLayout]
    state_size: int
    record_size: int

    @classmethod
    def of(cls, recurrents: Mapping[int, Recurrent]) -> "StateLayout":
        places, state_size, record_size = {}, 0, 0
        for layer, mixer in recurrents.items():
            state = mixer.state
            block = 0 if state is None else 32 if state.columns % 32 == 0 else 16
            conv_at = state_size
            place = LayerStateLayout(mixer, conv_at, 0, record_size, block)
            matrices_at = conv_at + _whole_lanes(place.conv_size)
            places[layer] = LayerStateLayout(mixer, conv_at, matrices_at, record_size, block)
            state_size = matrices_at + place.matrices_size
            record_size += _whole_lanes(place.record_size)
        return cls(places, state_size, record_size)


def _whole_lanes(count: int) -> int:
    return -(-count // 16) * 16
