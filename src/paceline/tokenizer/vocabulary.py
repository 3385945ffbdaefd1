"""Compares the vocabularies of a target and a draft model, to choose how draft tokens are converted to the target's ids."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from paceline.tokenizer.byte_level import BYTE_CHARACTERS
from paceline.tokenizer.tokenizer import Tokenizer

IdMap = NDArray[np.int64]

MIN_SAMPLE_COVERAGE = 0.8
"""Ids are mapped if the draft model has at least this share of the target's tokens of a sample text. Else drafts are decoded to text and
encoded again. Measured on the mini model with shares from 58 to 83 %: mapped drafts are accepted at least as often."""
MIN_SHARED_PIECE_SHARE = 0.5  # minimum of `shared_piece_share` for mapping ids, if `sample_coverage` is None
MIN_SPELLABLE_SHARE = 0.5  # a draft model must be able to encode this share of the target's tokens with its own
_MAX_SPELLED_PIECES = 4096  # tokens of the target for which this is tested

SAMPLE_TEXT = """\
The miller's daughter had walked for seven days before she reached the town. "Is there anyone here," she asked, "who could \
tell me where the old king lives?" Nobody answered. In 2019, about 3,450 people (62.5% of them under 40) moved from the northern \
provinces to the coast; prices rose by $1.2 million.

def read_lines(path, encoding="utf-8"):
    with open(path) as file:
        return [line.strip() for line in file if not line.startswith("#")]

{"name": "example", "values": [1, 2, 3], "nested": {"is_empty": false}}

Die Straße führt über die Brücke, et le café était déjà fermé. El niño pequeño no quería comer.
"""

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class VocabularyMatch(Enum):
    """How much two vocabularies have in common. This decides how draft tokens are converted to the target's ids."""

    SAME = "same"  # every id has the same piece in both, so ids need no conversion
    PADDED = "padded"  # like SAME, but one vocabulary has additional ids, which are never drafted
    OVERLAPPING = "overlapping"  # most text consists of tokens that both vocabularies have, but with different ids: ids are mapped
    DISJOINT = "disjoint"  # few tokens are in both vocabularies: drafts are decoded to text and encoded again


@dataclass(frozen=True, slots=True)
class VocabularyComparison:
    """Result of comparing the vocabularies of a target and a draft model.

    Attributes:
        match: how much they have in common.
        same_id_share: share of the target's ids that have the same piece in the draft model.
        shared_piece_share: share of the target's pieces that the draft model also has, with any id.
        first_difference: (id, target's piece, draft model's piece) of the first id with different pieces; None = there is none.
        sample_coverage: share of the target's tokens of a sample text that the draft model also has; None = not measured.
        spellable_share: share of the target's pieces that are a concatenation of pieces of the draft model.
    """

    match: VocabularyMatch
    same_id_share: float
    shared_piece_share: float
    first_difference: tuple[int, str, str] | None
    sample_coverage: float | None = None
    spellable_share: float = 1.0

    @property
    def is_compatible(self) -> bool:
        """Whether ids can be used for both models without conversion."""
        return self.match in (VocabularyMatch.SAME, VocabularyMatch.PADDED)

    @property
    def is_unusable(self) -> bool:
        """Whether drafts cannot even be converted through text, because the draft model cannot spell most of the target's pieces."""
        return self.match is VocabularyMatch.DISJOINT and self.spellable_share < MIN_SPELLABLE_SHARE

    def describe_match(self) -> str:
        """Return a phrase for the user: how many ids have the same piece in both vocabularies."""
        text = f"{self.match.value} vocabularies: {self.same_id_share:.1%} of the target's ids mean the same to the drafter"
        if self.first_difference is not None:
            token_id, target, draft = self.first_difference
            text += f" (id {token_id} is {target!r} there and {draft!r} here; {self.shared_piece_share:.1%} of the pieces are shared)"
        return text

    def describe_token_conversion(self) -> str:
        """Return a phrase for the user: how draft tokens are converted, and what share of the target's pieces can be converted."""
        covered = f"{self.shared_piece_share:.1%} of the target's pieces"
        if self.sample_coverage is not None:
            covered += f", {self.sample_coverage:.1%} of a sample text"
        if self.is_compatible:
            rest = "" if self.same_id_share == 1.0 else f" ({covered}); other pieces are spelled for the draft model and never drafted"
            return "ids are used unchanged" + rest
        if self.match is VocabularyMatch.OVERLAPPING:
            return f"ids are mapped by the pieces that both have ({covered}); others are never drafted"
        return f"drafts are decoded and encoded again ({covered} are shared; {self.spellable_share:.1%} of the pieces can be spelled)"

    def why_unusable(self) -> str:
        """Return a sentence for the user on why the draft model cannot be used."""
        return (
            f"{self.describe_match()}; its pieces spell {self.spellable_share:.1%} of the target's, and at least "
            f"{MIN_SPELLABLE_SHARE:.0%} are needed for it to read the text"
        )


