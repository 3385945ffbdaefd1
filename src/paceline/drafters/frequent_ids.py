"""Which ids a text has most: a module may guess these alone, as EAGLE-3 heads guess the ids that their training text had most."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.drafters.options import HeadOptions
from paceline.errors import CheckpointError, ConfigError
from paceline.small_files import read_small
from paceline.tokenizer.tokenizer import Tokenizer

GuessedIds = range | NDArray[np.int64]
"""The first ids, or others in ascending order."""
MAX_TEXT_BYTES = 64 << 20
_CHUNK = 1 << 20  # characters that are tokenised at once: a piece that is cut in two counts for little


def guessed_ids(options: HeadOptions, tokenizer: Tokenizer, vocab_size: int) -> GuessedIds | None:
    """The ids that an MTP module is to guess alone; None = all.

    Raises:
        ConfigError: as `HeadOptions.guessed_ids` and `read_text`.
    """
    count = options.guessed_ids(vocab_size)
    if count is None or options.ids_of is None:
        return None if count is None else range(count)
    return frequent_ids(read_text(options.ids_of), tokenizer, count, vocab_size)


def read_text(path: Path) -> str:
    """A text file.

    Raises:
        ConfigError: there is none, it is empty, no UTF-8, or larger than MAX_TEXT_BYTES.
    """
    try:
        content = read_small(path, MAX_TEXT_BYTES)
    except CheckpointError as error:
        reason = str(error).partition(";")[0]  # behind it is what to do about a checkpoint's file
        raise ConfigError(f"drafter_options: ids_of cannot be read: {reason}; give a text file of at most {MAX_TEXT_BYTES} bytes") from None
    if not content:
        found = "does not exist" if content is None else "is empty"
        raise ConfigError(f"drafter_options: ids_of is {str(path)!r}, which {found}: give a text like those you generate")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"drafter_options: ids_of is {str(path)!r}, which is not UTF-8 at byte {error.start}: convert it first") from None


def frequent_ids(text: str, tokenizer: Tokenizer, count: int, vocab_size: int) -> NDArray[np.int64]:
    """[count] the ids below `vocab_size` that `text` has most, and those that end a text, ascending.

    Of ids that it has equally often, or not at all, the lowest ones are taken, which vocabularies made of merges have made first.
    """
    counts = np.zeros(vocab_size, np.int64)
    for begin in range(0, len(text), _CHUNK):
        found = np.array(tokenizer.encode(text[begin : begin + _CHUNK], add_special_tokens=False), np.int64)
        counts += np.bincount(found[found < vocab_size], minlength=vocab_size)
    ends = [token for token in tokenizer.end_token_ids if token < vocab_size]
    counts[ends] = len(text) + 1  # no id is more frequent
    return np.sort(np.argsort(-counts, kind="stable")[:count])
