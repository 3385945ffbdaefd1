import numpy as np
import pytest

from harness.scripted_target import textbook_probs
from paceline.errors import CheckpointError, RequestError
from paceline.sampling.grammars.grammar import Grammar
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import LogitsProcessor, TokenCounts

VOCABULARY = 40
SAMPLED = {"temperature": 0.7}


def lift_what_follows_a_repeat(token_ids, scores):
    """A custom processor that reads the whole text, its end and its length."""
    if len(set(token_ids[-3:])) < len(token_ids[-3:]):
        scores[token_ids[0]] += len(token_ids)
    return scores


def forbid_the_last(token_ids, scores):
    return np.where(np.arange(len(scores)) == token_ids[-1], np.float32(-np.inf), scores)


def lower_the_best(token_ids, scores):
    scores[scores.argmax()] -= 5
    return scores


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
    "no token twice": {**SAMPLED, "no_repeat_ngram_size": 1},
    "no pair twice": {**SAMPLED, "no_repeat_ngram_size": 2},
    "no triple twice": {"no_repeat_ngram_size": 3},
    "bad words": {**SAMPLED, "bad_words": ((3,), (2, 1), (0, 2), (2, 2), (1, 0, 2), (9, 5, 9, 1), (5, 1, 2))},
    "custom": {**SAMPLED, "processors": (lift_what_follows_a_repeat, forbid_the_last)},
    "greedy custom": {"processors": (forbid_the_last, lift_what_follows_a_repeat), "no_repeat_ngram_size": 2},
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
        "bad_words": ((0, 1), (2,)),
        "no_repeat_ngram_size": 2,
        "processors": (lift_what_follows_a_repeat,),
    },
}


class ByTheSum:
    """A constraint with state: bans every third id, which ones depends on the sum of the output."""

    def __init__(self):
        self.committed = []

    def mask(self, scores, path):
        scores[(sum(self.committed) + sum(path)) % 3 :: 3] = -np.inf

    def commit(self, token_id):
        self.committed.append(token_id)


def _rows(count: int, spread: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(count).standard_normal((count, VOCABULARY)) * spread).astype(np.float32)


def _dense(distribution) -> np.ndarray:
    if distribution.greedy:
        return np.eye(VOCABULARY)[distribution.argmax()]
    probs = np.zeros(VOCABULARY)
    ids = np.arange(VOCABULARY) if distribution.token_ids is None else distribution.token_ids
    probs[ids] = distribution.probs()
    return probs


def _bits(distribution) -> tuple[bytes, bytes | None]:
    return distribution.scores.tobytes(), None if distribution.token_ids is None else distribution.token_ids.tobytes()


