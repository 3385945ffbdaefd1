"""Do two tokenizers mean the same thing by an id? Compared piece by piece, not by size."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from paceline.tokenizer.tokenizer import Tokenizer

IdMap = NDArray[np.int64]

# Share of the sample text's tokens. Measured on the mini with its draft model's vocabulary cut down to 58 to 83 % of them: mapped ids are
# accepted as often as text when greedy, more often when sampled. The rest is room for vocabularies that cut text differently.
ENOUGH_OF_SAMPLE = 0.8
ENOUGH_PIECES = 0.5  # of the target's pieces, where the target cannot spell the sample text
LEAST_SPELLABLE = 0.5  # of the target's pieces
_PIECES_TO_SPELL = 4096

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
_FILLER = re.compile(r"\[PAD(\d+)\]")


class VocabularyMatch(Enum):
    """How two vocabularies relate, which decides how a draft model's guesses reach the target."""

    SAME = "same"  # every id has the same piece: ids are passed as they are
    PADDED = "padded"  # every id both know has the same piece, one knows more ids: the others are never drafted
    OVERLAPPING = "overlapping"  # most text is made of pieces that both have, under other ids: ids are mapped
    DISJOINT = "disjoint"  # too little is shared: text is passed


@dataclass(frozen=True, slots=True)
class VocabularyComparison:
    """The verdict on a target's and a drafter's vocabulary.

    Attributes:
        match: the category.
        coverage: share of the target's ids that the drafter knows under the same id and piece.
        shared_pieces: share of the target's pieces that the drafter has under any id, both read as bytes.
        first_difference: an id both know with different pieces, and the two pieces.
        sample_coverage: share of the tokens of a sample text, as the target cuts it, that the drafter has under any id;
            None where it was not measured.
        spellable: share of the target's pieces that the drafter's pieces can spell.
    """

    match: VocabularyMatch
    coverage: float
    shared_pieces: float
    first_difference: tuple[int, str, str] | None
    sample_coverage: float | None = None
    spellable: float = 1.0

    @property
    def is_compatible(self) -> bool:
        """Whether ids can be passed from one model to the other as they are."""
        return self.match in (VocabularyMatch.SAME, VocabularyMatch.PADDED)

    @property
    def is_hopeless(self) -> bool:
        """Whether even passing text cannot work: the drafter can neither read nor guess what it cannot spell."""
        return self.match is VocabularyMatch.DISJOINT and self.spellable < LEAST_SPELLABLE

    def explain(self) -> str:
        """One clause with the numbers."""
        text = f"{self.match.value} vocabularies: {self.coverage:.1%} of the target's ids mean the same to the drafter"
        if self.first_difference is not None:
            token_id, target, draft = self.first_difference
            text += f" (id {token_id} is {target!r} there and {draft!r} here; {self.shared_pieces:.1%} of the pieces are shared)"
        return text

    def method(self) -> str:
        """One clause on how guesses are passed and how much of the target's text that covers."""
        covered = f"{self.shared_pieces:.1%} of the target's pieces"
        if self.sample_coverage is not None:
            covered += f", {self.sample_coverage:.1%} of a sample text"
        if self.is_compatible:
            rest = "" if self.coverage == 1.0 else f" ({covered}); others are spelled for the draft model, and never drafted"
            return "ids are passed as they are" + rest
        if self.match is VocabularyMatch.OVERLAPPING:
            return f"ids are mapped through the pieces both have ({covered}); others are never drafted"
        return f"text is passed and cut anew on either side ({covered} are shared; {self.spellable:.1%} of the pieces can be spelled)"

    def why_hopeless(self) -> str:
        """One sentence for the user of a pair that cannot work."""
        return (
            f"{self.explain()}; its pieces spell {self.spellable:.1%} of the target's, and at least {LEAST_SPELLABLE:.0%} are needed "
            "for it to read the text it should continue"
        )


def compare_vocabularies(target: Tokenizer, draft: Tokenizer) -> VocabularyComparison:
    """Compare every piece of two tokenizers."""
    return compare_pieces(pieces_of(target), pieces_of(draft), sample_ids=target.encode(SAMPLE_TEXT, add_special_tokens=False))


def pieces_of(tokenizer: Tokenizer) -> list[str]:
    """The piece of every id, in order."""
    return [tokenizer.piece(token_id) for token_id in range(tokenizer.vocab_size)]


def compare_pieces(target: Sequence[str], draft: Sequence[str], *, sample_ids: Sequence[int] = ()) -> VocabularyComparison:
    """Compare two vocabularies given as the piece of every id; an empty piece is an id that stands for nothing.

    Args:
        sample_ids: `SAMPLE_TEXT` as the target's tokenizer cuts it. Frequent pieces count there as often as they occur in text;
            without it the share of all pieces decides whether ids can be mapped.
    """
    target, draft = _without_fillers(target), _without_fillers(draft)
    known = max(1, sum(map(bool, target)))
    both = [(token_id, *pair) for token_id, pair in enumerate(zip(target, draft, strict=False)) if all(pair)]
    first = next(((token_id, one, other) for token_id, one, other in both if one != other), None)
    coverage = sum(one == other for _, one, other in both) / known
    is_padded = first is None and bool(both)
    if is_padded and coverage == 1.0:
        match = VocabularyMatch.SAME if _last_known(target) == _last_known(draft) else VocabularyMatch.PADDED
        return VocabularyComparison(match, coverage, coverage, None)
    mapped = match_ids(target, draft)
    shared_pieces = int((mapped >= 0).sum()) / known
    sample_coverage = _sample_coverage(target, mapped, sample_ids)
    enough = shared_pieces >= ENOUGH_PIECES if sample_coverage is None else sample_coverage >= ENOUGH_OF_SAMPLE
    alike = VocabularyMatch.PADDED if is_padded else VocabularyMatch.OVERLAPPING
    match = alike if enough else VocabularyMatch.DISJOINT
    return VocabularyComparison(match, coverage, shared_pieces, first, sample_coverage, _spellable(target, draft))


