import time

import numpy as np
import pytest

from paceline.errors import RequestError
from paceline.sampling.constraints import BadWords, RepeatedNgrams, bad_word_ids
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import LogitsProcessor
from paceline.tokenizer.tokenizer import Tokenizer

VOCABULARY = 30


def _banned(constraint, path=()) -> list[int]:
    scores = np.zeros(VOCABULARY, np.float32)
    constraint.mask(scores, path)
    return np.flatnonzero(np.isneginf(scores)).tolist()


def test_no_repeat_ngram_bans_tokens_that_repeat_an_ngram():
    pairs = RepeatedNgrams(2, [1, 2, 1, 3])
    assert _banned(pairs) == []
    assert _banned(pairs, [1]) == [2, 3]
    assert _banned(pairs, [1, 5, 1]) == [2, 3, 5]
    pairs.commit(1)
    assert _banned(pairs) == [2, 3]
    assert _banned(pairs, [1]) == [1, 2, 3]


def test_no_repeat_ngram_counts_prompt_output_and_draft_path():
    triples = RepeatedNgrams(3, [1, 2])
    triples.commit(3)
    assert _banned(triples, [1, 2]) == [3]  # 1 2 3: prompt and output
    assert _banned(triples, [4, 2, 3]) == [4]  # 2 3 4: prompt, output and path
    assert _banned(triples, [5, 6, 7, 5, 6]) == [7]  # the path's own


def test_no_repeat_ngram_bans_nothing_before_the_first_full_ngram():
    assert _banned(RepeatedNgrams(4, [1, 1]), []) == []
    assert _banned(RepeatedNgrams(4, [1, 1]), [1]) == []
    assert _banned(RepeatedNgrams(4, [1, 1]), [1, 1]) == [1]
    assert _banned(RepeatedNgrams(1, [])) == []


def test_bad_words_bans_the_token_that_completes_a_word():
    words = BadWords([(7,), (1, 2), (1, 3), (5, 1, 4), (6, 6, 6, 6)], [6, 5])
    assert _banned(words) == [7]
    assert _banned(words, [1]) == [2, 3, 4, 7]
    assert _banned(words, [2, 1]) == [2, 3, 7]
    words.commit(1)
    assert _banned(words) == [2, 3, 4, 7]
    assert _banned(BadWords([(6, 6, 6, 6)], [6, 6])) == []
    assert _banned(BadWords([(6, 6, 6, 6)], [6, 6]), [6]) == [6]
    assert _banned(BadWords([(6, 6, 6, 6)], [6, 6, 6, 1])) == []


@pytest.mark.parametrize("values", [{"no_repeat_ngram_size": size} for size in (1, 2, 3, 5)] + [{"bad_words": "some"}], ids=str)
def test_ngram_and_bad_word_bans_equal_those_of_transformers(values, seed, tally):
    torch = pytest.importorskip("torch")
    from transformers.generation.logits_process import NoBadWordsLogitsProcessor, NoRepeatNGramLogitsProcessor

    generator = np.random.default_rng(seed)
    words = [(4,), *{tuple(generator.integers(0, 4, generator.integers(2, 6)).tolist()) for _ in range(30)}]
    size = values.get("no_repeat_ngram_size")
    theirs = NoRepeatNGramLogitsProcessor(size) if size else NoBadWordsLogitsProcessor([list(word) for word in words])
    for _ in range(100):
        text = generator.integers(0, 4, generator.integers(1, 40)).tolist()
        num_prompt, num_path = generator.integers(0, len(text) + 1), generator.integers(0, 6)
        prompt, output, path = text[:num_prompt], text[num_prompt : len(text) - num_path], text[max(num_prompt, len(text) - num_path) :]
        ours = RepeatedNgrams(size, prompt) if size else BadWords(words, prompt)
        for token_id in output:
            ours.commit(token_id)
        expected = theirs(torch.tensor([text]), torch.zeros(1, VOCABULARY))[0].numpy()
        assert _banned(ours, path) == np.flatnonzero(np.isneginf(expected)).tolist()
        tally["bans equal to transformers'"] += int(np.isneginf(expected).sum())


@pytest.mark.parametrize("values", [{"no_repeat_ngram_size": 3}, {"bad_words": ((1, 2), (3, 4, 5))}], ids=str)
def test_ngram_and_bad_word_bans_cost_no_more_for_a_long_prompt(values):
    row = np.zeros(100, np.float32)

    def best_time(num_tokens: int) -> float:
        prompt = np.random.default_rng(0).integers(0, 100, num_tokens).tolist()
        processor = LogitsProcessor(SamplingParams(**values), 100, prompt)
        times = []
        for _ in range(200):
            start = time.perf_counter()
            processor.process(row, [1, 2, 3])
            times.append(time.perf_counter() - start)
        return min(times)

    assert best_time(40_000) < 4 * best_time(40)


CUT_LIKE_GPT2 = {"word": [5], " word": [6], "\n": [1], "\nword": [1, 5]}
CUT_LIKE_LLAMA = {"word": [6], " word": [0, 6], "\n": [0, 1], "\nword": [0, 1, 5]}
MERGES_THE_LINE_BREAK = {"word": [5], " word": [6], "\n": [1], "\nword": [8, 9]}


@pytest.mark.parametrize(
    ("spellings", "expected"),
    [(CUT_LIKE_GPT2, {(5,), (6,)}), (CUT_LIKE_LLAMA, {(6,), (0, 6), (5,)}), (MERGES_THE_LINE_BREAK, {(5,), (6,)})],
    ids=["spaces in tokens", "a space before every text", "line breaks in tokens"],
)
@pytest.mark.parametrize("word", ["word", " word"])
def test_bad_word_is_banned_with_and_without_a_leading_space(spellings, expected, word):
    assert set(bad_word_ids([word], spellings.__getitem__)) == expected
    assert set(bad_word_ids([word, [7, 8], (5,)], spellings.__getitem__)) == expected | {(7, 8), (5,)}


def test_bad_word_that_encodes_to_no_tokens_is_refused():
    with pytest.raises(RequestError, match="bad_words: 'x' has no tokens"):
        bad_word_ids(["x"], lambda text: [])


def test_bad_word_ids_of_a_real_tokenizer_occur_in_its_texts(mini_dir):
    tokenizer = Tokenizer.open(mini_dir)

    def encode(text):
        return tokenizer.encode(text, add_special_tokens=False)

    sequences = bad_word_ids(["dog", "(sun"], encode)
    for text in ("dog", "the dog", "a\ndog ran", "(sun", "x (sun"):
        ids = encode(text)
        assert any(tuple(ids[start : start + len(one)]) == one for one in sequences for start in range(len(ids))), text