def compare_vocabularies(target: Tokenizer, draft: Tokenizer) -> VocabularyComparison:
    return compare_pieces(pieces_of(target), pieces_of(draft), sample_ids=target.encode(SAMPLE_TEXT, add_special_tokens=False))


def pieces_of(tokenizer: Tokenizer) -> list[str]:
    """Return the pieces of a tokenizer's vocabulary in order of their ids."""
    return [tokenizer.piece(token_id) for token_id in range(tokenizer.vocab_size)]


def compare_pieces(target: Sequence[str], draft: Sequence[str], *, sample_ids: Sequence[int] = ()) -> VocabularyComparison:
    """Compare two vocabularies.

    Args:
        target, draft: pieces in order of their ids; an empty piece is an unused id.
        sample_ids: `SAMPLE_TEXT` encoded by the target's tokenizer; its share of common pieces decides whether ids can be mapped. If it is
            empty, the share of all pieces decides, which does not consider how frequent each piece is.
    """
    target, draft = _clear_unused_pieces(target), _clear_unused_pieces(draft)
    num_used = max(1, sum(map(bool, target)))
    both = [(token_id, *pair) for token_id, pair in enumerate(zip(target, draft, strict=False)) if all(pair)]
    first = next(((token_id, one, other) for token_id, one, other in both if one != other), None)
    same_id_share = sum(one == other for _, one, other in both) / num_used
    is_padded = first is None and bool(both)
    if is_padded and same_id_share == 1.0:
        match = VocabularyMatch.SAME if _highest_id_with_piece(target) == _highest_id_with_piece(draft) else VocabularyMatch.PADDED
        return VocabularyComparison(match, same_id_share, same_id_share, None)
    id_map = match_ids(target, draft)
    shared_piece_share = int((id_map >= 0).sum()) / num_used
    sample_coverage = _sample_coverage(target, id_map, sample_ids)
    enough = shared_piece_share >= MIN_SHARED_PIECE_SHARE if sample_coverage is None else sample_coverage >= MIN_SAMPLE_COVERAGE
    partial_match = VocabularyMatch.PADDED if is_padded else VocabularyMatch.OVERLAPPING
    match = partial_match if enough else VocabularyMatch.DISJOINT
    return VocabularyComparison(match, same_id_share, shared_piece_share, first, sample_coverage, _spellable_share(target, draft))


def match_ids(source: Sequence[str], destination: Sequence[str]) -> IdMap:
    """Return [len(source)], the id in `destination` of the same piece; -1 = there is none.

    Pieces are compared as they are if both vocabularies are byte-level or both are SentencePiece, else by the bytes that they stand for.
    """
    if is_byte_level(source) == is_byte_level(destination):
        ids_by_piece = {piece: token_id for token_id, piece in reversed(list(enumerate(destination))) if piece}
        matches = [ids_by_piece.get(piece, -1) for piece in source]
    else:
        ids_by_bytes = _ids_by_bytes(destination)
        matches = [ids_by_bytes.get(text, -1) for text in piece_bytes(source)]
    return np.asarray(matches, np.int64)


def piece_bytes(pieces: Sequence[str]) -> list[bytes]:
    """Return the bytes that each piece stands for: b" the" for "Ġthe" or "▁the", b"\\n" for "<0x0A>"."""
    decode = _piece_decoder(pieces)
    return [decode(piece) for piece in pieces]


