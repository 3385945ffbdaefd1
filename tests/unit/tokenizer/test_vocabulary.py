"""Two vocabularies are compared piece by piece."""

import json
import time
from pathlib import Path

import numpy as np
import pytest

from harness.checkpoints import VOCAB_SIZE, write_tokenizer
from paceline.tokenizer.tokenizer import Tokenizer
from paceline.tokenizer.vocabulary import (
    MIN_SHARED_PIECE_SHARE,
    SAMPLE_TEXT,
    Speller,
    VocabularyMatch,
    compare_pieces,
    compare_vocabularies,
    match_ids,
    piece_bytes,
)


def open_tokenizer(directory: Path, pieces: dict[int, str] | None = None, *, vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """The tests' tokenizer with some ids spelled differently."""
    write_tokenizer(directory, vocab_size)
    content = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    by_id = {index: piece for piece, index in content["model"]["vocab"].items()} | (pieces or {})
    content["model"]["vocab"] = {piece: index for index, piece in by_id.items()}
    (directory / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    return Tokenizer.open(directory)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return open_tokenizer(tmp_path_factory.mktemp("target"))


def test_vocabularies_with_equal_pieces_are_the_same(target: Tokenizer, tmp_path: Path) -> None:
    found = compare_vocabularies(target, open_tokenizer(tmp_path))
    assert (found.match, found.same_id_share, found.shared_piece_share, found.first_difference) == (VocabularyMatch.SAME, 1.0, 1.0, None)
    assert found.is_compatible
    assert found.describe_match() == "same vocabularies: 100.0% of the target's ids mean the same to the drafter"


@pytest.mark.parametrize(("vocab_size", "coverage"), [(60, 60 / VOCAB_SIZE), (120, 1.0)])
def test_vocabularies_that_differ_at_the_end_only_are_padded(target: Tokenizer, tmp_path: Path, vocab_size: int, coverage: float) -> None:
    found = compare_vocabularies(target, open_tokenizer(tmp_path, vocab_size=vocab_size))
    assert (found.match, found.same_id_share, found.first_difference) == (VocabularyMatch.PADDED, coverage, None)
    assert found.is_compatible


@pytest.mark.parametrize("token_id", [4, 40, VOCAB_SIZE - 1])
def test_one_differing_vocabulary_piece_is_found(target: Tokenizer, tmp_path: Path, token_id: int) -> None:
    found = compare_vocabularies(target, open_tokenizer(tmp_path, {token_id: "▁mutated"}))
    assert found.match is VocabularyMatch.OVERLAPPING
    assert not found.is_compatible
    assert found.first_difference == (token_id, target.piece(token_id), "▁mutated")
    assert found.same_id_share == found.shared_piece_share == (VOCAB_SIZE - 1) / VOCAB_SIZE
    assert f"id {token_id} is {target.piece(token_id)!r} there and '▁mutated' here" in found.describe_match()


def test_two_exchanged_vocabulary_pieces_are_found(target: Tokenizer, tmp_path: Path) -> None:
    found = compare_vocabularies(target, open_tokenizer(tmp_path, {50: target.piece(51), 51: target.piece(50)}))
    assert (found.match, found.shared_piece_share) == (VocabularyMatch.OVERLAPPING, 1.0)
    assert found.same_id_share == (VOCAB_SIZE - 2) / VOCAB_SIZE


def test_vocabularies_with_few_shared_pieces_are_disjoint(target: Tokenizer, tmp_path: Path) -> None:
    found = compare_vocabularies(target, open_tokenizer(tmp_path, {index: f"x{index}" for index in range(4, VOCAB_SIZE)}))
    assert found.match is VocabularyMatch.DISJOINT
    assert not found.is_compatible
    assert found.shared_piece_share == 4 / VOCAB_SIZE


WORDS = ["the", "cat", "sat", " on", "é", "\n", " ", "a", "b"]


def in_bytes_manner(text: str) -> str:
    from tokenizers.pre_tokenizers import ByteLevel

    return ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]


def test_compare_pieces_works_without_tokenizers() -> None:
    assert compare_pieces(["a", "b", ""], ["a", "b"]).match is VocabularyMatch.SAME
    assert compare_pieces(["a", "b"], ["a", "b", "c"]).match is VocabularyMatch.PADDED
    assert compare_pieces(["a", "b"], ["b", "a"]).first_difference == (0, "a", "b")
    assert compare_pieces([], []).is_unusable


def test_unused_id_of_a_draft_vocabulary_lowers_coverage_only() -> None:
    found = compare_pieces(["a", "b", "c", "d"], ["a", "", "c", "d"])
    assert (found.match, found.same_id_share) == (VocabularyMatch.PADDED, 0.75)


def test_small_prefix_of_a_vocabulary_is_disjoint() -> None:
    pieces = [f"Ġ{index}" for index in range(100)]
    assert compare_pieces(pieces, pieces[:60]).match is VocabularyMatch.PADDED
    assert compare_pieces(pieces, pieces[:40]).match is VocabularyMatch.DISJOINT


def test_padding_tokens_of_gguf_vocabularies_are_ignored() -> None:
    assert compare_pieces(["a", "b"], ["a", "b", "[PAD2]", "[PAD3]"]).match is VocabularyMatch.SAME
    assert compare_pieces(["a", "b", "c"], ["a", "b", "[PAD7]"]).match is VocabularyMatch.OVERLAPPING


def test_piece_bytes_are_equal_in_both_alphabets() -> None:
    sentencepiece = [*(f"<0x{byte:02X}>" for byte in range(256)), *(word.replace(" ", "▁") for word in WORDS), "▁▁"]
    byte_level = [in_bytes_manner(word) for word in [*WORDS, " the", " a"]]
    assert piece_bytes(byte_level) == [word.encode() for word in [*WORDS, " the", " a"]]
    assert piece_bytes(sentencepiece)[256:] == [word.encode() for word in [*WORDS, "  "]]
    found = match_ids(byte_level, sentencepiece)
    assert found[: len(WORDS)].tolist() == [256 + index for index in range(len(WORDS))]  # ordinary pieces before single bytes
    assert found[len(WORDS) :].tolist() == [-1, -1]


def test_vocabulary_overlap_is_independent_of_the_alphabet() -> None:
    sentencepiece = ["▁the", "▁cat", "▁dog", "<0x41>"]
    byte_level = [in_bytes_manner(text) for text in (" the", " cat", " dog", "A")]
    found = compare_pieces(sentencepiece, byte_level)
    assert (found.match, found.shared_piece_share) == (VocabularyMatch.OVERLAPPING, 1.0)
    assert match_ids(sentencepiece, byte_level).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("text", ["", "the", "the cat sat on", "thé\n", "cab"])
def test_speller_spells_any_text_of_its_pieces(text: str) -> None:
    pieces = [in_bytes_manner(word) for word in [*WORDS, "c", "at", "t"]]
    texts = piece_bytes(pieces)
    ids = Speller(pieces).spell(text.encode())
    possible = set(text.encode()) <= set(b"".join(texts))
    assert possible == (ids is not None) or text == "thé\n"
    if ids is not None:
        assert b"".join(texts[token_id] for token_id in ids) == text.encode()


def test_bytes_without_a_piece_are_not_spelled() -> None:
    assert Speller(["a", "b"]).spell(b"abc") is None


def test_vocabulary_overlap_counts_the_pieces_of_sample_texts() -> None:
    """A vocabulary of which most pieces are rare: few are shared, but they are those that text is made of."""
    letters = [chr(code) for code in range(0x21, 0x7F)]
    common = [in_bytes_manner(character) for character in dict.fromkeys([*SAMPLE_TEXT, *letters])]
    common = list(dict.fromkeys("".join(common)))
    rare = [f"qz{index}" for index in range(5 * len(common))]
    sample_ids = [common.index(character) for character in in_bytes_manner(SAMPLE_TEXT)]
    found = compare_pieces([*common, *rare], list(reversed(common)), sample_ids=sample_ids)
    assert (found.match, found.sample_coverage) == (VocabularyMatch.OVERLAPPING, 1.0)
    assert found.shared_piece_share < MIN_SHARED_PIECE_SHARE
    assert compare_pieces([*common, *rare], list(reversed(common))).match is VocabularyMatch.DISJOINT


def test_one_changed_piece_of_a_large_vocabulary_is_found_fast(seed: int) -> None:
    random = np.random.default_rng(seed)
    pieces = [f"Ġ{index:x}" for index in range(151_936)]
    changed = int(random.integers(len(pieces)))
    other = [*pieces[:changed], "other", *pieces[changed + 1 :], *(f"pad{index}" for index in range(128))]
    start = time.process_time()
    found = compare_pieces(pieces, other)
    assert time.process_time() - start < 2.0
    assert found.first_difference == (changed, pieces[changed], "other")


def test_vocabulary_with_extra_added_tokens_matches_as_padded() -> None:
    """Rows of matrices play no part: a tokenizer's pieces do."""
    pieces = [f"Ġ{index:x}" for index in range(151_665)]
    found = compare_pieces(pieces, [*pieces, *(f"<|extra_{index}|>" for index in range(4))])
    assert (found.match, found.same_id_share, found.is_compatible) == (VocabularyMatch.PADDED, 1.0, True)
