"""Network of an assistant. Its attention layers compute queries only, and attend to the target's keys and values.

Source: Gemma 4's assistants in transformers 5.23. Deviations: sliding layers attend to the target's window, in transformers to two more
rows; tokens outside of the most probable clusters have probability 0, in transformers the lowest logit of the tokens inside.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from paceline.drafters.gemma4_assistant.checkpoint import Assistant
from paceline.kv_cache.cache import BLOCK_SIZE, CachedSequence
from paceline.kv_cache.row_plan import num_blocks_for
from paceline.runtimes.base import FloatArray, ForwardBatch, ForwardOutput, LogitsRows, Network, RowRange
from paceline.runtimes.decoder import LOGITS, Ops, Value, decoder_layer
from paceline.runtimes.logits_summary import RowSampling, SummaryOptions

EMBEDDING, FEATURE, FINAL_HIDDEN_STATES, CENTROIDS = "embedding", "feature", "states", "centroids"
"""Names of inputs: embedding and feature. Names of results: feature, states (after the final norm) and centroids (scores of clusters)."""


@dataclass(frozen=True, slots=True)
class TreeLevelInput:
    """Inputs of a pass for one request: the N nodes of one level of its draft tree."""

    token_ids: Sequence[int]  # [N] tokens of the nodes
    features: FloatArray  # [N, E] output `feature` of the parents; for the root, the target's hidden state of the token before it
    sequence: CachedSequence  # the request's sequence in the target's cache, which contains all tokens before the root


class AssistantNetwork:
    """Runs an assistant. It has no KV cache of its own: features contain all that it keeps of earlier draft tokens.

    Args:
        target: the target, whose keys, values and scaled token embeddings are read.
    """

    def __init__(self, assistant: Assistant, target: Network, *, max_model_len: int) -> None:
        self.assistant, self._target = assistant, target
        self._network = target.network_on_shared_kv(
            self._define_network, assistant.config.layers, assistant.weights, max_model_len=max_model_len
        )

    def forward(self, levels: Sequence[TreeLevelInput], summary: SummaryOptions | None, sampling: RowSampling | None) -> ForwardOutput:
        """Run one pass over tree levels of several requests. `summary`, `sampling`: see `LogitsRows`.

        Returns:
            `feature` [T, E], the input of each node's children, and `logits` [T, V]. Assistants with clusters return `states` and
            `centroids` instead of logits; see `cluster_candidates`.
        """
        starts = [0, *accumulate(len(level.token_ids) for level in levels)]
        token_ids = np.array([token for level in levels for token in level.token_ids], np.int32)
        features = levels[0].features if len(levels) == 1 else np.concatenate([level.features for level in levels])
        ranges = tuple([_row_range(level, start) for level, start in zip(levels, starts, strict=False)])
        # Gemma 4 gives all draft tokens the position of the last committed token
        positions = np.repeat(np.array([level.sequence.committed_len for level in levels], np.int32), np.diff(starts))
        inputs = {EMBEDDING: self._target.embed(token_ids), FEATURE: features}
        rows = np.arange(starts[-1], dtype=np.int32)
        return self._network.forward(inputs, ForwardBatch(positions, ranges), LogitsRows(rows, summary, sampling))

    def cluster_candidates(self, output: ForwardOutput, row: int, vocab_size: int) -> tuple[NDArray[np.int64], FloatArray]:
        """Return the ids of all tokens in a node's most probable clusters, ascending and below `vocab_size`, and their logits."""
        clusters, ordering = self.assistant.config.clusters, self.assistant.token_ordering
        if clusters is None or ordering is None:
            raise RuntimeError("this assistant has no clusters: its logits are those of all tokens")
        scores = output.results[CENTROIDS][row]
        top_clusters = np.argpartition(-scores, clusters.top_k - 1)[: clusters.top_k]
        ids = np.sort(ordering.reshape(clusters.num_clusters, -1)[top_clusters].ravel())
        ids = ids[: np.searchsorted(ids, vocab_size)]
        return ids, self.assistant.weights.read_rows("embedding.weight", ids.astype(np.int32)) @ output.results[FINAL_HIDDEN_STATES][row]

    def _define_network(self, ops: Ops[Value]) -> Mapping[str, Value]:
        config = self.assistant.config
        size = config.target_hidden_size
        (x,) = ops.linear(ops.concat(ops.input(EMBEDDING, size), ops.input(FEATURE, size)), "pre_projection")
        for index, layer in enumerate(config.layers.layers):
            x = decoder_layer(ops, layer, x, index)
        states = ops.rms_norm(x, "final_norm")
        (feature,) = ops.linear(states, "post_projection")
        if config.clusters is not None:
            return {FEATURE: feature, FINAL_HIDDEN_STATES: states, CENTROIDS: ops.linear(states, "centroids")[0]}
        return {FEATURE: feature, LOGITS: ops.lm_head(ops.logits_rows(states), "embedding")}


def _row_range(level: TreeLevelInput, start: int) -> RowRange:
    """Return the row range of a level, whose rows attend to the target's cached rows, but not to themselves or one another.

    The runtime expects a block table that includes the new rows, although nothing is written there. Its last entries repeat a block of the
    sequence, so that no block of another sequence is read.
    """
    sequence, count = level.sequence, len(level.token_ids)
    cached_blocks = sequence.block_table
    table = np.full(num_blocks_for(sequence.committed_len + count, BLOCK_SIZE), cached_blocks[-1], np.int32)
    table[: len(cached_blocks)] = cached_blocks[: len(table)]
    mask = np.zeros((count, count), np.bool_)
    return RowRange(start, count, sequence.committed_len, table, mask, 0, sequence.id)
