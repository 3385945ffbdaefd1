"""The ids that a drafter can draft: those of the data, most frequent first, then the tokenizer's lowest ids, whose merges came first."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.training.shards import SequenceData


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """A choice of the target's ids.

    Attributes:
        target_ids: [Vd] ascending.
        draft_ids: [V] the number of each of the target's ids; -1 = it cannot be drafted.
    """

    target_ids: NDArray[np.int64]
    draft_ids: NDArray[np.int64]

    @classmethod
    def from_ids(cls, target_ids: NDArray[np.int64], vocab_size: int) -> "DraftVocabulary":
        ids = np.sort(target_ids)
        draft_ids = np.full(vocab_size, -1, np.int64)
        draft_ids[ids] = np.arange(len(ids))
        return cls(ids, draft_ids)

    def coverage(self, data: SequenceData) -> float:
        """Return the share of answer tokens that can be drafted."""
        counts = answer_counts(data, len(self.draft_ids))
        return float(counts[self.target_ids].sum() / max(1, counts.sum()))


def choose_vocabulary(data: SequenceData, size: int, vocab_size: int) -> DraftVocabulary:
    """Return the `size` most frequent ids of the answers; where they hold fewer, the lowest other ids fill up."""
    counts = answer_counts(data, vocab_size)
    order = np.lexsort((np.arange(vocab_size), -counts))  # by count, then by id
    return DraftVocabulary.from_ids(order[:size].astype(np.int64), vocab_size)


def answer_counts(data: SequenceData, vocab_size: int) -> NDArray[np.int64]:
    """Return [V] how often each id occurs in answers."""
    counts = np.zeros(vocab_size, np.int64)
    for ids, mask in zip(data.token_ids, data.is_answer, strict=True):
        counts += np.bincount(ids[mask.astype(bool)], minlength=vocab_size)
    return counts
