"""Reduced draft vocabulary of an MTP module: the lowest token ids, or the most frequent ids of a text corpus.

Drafting is faster, because only the lm_head rows of these ids are computed. EAGLE-3 heads are trained with such a vocabulary.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.drafters.options import HeadOptions
from paceline.errors import CheckpointError, ConfigError
from paceline.small_files import read_small
from paceline.tokenizer.tokenizer import Tokenizer

DraftVocab = range | NDArray[np.int64]
"""Target ids that are drafted: a range from 0, or other ids in ascending order."""
MAX_CORPUS_BYTES = 64 << 20
_CHUNK_CHARS = 1 << 20  # characters tokenized at once; cutting a word at a chunk's end hardly changes the counts


def select_draft_vocab(options: HeadOptions, tokenizer: Tokenizer, vocab_size: int) -> DraftVocab | None:
    """Return the draft vocabulary that the user's options select; None = all ids of the target.

    Raises:
        ConfigError: the draft vocabulary is larger than the target's, or the corpus cannot be read.
    """
    count = options.num_draft_ids(vocab_size)
    if count is None or options.draft_vocab_corpus is None:
        return None if count is None else range(count)
    return most_frequent_ids(read_corpus(options.draft_vocab_corpus), tokenizer, count, vocab_size)


def read_corpus(path: Path) -> str:
    """Read the text file given as option `draft_vocab_corpus`.

    Raises:
        ConfigError: the file is missing, empty, not UTF-8, or larger than MAX_CORPUS_BYTES.
    """
    try:
        content = read_small(path, MAX_CORPUS_BYTES)
    except CheckpointError as error:
        reason = str(error).partition(";")[0]  # without the advice after ";" to download a checkpoint again
        raise ConfigError(
            f"drafter_options: draft_vocab_corpus cannot be read: {reason}; give a text file of at most {MAX_CORPUS_BYTES} bytes"
        ) from None
    if not content:
        problem = "does not exist" if content is None else "is empty"
        raise ConfigError(f"drafter_options: draft_vocab_corpus is {str(path)!r}, which {problem}: give a text like those you generate")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"drafter_options: draft_vocab_corpus is {str(path)!r}, which is not UTF-8 at byte {error.start}: convert it first"
        ) from None


def most_frequent_ids(text: str, tokenizer: Tokenizer, count: int, vocab_size: int) -> NDArray[np.int64]:
    """Return the end-of-text ids and the most frequent ids of `text`, `count` in all, ascending and below `vocab_size`.

    Of equally frequent ids, lower ones are preferred: BPE vocabularies order ids by merge, so these are more frequent in general.
    """
    counts = np.zeros(vocab_size, np.int64)
    for begin in range(0, len(text), _CHUNK_CHARS):
        ids = np.array(tokenizer.encode(text[begin : begin + _CHUNK_CHARS], add_special_tokens=False), np.int64)
        counts += np.bincount(ids[ids < vocab_size], minlength=vocab_size)
    end_ids = [token for token in tokenizer.end_token_ids if token < vocab_size]
    counts[end_ids] = len(text) + 1  # end-of-text ids get the highest counts, so that they are always included
    return np.sort(np.argsort(-counts, kind="stable")[:count])
