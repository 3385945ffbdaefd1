"""The table of drafters: what a user asks for becomes a drafter that can work with the target, or an error that says why not."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.stack import StackDrafter
from paceline.errors import CheckpointError, IncompatibleDrafterError
from paceline.hub import resolve
from paceline.models.config import read_config
from paceline.runtimes.base import Numerics
from paceline.runtimes.load import RuntimeOptions, load_runtime
from paceline.speculation.drafter import Drafter
from paceline.tokenizer import Tokenizer
from paceline.vocabulary import compare_vocabularies

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
    if wanted in _TABLE:
        return _TABLE[wanted](target)
    try:
        directory = resolve(wanted, token=target.token, offline=target.offline)
    except CheckpointError as error:
        raise IncompatibleDrafterError(f"drafter {wanted!r} is neither one of {', '.join(NAMES)} nor a draft model: {error}") from error
    return _open_draft_model(directory, target)


def _open_draft_model(directory: Path, target: TargetDescription) -> Drafter:
    config = read_config(directory)
    comparison = compare_vocabularies(target.tokenizer, Tokenizer.open(directory))
    if not comparison.is_compatible:
        raise IncompatibleDrafterError(
            f"draft model {directory} cannot guess for {target.directory}: {comparison.explain()}. "
            "Use a draft model of the same family (same tokenizer), or drafter='ngram'"
        )
    options = RuntimeOptions(
        numerics=Numerics.FAST,
        num_threads=target.num_threads,
        max_context=min(target.max_context, config.max_positions),
        device=target.device,
    )
    runtime = load_runtime(directory, options).runtime
    block_size = 32
    cache = runtime.new_cache(2 + -(-target.max_slots // block_size))
    return DraftModelDrafter(runtime, cache, vocab_size=target.vocab_size, tree_width=target.tree_width)


def _embedded(target: TargetDescription) -> Drafter:
    directory = target.directory / EMBEDDED
    if not (directory / "config.json").is_file():
        raise IncompatibleDrafterError(
            f"{target.directory} has no embedded draft model (folder {EMBEDDED!r}): give a draft model's directory or id instead"
        )
    return _open_draft_model(directory, target)


_TABLE: dict[str, Callable[[TargetDescription], Drafter]] = {
    "ngram": lambda target: NgramDrafter(),
    "draft_model": _embedded,
}

NAMES = ("auto", "none", *_TABLE)
