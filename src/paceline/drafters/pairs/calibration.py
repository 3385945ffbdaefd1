"""Which of several conventions a head was trained with, where its files do not say: the one whose guesses agree best with its target.

A wrong choice costs only speed, as the target verifies every token; so conventions can be tried. Short texts drawn from the target are run
through the head: every pair with the target's own feature (one step), and once more with the feature that the head made of it (two
steps: only there does it show how features are handed on). The convention whose best guess is most often the target's is taken; where
none stands out, the documented default. The answer is stored for the same files of head and target.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.drafters.pairs.cache import TrueRows
from paceline.drafters.pairs.config import PairConfig
from paceline.drafters.pairs.head import DraftedRows, PairHead
from paceline.drafters.pairs.target_text import TargetText
from paceline.kv_cache.paged import BLOCK_SIZE
from paceline.kv_cache.row_plan import blocks_for
from paceline.runtimes.base import BoolArray, FloatArray, IntArray, RowRange
from paceline.runtimes.profile_cache import ProfileCache, profile_key

LEAST_AGREEMENT = 0.1
"""Share of right first guesses: heads of another model stay below it, matching ones reach 50 to 80 %."""

_FORMAT = 1  # of the stored answer
_WHOLE_BYTES = 4 << 20  # of larger files only pieces are read
_NUM_PIECES, _PIECE_BYTES = 64, 4096

ConfigT = TypeVar("ConfigT", bound=PairConfig)


@dataclass(frozen=True, slots=True)
class Calibration(Generic[ConfigT]):
    """What was found.

    Attributes:
        config: the convention to use.
        agreement: share of first guesses that were the target's.
    """

    config: ConfigT
    agreement: float

    @property
    def is_match(self) -> bool:
        """Whether this can be a head of this target."""
        return self.agreement >= LEAST_AGREEMENT


class KnownCalibrations(Generic[ConfigT]):
    """The answer for one head and one target, stored between runs.

    Args:
        directory: where answers are stored; None = nowhere.
        candidates: what the files admit, the default first.
        head_files, target_files: what the answer depends on.
    """

    def __init__(
        self, directory: Path | None, candidates: Sequence[ConfigT], head_files: Sequence[Path], target_files: Sequence[Path]
    ) -> None:
        self._facts, self._candidates = ProfileCache(directory), candidates
        self._key = ""
        if directory is not None:
            self._key = profile_key("calibration", _FORMAT, tuple(candidates), _digest(head_files), _digest(target_files))

    def get(self) -> Calibration[ConfigT] | None:
        """The stored answer; None if there is none, or it is invalid."""
        fact = self._facts.get(self._key)
        if not isinstance(fact, dict):
            return None
        choice, agreement = fact.get("choice"), fact.get("agreement")
        if not isinstance(choice, int) or not 0 <= choice < len(self._candidates) or not isinstance(agreement, int | float):
            return None
        return Calibration(self._candidates[choice], float(agreement))

    def put(self, found: Calibration[ConfigT]) -> None:
        """Store an answer."""
        self._facts.put(self._key, {"choice": list(self._candidates).index(found.config), "agreement": round(found.agreement, 4)})


def calibrate(
    candidates: Sequence[ConfigT], open_head: Callable[[ConfigT], PairHead], text: TargetText, layers: Sequence[int]
) -> Calibration[ConfigT]:
    """The candidate that agrees best with the target; the first one where none does, or none does so clearly.

    Args:
        open_head: opens the head under a convention; it need only be prepared for `text`.
        layers: the boundaries that `text` has.
    """
    hits: dict[PairConfig, BoolArray] = {}
    for config in candidates:
        if (network := _network(config)) not in hits:
            hits[network] = _Reading.of(open_head(config), text, layers).hits
    agreement = max(float(found.mean()) for found in hits.values())
    if agreement < LEAST_AGREEMENT:
        return Calibration(candidates[0], agreement)
    chosen = _clear_best(hits)
    left = [config for config in candidates if _network(config) == chosen]
    if len(left) == 1:
        return Calibration(left[0], agreement)
    return Calibration(_clear_best({config: _second_steps(open_head(config), text, layers) for config in left}), agreement)


def _clear_best(hits: Mapping[ConfigT, BoolArray]) -> ConfigT:
    """The candidate with most hits, the earliest on ties; the first one if the lead may be chance."""
    default = next(iter(hits))
    best = max(hits, key=lambda config: int(hits[config].sum()))
    gained, lost = int((hits[best] & ~hits[default]).sum()), int((hits[default] & ~hits[best]).sum())
    return best if gained - lost > (gained + lost) ** 0.5 else default


def _network(config: PairConfig) -> PairConfig:
    """What decides the first guesses: everything but how features are handed on."""
    return replace(config, normed_recurrence=False)


@dataclass(frozen=True, slots=True)
class _Reading:
    """A text read by a head.

    Attributes:
        hits: [B, T - 1] whether pair t's best guess is what the target says behind its token.
        features: [B, T - 1, Hd] for the pairs behind.
    """

    hits: BoolArray
    features: FloatArray

    @classmethod
    def of(cls, head: PairHead, text: TargetText, layers: Sequence[int]) -> "_Reading":
        """Every pair with the target's feature; the rows stay in the head's cache."""
        count, num_pairs = text.token_ids.shape[0], text.token_ids.shape[1] - 1
        head.runtime.allocate_kv(count * blocks_for(num_pairs + 1, BLOCK_SIZE))
        inputs = _features(head.config, text, layers)
        hits, features = [], []
        for index in range(count):  # one by one, as a vocabulary may be large
            rows = RowRange(0, num_pairs, 1, _table(index, num_pairs), None, 1)
            outputs = head.run_true([TrueRows(text.token_ids[index, 1:], inputs[index, :-1], rows)], wants_logits=True, of_all=True)
            hits.append(_said(head, outputs.logits) == text.argmaxes[index, 1:])
            features.append(outputs.features.copy())
        return cls(np.array(hits), np.array(features))


def _second_steps(head: PairHead, text: TargetText, layers: Sequence[int]) -> BoolArray:
    """[B, T - 2] whether the guess behind pair t and one drafted pair is the target's, the drafted token being the text's.

    The drafted pair behind pair t takes the slot of pair t + 1, which no earlier pair sees: so the last one runs first.
    """
    features = _Reading.of(head, text, layers).features
    count, num_pairs = features.shape[:2]
    hits = np.zeros((count, num_pairs - 1), np.bool_)
    for pair in reversed(range(num_pairs - 1)):
        drafts = [
            DraftedRows(
                [int(text.token_ids[index, pair + 2])],
                features[index, pair : pair + 1],
                [pair + 1],
                RowRange(0, 1, pair + 2, _table(index, num_pairs), None, 1),
                [0],
            )
            for index in range(count)
        ]
        hits[:, pair] = _said(head, head.run_drafted(drafts).logits) == text.argmaxes[:, pair + 2]
    return hits


def _features(config: PairConfig, text: TargetText, layers: Sequence[int]) -> FloatArray:
    """[B, T, F] the features of a head's true pairs."""
    if not config.boundaries:
        return text.hidden_states
    chosen = text.collected[:, [layers.index(boundary) for boundary in config.boundaries]]
    return chosen.transpose(0, 2, 1, 3).reshape(*text.token_ids.shape, -1)


def _said(head: PairHead, logits: FloatArray) -> NDArray[np.int64]:
    """The target's ids of the best guesses."""
    best: NDArray[np.int64] = logits.argmax(axis=-1)
    return best if head.target_ids is None else head.target_ids[best]


def _table(index: int, num_pairs: int) -> IntArray:
    """Blocks of text `index`."""
    size = blocks_for(num_pairs + 1, BLOCK_SIZE)
    return np.arange(index * size, (index + 1) * size, dtype=np.int32)


def _digest(files: Sequence[Path]) -> str:
    """A hash of the files' sizes and pieces of them; of small files as a whole."""
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{size} ".encode())
        with path.open("rb") as file:
            if size <= _WHOLE_BYTES:
                digest.update(file.read())
                continue
            for piece in range(_NUM_PIECES):
                file.seek((size - _PIECE_BYTES) * piece // (_NUM_PIECES - 1))
                digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()
