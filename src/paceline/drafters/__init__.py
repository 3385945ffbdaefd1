"""The table of drafters: what a user asks for becomes a drafter that can work with the target, or an error that says why not.

Names are resolved and files opened once, before the target is loaded (`prepare`): impossible pairs fail early, and the target learns
which layers to collect. The drafters are made once the target is loaded (`PreparedDrafters.open`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.config import EngineConfig, SpeculationConfig, cache_directory
from paceline.drafters.block import BLOCK_KINDS, block_boundaries, open_block_drafter
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.eagle import layers_of, open_eagle_drafter, open_gguf_head
from paceline.drafters.frequent_ids import read_text
from paceline.drafters.gemma4_assistant import open_assistant, open_gguf_assistant, suits
from paceline.drafters.head_files import HeadFiles, is_head_file
from paceline.drafters.head_kinds import HeadKind
from paceline.drafters.medusa.drafter import open_medusa
from paceline.drafters.mtp import open_gguf_module, open_mtp
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.options import HeadOptions
from paceline.drafters.pairs.target_text import NUM_SEQUENCES as NUM_CALIBRATION_TEXTS
from paceline.drafters.prediction import PredictionDrafter
from paceline.drafters.suffix.drafter import SuffixDrafter
from paceline.drafters.target import LoadedTarget
from paceline.drafters.translate import ByteTokenizer, SharedPieces, TextDrafter
from paceline.errors import BackendUnavailableError, CapacityError, CheckpointError, ConfigError, IncompatibleDrafterError
from paceline.hub import gguf_models, resolve
from paceline.kv_cache.paged import BLOCK_SIZE
from paceline.kv_cache.recurrent import StateLimits
from paceline.kv_cache.row_plan import blocks_for
from paceline.models.checkpoint import is_gguf, read_model_config
from paceline.runtimes.base import Numerics
from paceline.runtimes.cost import time_passes
from paceline.runtimes.load import RuntimeOptions, load_runtime
from paceline.speculation.drafter import Drafter, DrafterNeeds
from paceline.tokenizer.tokenizer import Tokenizer
from paceline.tokenizer.vocabulary import SAMPLE_TEXT, VocabularyComparison, VocabularyMatch, compare_vocabularies

__all__ = [
    "EMBEDDED",
    "NAMES",
    "NUM_CALIBRATION_TEXTS",
    "HeadOptions",
    "LoadedTarget",
    "PreparedDrafter",
    "PreparedDrafters",
    "check_draft_adapter",
    "find_head",
    "prepare",
    "prepare_one",
]

EMBEDDED = "draft"
"""Folder of a model directory that holds its own draft model."""

ASSISTANT = "assistant"
"""Folder of a model directory that holds a head for it."""

READ_ROWS = 32
"""Rows of the pass that measures a draft model's prefill speed."""

DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "ngram": NgramDrafter,
    "suffix": SuffixDrafter,
    "prediction": PredictionDrafter,
}
"""Drafters that need no files, by name."""

HEADS: dict[HeadKind, Callable[[HeadFiles, LoadedTarget], Drafter]] = {
    HeadKind.MEDUSA: open_medusa,
    HeadKind.EAGLE: open_eagle_drafter,
    HeadKind.EAGLE3: open_eagle_drafter,
    HeadKind.PEAGLE: open_eagle_drafter,
    HeadKind.MTP: open_mtp,
    HeadKind.GEMMA4_ASSISTANT: open_assistant,
    **dict.fromkeys(BLOCK_KINDS, open_block_drafter),
}

DRAFT_MODEL = DraftModelDrafter.name
OWN_HEADS = (HeadKind.MEDUSA.value, HeadKind.MTP.value)
"""Names that stand for a head in the target's own checkpoint."""

NAMES = ("auto", "none", *DRAFTERS, DRAFT_MODEL, *OWN_HEADS)


