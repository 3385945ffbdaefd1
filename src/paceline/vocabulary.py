"""Do two tokenizers mean the same thing by an id? Compared piece by piece, not by size."""

from dataclasses import dataclass
from enum import Enum

from paceline.tokenizer import Tokenizer


class VocabularyMatch(Enum):
    """How two vocabularies relate."""

    SAME = "same"  # every id has the same piece
    PADDED = "padded"  # every id both know has the same piece, one knows more ids
    OVERLAPPING = "overlapping"  # some pieces are shared, under other ids or only in part
    DISJOINT = "disjoint"  # hardly anything is shared


@dataclass(frozen=True, slots=True)
class VocabularyComparison:
    """The verdict on a target's and a drafter's vocabulary.

    Attributes:
        match: the category.
        coverage: share of the target's ids that the drafter knows under the same id and piece.
        shared_pieces: share of the target's pieces that the drafter has under any id.
        first_difference: an id both know with different pieces, and the two pieces.
    """

    match: VocabularyMatch
    coverage: float
    shared_pieces: float
    first_difference: tuple[int, str, str] | None

    @property
    def is_compatible(self) -> bool:
        """Whether ids can be passed from one model to the other as they are."""
        return self.match in (VocabularyMatch.SAME, VocabularyMatch.PADDED)

    def explain(self) -> str:
        """One clause with the numbers."""
        text = f"{self.match.value} vocabularies: {self.coverage:.1%} of the target's ids mean the same to the drafter"
        if self.first_difference is not None:
            token_id, target, draft = self.first_difference
            text += f" (id {token_id} is {target!r} there and {draft!r} here; {self.shared_pieces:.1%} of the pieces are shared)"
        return text


def compare_vocabularies(target: Tokenizer, draft: Tokenizer) -> VocabularyComparison:
    """Compare every piece of two tokenizers."""
    target_pieces = [target.piece(token_id) for token_id in range(target.vocab_size)]
    draft_pieces = [draft.piece(token_id) for token_id in range(draft.vocab_size)]
    pairs = list(zip(target_pieces, draft_pieces, strict=False))
    differing = [token_id for token_id, (one, other) in enumerate(pairs) if one != other]
    known = set(draft_pieces)
    coverage = (len(pairs) - len(differing)) / max(1, len(target_pieces))
    shared_pieces = sum(piece in known for piece in target_pieces) / max(1, len(target_pieces))
    if not differing:
        match = VocabularyMatch.SAME if len(target_pieces) == len(draft_pieces) else VocabularyMatch.PADDED
        return VocabularyComparison(match, coverage, shared_pieces, None)
    first = (differing[0], *pairs[differing[0]])
    match = VocabularyMatch.OVERLAPPING if shared_pieces >= 0.05 else VocabularyMatch.DISJOINT
    return VocabularyComparison(match, coverage, shared_pieces, first)
