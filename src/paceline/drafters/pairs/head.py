"""An opened head that drafts with pairs: its two networks over one cache, and the embeddings they are fed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from paceline.drafters.pairs.cache import TrueRows
from paceline.drafters.pairs.config import PairConfig
from paceline.models.config import WeightType
from paceline.models.weights import AnyTensor
from paceline.runtimes.base import FloatArray, ForwardBatch, IntArray, RowRange
from paceline.runtimes.head import HeadRuntime
from paceline.runtimes.rounding import embedding_rows

EMBEDDING, FEATURE, BOUNDARY = "embedding", "feature", "boundary"
"""Inputs of the networks; `FEATURE` is a result as well. Of several boundaries each is an input of its own, `boundary.0` …"""


@dataclass(frozen=True, slots=True)
class DraftedRows:
    """Pairs of drafted tokens to run for one request.

    Attributes:
        token_ids, features: [T] and [T, Hd], parents before their children.
        positions: [T].
        rows: where they stand.
        wanted: rows whose logits are wanted.
    """

    token_ids: Sequence[int]
    features: FloatArray
    positions: Sequence[int]
    rows: RowRange
    wanted: Sequence[int]


@dataclass(frozen=True, slots=True)
class PairOutputs:
    """What a pass over pairs returns: `logits` [R, Vd], and `features` [rows, Hd] for the pairs behind them. Views until the next pass."""

    logits: FloatArray
    features: FloatArray


class PairHead:
    """Runs pairs.

    Attributes:
        runtime: the network of true pairs; whoever makes its cache makes that of drafted ones too.
        target_ids: [Vd] the target's id of each draft id; None = the same.
        embedded_ids: token ids from here on have no embedding.
        notices: one-line remarks for the user.
    """

    def __init__(
        self,
        config: PairConfig,
        runtime: HeadRuntime,
        drafted: HeadRuntime,
        embedding: AnyTensor,
        *,
        target_ids: NDArray[np.int64] | None,
        notices: tuple[str, ...] = (),
    ) -> None:
        self.config, self.runtime, self._drafted = config, runtime, drafted
        self._embedding = embedding
        self.target_ids, self.notices = target_ids, notices
        self.embedded_ids = embedding.shape[0]

    def run_true(self, pairs: Sequence[TrueRows], *, wants_logits: bool, of_all: bool = False) -> PairOutputs:
        """One pass over true pairs of several requests.

        Args:
            wants_logits: of each one's last pair.
            of_all: of every pair.
        """
        counts = [len(one.token_ids) for one in pairs]
        starts = [0, *accumulate(counts)]
        ranges = _ranges([one.rows for one in pairs], starts)
        positions = np.concatenate(
            [
                np.arange(one.rows.cached_len - 1, one.rows.cached_len - 1 + count, dtype=np.int32)
                for one, count in zip(pairs, counts, strict=True)
            ]
        )
        if of_all:
            wanted = np.arange(starts[-1], dtype=np.int32)
        else:
            wanted = np.array([start - 1 for start in starts[1:]] if wants_logits else [], np.int32)
        token_ids = np.concatenate([one.token_ids for one in pairs])
        features = pairs[0].features if len(pairs) == 1 else np.concatenate([one.features for one in pairs])
        batch = ForwardBatch(token_ids, positions, ranges, wanted)
        return _outputs(self.runtime.forward({EMBEDDING: self._embed(token_ids), **self._named(features)}, batch))

    def run_drafted(self, drafts: Sequence[DraftedRows]) -> PairOutputs:
        """One pass over drafted pairs of several requests; features are those of the rows wanted alone."""
        starts = [0, *accumulate(len(one.token_ids) for one in drafts)]
        ranges = _ranges([one.rows for one in drafts], starts)
        wanted = [start + row for one, start in zip(drafts, starts, strict=False) for row in one.wanted]
        token_ids = np.array([token for one in drafts for token in one.token_ids], np.int32)
        positions = np.array([position for one in drafts for position in one.positions], np.int32)
        features = drafts[0].features if len(drafts) == 1 else np.concatenate([one.features for one in drafts])
        batch = ForwardBatch(token_ids, positions, ranges, np.array(wanted, np.int32))
        outputs = _outputs(self._drafted.forward({EMBEDDING: self._embed(token_ids), FEATURE: features}, batch))
        return PairOutputs(outputs.logits, outputs.features[wanted])

    def _named(self, features: FloatArray) -> dict[str, FloatArray]:
        """The features of true pairs by the names of the network's inputs."""
        size = self.config.feature_size
        if not self.config.boundaries:
            return {FEATURE: features}
        return {f"{BOUNDARY}.{chunk}": features[:, chunk * size : (chunk + 1) * size] for chunk in range(len(self.config.boundaries))}

    def _embed(self, token_ids: IntArray) -> FloatArray:
        """Rows as they are stored: heads were trained on unscaled ones."""
        return embedding_rows(self._embedding, token_ids, self.config.layers, WeightType.F32)


def _ranges(rows: Sequence[RowRange], starts: Sequence[int]) -> tuple[RowRange, ...]:
    return tuple(replace(one, start=start) if start else one for one, start in zip(rows, starts, strict=False))


def _outputs(results: Mapping[str, FloatArray]) -> PairOutputs:
    return PairOutputs(results["logits"], results[FEATURE])
