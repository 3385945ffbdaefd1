"""Which ids a text has most."""

from pathlib import Path
from typing import cast

import pytest

from paceline import ConfigError
from paceline.drafters import draft_vocab as module
from paceline.drafters.draft_vocab import most_frequent_ids, read_corpus, select_draft_vocab
from paceline.drafters.options import HeadOptions
from paceline.tokenizer.tokenizer import Tokenizer


class Letters:
    """Ids are the letters' places, a = 0; 25 ends a text."""

    end_token_ids = (25, 600)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) - ord("a") for letter in text]


LETTERS = cast(Tokenizer, Letters())


def test_draft_vocab_takes_frequent_ids_and_end_tokens_then_the_lowest() -> None:
    text = "xxxxwwwqq" + "t"
    assert most_frequent_ids(text, LETTERS, 4, 26).tolist() == [16, 22, 23, 25]
    assert most_frequent_ids(text, LETTERS, 8, 26).tolist() == [0, 1, 2, 16, 19, 22, 23, 25], "of ids without a use the lowest"
    assert most_frequent_ids("ba", LETTERS, 2, 26).tolist() == [0, 25], "of ids as frequent the lowest"
    assert most_frequent_ids("", LETTERS, 26, 26).tolist() == list(range(26))


def test_draft_vocab_leaves_out_ids_beyond_the_lm_head() -> None:
    assert most_frequent_ids("zzzzc", LETTERS, 2, 10).tolist() == [0, 2]


def test_draft_vocab_corpus_is_tokenized_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK_CHARS", 3)
    assert most_frequent_ids("abcdexyxyxy", LETTERS, 3, 26).tolist() == [23, 24, 25]


def test_draft_vocab_without_a_corpus_takes_the_first_ids(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("x" * 9, encoding="utf-8")
    assert select_draft_vocab(HeadOptions(), LETTERS, 600) is None
    assert select_draft_vocab(HeadOptions(draft_vocab_size=256), LETTERS, 600) == range(256)
    found = select_draft_vocab(HeadOptions(draft_vocab_size=256, draft_vocab_corpus=path), LETTERS, 600)
    assert found is not None
    assert list(found) == list(range(256)), "both are among the first"
    with pytest.raises(ConfigError, match="draft_vocab_size is 601 and the target has 600"):
        select_draft_vocab(HeadOptions(draft_vocab_size=601, draft_vocab_corpus=path), LETTERS, 600)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "draft_vocab_corpus is '.*text', which does not exist: give a text like those you generate"),
        (b"", "which is empty"),
        (b"ab\xff", "which is not UTF-8 at byte 2: convert it first"),
        (b"x" * 41, "draft_vocab_corpus cannot be read: [^;]*text[^;]* 40 [^;]*; give a text file of at most 40 bytes$"),
    ],
)
def test_invalid_draft_vocab_corpus_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, message: str
) -> None:
    monkeypatch.setattr(module, "MAX_CORPUS_BYTES", 40)
    if content is not None:
        (tmp_path / "text").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_corpus(tmp_path / "text")


def test_draft_vocab_corpus_that_is_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"draft_vocab_corpus cannot be read: [^;]* directory[^;]*; give a text file of at most"):
        read_corpus(tmp_path)