def match_ids(source: Sequence[str], destination: Sequence[str]) -> IdMap:
    """[len(source)] the id in `destination` whose piece stands for the same bytes, -1 where there is none.

    Vocabularies in the same alphabet are compared as written; else ordinary pieces come before those of a single byte.
    """
    alike: dict[str, int] = {}
    by_bytes: dict[bytes, int] = {}
    texts: Sequence[bytes] = ()
    if is_byte_level(source) == is_byte_level(destination):
        alike = {piece: token_id for token_id, piece in reversed(list(enumerate(destination))) if piece}
    else:
        by_bytes, texts = _ids_by_bytes(destination), piece_bytes(source)
    found = [alike.get(piece, -1) for piece in source] if not by_bytes else [by_bytes.get(text, -1) for text in texts]
    return np.asarray(found, np.int64)


def piece_bytes(pieces: Sequence[str]) -> list[bytes]:
    """The bytes each piece stands for, whatever the vocabulary's alphabet: "Ġthe", "▁the" are b" the", "<0x0A>" is b"\\n".

    Special tokens stand for their own spelling.
    """
    manner = _from_byte_level if is_byte_level(pieces) else _from_sentencepiece
    return [manner(piece) for piece in pieces]


def is_byte_level(pieces: Sequence[str]) -> bool:
    """Whether pieces are written in the alphabet of byte-level vocabularies (Ġ for a space) rather than SentencePiece's (▁)."""
    return sum("Ġ" in piece for piece in pieces) > sum("▁" in piece for piece in pieces)


class Speller:
    """Spells bytes with a vocabulary's pieces, longest first: a way to write any text, if not the tokenizer's own."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self._ids = _ids_by_bytes(pieces)
        self._longest = max(map(len, self._ids), default=0)

    def spell(self, text: bytes) -> list[int] | None:
        """Ids whose pieces make up `text`; None where some byte has no piece."""
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


def _sample_coverage(target: Sequence[str], mapped: IdMap, sample_ids: Sequence[int]) -> float | None:
    """None where the target cannot spell the sample text itself, so that its tokens say nothing about text."""
    manner = _from_byte_level if is_byte_level(target) else _from_sentencepiece
    spelled = b"".join(manner(target[token_id]) for token_id in sample_ids if token_id < len(target))
    if not sample_ids or spelled.strip() != SAMPLE_TEXT.encode().strip():
        return None
    return float((mapped[np.asarray(sample_ids)] >= 0).mean())


def _spellable(pieces: Sequence[str], draft: Sequence[str]) -> float:
    if _has_every_byte(draft):
        return 1.0
    speller = Speller(draft)
    known = [piece for piece in pieces if piece]
    sample = piece_bytes(known[:: max(1, len(known) // _PIECES_TO_SPELL)])  # evenly spaced: all of them would take a second
    return sum(speller.spell(text) is not None for text in sample) / max(1, len(sample))


def _has_every_byte(pieces: Sequence[str]) -> bool:
    known = set(pieces)
    return all(f"<0x{byte:02X}>" in known for byte in range(256)) or all(
        chr(code) in known for code in range(256 + len(_BYTE_OF_CODE)) if code in _BYTE_OF_CODE or 0x20 < code < 0x7F
    )


def _ids_by_bytes(pieces: Sequence[str]) -> dict[bytes, int]:
    ids: dict[bytes, int] = {}
    single_bytes = {token_id for token_id, piece in enumerate(pieces) if _BYTE_PIECE.fullmatch(piece)}
    for token_id, text in enumerate(piece_bytes(pieces)):
        if text and (text not in ids or (ids[text] in single_bytes and token_id not in single_bytes)):
            ids[text] = token_id
    return ids


def _without_fillers(pieces: Sequence[str]) -> list[str]:
    """GGUF files name the rows that no token uses [PAD151936] and so on, by their own id."""
    return ["" if piece.startswith("[PAD") and _is_filler(piece, token_id) else piece for token_id, piece in enumerate(pieces)]


def _is_filler(piece: str, token_id: int) -> bool:
    named = _FILLER.fullmatch(piece)
    return named is not None and int(named[1]) == token_id


def _last_known(pieces: Sequence[str]) -> int:
    return next((token_id for token_id in range(len(pieces) - 1, -1, -1) if pieces[token_id]), -1)


def _byte_alphabet() -> dict[int, int]:
    """Character code to byte: printable Latin-1 characters are themselves, the other bytes follow from code 256 on in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {256 + index: byte for index, byte in enumerate(others)}


_BYTE_OF_CODE = _byte_alphabet()


def _from_byte_level(piece: str) -> bytes:
    try:
        return piece.translate(_BYTE_OF_CODE).encode("latin-1")
    except UnicodeEncodeError:  # an added token, kept as it is written
        return piece.encode()


def _from_sentencepiece(piece: str) -> bytes:
    byte = _BYTE_PIECE.fullmatch(piece) if piece.startswith("<0x") else None
    return bytes([int(byte[1], 16)]) if byte is not None else piece.replace("▁", " ").encode()