def is_byte_level(pieces: Sequence[str]) -> bool:
    """Return whether a vocabulary is byte-level, in which Ġ stands for a space, rather than SentencePiece, which uses ▁."""
    return sum("Ġ" in piece for piece in pieces) > sum("▁" in piece for piece in pieces)


class Speller:
    """Encodes text by greedy longest match with the pieces of a vocabulary. The model's tokenizer may encode it differently."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self._ids = _ids_by_bytes(pieces)
        self._longest = max(map(len, self._ids), default=0)

    def spell(self, text: bytes) -> list[int] | None:
        """Return ids whose pieces concatenate to `text`; None = the pieces cannot spell it."""
        ids: list[int] = []
        start = 0
        while start < len(text):
            for end in range(min(len(text), start + self._longest), start, -1):
                token_id = self._ids.get(text[start:end])
                if token_id is not None:
                    ids.append(token_id)
                    start = end
                    break
            else:
                return None
        return ids


def _sample_coverage(target: Sequence[str], id_map: IdMap, sample_ids: Sequence[int]) -> float | None:
    decode = _piece_decoder(target)
    text = b"".join(decode(target[token_id]) for token_id in sample_ids if token_id < len(target))
    if not sample_ids or text.strip() != SAMPLE_TEXT.encode().strip():
        return None  # the target's vocabulary lacks characters of the sample text
    return float((id_map[np.asarray(sample_ids)] >= 0).mean())


def _spellable_share(pieces: Sequence[str], draft: Sequence[str]) -> float:
    if _has_every_byte(draft):
        return 1.0
    speller = Speller(draft)
    used_pieces = [piece for piece in pieces if piece]
    sample = piece_bytes(used_pieces[:: max(1, len(used_pieces) // _MAX_SPELLED_PIECES)])  # spelling all pieces would take a second
    return sum(speller.spell(text) is not None for text in sample) / max(1, len(sample))


def _has_every_byte(pieces: Sequence[str]) -> bool:
    piece_set = set(pieces)
    return all(f"<0x{byte:02X}>" in piece_set for byte in range(256)) or all(
        chr(code) in piece_set for code in range(256 + len(_BYTE_BY_CODE_POINT)) if code in _BYTE_BY_CODE_POINT or 0x20 < code < 0x7F
    )


def _ids_by_bytes(pieces: Sequence[str]) -> dict[bytes, int]:
    ids: dict[bytes, int] = {}
    single_bytes = {token_id for token_id, piece in enumerate(pieces) if _BYTE_PIECE.fullmatch(piece)}
    for token_id, text in enumerate(piece_bytes(pieces)):
        if text and (text not in ids or (ids[text] in single_bytes and token_id not in single_bytes)):
            ids[text] = token_id
    return ids


def _clear_unused_pieces(pieces: Sequence[str]) -> list[str]:
    """Replace the pieces of unused ids by empty strings. GGUF files contain pieces such as "[PAD151936]" for them."""
    return ["" if piece == f"[PAD{token_id}]" else piece for token_id, piece in enumerate(pieces)]


def _highest_id_with_piece(pieces: Sequence[str]) -> int:
    return next((token_id for token_id in range(len(pieces) - 1, -1, -1) if pieces[token_id]), -1)


_BYTE_BY_CODE_POINT = {ord(character): byte for byte, character in BYTE_CHARACTERS.items() if ord(character) >= 256}


def _piece_decoder(pieces: Sequence[str]) -> Callable[[str], bytes]:
    return _decode_byte_level if is_byte_level(pieces) else _decode_sentencepiece


def _decode_byte_level(piece: str) -> bytes:
    try:
        return piece.translate(_BYTE_BY_CODE_POINT).encode("latin-1")
    except UnicodeEncodeError:  # added tokens may contain characters that are not in the byte-level alphabet
        return piece.encode()


def _decode_sentencepiece(piece: str) -> bytes:
    byte = _BYTE_PIECE.fullmatch(piece) if piece.startswith("<0x") else None
    return bytes([int(byte[1], 16)]) if byte is not None else piece.replace("▁", " ").encode()
