import numpy as np
import pytest

from paceline.errors import CheckpointError, RequestError
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import LogitsProcessor
from scripted_target import textbook_probs

VOCABULARY = 40
SAMPLED = {"temperature": 0.7}
PARAMS = {
    "greedy": {},
    "temperature": SAMPLED,
    "top-k": {**SAMPLED, "top_k": 6},
    "top-p": {**SAMPLED, "top_p": 0.7},
    "min-p": {**SAMPLED, "min_p": 0.1},
    "repetition": {**SAMPLED, "repetition_penalty": 1.5},
    "counts": {**SAMPLED, "frequency_penalty": 0.4, "presence_penalty": -0.3},
    "bias": {**SAMPLED, "logit_bias": {3: 2.0, 4: -1.5}},
    "bans": {**SAMPLED, "banned_token_ids": (1, 2, 3)},
    "min tokens": {**SAMPLED, "min_tokens": 3, "stop_token_ids": (5, 6)},
    "greedy penalties": {"repetition_penalty": 2.0, "frequency_penalty": 1.0, "logit_bias": {1: 3.0}},
    "all": {
        **SAMPLED,
        "top_k": 15,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.2,
        "logit_bias": {7: 1.0},
        "banned_token_ids": (9,),
        "min_tokens": 2,
        "stop_token_ids": (11,),
    },
}


def _rows(count: int, spread: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(count).standard_normal((count, VOCABULARY)) * spread).astype(np.float32)


def _dense(distribution) -> np.ndarray:
    if distribution.greedy:
        return np.eye(VOCABULARY)[distribution.argmax()]
    probs = np.zeros(VOCABULARY)
    ids = np.arange(VOCABULARY) if distribution.token_ids is None else distribution.token_ids
    probs[ids] = distribution.probs()
    return probs


