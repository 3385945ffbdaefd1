"""The table of drafters: turns the names that a user gives into drafters, or raises an error that says why one cannot work.

Names are resolved and files opened before the target is loaded (`prepare`): impossible combinations fail early, and the target's runtime
is built to collect the needed layers. The drafters are made once the target is loaded (`PreparedDrafters.open`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from paceline.config import EngineConfig, SpeculationConfig
from paceline.drafters.block import BLOCK_KINDS, open_block_drafter, open_gguf_block, read_block_layer_boundaries
from paceline.drafters.block import fits_target as fits_block
from paceline.drafters.draft_model import DraftModelDrafter, open_draft_model, too_large
from paceline.drafters.draft_vocab import read_corpus
from paceline.drafters.eagle import open_eagle_drafter, read_eagle_layer_boundaries
from paceline.drafters.eagle.checkpoint import open_gguf_eagle
from paceline.drafters.gemma4_assistant.checkpoint import fits_target, open_gguf_assistant
from paceline.drafters.gemma4_assistant.drafter import open_assistant
from paceline.drafters.head_files import HeadFiles, is_head_file
from paceline.drafters.head_kinds import HeadKind
from paceline.drafters.medusa.drafter import open_medusa
from paceline.drafters.mtp import open_gguf_module, open_mtp
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.options import HeadOptions
from paceline.drafters.prediction import PredictionDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.drafters.target import LoadedTarget
from paceline.errors import BackendUnavailableError, CapacityError, CheckpointError, ConfigError, IncompatibleDrafterError
from paceline.hub import gguf_models, resolve_model
from paceline.models.checkpoint import is_gguf, read_model_config
from paceline.speculation.drafter import Drafter, DrafterNeeds

__all__ = [
    "EMBEDDED",
    "NAMES",
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
"""Folder of a model directory with its own draft model."""

ASSISTANT = "assistant"
"""Folder of a model directory with a head for it."""

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
"""Names of heads in the target's own checkpoint."""

NAMES = ("auto", "none", *DRAFTERS, DRAFT_MODEL, *OWN_HEADS)


@dataclass(frozen=True, slots=True)
class PreparedDrafter:
    """One drafter whose target is not loaded yet.

    Attributes:
        name: its name.
        path: path of the drafter's files; None if it needs none.
        head: the opened files, if they hold a head.
        is_optional: "auto" chose it: if it cannot be used, n-grams draft instead.
        notice: why "auto" did not choose another one; empty = there is none.
    """

    name: str
    path: Path | None = None
    head: HeadFiles | None = None
    is_optional: bool = False
    notice: str = ""

    def open(self, target: LoadedTarget) -> Drafter:
        """Make the drafter.

        Raises:
            IncompatibleDrafterError: it can never work with this target.
            CheckpointError: its files do not hold what it needs.
        """
        if self.head is not None:
            try:
                return HEADS[self.head.kind](self.head, target)
            except (CheckpointError, IncompatibleDrafterError, CapacityError):
                if not self.is_optional:
                    raise
                return NgramDrafter()
        return DRAFTERS[self.name]() if self.path is None else open_draft_model(self.path, target)


@dataclass(frozen=True, slots=True)
class PreparedDrafters:
    """All drafters that a user named.

    Attributes:
        drafters: in the order of their names; none for plain decoding.
        layers: the target's layer boundaries that they read, ascending: its runtime must be built to collect them.
        made: drafter objects passed in by the user.
    """

    drafters: tuple[PreparedDrafter, ...]
    layers: tuple[int, ...]
    made: Sequence[Drafter] = ()

    @property
    def notices(self) -> list[str]:
        """Lines for the user about drafters that are not used."""
        return [drafter.notice for drafter in self.drafters if drafter.notice]

    def open(self, target: LoadedTarget) -> list[Drafter]:
        """Make the drafters for the loaded target; none for plain decoding.

        Raises:
            IncompatibleDrafterError, CheckpointError: as `PreparedDrafter.open`.
        """
        if self.made:
            return list(self.made)
        opened = [drafter.open(target) for drafter in self.drafters]
        if len(self.drafters) > 1 and self.drafters[-1].is_optional and opened[-1].name == NgramDrafter.name:
            del opened[-1]  # the optional head cannot be used, and the n-gram drafter is in the list already
        names = [drafter.name for drafter in opened]
        for index, drafter in enumerate(opened):  # names must differ: requests select a drafter by name, and acceptance is counted by name
            if (number := names[:index].count(drafter.name)) > 0:
                drafter.name = f"{drafter.name}_{number + 1}"
        return opened


