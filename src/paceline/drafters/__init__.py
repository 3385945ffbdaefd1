"""The table of drafters: what a user asks for becomes a drafter that can work with the target, or an error that says why not."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.config import QuantOptions
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.prediction import PredictionDrafter
from paceline.drafters.stack import StackDrafter
from paceline.drafters.suffix.drafter import SuffixDrafter
from paceline.drafters.translate import ByteTokenizer, SharedPieces, TextDrafter
from paceline.errors import CheckpointError, IncompatibleDrafterError
from paceline.hub import resolve
from paceline.models.checkpoint import read_model_config
from paceline.runtimes.base import Numerics
from paceline.runtimes.load import RuntimeOptions, load_runtime
from paceline.speculation.drafter import Drafter
from paceline.tokenizer import Tokenizer
from paceline.vocabulary import SAMPLE_TEXT, VocabularyComparison, VocabularyMatch, compare_vocabularies

EMBEDDED = "draft"
"""Folder of a model directory that holds its own draft model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetDescription:
    """What a drafter must know of its target.

    Attributes:
        directory: the target's checkpoint.
        tokenizer: the target's.
        vocab_size: V of the target's logits.
        max_context, max_num_seqs: what the target's cache is made for.
        num_threads, device: what drafters may compute on.
        max_slots: rows the target's cache holds; a drafter's own cache holds as many.
        tree_width: guesses a position.
        offline, token: for draft models from the hub.
        draft_quant: how to quantise draft models; None = they stay as they are stored.
        quant_directory: where quantised matrices are kept for the next time; None = nowhere.
    """

    directory: Path
    tokenizer: Tokenizer
    vocab_size: int
    max_context: int
    max_slots: int
    num_threads: int = 1
    device: str = "auto"
    tree_width: int = 1
    offline: bool = False
    token: str | None = None
    draft_quant: QuantOptions | None = None
    quant_directory: Path | None = None


def make_drafter(wanted: str | Sequence[str], target: TargetDescription) -> Drafter | None:
    """The drafter for "auto", "none", a name of the table, a draft model's directory or id, or several of them in order.

    Raises:
        IncompatibleDrafterError: it can never work with this target.
        CheckpointError: the draft model cannot be read.
    """
    if isinstance(wanted, str) or len(wanted) == 1:
        return _one(wanted if isinstance(wanted, str) else wanted[0], target)
    drafters = [drafter for name in wanted if (drafter := _one(name, target)) is not None]
    if len(drafters) < len(wanted) or not drafters:
        raise IncompatibleDrafterError(f"drafter list {list(wanted)} is empty or holds 'none': name drafters only, or use 'none' alone")
    return StackDrafter(drafters)


def _one(wanted: str, target: TargetDescription) -> Drafter | None:
    if wanted == "none":
        return None
    if wanted == "auto":
        embedded = target.directory / EMBEDDED
        return _open_draft_model(embedded, target) if (embedded / "config.json").is_file() else NgramDrafter()
    if wanted in DRAFTERS:
        return DRAFTERS[wanted](target)
    try:
        directory = resolve(wanted, token=target.token, offline=target.offline)
    except CheckpointError as error:
        raise IncompatibleDrafterError(f"drafter {wanted!r} is neither one of {', '.join(NAMES)} nor a draft model: {error}") from error
    return _open_draft_model(directory, target)


def _open_draft_model(directory: Path, target: TargetDescription) -> Drafter:
    config = read_model_config(directory)
    tokenizer = Tokenizer.open(directory)
    comparison = compare_vocabularies(target.tokenizer, tokenizer)
    if comparison.is_hopeless:
        raise IncompatibleDrafterError(
            f"draft model {directory} cannot guess for {target.directory}: {comparison.why_hopeless()}. "
            "Use a draft model of the same family (same tokenizer), or drafter='ngram'"
        )
    has_all_ids = comparison.is_compatible and comparison.coverage == 1.0
    expansion = 1.0 if has_all_ids else _expansion(target.tokenizer, tokenizer)
    max_context = min(math.ceil(target.max_context * expansion), config.max_positions)
    options = RuntimeOptions(
        numerics=Numerics.FAST,
        num_threads=target.num_threads,
        max_context=max_context,
        device=target.device,
        quant=target.draft_quant,
        quant_directory=target.quant_directory,
    )
    runtime = load_runtime(directory, options).runtime
    block_size = 32
    cache = runtime.new_cache(2 + -(-math.ceil(target.max_slots * expansion) // block_size))
    translation, by_text = None, None
    if not has_all_ids:
        ours, theirs = ByteTokenizer(target.tokenizer), ByteTokenizer(tokenizer)
        if comparison.match is not VocabularyMatch.DISJOINT:
            translation = SharedPieces(ours, theirs, vocab_size=target.vocab_size, draft_vocab_size=runtime.config.vocab_size)
        else:
            by_text = ours, theirs
    drafter = DraftModelDrafter(
        runtime,
        cache,
        vocab_size=target.vocab_size,
        num_known_ids=min(tokenizer.vocab_size, runtime.config.vocab_size),
        translation=translation,
        max_context=max_context,
        tree_width=target.tree_width,
        note=_note(comparison, max_context, math.ceil(target.max_context * expansion)),
    )
    return drafter if by_text is None else TextDrafter(drafter, *by_text)


def _expansion(target: Tokenizer, draft: Tokenizer) -> float:
    """How many of the draft model's tokens a text may have for each of the target's, with some room; at least 1."""
    counts = [len(tokenizer.encode(SAMPLE_TEXT, add_special_tokens=False)) for tokenizer in (draft, target)]
    return max(1.0, 1.25 * counts[0] / max(1, counts[1]))


def _note(comparison: VocabularyComparison, max_context: int, wanted_context: int) -> str:
    """What the banner says of a pair that is not an obvious one."""
    note = "" if comparison.coverage == 1.0 else f"; {comparison.match.value} vocabularies: {comparison.method()}"
    if max_context < wanted_context:
        note += f"; no drafts behind its context of {max_context} tokens"
    return note


def _embedded(target: TargetDescription) -> Drafter:
    directory = target.directory / EMBEDDED
    if not (directory / "config.json").is_file():
        raise IncompatibleDrafterError(
            f"{target.directory} has no embedded draft model (folder {EMBEDDED!r}): give a draft model's directory or id instead"
        )
    return _open_draft_model(directory, target)


DRAFTERS: dict[str, Callable[[TargetDescription], Drafter]] = {
    "ngram": lambda target: NgramDrafter(),
    "suffix": lambda target: SuffixDrafter(),
    "prediction": lambda target: PredictionDrafter(),
    "draft_model": _embedded,
}

NAMES = ("auto", "none", *DRAFTERS)
