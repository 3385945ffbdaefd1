"""All drafters: create drafter objects from the names that a user gives.

`prepare_drafters` opens the files before the target is loaded. So combinations that cannot work fail early, and it is known
which hidden states of the target the heads read. `PreparedDrafters.open` creates the drafters once the target is loaded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from paceline.config import EngineConfig, SpeculationConfig
from paceline.drafters.block import open_block_drafter
from paceline.drafters.block.config import BLOCK_HEAD_KINDS, read_block_config
from paceline.drafters.block.config import fits_target as fits_block
from paceline.drafters.block.gguf import open_gguf_block
from paceline.drafters.draft_model import DraftModelDrafter, open_draft_model, too_large_reason
from paceline.drafters.draft_vocab import read_corpus
from paceline.drafters.eagle import open_eagle_drafter
from paceline.drafters.eagle.checkpoint import open_gguf_eagle
from paceline.drafters.eagle.config import read_eagle_config
from paceline.drafters.fetched import read_fetched_drafter
from paceline.drafters.gemma4_assistant.checkpoint import fits_target, open_gguf_assistant
from paceline.drafters.gemma4_assistant.drafter import open_assistant
from paceline.drafters.head_files import HeadFiles, is_head_file
from paceline.drafters.head_kinds import HeadKind
from paceline.drafters.medusa.drafter import open_medusa
from paceline.drafters.mtp import open_gguf_module, open_mtp
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.options import HeadOptions
from paceline.drafters.packaged import find_packaged_drafter
from paceline.drafters.pard2 import open_pard2, read_pard2_config
from paceline.drafters.prediction import PredictionDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.drafters.target import LoadedTarget
from paceline.errors import BackendUnavailableError, CapacityError, CheckpointError, ConfigError, IncompatibleDrafterError
from paceline.hub import gguf_models, resolve_model
from paceline.models.checkpoint import is_gguf, read_model_config
from paceline.speculation.drafter import Drafter, DrafterNeeds

__all__ = [
    "DRAFT_SUBFOLDER", "DRAFTER_NAMES", "HeadOptions", "LoadedTarget", "PreparedDrafter", "PreparedDrafters", "check_draft_adapter",
    "open_head_files", "prepare_drafters", "prepare_drafter",
]  # fmt: skip

DRAFT_SUBFOLDER = "draft"
"""Subfolder of a model's directory with a draft model or head for it."""

ASSISTANT_SUBFOLDER = "assistant"
"""Subfolder of a model's directory with a drafting head for it."""

MODEL_FREE_DRAFTERS: dict[str, Callable[[], Drafter]] = {"ngram": NgramDrafter, "suffix": SuffixDrafter, "prediction": PredictionDrafter}
"""Constructors of the drafters that need no files, by drafter name."""

HEAD_OPENERS: dict[HeadKind, Callable[[HeadFiles, LoadedTarget], Drafter]] = {
    HeadKind.MEDUSA: open_medusa,
    HeadKind.EAGLE: open_eagle_drafter,
    HeadKind.EAGLE3: open_eagle_drafter,
    HeadKind.PEAGLE: open_eagle_drafter,
    HeadKind.MTP: open_mtp,
    HeadKind.GEMMA4_ASSISTANT: open_assistant,
    HeadKind.PARD2: open_pard2,
    **dict.fromkeys(BLOCK_HEAD_KINDS, open_block_drafter),
}
"""Functions that create a drafter from the files of a head, by kind of head."""

DRAFT_MODEL = DraftModelDrafter.name
DRAFTERS_IN_TARGET_FILES = (HeadKind.MEDUSA.value, HeadKind.MTP.value)
"""Names of drafters whose head can be in the target's own files."""

DRAFTER_NAMES = ("auto", "none", *MODEL_FREE_DRAFTERS, DRAFT_MODEL, *DRAFTERS_IN_TARGET_FILES)


@dataclass(frozen=True, slots=True)
class PreparedDrafter:
    """A drafter whose name is resolved and whose files are opened, but whose target is not loaded yet."""

    name: str
    path: Path | None = None  # path of the drafter's files; None if the drafter needs no files
    head: HeadFiles | None = None  # opened files of a head; None if the drafter is a draft model or needs no files
    is_optional: bool = False  # head found by "auto": if it cannot be opened, suffix lookup drafts alone
    notice: str = ""  # message for the user: why "auto" does not use a drafter that it found; "" = none

    def open(self, target: LoadedTarget) -> Drafter | None:
        """Create the drafter for the loaded target; None if it is optional and cannot be opened.

        Raises:
            IncompatibleDrafterError: the drafter was made for another target.
            CheckpointError: tensors or config values of the drafter are missing or damaged.
        """
        if self.head is not None:
            try:
                return HEAD_OPENERS[self.head.kind](self.head, target)
            except (CheckpointError, IncompatibleDrafterError, CapacityError):
                if not self.is_optional:
                    raise
                return None
        return MODEL_FREE_DRAFTERS[self.name]() if self.path is None else open_draft_model(self.path, target)