def prepare(target: Path, engine: EngineConfig, speculation: SpeculationConfig, made: Sequence[Drafter] = ()) -> PreparedDrafters:
    """Resolve the names of `speculation.drafter` for the target in a directory or GGUF file.

    Args:
        made: drafter objects passed in by the user; then no files are opened.

    Raises:
        IncompatibleDrafterError: one can never work with this target.
        CheckpointError: files are damaged.
        ConfigError: none of the drafters reads an option or adapter that was given.
    """
    if made:
        return PreparedDrafters((), DrafterNeeds.union(made).layers, made)
    names = [speculation.drafter] if isinstance(speculation.drafter, str) else speculation.drafter
    options = HeadOptions.parse(speculation.drafter_options)
    found = [prepare_one(name, target, token=engine.hf_token, offline=engine.offline) for name in names]
    drafters = tuple(drafter for drafter in found if drafter is not None)
    options.check_all_used_by(drafter.name for drafter in drafters)
    if options.draft_vocab_size is not None:
        options.num_draft_ids(read_model_config(target).vocab_size)
    if options.draft_vocab_corpus is not None:
        read_corpus(options.draft_vocab_corpus)
    if len(names) > 1 and len(drafters) < len(names):
        raise IncompatibleDrafterError(f"drafter list {list(names)} holds 'none': name drafters only, or use 'none' alone")
    if len(names) > 1:
        drafters = _without_duplicates(names, drafters)
    elif names[0] == "auto" and drafters[0].name != NgramDrafter.name:
        drafters = (PreparedDrafter(NgramDrafter.name), *drafters)  # n-grams cost next to nothing and copy repeated text
    check_draft_adapter(speculation.draft_adapter, [drafter.name for drafter in drafters])
    layers = {layer for drafter in drafters if drafter.head is not None for layer in _read_layer_boundaries(drafter.head, target, options)}
    return PreparedDrafters(drafters, tuple(sorted(layers)))


def _read_layer_boundaries(head: HeadFiles, target: Path, options: HeadOptions) -> tuple[int, ...]:
    """Return the layer boundaries of the target whose hidden states a head reads."""
    return read_block_layer_boundaries(head, target) if head.kind in BLOCK_KINDS else read_eagle_layer_boundaries(head, target, options)