@dataclass(frozen=True, slots=True)
class PreparedDrafter:
    """One drafter whose target is not loaded yet.

    Attributes:
        name: what it will be called.
        path: of its files; None if it needs none.
        head: the opened files, if they hold a head.
        is_found: nobody named it: where it cannot be used, n-grams guess.
    """

    name: str
    path: Path | None = None
    head: HeadFiles | None = None
    is_found: bool = False

    def open(self, target: LoadedTarget) -> Drafter:
        """The drafter.

        Raises:
            IncompatibleDrafterError: it can never work with this target.
            CheckpointError: its files do not hold what it needs.
        """
        if self.head is not None:
            try:
                return HEADS[self.head.kind](self.head, target)
            except (CheckpointError, IncompatibleDrafterError, CapacityError):
                if not self.is_found:
                    raise
                return NgramDrafter()
        return DRAFTERS[self.name]() if self.path is None else _open_draft_model(self.path, target)


@dataclass(frozen=True, slots=True)
class PreparedDrafters:
    """All drafters a user asked for.

    Attributes:
        drafters: in the order in which they were asked for; none for plain decoding.
        layers: the target's layer boundaries they read, ascending: its runtime must be built to collect them. Where calibration
            decides which ones a head reads, these are all candidates.
        made: drafter objects passed in by the user.
    """

    drafters: tuple[PreparedDrafter, ...]
    layers: tuple[int, ...]
    made: Sequence[Drafter] = ()

    def open(self, target: LoadedTarget) -> list[Drafter]:
        """The drafters for the loaded target; none for plain decoding.

        Raises:
            IncompatibleDrafterError, CheckpointError: as `PreparedDrafter.open`.
        """
        if self.made:
            return list(self.made)
        opened = [drafter.open(target) for drafter in self.drafters]
        if len(self.drafters) > 1 and self.drafters[-1].is_found and opened[-1].name == NgramDrafter.name:
            del opened[-1]  # the head that was found cannot be used, and n-grams draft already
        names = [drafter.name for drafter in opened]
        for index, drafter in enumerate(opened):  # requests select one by its name, and acceptance is counted by it
            if (number := names[:index].count(drafter.name)) > 0:
                drafter.name = f"{drafter.name}_{number + 1}"
        return opened


def prepare(target: Path, engine: EngineConfig, speculation: SpeculationConfig, made: Sequence[Drafter] = ()) -> PreparedDrafters:
    """Find what `speculation.drafter` names, for the target in a directory or GGUF file.

    Args:
        made: drafter objects passed in by the user; then no files are looked for.

    Raises:
        IncompatibleDrafterError: one can never work with this target.
        CheckpointError: files are damaged.
        ConfigError: an option or an adapter was given that none of the drafters reads.
    """
    if made:
        return PreparedDrafters((), DrafterNeeds.of(made).layers, made)
    names = [speculation.drafter] if isinstance(speculation.drafter, str) else speculation.drafter
    options = HeadOptions.of(speculation.drafter_options)
    found = [prepare_one(name, target, token=engine.hf_token, offline=engine.offline) for name in names]
    drafters = tuple(drafter for drafter in found if drafter is not None)
    options.check_read(drafter.name for drafter in drafters)
    if options.num_ids is not None:
        options.guessed_ids(read_model_config(target).vocab_size)
    if options.ids_of is not None:
        read_text(options.ids_of)
    if len(names) > 1 and len(drafters) < len(names):
        raise IncompatibleDrafterError(f"drafter list {list(names)} holds 'none': name drafters only, or use 'none' alone")
    if len(names) > 1:
        drafters = _distinct(names, drafters)
    elif names[0] == "auto" and drafters[0].name != NgramDrafter.name:
        drafters = (PreparedDrafter(NgramDrafter.name), *drafters)  # copies where the text repeats itself, which costs next to nothing
    check_draft_adapter(speculation.draft_adapter, [drafter.name for drafter in drafters])
    layers = {layer for drafter in drafters if drafter.head is not None for layer in _layers_of(drafter.head, target, options)}
    return PreparedDrafters(drafters, tuple(sorted(layers)))


def _layers_of(head: HeadFiles, target: Path, options: HeadOptions) -> tuple[int, ...]:
    """The target's layer boundaries that a head reads."""
    return block_boundaries(head, target) if head.kind in BLOCK_KINDS else layers_of(head, target, options)