@dataclass(frozen=True, slots=True)
class PreparedDrafters:
    """All drafters of an engine, before its target is loaded."""

    drafters: tuple[PreparedDrafter, ...]  # in the order in which the user named them; none for plain decoding
    layer_boundaries: tuple[int, ...]  # target layer boundaries whose hidden states the drafters read, ascending
    drafter_objects: Sequence[Drafter] = ()  # `Drafter` objects that the user passed instead of names

    @property
    def notices(self) -> list[str]:
        """Messages for the user about drafters that "auto" found and does not use."""
        return [drafter.notice for drafter in self.drafters if drafter.notice]

    def open(self, target: LoadedTarget) -> list[Drafter]:
        """Create the drafters for the loaded target; an empty list for plain decoding. Errors as for `PreparedDrafter.open`."""
        if self.drafter_objects:
            return list(self.drafter_objects)
        opened = [drafter for prepared in self.drafters if (drafter := prepared.open(target)) is not None]
        names = [drafter.name for drafter in opened]
        for index, drafter in enumerate(opened):  # make names unique: requests select drafters by name
            if (number := names[:index].count(drafter.name)) > 0:
                drafter.name = f"{drafter.name}_{number + 1}"
        return opened


def prepare_drafters(
    target: Path, engine: EngineConfig, speculation: SpeculationConfig, drafter_objects: Sequence[Drafter] = ()
) -> PreparedDrafters:
    """Resolve the drafter names in `speculation.drafter` and open the drafters' files.

    Args:
        target: directory or GGUF file of the target.
        drafter_objects: `Drafter` objects that the user passed. If there are any, names are ignored and no files are opened.

    Raises:
        IncompatibleDrafterError: a drafter was made for another target, is not supported, or is named twice.
        CheckpointError: files are damaged.
        ConfigError: an option or a draft adapter applies to none of the drafters.
    """
    if drafter_objects:
        return PreparedDrafters((), DrafterNeeds.union(drafter_objects).layers, drafter_objects)
    names = [speculation.drafter] if isinstance(speculation.drafter, str) else speculation.drafter
    options = HeadOptions.parse(speculation.drafter_options)
    prepared = [prepare_drafter(name, target, token=engine.hf_token, offline=engine.offline) for name in names]
    drafters = tuple(drafter for drafter in prepared if drafter is not None)
    options.check_all_used_by(drafter.name for drafter in drafters)
    if options.draft_vocab_size is not None:
        options.num_draft_ids(read_model_config(target).vocab_size)
    if options.draft_vocab_corpus is not None:
        read_corpus(options.draft_vocab_corpus)
    if len(names) > 1 and len(drafters) < len(names):
        raise IncompatibleDrafterError(f"drafter list {list(names)} holds 'none': name drafters only, or use 'none' alone")
    if len(names) > 1:
        drafters = _remove_duplicates(names, drafters)
    if "auto" in names and SuffixDrafter.name not in (drafter.name for drafter in drafters):
        # suffix lookup takes almost no time, and its drafts are accepted more often than those of ngram
        drafters = (PreparedDrafter(SuffixDrafter.name), *drafters)
    check_draft_adapter(speculation.draft_adapter, [drafter.name for drafter in drafters])
    layers = {layer for drafter in drafters if drafter.head is not None for layer in _read_layer_boundaries(drafter.head, target, options)}
    return PreparedDrafters(drafters, tuple(sorted(layers)))


def _read_layer_boundaries(head: HeadFiles, target: Path, options: HeadOptions) -> tuple[int, ...]:
    """Return the boundaries of target layers whose hidden states a head reads; boundary b is the input of layer b."""
    if head.kind in BLOCK_HEAD_KINDS:
        return read_block_config(head, read_model_config(target)).layer_boundaries
    if head.kind is HeadKind.PARD2:
        return read_pard2_config(head, read_model_config(target)).layer_boundaries
    is_eagle3 = head.kind in (HeadKind.EAGLE3, HeadKind.PEAGLE)
    return read_eagle_config(head, read_model_config(target), options).layer_boundaries if is_eagle3 else ()