def check_draft_adapter(directory: str | None, drafters: Sequence[str]) -> None:
    """Check that there is exactly one draft model for a draft adapter.

    Args:
        directory: directory of the adapter; None = no adapter.
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
    raise ConfigError(f"draft_adapter is {directory!r}, and there are {count} draft models: name only the one it was made for")


def _without_duplicates(names: Sequence[str], drafters: Sequence[PreparedDrafter]) -> tuple[PreparedDrafter, ...]:
    """Return the drafters without the one of "auto" if another name resolves to the same.

    Raises:
        IncompatibleDrafterError: one is named twice.
    """
    kept: dict[tuple[str, Path | None], tuple[str, PreparedDrafter]] = {}
    for name, drafter in zip(names, drafters, strict=True):
        known = kept.setdefault((drafter.name, drafter.path and drafter.path.resolve()), (name, drafter))
        if known[1] is not drafter and (name == known[0] or "auto" not in (name, known[0])):
            how = f"{name!r} twice" if name == known[0] else f"{known[0]!r} and {name!r}, which are the same"
            raise IncompatibleDrafterError(f"drafter list {list(names)} holds {how}: name each drafter once")
    return tuple(drafter for _, drafter in kept.values())


def prepare_one(name: str, target: Path, *, token: str | None = None, offline: bool = False) -> PreparedDrafter | None:
    """Resolve "auto", a name of the table, a draft model's directory or id, or a head; None for "none".

    Args:
        target: its directory or GGUF file.
        token, offline: for models from the hub.

    Raises:
        IncompatibleDrafterError, CheckpointError: as `prepare`.
    """
    if name == "none":
        return None
    if name in DRAFTERS:
        return PreparedDrafter(name)
    if name in ("auto", DRAFT_MODEL):
        return _find_embedded(name, target)
    own = HeadKind(name) if name in OWN_HEADS else None
    path = target if own is not None else _resolve_path(name, token=token, offline=offline)
    head = find_head(path, own, inside_target=path.resolve() == target.resolve())
    if head is not None:
        return PreparedDrafter(head.kind.value, path, head)
    if own is not None:
        raise IncompatibleDrafterError(f"{target} is a GGUF file that holds no {name} head: use another drafter")
    return PreparedDrafter(DRAFT_MODEL, path)


def _find_embedded(name: str, target: Path) -> PreparedDrafter:
    directory = target / EMBEDDED
    if (directory / "config.json").is_file():
        head = find_head(directory)
        if head is None:
            reason = too_large(directory, read_model_config(directory), read_model_config(target)) if name == "auto" else ""
            notice = f"{directory} is not used: {reason} (--drafter {DRAFT_MODEL} uses it)"
            return PreparedDrafter(NgramDrafter.name, notice=notice) if reason else PreparedDrafter(DRAFT_MODEL, directory)
        if name == "auto":
            return PreparedDrafter(head.kind.value, directory, head)
        raise IncompatibleDrafterError(f"{directory} holds a {head.kind.value} drafter and no draft model: use drafter='auto'")
    if name == "auto":
        head = _find_beside(target, ASSISTANT) or _find_beside(target, EMBEDDED) or _find_own_module(target)
        if head is None:
            return PreparedDrafter(NgramDrafter.name)
        return PreparedDrafter(head.kind.value, head.path, head, is_optional=head.kind is HeadKind.MTP)
    raise IncompatibleDrafterError(
        f"{target} has no embedded draft model (folder {EMBEDDED!r}): give a draft model's directory or id instead"
    )


def _find_beside(target: Path, name: str) -> HeadFiles | None:
    """Open the head in a folder of the target, a directory or the only GGUF file there; None if there is none for this model.

    The folder next to a GGUF file may be meant for another GGUF file.
    """
    folder = (target.parent if is_gguf(target) else target) / name
    if (folder / "config.json").is_file():
        head = find_head(folder)
    else:
        files = gguf_models(folder) if folder.is_dir() else []
        head = find_head(files[0]) if len(files) == 1 else None
    if head is None or not is_gguf(target):
        return head
    sizes = read_model_config(target)
    return head if fits_target(head, sizes) or fits_block(head, sizes) else None


def _find_own_module(target: Path) -> HeadFiles | None:
    """Open the MTP module in the target's own checkpoint; None if there is none that can be read."""
    try:
        head = find_head(target, inside_target=True)
    except (CheckpointError, IncompatibleDrafterError, BackendUnavailableError):
        return None  # an unreadable checkpoint is reported when the target is loaded
    return head if head is not None and head.kind is HeadKind.MTP else None


def _resolve_path(name: str, *, token: str | None, offline: bool) -> Path:
    if is_head_file(name):
        return Path(name)
    try:
        return resolve_model(name, token=token, offline=offline, with_heads=True)
    except CheckpointError as error:
        close = get_close_matches(name, NAMES, 1)
        meant = f" (did you mean {close[0]}?)" if close else ""
        raise IncompatibleDrafterError(
            f"drafter {name!r}{meant} is neither one of {', '.join(NAMES)} nor a draft model: {error}"
        ) from error


def find_head(path: Path, kind: HeadKind | None = None, *, inside_target: bool = False) -> HeadFiles | None:
    """Open the files of a head; None if they hold a language model.

    Args:
        kind: the only kind accepted.
        inside_target: the files are the target's own.

    Raises:
        CheckpointError: a file is damaged.
        IncompatibleDrafterError: it is of another kind, or of a method without a drafter.
    """
    files = open_gguf_eagle(path) or open_gguf_assistant(path) or open_gguf_block(path) if is_gguf(path) else HeadFiles.open(path)
    if files is None and inside_target:
        files = open_gguf_module(path)
    if files is None:
        return None
    is_part = files.kind is HeadKind.MTP and not files.is_speculators and not inside_target  # such a module works only with its own model
    if kind is None and (files.kind is HeadKind.LANGUAGE_MODEL or is_part):
        return None
    if kind not in (None, files.kind):
        raise IncompatibleDrafterError(
            f"{path} holds no {kind.value} head: drafter={kind.value!r} is one inside the target's own checkpoint; "
            "give the directory of a head, or use another drafter"
        )
    if files.kind not in HEADS:
        known = ", ".join(one.value for one in HEADS)
        raise IncompatibleDrafterError(f"{path} is a {files.kind.value} drafter, which is not supported; those of {known} are")
    return files
