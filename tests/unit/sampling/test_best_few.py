"""Drawing from a row's best few tokens: what the whole row would have given, or nothing."""

import numpy as np
import pytest

from paceline.sampling.best_few import FEW, kept_of_few, redraw
from paceline.sampling.draw import draw
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import LogitsProcessor

SETTINGS = [
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.0, top_p=0.5, min_p=0.2),
    SamplingParams(temperature=1.0, top_k=3),
    SamplingParams(temperature=1.3, top_k=FEW, top_p=0.8),
    SamplingParams(temperature=1.0, top_k=40, min_p=0.05),
    SamplingParams(temperature=0.9, top_p=0.3),
]


@pytest.mark.parametrize("params", SETTINGS, ids=repr)
def test_where_all_that_is_kept_is_known_the_token_is_that_of_the_whole_row(params: SamplingParams, seed: int, large_counts: bool) -> None:
    random, num_known = np.random.default_rng(seed), 0
    for number in range(600 if large_counts else 60):
        row = random.normal(scale=random.uniform(0.5, 6.0), size=200).astype(np.float32)
        whole = LogitsProcessor(params, 200, [1]).process(row).restricted()
        scores = row / np.float32(params.temperature)
        order = np.argsort(-scores, kind="stable")[:FEW]
        shares = np.exp(scores - scores.max())
        kept = kept_of_few(params, (shares[order] / shares.sum()).tolist())
        likely = int((whole.log_probs() > -np.inf).sum())
        assert kept.count <= likely
        if not kept.is_all:
            continue
        num_known += 1
        assert kept.count == likely
        few = order[: kept.count].tolist()
        assert redraw(few, scores[few].tolist(), 5, 0, number) == draw(whole, 5, 0, number)
    assert num_known > 10


def test_what_few_tokens_do_not_tell_is_not_claimed() -> None:
    flat = [1.0 / 200] * FEW
    assert not kept_of_few(SamplingParams(temperature=1.0, top_p=0.9), flat).is_all
    assert not kept_of_few(SamplingParams(temperature=1.0, top_k=40), flat).is_all
    assert kept_of_few(SamplingParams(temperature=1.0, top_k=FEW), flat).is_all
    assert kept_of_few(SamplingParams(temperature=1.0, top_k=2), flat).count == 2