def check_draft_adapter(directory: str | None, drafters: Sequence[str]) -> None:
    """Check that exactly one of the drafters is a draft model, if there is a LoRA adapter for the draft model.

    Args:
        directory: directory of the adapter; None = there is no adapter, nothing is checked.
        drafters: names of the drafters in use.

    Raises:
        ConfigError: there is an adapter, and no draft model or several.
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


def _remove_duplicates(names: Sequence[str], drafters: Sequence[PreparedDrafter]) -> tuple[PreparedDrafter, ...]:
    """Return the drafters once each: the user may also name the drafter that "auto" chooses."""
    drafter_by_name_and_path: dict[tuple[str, Path | None], tuple[str, PreparedDrafter]] = {}
    for name, drafter in zip(names, drafters, strict=True):
        earlier = drafter_by_name_and_path.setdefault((drafter.name, drafter.path and drafter.path.resolve()), (name, drafter))
        if earlier[1] is not drafter and (name == earlier[0] or "auto" not in (name, earlier[0])):
            how = f"{name!r} twice" if name == earlier[0] else f"{earlier[0]!r} and {name!r}, which are the same"
            raise IncompatibleDrafterError(f"drafter list {list(names)} holds {how}: name each drafter once")
    return tuple(drafter for _, drafter in drafter_by_name_and_path.values())


def prepare_drafter(name: str, target: Path, *, token: str | None = None, offline: bool = False) -> PreparedDrafter | None:
    """Resolve the name of one drafter and open its files; None for the name "none". Errors as for `prepare_drafters`.

    Args:
        name: one of `DRAFTER_NAMES`, or the path or hub id of a draft model or head.
        target: directory or GGUF file of the target.
        token, offline: access token of the hub; whether only downloaded models are used.
    """
    if name == "none":
        return None
    if name in MODEL_FREE_DRAFTERS:
        return PreparedDrafter(name)
    if name == "auto":
        return _find_fetched_drafter(target) or _find_drafter_in_target_files(name, target)
    if name == DRAFT_MODEL:
        return _find_drafter_in_target_files(name, target)
    kind_inside_target = HeadKind(name) if name in DRAFTERS_IN_TARGET_FILES else None
    path = target if kind_inside_target is not None else _resolve_drafter_path(name, token=token, offline=offline)
    head = open_head_files(path, kind_inside_target, inside_target=path.resolve() == target.resolve())
    if head is not None:
        return PreparedDrafter(head.kind.value, path, head)
    if kind_inside_target is not None:
        raise IncompatibleDrafterError(f"{target} is a GGUF file that holds no {name} head: use another drafter")
    return PreparedDrafter(DRAFT_MODEL, path)


def _find_fetched_drafter(target: Path) -> PreparedDrafter | None:
    """Open the drafter that `paceline doctor --fetch` downloaded for a target; None if it downloaded none.

    If its files are missing, damaged or made for another target, a drafter in the target's own files is used, with a notice.
    """
    fetched = read_fetched_drafter(target)
    if fetched is None:
        return None
    name, path = fetched
    try:
        head = open_head_files(path)
        if head is None:
            read_model_config(path)
        else:
            _read_layer_boundaries(head, target, HeadOptions())
    except (CheckpointError, IncompatibleDrafterError) as error:
        notice = f"{name}, downloaded for this model, is not used ({error}): paceline doctor MODEL --fetch downloads it again"
        return replace(_find_drafter_in_target_files("auto", target), notice=notice)
    return PreparedDrafter(DRAFT_MODEL if head is None else head.kind.value, path, head, is_optional=head is not None)


def _find_drafter_in_target_files(name: str, target: Path) -> PreparedDrafter:
    """Find the draft model ("draft_model") or any drafter ("auto") in the target's own files; suffix lookup if "auto" finds none."""
    directory = target / DRAFT_SUBFOLDER
    if (directory / "config.json").is_file():
        head = open_head_files(directory)
        if head is None:
            reason = too_large_reason(directory, read_model_config(directory), read_model_config(target)) if name == "auto" else ""
            notice = f"{directory} is not used: {reason} (--drafter {DRAFT_MODEL} uses it)"
            return PreparedDrafter(SuffixDrafter.name, notice=notice) if reason else PreparedDrafter(DRAFT_MODEL, directory)
        if name == "auto":
            return PreparedDrafter(head.kind.value, directory, head)
        raise IncompatibleDrafterError(f"{directory} holds a {head.kind.value} drafter and no draft model: use drafter='auto'")
    if name == "auto":
        head = (
            _open_head_in_folder(target, ASSISTANT_SUBFOLDER)
            or _open_head_in_folder(target, DRAFT_SUBFOLDER)
            or _open_mtp_module_of_target(target)
        )
        if head is None:
            return _open_packaged_drafter(target)
        return PreparedDrafter(head.kind.value, head.path, head, is_optional=head.kind is HeadKind.MTP)
    raise IncompatibleDrafterError(
        f"{target} has no embedded draft model (folder {DRAFT_SUBFOLDER!r}): give a draft model's directory or id instead"
    )


