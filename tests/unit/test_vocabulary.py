"""Two vocabularies are compared piece by piece."""

import json
from pathlib import Path

import pytest

from checkpoints import VOCAB_SIZE, write_tokenizer
from paceline.tokenizer import Tokenizer
from paceline.vocabulary import VocabularyMatch, compare_vocabularies


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


def test_the_same_pieces_are_the_same_vocabulary(target: Tokenizer, tmp_path: Path) -> None:
    found = compare_vocabularies(target, open_tokenizer(tmp_path))
    assert (found.match, found.coverage, found.shared_pieces, found.first_difference) == (VocabularyMatch.SAME, 1.0, 1.0, None)
    assert found.is_compatible
    assert found.explain() == "same vocabularies: 100.0% of the target's ids mean the same to the drafter"


@pytest.mark.parametrize(("vocab_size", "coverage"), [(60, 60 / VOCAB_SIZE), (120, 1.0)])
def test_more_or_fewer_ids_at_the_end_are_padding(target: Tokenizer, tmp_path: Path, vocab_size: int, coverage: float) -> None:
    found = compare_vocabularies(target, open_tokenizer(tmp_path, vocab_size=vocab_size))
    assert (found.match, found.coverage, found.first_difference) == (VocabularyMatch.PADDED, coverage, None)
    assert found.is_compatible


@pytest.mark.parametrize("token_id", [4, 40, VOCAB_SIZE - 1])
def test_one_piece_spelled_otherwise_is_found(target: Tokenizer, tmp_path: Path, token_id: int) -> None:
    found = compare_vocabularies(target, open_tokenizer(tmp_path, {token_id: "▁mutated"}))
    assert found.match is VocabularyMatch.OVERLAPPING
    assert not found.is_compatible
    assert found.first_difference == (token_id, target.piece(token_id), "▁mutated")
    assert found.coverage == found.shared_pieces == (VOCAB_SIZE - 1) / VOCAB_SIZE
    assert f"id {token_id} is {target.piece(token_id)!r} there and '▁mutated' here" in found.explain()


def test_two_pieces_exchanged_are_found_although_all_are_shared(target: Tokenizer, tmp_path: Path) -> None:
    found = compare_vocabularies(target, open_tokenizer(tmp_path, {50: target.piece(51), 51: target.piece(50)}))
    assert (found.match, found.shared_pieces) == (VocabularyMatch.OVERLAPPING, 1.0)
    assert found.coverage == (VOCAB_SIZE - 2) / VOCAB_SIZE


def test_vocabularies_with_hardly_a_piece_in_common_are_disjoint(target: Tokenizer, tmp_path: Path) -> None:
    found = compare_vocabularies(target, open_tokenizer(tmp_path, {index: f"x{index}" for index in range(4, VOCAB_SIZE)}))
    assert found.match is VocabularyMatch.DISJOINT
    assert not found.is_compatible
    assert found.shared_pieces == 4 / VOCAB_SIZE
