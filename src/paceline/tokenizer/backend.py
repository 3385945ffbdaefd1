"""Wraps tokenizers of the tokenizers library, to convert their failures to paceline's errors.

The library's exceptions are not documented, and of many types; its Rust code can panic, too.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from paceline.errors import CheckpointError, RequestError, convert_library_errors, is_interrupt, summarize_error

MAX_UNUSED_IDS = 1 << 16
"""In a vocabulary of N tokens, ids must be below 2 N + MAX_UNUSED_IDS."""
_MAX_IDS_DECODED_WITH_GIL = 4096  # for more, `decode_batch` is used, because `decode` holds the GIL (0.26 s for 700,000)


@dataclass(frozen=True, slots=True)
class ConvertedTokenizer:
    """A tokenizer built from a file other than tokenizer.json. Has those attributes of a transformers tokenizer that paceline uses.

    Attributes:
        backend_tokenizer: the tokenizer, which also adds the BOS and EOS ids if the file requires them.
        special_tokens_map: texts of `bos_token`, `eos_token`, `unk_token` and `pad_token`, if the file has them.
        chat_template: Jinja sources by name; the main one is "default". Empty if the file has none.
        end_token_ids: ids that end an answer, in ascending order; empty if the file does not list them.
        notice: message to the user; None = no message.
    """

    backend_tokenizer: Tokenizer
    special_tokens_map: Mapping[str, str]
    chat_template: Mapping[str, str]
    end_token_ids: tuple[int, ...] = ()
    notice: str | None = None

    def encode(self, text: str, *, add_special_tokens: bool, verbose: bool) -> list[int]:
        """Return the ids of a text; `verbose` is ignored."""
        # Unlike `encode`, `encode_batch_fast` releases the GIL.
        ids: list[int] = self.backend_tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids


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

    def __init__(self, tokenizer: Any) -> None:
        self._library_tokenizer = tokenizer
        with convert_library_errors("the vocabulary of this tokenizer cannot be read; download it again", CheckpointError):
            self.vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
            added = tokenizer.get_added_tokens_decoder().items()
            _disable_word_cache(getattr(tokenizer, "model", None))
        self.special_token_ids = frozenset(token_id for token_id, token in added if token.special)
        self.added_token_ids: dict[str, int] = {token.content: token_id for token_id, token in added}
        check_token_ids(self.vocabulary.values())
        self.has_byte_pieces = "<0x41>" in self.vocabulary and tokenizer.decoder is not None and self.decode_pieces(["<0x41>"]) == "A"

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of token ids, as the tokenizers library decodes them."""
        task, options = "decode token ids", {"skip_special_tokens": skip_special_tokens}
        if len(ids) > _MAX_IDS_DECODED_WITH_GIL:
            texts: list[str] = _call(task, self._library_tokenizer.decode_batch, [ids], **options)
            return texts[0]
        text: str = _call(task, self._library_tokenizer.decode, ids, **options)
        return text

    def decode_pieces(self, pieces: Sequence[str]) -> str:
        """Return the text of consecutive pieces."""
        text: str = _call("decode its pieces", self._library_tokenizer.decoder.decode, list(pieces))
        return text

    def id_to_token(self, token_id: int) -> str | None:
        """Return the piece of an id; None if there is no such id."""
        piece: str | None = _call(f"look up the token id {token_id}", self._library_tokenizer.id_to_token, token_id)
        return piece

    def to_json(self) -> str:
        """Return the text of a tokenizer.json, including tokens that were added after loading."""
        text: str = _call("be written as JSON", _tokenizer_json, self._library_tokenizer)
        return text


def check_token_ids(ids: Collection[int]) -> None:
    """Check that no id is much larger than the number of ids, because arrays are allocated up to the largest id.

    Raises:
        CheckpointError: there are no ids, or one is too large.
    """
    if not ids:
        raise CheckpointError("this tokenizer has no tokens; download it again")
    largest, limit = max(ids), 2 * len(ids) + MAX_UNUSED_IDS
    if largest >= limit:
        raise CheckpointError(f"this tokenizer has {len(ids)} tokens and an id {largest}, expected ids below {limit}; download it again")


def _disable_word_cache(model: Any) -> None:
    """Switch off the BPE model's cache of words, although encoding then takes 1.3 times as long.

    The library (0.23) frees the cache only when the thread ends: a Gemma 3 tokenizer would leak 2.8 MB after encoding 60,000 characters.
    """
    if hasattr(model, "_resize_cache"):
        model._resize_cache(0)


def _tokenizer_json(tokenizer: Any) -> Any:
    if tokenizer.padding is not None or tokenizer.truncation is not None:  # settings of earlier calls
        tokenizer = copy(tokenizer)
        tokenizer.no_padding()
        tokenizer.no_truncation()
    return tokenizer.to_str()


def _call(task: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a function of the library. If it fails, raise a RequestError: "the model's tokenizer cannot <task>"."""
    try:
        return function(*arguments, **options)
    except BaseException as error:
        if is_interrupt(error):
            raise
        text = f"the model's tokenizer cannot {task}; send other text, or download it again ({summarize_error(error)})"
        raise RequestError(text) from error
