import numpy as np

from paceline.sampling.draw import Distribution, draw
from paceline.sampling.noise import Purpose, exponential, noise_bits


def noise(seed: int, sample_index: int, position: int, token_ids: np.ndarray | int) -> np.ndarray:
    return exponential(noise_bits(seed, sample_index, position, Purpose.TOKEN, token_ids))


def test_sampled_token_is_the_argmax_of_score_minus_log_noise():
    scores = np.random.default_rng(0).standard_normal(40).astype(np.float32)
    for position in range(50):
        everything = Distribution(scores, None, False)
        assert draw(everything, 9, 1, position) == np.argmax(scores - np.log(noise(9, 1, position, 40)))
        ids = np.array([2, 3, 17, 38])
        some = Distribution(scores[ids], ids, False)
        assert draw(some, 9, 1, position) == ids[np.argmax(scores[ids] - np.log(noise(9, 1, position, ids)))]


def test_draw_from_listed_ids_equals_draw_with_others_masked():
    generator = np.random.default_rng(1)
    for position in range(200):
        ids = np.sort(generator.choice(5_000, 300, replace=False))
        scores = generator.standard_normal(300).astype(np.float32)
        dense = np.full(5_000, -np.inf, np.float32)
        dense[ids] = scores
        assert draw(Distribution(scores, ids, False), 5, 0, position) == draw(Distribution(dense, None, False), 5, 0, position)


def test_greedy_sampling_takes_the_lowest_id_on_ties():
    scores = np.array([0, 5, 1, 5], np.float32)
    assert draw(Distribution(scores, None, True), 1, 0, 0) == 1
    assert draw(Distribution(scores, np.array([4, 8, 9, 11]), True), 1, 0, 0) == 8