@pytest.mark.parametrize("name", PARAMS)
def test_a_row_gets_the_textbook_distribution(name):
    params = SamplingParams(**PARAMS[name])
    generator = np.random.default_rng(1)
    for row in _rows(60):
        prompt, output, path = (
            generator.integers(0, VOCABULARY, size).tolist() for size in (4, generator.integers(5), generator.integers(4))
        )
        processor = LogitsProcessor(params, VOCABULARY, prompt)
        for token_id in output:
            processor.commit(token_id)
        expected = textbook_probs(row, params, prompt, [*output, *path])
        np.testing.assert_allclose(_dense(processor.process(row, path)), expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("name", PARAMS)
def test_a_guessed_path_gives_the_bits_of_the_same_tokens_committed(name):
    params = SamplingParams(**PARAMS[name])
    prompt, output, path = [1, 2, 2], [5, 5, 7], [7, 9, 5, 9, 1]
    plain, guessed = (LogitsProcessor(params, VOCABULARY, prompt) for _ in range(2))
    for token_id in output:
        plain.commit(token_id)
        guessed.commit(token_id)
    for accepted in range(len(path) + 1):
        for row in _rows(5):
            one, other = plain.process(row), guessed.process(row, path[:accepted])
            assert one.scores.tobytes() == other.scores.tobytes()
            assert (one.token_ids is None) == (other.token_ids is None)
            assert one.token_ids is None or np.array_equal(one.token_ids, other.token_ids)
        if accepted < len(path):
            plain.commit(path[accepted])
    assert guessed.num_output_tokens == len(output)


@pytest.mark.parametrize("name", PARAMS)
def test_the_row_is_never_modified(name):
    row = _rows(1)[0]
    row.flags.writeable = False
    before = row.copy()
    processor = LogitsProcessor(SamplingParams(**PARAMS[name]), VOCABULARY, [1, 2, 3])
    processor.commit(5)
    processor.process(row, [6])
    assert row.tobytes() == before.tobytes()


def test_a_row_no_processor_changes_is_not_copied():
    row = _rows(1)[0]
    for values in ({}, {"temperature": 1.0}):
        assert np.shares_memory(LogitsProcessor(SamplingParams(**values), VOCABULARY, [1]).process(row).scores, row)


def test_penalties_read_the_prompt_only_where_they_should():
    row = np.zeros(VOCABULARY, np.float32)
    row[[1, 2, 3]] = 4.0
    row[4] = -4.0
    scores = LogitsProcessor(SamplingParams(repetition_penalty=2.0), VOCABULARY, [1, 1, 4]).process(row, [2, 2]).scores
    assert scores[[1, 2, 3, 4]].tolist() == [2.0, 2.0, 4.0, -8.0]
    params = SamplingParams(presence_penalty=1.0, frequency_penalty=0.5)
    scores = LogitsProcessor(params, VOCABULARY, [1, 1, 4]).process(row, [2, 2]).scores
    assert scores[[1, 2, 3, 4]].tolist() == [4.0, 2.0, 4.0, -4.0]


def test_end_tokens_are_banned_until_the_output_and_path_are_long_enough():
    params = SamplingParams(min_tokens=3, stop_token_ids=(6,), ignore_eos=True)
    processor = LogitsProcessor(params, VOCABULARY, [0], eos_token_ids=(5, VOCABULARY + 3))
    row = np.zeros(VOCABULARY, np.float32)
    processor.commit(1)
    assert np.flatnonzero(np.isneginf(processor.process(row, [1]).scores)).tolist() == [5, 6]
    assert not np.isneginf(processor.process(row, [1, 1]).scores).any()
    processor.commit(1)
    processor.commit(1)
    assert not np.isneginf(processor.process(row).scores).any()


def test_a_wide_result_and_a_narrow_one_hold_the_same_probabilities():
    row = np.zeros(VOCABULARY, np.float32)
    row[:3] = 20.0
    narrow = LogitsProcessor(SamplingParams(temperature=1.0, top_p=0.9), VOCABULARY, ()).process(row)
    assert narrow.token_ids.tolist() == [0, 1, 2]
    row[:20] = 20.0
    wide = LogitsProcessor(SamplingParams(temperature=1.0, top_p=0.9), VOCABULARY, ()).process(row)
    assert wide.token_ids is None
    np.testing.assert_allclose(wide.probs()[:18], 1 / 18)
    assert wide.probs()[18:].sum() == 0.0
    assert np.isneginf(wide.log_probs()[18:]).all()


@pytest.mark.parametrize(("value", "text"), [(np.nan, "NaN"), (np.inf, "inf")])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0, top_p=0.5)])
def test_a_row_that_is_not_finite_is_the_checkpoints_fault(value, text, params):
    row = _rows(1)[0]
    row[17] = value
    with pytest.raises(CheckpointError, match=f"the target produced {text} logits"):
        LogitsProcessor(params, VOCABULARY, ()).process(row)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"banned_token_ids": range(VOCABULARY)}, "banned_token_ids"),
        ({"min_tokens": 1, "stop_token_ids": range(VOCABULARY)}, "min_tokens"),
        ({"temperature": 1.0, "banned_token_ids": range(VOCABULARY)}, "banned_token_ids"),
    ],
)
def test_a_row_in_which_everything_is_banned_is_the_requests_fault(values, name):
    processor = LogitsProcessor(
        SamplingParams(**{key: tuple(value) if isinstance(value, range) else value for key, value in values.items()}), VOCABULARY, ()
    )
    with pytest.raises(RequestError) as refusal:
        processor.process(_rows(1)[0])
    assert refusal.value.parameter == name


def test_an_id_outside_the_vocabulary_is_refused_when_the_request_starts():
    with pytest.raises(RequestError):
        LogitsProcessor(SamplingParams(banned_token_ids=(VOCABULARY,)), VOCABULARY, ())
    with pytest.raises(RequestError) as refusal:
        LogitsProcessor(SamplingParams(repetition_penalty=1.1), VOCABULARY, [1, VOCABULARY])
    assert refusal.value.parameter == "prompt"