@pytest.mark.parametrize("name", PARAMS)
def test_logits_processor_gives_the_textbook_distribution(name):
    params = SamplingParams(**PARAMS[name])
    generator = np.random.default_rng(1)
    for row in _rows(60):
        alphabet = generator.choice([3, 12, VOCABULARY])  # small ones repeat themselves
        prompt, output, path = (
            generator.integers(0, alphabet, size).tolist() for size in (4, generator.integers(9), generator.integers(4))
        )
        processor = LogitsProcessor(params, VOCABULARY, prompt)
        for token_id in output:
            processor.commit(token_id)
        expected = textbook_probs(row, params, prompt, [*output, *path])
        np.testing.assert_allclose(_dense(processor.process(row, path)), expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("name", PARAMS)
def test_logits_processor_is_bit_equal_for_draft_path_and_committed_tokens(name):
    params = SamplingParams(**PARAMS[name])
    prompt, output, path = [1, 2, 2], [5, 5, 7], [7, 9, 5, 9, 1]
    plain, drafted = (LogitsProcessor(params, VOCABULARY, prompt) for _ in range(2))
    for token_id in output:
        plain.commit(token_id)
        drafted.commit(token_id)
    for accepted in range(len(path) + 1):
        for row in _rows(5):
            assert _bits(plain.process(row)) == _bits(drafted.process(row, path[:accepted]))
        if accepted < len(path):
            plain.commit(path[accepted])
    assert drafted.num_output_tokens == len(output)


@pytest.mark.parametrize("name", PARAMS)
def test_logits_processor_is_bit_equal_for_every_output_path_split(name, seed, large_counts):
    params = SamplingParams(**PARAMS[name])
    generator = np.random.default_rng(seed)
    for row in _rows(100 if large_counts else 6):
        prompt, text = (generator.integers(0, 4, size).tolist() for size in (generator.integers(1, 6), 12))
        cut = LogitsProcessor(params, VOCABULARY, prompt)
        for num_committed in range(len(text) + 1):
            for end in range(num_committed, min(num_committed + 8, len(text)) + 1):
                whole = LogitsProcessor(params, VOCABULARY, prompt)
                for token_id in text[:end]:
                    whole.commit(token_id)
                cut.process(row, [3, 3, 1])  # another branch of the tree leaves no trace
                assert _bits(cut.process(row, text[num_committed:end])) == _bits(whole.process(row))
            if num_committed < len(text):
                cut.commit(text[num_committed])


@pytest.mark.parametrize("name", PARAMS)
def test_logits_processor_leaves_the_given_logits_unchanged(name):
    row = _rows(1)[0]
    row.flags.writeable = False
    before = row.copy()
    processor = LogitsProcessor(SamplingParams(**PARAMS[name]), VOCABULARY, [1, 2, 3])
    processor.commit(5)
    processor.process(row, [6])
    assert row.tobytes() == before.tobytes()


def test_logits_row_without_edits_is_not_copied():
    row = _rows(1)[0]
    for values in ({}, {"temperature": 1.0}):
        assert np.shares_memory(LogitsProcessor(SamplingParams(**values), VOCABULARY, [1]).process(row).scores, row)


def test_repetition_penalty_counts_the_prompt_and_other_penalties_do_not():
    row = np.zeros(VOCABULARY, np.float32)
    row[[1, 2, 3]] = 4.0
    row[4] = -4.0
    scores = LogitsProcessor(SamplingParams(repetition_penalty=2.0), VOCABULARY, [1, 1, 4]).process(row, [2, 2]).scores
    assert scores[[1, 2, 3, 4]].tolist() == [2.0, 2.0, 4.0, -8.0]
    params = SamplingParams(presence_penalty=1.0, frequency_penalty=0.5)
    scores = LogitsProcessor(params, VOCABULARY, [1, 1, 4]).process(row, [2, 2]).scores
    assert scores[[1, 2, 3, 4]].tolist() == [4.0, 2.0, 4.0, -4.0]


def test_min_tokens_bans_end_tokens_in_output_and_path():
    params = SamplingParams(min_tokens=3, stop_token_ids=(6,), ignore_eos=True)
    processor = LogitsProcessor(params, VOCABULARY, [0], eos_token_ids=(5, VOCABULARY + 3))
    row = np.zeros(VOCABULARY, np.float32)
    processor.commit(1)
    assert np.flatnonzero(np.isneginf(processor.process(row, [1]).scores)).tolist() == [5, 6]
    assert not np.isneginf(processor.process(row, [1, 1]).scores).any()
    processor.commit(1)
    processor.commit(1)
    assert not np.isneginf(processor.process(row).scores).any()


@pytest.mark.parametrize(("value", "text"), [(np.nan, "NaN"), (np.inf, "inf")])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0, top_p=0.5)])
def test_non_finite_logits_are_a_checkpoint_error(value, text, params):
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
        ({"bad_words": tuple((token_id,) for token_id in range(VOCABULARY))}, "bad_words"),
        ({"bad_words": ((1, 2), (1,)), "banned_token_ids": [0, *range(2, VOCABULARY)]}, "banned_token_ids"),
        ({"processors": [lambda token_ids, scores: np.full_like(scores, -np.inf)], "banned_token_ids": (1,)}, "processors"),
    ],
)
def test_banning_every_token_is_a_request_error(values, name):
    processor = LogitsProcessor(
        SamplingParams(**{key: tuple(value) if isinstance(value, range) else value for key, value in values.items()}), VOCABULARY, ()
    )
    with pytest.raises(RequestError, match="no token is left to choose at output position 0") as refusal:
        processor.process(_rows(1)[0])
    assert refusal.value.parameter == name


def test_error_of_a_row_without_tokens_names_the_parameters():
    params = SamplingParams(no_repeat_ngram_size=1, bad_words=((3,),), banned_token_ids=range(4, VOCABULARY))
    processor = LogitsProcessor(params, VOCABULARY, [0, 1])
    processor.process(_rows(1)[0])
    processor.commit(2)
    with pytest.raises(RequestError, match="no_repeat_ngram_size and bad_words left") as refusal:
        processor.process(_rows(1)[0])
    assert refusal.value.parameter == "banned_token_ids"


