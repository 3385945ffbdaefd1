"""Runs the networks of EAGLE and MTP heads on feature pairs: a token and the feature (hidden state) of the position before it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.drafters.head_kinds import HeadKind
from paceline.drafters.recurrent_heads.cache import TargetFeaturePairs
from paceline.models.config import ModelConfig, WeightType
from paceline.models.weights import AnyTensor, Tensor
from paceline.runtimes.base import FloatArray, ForwardBatch, ForwardOutput, IntArray, LogitsRows, Network, RowRange
from paceline.runtimes.embedding import embedding_rows
from paceline.runtimes.logits_summary import RowSampling, SummaryOptions

EMBEDDING, FEATURE, BOUNDARY = "embedding", "feature", "boundary"
"""Names of network inputs. `FEATURE` is also the result with the predicted features. Each layer boundary is an input: `boundary.0`, …"""

Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentHeadConfig:
    """Configuration of a head that drafts token by token from features that it predicts itself."""

    kind: HeadKind
    layers: ModelConfig  # sizes of the decoder layers; `max_positions` is the context length that the head was trained with
    target_hidden_size: int
    layer_boundaries: tuple[int, ...] = ()  # a feature consists of the hidden states there, in this order; () = of the final hidden state
    feature_ends_with_final_state: bool = False  # a feature also contains the final hidden state, after those of the layer boundaries
    first_slot: int = 1  # first cache slot with a feature pair: 1, or 0 if a text's first token is run with a feature of zeros
    normed_recurrence: bool = False  # the predicted feature, which the head reads next, is taken after the final norm; False: before it
    has_own_embedding: bool = True  # otherwise the head uses the target's embedding
    has_own_lm_head: bool = False  # otherwise the head uses the target's lm_head

    @property
    def has_final_state(self) -> bool:
        """Whether the target's final hidden state is the feature or a part of it."""
        return self.feature_ends_with_final_state or not self.layer_boundaries

    @property
    def feature_inputs(self) -> list[str]:
        """Names of the network inputs of a feature that the target computes, one for each of its hidden states."""
        count = len(self.layer_boundaries) + self.has_final_state
        return [f"{BOUNDARY}.{index}" for index in range(count)] if self.layer_boundaries else [FEATURE]

    @property
    def feature_size(self) -> int:
        """Number of values of a feature that the target computes."""
        return self.target_hidden_size * len(self.feature_inputs)


@dataclass(frozen=True, slots=True)
class DraftFeaturePairs:
    """Inputs of a pass for T draft tokens of one request, with features that the head predicted."""

    token_ids: Sequence[int]  # [T] draft tokens, parents before their children
    features: FloatArray  # [T, E of the head] for each token the feature that the head predicted at its parent
    positions: Sequence[int]  # [T] positions of the tokens
    rows: RowRange  # cache rows of the tokens
    logit_rows: Sequence[int]  # indices of the tokens whose logits are returned; they are the last of `token_ids`


@dataclass(frozen=True, slots=True)
class MaskedFeaturePair:
    """Input for positions whose token and feature are not known yet: mask token, and learned mask feature [F] of a P-EAGLE head.

    If `feature` is None (PARD-2), the feature of the last known token is repeated.
    """

    mask_token_id: int
    feature: FloatArray | None

    def appended_to(self, pairs: TargetFeaturePairs, count: int) -> TargetFeaturePairs:
        """Return a copy of `pairs` with this masked pair appended `count` times."""
        num_unmasked = len(pairs.token_ids)
        token_ids = np.empty(num_unmasked + count, np.int32)
        features = np.empty((num_unmasked + count, pairs.features.shape[1]), np.float32)
        token_ids[:num_unmasked], token_ids[num_unmasked:] = pairs.token_ids, self.mask_token_id
        features[:num_unmasked], features[num_unmasked:] = pairs.features, pairs.features[-1] if self.feature is None else self.feature
        return TargetFeaturePairs(token_ids, features, pairs.rows._replace(num_rows=num_unmasked + count))


@dataclass(frozen=True, slots=True)
class FeaturePairOutputs:
    """Results of a pass over feature pairs. The arrays are overwritten by the next pass."""

    output: ForwardOutput  # all results of the network
    features: FloatArray  # [rows, E of the head] predicted features, the input for the next draft tokens

    @property
    def logits(self) -> FloatArray:
        """Logits [R, Vd] of the requested rows."""
        return self.output.logits


