import numpy as np
import pytest

from harness.scripted_target import chi_square_tail
from paceline.sampling.noise import Purpose, exponential, key_bits, noise_bits, noise_key

VOCABULARY = 50_001
FROZEN = (
    [3234426104, 3977254700, 128127825, 1572205919],
    [2056671906, 4239837497, 2724911222, 721380362],
)


def _bits(seed=1, sample_index=0, position=0, purpose=Purpose.TOKEN):
    return noise_bits(seed, sample_index, position, purpose, VOCABULARY)


def test_noise_bits_equal_stored_values():
    """Frozen: a change here changes the text of every seeded request."""
    assert noise_bits(0, 0, 0, Purpose.TOKEN, 4).tolist() == FROZEN[0]
    assert noise_bits(2**64 - 1, 3, 12345, Purpose.DRAFT, 4).tolist() == FROZEN[1]


def test_noise_bits_of_an_id_do_not_depend_on_other_ids():
    everything = _bits()
    assert everything.shape == (VOCABULARY,)
    ids = np.array([0, 1, 2, 999, 1000, VOCABULARY - 2, VOCABULARY - 1])
    for some in (ids, ids[3:4], ids.astype(np.int32), ids[::-1]):
        assert np.array_equal(noise_bits(1, 0, 0, Purpose.TOKEN, some), everything[some])
    assert np.array_equal(noise_bits(1, 0, 0, Purpose.TOKEN, VOCABULARY - 7), everything[:-7])


def test_noise_keys_of_arrays_equal_those_of_ints():
    seeds = np.array([0, 1, 2**63, 2**64 - 1], np.uint64)
    samples = np.array([0, 1, 2, 3], np.uint64)
    positions = np.array([0, 5, 100_000, 7], np.uint64)
    keys = noise_key(seeds, samples, positions, Purpose.RESIDUAL)
    one_by_one = [noise_key(int(a), int(b), int(c), Purpose.RESIDUAL) for a, b, c in zip(seeds, samples, positions, strict=True)]
    assert keys.tolist() == one_by_one
    assert np.array_equal(key_bits(keys[:, None], 101)[2], noise_bits(2**63, 2, 100_000, Purpose.RESIDUAL, 101))


def test_sampling_noise_is_finite_and_positive_for_every_bit_pattern():
    extremes = np.array([0, 1, 2, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1], np.uint32)
    noise = exponential(extremes)
    assert np.all(np.isfinite(noise))
    assert np.all(noise > 0.0)
    assert np.all(np.diff(noise) > 0.0)
    assert np.all(np.isfinite(np.log(noise)))


def test_sampling_noise_is_exponentially_distributed(seed):
    noise = np.concatenate([exponential(noise_bits(seed, 0, position, Purpose.TOKEN, VOCABULARY)) for position in range(4)])
    assert noise.dtype == np.float64
    # A Kolmogorov-Smirnov distance this large has probability below 1e-6.
    ranked = np.sort(1.0 - np.exp(-noise))
    distance = np.abs(ranked - (np.arange(len(ranked)) + 0.5) / len(ranked)).max()
    assert distance * np.sqrt(len(ranked)) < 2.7


NEIGHBOURS = {
    "seed": {"seed": 2},
    "far seed": {"seed": 1 + 2**63},
    "sample": {"sample_index": 1},
    "position": {"position": 1},
    "purpose": {"purpose": Purpose.ACCEPT},
}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_neighbouring_noise_keys_give_independent_bits(name):
    one, other = _bits(), _bits(**NEIGHBOURS[name])
    assert _joint_p_value(one, other) > 1e-4
    flipped = np.unpackbits((one ^ other).view(np.uint8)).mean()
    assert abs(flipped - 0.5) < 5.0 / np.sqrt(4 * 32 * VOCABULARY)


@pytest.mark.parametrize("distance", [1, 2, 3, 128])
def test_neighbouring_ids_get_independent_noise_bits(distance):
    for position in range(3):
        bits = _bits(position=position)
        assert _joint_p_value(bits[:-distance], bits[distance:]) > 1e-4


@pytest.mark.parametrize("token_id", [0, 1, 31_999])
def test_noise_bits_of_one_id_are_uniform_over_positions_seeds_and_samples(token_id):
    counts = np.arange(20_000, dtype=np.uint64)
    zeros = np.zeros_like(counts)
    for keys in (
        noise_key(zeros, zeros, counts, Purpose.TOKEN),
        noise_key(counts, zeros, zeros, Purpose.TOKEN),
        noise_key(zeros, counts, zeros, Purpose.TOKEN),
    ):
        bits = key_bits(keys[:, None], np.full((len(keys), 1), token_id))[:, 0]
        assert _joint_p_value(bits[:-1], bits[1:]) > 1e-4


def test_noise_keys_do_not_collide():
    grid = np.stack(np.meshgrid(np.arange(16), np.arange(8), np.arange(256), indexing="ij"), -1).reshape(-1, 3).astype(np.uint64)
    keys = [noise_key(grid[:, 0], grid[:, 1], grid[:, 2], purpose) for purpose in Purpose]
    assert len(np.unique(np.concatenate(keys))) == len(grid) * len(Purpose)


def _joint_p_value(one: np.ndarray, other: np.ndarray) -> float:
    """That the leading four bits of both, taken together, are uniform on 256 cells; the smaller of high and low bits' values."""
    values = []
    for shift in (28, 0):
        cells = ((one >> shift) & 15) * 16 + ((other >> shift) & 15)
        counts = np.bincount(cells.astype(np.int64), minlength=256)
        expected = len(one) / 256
        values.append(chi_square_tail(float(((counts - expected) ** 2 / expected).sum()), 255))
    return min(values)