def check_draft_adapter(directory: str | None, drafters: Sequence[str]) -> None:
    """That an adapter for the draft model has one to compute with.

    Args:
        directory: of the adapter; None = there is none.
        drafters: their names.

    Raises:
        ConfigError: there is no draft model, or there are several.
    """
    count = sum(name == DRAFT_MODEL for name in drafters)
    if directory is None or count == 1:
        return
    if count == 0:
        raise ConfigError(
            f"draft_adapter is {directory!r}, and the drafter is {', '.join(drafters) or 'none'}: leave it out, or name the draft model it "
            "was made for (drafter)"
        )
    raise ConfigError(f"draft_adapter is {directory!r}, and {count} draft models guess: name the one it was made for alone")


def _distinct(names: Sequence[str], drafters: Sequence[PreparedDrafter]) -> tuple[PreparedDrafter, ...]:
    """The drafters, without what "auto" stands for where another name stands for it too.

    Raises:
        IncompatibleDrafterError: one was named twice: it would guess the same once more.
    """
    kept: dict[tuple[str, Path | None], tuple[str, PreparedDrafter]] = {}
    for name, drafter in zip(names, drafters, strict=True):
        known = kept.setdefault((drafter.name, drafter.path and drafter.path.resolve()), (name, drafter))
        if known[1] is not drafter and (name == known[0] or "auto" not in (name, known[0])):
            how = f"{name!r} twice" if name == known[0] else f"{known[0]!r} and {name!r}, which are the same"
            raise IncompatibleDrafterError(f"drafter list {list(names)} holds {how}: name each drafter once")
    return tuple(drafter for _, drafter in kept.values())


def prepare_one(wanted: str, target: Path, *, token: str | None = None, offline: bool = False) -> PreparedDrafter | None:
    """Find "auto", a name of the table, a draft model's directory or id, or a head; None for "none".

    Args:
        target: its directory or GGUF file.
        token, offline: for models from the hub.

    Raises:
        IncompatibleDrafterError, CheckpointError: as `prepare`.
    """
    if wanted == "none":
        return None
    if wanted in DRAFTERS:
        return PreparedDrafter(wanted)
    if wanted in ("auto", DRAFT_MODEL):
        return _embedded(wanted, target)
    own = HeadKind(wanted) if wanted in OWN_HEADS else None
    path = target if own is not None else _resolve(wanted, token=token, offline=offline)
    head = find_head(path, own, inside_target=path.resolve() == target.resolve())
    if head is not None:
        return PreparedDrafter(head.kind.value, path, head)
    if own is not None:
        raise IncompatibleDrafterError(f"{target} is a GGUF file that holds no {wanted} head: use another drafter")
    return PreparedDrafter(DRAFT_MODEL, path)


def _embedded(wanted: str, target: Path) -> PreparedDrafter:
    directory = target / EMBEDDED
    if (directory / "config.json").is_file():
        return PreparedDrafter(DRAFT_MODEL, directory)
    if wanted == "auto":
        head = _assistant_of(target) or _own_module(target)
        if head is None:
            return PreparedDrafter(NgramDrafter.name)
        return PreparedDrafter(head.kind.value, head.path, head, is_found=head.kind is HeadKind.MTP)
    raise IncompatibleDrafterError(
        f"{target} has no embedded draft model (folder {EMBEDDED!r}): give a draft model's directory or id instead"
    )


def _assistant_of(target: Path) -> HeadFiles | None:
    """The head in the folder for it, as a directory or as its only GGUF file.

    The folder beside a GGUF file may be there for another one: what is not for this model is not its assistant.
    """
    folder = (target.parent if is_gguf(target) else target) / ASSISTANT
    if (folder / "config.json").is_file():
        head = find_head(folder)
    else:
        files = gguf_models(folder) if folder.is_dir() else []
        head = find_head(files[0]) if len(files) == 1 else None
    return head if head is None or not is_gguf(target) or suits(head, read_model_config(target)) else None


def _own_module(target: Path) -> HeadFiles | None:
    """The module for multi-token prediction in the target's own checkpoint; None where there is none that can be read."""
    try:
        head = find_head(target, inside_target=True)
    except (CheckpointError, IncompatibleDrafterError, BackendUnavailableError):
        return None  # of a target that cannot be read its loading says why
    return head if head is not None and head.kind is HeadKind.MTP else None


