"""Network of an assistant: layers that have only queries and attend to the target's keys and values.

Source: Gemma 4's assistants in transformers 5.23. Deviations: sliding layers attend to exactly the target's causal window, in transformers
to two rows more; tokens outside the best clusters have probability 0, in transformers the lowest logit inside.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from paceline.drafters.gemma4_assistant.checkpoint import Assistant
from paceline.kv_cache.cache import BLOCK_SIZE, CachedSequence
from paceline.kv_cache.row_plan import blocks_for
from paceline.runtimes.base import FloatArray, ForwardBatch, ForwardOutput, LogitsRows, Network, RowRange
from paceline.runtimes.decoder import LOGITS, Blocks, Value, decoder_layer
from paceline.runtimes.logits_summary import RowSampling, SummaryOptions

EMBEDDING, FEATURE, STATES, CENTROIDS = "embedding", "feature", "states", "centroids"
"""Inputs and results; `FEATURE` is both."""


@dataclass(frozen=True, slots=True)
class NodeRows:
    """Nodes of one request's tree, all of one depth.

    Attributes:
        token_ids: [F].
        features: [F, E] the target's final hidden state before the root, or the network's `feature` of the parent.
        sequence: the request's rows in the target's cache: all tokens before the root.
    """

    token_ids: Sequence[int]
    features: FloatArray
    sequence: CachedSequence


class AssistantNetwork:
    """Runs nodes of draft trees. It has no cache: a node is its token and its feature.

    Args:
        target: its keys and values are read, and its scaled embeddings.
    """

    def __init__(self, assistant: Assistant, target: Network, *, max_model_len: int) -> None:
        self.assistant, self._target = assistant, target
        self._network = target.shared_kv_reader(self._compose, assistant.config.layers, assistant.weights, max_model_len=max_model_len)

    def forward(self, nodes: Sequence[NodeRows], ranking: SummaryOptions | None, draws: RowSampling | None) -> ForwardOutput:
        """Run one pass; return `feature` [T, E] for each node's children, and `logits` [T, V], or `states` and `centroids` with clusters.

        Args:
            ranking, draws: as in `LogitsRows`.
        """
        starts = [0, *accumulate(len(one.token_ids) for one in nodes)]
        token_ids = np.array([token for one in nodes for token in one.token_ids], np.int32)
        features = nodes[0].features if len(nodes) == 1 else np.concatenate([one.features for one in nodes])
        ranges = tuple([_row_range(one, start) for one, start in zip(nodes, starts, strict=False)])
        # every node has the root's position, whatever its depth
        positions = np.repeat(np.array([one.sequence.committed_len for one in nodes], np.int32), [len(one.token_ids) for one in nodes])
        inputs = {EMBEDDING: self._target.embed(token_ids), FEATURE: features}
        rows = np.arange(starts[-1], dtype=np.int32)
        return self._network.forward(inputs, ForwardBatch(positions, ranges), LogitsRows(rows, ranking, draws))

    def cluster_candidates(self, output: ForwardOutput, row: int, vocab_size: int) -> tuple[NDArray[np.int64], FloatArray]:
        """Return the tokens of a node's best clusters: ids [N], ascending and below `vocab_size`, and their logits [N]."""
        clusters, ordering = self.assistant.config.clusters, self.assistant.token_ordering
        if clusters is None or ordering is None:
            raise RuntimeError("this assistant has no clusters: its logits are those of all tokens")
        scores = output.results[CENTROIDS][row]
        best = np.argpartition(-scores, clusters.num_best - 1)[: clusters.num_best]
        ids = np.sort(ordering.reshape(clusters.count, -1)[best].ravel())
        ids = ids[: np.searchsorted(ids, vocab_size)]
        return ids, self.assistant.weights.rows("embedding.weight", ids.astype(np.int32)) @ output.results[STATES][row]

    def _compose(self, blocks: Blocks[Value]) -> Mapping[str, Value]:
        config = self.assistant.config
        size = config.feature_size
        (x,) = blocks.linear(blocks.concat(blocks.input(EMBEDDING, size), blocks.input(FEATURE, size)), "pre_projection")
        for index, layer in enumerate(config.layers.layers):
            x = decoder_layer(blocks, layer, x, index)
        states = blocks.rms_norm(x, "final_norm")
        (feature,) = blocks.linear(states, "post_projection")
        if config.clusters is not None:
            return {FEATURE: feature, STATES: states, CENTROIDS: blocks.linear(states, "centroids")[0]}
        return {FEATURE: feature, LOGITS: blocks.lm_head(blocks.logits_rows(states), "embedding")}


def _row_range(nodes: NodeRows, start: int) -> RowRange:
    """Return rows that attend to the cached ones, but neither to themselves nor to one another.

    The block table is as long as if the rows were kept. Missing entries repeat the sequence's last block, so that no other sequence's
    block is read.
    """
    sequence, count = nodes.sequence, len(nodes.token_ids)
    own = sequence.block_table
    table = np.full(blocks_for(sequence.committed_len + count, BLOCK_SIZE), own[-1], np.int32)
    table[: len(own)] = own[: len(table)]
    mask = np.zeros((count, count), np.bool_)
    return RowRange(start, count, sequence.committed_len, table, mask, 0, sequence.id)
