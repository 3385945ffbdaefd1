"""Calls of the tokenizers library that turn its failures into errors of this project.

The library's exceptions are not documented. It raises exceptions of every type, and panics of its Rust code.
"""

from collections.abc import Collection, Sequence
from copy import copy
from typing import Any, NoReturn

from paceline.errors import CheckpointError, RequestError, convert_library_errors, is_interrupt, summarize_error

SPARE_IDS = 1 << 16
"""A vocabulary of N tokens may have ids below 2 N + this number."""
_MAX_DECODED_WITH_LOCK = 4096  # `decode` holds the GIL (700,000 ids: 0.26 s), `decode_batch` does not


class TokenizerBackend:
    """A `tokenizers.Tokenizer` whose failures are RequestErrors, because its input comes from requests.

    Attributes:
        vocabulary: id by piece.
        special_token_ids: ids of control tokens.
        added_token_ids: id by text of all tokens added to the vocabulary, control tokens included.
        has_byte_pieces: whether characters outside the vocabulary are encoded as pieces like <0xE4>, one a byte.

    Raises:
        CheckpointError: an id is implausibly large, or there are none.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        with convert_library_errors("the vocabulary of this tokenizer cannot be read; download it again", CheckpointError):
            self.vocabulary: dict[str, int] = library.get_vocab(with_added_tokens=True)
            added = library.get_added_tokens_decoder().items()
        self.special_token_ids = frozenset(token_id for token_id, token in added if token.special)
        self.added_token_ids: dict[str, int] = {token.content: token_id for token_id, token in added}
        check_ids(self.vocabulary.values())
        self.has_byte_pieces = "<0x41>" in self.vocabulary and self._decodes_byte_pieces()

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Decode ids as the tokenizers library does."""
        try:
            if len(ids) > _MAX_DECODED_WITH_LOCK:
                texts: list[str] = self._library.decode_batch([ids], skip_special_tokens=skip_special_tokens)
                return texts[0]
            text: str = self._library.decode(ids, skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            _refuse("decode token ids", error)
        return text

    def join(self, pieces: Sequence[str]) -> str:
        """Return the text of consecutive pieces."""
        try:
            text: str = self._library.decoder.decode(list(pieces))
        except BaseException as error:
            _refuse("decode its pieces", error)
        return text

    def id_to_token(self, token_id: int) -> str | None:
        """Return the piece of an id; None if there is no such id."""
        try:
            piece: str | None = self._library.id_to_token(token_id)
        except BaseException as error:
            _refuse(f"look up the token id {token_id}", error)
        return piece

    def to_json(self) -> str:
        """Return the text of a tokenizer.json, with all tokens added after loading."""
        backend = self._library
        try:
            if backend.padding is not None or backend.truncation is not None:  # options of a call are not part of the tokenizer
                backend = copy(backend)
                backend.no_padding()
                backend.no_truncation()
            text: str = backend.to_str()
        except BaseException as error:
            _refuse("be written as JSON", error)
        return text

    def _decodes_byte_pieces(self) -> bool:
        return self._library.decoder is not None and self.join(["<0x41>"]) == "A"


def check_ids(ids: Collection[int]) -> None:
    """Check that no id is far larger than their number, because tables have a row for each id up to the largest.

    Raises:
        CheckpointError: an id is, or there are none.
    """
    if not ids:
        raise CheckpointError("this tokenizer has no tokens; download it again")
    largest, limit = max(ids), 2 * len(ids) + SPARE_IDS
    if largest >= limit:
        raise CheckpointError(f"this tokenizer has {len(ids)} tokens and an id {largest}, expected ids below {limit}; download it again")


def _refuse(task: str, error: BaseException) -> NoReturn:
    """Raise a RequestError for `error`, or `error` itself if it is an interrupt."""
    if is_interrupt(error):
        raise error
    raise RequestError(f"the model's tokenizer cannot {task}; send other text, or download it again ({summarize_error(error)})") from error
