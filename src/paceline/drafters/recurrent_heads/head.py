"""Passes over pairs of token and feature: the two networks of a head over one cache, and their inputs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.drafters.head_kinds import HeadKind
from paceline.drafters.recurrent_heads.cache import TruePairs
from paceline.models.config import ModelConfig, WeightType
from paceline.models.weights import AnyTensor, Tensor
from paceline.runtimes.base import FloatArray, ForwardBatch, ForwardOutput, IntArray, LogitsRows, Network, RowRange
from paceline.runtimes.embedding import embedding_rows
from paceline.runtimes.logits_summary import LogitsSummary, RowSampling, SummaryOptions

EMBEDDING, FEATURE, BOUNDARY = "embedding", "feature", "boundary"
"""Inputs of the networks; `FEATURE` is also a result. Each of several boundaries is an input of its own, `boundary.0` …"""

Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentHeadConfig:
    """Configuration of a head that feeds itself.

    Attributes:
        kind: the method.
        layers: sizes of its decoder layers; `max_positions` is the length it was trained with.
        feature_size: width of one of the target's activations.
        boundaries: the target's layer boundaries that it reads, ascending; none = the final hidden state.
        normed_recurrence: the next feature is the output after the final norm.
        has_own_embedding, has_own_lm_head: whether the file has them; otherwise they are the target's.
    """

    kind: HeadKind
    layers: ModelConfig
    feature_size: int
    boundaries: tuple[int, ...] = ()
    normed_recurrence: bool = False
    has_own_embedding: bool = True
    has_own_lm_head: bool = False

    @property
    def num_features(self) -> int:
        """Number of feature values of a true pair."""
        return self.feature_size * max(1, len(self.boundaries))


@dataclass(frozen=True, slots=True)
class DraftPairs:
    """Pairs of draft tokens to run for one request.

    Attributes:
        token_ids, features: [T] and [T, Hd], parents before their children.
        positions: [T].
        rows: their slots in the cache.
        wanted: rows whose logits are returned, the last ones.
    """

    token_ids: Sequence[int]
    features: FloatArray
    positions: Sequence[int]
    rows: RowRange
    wanted: Sequence[int]


@dataclass(frozen=True, slots=True)
class MaskedPair:
    """Input of a P-EAGLE head for positions with neither a known token nor a feature.

    Attributes:
        feature: [F].
    """

    token_id: int
    feature: FloatArray

    def append_to(self, pairs: TruePairs, count: int) -> TruePairs:
        """Return the pairs followed by `count` masked pairs."""
        known = len(pairs.token_ids)
        token_ids = np.empty(known + count, np.int32)
        features = np.empty((known + count, len(self.feature)), np.float32)
        token_ids[:known], token_ids[known:] = pairs.token_ids, self.token_id
        features[:known], features[known:] = pairs.features, self.feature
        return TruePairs(token_ids, features, pairs.rows._replace(num_rows=known + count))


@dataclass(frozen=True, slots=True)
class PairOutputs:
    """Results of a pass over pairs; views that are valid until the next pass.

    Attributes:
        output: results of the network.
        features: [rows, Hd] input features of the next pairs.
    """

    output: ForwardOutput
    features: FloatArray

    @property
    def logits(self) -> FloatArray:
        """Logits [R, Vd] of the rows whose logits were requested."""
        return self.output.logits

    def ranked(self) -> list[LogitsSummary]:
        """Return the ranking of each row of logits (`RecurrentHead.set_ranking`)."""
        return self.output.summaries


class RecurrentHead:
    """Runs pairs through a head's networks.

    Attributes:
        runtime: the network of true pairs; its cache is also that of drafted pairs.
        target_ids: [Vd] the target's id of each draft id; None = the same.
        embedded_ids: token ids from here on have no embedding.
        draft_vocab_size: number of first ids that have logits; None = all.
        masked: the masked pair of a head that drafts all positions in one pass, else None.
        notices: one-line remarks for the user.
    """

    def __init__(
        self,
        config: RecurrentHeadConfig,
        runtime: Network,
        drafted: Network,
        embedding: AnyTensor,
        *,
        target_ids: NDArray[np.int64] | None,
        draft_vocab_size: int | None = None,
        masked: MaskedPair | None = None,
        notices: tuple[str, ...] = (),
    ) -> None:
        self.masked, self.draft_vocab_size = masked, draft_vocab_size
        self.config, self.runtime, self._drafted = config, runtime, drafted
        self._ranking: SummaryOptions | None = None
        # a plain array is faster to index than a memmap
        self._embedding = replace(embedding, array=np.asarray(embedding.array)) if isinstance(embedding, Tensor) else embedding
        self.target_ids, self.notices = target_ids, notices
        self.embedded_ids = embedding.shape[0]
        self._feature_names = [f"{BOUNDARY}.{chunk}" for chunk in range(len(config.boundaries))] or [FEATURE]

    def set_ranking(self, ranking: SummaryOptions) -> None:
        """Set the ranking with which later passes summarise their rows of logits."""
        self._ranking = ranking

    def run_true_pairs(
        self,
        pairs: Sequence[TruePairs],
        *,
        needs_logits: bool,
        needs_all_logits: bool = False,
        num_masked: Sequence[int] = (),
        draws: RowSampling | None = None,
    ) -> PairOutputs:
        """Run one pass over true pairs of several requests.

        Args:
            needs_logits: return logits of each request's last pair.
            needs_all_logits: return logits of every pair instead.
            num_masked: masked pairs to run after each request's last one; their logits are returned as well.
            draws: [R] how the token of each row with logits is drawn; None = no draws.
        """
        if num_masked and self.masked is not None:
            pairs = [self.masked.append_to(one, count) for one, count in zip(pairs, num_masked, strict=True)]
        counts = [len(one.token_ids) for one in pairs]
        starts = [0, *accumulate(counts)]
        firsts = [one.rows.cached_len - 1 for one in pairs]
        positions = _concatenate([np.arange(first, first + count, dtype=np.int32) for first, count in zip(firsts, counts, strict=True)])
        if needs_all_logits:
            wanted = np.arange(starts[-1], dtype=np.int32)
        elif num_masked:
            wanted = _concatenate(
                [np.arange(end - 1 - count, end, dtype=np.int32) for end, count in zip(starts[1:], num_masked, strict=True)]
            )
        else:
            wanted = np.array([start - 1 for start in starts[1:]] if needs_logits else [], np.int32)
        token_ids = _concatenate([one.token_ids for one in pairs])
        inputs = self._feature_inputs(_concatenate([one.features for one in pairs]))
        inputs[EMBEDDING] = self._embed(token_ids)
        batch = ForwardBatch(positions, _with_start_rows([one.rows for one in pairs], starts))
        output = self.runtime.forward(inputs, batch, LogitsRows(wanted, self._ranking, draws))
        return PairOutputs(output, output.results[FEATURE])

    def run_draft_pairs(self, drafts: Sequence[DraftPairs], draws: RowSampling | None = None) -> PairOutputs:
        """Run one pass over draft pairs of several requests; the returned features are those of the `wanted` rows."""
        ranges: tuple[RowRange, ...]
        if len(drafts) == 1:
            (one,) = drafts
            ranges, features, wanted = (one.rows,), one.features, one.wanted
            token_ids, positions = np.array(one.token_ids, np.int32), np.array(one.positions, np.int32)
        else:
            starts = [0, *accumulate([len(one.token_ids) for one in drafts])]
            ranges = _with_start_rows([one.rows for one in drafts], starts)
            wanted = [start + row for one, start in zip(drafts, starts, strict=False) for row in one.wanted]
            token_ids = np.array([token for one in drafts for token in one.token_ids], np.int32)
            positions = np.array([position for one in drafts for position in one.positions], np.int32)
            features = np.concatenate([one.features for one in drafts])
        asked = LogitsRows(np.array(wanted, np.int32), self._ranking, draws)
        output = self._drafted.forward({EMBEDDING: self._embed(token_ids), FEATURE: features}, ForwardBatch(positions, ranges), asked)
        features = output.results[FEATURE]
        return PairOutputs(output, features[wanted[0] : wanted[-1] + 1] if isinstance(wanted, range) else features[wanted])

    def _feature_inputs(self, features: FloatArray) -> dict[str, FloatArray]:
        """Return the features of true pairs as the network's inputs, by name."""
        if not self.config.boundaries:
            return {FEATURE: features}
        size = self.config.feature_size
        return {name: features[:, chunk * size : (chunk + 1) * size] for chunk, name in enumerate(self._feature_names)}

    def _embed(self, token_ids: IntArray) -> FloatArray:
        """Look up embeddings as stored: heads were trained on unscaled ones."""
        return embedding_rows(self._embedding, token_ids, self.config.layers, WeightType.F32)


def _with_start_rows(rows: Sequence[RowRange], starts: Sequence[int]) -> tuple[RowRange, ...]:
    return tuple([one._replace(start=start) if start else one for one, start in zip(rows, starts, strict=False)])


def _concatenate(arrays: Sequence[NDArray[Scalar]]) -> NDArray[Scalar]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