class RecurrentHead:
    """Runs a head that drafts token by token from features that it predicts itself.

    Args:
        runtime: network for features that the target computed.
        draft_network: network for features that the head predicted; it shares weights and KV cache with `runtime`.
        embedding: [V, E] token embedding.

    Attributes:
        target_ids: [Vd] target id of each draft id, ascending; None = draft ids are target ids.
        num_embedded_ids: number of rows of the embedding; token ids from this number on have no embedding.
        draft_vocab_size: if the draft vocabulary is the lowest ids, their number; otherwise None.
        masked_pair: input of the unknown positions of a head that drafts all positions in one pass; None for other heads.
        notices: messages for the user, shown at load.
        summary_options: which top tokens later passes return for each row of logits; None = none.
    """

    def __init__(
        self,
        config: RecurrentHeadConfig,
        runtime: Network,
        draft_network: Network,
        embedding: AnyTensor,
        *,
        target_ids: NDArray[np.int64] | None,
        draft_vocab_size: int | None = None,
        masked_pair: MaskedFeaturePair | None = None,
        notices: tuple[str, ...] = (),
    ) -> None:
        self.masked_pair, self.draft_vocab_size = masked_pair, draft_vocab_size
        self.config, self.runtime, self._draft_network = config, runtime, draft_network
        self.summary_options: SummaryOptions | None = None
        # indexing an ndarray is faster than indexing a memmap
        self._embedding = replace(embedding, array=np.asarray(embedding.array)) if isinstance(embedding, Tensor) else embedding
        self.target_ids, self.notices = target_ids, notices
        self.num_embedded_ids = embedding.shape[0]

    def run_target_feature_pairs(
        self,
        pairs: Sequence[TargetFeaturePairs],
        *,
        needs_logits: bool,
        needs_all_logits: bool = False,
        num_masked: Sequence[int] = (),
        sampling: RowSampling | None = None,
    ) -> FeaturePairOutputs:
        """Run one pass over committed tokens of several requests.

        Args:
            pairs: the tokens, with features that the target computed.
            needs_logits: return logits of each request's last token.
            needs_all_logits: return logits of all tokens instead.
            num_masked: for each request, how many masked positions to run after its last token; their logits are returned too.
            sampling: [R] noise keys and temperatures to draw one token from each row of logits; None = draw none.
        """
        if num_masked and self.masked_pair is not None:
            pairs = [self.masked_pair.appended_to(request_pairs, count) for request_pairs, count in zip(pairs, num_masked, strict=True)]
        counts = [len(request_pairs.token_ids) for request_pairs in pairs]
        starts = [0, *accumulate(counts)]
        firsts = [request_pairs.rows.cached_len - self.config.first_slot for request_pairs in pairs]
        positions = _concatenate([np.arange(first, first + count, dtype=np.int32) for first, count in zip(firsts, counts, strict=True)])
        if needs_all_logits:
            logit_rows = np.arange(starts[-1], dtype=np.int32)
        else:
            ends = zip(starts[1:], num_masked or [0] * len(pairs), strict=True) if needs_logits else ()
            logit_rows = np.array([row for end, count in ends for row in range(end - 1 - count, end)], np.int32)
        token_ids = _concatenate([request_pairs.token_ids for request_pairs in pairs])
        features, size = _concatenate([request_pairs.features for request_pairs in pairs]), self.config.target_hidden_size
        inputs = {name: features[:, index * size : (index + 1) * size] for index, name in enumerate(self.config.feature_inputs)}
        inputs[EMBEDDING] = self._embed(token_ids)
        batch = ForwardBatch(positions, _set_range_starts([request_pairs.rows for request_pairs in pairs], starts))
        output = self.runtime.forward(inputs, batch, LogitsRows(logit_rows, self.summary_options, sampling))
        return FeaturePairOutputs(output, output.results[FEATURE])

    def run_draft_feature_pairs(self, drafts: Sequence[DraftFeaturePairs], sampling: RowSampling | None = None) -> FeaturePairOutputs:
        """Run one pass over draft tokens of several requests; return logits and predicted features of their `logit_rows`."""
        starts = [0, *accumulate([len(draft.token_ids) for draft in drafts])]
        rows = np.array([start + row for draft, start in zip(drafts, starts, strict=False) for row in draft.logit_rows], np.int32)
        token_ids = np.array([token for draft in drafts for token in draft.token_ids], np.int32)
        positions = np.array([position for draft in drafts for position in draft.positions], np.int32)
        inputs = {EMBEDDING: self._embed(token_ids), FEATURE: _concatenate([draft.features for draft in drafts])}
        batch = ForwardBatch(positions, _set_range_starts([draft.rows for draft in drafts], starts))
        output = self._draft_network.forward(inputs, batch, LogitsRows(rows, self.summary_options, sampling))
        return FeaturePairOutputs(output, output.results[FEATURE][rows])

    def _embed(self, token_ids: IntArray) -> FloatArray:
        """Return token embeddings as stored: heads are trained on embeddings without the target's scale factor."""
        return embedding_rows(self._embedding, token_ids, self.config.layers, WeightType.F32)


def _set_range_starts(ranges: Sequence[RowRange], starts: Sequence[int]) -> tuple[RowRange, ...]:
    return tuple([row_range._replace(start=start) if start else row_range for row_range, start in zip(ranges, starts, strict=False)])


def _concatenate(arrays: Sequence[NDArray[Scalar]]) -> NDArray[Scalar]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
