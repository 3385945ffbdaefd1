"""The table of drafters: what a user asks for becomes a drafter that can work with the target, or an error that says why not."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.config import QuantOptions
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.eagle import layers_of, open_eagle_drafter, open_gguf_head
from paceline.drafters.head_files import HeadFiles, is_head_file
from paceline.drafters.head_kinds import HeadKind
from paceline.drafters.medusa.drafter import GROWN_TREES, open_medusa
from paceline.drafters.mtp import open_mtp
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.options import NO_OPTIONS, HeadOptions
from paceline.drafters.pairs.opening import PairTarget
from paceline.drafters.prediction import PredictionDrafter
from paceline.drafters.stack import StackDrafter
from paceline.drafters.suffix.drafter import SuffixDrafter
from paceline.drafters.translate import ByteTokenizer, SharedPieces, TextDrafter
from paceline.errors import CheckpointError, IncompatibleDrafterError, PacelineError
from paceline.hub import resolve
from paceline.kv_cache.paged import KVCache
from paceline.models.checkpoint import is_gguf, read_model_config
from paceline.runtimes.base import Numerics, Runtime
from paceline.runtimes.cost import time_passes
from paceline.runtimes.load import RuntimeOptions, load_runtime
from paceline.speculation.drafter import Drafter
from paceline.tokenizer.tokenizer import Tokenizer
from paceline.tokenizer.vocabulary import SAMPLE_TEXT, VocabularyComparison, VocabularyMatch, compare_vocabularies

__all__ = ["EMBEDDED", "NAMES", "HeadOptions", "TargetDescription", "find_head", "layers_to_collect", "make_drafter"]

EMBEDDED = "draft"
"""Folder of a model directory that holds its own draft model."""

READ_ROWS = 32
"""Rows of the pass by which it is measured how long a draft model takes to read."""


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
        facts_directory: where facts found out about heads are kept; None = nowhere.
        runtime, cache: the target itself, for drafters whose rows live beside its own; None = it is not loaded.
        collected_layers: what `layers_to_collect` said, which the runtime was built with.
        head_options: how to guess with heads.
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
    token: str | None = field(default=None, repr=False)
    draft_quant: QuantOptions | None = None
    quant_directory: Path | None = None
    facts_directory: Path | None = None
    runtime: Runtime | None = None
    cache: KVCache | None = None
    collected_layers: tuple[int, ...] = ()
    head_options: HeadOptions = NO_OPTIONS


def layers_to_collect(
    wanted: str | Sequence[str],
    target: Path,
    *,
    token: str | None = None,
    offline: bool = False,
    facts_directory: Path | None = None,
    head_options: HeadOptions = NO_OPTIONS,
) -> tuple[int, ...]:
    """The boundaries of the target that the wanted drafters read, ascending: its runtime must be built to collect them.

    Where it has to be found out which ones a head reads, these are all it may. Names that cannot be resolved are left to
    `make_drafter` to complain about.
    """
    layers: set[int] = set()
    for name in [wanted] if isinstance(wanted, str) else wanted:
        if name not in NAMES:
            try:
                path = Path(name) if is_head_file(name) else resolve(name, token=token, offline=offline, with_heads=True)
                files = open_gguf_head(path) if is_gguf(path) else HeadFiles.open(path)
                if files is not None:
                    layers.update(layers_of(files, target, facts_directory=facts_directory, variant=head_options.variant_for(files.kind)))
            except PacelineError:
                continue
    return tuple(sorted(layers))


def make_drafter(wanted: str | Sequence[str], target: TargetDescription) -> Drafter | None:
    """The drafter for "auto", "none", a name of the table, a draft model's directory or id, or several of them in order.

    Raises:
        IncompatibleDrafterError: it can never work with this target.
        CheckpointError: the draft model cannot be read.
        ConfigError: an option was given that no such drafter reads.
    """
    names = [wanted] if isinstance(wanted, str) else wanted
    drafters = [drafter for name in names if (drafter := _one(name, target)) is not None]
    target.head_options.check_read(drafter.name for drafter in drafters)
    if len(names) == 1:
        return drafters[0] if drafters else None
    if len(drafters) < len(names) or not drafters:
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
        directory = Path(wanted) if is_head_file(wanted) else _resolve(wanted, target)
    except CheckpointError as error:
        raise IncompatibleDrafterError(f"drafter {wanted!r} is neither one of {', '.join(NAMES)} nor a draft model: {error}") from error
    return _open_head(directory, target) or _open_draft_model(directory, target)


def _resolve(wanted: str, target: TargetDescription) -> Path:
    return resolve(wanted, token=target.token, offline=target.offline, with_heads=True)


def find_head(path: Path, wanted: HeadKind | None = None) -> HeadFiles | None:
    """The files of a head that can be used, None where they hold a language model.

    Args:
        wanted: the only kind that will do.

    Raises:
        CheckpointError: a file is damaged.
        IncompatibleDrafterError: it is another head, or one of a method that there is no drafter for.
    """
    files = open_gguf_head(path) if is_gguf(path) else HeadFiles.open(path)
    if files is None:
        return None
    is_own = files.kind is HeadKind.MTP and "speculators_model_type" not in files.config  # it guesses for the model around it alone
    if wanted is None and (files.kind is HeadKind.LANGUAGE_MODEL or is_own):
        return None
    if wanted not in (None, files.kind):
        raise IncompatibleDrafterError(
            f"{path} holds no {wanted.value} head: drafter={wanted.value!r} guesses with one inside the target's own checkpoint; "
            "give the directory of a head, or use another drafter"
        )
    if files.kind not in HEADS:
        known = ", ".join(kind.value for kind in HEADS)
        raise IncompatibleDrafterError(f"{path} holds a {files.kind.value} head, which cannot be used yet; heads of {known} can")
    return files


def _open_head(path: Path, target: TargetDescription, wanted: HeadKind | None = None) -> Drafter | None:
    files = find_head(path, wanted)
    return None if files is None else HEADS[files.kind](files, target)


def _open_medusa(files: HeadFiles, target: TargetDescription) -> Drafter:
    return open_medusa(
        files,
        target.directory,
        vocab_size=target.vocab_size,
        num_threads=target.num_threads,
        device=target.device if target.runtime is None else target.runtime.capabilities.device,
        quant=target.draft_quant,
        quant_directory=target.quant_directory,
        tree=target.head_options.medusa_tree or GROWN_TREES[0],
    )


def _pair_target(files: HeadFiles, target: TargetDescription) -> PairTarget:
    if target.runtime is None or target.cache is None:
        raise IncompatibleDrafterError(f"the head {files.path} keeps its rows beside its target's: load the target with it")
    return PairTarget(
        directory=target.directory,
        runtime=target.runtime,
        cache=target.cache,
        tokenizer=target.tokenizer,
        vocab_size=target.vocab_size,
        max_context=target.max_context,
        collected=target.collected_layers,
        num_threads=target.num_threads,
        tree_width=target.tree_width,
        quant=target.draft_quant,
        quant_directory=target.quant_directory,
        facts_directory=target.facts_directory,
        variant=target.head_options.variant_for(files.kind),
    )


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
    cache.prefix_caching = target.cache is None or target.cache.prefix_caching
    passes = time_passes(runtime, cache, (READ_ROWS,), max_context=max_context, repeats=1, wants_logits=False)
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
        read_s=passes[READ_ROWS] / READ_ROWS,
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


def _own_head(kind: HeadKind, target: TargetDescription) -> Drafter:
    """The head inside the target's own checkpoint."""
    drafter = _open_head(target.directory, target, kind)
    if drafter is None:
        raise IncompatibleDrafterError(f"{target.directory} is a GGUF file, in which no {kind.value} head can be found: give a directory")
    return drafter


DRAFTERS: dict[str, Callable[[TargetDescription], Drafter]] = {
    "ngram": lambda target: NgramDrafter(),
    "suffix": lambda target: SuffixDrafter(),
    "prediction": lambda target: PredictionDrafter(),
    "draft_model": _embedded,
    "medusa": lambda target: _own_head(HeadKind.MEDUSA, target),
    "mtp": lambda target: _own_head(HeadKind.MTP, target),
}

HEADS: dict[HeadKind, Callable[[HeadFiles, TargetDescription], Drafter]] = {
    HeadKind.MEDUSA: _open_medusa,
    HeadKind.EAGLE: lambda files, target: open_eagle_drafter(files, _pair_target(files, target)),
    HeadKind.EAGLE3: lambda files, target: open_eagle_drafter(files, _pair_target(files, target)),
    HeadKind.PEAGLE: lambda files, target: open_eagle_drafter(files, _pair_target(files, target)),
    HeadKind.MTP: lambda files, target: open_mtp(files, _pair_target(files, target)),
}

NAMES = ("auto", "none", *DRAFTERS)
