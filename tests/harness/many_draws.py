"""One position drawn for many seeds at once, for tests that count."""

import numpy as np
from numpy.typing import NDArray

from paceline.sampling.draw import Distribution, draw
from paceline.sampling.noise import Purpose, exponential, key_bits, noise_key

NUM_COMPARED = 20


def draw_many(row: Distribution, seeds: NDArray[np.uint64], sample_index: int, position: int) -> NDArray[np.int64]:
    """[len(seeds)] tokens of a short row; some of them are compared with `draw`."""
    samples, positions = np.full(len(seeds), sample_index, np.uint64), np.full(len(seeds), position, np.uint64)
    keys = noise_key(seeds, samples, positions, Purpose.TOKEN)
    ids = np.arange(len(row.scores)) if row.token_ids is None else row.token_ids
    tokens = ids[np.argmax(row.scores - np.log(exponential(key_bits(keys[:, None], ids))), axis=1)]
    assert tokens[:NUM_COMPARED].tolist() == [draw(row, seed, sample_index, position) for seed in seeds[:NUM_COMPARED].tolist()]
    return tokens