@pytest.mark.parametrize(
    "values",
    [{}, SAMPLED, {**SAMPLED, "top_p": 0.8}, {**SAMPLED, "top_k": 3, "processors": (lower_the_best,)}],
    ids=["greedy", "sampled", "top-p", "after a custom processor"],
)
def test_grammar_mask_is_applied_after_processors_before_temperature(values):
    """As the same mask by a custom processor that comes last."""
    output, path = [5, 9, 4], [7, 7]

    def by_the_sum(token_ids, scores):
        scores[sum(token_ids[1:]) % 3 :: 3] = -np.inf
        return scores

    constraint = ByTheSum()
    constrained = LogitsProcessor(SamplingParams(**values), VOCABULARY, [2], grammar=constraint)
    expected = LogitsProcessor(SamplingParams(**{**values, "processors": (*values.get("processors", ()), by_the_sum)}), VOCABULARY, [2])
    assert constrained.grammar is constraint
    for token_id in output:
        for row in _rows(10):
            for accepted in range(len(path) + 1):
                assert _bits(constrained.process(row, path[:accepted])) == _bits(expected.process(row, path[:accepted]))
        constrained.commit(token_id)
        expected.commit(token_id)
    assert constraint.committed == output


def test_grammar_that_allows_no_token_is_a_request_error():
    class Nothing(ByTheSum):
        def mask(self, scores, path):
            scores[:] = -np.inf

    processor = LogitsProcessor(SamplingParams(min_tokens=1, stop_token_ids=(3,)), VOCABULARY, (), grammar=Nothing())
    with pytest.raises(RequestError, match="min_tokens left") as refusal:
        processor.process(_rows(1)[0])
    assert refusal.value.parameter == "grammar"


def test_logits_processor_without_required_grammar_or_bad_word_ids_raises():
    with pytest.raises(RequestError) as refusal:
        LogitsProcessor(SamplingParams(bad_words=["word"]), VOCABULARY, [1])
    assert refusal.value.parameter == "bad_words"
    LogitsProcessor(SamplingParams(bad_words=["word"]), VOCABULARY, [1], bad_word_ids=[(1, 2)])
    with pytest.raises(RequestError) as refusal:
        LogitsProcessor(SamplingParams(grammar=Grammar.regex("a+")), VOCABULARY, [1])
    assert refusal.value.parameter == "grammar"
    LogitsProcessor(SamplingParams(grammar=Grammar.regex("a+")), VOCABULARY, [1], grammar=ByTheSum())


@pytest.mark.parametrize("values", [{"bad_words": [[1, VOCABULARY]]}, {}])
def test_bad_word_id_out_of_range_is_refused_at_the_start(values):
    with pytest.raises(RequestError) as refusal:
        LogitsProcessor(SamplingParams(**values), VOCABULARY, [1], bad_word_ids=[] if values else [(VOCABULARY,)])
    assert refusal.value.parameter == "bad_words"


def test_banned_or_prompt_id_out_of_range_is_refused_at_the_start():
    with pytest.raises(RequestError):
        LogitsProcessor(SamplingParams(banned_token_ids=(VOCABULARY,)), VOCABULARY, ())
    with pytest.raises(RequestError) as refusal:
        LogitsProcessor(SamplingParams(repetition_penalty=1.1), VOCABULARY, [1, VOCABULARY])
    assert refusal.value.parameter == "prompt"


def test_token_counts_equal_those_of_the_list(seed):
    generator = np.random.default_rng(seed)
    counts = TokenCounts(np.array([3, 5]))
    text = [3, 5]
    for token_id in generator.integers(0, 300, 500).tolist():
        counts.add(token_id)
        text.append(token_id)
    assert dict(zip(counts.token_ids.tolist(), counts.counts.tolist(), strict=True)) == {one: text.count(one) for one in text}


def test_token_counts_drop_last_undoes_extend():
    counts = TokenCounts()
    counts.extend([7, 8, 7])
    counts.extend([8, 9, 9, 10, 7])
    counts.drop_last([8, 9, 9, 10, 7])
    assert counts.token_ids.tolist() == [7, 8]
    assert counts.counts.tolist() == [2.0, 1.0]
    counts.add(10)
    assert counts.token_ids.tolist() == [7, 8, 10]
