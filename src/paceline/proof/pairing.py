"""Can this draft model guess for this target, how, and why (not)? From facts alone."""

from dataclasses import dataclass
from typing import Any

from paceline.proof.checkpoint_facts import CheckpointFacts
from paceline.tokenizer.vocabulary import VocabularyComparison, compare_pieces


@dataclass(frozen=True, slots=True)
class PairVerdict:
    """Whether a pair works.

    Attributes:
        works: it can guess at all.
        summary: one sentence, the numbers included.
        vocabulary: the comparison; None where a tokenizer could not be read.
        notes: what makes it slower than it could be.
    """

    works: bool
    summary: str
    vocabulary: VocabularyComparison | None = None
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        found = self.vocabulary
        return {
            "works": self.works,
            "summary": self.summary,
            "notes": list(self.notes),
            "match": None if found is None else found.match.value,
            "same_ids": None if found is None else found.coverage,
            "shared_pieces": None if found is None else found.shared_pieces,
            "sample_coverage": None if found is None else found.sample_coverage,
            "spellable": None if found is None else found.spellable,
            "first_difference": None if found is None or found.first_difference is None else list(found.first_difference),
        }


def judge_pair(target: CheckpointFacts, draft: CheckpointFacts) -> PairVerdict:
    """The verdict on a draft model for a target; weights are not read."""
    notes = _notes(target, draft)
    if target.tokenizer is None or draft.tokenizer is None:
        missing = target.path if target.tokenizer is None else draft.path
        summary = f"{missing} has no tokenizer.json: how the vocabularies relate shows when the models are loaded"
        return PairVerdict(True, summary, None, notes)
    found = compare_pieces(target.tokenizer.pieces, draft.tokenizer.pieces, sample_ids=target.tokenizer.sample_ids)
    if found.is_unusable:
        return PairVerdict(False, f"{found.why_unusable()}: use a draft model of the target's family, or the drafter ngram", found, notes)
    return PairVerdict(True, f"{found.describe_match()}; {found.describe_conversion()}", found, notes)


def _notes(target: CheckpointFacts, draft: CheckpointFacts) -> tuple[str, ...]:
    notes = []
    if draft.config.max_positions < target.config.max_positions:
        notes.append(
            f"the draft model was made for {draft.config.max_positions} tokens, the target for {target.config.max_positions}: "
            "steps behind the shorter context are plain"
        )
    if draft.num_parameters >= target.num_parameters:
        notes.append(
            f"the draft model has {draft.num_parameters:,} parameters, the target {target.num_parameters:,}: "
            "a draft pass costs as much as a plain step, so drafting cannot pay"
        )
    ends, draft_ends = _end_pieces(target), _end_pieces(draft)
    if ends and draft_ends and not ends & draft_ends:
        notes.append(
            f"the target ends with {', '.join(sorted(ends))}, the draft model with {', '.join(sorted(draft_ends))}: "
            "the draft model writes on where the target ends"
        )
    return tuple(notes)


def _end_pieces(checkpoint: CheckpointFacts) -> set[str]:
    if checkpoint.tokenizer is None:
        return set()
    pieces = checkpoint.tokenizer.pieces
    return {pieces[token_id] for token_id in checkpoint.config.eos_token_ids if token_id < len(pieces)}
