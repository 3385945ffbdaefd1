"""Chooses the convention that a head which drafts with pairs is opened with."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from paceline.config import cache_directory
from paceline.drafters.head_files import HeadFiles
from paceline.drafters.pairs.calibration import Calibration, KnownCalibrations, calibrate
from paceline.drafters.pairs.config import PairConfig
from paceline.drafters.pairs.head import PairHead
from paceline.drafters.pairs.target_text import LENGTH, draw_text
from paceline.drafters.target import LoadedTarget
from paceline.models.checkpoint import weight_files

ConfigT = TypeVar("ConfigT", bound=PairConfig)


def known_calibration(files: HeadFiles, target: Path, candidates: Sequence[ConfigT]) -> KnownCalibrations[ConfigT]:
    """What was found in earlier runs for a head and the target's checkpoint."""
    return KnownCalibrations(cache_directory(), candidates, files.files, weight_files(target))


def settle(
    files: HeadFiles,
    candidates: Sequence[ConfigT],
    open_head: Callable[[ConfigT, int], PairHead],
    target: LoadedTarget,
    vocab_size: int,
) -> tuple[ConfigT, tuple[str, ...]]:
    """The convention to open a head with, and a line where head and target do not match.

    Args:
        candidates: what the files admit, the documented default first. A single one is tried as well, because the head may be
            another target's, unless the user named it.
        open_head: opens the head under one of them, prepared for a number of positions.
        vocab_size: the head reads ids below it.
    """
    named = target.head_options.variant_for(files.kind)
    if named is not None and named.settles and len(candidates) == 1:
        return candidates[0], ()
    known = known_calibration(files, target.directory, candidates)
    found = known.get()
    if found is None:
        found = _try_out(candidates, open_head, target, vocab_size)
        if found is None:
            return next((one for one in candidates if set(one.boundaries) <= set(target.collected_layers)), candidates[0]), ()
        known.put(found)
    if found.is_match:
        return found.config, ()
    kind = found.config.kind.value
    rate = f"guesses {found.agreement:.0%} of this target's tokens, heads made for a model guess 50 to 80 %"
    if _holds(target.directory, files.path):
        line = f"the {kind} head inside {target.directory} {rate}: it was not trained together with these weights and will seldom help"
    else:
        line = f"the {kind} head {files.path} {rate}: it was made for another one than {target.directory} and will seldom help"
    return found.config, (line,)


def _holds(target: Path, head: Path) -> bool:
    """Whether a head's files are those of its target's checkpoint."""
    return head.resolve() == target.resolve()


def _try_out(
    candidates: Sequence[ConfigT], open_head: Callable[[ConfigT, int], PairHead], target: LoadedTarget, vocab_size: int
) -> Calibration[ConfigT] | None:
    """None where the runtime does not collect what they read, or its cache has no room for a text."""
    if not {boundary for one in candidates for boundary in one.boundaries} <= set(target.collected_layers):
        return None
    text = draw_text(target.runtime, target.cache, target.tokenizer, vocab_size=vocab_size, max_model_len=target.max_model_len)
    return None if text is None else calibrate(candidates, lambda config: open_head(config, LENGTH + 1), text, target.collected_layers)
