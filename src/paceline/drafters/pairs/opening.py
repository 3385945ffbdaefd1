"""What heads that draft with pairs need of their target, and which of their conventions they are opened with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from paceline.config import QuantOptions
from paceline.drafters.head_files import HeadFiles
from paceline.drafters.pairs.calibration import Calibration, KnownCalibrations, calibrate
from paceline.drafters.pairs.config import PairConfig, PairVariant
from paceline.drafters.pairs.head import PairHead
from paceline.drafters.pairs.target_text import LENGTH, draw_text
from paceline.kv_cache.paged import KVCache
from paceline.models.checkpoint import weight_files
from paceline.runtimes.base import Runtime
from paceline.tokenizer.tokenizer import Tokenizer

ConfigT = TypeVar("ConfigT", bound=PairConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTarget:
    """A loaded target.

    Attributes:
        directory: its checkpoint.
        cache: the runtime's.
        vocab_size: V of its logits.
        max_context: positions it is prepared for.
        collected: the boundaries its runtime collects, ascending.
        num_threads: for heads.
        tree_width: guesses behind a node; 1 = a chain.
        quant: how to quantise heads; None = they stay as they are stored.
        quant_directory: where quantised matrices are kept for the next time; None = nowhere.
        facts_directory: where it is kept which conventions were found; None = nowhere.
        variant: conventions the user names; nothing is tried out then.
    """

    directory: Path
    runtime: Runtime
    cache: KVCache
    tokenizer: Tokenizer
    vocab_size: int
    max_context: int
    collected: tuple[int, ...] = ()
    num_threads: int = 1
    tree_width: int = 1
    quant: QuantOptions | None = None
    quant_directory: Path | None = None
    facts_directory: Path | None = None
    variant: PairVariant | None = None


def known_calibration(
    files: HeadFiles, directory: Path, candidates: Sequence[ConfigT], facts_directory: Path | None
) -> KnownCalibrations[ConfigT]:
    """What was found in earlier runs for a head and the target in `directory`."""
    return KnownCalibrations(facts_directory, candidates, files.files, weight_files(directory))


def settle(
    files: HeadFiles, candidates: Sequence[ConfigT], open_head: Callable[[ConfigT, int], PairHead], target: PairTarget
) -> tuple[ConfigT, tuple[str, ...]]:
    """The convention to open a head with, and a line where head and target do not match.

    Args:
        candidates: what the files admit, the documented default first. A single one is tried as well, because the head may be
            another target's, unless the user named it.
        open_head: the head by one of them, prepared for so many positions.
    """
    if target.variant is not None and target.variant.settles and len(candidates) == 1:
        return candidates[0], ()
    known = known_calibration(files, target.directory, candidates, target.facts_directory)
    found = known.get()
    if found is None:
        found = _try_out(candidates, open_head, target)
        if found is None:
            return next((one for one in candidates if set(one.boundaries) <= set(target.collected)), candidates[0]), ()
        known.put(found)
    if found.is_match:
        return found.config, ()
    line = (
        f"the {found.config.kind.value} head {files.path} guesses {found.agreement:.0%} of this target's tokens, heads made for a model "
        f"guess 50 to 80 %: it was made for another one than {target.directory} and will seldom help"
    )
    return found.config, (line,)


def _try_out(
    candidates: Sequence[ConfigT], open_head: Callable[[ConfigT, int], PairHead], target: PairTarget
) -> Calibration[ConfigT] | None:
    """None where the runtime does not collect what they read, or its cache has no room for a text."""
    if not {boundary for one in candidates for boundary in one.boundaries} <= set(target.collected):
        return None
    text = draw_text(target.runtime, target.cache, target.tokenizer, vocab_size=target.vocab_size, max_context=target.max_context)
    return None if text is None else calibrate(candidates, lambda config: open_head(config, LENGTH + 1), text, target.collected)