def _open_packaged_drafter(target: Path) -> PreparedDrafter:
    """Open the packaged head for a target; suffix lookup if there is none or, with a notice, if its files are missing or damaged."""
    path = find_packaged_drafter(target)
    if path is None:
        return PreparedDrafter(SuffixDrafter.name)
    try:
        head = open_head_files(path)
        if head is None:
            raise CheckpointError(f"{path} holds no head")
        _read_layer_boundaries(head, target, HeadOptions())
    except (CheckpointError, IncompatibleDrafterError) as error:
        notice = f"the packaged drafter is not used ({error}): install paceline again"
        return PreparedDrafter(SuffixDrafter.name, notice=notice)
    return PreparedDrafter(head.kind.value, path, head, is_optional=True)


def _open_head_in_folder(target: Path, name: str) -> HeadFiles | None:
    """Open the head in subfolder `name` of the target's directory; None if there is none.

    The subfolder is a model directory or contains a single GGUF file. The directory of a GGUF target may contain other GGUF models, so
    the head is returned only if its sizes fit the target's.
    """
    folder = (target.parent if is_gguf(target) else target) / name
    if (folder / "config.json").is_file():
        head = open_head_files(folder)
    else:
        files = gguf_models(folder) if folder.is_dir() else []
        head = open_head_files(files[0]) if len(files) == 1 else None
    if head is None or not is_gguf(target):
        return head
    sizes = read_model_config(target)
    return head if fits_target(head, sizes) or fits_block(head, sizes) else None


def _open_mtp_module_of_target(target: Path) -> HeadFiles | None:
    """Open the MTP module inside the target's own checkpoint; None if the checkpoint has none, or cannot be read."""
    try:
        head = open_head_files(target, inside_target=True)
    except (CheckpointError, IncompatibleDrafterError, BackendUnavailableError):
        return None  # loading the target raises the error later
    return head if head is not None and head.kind is HeadKind.MTP else None


def _resolve_drafter_path(name: str, *, token: str | None, offline: bool) -> Path:
    if is_head_file(name):
        return Path(name)
    try:
        return resolve_model(name, token=token, offline=offline, with_heads=True)
    except CheckpointError as error:
        if name in (kind.value for kind in HeadKind):
            text = "is a method whose head or draft model is a file of its own: give its directory or id"
            raise IncompatibleDrafterError(
                f"drafter {name!r} {text}; 'auto', the default, finds a drafter that comes with the target"
            ) from error
        close = get_close_matches(name, DRAFTER_NAMES, 1)
        suggestion = f" (did you mean {close[0]}?)" if close else ""
        raise IncompatibleDrafterError(
            f"drafter {name!r}{suggestion} is neither one of {', '.join(DRAFTER_NAMES)} nor a draft model: {error}"
        ) from error


def open_head_files(path: Path, kind: HeadKind | None = None, *, inside_target: bool = False) -> HeadFiles | None:
    """Open the files of a drafting head; None if they contain a language model.

    Args:
        kind: kind that the head must have; None = any kind.
        inside_target: `path` is the target's own checkpoint, which may contain a head.

    Raises:
        CheckpointError: a file is damaged.
        IncompatibleDrafterError: the head is of another kind than `kind`, or of a kind that is not supported.
    """
    files = open_gguf_eagle(path) or open_gguf_assistant(path) or open_gguf_block(path) if is_gguf(path) else HeadFiles.open(path)
    if files is None and inside_target:
        files = open_gguf_module(path)
    if files is None:
        return None
    # an MTP module in the checkpoint of a whole model drafts only for that model
    is_model_with_mtp = files.kind is HeadKind.MTP and not files.is_speculators and not inside_target
    if kind is None and (files.kind is HeadKind.LANGUAGE_MODEL or is_model_with_mtp):
        return None
    if kind not in (None, files.kind):
        raise IncompatibleDrafterError(
            f"{path} holds no {kind.value} head: drafter={kind.value!r} is one inside the target's own checkpoint; "
            "give the directory of a head, or use another drafter"
        )
    if files.kind not in HEAD_OPENERS:
        supported = ", ".join(head_kind.value for head_kind in HEAD_OPENERS)
        raise IncompatibleDrafterError(f"{path} is a {files.kind.value} drafter, which is not supported; those of {supported} are")
    return files
