"""Calls the tokenizers library and raises its failures as our errors.

The library does not document its exceptions. It raises exceptions of many types, and panics in its Rust code.
"""

from collections.abc import Collection, Sequence
from copy import copy
from typing import Any, NoReturn

from paceline.errors import CheckpointError, RequestError, convert_library_errors, is_interrupt, summarize_error

SPARE_IDS = 1 << 16
"""In a vocabulary of N tokens, ids must be below 2 N + this number."""
_MAX_IDS_WITH_GIL = 4096  # above, `decode_batch` is used: `decode` holds the GIL, for 0.26 s with 700,000 ids


class TokenizerBackend:
    """A `tokenizers.Tokenizer` whose failures are raised as RequestErrors, because its input comes from requests.

    Attributes:
        vocabulary: token id by piece (the text of a token in the vocabulary).
        special_token_ids: ids of control tokens.
        added_token_ids: id by text of the tokens that were added to the vocabulary, control tokens included.
        has_byte_pieces: whether a character that is not in the vocabulary is encoded as one piece per byte, such as <0xE4>.

    Raises:
        CheckpointError: there are no tokens, or an id is implausibly large.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        with convert_library_errors("the vocabulary of this tokenizer cannot be read; download it again", CheckpointError):
            self.vocabulary: dict[str, int] = library.get_vocab(with_added_tokens=True)
            added = library.get_added_tokens_decoder().items()
            _disable_word_cache(getattr(library, "model", None))
        self.special_token_ids = frozenset(token_id for token_id, token in added if token.special)
        self.added_token_ids: dict[str, int] = {token.content: token_id for token_id, token in added}
        check_token_ids(self.vocabulary.values())
        self.has_byte_pieces = "<0x41>" in self.vocabulary and library.decoder is not None and self.join(["<0x41>"]) == "A"

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of token ids, as the tokenizers library decodes them."""
        try:
            if len(ids) > _MAX_IDS_WITH_GIL:
                texts: list[str] = self._library.decode_batch([ids], skip_special_tokens=skip_special_tokens)
                return texts[0]
            text: str = self._library.decode(ids, skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            _raise_request_error("decode token ids", error)
        return text

    def join(self, pieces: Sequence[str]) -> str:
        """Return the text of consecutive pieces."""
        try:
            text: str = self._library.decoder.decode(list(pieces))
        except BaseException as error:
            _raise_request_error("decode its pieces", error)
        return text

    def id_to_token(self, token_id: int) -> str | None:
        """Return the piece of an id; None if there is no such id."""
        try:
            piece: str | None = self._library.id_to_token(token_id)
        except BaseException as error:
            _raise_request_error(f"look up the token id {token_id}", error)
        return piece

    def to_json(self) -> str:
        """Return the text of a tokenizer.json, with all tokens added after loading."""
        backend = self._library
        try:
            if backend.padding is not None or backend.truncation is not None:  # settings of a call, not of the file
                backend = copy(backend)
                backend.no_padding()
                backend.no_truncation()
            text: str = backend.to_str()
        except BaseException as error:
            _raise_request_error("be written as JSON", error)
        return text


def check_token_ids(ids: Collection[int]) -> None:
    """Check that no id is much larger than the number of ids, because arrays with an item for each id up to the largest are allocated.

    Raises:
        CheckpointError: there are no ids, or one is too large.
    """
    if not ids:
        raise CheckpointError("this tokenizer has no tokens; download it again")
    largest, limit = max(ids), 2 * len(ids) + SPARE_IDS
    if largest >= limit:
        raise CheckpointError(f"this tokenizer has {len(ids)} tokens and an id {largest}, expected ids below {limit}; download it again")


def _disable_word_cache(model: Any) -> None:
    """Switch off the BPE model's cache of words: the library (0.23) keeps one for each thread until the thread ends, even if the tokenizer
    is freed before: 2.8 MB at every load of Gemma 3 after 60,000 characters. Without the cache, encoding takes 1.3 times as long.
    """
    if hasattr(model, "_resize_cache"):
        model._resize_cache(0)


def _raise_request_error(task: str, error: BaseException) -> NoReturn:
    """Raise `error` as a RequestError: the tokenizer cannot do `task`. Raise an interrupt (Ctrl-C) unchanged."""
    if is_interrupt(error):
        raise error
    raise RequestError(f"the model's tokenizer cannot {task}; send other text, or download it again ({summarize_error(error)})") from error