def _resolve(wanted: str, *, token: str | None, offline: bool) -> Path:
    if is_head_file(wanted):
        return Path(wanted)
    try:
        return resolve(wanted, token=token, offline=offline, with_heads=True)
    except CheckpointError as error:
        raise IncompatibleDrafterError(f"drafter {wanted!r} is neither one of {', '.join(NAMES)} nor a draft model: {error}") from error


def find_head(path: Path, wanted: HeadKind | None = None, *, inside_target: bool = False) -> HeadFiles | None:
    """The files of a head that can be used, None where they hold a language model.

    Args:
        wanted: the only kind accepted.
        inside_target: the files are the target's own.

    Raises:
        CheckpointError: a file is damaged.
        IncompatibleDrafterError: it is another kind of head, or of a method without a drafter.
    """
    files = open_gguf_head(path) or open_gguf_assistant(path) if is_gguf(path) else HeadFiles.open(path)
    if files is None and inside_target:
        files = open_gguf_module(path)
    if files is None:
        return None
    is_part = files.kind is HeadKind.MTP and not files.is_speculators and not inside_target  # of another model, with which alone it works
    if wanted is None and (files.kind is HeadKind.LANGUAGE_MODEL or is_part):
        return None
    if wanted not in (None, files.kind):
        raise IncompatibleDrafterError(
            f"{path} holds no {wanted.value} head: drafter={wanted.value!r} guesses with one inside the target's own checkpoint; "
            "give the directory of a head, or use another drafter"
        )
    if files.kind not in HEADS:
        known = ", ".join(kind.value for kind in HEADS)
        raise IncompatibleDrafterError(f"{path} is a {files.kind.value} drafter, which is not supported; those of {known} are")
    return files


def _open_draft_model(directory: Path, target: LoadedTarget) -> Drafter:
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
    max_model_len = min(math.ceil(target.max_model_len * expansion), config.max_positions)
    adapter = None if target.speculation.draft_adapter is None else Path(target.speculation.draft_adapter)
    options = RuntimeOptions(
        numerics=Numerics.FAST,
        num_threads=target.engine.num_threads,
        max_model_len=max_model_len,
        device=target.engine.device,
        quantization=target.draft_model_quant,
        quant_directory=cache_directory(),
        memory_bytes=None if adapter is None else target.memory_bytes,
        merge_adapter=adapter,
    )
    runtime = load_runtime(directory, options).runtime
    num_blocks = 1 + blocks_for(math.ceil(target.cache.max_slots * expansion), BLOCK_SIZE)  # one more for the timed pass
    kept_states = target.engine.max_num_seqs if target.cache.prefix_caching else 0
    cache = runtime.new_cache(num_blocks, states=StateLimits(stride=target.engine.state_interval, max_kept=kept_states))
    cache.prefix_caching = target.cache.prefix_caching
    passes = time_passes(runtime, cache, (READ_ROWS,), max_model_len=max_model_len, repeats=1, wants_logits=False)
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
        max_model_len=max_model_len,
        tree_width=target.speculation.tree_width,
        note=_note(comparison, max_model_len, math.ceil(target.max_model_len * expansion), adapter),
        read_s=passes[READ_ROWS] / READ_ROWS,
    )
    return drafter if by_text is None else TextDrafter(drafter, *by_text)


def _expansion(target: Tokenizer, draft: Tokenizer) -> float:
    """Draft-model tokens per target token of a text, with some room; at least 1."""
    counts = [len(tokenizer.encode(SAMPLE_TEXT, add_special_tokens=False)) for tokenizer in (draft, target)]
    return max(1.0, 1.25 * counts[0] / max(1, counts[1]))


def _note(comparison: VocabularyComparison, max_model_len: int, wanted_context: int, adapter: Path | None) -> str:
    """What the banner says of a pair that is not an obvious one, and of an adapter."""
    note = "" if adapter is None else f"; with the adapter {adapter.name or adapter}"
    note += "" if comparison.coverage == 1.0 else f"; {comparison.match.value} vocabularies: {comparison.method()}"
    if max_model_len < wanted_context:
        note += f"; no drafts behind its context of {max_model_len} tokens"
    return note
