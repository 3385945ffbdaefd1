"""The draft vocabulary of an MTP module: the first ids, or the most frequent ids of a corpus, as EAGLE-3 heads have one."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.drafters.options import HeadOptions
from paceline.errors import CheckpointError, ConfigError
from paceline.small_files import read_small
from paceline.tokenizer.tokenizer import Tokenizer

DraftVocab = range | NDArray[np.int64]
"""The target's ids that are drafted: the first ones, or others in ascending order."""
MAX_CORPUS_BYTES = 64 << 20
_CHUNK_CHARS = 1 << 20  # characters tokenized at once; a word cut at a chunk's end changes the counts by one


def draft_vocab(options: HeadOptions, tokenizer: Tokenizer, vocab_size: int) -> DraftVocab | None:
    """Return the draft vocabulary that the options select; None = all ids.

    Raises:
        ConfigError: as `HeadOptions.num_draft_ids` and `read_corpus`.
    """
    count = options.num_draft_ids(vocab_size)
    if count is None or options.draft_vocab_corpus is None:
        return None if count is None else range(count)
    return frequent_ids(read_corpus(options.draft_vocab_corpus), tokenizer, count, vocab_size)


def read_corpus(path: Path) -> str:
    """Read the text file of `draft_vocab_corpus`.

    Raises:
        ConfigError: the file is missing, empty, not UTF-8, or larger than MAX_CORPUS_BYTES.
    """
    try:
        content = read_small(path, MAX_CORPUS_BYTES)
    except CheckpointError as error:
        reason = str(error).partition(";")[0]  # the error's advice after ";" is about checkpoints, not about a text file
        raise ConfigError(
            f"drafter_options: draft_vocab_corpus cannot be read: {reason}; give a text file of at most {MAX_CORPUS_BYTES} bytes"
        ) from None
    if not content:
        found = "does not exist" if content is None else "is empty"
        raise ConfigError(f"drafter_options: draft_vocab_corpus is {str(path)!r}, which {found}: give a text like those you generate")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"drafter_options: draft_vocab_corpus is {str(path)!r}, which is not UTF-8 at byte {error.start}: convert it first"
        ) from None


def frequent_ids(text: str, tokenizer: Tokenizer, count: int, vocab_size: int) -> NDArray[np.int64]:
    """Return [count] the most frequent ids of `text` below `vocab_size` and the end-of-text ids, ascending.

    On ties the lowest ids are taken: BPE vocabularies are in the order of their merges, so these are the more frequent ones.
    """
    counts = np.zeros(vocab_size, np.int64)
    for begin in range(0, len(text), _CHUNK_CHARS):
        found = np.array(tokenizer.encode(text[begin : begin + _CHUNK_CHARS], add_special_tokens=False), np.int64)
        counts += np.bincount(found[found < vocab_size], minlength=vocab_size)
    ends = [token for token in tokenizer.end_token_ids if token < vocab_size]
    counts[ends] = len(text) + 1  # more than any id can have
    return np.sort(np.argsort(-counts, kind="stable")[:count])
